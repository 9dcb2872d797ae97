"""Every patch of somebody else's code, each with its reason and the versions that need it.

All but the last serve machines without CUDA: Megatron-Core has no device abstraction and names CUDA literally. Each
redirects a call that could only raise there, so that nothing that worked before changes its meaning. Where CUDA is
present, none of those is installed. Knows nothing of models.
"""

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._device import _device_constructors

_CPU = torch.device("cpu")

FACTORIES = ("arange", "empty", "empty_like", "full", "ones", "tensor", "zeros", "zeros_like")
"""Functions of torch that Megatron calls with a literal `device="cuda"` or with `pin_memory=True`."""


def before_import() -> None:
    """Patch torch; Megatron binds some of these names when it is imported.

    Raises:
        RuntimeError: Megatron was imported before, so that some patches would not reach it.
    """
    if torch.cuda.is_available():
        return
    if "megatron.core" in sys.modules:
        raise RuntimeError("megatron.core was imported before drivetrain_backend_megatron; import the backend first")
    _device_queries()
    _streams()
    _random_state()
    _placement()


def after_import() -> None:
    """Patch Megatron itself."""
    _router_without_transformer_engine()
    if torch.cuda.is_available():
        return
    _no_compiler()
    _restore_random_state_at_once()
    _token_counts_as_arrays()


# -- torch, on machines without CUDA (megatron-core 0.16 to 0.19) ------------------------------------------------------


def _device_queries() -> None:
    # receive buffers, gradient buffers: device=torch.cuda.current_device()
    _set(torch.cuda, "current_device", lambda: _CPU)
    # around sends, timers and the release of gradient buffers
    _set(torch.cuda, "synchronize", lambda *_, **__: None)


class _Inline:
    """A stream or an event of a device on which everything has happened when a call returns."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def synchronize(self) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def wait_stream(self, *_: Any) -> None: ...

    def wait_event(self, *_: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def record_event(self, *_: Any) -> "_Inline":
        return self

    def query(self) -> bool:
        return True


def _streams() -> None:
    # made by the gradient buffers and by the writer of checkpoints
    for name in ("Stream", "Event"):
        _set(torch.cuda, name, _Inline)
    for name in ("current_stream", "default_stream"):
        _set(torch.cuda, name, _Inline)
    _set(torch.cuda, "stream", lambda stream: contextlib.nullcontext(stream))


def _random_state() -> None:
    # the tracker of random states, and recomputation, save and restore "the CUDA generator"
    for module in (torch.cuda, torch.cuda.random):
        _set(module, "get_rng_state", lambda device=None: torch.default_generator.get_state())
        _set(module, "set_rng_state", lambda state, device=None: torch.default_generator.set_state(state))
        _set(module, "manual_seed", lambda seed: torch.default_generator.manual_seed(int(seed)))


def _placement() -> None:
    def on_cpu(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(factory)
        def make(*args: Any, **kwargs: Any) -> Tensor:
            if str(kwargs.get("device")).startswith("cuda"):
                kwargs["device"] = _CPU
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
            return factory(*args, **kwargs)

        return make

    # looked up once, and to be the real ones: else `with torch.device(...)` would no longer reach them
    _device_constructors()
    for name in FACTORIES:
        _set(torch, name, on_cpu(getattr(torch, name)))
    _set(torch.Tensor, "cuda", lambda self, *_, **__: self)
    _set(torch.nn.Module, "cuda", lambda self, *_, **__: self)
    # stays a copy: what was pinned is freed afterwards
    _set(torch.Tensor, "pin_memory", lambda self, *_, **__: self.clone())


# -- Megatron, on machines without CUDA (megatron-core 0.16 to 0.19) ---------------------------------------------------


def _no_compiler() -> None:
    # each process would compile small fusions with a C++ compiler: minutes, and there may be none
    importlib.import_module("megatron.core.jit").disable_jit_fuser()


def _restore_random_state_at_once() -> None:
    # goes through a queue of calls for when CUDA is initialised, which is never: the state would not be restored
    module = importlib.import_module("megatron.core.tensor_parallel.random")
    _set(
        module,
        "_set_cuda_rng_state",
        lambda state, device=-1, graph_safe=False: torch.default_generator.set_state(state),
    )


def _token_counts_as_arrays() -> None:
    # the exchange between experts turns its counts into arrays only on the way from CUDA; collectives take no tensors
    module = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")

    def as_array(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor

    _set(module, "maybe_move_tensor_to_cpu", as_array)


# -- Megatron, without Transformer Engine (megatron-core 0.16) ---------------------------------------------------------


def _router_without_transformer_engine() -> None:
    # compares Transformer Engine's matmul with None and defines it only where that is installed
    module = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    if not hasattr(module, "te_general_gemm"):
        _set(module, "te_general_gemm", None)


def _set(owner: Any, name: str, value: Any) -> None:
    setattr(owner, name, value)
