"""Registration of ``weighted_restore``, ``restore``, ``permute`` and ``inverse_permutation``.

Each public name is a composite. ``restore_gather`` returns the result and the slots, which are the
inverse permutation; it saves those and inputs for its gradient. Without a workspace it inverts the
permutation into the slots itself. With one, ``invert_permutation`` writes the inverse there first,
and the gather reads it; the workspace is never saved, so two calls in one graph may share it. Where
the caller has the inverse, that is read and saved. The backward is an op of its own. Without scores
the two are each other's adjoint: ``permute`` is the backward of ``restore``, and the other way
round. With scores the backward has a backward in plain PyTorch.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import checks
from ..backend import flat, load_kernels
from ..batching import register_vmap
from ..fixed_order import accumulator_dtype, cast
from . import arguments, inverse_ops, reference


def _bounded(slots: Tensor, token_indices_sorted: Tensor) -> Tensor:
    """A given inverse may hold anything: an entry outside the rows means that no row holds it."""
    return torch.where((slots < 0) | (slots >= token_indices_sorted.shape[0]), -1, slots)


@torch.library.custom_op("moe::restore_gather", mutates_args=(), device_types="cpu")
def restore_gather(
    rows: Tensor,
    top_scores: Tensor | None,
    token_indices_sorted: Tensor,
    addend: Tensor | None,
    workspace: Tensor | None,
    shape: Sequence[int],
    inverse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(the weighted sum of each token's rows [*, H], slots int32 of ``shape`` = [*, K]).

    The slots, the row of each assignment or -1, are saved for the backward. To invert again there
    took 2.4 us at 65536 assignments on an H200, half of the backward of a small call, and would
    need scratch as large. Where the inverse is given it is saved, and the slots are empty.

    They have a second use: Inductor moves an op that returns one tensor to its first use, which may
    lie behind the next call's write to the same workspace, and then clones the workspace; the items
    of a tuple are taken where they were traced.
    """
    out, slots = _empty_results(rows, inverse, shape)
    if inverse is not None:
        own = inverse
    elif workspace is not None:
        own = inverse_ops.inverse_in("restore_gather", workspace, slots.numel())
    else:
        own = reference.invert(token_indices_sorted, slots.numel())
    own = _bounded(own, token_indices_sorted).view(list(shape))
    if inverse is None:
        slots.copy_(own)
    scores = None if top_scores is None else flat(top_scores)
    flat_addend = None if addend is None else flat(addend)
    result = reference.weighted_restore(rows, scores, flat(own).long(), flat_addend)
    # Into a fresh tensor: a view returned here could not be changed in place by the caller.
    flat(out).copy_(result)
    return out, slots


