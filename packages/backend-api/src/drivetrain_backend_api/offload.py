"""Host copies of device tensors: give the device memory back, take it again, bit for bit.

Buffers are pinned where the tensors live on a GPU, and are reused from one sleep to the next.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from drivetrain_backend_api.errors import IllegalStateError


class HostCopies:
    """Moves the storages of a set of tensors to host buffers and back.

    The tensors stay the same objects: only their storage is emptied and refilled, so that every view of it (sharded
    parameters, optimizer state, flat gradient buffers) is valid again after `bring_back`.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._away: dict[str, tuple[torch.UntypedStorage, int]] = {}

    @property
    def away(self) -> bool:
        """True while storages are on the host."""
        return bool(self._away)

    def send_away(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy each distinct storage to the host and free it on the device."""
        seen: set[int] = set()
        for name, tensor in tensors.items():
            storage = tensor.untyped_storage()
            if name in self._away or storage.nbytes() == 0 or storage.data_ptr() in seen:
                continue
            seen.add(storage.data_ptr())
            flat = _bytes_of(storage, tensor.device)
            buffer = self._buffers.get(name)
            if buffer is None or buffer.numel() != flat.numel():
                buffer = torch.empty(flat.numel(), dtype=torch.uint8, pin_memory=tensor.device.type == "cuda")
                self._buffers[name] = buffer
            buffer.copy_(flat, non_blocking=True)
            self._away[name] = (storage, storage.nbytes())
        wait_for_copies()
        for storage, _ in self._away.values():
            storage.resize_(0)

    def bring_back(self) -> None:
        """Take the device memory again and fill it with what was there."""
        for name, (storage, nbytes) in self._away.items():
            storage.resize_(nbytes)
            _bytes_of(storage, storage.device).copy_(self._buffers[name], non_blocking=True)
        wait_for_copies()
        self._away.clear()

    def drop_buffers(self) -> None:
        """Free the host buffers too.

        Raises:
            IllegalStateError: they hold the only copy of something.
        """
        if self._away:
            raise IllegalStateError("drop_buffers() is illegal while tensors are on the host: call bring_back() first")
        self._buffers.clear()


def _bytes_of(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def wait_for_copies() -> None:
    """Wait until copies between device and pinned host memory have ended."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
