"""Fresh memory that holds NaN, the largest integers and True, so that what no op writes is seen.

PyTorch's switch for this, ``torch.utils.deterministic.fill_uninitialized_memory``, acts only under
``torch.use_deterministic_algorithms``, which lets PyTorch choose other algorithms and would hide an
op that does not repeat itself. So it is on while memory is allocated, and at no other time. It does
not reach what Inductor's code and the direct path allocate with: that goes through it here.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._device

GUARDS: Any = torch._C._dynamo.guards
# Both know PyTorch's functions by identity, so they are to see them before others take their place.
torch._dynamo.trace_rules.get_torch_obj_rule_map()
torch.utils._device._device_constructors()


def _poisoned(allocate: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(allocate)
    def call(*arguments: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            return allocate(*arguments, **options)
        before = torch._C._get_deterministic_algorithms()
        warn_only = torch._C._get_deterministic_algorithms_warn_only()
        torch._C._set_deterministic_algorithms(True, warn_only=True)
        try:
            return allocate(*arguments, **options)
        finally:
            torch._C._set_deterministic_algorithms(before, warn_only=warn_only)

    return call


def _strided(device: str) -> Callable[..., Any]:
    empty_strided = torch.empty_strided

    def allocate(shape: Any, stride: Any, dtype: torch.dtype) -> Any:
        return empty_strided(shape, stride, dtype=dtype, device=device)

    return _poisoned(allocate)


# (where it is looked up, its name, what takes its place)
WAYS = [
    *((torch, name, _poisoned(getattr(torch, name))) for name in ("empty", "empty_like")),
    (torch, "empty_strided", _poisoned(torch.empty_strided)),
    (torch.Tensor, "new_empty", _poisoned(torch.Tensor.new_empty)),
    (GUARDS, "_empty_strided_cpu", _strided("cpu")),
    (GUARDS, "_empty_strided_cuda", _strided("cuda")),
]


def untouched(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    """Memory that is not filled, for tensors of many gigabytes of which a test touches a few."""
    storage = torch.UntypedStorage(math.prod(shape) * dtype.itemsize, device=device)
    return torch.tensor([], dtype=dtype, device=device).set_(storage).view(shape)


def poison(set_attribute: Callable[[Any, str, Any], None] = setattr) -> None:
    for owner, name, function in WAYS:
        set_attribute(owner, name, function)
