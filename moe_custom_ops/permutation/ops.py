"""Registration of ``torch.ops.moe.expert_permutation`` and its kin. None has a gradient."""

from typing import Any

import torch
from torch import Tensor

from .. import op
from ..workspace import overlap
from . import arguments, plans, reference

_Result = tuple[Tensor, Tensor, Tensor]


def _order_cpu(
    routing: Tensor,
    workspace: Tensor | None,
    num_experts: int,
    topk: int,
    alignment: int,
    num_rows: int,
) -> _Result:
    arguments.check_order(routing, num_experts, topk, alignment, num_rows, workspace)
    ids = reference.ids_from_map(routing, topk) if routing.dtype == torch.bool else routing
    return reference.expert_permutation(ids, num_experts, alignment, num_rows)


def _empty_results(routing: Tensor, num_experts: int, num_rows: int) -> _Result:
    return (
        routing.new_empty(num_rows, dtype=torch.int32),
        routing.new_empty(num_experts, dtype=torch.int64),
        routing.new_empty(num_experts, dtype=torch.int32),
    )


# Of expert ids [*, topk], or of a bool map [T, num_experts] whose rows have up to ``topk`` experts.
_run_order = op.define_with_workspace(
    "order",
    "(Tensor routing, Tensor(a!) workspace, int num_experts, int topk, int alignment, "
    "SymInt num_rows) -> (Tensor, Tensor, Tensor)",
    _order_cpu,
    op.registered(plans.order, 2, 4),
    lambda routing, workspace, num_experts, topk, alignment, num_rows: _empty_results(
        routing, num_experts, num_rows
    ),
)


def _expert_permutation(
    expert_ids: Tensor,
    num_experts: int,
    alignment: int = 1,
    num_rows: int | None = None,
    workspace: Tensor | None = None,
) -> _Result:
    num_rows = arguments.check_ids(expert_ids, num_experts, alignment, num_rows, workspace)
    numbers = num_experts, expert_ids.shape[-1], alignment, num_rows
    return _run_order(expert_ids, workspace, *numbers)


def _expert_permutation_from_map(
    routing_map: Tensor,
    topk: int,
    alignment: int = 1,
    num_rows: int | None = None,
    workspace: Tensor | None = None,
) -> _Result:
    num_rows = arguments.check_map(routing_map, topk, alignment, num_rows, workspace)
    return _run_order(routing_map, workspace, routing_map.shape[1], topk, alignment, num_rows)


def _past(routing: Tensor, workspace: Tensor | None, *numbers: Any) -> _Result | None:
    if not op.plain_ints(*numbers[:3]) or type(numbers[3]) not in (int, type(None)):
        return None
    run = op.plan(plans.order, (routing, workspace), numbers)
    if run is None or overlap(workspace, routing):
        return None
    return run(routing, workspace)


def _expert_permutation_past(
    expert_ids: Tensor,
    num_experts: int,
    alignment: int,
    num_rows: int | None,
    workspace: Tensor | None,
) -> _Result | None:
    # Other than ids are for the checks; nested tensors have no shape.
    if (
        not isinstance(expert_ids, Tensor)
        or expert_ids.dtype == torch.bool
        or expert_ids.is_nested
        or not expert_ids.dim()
    ):
        return None
    topk = expert_ids.shape[-1]
    return _past(expert_ids, workspace, num_experts, topk, alignment, num_rows)


def _expert_permutation_from_map_past(
    routing_map: Tensor,
    topk: int,
    alignment: int,
    num_rows: int | None,
    workspace: Tensor | None,
) -> _Result | None:
    if (
        not isinstance(routing_map, Tensor)
        or routing_map.dtype != torch.bool
        or routing_map.is_nested
        or routing_map.dim() != 2
    ):
        return None
    return _past(routing_map, workspace, routing_map.shape[1], topk, alignment, num_rows)


def _order_from_counts_cpu(counts: Tensor, num_rows: int, alignment: int) -> _Result:
    arguments.check_counts(counts, num_rows, alignment, None)
    return reference.from_counts(counts, num_rows, alignment)


