"""Registration of ``torch.ops.moe.weighted_restore``: schema, fake, autograd, dispatch.

The public name is a composite over two ops. ``invert_permutation`` writes the workspace and returns
nothing; ``weighted_restore_gather`` reads it and returns the result. Only the second has a
gradient, and it saves inputs and the slots that it returns, never the workspace: two calls in one
graph may share that. The backward is an op of its own, with a backward in plain PyTorch.
"""

import math
from typing import Any

import torch
from torch import Tensor

from .. import checks
from .. import workspace as workspaces
from ..backend import load_kernels
from ..fixed_order import accumulator_dtype, cast
from . import reference

OP = "weighted_restore"


def weighted_restore_workspace_size(num_tokens: int, topk: int) -> int:
    """Bytes of workspace that :func:`weighted_restore` needs: 4 per assignment.

    The size for a maximum of tokens serves every smaller number.

    Args:
        num_tokens: number of tokens, at least 0.
        topk: experts per token, at least 1.

    Returns:
        Size in bytes, for :func:`make_workspace`.

    Raises:
        TypeError: an argument is not an int.
        ValueError: ``num_tokens`` is negative or ``topk`` is below 1.
    """
    checks.integer("weighted_restore_workspace_size", "num_tokens", num_tokens, 0)
    checks.integer("weighted_restore_workspace_size", "topk", topk, 1)
    return workspaces.align(num_tokens * topk * torch.int32.itemsize)


def _check(
    rows: Tensor, top_scores: Tensor, token_indices_sorted: Tensor, addend: Tensor | None
) -> None:
    checks.supported_device(OP, "rows", rows)
    checks.dtype(OP, "rows", rows, checks.FLOAT_DTYPES)
    checks.rank(OP, "rows", rows, "[N, H]")
    checks.dtype(OP, "top_scores", top_scores, checks.FLOAT_DTYPES)
    checks.shape(
        OP,
        "top_scores",
        top_scores,
        "[*, K] with K >= 1",
        top_scores.dim() >= 1 and top_scores.shape[-1] >= 1,
    )
    checks.same_device(OP, "top_scores", top_scores, rows, "rows")
    checks.dtype(OP, "token_indices_sorted", token_indices_sorted, checks.INDEX_DTYPES)
    checks.same_device(OP, "token_indices_sorted", token_indices_sorted, rows, "rows")
    _check_lengths(rows, top_scores, token_indices_sorted)
    if addend is not None:
        expected = [*top_scores.shape[:-1], rows.shape[1]]
        checks.dtype(OP, "addend", addend, (rows.dtype,))
        checks.shape(
            OP,
            "addend",
            addend,
            f"[*, H] = {expected}",
            addend.dim() == len(expected) and list(addend.shape) == expected,
        )
        checks.same_device(OP, "addend", addend, rows, "rows")
    checks.no_forward_tangent(OP, rows, top_scores, addend)


def _check_lengths(rows: Tensor, top_scores: Tensor, token_indices_sorted: Tensor) -> None:
    checks.shape(
        OP,
        "token_indices_sorted",
        token_indices_sorted,
        f"[N] = [{rows.shape[0]}], one entry per row",
        token_indices_sorted.dim() == 1 and token_indices_sorted.shape[0] == rows.shape[0],
    )
    for name, size in (("rows", rows.shape[0]), ("top_scores", top_scores.numel())):
        checks.value(size < 2**31, OP, name, "of fewer than 2^31 rows or assignments", size)


def _inverse(workspace: Tensor, num_assignments: int) -> Tensor:
    return workspaces.scratch(OP, workspace, num_assignments, torch.int32)


def _flat(tensor: Tensor) -> Tensor:
    """[*, X] as [T, X]: a view where the leading strides allow it."""
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])


def _result_shape(rows: Tensor, top_scores: Tensor) -> list[int]:
    return [*top_scores.shape[:-1], rows.shape[1]]


@torch.library.custom_op("moe::invert_permutation", mutates_args={"workspace"}, device_types="cpu")
def invert_permutation(
    token_indices_sorted: Tensor, num_assignments: int, workspace: Tensor
) -> None:
    """Write the row of each assignment to ``workspace`` as int32, or -1 where no row holds it."""
    inverse = reference.invert(token_indices_sorted, num_assignments)
    _inverse(workspace, num_assignments).copy_(inverse)


@invert_permutation.register_kernel("cuda")
def _invert_permutation_cuda(
    token_indices_sorted: Tensor, num_assignments: int, workspace: Tensor
) -> None:
    inverse = _inverse(workspace, num_assignments)
    load_kernels(__package__).invert(token_indices_sorted, inverse)


