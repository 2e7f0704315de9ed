"""What the documented functions need to go past the dispatcher in plain eager mode.

On the host of an H200, aux_loss forward and backward took 1094 us through the registered ops and
203 us past them. Where the dispatcher would find nothing but autograd and CUDA, a call takes the
direct path: one ``autograd.Function`` around the launches. Everywhere else it takes
``torch.ops.moe``: under a compiler, a mode, a transform or a trace, with subclasses, on other
devices.

What checks and launchers read of the arguments is a call's signature. A plan is what they made of
it, so a call whose signature was seen before needs neither.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C import (
    _get_function_stack_at,
    _get_tracing_state,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
)
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.utils._device import DeviceContext

# Untyped: what it has depends on PyTorch's build.
guards: Any = torch._C._dynamo.guards

Plan = TypeVar("Plan")
_Shape = tuple[int, ...]

MAX_PLANS = 4096
# False under the interpreter, which takes CPU tensors.
CUDA = True
_TENSORS = (Tensor, torch.nn.Parameter)


def _is_plain_mode() -> bool:
    """Questions that take about 0.1 us each; those for dispatch keys are fewer, but took 2 us."""
    return not (
        # First of all, as Dynamo knows none of the rest.
        is_compiling()
        or (_len_torch_function_stack() and _has_function_mode())
        or _len_torch_dispatch_stack()
        or peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or _get_tracing_state() is not None
    )


def _has_function_mode() -> bool:
    """Other than a default device, which changes nothing here: every tensor made names its own."""
    modes = map(_get_function_stack_at, range(_len_torch_function_stack()))
    return any(not isinstance(mode, DeviceContext) for mode in modes)


def signature(*tensors: Any) -> list[Any] | None:
    """What checks and launchers read of ``tensors``, or None unless all are plain CUDA tensors.

    Any of them may be None.
    """
    if not _is_plain_mode():
        return None
    parts: list[Any] = []
    try:
        for x in tensors:
            if x is None:
                parts.append(None)
            elif type(x) in _TENSORS and x.is_cuda is CUDA and not x.is_neg():
                address = x.data_ptr()
                if not address and x.numel():
                    return None
                parts.append((x.shape, x.stride(), x.dtype, x.device, address % 16))
            else:
                return None
    except RuntimeError:  # no storage: a sparse tensor, or a gradient under is_grads_batched
        return None
    return parts


def is_plain(grad: Tensor) -> bool:
    """Whether a backward past the dispatcher may read ``grad``, which the engine has checked."""
    if torch.is_grad_enabled() or not _is_plain_mode():
        return False
    try:
        return type(grad) in _TENSORS and grad.data_ptr() != 0 and not grad.is_neg()
    except RuntimeError:  # no storage: a gradient under is_grads_batched
        return False


def layout(tensor: Tensor) -> tuple[Any, ...]:
    """What a launch fixes of a tensor beside its address."""
    return tensor.shape, tensor.stride(), tensor.dtype


def fresh(shape: Sequence[int], stride: tuple[int, ...], dtype: torch.dtype, like: Tensor) -> Any:
    """The part of a signature that is of a new tensor on the device of ``like``."""
    return torch.Size(shape), stride, dtype, like.device, 0


def grad_part(grad: Tensor, saved: Sequence[Tensor | None], parts: Sequence[Any]) -> Any | None:
    """The part of ``grad`` in a signature, or None where a backward is for the dispatcher.

    So it is unless saved tensors, but for those not kept, have the ``parts`` that a plan was made
    for: a hook may have brought others.
    """
    own = None if torch.is_grad_enabled() else signature(grad, *saved)
    if own is None:
        return None
    same = all(x is None or x == part for x, part in zip(own[1:], parts, strict=True))
    return own[0] if same else None


def allocator(device: torch.device) -> Callable[[_Shape, _Shape, torch.dtype], Tensor]:
    """What makes an uninitialised tensor of (shape, stride, dtype) on ``device``.

    Where that is the current device it is what Inductor's code allocates with, in a third of the
    time of ``torch.empty``. It takes plain tuples, no ``torch.Size``.
    """
    if CUDA and device.index == torch._C._cuda_getDevice():
        return guards._empty_strided_cuda
    return lambda shape, stride, dtype: torch.empty_strided(
        shape, stride, dtype=dtype, device=device
    )


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply`` after :func:`signature`, which has looked for functorch as it would."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


class Plans(dict[tuple[Any, ...], Plan]):
    """Plans by signature, of bounded number."""

    def add(self, key: tuple[Any, ...], plan: Plan) -> Plan:
        if len(self) >= MAX_PLANS:
            self.clear()
        self[key] = plan
        return plan
