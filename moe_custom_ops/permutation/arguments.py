"""What orders and inverses take: argument checks, and sizes of a workspace."""

import math

import torch
from torch import Tensor

from .. import checks
from .. import workspace as workspaces
from . import reference

EXPERT_PERMUTATION = "expert_permutation"
FROM_MAP = "expert_permutation_from_map"
FROM_COUNTS = "expert_permutation_from_counts"
MAX_EXPERTS = 4096
# Of rows that came from several ranks: a program holds the counts of all.
MAX_SEGMENTS = 2**14


def expert_permutation_workspace_size(num_tokens: int, topk: int, num_experts: int) -> int:
    """Bytes of workspace that :func:`expert_permutation` needs, at most 16 MiB and 16 KiB.

    The size for a maximum of tokens serves every smaller number.

    Args:
        num_tokens: number of tokens, at least 0.
        topk: experts per token, at least 1.
        num_experts: experts, from 1 to 4096.

    Returns:
        Size in bytes, for :func:`make_workspace`.

    Raises:
        TypeError: an argument is not an int.
        ValueError: an argument is out of its range.
    """
    name = "expert_permutation_workspace_size"
    checks.integer(name, "num_tokens", num_tokens, 0)
    checks.integer(name, "topk", topk, 1)
    _check_experts(name, num_experts)
    return _size(num_tokens * topk, num_experts)


def _check_experts(name: str, num_experts: int) -> None:
    checks.integer(name, "num_experts", num_experts, 1)
    expected = f"at most {MAX_EXPERTS}"
    checks.value(num_experts <= MAX_EXPERTS, name, "num_experts", expected, num_experts)


def check_alignment(op: str, alignment: int) -> None:
    checks.integer(op, "alignment", alignment, 1)
    checks.value(alignment < 2**31, op, "alignment", "less than 2^31", alignment)


def num_counts(num_assignments: int, num_experts: int) -> int:
    """int32 counts of scratch, for a symbolic number of assignments too."""
    # Whole tokens fill more than half of a tile.
    smallest = reference.MIN_TILE // 2
    tiles = (num_assignments + smallest - 1) // smallest
    # The totals lie behind the counts of the last tile.
    most = torch.sym_min(tiles, 2 * reference.max_tiles(num_experts))
    return (most + 1) * reference.bins(num_experts)


def _size(num_assignments: int, num_experts: int) -> int:
    return workspaces.align(num_counts(num_assignments, num_experts) * torch.int32.itemsize)


def worst_case_rows(num_assignments: int, num_experts: int, alignment: int) -> int:
    """Rows that any choice of experts fits: no more groups than assignments are not empty."""
    padding = torch.sym_min(num_assignments, num_experts) * (alignment - 1)
    return (num_assignments + padding) // alignment * alignment


def _check_sizes(
    op: str,
    name: str,
    routing: Tensor,
    num_assignments: int,
    num_experts: int,
    alignment: int,
    num_rows: int | None,
    workspace: Tensor | None,
) -> int:
    check_alignment(op, alignment)
    if num_rows is None:
        num_rows = worst_case_rows(num_assignments, num_experts, alignment)
        most_rows = num_rows
        if not isinstance(num_assignments, int):
            # Without a minimum: a cached graph would decide it, and be for one side of it only.
            most_rows = num_assignments + num_experts * (alignment - 1)
        expected_rows = "such that rows for all assignments are fewer than 2^31"
        bound = "alignment", expected_rows, f"{alignment}, which takes {most_rows} rows"
    else:
        checks.integer(op, "num_rows", num_rows, 0)
        most_rows = num_rows
        bound = "num_rows", "fewer than 2^31", str(num_rows)
    expected = "of fewer than 2^31 assignments"
    checks.value(num_assignments < 2**31, op, name, expected, num_assignments)
    checks.value(most_rows < 2**31, op, *bound)
    if workspace is not None:
        workspaces.check(op, workspace, _size(num_assignments, num_experts), routing)
        workspaces.apart(op, workspace, **{name: routing})
    return num_rows


