"""Grouped matrix product for ``nn.MoE``: PyTorch's own where it has one, else a plain fallback.

The fallback is one opaque op, so a compiled graph holds no data-dependent shape. On the CPU it
multiplies each group's rows; elsewhere, where group sizes cannot be read without a host sync, it
multiplies all rows by every expert and keeps each group's own.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def has_native(x: Tensor, weight: Tensor) -> bool:
    """Whether PyTorch's grouped product takes both without reading the offsets on the host.

    It needs rows of a multiple of 16 bytes, in the operands and in the result.
    """
    return (
        x.device.type == "cuda"
        and x.dtype == torch.bfloat16
        and torch.cuda.get_device_capability(x.device) >= (9, 0)
        and all(size * x.dtype.itemsize % 16 == 0 for size in weight.shape[-2:])
    )


def grouped_mm(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """``x[offsets[e-1]:offsets[e]] @ weight[e]`` for each expert e.

    Args:
        x: rows in expert-major order [N, in].
        weight: [experts, in, out] in the dtype of ``x``.
        offsets: inclusive ends of the groups [experts], int32.

    Returns:
        [N, out]. Rows past ``offsets[-1]`` are unspecified.
    """
    if has_native(x, weight):
        return torch.nn.functional.grouped_mm(x, weight, offs=offsets)
    return torch.ops.moe.grouped_mm_fallback(x, weight, offsets)


def _groups(offsets: Tensor) -> Iterator[tuple[int, slice]]:
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        yield expert, slice(start, end)
        start = end


def _group_of_row(num_rows: int, offsets: Tensor) -> Tensor:
    rows = torch.arange(num_rows, device=offsets.device, dtype=offsets.dtype)
    return torch.searchsorted(offsets, rows, right=True)


@torch.library.custom_op("moe::grouped_mm_fallback", mutates_args=(), device_types="cpu")
def grouped_mm_fallback(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    out = x.new_zeros(x.shape[0], weight.shape[2])
    for expert, rows in _groups(offsets):
        torch.mm(x[rows], weight[expert], out=out[rows])
    return out


@grouped_mm_fallback.register_kernel("cuda")
def _(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    out = x.new_zeros(x.shape[0], weight.shape[2])
    group = _group_of_row(x.shape[0], offsets)[:, None]
    for expert in range(weight.shape[0]):
        out = torch.where(group == expert, x @ weight[expert], out)
    return out


@grouped_mm_fallback.register_fake
def _(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


@torch.library.custom_op("moe::grouped_mm_weight_grad", mutates_args=(), device_types="cpu")
def grouped_mm_weight_grad(x: Tensor, grad: Tensor, offsets: Tensor) -> Tensor:
    """``x[group].T @ grad[group]`` for each expert: [experts, in, out]."""
    out = x.new_zeros(offsets.shape[0], x.shape[1], grad.shape[1])
    for expert, rows in _groups(offsets):
        torch.mm(x[rows].T, grad[rows], out=out[expert])
    return out


@grouped_mm_weight_grad.register_kernel("cuda")
def _(x: Tensor, grad: Tensor, offsets: Tensor) -> Tensor:
    group = _group_of_row(x.shape[0], offsets)[:, None]
    experts = range(offsets.shape[0])
    return torch.stack(
        [torch.where(group == e, x, 0).T @ torch.where(group == e, grad, 0) for e in experts]
    )


@grouped_mm_weight_grad.register_fake
def _(x: Tensor, grad: Tensor, offsets: Tensor) -> Tensor:
    return x.new_empty(offsets.shape[0], x.shape[1], grad.shape[1])


def _setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _grouped_mm_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, offsets = ctx.saved_tensors
    need_x, need_weight, _ = ctx.needs_input_grad
    fallback, weight_grad = torch.ops.moe.grouped_mm_fallback, torch.ops.moe.grouped_mm_weight_grad
    return (
        fallback(grad, weight.transpose(1, 2), offsets) if need_x else None,
        weight_grad(x, grad, offsets) if need_weight else None,
        None,
    )


def _weight_grad_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, grad_out, offsets = ctx.saved_tensors
    need_x, need_grad_out, _ = ctx.needs_input_grad
    fallback = torch.ops.moe.grouped_mm_fallback
    return (
        fallback(grad_out, grad.transpose(1, 2), offsets) if need_x else None,
        fallback(x, grad, offsets) if need_grad_out else None,
        None,
    )


grouped_mm_fallback.register_autograd(_grouped_mm_backward, setup_context=_setup_context)
grouped_mm_weight_grad.register_autograd(_weight_grad_backward, setup_context=_setup_context)
