"""The restores and permute past the dispatcher: an inversion, and one launch each way."""

import math
from typing import Any

import torch
from torch import Tensor

from .. import direct
from .. import workspace as workspaces
from ..backend import flat, load_kernels
from . import arguments


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(max(1, math.prod(shape[i + 1 :])) for i in range(len(shape)))


class _Inversion:
    """Launches of an inversion, and where its result goes."""

    def __init__(self, op: str, token_indices_sorted: Tensor, shape: tuple[int, ...]) -> None:
        self.op, self.device = op, token_indices_sorted.device
        self.shape, self.stride, self.size = shape, _contiguous(shape), math.prod(shape)
        kernels = load_kernels(__package__, "inverse_kernels")
        self.launches = kernels.invert(token_indices_sorted, self.size)

    def __call__(self, token_indices_sorted: Tensor, workspace: Tensor | None) -> Tensor:
        """The inverse: in the workspace, flat, or else a new tensor."""
        if workspace is None:
            inverse = direct.allocator(self.device)(self.shape, self.stride, torch.int32)
        else:
            inverse = workspaces.scratch(self.op, workspace, self.size, torch.int32)
        for launch in self.launches:
            launch(token_indices_sorted, inverse)
        return inverse


class _Plan:
    """Launches and sizes of the calls of one signature."""

    def __init__(
        self,
        rows: Tensor,
        top_scores: Tensor | None,
        token_indices_sorted: Tensor,
        addend: Tensor | None,
        shape: tuple[int, ...],
        op: str,
        parts: list[Any],
        has_inverse: bool,
    ) -> None:
        self.kernels = load_kernels(__package__)
        self.device, self.dtype = rows.device, rows.dtype
        self.shape, self.stride = shape, _contiguous(shape)
        self.out_shape = (*shape[:-1], rows.shape[1])
        self.out_stride = _contiguous(self.out_shape)
        self.rows_shape = tuple(rows.shape)
        self.rows_stride = _contiguous(self.rows_shape)
        self.topk = shape[-1]
        slots = direct.fresh(shape, self.stride, torch.int32, rows)
        self.saved = *parts[:3], parts[-1] if has_inverse else slots
        self.invert = _Inversion(op, token_indices_sorted, shape)
        self.restore = self.kernels.restore(
            rows,
            None if top_scores is None else flat(top_scores),
            None if addend is None else flat(addend),
            math.prod(shape[:-1]),
            self.topk,
        )
        self.restore_backward: direct.Plans[Any] = direct.Plans()

    def forward(
        self,
        rows: Tensor,
        top_scores: Tensor | None,
        token_indices_sorted: Tensor,
        addend: Tensor | None,
        workspace: Tensor | None,
        inverse: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """(result, slots)"""
        empty = direct.allocator(self.device)
        out = empty(self.out_shape, self.out_stride, self.dtype)
        own, copy = inverse, None
        if own is None:
            own = self.invert(token_indices_sorted, workspace)
            if workspace is not None:
                copy = empty(self.shape, self.stride, torch.int32)
        scores = None if top_scores is None else flat(top_scores)
        self.restore(rows, scores, own, None if addend is None else flat(addend), out, copy)
        return out, own if copy is None else copy

    def backward(
        self,
        grad_part: Any,
        grad: Tensor,
        rows: Tensor | None,
        top_scores: Tensor | None,
        token_indices_sorted: Tensor,
        slots: Tensor,
        need_rows: bool,
    ) -> tuple[Tensor | None, Tensor | None]:
        grad, topk, kernels = flat(grad), self.topk, self.kernels
        empty = direct.allocator(self.device)
        key = (grad_part, rows is None, need_rows)
        launch = self.restore_backward.get(key)
        grad_rows = grad_scores = None
        if need_rows:
            grad_rows = empty(self.rows_shape, self.rows_stride, self.dtype)
        if top_scores is None:
            if launch is None:
                launch = kernels.permute(grad, token_indices_sorted, topk)
                self.restore_backward.add(key, launch)
            launch(grad, token_indices_sorted, slots, grad_rows)
            return grad_rows, None
        scores = flat(top_scores)
        if launch is None:
            launch = kernels.restore_backward(
                grad, rows, scores, token_indices_sorted, topk, need_rows
            )
            self.restore_backward.add(key, launch)
        if rows is not None:
            grad_scores = empty(self.shape, self.stride, top_scores.dtype)
        launch(grad, rows, scores, token_indices_sorted, slots, grad_rows, grad_scores)
        return grad_rows, grad_scores


_PLANS: direct.Plans[_Plan] = direct.Plans()


class _Restore(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        top_scores: Tensor | None,
        addend: Tensor | None,
        plan: _Plan,
        token_indices_sorted: Tensor,
        *inversion: Tensor | None,
    ) -> Tensor:
        out, slots = plan.forward(rows, top_scores, token_indices_sorted, addend, *inversion)
        need_rows, need_scores = ctx.needs_input_grad[:2]
        if need_rows or need_scores:
            kept = rows if need_scores else None
            ctx.save_for_backward(kept, top_scores, token_indices_sorted, slots)
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        need_rows, need_scores, need_addend = ctx.needs_input_grad[:3]
        grad_rows = grad_scores = None
        if grad is not None and (need_rows or need_scores):
            saved = ctx.saved_tensors
            plan: _Plan = ctx.plan
            part = direct.grad_part(grad, saved, plan.saved)
            if part is None:
                backward = torch.ops.moe.restore_backward
                grad_rows, grad_scores = backward(grad, *saved, need_rows)
            else:
                rows, top_scores, token_indices_sorted, slots = saved
                grad_rows, grad_scores = plan.backward(
                    part, grad, rows, top_scores, token_indices_sorted, slots, need_rows
                )
        return (
            grad_rows if need_rows else None,
            grad_scores if need_scores else None,
            grad if need_addend else None,
            None,
            None,
            None,
            None,
        )


_APPLY_RESTORE = direct.apply_of(_Restore)


def weighted_restore(
    rows: Tensor,
    top_scores: Tensor,
    token_indices_sorted: Tensor,
    addend: Tensor | None,
    *inversion: Tensor | None,
) -> Tensor | None:
    """The result, or None where the call is for the dispatcher."""
    if top_scores is None:
        return None
    return _call(
        arguments.OP, rows, top_scores, token_indices_sorted, None, None, addend, *inversion
    )


def restore(
    rows: Tensor,
    token_indices_sorted: Tensor,
    num_tokens: int,
    topk: int,
    addend: Tensor | None,
    *inversion: Tensor | None,
) -> Tensor | None:
    """The result, or None where the call is for the dispatcher."""
    if not (_is_plain_size(num_tokens, 0) and _is_plain_size(topk, 1)):
        return None
    inputs = rows, None, token_indices_sorted, num_tokens, topk, addend
    return _call("restore", *inputs, *inversion)


def _is_plain_size(number: int, minimum: int) -> bool:
    """Numbers of other types are for the dispatcher and the checks."""
    return type(number) is int and minimum <= number < 2**63


def _call(
    op: str,
    rows: Tensor,
    top_scores: Tensor | None,
    token_indices_sorted: Tensor,
    num_tokens: int | None,
    topk: int | None,
    addend: Tensor | None,
    workspace: Tensor | None,
    inverse: Tensor | None,
) -> Tensor | None:
    inversion = workspace, inverse
    tensors = direct.signature(rows, top_scores, token_indices_sorted, addend, *inversion)
    if tensors is None or rows is None or token_indices_sorted is None:
        return None
    if workspaces.overlap(workspace, rows, top_scores, token_indices_sorted, addend):
        return None
    if inverse is not None and not inverse.is_contiguous():
        return None
    key = (*tensors, num_tokens, topk)
    plan = _PLANS.get(key)
    if plan is None:
        if top_scores is not None:
            arguments.check_scores(top_scores)
            shape = tuple(top_scores.shape)
        else:
            assert num_tokens is not None and topk is not None
            shape = (num_tokens, topk)
        given = rows, top_scores, token_indices_sorted
        arguments.check(op, *given, shape[:-1], shape[-1], addend, *inversion)
        plan = _Plan(*given, addend, shape, op, tensors, inverse is not None)
        _PLANS.add(key, plan)
    if torch.is_grad_enabled() and (
        rows.requires_grad
        or (top_scores is not None and top_scores.requires_grad)
        or (addend is not None and addend.requires_grad)
    ):
        return _APPLY_RESTORE(rows, top_scores, addend, plan, token_indices_sorted, *inversion)
    return plan.forward(rows, top_scores, token_indices_sorted, addend, *inversion)[0]


class _PermutePlan:
    """Launches and sizes of the calls of permute of one signature."""

    def __init__(self, tokens: Tensor, token_indices_sorted: Tensor, topk: int) -> None:
        kernels = load_kernels(__package__)
        self.device, self.dtype = tokens.device, tokens.dtype
        num_tokens, num_columns = tokens.shape
        self.shape = (num_tokens, topk)
        self.rows_shape = (token_indices_sorted.shape[0], num_columns)
        self.rows_stride = _contiguous(self.rows_shape)
        self.invert = _Inversion("permute", token_indices_sorted, self.shape)
        self.permute = kernels.permute(arguments.as_moved(tokens), token_indices_sorted, topk)

    def forward(
        self,
        tokens: Tensor,
        token_indices_sorted: Tensor,
        workspace: Tensor | None,
        inverse: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """(rows, slots)"""
        rows = direct.allocator(self.device)(self.rows_shape, self.rows_stride, self.dtype)
        if inverse is None:
            inverse = self.invert(token_indices_sorted, workspace)
        moved = arguments.as_moved(tokens), token_indices_sorted, inverse, arguments.as_moved(rows)
        self.permute(*moved)
        return rows, inverse


_PERMUTE_PLANS: direct.Plans[_PermutePlan] = direct.Plans()


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,
        plan: _PermutePlan,
        token_indices_sorted: Tensor,
        inverse: Tensor | None,
    ) -> Tensor:
        rows, slots = plan.forward(tokens, token_indices_sorted, None, inverse)
        ctx.save_for_backward(token_indices_sorted, slots)
        ctx.shape = plan.shape
        ctx.set_materialize_grads(False)
        return rows

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_tokens = None
        if grad is not None:
            token_indices_sorted, slots = ctx.saved_tensors
            grad_tokens = restore(grad, token_indices_sorted, *ctx.shape, None, None, slots)
            if grad_tokens is None:
                # Not the public op: under is_grads_batched that has no batching rule.
                inputs = grad, None, token_indices_sorted, None, None, list(ctx.shape), slots
                grad_tokens = torch.ops.moe.restore_gather(*inputs)[0]
        return grad_tokens, None, None, None


_APPLY_PERMUTE = direct.apply_of(_Permute)


def permute(
    tokens: Tensor,
    token_indices_sorted: Tensor,
    topk: int,
    workspace: Tensor | None,
    inverse: Tensor | None,
) -> Tensor | None:
    """The rows, or None where the call is for the dispatcher."""
    if not _is_plain_size(topk, 1):
        return None
    tensors = direct.signature(tokens, token_indices_sorted, workspace, inverse)
    if tensors is None or tokens is None or token_indices_sorted is None:
        return None
    if workspaces.overlap(workspace, tokens, token_indices_sorted):
        return None
    if inverse is not None and not inverse.is_contiguous():
        return None
    recorded = tokens.requires_grad and torch.is_grad_enabled()
    key = (*tensors, topk, recorded)
    plan = _PERMUTE_PLANS.get(key)
    if plan is None:
        arguments.check_permute(tokens, token_indices_sorted, topk, workspace, inverse)
        plan = _PermutePlan(tokens, token_indices_sorted, topk)
        _PERMUTE_PLANS.add(key, plan)
    if recorded:
        return _APPLY_PERMUTE(tokens, plan, token_indices_sorted, inverse)
    return plan.forward(tokens, token_indices_sorted, workspace, inverse)[0]


def inverse_permutation(token_indices_sorted: Tensor, num_tokens: int, topk: int) -> Tensor | None:
    """The inverse, or None where the call is for the dispatcher."""
    if not (_is_plain_size(num_tokens, 0) and _is_plain_size(topk, 1)):
        return None
    tensors = direct.signature(token_indices_sorted)
    if tensors is None or token_indices_sorted is None:
        return None
    key = (*tensors, num_tokens, topk)
    plan = _INVERSIONS.get(key)
    if plan is None:
        arguments.check_inverse_permutation(token_indices_sorted, num_tokens, topk)
        plan = _Inversion("inverse_permutation", token_indices_sorted, (num_tokens, topk))
        _INVERSIONS.add(key, plan)
    return plan(token_indices_sorted, None)


_INVERSIONS: direct.Plans[_Inversion] = direct.Plans()


class _ScoresPlan:
    """Launches of scores_to_rows and of its adjoint."""

    def __init__(self, top_scores: Tensor, token_indices_sorted: Tensor) -> None:
        self.kernels = load_kernels(__package__, "inverse_kernels")
        self.device, self.dtype = top_scores.device, top_scores.dtype
        self.shape = tuple(top_scores.shape)
        self.num_rows = token_indices_sorted.shape[0]
        self.to_rows = self.kernels.scores_to_rows(top_scores, token_indices_sorted)
        self.to_scores: direct.Plans[Any] = direct.Plans()

    def forward(self, top_scores: Tensor, token_indices_sorted: Tensor, slots: Tensor) -> Tensor:
        row_scores = direct.allocator(self.device)((self.num_rows,), (1,), self.dtype)
        self.to_rows(top_scores, token_indices_sorted, slots, row_scores)
        return row_scores

    def backward(self, grad_part: Any, grad: Tensor, slots: Tensor) -> Tensor:
        launch = self.to_scores.get((grad_part,))
        if launch is None:
            launch = self.kernels.rows_to_scores(grad, math.prod(self.shape))
            self.to_scores.add((grad_part,), launch)
        scores = direct.allocator(self.device)(self.shape, (self.shape[1], 1), self.dtype)
        launch(grad, slots, scores)
        return scores


class _ScoresToRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        top_scores: Tensor,
        plan: _ScoresPlan,
        token_indices_sorted: Tensor,
        slots: Tensor,
        parts: list[Any],
    ) -> Tensor:
        ctx.save_for_backward(token_indices_sorted, slots)
        ctx.plan, ctx.parts = plan, parts
        ctx.set_materialize_grads(False)
        return plan.forward(top_scores, token_indices_sorted, slots)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_scores = None
        if grad is not None:
            saved = ctx.saved_tensors
            part = direct.grad_part(grad, saved, ctx.parts)
            if part is None:
                grad_scores = torch.ops.moe.rows_to_scores(grad, *saved)
            else:
                grad_scores = ctx.plan.backward(part, grad, saved[1])
        return grad_scores, None, None, None, None