@invert_permutation.register_fake
def _(token_indices_sorted: Tensor, num_assignments: int, workspace: Tensor) -> None:
    return None


@torch.library.custom_op("moe::weighted_restore_gather", mutates_args=(), device_types="cpu")
def weighted_restore_gather(
    rows: Tensor,
    top_scores: Tensor,
    token_indices_sorted: Tensor,
    addend: Tensor | None,
    workspace: Tensor,
) -> tuple[Tensor, Tensor]:
    """(the weighted sum of each token's rows, slots) by the inverse permutation in ``workspace``.

    The slots, int32 in the shape of ``top_scores``, are what the backward needs of the workspace:
    the row of each assignment, or -1. Returning them has a second use. Inductor moves an op that
    returns one tensor to its first use, which may lie behind the next call's write to the same
    workspace, and then clones the workspace; the items of a tuple are taken where they were traced.
    """
    inverse = _inverse(workspace, top_scores.numel()).view(top_scores.shape)
    out, slots = _empty_results(rows, top_scores)
    # The scratch is the caller's: an entry outside the rows means that no row holds it.
    slots.copy_(torch.where((inverse < 0) | (inverse >= rows.shape[0]), -1, inverse))
    flat_addend = None if addend is None else _flat(addend)
    result = reference.weighted_restore(rows, _flat(top_scores), _flat(slots).long(), flat_addend)
    # Into a fresh tensor: a view returned here could not be changed in place by the caller.
    _flat(out).copy_(result)
    return out, slots


@weighted_restore_gather.register_kernel("cuda")
def _weighted_restore_gather_cuda(
    rows: Tensor,
    top_scores: Tensor,
    token_indices_sorted: Tensor,
    addend: Tensor | None,
    workspace: Tensor,
) -> tuple[Tensor, Tensor]:
    inverse = _inverse(workspace, top_scores.numel())
    out, slots = _empty_results(rows, top_scores)
    flat_addend = None if addend is None else _flat(addend)
    load_kernels(__package__).weighted_restore(
        rows, _flat(top_scores), inverse, flat_addend, _flat(out), slots
    )
    return out, slots


@weighted_restore_gather.register_fake
def _(
    rows: Tensor,
    top_scores: Tensor,
    token_indices_sorted: Tensor,
    addend: Tensor | None,
    workspace: Tensor,
) -> tuple[Tensor, Tensor]:
    return _empty_results(rows, top_scores)


def _empty_results(rows: Tensor, top_scores: Tensor) -> tuple[Tensor, Tensor]:
    out = rows.new_empty(_result_shape(rows, top_scores))
    return out, rows.new_empty(top_scores.shape, dtype=torch.int32)


@torch.library.custom_op("moe::weighted_restore_backward", mutates_args=(), device_types="cpu")
def weighted_restore_backward(
    grad: Tensor,
    rows: Tensor,
    top_scores: Tensor,
    token_indices_sorted: Tensor,
    slots: Tensor,
    need_rows: bool,
    need_scores: bool,
) -> tuple[Tensor, Tensor]:
    """(gradient of rows, gradient of top_scores), the one that is not needed of size 0."""
    grad_rows, grad_scores = _empty_grads(rows, top_scores, need_rows, need_scores)
    flat_slots = _flat(slots).long()
    if need_rows:
        assignments = reference.row_assignments(flat_slots, token_indices_sorted)
        grad_rows.copy_(reference.grad_rows(_flat(grad), top_scores, flat_slots, assignments))
    if need_scores:
        sums = reference.grad_scores(_flat(grad), rows, flat_slots, top_scores.dtype)
        _flat(grad_scores).copy_(sums)
    return grad_rows, grad_scores


@weighted_restore_backward.register_kernel("cuda")
def _weighted_restore_backward_cuda(
    grad: Tensor,
    rows: Tensor,
    top_scores: Tensor,
    token_indices_sorted: Tensor,
    slots: Tensor,
    need_rows: bool,
    need_scores: bool,
) -> tuple[Tensor, Tensor]:
    _check_lengths(rows, top_scores, token_indices_sorted)
    checks.shape(OP, "slots", slots, "that of top_scores", slots.shape == top_scores.shape)
    grad_rows, grad_scores = _empty_grads(rows, top_scores, need_rows, need_scores)
    load_kernels(__package__).weighted_restore_backward(
        _flat(grad),
        rows,
        _flat(top_scores),
        token_indices_sorted,
        slots,
        grad_rows if need_rows else None,
        grad_scores if need_scores else None,
    )
    return grad_rows, grad_scores


