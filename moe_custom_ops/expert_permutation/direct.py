"""expert_permutation past the dispatcher: three launches."""

from typing import Any

import torch
from torch import Tensor

from .. import direct
from .. import workspace as workspaces
from ..backend import load_kernels
from . import ops


class _Plan:
    """Launches and sizes of the calls of one signature."""

    def __init__(self, expert_ids: Tensor, num_experts: int, alignment: int, num_rows: int) -> None:
        kernels = load_kernels(__package__)
        self.device, self.num_experts, self.num_rows = expert_ids.device, num_experts, num_rows
        self.num_counts = ops.num_counts(expert_ids.numel(), num_experts)
        launches = kernels.expert_permutation(
            ops.flat(expert_ids), num_experts, alignment, num_rows
        )
        self.count, self.scan, self.place = launches

    def __call__(
        self, expert_ids: Tensor, workspace: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        empty = direct.allocator(self.device)
        if workspace is None:
            counts = empty((self.num_counts,), (1,), torch.int32)
        else:
            counts = workspaces.scratch(ops.OP, workspace, self.num_counts, torch.int32)
        results = (
            empty((self.num_rows,), (1,), torch.int32),
            empty((self.num_experts,), (1,), torch.int64),
            empty((self.num_experts,), (1,), torch.int32),
        )
        ids = ops.flat(expert_ids)
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
    if tensors is None or expert_ids is None:
        return None
    key: tuple[Any, ...] = (*tensors, num_experts, alignment, num_rows)
    plan = _PLANS.get(key)
    if plan is None:
        rows = ops.check(expert_ids, num_experts, alignment, num_rows, workspace)
        plan = _PLANS.add(key, _Plan(expert_ids, num_experts, alignment, rows))
    return plan(expert_ids, workspace)
