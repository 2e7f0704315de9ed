"""What the documented functions need to go past the dispatcher in plain eager mode.

A registered op costs 50 to 100 us of host time per call with gradients, a bare launch about 12 us.
Where the dispatcher would find nothing but autograd and CUDA, a call takes the direct path: one
``autograd.Function`` around the launches. Everywhere else it takes ``torch.ops.moe``: under a
compiler, a mode, a transform or a trace, with subclasses, on other devices.

What checks and launchers read of the arguments is a call's signature. A plan is what they made of
it, so a call whose signature was seen before needs neither.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

Plan = TypeVar("Plan")

DEVICE_TYPE = "cuda"
MAX_PLANS = 4096
_TENSORS = (Tensor, torch.nn.Parameter)


@functools.cache
def _ordinary_keys(device_type: str) -> tuple[frozenset[int], frozenset[int]]:
    """(dispatch keys that a thread adds, those of a tensor), in plain and in inference mode."""
    thread, tensor = set(), set()
    for inference in (False, True):
        with torch.inference_mode(inference):
            thread.add(torch._C._dispatch_tls_local_include_set().raw_repr())
            tensor.add(torch._C._dispatch_keys(torch.empty(0, device=device_type)).raw_repr())
    return frozenset(thread), frozenset(tensor)


def is_plain(first: Any, *others: Any) -> bool:
    """Whether these are plain CUDA tensors (or None, but for the first), in plain eager mode."""
    # First of all, as Dynamo knows none of the rest.
    if torch.compiler.is_compiling():
        return False
    if type(first) not in _TENSORS or first.device.type != DEVICE_TYPE:
        return False
    thread_keys, tensor_keys = _ordinary_keys(DEVICE_TYPE)
    if (
        torch._C._dispatch_keys(first).raw_repr() not in tensor_keys
        or torch._C._dispatch_tls_local_include_set().raw_repr() not in thread_keys
        or torch._C._len_torch_function_stack()
        # Forward-mode AD shows in no key.
        or forward_ad._current_level >= 0
    ):
        return False
    for tensor in others:
        if tensor is not None and (
            type(tensor) not in _TENSORS
            or torch._C._dispatch_keys(tensor).raw_repr() not in tensor_keys
        ):
            return False
    return True


def signature(*tensors: Tensor | None) -> tuple[Any, ...]:
    """What checks and launchers read of ``tensors``."""
    return tuple(
        [
            None
            if tensor is None
            else (
                tensor.shape,
                tensor.stride(),
                tensor.dtype,
                tensor.device,
                tensor.data_ptr() % 16,
            )
            for tensor in tensors
        ]
    )


class Plans(dict[tuple[Any, ...], Plan]):
    """Plans by signature, of bounded number."""

    def get_or_make(self, key: tuple[Any, ...], make: Callable[[], Plan]) -> Plan:
        plan = self.get(key)
        if plan is None:
            plan = make()
            if len(self) >= MAX_PLANS:
                self.clear()
            self[key] = plan
        return plan