@weighted_restore_backward.register_fake
def _(
    grad: Tensor,
    rows: Tensor,
    top_scores: Tensor,
    token_indices_sorted: Tensor,
    slots: Tensor,
    need_rows: bool,
    need_scores: bool,
) -> tuple[Tensor, Tensor]:
    return _empty_grads(rows, top_scores, need_rows, need_scores)


def _empty_grads(
    rows: Tensor, top_scores: Tensor, need_rows: bool, need_scores: bool
) -> tuple[Tensor, Tensor]:
    return (
        rows.new_empty(rows.shape if need_rows else (0,)),
        top_scores.new_empty(top_scores.shape if need_scores else (0,)),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    rows, top_scores, token_indices_sorted, _, _ = inputs
    _, slots = output
    ctx.save_for_backward(rows, top_scores, token_indices_sorted, slots)
    ctx.mark_non_differentiable(slots)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    need_rows, need_scores, _, need_addend, _ = ctx.needs_input_grad
    grad_rows = grad_scores = None
    if grad is not None and (need_rows or need_scores):
        grad_rows, grad_scores = torch.ops.moe.weighted_restore_backward(
            grad, *ctx.saved_tensors, need_rows, need_scores
        )
    return (
        grad_rows if need_rows else None,
        grad_scores if need_scores else None,
        None,
        grad if need_addend else None,
        None,
    )


weighted_restore_gather.register_autograd(_backward, setup_context=_setup_context)


def _setup_double_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.has_rows, ctx.has_scores = inputs[5:]
    ctx.set_materialize_grads(False)


def _double_backward(
    ctx: Any, grad_grad_rows: Tensor | None, grad_grad_scores: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Plain PyTorch, differentiable to any order. With u = grad_grad_rows and v = grad_grad_scores:

    grad[t]          += sum_k top_scores[t, k] * u[slot] + v[t, k] * rows[slot]
    rows[slot]       += v[t, k] * grad[t]
    top_scores[t, k] += sum_h grad[t, h] * u[slot, h]
    """
    grad, rows, top_scores, token_indices_sorted, slots = ctx.saved_tensors
    need_grad, need_rows, need_scores = ctx.needs_input_grad[:3]
    dtype = accumulator_dtype(rows.dtype)
    flat_grad, scores = _flat(grad).to(dtype), _flat(top_scores).to(dtype)
    slots = _flat(slots).long()
    held = (slots >= 0)[..., None]
    terms, d_rows, d_scores = [], None, None
    if grad_grad_rows is not None and ctx.has_rows:
        u = reference.with_zero_row(grad_grad_rows)[slots].to(dtype)  # [T, K, H]
        if need_grad:
            terms.append(torch.where(held, scores[..., None] * u, 0.0))
        if need_scores:
            products = torch.where(held, flat_grad[:, None, :] * u, 0.0)
            d_scores = cast(products.sum(-1), top_scores.dtype).view(top_scores.shape)
    if grad_grad_scores is not None and ctx.has_scores:
        v = _flat(grad_grad_scores).to(dtype)
        if need_grad:
            gathered = reference.with_zero_row(rows)[slots].to(dtype)
            terms.append(torch.where(held, v[..., None] * gathered, 0.0))
        if need_rows:
            assignments = reference.row_assignments(slots, token_indices_sorted)
            d_rows = reference.grad_rows(cast(flat_grad, rows.dtype), v, slots, assignments)
    d_grad = cast(torch.stack(terms).sum((0, 2)), grad.dtype).view(grad.shape) if terms else None
    return d_grad, d_rows, d_scores, None, None, None, None


weighted_restore_backward.register_autograd(_double_backward, setup_context=_setup_double_context)


def _weighted_restore(
    rows: Tensor,
    top_scores: Tensor,
    token_indices_sorted: Tensor,
    addend: Tensor | None = None,
    workspace: Tensor | None = None,
) -> Tensor:
    _check(rows, top_scores, token_indices_sorted, addend)
    num_assignments = top_scores.numel()
    size = workspaces.align(num_assignments * torch.int32.itemsize)
    workspace = workspaces.resolve(OP, workspace, size, rows)
    torch.ops.moe.invert_permutation(token_indices_sorted, num_assignments, workspace)
    out, _ = torch.ops.moe.weighted_restore_gather(
        rows, top_scores, token_indices_sorted, addend, workspace
    )
    return out


torch.library.define(
    "moe::weighted_restore",
    "(Tensor rows, Tensor top_scores, Tensor token_indices_sorted, Tensor? addend=None, "
    "Tensor(a!)? workspace=None) -> Tensor",
)
torch.library.impl("moe::weighted_restore", "CompositeImplicitAutograd", _weighted_restore)
