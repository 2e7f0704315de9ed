"""Every op by its formula, one assignment after the other, in the dtype of what it is given.

In float64 they are the values to compare with, and autograd differentiates them. Of absolute
values they are the sum of the absolute terms, which error budgets scale with. They share no code
with the package.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def aux_loss(
    probs: Tensor,
    tokens_per_expert: Tensor,
    total_num_tokens: Tensor | int,
    num_experts: int,
    topk: int,
    coeff: float,
    token_mask: Tensor | None = None,
) -> Tensor:
    total = float(total_num_tokens)
    if total == 0:
        return probs.new_zeros(())
    kept = probs if token_mask is None else probs[token_mask]
    return num_experts * coeff / topk / total**2 * (kept.sum(0) * tokens_per_expert).sum()


def sequence_aux_loss(
    probs: Tensor,
    tokens_per_expert: Tensor,
    topk: int,
    coeff: float,
    cu_seqlens: Tensor | None = None,
    token_mask: Tensor | None = None,
) -> Tensor:
    if cu_seqlens is None:
        cuts: list[tuple[Any, slice]] = [(b, slice(None)) for b in range(probs.shape[0])]
    else:
        cuts = [(..., slice(*ends)) for ends in itertools.pairwise(cu_seqlens.tolist())]
    losses = []
    for (b, tokens), counts in zip(cuts, tokens_per_expert, strict=True):
        own = probs[b][tokens]
        if token_mask is not None:
            own = own[token_mask[b][tokens]]
        if len(own):
            scale = probs.shape[-1] * coeff / topk / len(own) ** 2
            losses.append(scale * (own.sum(0) * counts).sum())
    return sum(losses, start=probs.new_zeros(())) / max(len(losses), 1)


def _grouped(
    expert_of: list[tuple[int, int]], num_experts: int, alignment: int, num_rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Of (assignment, expert) in the order of the assignments."""
    order, counts, ends, start = [-1] * num_rows, [], [], 0
    groups: list[list[int]] = [[] for _ in range(num_experts)]
    for assignment, expert in expert_of:
        groups[expert].append(assignment)
    for group in groups:
        for row, assignment in enumerate(group, start):
            if row < num_rows:
                order[row] = assignment
        start += math.ceil(len(group) / alignment) * alignment
        counts.append(len(group))
        ends.append(min(start, num_rows))
    return (
        torch.tensor(order, dtype=torch.int32),
        torch.tensor(counts, dtype=torch.int64),
        torch.tensor(ends, dtype=torch.int32),
    )


def _rows(num_assignments: int, num_experts: int, alignment: int, num_rows: int | None) -> int:
    if num_rows is not None:
        return num_rows
    padding = min(num_experts, num_assignments) * (alignment - 1)
    return (num_assignments + padding) // alignment * alignment


def expert_permutation(
    expert_ids: Tensor, num_experts: int, alignment: int = 1, num_rows: int | None = None
) -> tuple[Tensor, ...]:
    ids = expert_ids.flatten().tolist()
    kept = [(i, expert) for i, expert in enumerate(ids) if 0 <= expert < num_experts]
    num_rows = _rows(len(ids), num_experts, alignment, num_rows)
    return _grouped(kept, num_experts, alignment, num_rows)


def expert_permutation_from_map(
    routing_map: Tensor, topk: int, alignment: int = 1, num_rows: int | None = None
) -> tuple[Tensor, ...]:
    num_tokens, num_experts = routing_map.shape
    kept = []
    for t, row in enumerate(routing_map.tolist()):
        experts = [expert for expert, is_set in enumerate(row) if is_set][:topk]
        kept += [(t * topk + k, expert) for k, expert in enumerate(experts)]
    num_rows = _rows(num_tokens * topk, num_experts, alignment, num_rows)
    return _grouped(kept, num_experts, alignment, num_rows)