def check_ids(
    expert_ids: Tensor,
    num_experts: int,
    alignment: int,
    num_rows: int | None,
    workspace: Tensor | None,
) -> int:
    """The number of rows, once all arguments are what the op takes."""
    checks.supported_device(EXPERT_PERMUTATION, "expert_ids", expert_ids)
    checks.dtype(EXPERT_PERMUTATION, "expert_ids", expert_ids, checks.INDEX_DTYPES)
    has_topk = expert_ids.dim() >= 1 and expert_ids.shape[-1] >= 1
    checks.shape(EXPERT_PERMUTATION, "expert_ids", expert_ids, "[*, K] with K >= 1", has_topk)
    _check_experts(EXPERT_PERMUTATION, num_experts)
    sizes = math.prod(expert_ids.shape), num_experts, alignment, num_rows
    return _check_sizes(EXPERT_PERMUTATION, "expert_ids", expert_ids, *sizes, workspace)


def check_map(
    routing_map: Tensor,
    topk: int,
    alignment: int,
    num_rows: int | None,
    workspace: Tensor | None,
) -> int:
    """The number of rows, once all arguments are what the op takes."""
    name = FROM_MAP
    checks.supported_device(name, "routing_map", routing_map)
    checks.dtype(name, "routing_map", routing_map, (torch.bool,))
    checks.rank(name, "routing_map", routing_map, "[T, E]")
    num_tokens, num_experts = routing_map.shape
    description = f"[T, E] with E from 1 to {MAX_EXPERTS}"
    fits = 1 <= num_experts <= MAX_EXPERTS
    checks.shape(name, "routing_map", routing_map, description, fits)
    checks.integer(name, "topk", topk, 1)
    checks.value(topk <= num_experts, name, "topk", f"at most E = {num_experts}", topk)
    sizes = num_tokens * topk, num_experts, alignment, num_rows
    return _check_sizes(name, "routing_map", routing_map, *sizes, workspace)


def check_counts(counts: Tensor, num_rows: int, alignment: int, workspace: Tensor | None) -> None:
    name = FROM_COUNTS
    checks.supported_device(name, "counts", counts)
    checks.dtype(name, "counts", counts, checks.INDEX_DTYPES)
    checks.rank(name, "counts", counts, "[R, E]")
    num_ranks, num_experts = counts.shape
    description = f"[R, E] with R and E at least 1 and R * E at most {MAX_SEGMENTS}"
    for fits in (num_ranks >= 1, num_experts >= 1, num_ranks * num_experts <= MAX_SEGMENTS):
        checks.shape(name, "counts", counts, description, fits)
    checks.integer(name, "num_rows", num_rows, 0)
    checks.value(num_rows < 2**31, name, "num_rows", "fewer than 2^31", num_rows)
    check_alignment(name, alignment)
    workspaces.check(name, workspace, 0, counts)


def check_order(
    routing: Tensor,
    num_experts: int,
    topk: int,
    alignment: int,
    num_rows: int | None,
    workspace: Tensor | None,
) -> int:
    """The number of rows of ids [*, topk], or of a bool map [T, num_experts], once they are right.

    Anyone may call an inner op with any sizes.
    """
    is_map = routing.dtype == torch.bool
    columns = num_experts if is_map else topk
    expected = f"[T, num_experts] = [T, {columns}]" if is_map else f"[*, topk] = [*, {columns}]"
    ranks = routing.dim() == 2 if is_map else routing.dim() >= 1
    fits = ranks and routing.shape[-1] == columns
    checks.shape(EXPERT_PERMUTATION, "routing", routing, expected, fits)
    if is_map:
        return check_map(routing, topk, alignment, num_rows, workspace)
    return check_ids(routing, num_experts, alignment, num_rows, workspace)


def check_inverse_permutation(token_indices_sorted: Tensor, num_tokens: int, topk: int) -> None:
    op, name = "inverse_permutation", "token_indices_sorted"
    checks.supported_device(op, name, token_indices_sorted)
    checks.dtype(op, name, token_indices_sorted, checks.INDEX_DTYPES)
    checks.rank(op, name, token_indices_sorted, "[N]")
    checks.integer(op, "num_tokens", num_tokens, 0)
    checks.integer(op, "topk", topk, 1)
    checks.count(op, name, token_indices_sorted.shape[0])
    checks.count(op, "num_tokens * topk", num_tokens * topk)


def check_compose(first: Tensor, second: Tensor) -> None:
    name = "compose_permutations"
    for argument, tensor in (("first", first), ("second", second)):
        checks.is_tensor(name, argument, tensor)
        checks.dtype(name, argument, tensor, checks.INDEX_DTYPES)
        checks.rank(name, argument, tensor, "[N]")
    checks.same_device(name, "second", second, first, "first")
