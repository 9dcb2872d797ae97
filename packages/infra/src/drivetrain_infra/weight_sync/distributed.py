"""Transport `distributed`: flattened buckets by gloo broadcast from one train rank to all engines.

The group is made of raw process groups, apart from any default group, so that neither the trainer's nor an engine's own
groups know of it. A bucket on a GPU goes through host memory. Knows no backend and no engine.
"""

import socket
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import (  # type: ignore[attr-defined]
    BroadcastOptions,
    PrefixStore,
    ProcessGroupGloo,
    TCPStore,
)

from drivetrain_backend_api import DrivetrainError
from drivetrain_infra.weight_sync.errors import TransferError

_SENDER = 0
"""Member number of the sender; engines follow in the order of the session's list."""

_SHORTEST = 0.001
"""Seconds: gloo takes a timeout of 0 as none."""


@dataclass(frozen=True, kw_only=True)
class ChannelAddress:
    """Where the members of a broadcast group meet.

    Attributes:
        stage: the pipeline stage whose weights go through it.
        host: of the sender.
        port: of its store, bound before it is told to anybody.
        size: members: the sender and all engines.
    """

    stage: int
    host: str
    port: int
    size: int


def open_store(host: str, seconds: float) -> TCPStore:
    """Start the store where members meet, on one interface and a free port.

    Args:
        host: address to listen on.
        seconds: how long members may wait in it.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # the store itself would listen on all interfaces
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind((host, 0))
        listener.listen()
        port = listener.getsockname()[1]
        return TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=seconds),
            master_listen_fd=listener.detach(),
        )


class BroadcastChannel:
    """One member's end of a broadcast group."""

    def __init__(
        self, address: ChannelAddress, member: int, own_host: str, seconds: float, store: TCPStore | None = None
    ) -> None:
        """Join the group; returns once all members have.

        Args:
            address: where they meet.
            member: 0 for the sender.
            own_host: this member's address, as the others reach it.
            seconds: deadline of joining.
            store: the sender's own; others connect to it.

        Raises:
            DrivetrainError: not all members came in time, or one cannot be reached.
        """
        wait = timedelta(seconds=max(seconds, _SHORTEST))
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = wait
        try:
            options._devices = [ProcessGroupGloo.create_device(hostname=own_host)]
            store = store or TCPStore(address.host, address.port, is_master=False, timeout=wait)
            # kept: the group reads from it, and the sender's is the server
            self._store = store
            self._group: ProcessGroupGloo | None = ProcessGroupGloo(
                PrefixStore(f"weights-of-stage-{address.stage}", store), member, address.size, options
            )
        except RuntimeError as error:
            raise DrivetrainError(
                f"could not join the weight broadcast of {address.size} members at {address.host}:{address.port}: "
                f"{error}; every engine must reach that address, so look for a member that died or a firewall"
            ) from error

    def send(self, data: Tensor, bucket: int, seconds: float) -> None:
        """Send a bucket to all other members.

        Args:
            data: uint8 [bucket bytes], on any device.
            bucket: its index.
            seconds: deadline.

        Raises:
            TransferError: a member died, left, or did not take it in time.
        """
        self._broadcast(data.cpu(), bucket, seconds)

    def receive(self, nbytes: int, bucket: int, seconds: float) -> Tensor:
        """Receive a bucket: uint8 [nbytes] in host memory. Raises as `send` does."""
        data = torch.empty(nbytes, dtype=torch.uint8)
        self._broadcast(data, bucket, seconds)
        return data

    def close(self) -> None:
        """Leave; members that wait for this one fail at once."""
        self._group = None

    def _broadcast(self, data: Tensor, bucket: int, seconds: float) -> None:
        if self._group is None:
            raise TransferError("the weight broadcast was closed after an earlier failure", bucket)
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = _SENDER, 0
        options.timeout = timedelta(seconds=max(seconds, _SHORTEST))
        try:
            self._group.broadcast([data], options).wait()  # type: ignore[attr-defined]
        except RuntimeError as error:
            raise TransferError(f"broadcast failed: {error}", bucket) from error