def expert_permutation_from_counts(
    counts: Tensor, num_rows: int, alignment: int = 1
) -> tuple[Tensor, ...]:
    sizes = [[min(max(n, 0), 2**31) for n in row] for row in counts.tolist()]
    num_experts = counts.shape[1]
    arrived = [0, *itertools.accumulate(itertools.chain(*sizes))]
    order, totals, ends, start = [-1] * num_rows, [], [], 0
    for expert in range(num_experts):
        row = start
        for rank, own in enumerate(sizes):
            first = arrived[rank * num_experts + expert]
            for i in range(min(own[expert], max(num_rows - row, 0))):
                order[row + i] = first + i if first + i < 2**31 else -1
            row += own[expert]
        totals.append(row - start)
        start += math.ceil((row - start) / alignment) * alignment
        ends.append(min(start, num_rows))
    return (
        torch.tensor(order, dtype=torch.int32),
        torch.tensor(totals, dtype=torch.int64),
        torch.tensor(ends, dtype=torch.int32),
    )


def compose_permutations(first: Tensor, second: Tensor) -> Tensor:
    taken = first.tolist()
    return torch.tensor(
        [max(taken[i], -1) if 0 <= i < len(taken) else -1 for i in second.tolist()],
        dtype=first.dtype,
    )


def _row_of(token_indices_sorted: Tensor, num_assignments: int) -> dict[int, int]:
    """The highest row that holds each assignment."""
    rows = enumerate(token_indices_sorted.tolist())
    return {assignment: row for row, assignment in rows if 0 <= assignment < num_assignments}


def inverse_permutation(token_indices_sorted: Tensor, num_tokens: int, topk: int) -> Tensor:
    row_of = _row_of(token_indices_sorted, num_tokens * topk)
    rows = [row_of.get(assignment, -1) for assignment in range(num_tokens * topk)]
    return torch.tensor(rows, dtype=torch.int32).view(num_tokens, topk)


def _held(token_indices_sorted: Tensor, num_assignments: int) -> tuple[Tensor, Tensor]:
    """(assignments that a row holds, their rows)"""
    row_of = _row_of(token_indices_sorted, num_assignments)
    pairs = torch.tensor(list(row_of.items()), dtype=torch.int64).view(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def permute(tokens: Tensor, token_indices_sorted: Tensor, topk: int) -> Tensor:
    assignments, rows = _held(token_indices_sorted, tokens.shape[0] * topk)
    out = tokens.new_zeros(len(token_indices_sorted), tokens.shape[1])
    return out.index_put((rows,), tokens[assignments // topk])


def permute_with_scores(
    tokens: Tensor, top_scores: Tensor, token_indices_sorted: Tensor
) -> tuple[Tensor, ...]:
    assignments, rows = _held(token_indices_sorted, top_scores.numel())
    row_scores = top_scores.new_zeros(len(token_indices_sorted))
    row_scores = row_scores.index_put((rows,), top_scores.flatten()[assignments])
    return permute(tokens, token_indices_sorted, top_scores.shape[1]), row_scores


def restore(
    rows: Tensor,
    token_indices_sorted: Tensor,
    num_tokens: int,
    topk: int,
    addend: Tensor | None = None,
) -> Tensor:
    assignments, held = _held(token_indices_sorted, num_tokens * topk)
    out = rows.new_zeros(num_tokens, rows.shape[1])
    out = out.index_add(0, assignments // topk, rows[held])
    return out if addend is None else addend + out


def weighted_restore(
    rows: Tensor, top_scores: Tensor, token_indices_sorted: Tensor, addend: Tensor | None = None
) -> Tensor:
    *lead, topk = top_scores.shape
    assignments, held = _held(token_indices_sorted, top_scores.numel())
    terms = top_scores.flatten()[assignments, None] * rows[held]
    out = rows.new_zeros(math.prod(lead), rows.shape[1])
    out = out.index_add(0, assignments // topk, terms).view(*lead, rows.shape[1])
    return out if addend is None else addend + out


ORACLES: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        aux_loss,
        sequence_aux_loss,
        expert_permutation,
        expert_permutation_from_map,
        expert_permutation_from_counts,
        compose_permutations,
        inverse_permutation,
        permute,
        permute_with_scores,
        restore,
        weighted_restore,
    )
}
