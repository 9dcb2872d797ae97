"""The receiving side of a weight update, inside an engine's process.

Takes any `RolloutEngine`; knows no backend. Which methods are called, and when, is the protocol in `session`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from drivetrain_backend_api import IllegalStateError
from drivetrain_backend_api.weights import WeightPlan, unflatten
from drivetrain_infra.deadline import Deadline
from drivetrain_infra.engines.base import RolloutEngine
from drivetrain_infra.ray_runtime import LOOPBACK, this_node
from drivetrain_infra.weight_sync.disk import read_buckets
from drivetrain_infra.weight_sync.distributed import BroadcastChannel, ChannelAddress
from drivetrain_infra.weight_sync.errors import CorruptBucketError, TransferError
from drivetrain_infra.weight_sync.plan_json import parse_plan


class WeightReceiver:
    """Takes weight updates for one engine."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self._plan: WeightPlan | None = None
        self._channels: dict[int, BroadcastChannel] = {}

    @property
    def updating(self) -> bool:
        """True from the begin of an update until its commit: the engine may hold a mixture of weights."""
        return self._plan is not None

    def join_channels(self, addresses: Sequence[ChannelAddress], member: int, seconds: float) -> None:
        """Meet the senders of all stages.

        Args:
            addresses: one a stage.
            member: this engine's number in each group, from 1.
            seconds: deadline.
        """
        self.leave_channels()
        deadline = Deadline(seconds)
        for one in addresses:
            host = LOOPBACK if one.host == LOOPBACK else this_node().host
            self._channels[one.stage] = BroadcastChannel(one, member, host, deadline.left)

    def leave_channels(self) -> None:
        """Leave all groups, if there are any."""
        for one in self._channels.values():
            one.close()
        self._channels.clear()

    def begin(self, plan: str) -> None:
        """Check a plan in JSON against the engine's model.

        Raises:
            DataError: it does not fit; the engine keeps the weights it has.
        """
        parsed = parse_plan(plan)
        self._engine.begin_weight_update(parsed)
        self._plan = parsed

    def receive(self, seconds: float) -> None:
        """Take all buckets from the broadcast groups.

        Raises:
            TransferError: a bucket did not come in time, or its sender is gone.
            DataError: the engine refused a bucket; the senders are told by leaving the groups.
        """
        deadline = Deadline(seconds)
        plan = self._require_plan("receive")
        try:
            for index in range(plan.num_buckets):
                entries = plan.bucket(index)
                channel = self._channels.get(entries[0].stage)
                if channel is None:
                    raise TransferError("there is no broadcast group that brings it", index)
                data = channel.receive(plan.bucket_bytes(index), index, deadline.left)
                self._engine.load_weights(unflatten(data, entries))
        except BaseException:
            self.leave_channels()
            raise

    def read(self, folder: Path, seconds: float) -> None:
        """Take all buckets from a shared folder.

        Raises:
            DataError: they are not there, or not those of the plan.
            TransferError: it took too long.
        """
        deadline = Deadline(seconds)
        plan = self._require_plan("read")
        for index, tensors in read_buckets(folder, plan):
            if deadline.left == 0:
                raise TransferError(f"it was not read from {folder} within {seconds:.1f} s", index)
            self._engine.load_weights(tensors)

    def verify(self, checksums: Mapping[int, int]) -> None:
        """Compare the weights that the engine now holds with what the senders sent.

        Args:
            checksums: bucket -> the sender's checksum.

        Raises:
            BucketError: a bucket is missing or differs; names it and its tensors.
        """
        plan = self._require_plan("verify")
        for index in range(plan.num_buckets):
            entries = plan.bucket(index)
            if index not in checksums:
                raise TransferError("no train rank sent it", index)
            if self._engine.weight_checksum(entries) != checksums[index]:
                raise CorruptBucketError(
                    f"the engine's weights differ from what was sent, somewhere in {entries[0].name} to "
                    f"{entries[-1].name}; a transport or memory fault: sync again, and suspect the hardware or the "
                    "file system if it comes back",
                    index,
                )

    def commit(self, version: int) -> None:
        """Make the update the engine's weights, under `version`; it serves once it is resumed."""
        self._require_plan("commit")
        self._engine.commit_weight_update(version)
        self._plan = None

    def _require_plan(self, call: str) -> WeightPlan:
        if self._plan is None:
            raise IllegalStateError(f"{call}() is illegal while no weight update is open; it needs begin() before it")
        return self._plan
