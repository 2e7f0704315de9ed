"""Argument checks shared by every op.

Each raises ``TypeError`` (a wrong type or dtype) or ``ValueError`` (a wrong rank, length, value or
device) and names the op, the argument, what was expected and what came. They run on fake tensors
too, so a mistake is reported while a graph is traced, before anything is launched or written.

Conditions are plain ``if`` statements, which Dynamo traces through in the documented functions.
Inside the ops a condition on a dynamic size is a ``SymBool``; it goes through
``torch._check_value``, and becomes a guard of the graph or a run-time assertion.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INDEX_DTYPES = (torch.int32, torch.int64)
COUNT_DTYPES = (torch.int32, torch.int64, torch.float32, torch.float64)
DEVICE_TYPES = ("cpu", "cuda", "meta")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def one_of(dtypes: Sequence[torch.dtype]) -> str:
    names = [dtype_name(dtype) for dtype in dtypes]
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " or " + names[-1]


def value(condition: Any, op: str, argument: str, expected: str, got: object) -> None:
    if not isinstance(condition, bool):
        torch._check_value(condition, lambda: f"{op}: {argument} must be {expected}, got {got}")
    elif not condition:
        raise ValueError(f"{op}: {argument} must be {expected}, got {got}")


def type_(condition: bool, op: str, argument: str, expected: str, got: object) -> None:
    if not condition:
        raise TypeError(f"{op}: {argument} must be {expected}, got {got}")


def _type_name(thing: object) -> str:
    return name_of(type(thing))


def name_of(kind: type) -> str:
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def is_tensor(op: str, argument: str, tensor: object) -> None:
    type_(isinstance(tensor, Tensor), op, argument, "a Tensor", _type_name(tensor))


def is_integer(op: str, argument: str, number: object, expected: str = "an int") -> None:
    is_int = isinstance(number, int | torch.SymInt) and not isinstance(number, bool)
    type_(is_int, op, argument, expected, _type_name(number))
    _fits_int64(op, argument, number)


def is_number(op: str, argument: str, number: object) -> None:
    numeric = isinstance(number, int | float | torch.SymInt | torch.SymFloat)
    type_(numeric and not isinstance(number, bool), op, argument, "a number", _type_name(number))
    _fits_int64(op, argument, number)


def _fits_int64(op: str, argument: str, number: object) -> None:
    if isinstance(number, int) and not -(2**63) <= number < 2**63:
        raise ValueError(f"{op}: {argument} must fit 64 bits, got {number}")


def integer(op: str, argument: str, number: object, minimum: int) -> None:
    is_integer(op, argument, number)
    value(number >= minimum, op, argument, f"at least {minimum}", number)  # type: ignore[operator]


def dtype(
    op: str, argument: str, tensor: Tensor, allowed: Sequence[torch.dtype], got_note: str = ""
) -> None:
    dense = tensor.layout == torch.strided and not tensor.is_nested
    value(dense, op, argument, "a dense tensor", "nested" if tensor.is_nested else tensor.layout)
    got = dtype_name(tensor.dtype) + got_note
    type_(tensor.dtype in allowed, op, argument, one_of(allowed), got)


def counts(op: str, argument: str, tensor: Tensor) -> None:
    """The dtype of counts: a half type is refused, with the reason."""
    half_max = {torch.bfloat16: 256, torch.float16: 2048}.get(tensor.dtype)
    note = f" ({half_max} is the last count up to which it is exact)" if half_max else ""
    dtype(op, argument, tensor, COUNT_DTYPES, got_note=note)


def is_float_dtype(op: str, argument: str, given: object) -> None:
    name = dtype_name(given) if isinstance(given, torch.dtype) else _type_name(given)
    type_(given in FLOAT_DTYPES, op, argument, one_of(FLOAT_DTYPES), name)


def shape(op: str, argument: str, tensor: Tensor, expected: str, condition: Any) -> None:
    value(condition, op, argument, f"of shape {expected}", list(tensor.shape))


def same_shape(
    op: str, argument: str, tensor: Tensor, expected: Sequence[Any], description: str
) -> None:
    """Dimension by dimension: a list of sizes compared as a whole is no run-time assertion."""
    shape(op, argument, tensor, description, tensor.dim() == len(expected))
    for actual, size in zip(tensor.shape, expected, strict=True):
        shape(op, argument, tensor, description, actual == size)


def rank(op: str, argument: str, tensor: Tensor, expected: str) -> None:
    """``expected`` is a shape written like ``[tokens, columns]``; only its rank is checked."""
    shape(op, argument, tensor, expected, tensor.dim() == expected.count(",") + 1)


def count(op: str, name: str, size: int) -> None:
    """Of rows or assignments, whose numbers are int32."""
    expected = "fewer than 2^31" if "*" in name else "of fewer than 2^31 rows or assignments"
    value(size < 2**31, op, name, expected, size)


def supported_device(op: str, argument: str, tensor: Tensor) -> None:
    value(
        tensor.device.type in DEVICE_TYPES,
        op,
        argument,
        "on a CPU or CUDA device",
        tensor.device,
    )


def same_device(op: str, argument: str, tensor: Tensor, like: Tensor, like_name: str) -> None:
    value(
        tensor.device == like.device,
        op,
        argument,
        f"on the device of {like_name}, {like.device}",
        tensor.device,
    )


def process_group(op: str, argument: str, group: object) -> None:
    # What ``new_group`` returns to a rank that is not in it.
    outside = group is dist.GroupMember.NON_GROUP_MEMBER
    value(not outside, op, argument, "a group with this rank", "one without it")
    is_group = isinstance(group, dist.ProcessGroup)
    type_(is_group, op, argument, "a ProcessGroup", _type_name(group))


def constant(tensor: Tensor) -> Tensor:
    """An input that receives no gradient, so that a result does not claim to depend on it."""
    return tensor.detach() if tensor.requires_grad else tensor


def no_forward_tangent(op: str, *tensors: Tensor | None) -> None:
    """Refuse forward-mode AD, which the registered ops would pass through without the tangent."""
    for tensor in tensors:
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError(f"{op}: forward-mode AD is not implemented; use reverse mode")
