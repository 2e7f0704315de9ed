"""Orders and inverses in plain PyTorch: a stable sort, where the kernels count.

And the tiles that the kernels count by, which bound the workspace.
"""

import torch
from torch import Tensor

from ..fixed_order import next_power_of_2

# Assignments of the smallest tile: a power of two, or as many whole tokens as that holds.
MIN_TILE = 32
# Where there would be more tiles than these, they grow to the larger size first: a scan over more
# takes longer (of 131072 assignments of 64 experts 15 us, not 12, on an H200).
FEW_TILES = 1024
GROWN_TILE = 256
# Tiles of a power of two; of whole tokens there may be twice as many.
MAX_TILES = 2048
MAX_COUNTS = 2**21


def bins(num_experts: int) -> int:
    """Counts per tile: a power of two, which a histogram needs."""
    return max(next_power_of_2(num_experts), 16)


def max_tiles(num_experts: int) -> int:
    return min(MAX_TILES, MAX_COUNTS // bins(num_experts))


def tile_size(num_assignments: int, num_experts: int) -> int:
    """More for many experts, and for so many assignments that counts of all tiles are too many."""
    few = next_power_of_2(-(-num_assignments // FEW_TILES))
    fewest = next_power_of_2(-(-num_assignments // max_tiles(num_experts)))
    return max(MIN_TILE, min(bins(num_experts) // 8, 128), min(few, GROWN_TILE), fewest)


def expert_permutation(
    expert_ids: Tensor, num_experts: int, alignment: int, num_rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(token_indices_sorted int32 [num_rows], tokens_per_expert int64 [E], offsets int32 [E])"""
    ids = expert_ids.reshape(-1).to(torch.int64)
    # What is dropped counts as an expert past the last.
    ids = torch.where((ids < 0) | (ids >= num_experts), num_experts, ids)
    order = ids.argsort(stable=True)
    counts = ids.new_zeros(num_experts + 1).scatter_add_(0, ids, torch.ones_like(ids))
    tokens_per_expert = counts[:num_experts]
    aligned = (tokens_per_expert + alignment - 1) // alignment * alignment
    ends = aligned.cumsum(0)
    # Where the group of each expert begins, less the number of assignments before it.
    shift = torch.nn.functional.pad(ends - aligned - tokens_per_expert.cumsum(0), (0, 1))
    shift = shift + torch.nn.functional.pad(tokens_per_expert, (0, 1))
    sorted_ids = ids[order]
    rows = torch.arange(ids.shape[0], device=ids.device) + shift[sorted_ids]
    kept = (sorted_ids < num_experts) & (rows < num_rows)
    result = ids.new_full((num_rows + 1,), -1, dtype=torch.int32)
    result.scatter_(0, torch.where(kept, rows, num_rows), order.to(torch.int32))
    # All that is dropped went to a place past the end.
    return result[:num_rows].clone(), tokens_per_expert.clone(), ends.clamp(max=num_rows).int()


def ids_from_map(routing_map: Tensor, topk: int) -> Tensor:
    """The experts that a token's row of the map has set, ascending, then -1: int32 [T, topk]."""
    num_tokens, num_experts = routing_map.shape
    rank = routing_map.to(torch.int64).cumsum(1) - 1
    # What is not set, or is one too many, goes to a place past the end.
    rank = torch.where(routing_map & (rank < topk), rank, topk)
    experts = torch.arange(num_experts, device=routing_map.device, dtype=torch.int32)
    ids = experts.new_full((num_tokens, topk + 1), -1)
    return ids.scatter_(1, rank, experts.expand(num_tokens, -1))[:, :topk].contiguous()


def from_counts(counts: Tensor, num_rows: int, alignment: int) -> tuple[Tensor, Tensor, Tensor]:
    """(token_indices_sorted int32 [num_rows], tokens_per_expert int64 [E], offsets int32 [E])"""
    # More than that no row number reaches; sums of these cannot overflow.
    counts = counts.to(torch.int64).clamp(min=0, max=2**31)
    tokens_per_expert = counts.sum(0)
    aligned = (tokens_per_expert + alignment - 1) // alignment * alignment
    ends = aligned.cumsum(0)
    # Of each segment, one rank's rows of one expert: its length, its first row here and there.
    lengths = counts.flatten()
    sources = (lengths.cumsum(0) - lengths).view(counts.shape).t().flatten()
    lengths = counts.t().flatten()
    targets = (ends - aligned)[:, None] + (counts.cumsum(0) - counts).t()
    rows = torch.arange(num_rows, device=counts.device)
    segment = torch.searchsorted(targets.flatten(), rows, right=True) - 1
    within = rows - targets.flatten()[segment]
    order = sources[segment] + within
    # No row past 2^31 can have come.
    order = torch.where((within < lengths[segment]) & (order < 2**31), order, -1)
    return order.to(torch.int32), tokens_per_expert, ends.clamp(max=num_rows).int()


def invert(token_indices_sorted: Tensor, num_assignments: int) -> Tensor:
    """The row of each assignment, the highest of duplicates, or -1: int64 [num_assignments]."""
    index = token_indices_sorted.to(torch.int64)
    # Padding rows write to a place past the end, which keeps every shape static.
    index = torch.where((index < 0) | (index >= num_assignments), num_assignments, index)
    rows = torch.arange(index.shape[0], device=index.device)
    inverse = torch.full((num_assignments + 1,), -1, dtype=torch.int64, device=index.device)
    return inverse.scatter_reduce(0, index, rows, "amax")[:num_assignments]
