"""Registration of ``torch.ops.moe.expert_permutation``: schema, fake, dispatch. No gradient.

The public name is a composite. With a workspace it calls an op that mutates it; without one, a
functional op that allocates its own scratch, of a size that a graph need not know.
"""

import math

import torch
from torch import Tensor

from .. import checks
from .. import workspace as workspaces
from ..backend import flat, load_kernels
from ..batching import register_vmap
from . import reference

OP = "expert_permutation"
FROM_MAP = "expert_permutation_from_map"
FROM_COUNTS = "expert_permutation_from_counts"
MAX_EXPERTS = 4096
# Of rows that came from several ranks: a program holds the counts of all.
MAX_SEGMENTS = 2**14
_Result = tuple[Tensor, Tensor, Tensor]


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
        workspaces.resolve(op, workspace, _size(num_assignments, num_experts), routing)
        workspaces.apart(op, workspace, **{name: routing})
    return num_rows


def check(
    expert_ids: Tensor,
    num_experts: int,
    alignment: int,
    num_rows: int | None,
    workspace: Tensor | None,
) -> int:
    """The number of rows, once all arguments are what the op takes."""
    checks.supported_device(OP, "expert_ids", expert_ids)
    checks.dtype(OP, "expert_ids", expert_ids, checks.INDEX_DTYPES)
    has_topk = expert_ids.dim() >= 1 and expert_ids.shape[-1] >= 1
    checks.shape(OP, "expert_ids", expert_ids, "[*, K] with K >= 1", has_topk)
    _check_experts(OP, num_experts)
    sizes = math.prod(expert_ids.shape), num_experts, alignment, num_rows
    return _check_sizes(OP, "expert_ids", expert_ids, *sizes, workspace)


def _empty_results(routing: Tensor, num_experts: int, num_rows: int) -> _Result:
    return (
        routing.new_empty(num_rows, dtype=torch.int32),
        routing.new_empty(num_experts, dtype=torch.int64),
        routing.new_empty(num_experts, dtype=torch.int32),
    )


def _launch(
    routing: Tensor,
    num_experts: int,
    topk: int,
    alignment: int,
    num_rows: int,
    workspace: Tensor | None,
) -> _Result:
    _check_inner(routing, num_experts, topk, alignment, num_rows)
    sources: tuple[Tensor, ...]
    if routing.dtype == torch.bool:
        ids = routing.new_empty((routing.shape[0], topk), dtype=torch.int32)
        sources = routing.view(torch.uint8), ids
    else:
        ids = flat(routing)
        sources = (ids,)
    size = num_counts(ids.numel(), num_experts)
    if workspace is None:
        counts = routing.new_empty(size, dtype=torch.int32)
    else:
        counts = workspaces.scratch(OP, workspace, size, torch.int32)
    results = _empty_results(routing, num_experts, num_rows)
    kernels = load_kernels(__package__)
    count, scan, place = kernels.expert_permutation(
        sources[0], num_experts, topk, alignment, num_rows
    )
    count(*sources, counts, results[0])
    scan(counts)
    place(ids, counts, *results)
    return results


def _check_inner(
    routing: Tensor, num_experts: int, topk: int, alignment: int, num_rows: int
) -> None:
    """What the inner ops rely on, which anyone may call."""
    is_map = routing.dtype == torch.bool
    checks.dtype(OP, "routing", routing, (*checks.INDEX_DTYPES, torch.bool))
    _check_experts(OP, num_experts)
    check_alignment(OP, alignment)
    checks.integer(OP, "num_rows", num_rows, 0)
    checks.integer(OP, "topk", topk, 1)
    columns = num_experts if is_map else topk
    expected = f"[T, num_experts] = [T, {columns}]" if is_map else f"[*, topk] = [*, {columns}]"
    ranks = routing.dim() == 2 if is_map else routing.dim() >= 1
    checks.shape(OP, "routing", routing, expected, ranks and routing.shape[-1] == columns)


def _on_cpu(routing: Tensor, num_experts: int, topk: int, alignment: int, num_rows: int) -> _Result:
    _check_inner(routing, num_experts, topk, alignment, num_rows)
    ids = reference.ids_from_map(routing, topk) if routing.dtype == torch.bool else routing
    return reference.expert_permutation(ids, num_experts, alignment, num_rows)


@torch.library.custom_op("moe::expert_permutation_alone", mutates_args=(), device_types="cpu")
def expert_permutation_alone(
    routing: Tensor, num_experts: int, topk: int, alignment: int, num_rows: int
) -> _Result:
    """(token_indices_sorted, tokens_per_expert, offsets), with scratch of its own.

    ``routing`` is expert ids [*, topk], or a bool map [T, num_experts] whose rows have up to
    ``topk`` experts.
    """
    return _on_cpu(routing, num_experts, topk, alignment, num_rows)


