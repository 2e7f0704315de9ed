"""What permute and the restores take: argument checks, and sizes of a workspace."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .. import checks
from .. import workspace as workspaces

OP = "weighted_restore"
# Moved by permute without a gradient: quantised tokens, their scales, and indices.
MOVED_DTYPES = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
)


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
    return _workspace_size("weighted_restore_workspace_size", num_tokens, topk)


def permute_workspace_size(num_tokens: int, topk: int) -> int:
    """Bytes of workspace that :func:`permute` needs: 4 per assignment.

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
    return _workspace_size("permute_workspace_size", num_tokens, topk)


def _workspace_size(name: str, num_tokens: int, topk: int) -> int:
    checks.integer(name, "num_tokens", num_tokens, 0)
    checks.integer(name, "topk", topk, 1)
    return inverse_size(num_tokens * topk)


def inverse_size(num_assignments: int) -> int:
    return workspaces.align(num_assignments * torch.int32.itemsize)


def shape_of(top_scores: Tensor | None, num_tokens: int, topk: int) -> tuple[int, ...]:
    """[*, K]: of the scores, or of a restore without them."""
    if top_scores is None:
        checks.integer("restore", "num_tokens", num_tokens, 0)
        checks.integer("restore", "topk", topk, 1)
        return num_tokens, topk
    checks.dtype(OP, "top_scores", top_scores, checks.FLOAT_DTYPES)
    has_topk = top_scores.dim() >= 1 and top_scores.shape[-1] >= 1
    checks.shape(OP, "top_scores", top_scores, "[*, K] with K >= 1", has_topk)
    return tuple(top_scores.shape)


def check(
    rows: Tensor,
    top_scores: Tensor | None,
    token_indices_sorted: Tensor,
    shape: Sequence[int],
    addend: Tensor | None,
    workspace: Tensor | None,
    inverse: Tensor | None,
) -> None:
    """Raise unless the arguments are what a restore to ``shape`` = [*, K] takes."""
    op = "restore" if top_scores is None else OP
    lead, topk = shape[:-1], shape[-1]
    checks.supported_device(op, "rows", rows)
    checks.dtype(op, "rows", rows, checks.FLOAT_DTYPES)
    checks.rank(op, "rows", rows, "[N, H]")
    if top_scores is not None:
        checks.same_device(op, "top_scores", top_scores, rows, "rows")
    checks.dtype(op, "token_indices_sorted", token_indices_sorted, checks.INDEX_DTYPES)
    checks.same_device(op, "token_indices_sorted", token_indices_sorted, rows, "rows")
    _check_indices(op, rows.shape[0], token_indices_sorted)
    assignments = "top_scores" if top_scores is not None else "num_tokens * topk"
    checks.count(op, "rows", rows.shape[0])
    _check_width(op, "rows", rows)
    checks.count(op, assignments, math.prod(lead) * topk)
    if addend is not None:
        expected = [*lead, rows.shape[1]]
        checks.dtype(op, "addend", addend, (rows.dtype,), ", not that of rows")
        checks.same_shape(op, "addend", addend, expected, f"[*, H] = {expected}")
        checks.same_device(op, "addend", addend, rows, "rows")
    checks.no_forward_tangent(op, rows, top_scores, addend)
    check_inversion(op, shape, rows, "rows", workspace, inverse)
    workspaces.apart(
        op,
        workspace,
        rows=rows,
        top_scores=top_scores,
        token_indices_sorted=token_indices_sorted,
        addend=addend,
    )


def check_permute(
    tokens: Tensor,
    token_indices_sorted: Tensor,
    topk: int,
    workspace: Tensor | None,
    inverse: Tensor | None,
    op: str = "permute",
    assignments: str = "T * topk",
) -> None:
    checks.supported_device(op, "tokens", tokens)
    checks.dtype(op, "tokens", tokens, (*checks.FLOAT_DTYPES, *MOVED_DTYPES))
    checks.rank(op, "tokens", tokens, "[T, H]")
    name = "token_indices_sorted"
    checks.dtype(op, name, token_indices_sorted, checks.INDEX_DTYPES)
    checks.rank(op, name, token_indices_sorted, "[N]")
    checks.same_device(op, name, token_indices_sorted, tokens, "tokens")
    checks.integer(op, "topk", topk, 1)
    checks.count(op, name, token_indices_sorted.shape[0])
    checks.count(op, assignments, tokens.shape[0] * topk)
    _check_width(op, "tokens", tokens)
    if tokens.dtype in MOVED_DTYPES and is_recorded(tokens):
        got = f"{checks.dtype_name(tokens.dtype)} that requires one"
        checks.type_(False, op, "tokens", "of a dtype that has a gradient", got)
    checks.no_forward_tangent(op, tokens)
    check_inversion(op, [tokens.shape[0], topk], tokens, "tokens", workspace, inverse)
    inputs = {"tokens": tokens, "token_indices_sorted": token_indices_sorted}
    workspaces.apart(op, workspace, **inputs)


