"""The documented functions of orders and of the inverse."""

import torch
from torch import Tensor

from . import arguments, ops


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
            need, from 1 to 2^31 - 1. An expert without assignments has no rows. Compiled for any
            number of tokens, without ``num_rows``, ``num_experts * alignment`` is less than 2^31.
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
    return ops.EXPERT_PERMUTATION(expert_ids, num_experts, alignment, num_rows, workspace)


def expert_permutation_from_map(
    routing_map: Tensor,
    topk: int,
    alignment: int = 1,
    num_rows: int | None = None,
    workspace: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    r"""The same order from a map of which experts each token goes to, as Megatron-Core has it.

    Slot k of a token is the k-th expert that its row of the map has set, in ascending order: scores
    [T, topk] for a restore are ``probs[routing_map]``'s, row by row.

    Args:
        routing_map: bool [T, E], E from 1 to 4096, of any strides. A row may have fewer than
            ``topk`` experts set, after capacity dropped some; of one that has more, the first
            ``topk`` count and the others are dropped.
        topk: slots per token K, from 1 to E.
        alignment: as in :func:`expert_permutation`.
        num_rows: as in :func:`expert_permutation`.
        workspace: scratch of at least ``expert_permutation_workspace_size(T, topk, E)`` bytes, made
            by :func:`make_workspace`; None allocates it.

    Returns:
        ``token_indices_sorted``, ``tokens_per_expert`` and ``offsets`` as of
        :func:`expert_permutation`, with flat assignments t * K + k.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape, value or device, or the workspace is too small,
            misaligned or not contiguous.
        NotImplementedError: a CUDA tensor on a ROCm build.

    Example:
        >>> routing_map = torch.tensor([[1, 0, 1], [0, 1, 0]], dtype=torch.bool)
        >>> order, counts, offsets = expert_permutation_from_map(routing_map, topk=2)
        >>> order.tolist(), counts.tolist(), offsets.tolist()
        ([0, 2, 1, -1], [1, 1, 1], [1, 2, 3])
    """
    return ops.FROM_MAP(routing_map, topk, alignment, num_rows, workspace)


def expert_permutation_from_counts(
    counts: Tensor, num_rows: int, alignment: int = 1, workspace: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Expert-major order of rows that an all-to-all brought rank by rank, each rank's by expert.

    Row i of what arrived is assignment i of the result: use it with ``topk=1``, as in
    ``permute(rows, token_indices_sorted, 1)``.

    Args:
        counts: int32 or int64 [R, E]: rows that rank r sent for local expert e, of any strides; at
            most 16384 of them. A negative count is none, and one above 2^31 is 2^31.
        num_rows: number N of rows of the result, at least 0. Rows past the last group are padding;
            where there are too few, the rows past them are dropped.
        alignment: rows of which each group's length is a multiple, from 1 to 2^31 - 1.
        workspace: not needed; of :func:`make_workspace`, as for the other ops.

    Returns:
        ``token_indices_sorted`` int32 [N], ``tokens_per_expert`` int64 [E] and ``offsets`` int32
        [E], as of :func:`expert_permutation`. Not differentiable.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape, value or device.
        NotImplementedError: a CUDA tensor on a ROCm build.

    Example:
        >>> counts = torch.tensor([[2, 1], [1, 2]])     # rank 0 sent rows 0-2, rank 1 rows 3-5
        >>> order, totals, offsets = expert_permutation_from_counts(counts, num_rows=6)
        >>> order.tolist(), totals.tolist(), offsets.tolist()
        ([0, 1, 3, 2, 4, 5], [3, 3], [3, 6])
    """
    return ops.FROM_COUNTS(counts, num_rows, alignment, workspace)


def inverse_permutation(token_indices_sorted: Tensor, num_tokens: int, topk: int) -> Tensor:
    """The row of each assignment, which :func:`permute` and the restores can share.

    Args:
        token_indices_sorted: int32 or int64 [N]: the flat assignment t * K + k of each row. A
            negative value, or one of at least T * K, marks padding.
        num_tokens: number T of tokens, at least 0.
        topk: experts per token K, at least 1.

    Returns:
        int32 [T, K]: the highest row that holds the assignment, or -1 where none does.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape, value or device.
        NotImplementedError: a CUDA tensor on a ROCm build.

    Example:
        >>> inverse_permutation(torch.tensor([2, 0, -1, 3]), num_tokens=2, topk=2).tolist()
        [[1, -1], [0, 3]]
    """
    return ops.INVERSE_PERMUTATION(token_indices_sorted, num_tokens, topk)


def compose_permutations(first: Tensor, second: Tensor) -> Tensor:
    """The order that does ``first`` and then ``second`` in one pass.

    ``permute(permute(x, first, k), second, 1)`` is ``permute(x, compose_permutations(first,
    second), k)``.

    Args:
        first: int32 or int64 [M]: the assignment of each row, or padding; no assignment twice.
        second: int32 or int64 [N]: the row of ``first`` that each row of the result takes, or
            padding: a negative value, or one of at least M.

    Returns:
        [N] in the dtype of ``first``, -1 where ``second`` is padding or ``first`` is negative.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape or device.

    Example:
        >>> compose_permutations(torch.tensor([4, 2, -1]), torch.tensor([1, 0, 2, -1])).tolist()
        [2, 4, -1, -1]
    """
    arguments.check_compose(first, second)
    padded = torch.nn.functional.pad(first.clamp(min=-1), (0, 1), value=-1)
    num_rows = first.shape[0]
    index = torch.where((second < 0) | (second >= num_rows), num_rows, second.to(torch.int64))
    return padded[index]