@restore_gather.register_kernel("cuda")
def _restore_gather_cuda(
    rows: Tensor,
    top_scores: Tensor | None,
    token_indices_sorted: Tensor,
    addend: Tensor | None,
    workspace: Tensor | None,
    shape: Sequence[int],
    inverse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    name, (num_rows, num_columns) = "restore_gather", rows.shape
    arguments.check_inner(
        name, num_rows, num_columns, shape, token_indices_sorted, top_scores, addend
    )
    out, slots = _empty_results(rows, inverse, shape)
    scores = None if top_scores is None else flat(top_scores)
    flat_addend = None if addend is None else flat(addend)
    copy = None
    if inverse is not None:
        arguments.check_inversion(name, shape, rows, "rows", None, inverse)
        own = inverse.contiguous()
    elif workspace is not None:
        own, copy = inverse_ops.inverse_in(name, workspace, slots.numel()), slots
    else:
        own = slots
        inverse_ops.invert(token_indices_sorted, slots)
    num_tokens, topk = math.prod(shape[:-1]), shape[-1]
    launch = load_kernels(__package__).restore(rows, scores, flat_addend, num_tokens, topk)
    launch(rows, scores, own, flat_addend, out, copy)
    return out, slots


@restore_gather.register_fake
def _(
    rows: Tensor,
    top_scores: Tensor | None,
    token_indices_sorted: Tensor,
    addend: Tensor | None,
    workspace: Tensor | None,
    shape: Sequence[int],
    inverse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    return _empty_results(rows, inverse, shape)


def _empty_results(
    rows: Tensor, inverse: Tensor | None, shape: Sequence[int]
) -> tuple[Tensor, Tensor]:
    out = rows.new_empty([*shape[:-1], rows.shape[1]])
    return out, rows.new_empty(shape if inverse is None else (0,), dtype=torch.int32)


@torch.library.custom_op("moe::restore_backward", mutates_args=(), device_types="cpu")
def restore_backward(
    grad: Tensor,
    rows: Tensor | None,
    top_scores: Tensor | None,
    token_indices_sorted: Tensor,
    slots: Tensor,
    need_rows: bool,
) -> tuple[Tensor, Tensor]:
    """(gradient of rows, gradient of top_scores), the one that is not needed of size 0.

    ``rows`` are given where the scores' gradient is needed, which alone reads them.
    """
    grad_rows, grad_scores = _empty_grads(
        grad, rows, top_scores, token_indices_sorted, slots, need_rows
    )
    flat_slots = _bounded(flat(slots).long(), token_indices_sorted)
    flat_grad = flat(grad)
    if need_rows:
        assignments = reference.row_assignments(flat_slots, token_indices_sorted)
        grad_rows.copy_(reference.grad_rows(flat_grad, top_scores, flat_slots, assignments))
    if rows is not None:
        sums = reference.grad_scores(flat_grad, rows, flat_slots, grad_scores.dtype)
        flat(grad_scores).copy_(sums)
    return grad_rows, grad_scores


@restore_backward.register_kernel("cuda")
def _restore_backward_cuda(
    grad: Tensor,
    rows: Tensor | None,
    top_scores: Tensor | None,
    token_indices_sorted: Tensor,
    slots: Tensor,
    need_rows: bool,
) -> tuple[Tensor, Tensor]:
    name, num_columns = "restore_backward", grad.shape[-1]
    num_rows = token_indices_sorted.shape[0] if rows is None else rows.shape[0]
    arguments.check_inner(
        name, num_rows, num_columns, slots.shape, token_indices_sorted, top_scores
    )
    if rows is not None:
        expected = [num_rows, num_columns]
        checks.same_shape(name, "rows", rows, expected, f"[N, H] = {expected}")
    expected = [*slots.shape[:-1], num_columns]
    checks.same_shape(name, "grad", grad, expected, f"[*, H] = {expected}")
    checks.value(
        rows is None or top_scores is not None, name, "top_scores", "given with rows", top_scores
    )
    checks.dtype(name, "slots", slots, (torch.int32,))
    # A hook on saved tensors may have brought them with other strides.
    slots = slots.contiguous()
    grad_rows, grad_scores = _empty_grads(
        grad, rows, top_scores, token_indices_sorted, slots, need_rows
    )
    flat_grad, topk, kernels = flat(grad), slots.shape[-1], load_kernels(__package__)
    if top_scores is None:
        if need_rows:
            launch = kernels.permute(flat_grad, token_indices_sorted, topk)
            launch(flat_grad, token_indices_sorted, slots, grad_rows)
        return grad_rows, grad_scores
    scores = flat(top_scores)
    launch = kernels.restore_backward(
        flat_grad, rows, scores, token_indices_sorted, topk, need_rows
    )
    launch(
        flat_grad,
        rows,
        scores,
        token_indices_sorted,
        slots,
        grad_rows if need_rows else None,
        None if rows is None else grad_scores,
    )
    return grad_rows, grad_scores


@restore_backward.register_fake
def _(
    grad: Tensor,
    rows: Tensor | None,
    top_scores: Tensor | None,
    token_indices_sorted: Tensor,
    slots: Tensor,
    need_rows: bool,
) -> tuple[Tensor, Tensor]:
    return _empty_grads(grad, rows, top_scores, token_indices_sorted, slots, need_rows)


def _empty_grads(
    grad: Tensor,
    rows: Tensor | None,
    top_scores: Tensor | None,
    token_indices_sorted: Tensor,
    slots: Tensor,
    need_rows: bool,
) -> tuple[Tensor, Tensor]:
    shape = (token_indices_sorted.shape[0], grad.shape[-1]) if need_rows else (0,)
    dtype = grad.dtype if top_scores is None else top_scores.dtype
    need_scores = rows is not None
    return grad.new_empty(shape), grad.new_empty(slots.shape if need_scores else (0,), dtype=dtype)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    rows, top_scores, token_indices_sorted, _, _, _, inverse = inputs
    slots = output[1]
    # Only the gradient of the scores reads the rows: a frozen router does not keep them alive.
    need_rows, need_scores = ctx.needs_input_grad[:2]
    if need_rows or need_scores:
        kept = rows if need_scores else None
        own = slots if inverse is None else inverse
        ctx.save_for_backward(kept, top_scores, token_indices_sorted, own)
    ctx.mark_non_differentiable(slots)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    need_rows, need_scores, _, need_addend, *_ = ctx.needs_input_grad
    grad_rows = grad_scores = None
    if grad is not None and (need_rows or need_scores):
        grad_rows, grad_scores = torch.ops.moe.restore_backward(grad, *ctx.saved_tensors, need_rows)
    return (
        grad_rows if need_rows else None,
        grad_scores if need_scores else None,
        None,
        grad if need_addend else None,
        None,
        None,
        None,
    )


restore_gather.register_autograd(_backward, setup_context=_setup_context)


def _setup_double_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.has_rows = inputs[5]
    ctx.set_materialize_grads(False)


def _double_backward(
    ctx: Any, grad_grad_rows: Tensor | None, grad_grad_scores: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Differentiable to any order: without scores by the gather, else in plain PyTorch.

    With u = grad_grad_rows and v = grad_grad_scores:

    grad[t]          += sum_k top_scores[t, k] * u[slot] + v[t, k] * rows[slot]
    rows[slot]       += v[t, k] * grad[t]
    top_scores[t, k] += sum_h grad[t, h] * u[slot, h]
    """
    grad, rows, top_scores, token_indices_sorted, slots = ctx.saved_tensors
    need_grad, need_rows, need_scores = ctx.needs_input_grad[:3]
    if top_scores is None:
        d_grad = None
        if grad_grad_rows is not None and ctx.has_rows and need_grad:
            inputs = grad_grad_rows, None, token_indices_sorted, None, None
            d_grad = torch.ops.moe.restore_gather(*inputs, list(slots.shape), slots)[0]
        return d_grad, None, None, None, None, None
    dtype = accumulator_dtype(grad.dtype)
    flat_grad, shape = flat(grad).to(dtype), slots.shape
    slots = _bounded(flat(slots).long(), token_indices_sorted)
    held = (slots >= 0)[..., None]
    terms, d_rows, d_scores = [], None, None
    if grad_grad_rows is not None and ctx.has_rows:
        u = reference.with_zero_row(grad_grad_rows)[slots].to(dtype)  # [T, K, H]
        if need_grad:
            weighted = flat(top_scores).to(dtype)[..., None] * u
            terms.append(torch.where(held, weighted, 0.0))
        if need_scores:
            products = torch.where(held, flat_grad[:, None, :] * u, 0.0)
            d_scores = cast(products.sum(-1), top_scores.dtype).view(shape)
    if grad_grad_scores is not None and rows is not None:
        v = flat(grad_grad_scores).to(dtype)
        if need_grad:
            gathered = reference.with_zero_row(rows)[slots].to(dtype)
            terms.append(torch.where(held, v[..., None] * gathered, 0.0))
        if need_rows:
            assignments = reference.row_assignments(slots, token_indices_sorted)
            d_rows = reference.grad_rows(cast(flat_grad, rows.dtype), v, slots, assignments)
    d_grad = cast(torch.stack(terms).sum((0, 2)), grad.dtype).view(grad.shape) if terms else None
    return d_grad, d_rows, d_scores, None, None, None


restore_backward.register_autograd(_double_backward, setup_context=_setup_double_context)


def _gather(
    rows: Tensor,
    top_scores: Tensor | None,
    token_indices_sorted: Tensor,
    addend: Tensor | None,
    workspace: Tensor | None,
    inverse: Tensor | None,
    shape: Sequence[int],
) -> Tensor:
    if inverse is not None:
        workspace = None
    elif workspace is not None:
        torch.ops.moe.invert_permutation(token_indices_sorted, math.prod(shape), workspace)
    out, _ = torch.ops.moe.restore_gather(
        rows, top_scores, token_indices_sorted, addend, workspace, shape, inverse
    )
    return out


def _weighted_restore(
    rows: Tensor,
    top_scores: Tensor,
    token_indices_sorted: Tensor,
    addend: Tensor | None = None,
    workspace: Tensor | None = None,
    inverse: Tensor | None = None,
) -> Tensor:
    arguments.check_scores(top_scores)
    shape = list(top_scores.shape)
    inversion = workspace, inverse
    arguments.check(
        arguments.OP,
        rows,
        top_scores,
        token_indices_sorted,
        shape[:-1],
        shape[-1],
        addend,
        *inversion,
    )
    return _gather(rows, top_scores, token_indices_sorted, addend, *inversion, shape)


def _restore(
    rows: Tensor,
    token_indices_sorted: Tensor,
    num_tokens: int,
    topk: int,
    addend: Tensor | None = None,
    workspace: Tensor | None = None,
    inverse: Tensor | None = None,
) -> Tensor:
    checks.integer("restore", "num_tokens", num_tokens, 0)
    checks.integer("restore", "topk", topk, 1)
    inversion = workspace, inverse
    arguments.check(
        "restore", rows, None, token_indices_sorted, [num_tokens], topk, addend, *inversion
    )
    return _gather(rows, None, token_indices_sorted, addend, *inversion, [num_tokens, topk])


def _inverse_permutation(token_indices_sorted: Tensor, num_tokens: int, topk: int) -> Tensor:
    arguments.check_inverse_permutation(token_indices_sorted, num_tokens, topk)
    return torch.ops.moe.inverse(token_indices_sorted, [num_tokens, topk])


def _permute(
    tokens: Tensor,
    token_indices_sorted: Tensor,
    topk: int,
    workspace: Tensor | None = None,
    inverse: Tensor | None = None,
) -> Tensor:
    arguments.check_permute(tokens, token_indices_sorted, topk, workspace, inverse)
    num_tokens = tokens.shape[0]
    if inverse is None and workspace is not None and not arguments.is_recorded(tokens):
        num_assignments = num_tokens * topk
        torch.ops.moe.invert_permutation(token_indices_sorted, num_assignments, workspace)
        num_bytes = num_assignments * torch.int32.itemsize
        inverse = workspace[:num_bytes].view(torch.int32).view(num_tokens, topk)
    elif inverse is None:
        inverse = torch.ops.moe.inverse(token_indices_sorted, [num_tokens, topk])
    moved = arguments.as_moved(tokens)
    rows, _ = torch.ops.moe.restore_backward(moved, None, None, token_indices_sorted, inverse, True)
    return rows if moved is tokens else rows.view(tokens.dtype)


def _permute_with_scores(
    tokens: Tensor,
    top_scores: Tensor,
    token_indices_sorted: Tensor,
    workspace: Tensor | None = None,
    inverse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    arguments.check_permute_with_scores(
        tokens, top_scores, token_indices_sorted, workspace, inverse
    )
    num_tokens, topk = top_scores.shape
    if inverse is None:
        inverse = torch.ops.moe.inverse(token_indices_sorted, [num_tokens, topk])
    rows = torch.ops.moe.permute(tokens, token_indices_sorted, topk, None, inverse)
    return rows, torch.ops.moe.scores_to_rows(top_scores, token_indices_sorted, inverse)


_INVERSION = "Tensor(a!)? workspace=None, Tensor? inverse=None"
for _name, _arguments, _function in (
    (
        "weighted_restore",
        "Tensor rows, Tensor top_scores, Tensor token_indices_sorted, Tensor? addend=None, "
        + _INVERSION,
        _weighted_restore,
    ),
    (
        "restore",
        "Tensor rows, Tensor token_indices_sorted, SymInt num_tokens, int topk, "
        "Tensor? addend=None, " + _INVERSION,
        _restore,
    ),
    (
        "permute",
        "Tensor tokens, Tensor token_indices_sorted, int topk, " + _INVERSION,
        _permute,
    ),
    (
        "permute_with_scores",
        "Tensor tokens, Tensor top_scores, Tensor token_indices_sorted, " + _INVERSION,
        _permute_with_scores,
    ),
    (
        "inverse_permutation",
        "Tensor token_indices_sorted, SymInt num_tokens, int topk",
        _inverse_permutation,
    ),
):
    _results = "(Tensor, Tensor)" if _name == "permute_with_scores" else "Tensor"
    torch.library.define(f"moe::{_name}", f"({_arguments}) -> {_results}")
    torch.library.impl(f"moe::{_name}", "CompositeImplicitAutograd", _function)
    register_vmap(_name)