op.define(
    "order_from_counts",
    "(Tensor counts, SymInt num_rows, int alignment) -> (Tensor, Tensor, Tensor)",
    _order_from_counts_cpu,
    op.registered(plans.order_from_counts, 1, 2),
    lambda counts, num_rows, alignment: _empty_results(counts, counts.shape[1], num_rows),
)


def _expert_permutation_from_counts(
    counts: Tensor, num_rows: int, alignment: int = 1, workspace: Tensor | None = None
) -> _Result:
    arguments.check_counts(counts, num_rows, alignment, workspace)
    return torch.ops.moe.order_from_counts(counts, num_rows, alignment)


def _expert_permutation_from_counts_past(
    counts: Tensor, num_rows: int, alignment: int, workspace: Tensor | None
) -> _Result | None:
    if counts is None or workspace is not None or not op.plain_ints(num_rows, alignment):
        return None
    numbers = num_rows, alignment
    run = op.plan(plans.order_from_counts, (counts,), numbers)
    return None if run is None else run(counts, *numbers)


def _inverse_cpu(token_indices_sorted: Tensor, num_tokens: int, topk: int) -> Tensor:
    arguments.check_inverse_permutation(token_indices_sorted, num_tokens, topk)
    result = reference.invert(token_indices_sorted, num_tokens * topk)
    return result.to(torch.int32).view(num_tokens, topk)


op.define(
    "inverse",
    "(Tensor token_indices_sorted, SymInt num_tokens, int topk) -> Tensor",
    _inverse_cpu,
    op.registered(plans.inverse, 1, 2),
    lambda order, num_tokens, topk: order.new_empty((num_tokens, topk), dtype=torch.int32),
)


def _inverse_permutation(token_indices_sorted: Tensor, num_tokens: int, topk: int) -> Tensor:
    arguments.check_inverse_permutation(token_indices_sorted, num_tokens, topk)
    return torch.ops.moe.inverse(token_indices_sorted, num_tokens, topk)


def inverse_past(token_indices_sorted: Tensor, num_tokens: int, topk: int) -> Tensor | None:
    """The inverse, or None where the call is for the dispatcher."""
    if token_indices_sorted is None or not op.plain_ints(num_tokens, topk):
        return None
    numbers = num_tokens, topk
    run = op.plan(plans.inverse, (token_indices_sorted,), numbers)
    return None if run is None else run(token_indices_sorted, *numbers)


_ROOM = "int alignment=1, SymInt? num_rows=None, Tensor(a!)? workspace=None"
for _name, _schema, _function in (
    (
        arguments.EXPERT_PERMUTATION,
        f"(Tensor expert_ids, int num_experts, {_ROOM}) -> (Tensor, Tensor, Tensor)",
        _expert_permutation,
    ),
    (
        arguments.FROM_MAP,
        f"(Tensor routing_map, int topk, {_ROOM}) -> (Tensor, Tensor, Tensor)",
        _expert_permutation_from_map,
    ),
    (
        arguments.FROM_COUNTS,
        "(Tensor counts, SymInt num_rows, int alignment=1, Tensor(a!)? workspace=None) "
        "-> (Tensor, Tensor, Tensor)",
        _expert_permutation_from_counts,
    ),
    (
        "inverse_permutation",
        "(Tensor token_indices_sorted, SymInt num_tokens, int topk) -> Tensor",
        _inverse_permutation,
    ),
):
    op.compose(_name, _schema, _function, vmap=True)

EXPERT_PERMUTATION = op.Public(arguments.EXPERT_PERMUTATION, _expert_permutation_past)
FROM_MAP = op.Public(arguments.FROM_MAP, _expert_permutation_from_map_past)
FROM_COUNTS = op.Public(arguments.FROM_COUNTS, _expert_permutation_from_counts_past)
INVERSE_PERMUTATION = op.Public("inverse_permutation", inverse_past)
