"""The documented function of expert_permutation."""

import torch
from torch import Tensor

from .. import checks
from . import direct


def expert_permutation(
    expert_ids: Tensor,
    num_experts: int,
    alignment: int = 1,
    num_rows: int | None = None,
    workspace: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Order in which experts take the assignments of tokens: expert-major, stable, without a sync.

    Assignments are flat indices t * K + k into ``expert_ids``. Those of expert e form a group of
    consecutive rows, in ascending order; the groups follow one another by e, each padded to a
    multiple of ``alignment`` rows. No shape depends on the values, and nothing is read by the host.

    Args:
        expert_ids: int32 or int64 [*, K]: experts chosen by each of T tokens. Ids outside
            [0, num_experts) are dropped: the experts of another rank, say. An expert that a token
            chose twice has two assignments.
        num_experts: experts, from 1 to 4096.
        alignment: rows of which each group's length is a multiple, as some grouped matrix products
            need, at least 1. An expert without assignments has no rows.
        num_rows: number N of rows, at least 0. None is the worst case,
            T * K + min(num_experts, T * K) * (alignment - 1) rounded down to the alignment; where
            most ids are dropped that is many times what is used, and so is what is made of it.
            Rows past the last group are padding. Where ``num_rows`` is too small, the rows past it
            are dropped.
        workspace: scratch of at least :func:`expert_permutation_workspace_size` bytes, made by
            :func:`make_workspace`; None allocates it.

    Returns:
        - ``token_indices_sorted`` int32 [N]: the assignment of each row, -1 for padding;
        - ``tokens_per_expert`` int64 [num_experts]: assignments of each expert, before alignment
          and before ``num_rows`` drops any;
        - ``offsets`` int32 [num_experts]: where each group ends (exclusive), padding included, at
          most N: what grouped matrix products take as ``offs``.

        Not differentiable.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape, value or device, or the workspace is too small,
            misaligned or not contiguous.
        NotImplementedError: a CUDA tensor on a ROCm build.

    Example:
        >>> expert_ids = torch.tensor([[0, 2], [2, 1], [0, -1]])
        >>> order, counts, offsets = expert_permutation(expert_ids, num_experts=3, alignment=2)
        >>> order.tolist()
        [0, 4, 3, -1, 1, 2, -1, -1]
        >>> counts.tolist(), offsets.tolist()
        ([2, 1, 2], [2, 4, 6])
    """
    if not torch.compiler.is_compiling():
        results = direct.expert_permutation(expert_ids, num_experts, alignment, num_rows, workspace)
        if results is not None:
            return results
    checks.is_tensor("expert_permutation", "expert_ids", expert_ids)
    checks.is_integer("expert_permutation", "num_experts", num_experts)
    checks.is_integer("expert_permutation", "alignment", alignment)
    if num_rows is not None:
        checks.is_integer("expert_permutation", "num_rows", num_rows, "an int or None")
    if workspace is not None:
        checks.is_tensor("expert_permutation", "workspace", workspace)
    return torch.ops.moe.expert_permutation(expert_ids, num_experts, alignment, num_rows, workspace)