def check_permute_with_scores(
    tokens: Tensor,
    top_scores: Tensor,
    token_indices_sorted: Tensor,
    workspace: Tensor | None,
    inverse: Tensor | None,
) -> None:
    name = "permute_with_scores"
    checks.dtype(name, "tokens", tokens, (*checks.FLOAT_DTYPES, *MOVED_DTYPES))
    checks.rank(name, "tokens", tokens, "[T, H]")
    checks.dtype(name, "top_scores", top_scores, checks.FLOAT_DTYPES)
    checks.rank(name, "top_scores", top_scores, "[T, K]")
    checks.same_device(name, "top_scores", top_scores, tokens, "tokens")
    num_tokens, topk = tokens.shape[0], top_scores.shape[1]
    fits = (top_scores.shape[0] == num_tokens) & (topk >= 1)
    expected = f"[T, K] = [{num_tokens}, K] with K >= 1"
    checks.shape(name, "top_scores", top_scores, expected, fits)
    checks.no_forward_tangent(name, top_scores)
    check_permute(
        tokens, token_indices_sorted, topk, workspace, inverse, name, assignments="top_scores"
    )


def _check_width(op: str, name: str, tensor: Tensor) -> None:
    expected = "of fewer than 2^31 columns"
    checks.value(tensor.shape[1] < 2**31, op, name, expected, tensor.shape[1])


def check_inversion(
    op: str,
    shape: Sequence[int],
    like: Tensor,
    like_name: str,
    workspace: Tensor | None,
    inverse: Tensor | None,
) -> None:
    if workspace is not None:
        workspaces.check(op, workspace, inverse_size(math.prod(shape)), like)
    if inverse is not None:
        checks.dtype(op, "inverse", inverse, (torch.int32,))
        checks.same_device(op, "inverse", inverse, like, like_name)
        description = f"{'[*, K]' if op == OP else '[T, K]'} = {list(shape)}"
        checks.same_shape(op, "inverse", inverse, shape, description)


def _check_indices(op: str, num_rows: int, token_indices_sorted: Tensor) -> None:
    description = f"[N] = [{num_rows}], one entry per row"
    name = "token_indices_sorted"
    checks.same_shape(op, name, token_indices_sorted, [num_rows], description)


def check_backward(
    grad: Tensor,
    rows: Tensor | None,
    top_scores: Tensor | None,
    token_indices_sorted: Tensor,
    slots: Tensor,
) -> None:
    """What the backward relies on; anyone can call the inner ops."""
    op = "restore_backward"
    checks.dtype(op, "grad", grad, checks.FLOAT_DTYPES)
    checks.shape(op, "grad", grad, "[*, H]", grad.dim() >= 1)
    num_columns = grad.shape[-1]
    _check_order(op, token_indices_sorted, grad, "grad")
    num_rows = token_indices_sorted.shape[0] if rows is None else rows.shape[0]
    _check_indices(op, num_rows, token_indices_sorted)
    if top_scores is not None:
        description = f"{list(slots.shape)}, that of the slots"
        checks.same_shape(op, "top_scores", top_scores, slots.shape, description)
    if rows is not None:
        expected = [num_rows, num_columns]
        checks.dtype(op, "rows", rows, (grad.dtype,), ", not that of grad")
        checks.same_shape(op, "rows", rows, expected, f"[N, H] = {expected}")
        checks.same_device(op, "rows", rows, grad, "grad")
        checks.value(top_scores is not None, op, "top_scores", "given with rows", top_scores)
    expected = [*slots.shape[:-1], num_columns]
    checks.same_shape(op, "grad", grad, expected, f"[*, H] = {expected}")
    check_slots(op, slots)


def check_slots(op: str, slots: Tensor) -> None:
    checks.dtype(op, "slots", slots, (torch.int32,))


def _check_order(op: str, token_indices_sorted: Tensor, like: Tensor, like_name: str) -> None:
    name = "token_indices_sorted"
    checks.dtype(op, name, token_indices_sorted, checks.INDEX_DTYPES)
    checks.rank(op, name, token_indices_sorted, "[N]")
    checks.same_device(op, name, token_indices_sorted, like, like_name)


def check_scores_to_rows(top_scores: Tensor, token_indices_sorted: Tensor, slots: Tensor) -> None:
    op = "scores_to_rows"
    checks.dtype(op, "top_scores", top_scores, checks.FLOAT_DTYPES)
    _check_order(op, token_indices_sorted, top_scores, "top_scores")
    check_slots(op, slots)
    checks.same_shape(op, "slots", slots, top_scores.shape, "that of top_scores")


def check_rows_to_scores(row_scores: Tensor, token_indices_sorted: Tensor, slots: Tensor) -> None:
    op = "rows_to_scores"
    checks.dtype(op, "row_scores", row_scores, checks.FLOAT_DTYPES)
    checks.rank(op, "row_scores", row_scores, "[N]")
    _check_order(op, token_indices_sorted, row_scores, "row_scores")
    check_slots(op, slots)


def as_moved(tokens: Tensor) -> Tensor:
    """What the kernels copy: float8 and bool as bytes, all else as it is."""
    if tokens.dtype in MOVED_DTYPES and tokens.dtype.itemsize == 1:
        return tokens.view(torch.uint8)
    return tokens


def is_recorded(tokens: Tensor) -> bool:
    """Whether a backward will read the inverse, which then may not lie in a workspace."""
    return torch.is_grad_enabled() and tokens.requires_grad
