"""Inputs as a router and a dispatcher make them."""

import torch
from torch import Tensor


def make_probs(
    num_tokens: int,
    num_columns: int,
    topk: int = 2,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> tuple[Tensor, Tensor]:
    """(probs [T, columns] that sum to one per token, counts int64 of their top-k), on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    probs = torch.randn(num_tokens, num_columns, generator=generator).softmax(-1)
    ids = probs.topk(min(topk, num_columns)).indices
    counts = torch.bincount(ids.flatten(), minlength=num_columns)
    return probs.to(dtype), counts


def permutation_of(expert_ids: Tensor, num_experts: int, alignment: int = 1) -> Tensor:
    """Stable expert-major order of the assignments, groups padded with -1: int64 [N]."""
    order = []
    for expert in range(num_experts):
        group = (expert_ids.flatten() == expert).nonzero().flatten()
        padding = -group.shape[0] % alignment
        order += [group, group.new_full((padding,), -1)]
    return torch.cat(order)


def make_assignments(
    num_tokens: int, topk: int, num_experts: int, alignment: int = 1, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """(float32 top_scores [T, K], token_indices_sorted int64 [N]) of a random router, on CPU."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_tokens, num_experts, generator=generator)
    scores, ids = logits.softmax(-1).topk(topk)
    return scores, permutation_of(ids, num_experts, alignment)