@expert_permutation_alone.register_kernel("cuda")
def _(routing: Tensor, num_experts: int, topk: int, alignment: int, num_rows: int) -> _Result:
    return _launch(routing, num_experts, topk, alignment, num_rows, None)


@expert_permutation_alone.register_fake
def _(routing: Tensor, num_experts: int, topk: int, alignment: int, num_rows: int) -> _Result:
    return _empty_results(routing, num_experts, num_rows)


@torch.library.custom_op(
    "moe::expert_permutation_in", mutates_args={"workspace"}, device_types="cpu"
)
def expert_permutation_in(
    routing: Tensor,
    num_experts: int,
    topk: int,
    alignment: int,
    num_rows: int,
    workspace: Tensor,
) -> _Result:
    """The same, with ``workspace`` for its scratch."""
    return _on_cpu(routing, num_experts, topk, alignment, num_rows)


@expert_permutation_in.register_kernel("cuda")
def _(
    routing: Tensor,
    num_experts: int,
    topk: int,
    alignment: int,
    num_rows: int,
    workspace: Tensor,
) -> _Result:
    return _launch(routing, num_experts, topk, alignment, num_rows, workspace)


@expert_permutation_in.register_fake
def _(
    routing: Tensor,
    num_experts: int,
    topk: int,
    alignment: int,
    num_rows: int,
    workspace: Tensor,
) -> _Result:
    return _empty_results(routing, num_experts, num_rows)


def _permutation(
    routing: Tensor,
    num_experts: int,
    topk: int,
    alignment: int,
    num_rows: int,
    workspace: Tensor | None,
) -> _Result:
    arguments = routing, num_experts, topk, alignment, num_rows
    if workspace is None:
        return torch.ops.moe.expert_permutation_alone(*arguments)
    return torch.ops.moe.expert_permutation_in(*arguments, workspace)


def _expert_permutation(
    expert_ids: Tensor,
    num_experts: int,
    alignment: int = 1,
    num_rows: int | None = None,
    workspace: Tensor | None = None,
) -> _Result:
    num_rows = check(expert_ids, num_experts, alignment, num_rows, workspace)
    return _permutation(
        expert_ids, num_experts, expert_ids.shape[-1], alignment, num_rows, workspace
    )


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


def _expert_permutation_from_map(
    routing_map: Tensor,
    topk: int,
    alignment: int = 1,
    num_rows: int | None = None,
    workspace: Tensor | None = None,
) -> _Result:
    num_rows = check_map(routing_map, topk, alignment, num_rows, workspace)
    return _permutation(routing_map, routing_map.shape[1], topk, alignment, num_rows, workspace)


@torch.library.custom_op("moe::order_from_counts", mutates_args=(), device_types="cpu")
def order_from_counts(counts: Tensor, alignment: int, num_rows: int) -> _Result:
    """(token_indices_sorted, tokens_per_expert, offsets)"""
    return reference.from_counts(counts, alignment, num_rows)


@order_from_counts.register_kernel("cuda")
def _order_from_counts_cuda(counts: Tensor, alignment: int, num_rows: int) -> _Result:
    results = _empty_results(counts, counts.shape[1], num_rows)
    load_kernels(__package__).from_counts(counts, alignment, num_rows)(counts, *results)
    return results


@order_from_counts.register_fake
def _(counts: Tensor, alignment: int, num_rows: int) -> _Result:
    return _empty_results(counts, counts.shape[1], num_rows)


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
    if workspace is not None:
        workspaces.resolve(name, workspace, 0, counts)


def _expert_permutation_from_counts(
    counts: Tensor, num_rows: int, alignment: int = 1, workspace: Tensor | None = None
) -> _Result:
    check_counts(counts, num_rows, alignment, workspace)
    return torch.ops.moe.order_from_counts(counts, alignment, num_rows)


torch.library.define(
    "moe::expert_permutation",
    "(Tensor expert_ids, int num_experts, int alignment=1, SymInt? num_rows=None, "
    "Tensor(a!)? workspace=None) -> (Tensor, Tensor, Tensor)",
)
torch.library.impl("moe::expert_permutation", "CompositeImplicitAutograd", _expert_permutation)
torch.library.define(
    "moe::expert_permutation_from_map",
    "(Tensor routing_map, int topk, int alignment=1, SymInt? num_rows=None, "
    "Tensor(a!)? workspace=None) -> (Tensor, Tensor, Tensor)",
)
torch.library.impl(
    "moe::expert_permutation_from_map", "CompositeImplicitAutograd", _expert_permutation_from_map
)
torch.library.define(
    "moe::expert_permutation_from_counts",
    "(Tensor counts, SymInt num_rows, int alignment=1, Tensor(a!)? workspace=None) "
    "-> (Tensor, Tensor, Tensor)",
)
torch.library.impl(
    "moe::expert_permutation_from_counts",
    "CompositeImplicitAutograd",
    _expert_permutation_from_counts,
)
register_vmap(FROM_COUNTS)
register_vmap(OP)
register_vmap(FROM_MAP)
