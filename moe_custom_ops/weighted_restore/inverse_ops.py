"""Inner ops of the inverse permutation, and of scores that it moves to rows and back."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import checks
from .. import workspace as workspaces
from ..backend import flat, load_kernels
from . import reference


def inverse_in(op: str, workspace: Tensor, num_assignments: int) -> Tensor:
    return workspaces.scratch(op, workspace, num_assignments, torch.int32)


@torch.library.custom_op("moe::invert_permutation", mutates_args={"workspace"}, device_types="cpu")
def invert_permutation(
    token_indices_sorted: Tensor, num_assignments: int, workspace: Tensor
) -> None:
    """Write the row of each assignment to ``workspace`` as int32, or -1 where no row holds it."""
    inverse = reference.invert(token_indices_sorted, num_assignments)
    inverse_in("invert_permutation", workspace, num_assignments).copy_(inverse)


@invert_permutation.register_kernel("cuda")
def _invert_permutation_cuda(
    token_indices_sorted: Tensor, num_assignments: int, workspace: Tensor
) -> None:
    inverse = inverse_in("invert_permutation", workspace, num_assignments)
    invert(token_indices_sorted, inverse)


def invert(token_indices_sorted: Tensor, inverse: Tensor) -> None:
    kernels = load_kernels(__package__, "inverse_kernels")
    for launch in kernels.invert(token_indices_sorted, inverse.numel()):
        launch(token_indices_sorted, inverse)


@invert_permutation.register_fake
def _(token_indices_sorted: Tensor, num_assignments: int, workspace: Tensor) -> None:
    return None


@torch.library.custom_op("moe::inverse", mutates_args=(), device_types="cpu")
def inverse(token_indices_sorted: Tensor, shape: Sequence[int]) -> Tensor:
    """The row of each assignment, or -1: int32 of ``shape`` = [T, K]."""
    result = reference.invert(token_indices_sorted, math.prod(shape))
    return result.to(torch.int32).view(list(shape))


@inverse.register_kernel("cuda")
def _inverse_cuda(token_indices_sorted: Tensor, shape: Sequence[int]) -> Tensor:
    result = token_indices_sorted.new_empty(shape, dtype=torch.int32)
    invert(token_indices_sorted, result)
    return result


@inverse.register_fake
def _(token_indices_sorted: Tensor, shape: Sequence[int]) -> Tensor:
    return token_indices_sorted.new_empty(shape, dtype=torch.int32)


def _check_slots_of_scores(top_scores: Tensor, slots: Tensor) -> None:
    name = "scores_to_rows"
    checks.dtype(name, "slots", slots, (torch.int32,))
    checks.same_shape(name, "slots", slots, top_scores.shape, "that of top_scores")


@torch.library.custom_op("moe::scores_to_rows", mutates_args=(), device_types="cpu")
def scores_to_rows(top_scores: Tensor, token_indices_sorted: Tensor, slots: Tensor) -> Tensor:
    """The score of each row's assignment, zero at padding rows: [N]."""
    _check_slots_of_scores(top_scores, slots)
    assignments = reference.row_assignments(slots, token_indices_sorted)
    return reference.scores_to_rows(top_scores, assignments)


@scores_to_rows.register_kernel("cuda")
def _scores_to_rows_cuda(top_scores: Tensor, token_indices_sorted: Tensor, slots: Tensor) -> Tensor:
    _check_slots_of_scores(top_scores, slots)
    scores = flat(top_scores)
    row_scores = top_scores.new_empty(token_indices_sorted.shape)
    kernels = load_kernels(__package__, "inverse_kernels")
    launch = kernels.scores_to_rows(scores, token_indices_sorted)
    launch(scores, token_indices_sorted, slots.contiguous(), row_scores)
    return row_scores


@scores_to_rows.register_fake
def _(top_scores: Tensor, token_indices_sorted: Tensor, slots: Tensor) -> Tensor:
    return top_scores.new_empty(token_indices_sorted.shape)


@torch.library.custom_op("moe::rows_to_scores", mutates_args=(), device_types="cpu")
def rows_to_scores(row_scores: Tensor, token_indices_sorted: Tensor, slots: Tensor) -> Tensor:
    """The value of each assignment's row, zero where no row holds it: the shape of ``slots``."""
    return reference.rows_to_scores(row_scores, slots)


@rows_to_scores.register_kernel("cuda")
def _rows_to_scores_cuda(row_scores: Tensor, token_indices_sorted: Tensor, slots: Tensor) -> Tensor:
    checks.dtype("rows_to_scores", "slots", slots, (torch.int32,))
    scores = row_scores.new_empty(slots.shape)
    kernels = load_kernels(__package__, "inverse_kernels")
    launch = kernels.rows_to_scores(row_scores, slots.numel())
    launch(row_scores, slots.contiguous(), scores)
    return scores


@rows_to_scores.register_fake
def _(row_scores: Tensor, token_indices_sorted: Tensor, slots: Tensor) -> Tensor:
    return row_scores.new_empty(slots.shape)


def _save_order(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])
    ctx.set_materialize_grads(False)


def _scores_backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None, None]:
    adjoint = torch.ops.moe.rows_to_scores
    return None if grad is None else adjoint(grad, *ctx.saved_tensors), None, None


def _rows_backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None, None]:
    adjoint = torch.ops.moe.scores_to_rows
    return None if grad is None else adjoint(grad, *ctx.saved_tensors), None, None


scores_to_rows.register_autograd(_scores_backward, setup_context=_save_order)
rows_to_scores.register_autograd(_rows_backward, setup_context=_save_order)
