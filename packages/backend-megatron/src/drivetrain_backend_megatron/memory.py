"""What leaves the accelerator in each state of sleep, and how, by the tier that was selected. Bit for bit both ways.

Gradients are not kept: nothing sleeps while any are pending. Knows no model and no optimizer.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor

from drivetrain_backend_api.lifecycle import State
from drivetrain_backend_api.offload import HostCopies
from drivetrain_backend_megatron.sleep import SleepTier

Tensors = Callable[[], Mapping[str, Tensor]]


class Groups(Protocol):
    """Process groups that can be destroyed and rebuilt."""

    def destroy(self) -> None:
        """Destroy all."""

    def rebuild(self) -> None:
        """Make them again."""


class Sleeper:
    """Moves a backend's memory to the host and back as its state asks.

    In WEIGHTS_ONLY, gradients and optimizer state are away; in ASLEEP, weights and process groups too.
    """

    def __init__(
        self,
        tier: SleepTier,
        *,
        weights: Tensors,
        optimizer: Tensors,
        gradients: Tensors,
        groups: Groups,
        release: Callable[[], None],
    ) -> None:
        """Take functions that name the live tensors; always the same tensors under the same names.

        Args:
            tier: what leaves, and how.
            weights: flat buffers.
            optimizer: its state on the accelerator.
            gradients: flat buffers.
            groups: all of this process.
            release: gives back to the accelerator what the allocator caches.
        """
        self._tier = tier
        self._weights, self._optimizer, self._gradients, self._groups = weights, optimizer, gradients, groups
        self._release = release
        self._weight_copies, self._optimizer_copies = HostCopies(), HostCopies()
        self._dropped: dict[str, int] = {}
        self._is_asleep = False

    def enter(self, state: State) -> None:
        """Move what must move for `state`; nothing when it is there already."""
        goes_to_sleep = state is State.ASLEEP and not self._is_asleep
        if goes_to_sleep:
            # first: where another rank does not come, nothing has moved
            self._groups.destroy()
        if self._is_asleep and state is not State.ASLEEP:
            self._leave_sleep()
        if self._tier is not SleepTier.PROCESS_GROUPS:
            self._move_optimizer(state)
        if state is not State.AWAKE:
            self._release()
        if goes_to_sleep:
            self._go_to_sleep()

    def _go_to_sleep(self) -> None:
        match self._tier:
            case SleepTier.OFFLOAD:
                self._weight_copies.send_away(self._weights())
                self._release()
            case SleepTier.MEMORY_SAVER:
                # it copies whatever is allocated, caches too: they are released, and nothing is afterwards
                _memory_saver().pause()
        self._is_asleep = True

    def _leave_sleep(self) -> None:
        match self._tier:
            case SleepTier.OFFLOAD:
                self._weight_copies.bring_back()
            case SleepTier.MEMORY_SAVER:
                _memory_saver().resume()
        self._groups.rebuild()
        self._is_asleep = False

    def _move_optimizer(self, state: State) -> None:
        if state is State.AWAKE:
            if self._optimizer_copies.away:
                self._optimizer_copies.bring_back()
            for name, tensor in self._gradients().items():
                if name in self._dropped:
                    tensor.untyped_storage().resize_(self._dropped.pop(name))
            return
        if not self._optimizer_copies.away:
            self._optimizer_copies.send_away(self._optimizer())
        for name, tensor in self._gradients().items():
            storage = tensor.untyped_storage()
            if name not in self._dropped:
                self._dropped[name] = storage.nbytes()
                storage.resize_(0)


class _MemorySaver(Protocol):
    def pause(self) -> None: ...

    def resume(self) -> None: ...


def _memory_saver() -> _MemorySaver:
    from torch_memory_saver import torch_memory_saver  # its library is in this process already

    saver: _MemorySaver = torch_memory_saver
    return saver
