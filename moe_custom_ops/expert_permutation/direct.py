"""expert_permutation past the dispatcher: three launches for ids or a map, one for counts."""

from typing import Any

import torch
from torch import Tensor

from .. import direct
from .. import workspace as workspaces
from ..backend import flat, load_kernels
from . import ops


def _empty_results(
    device: torch.device, num_rows: int, num_experts: int
) -> tuple[Tensor, Tensor, Tensor]:
    empty = direct.allocator(device)
    return (
        empty((num_rows,), (1,), torch.int32),
        empty((num_experts,), (1,), torch.int64),
        empty((num_experts,), (1,), torch.int32),
    )


class _Plan:
    """Launches and sizes of the calls of one signature, for expert ids or for a map."""

    def __init__(
        self, routing: Tensor, num_experts: int, topk: int, alignment: int, num_rows: int
    ) -> None:
        self.device, self.num_experts, self.num_rows = routing.device, num_experts, num_rows
        self.is_map = routing.dtype == torch.bool
        source = routing.view(torch.uint8) if self.is_map else flat(routing)
        self.ids_shape = source.shape[0], topk
        self.num_counts = ops.num_counts(source.shape[0] * topk, num_experts)
        kernels = load_kernels(__package__)
        self.count, self.scan, self.place = kernels.expert_permutation(
            source, num_experts, topk, alignment, num_rows
        )

    def __call__(self, routing: Tensor, workspace: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        empty = direct.allocator(self.device)
        if workspace is None:
            counts = empty((self.num_counts,), (1,), torch.int32)
        else:
            counts = workspaces.scratch(ops.OP, workspace, self.num_counts, torch.int32)
        results = _empty_results(self.device, self.num_rows, self.num_experts)
        if self.is_map:
            ids = empty(self.ids_shape, (self.ids_shape[1], 1), torch.int32)
            self.count(routing.view(torch.uint8), ids, counts, results[0])
        else:
            ids = flat(routing)
            self.count(ids, counts, results[0])
        self.scan(counts)
        self.place(ids, counts, *results)
        return results


_PLANS: direct.Plans[_Plan] = direct.Plans()


def expert_permutation(
    expert_ids: Tensor,
    num_experts: int,
    alignment: int,
    num_rows: int | None,
    workspace: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """The results, or None where the call is for the dispatcher."""
    # Numbers of other types are for the dispatcher and the checks.
    if not (type(num_experts) is type(alignment) is int):
        return None
    if num_rows is not None and type(num_rows) is not int:
        return None
    tensors = direct.signature(expert_ids, workspace)
    if tensors is None or expert_ids is None or workspaces.overlap(workspace, expert_ids):
        return None
    key: tuple[Any, ...] = (*tensors, num_experts, alignment, num_rows)
    plan = _PLANS.get(key)
    if plan is None:
        rows = ops.check(expert_ids, num_experts, alignment, num_rows, workspace)
        made = _Plan(expert_ids, num_experts, expert_ids.shape[-1], alignment, rows)
        plan = _PLANS.add(key, made)
    return plan(expert_ids, workspace)


_MAP_PLANS: direct.Plans[_Plan] = direct.Plans()


def expert_permutation_from_map(
    routing_map: Tensor,
    topk: int,
    alignment: int,
    num_rows: int | None,
    workspace: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """The results, or None where the call is for the dispatcher."""
    if not (type(topk) is type(alignment) is int):
        return None
    if num_rows is not None and type(num_rows) is not int:
        return None
    tensors = direct.signature(routing_map, workspace)
    if tensors is None or routing_map is None or workspaces.overlap(workspace, routing_map):
        return None
    key: tuple[Any, ...] = (*tensors, topk, alignment, num_rows)
    plan = _MAP_PLANS.get(key)
    if plan is None:
        rows = ops.check_map(routing_map, topk, alignment, num_rows, workspace)
        plan = _MAP_PLANS.add(key, _Plan(routing_map, routing_map.shape[1], topk, alignment, rows))
    return plan(routing_map, workspace)


class _CountsPlan:
    def __init__(self, counts: Tensor, num_rows: int, alignment: int) -> None:
        self.device, self.num_rows, self.num_experts = counts.device, num_rows, counts.shape[1]
        self.launch = load_kernels(__package__).from_counts(counts, alignment, num_rows)

    def __call__(self, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        results = _empty_results(self.device, self.num_rows, self.num_experts)
        self.launch(counts, *results)
        return results


_COUNTS_PLANS: direct.Plans[_CountsPlan] = direct.Plans()


def expert_permutation_from_counts(
    counts: Tensor, num_rows: int, alignment: int, workspace: Tensor | None
) -> tuple[Tensor, Tensor, Tensor] | None:
    """The results, or None where the call is for the dispatcher."""
    if not (type(num_rows) is type(alignment) is int):
        return None
    tensors = direct.signature(counts, workspace)
    if tensors is None or counts is None:
        return None
    key = (*tensors, num_rows, alignment)
    plan = _COUNTS_PLANS.get(key)
    if plan is None:
        ops.check_counts(counts, num_rows, alignment, workspace)
        plan = _COUNTS_PLANS.add(key, _CountsPlan(counts, num_rows, alignment))
    return plan(counts)