_APPLY_SCORES = direct.apply_of(_ScoresToRows)
_SCORES_PLANS: direct.Plans[_ScoresPlan] = direct.Plans()


def permute_with_scores(
    tokens: Tensor,
    top_scores: Tensor,
    token_indices_sorted: Tensor,
    workspace: Tensor | None,
    inverse: Tensor | None,
) -> tuple[Tensor, Tensor] | None:
    """(rows, row_scores), or None where the call is for the dispatcher."""
    tensors = direct.signature(tokens, token_indices_sorted, top_scores, workspace, inverse)
    if tensors is None or tokens is None or top_scores is None or token_indices_sorted is None:
        return None
    if inverse is not None and not inverse.is_contiguous():
        return None
    key = *tensors, arguments.is_recorded(tokens)
    plan = _SCORES_PLANS.get(key)
    if plan is None:
        arguments.check_permute_with_scores(
            tokens, top_scores, token_indices_sorted, workspace, inverse
        )
        plan = _SCORES_PLANS.add(key, _ScoresPlan(top_scores, token_indices_sorted))
    num_tokens, topk = plan.shape
    if inverse is None:
        inverse = inverse_permutation(token_indices_sorted, num_tokens, topk)
    rows = permute(tokens, token_indices_sorted, topk, None, inverse)
    if inverse is None or rows is None:
        return None
    if top_scores.requires_grad and torch.is_grad_enabled():
        slots = direct.fresh(plan.shape, (topk, 1), torch.int32, tokens)
        parts = [tensors[1], tensors[4] or slots]
        row_scores = _APPLY_SCORES(top_scores, plan, token_indices_sorted, inverse, parts)
    else:
        row_scores = plan.forward(top_scores, token_indices_sorted, inverse)
    return rows, row_scores
