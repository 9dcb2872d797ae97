"""The sending side of a weight update, inside each train worker.

Takes any `TrainBackend`; drives its collective export and hands buckets to a transport. Knows no engine. Which methods
are called, and when, is the protocol in `session`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from drivetrain_backend_api import IllegalStateError
from drivetrain_backend_api.backend import TrainBackend
from drivetrain_backend_api.weights import Holders, WeightBucket, WeightExport
from drivetrain_infra.deadline import Deadline
from drivetrain_infra.ray_runtime import LOOPBACK, NodeAddress, this_node
from drivetrain_infra.weight_sync import disk
from drivetrain_infra.weight_sync.checksum import checksum_bucket
from drivetrain_infra.weight_sync.distributed import BroadcastChannel, ChannelAddress, open_store
from drivetrain_infra.weight_sync.errors import TransferError
from drivetrain_infra.weight_sync.plan_json import dump_plan


@dataclass(frozen=True, kw_only=True)
class SenderPlace:
    """Where a train rank is.

    Attributes:
        leads_stage: the pipeline stage whose weights it sends, or None.
    """

    rank: int
    leads_stage: int | None
    node: NodeAddress


@dataclass(frozen=True, kw_only=True)
class SentBucket:
    """What a rank sent.

    Attributes:
        checksum: of the bucket's tensors, before any transport touched them.
    """

    index: int
    nbytes: int
    checksum: int


class WeightSender:
    """Sends the weights of one train rank's backend."""

    def __init__(self, backend: TrainBackend) -> None:
        """Take a backend that is set up; it must be awake, or hold its weights, when an update begins."""
        self._backend = backend
        self._export: WeightExport | None = None
        self._store: TCPStore | None = None
        self._address: ChannelAddress | None = None
        self._channel: BroadcastChannel | None = None

    def place(self) -> SenderPlace:
        """Say where this rank is and what it sends."""
        layout = self._backend.parallel
        return SenderPlace(
            rank=layout.rank,
            leads_stage=layout.pp_rank if layout.is_stage_lead else None,
            node=this_node(),
        )

    def open_channel(self, engines: int, one_node: bool, seconds: float) -> ChannelAddress:
        """Open the place where this stage lead and the engines meet.

        Args:
            engines: how many.
            one_node: all members are on this node, so it may stay on the loopback interface.
            seconds: how long they may take to meet.
        """
        self.close_channel()
        host = LOOPBACK if one_node else this_node().host
        self._store = open_store(host, seconds)
        self._address = ChannelAddress(
            stage=self._backend.parallel.pp_rank, host=host, port=self._store.port, size=1 + engines
        )
        return self._address

    def join_channel(self, seconds: float) -> None:
        """Wait there for the engines."""
        if self._address is None:
            raise IllegalStateError("join_channel() is illegal before open_channel()")
        self._channel = BroadcastChannel(self._address, 0, self._address.host, seconds, self._store)

    def close_channel(self) -> None:
        """Leave the group, if there is one."""
        if self._channel is not None:
            self._channel.close()
        self._channel = self._store = self._address = None

    def begin(self, bucket_bytes: int, holders: Holders, dtype: str) -> str | None:
        """Begin an export; collective.

        Args:
            bucket_bytes: most bytes of a bucket.
            holders: which ranks send.
            dtype: name of the torch dtype of floating-point tensors.

        Returns: the plan as JSON on rank 0, None elsewhere.
        """
        self._export = self._backend.export_weights(bucket_bytes, holders, getattr(torch, dtype))
        return dump_plan(self._export.plan) if self._backend.parallel.rank == 0 else None

    def broadcast(self, seconds: float) -> list[SentBucket]:
        """Broadcast the buckets that this rank holds; collective over all ranks.

        Raises:
            TransferError: an engine did not take a bucket; this rank leaves the group and the other ranks end too.
            WeightExportAbortedError: another rank ended the export.
        """
        deadline = Deadline(seconds)

        def send(bucket: WeightBucket) -> None:
            if self._channel is None or bucket.data is None:
                raise TransferError("there is no broadcast group to send it to", bucket.index)
            self._channel.send(bucket.data, bucket.index, deadline.left)

        try:
            return self._send_all(send)
        except BaseException:
            self.close_channel()
            raise

    def write(self, folder: Path, seconds: float) -> list[SentBucket]:
        """Write the buckets to a folder, which appears once it is whole; collective, rank 0 writes.

        Raises:
            TransferError: it took too long.
            WeightExportAbortedError: another rank ended the export.
        """
        deadline = Deadline(seconds)
        if self._export is None:
            raise IllegalStateError("write() is illegal before begin()")
        writer = disk.DiskWriter(folder, self._export.plan) if self._backend.parallel.rank == 0 else None

        def write(bucket: WeightBucket) -> None:
            if writer is None or deadline.left == 0:
                raise TransferError(f"it was not written to {folder} within {seconds:.1f} s", bucket.index)
            writer.write(bucket)

        sent = self._send_all(write)
        if writer is not None:
            writer.publish()
        return sent

    def discard(self, folder: Path) -> None:
        """Remove what `write` wrote."""
        disk.discard(folder)

    def abandon(self) -> None:
        """End an update that failed, so that the next one starts afresh; collective while an export is open."""
        self.close_channel()
        export, self._export = self._export, None
        if export is not None:
            with export:
                pass

    def _send_all(self, send: Callable[[WeightBucket], None]) -> list[SentBucket]:
        export, self._export = self._export, None
        if export is None:
            raise IllegalStateError("sending weights is illegal before begin()")
        sent = []
        with export:
            for bucket in export:
                if bucket.data is None:
                    continue
                send(bucket)
                checksum = checksum_bucket(bucket.data, bucket.entries)
                sent.append(SentBucket(index=bucket.index, nbytes=bucket.data.numel(), checksum=checksum))
        return sent
