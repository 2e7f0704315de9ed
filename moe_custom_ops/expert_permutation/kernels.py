"""Triton kernels of expert_permutation: count by tiles, scan over tiles, place.

Tiles of consecutive assignments, blocks of a tile. An assignment's row is the start of its expert's
group, plus the assignments of that expert in earlier tiles, in earlier blocks and earlier in the
block. All are integers, and each is counted by one program: nothing depends on an order of arrival.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ..fixed_order import next_power_of_2
from ..triton_common import Launch, wait_for_previous_kernel
from .reference import BLOCK, bins, tile_size

FILL_BLOCK = 1024
MAP_BLOCK = 2048
SEGMENT_BLOCK = 1024
SCAN_TILES = 512
SCAN_EXPERTS = 4


@triton.jit
def _load_ids(ids_ptr, index, num_assignments, num_experts, stride_t, stride_k, K: tl.constexpr):
    """(expert of each assignment, whether there is one)"""
    inside = index < num_assignments
    token, k = (index // K).to(tl.int64), (index % K).to(tl.int64)
    ids = tl.load(ids_ptr + token * stride_t + k * stride_k, mask=inside, other=-1)
    valid = (ids >= 0) & (ids < num_experts)
    return tl.where(valid, ids, 0).to(tl.int32), valid


@triton.jit(do_not_specialize=["num_assignments", "num_tiles", "num_rows"])
def _count_experts_kernel(
    ids_ptr,
    counts_ptr,
    sorted_ptr,
    num_assignments,
    num_tiles,
    num_rows,
    num_experts,
    stride_t,
    stride_k,
    K: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
    FILL: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The assignments of each expert in each tile; and every row as padding."""
    wait_for_previous_kernel(OVERLAP, True)
    pid = tl.program_id(0)
    rows = pid.to(tl.int64) * FILL + tl.arange(0, FILL)
    tl.store(sorted_ptr + rows, tl.full([FILL], -1, tl.int32), mask=rows < num_rows)
    if pid < num_tiles:
        counts = tl.zeros([BINS], tl.int32)
        for start in range(0, TILE, BLOCK):
            index = pid * TILE + start + tl.arange(0, BLOCK)
            ids, valid = _load_ids(
                ids_ptr, index, num_assignments, num_experts, stride_t, stride_k, K
            )
            counts += tl.histogram(ids, BINS, mask=valid)
        tl.store(counts_ptr + pid * BINS + tl.arange(0, BINS), counts)


@triton.jit(do_not_specialize=["num_tiles"])
def _scan_tiles_kernel(
    counts_ptr,
    num_tiles,
    BINS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Each count becomes the sum of those of earlier tiles; the totals go behind the last tile."""
    wait_for_previous_kernel(OVERLAP, True)
    experts = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    total = tl.zeros([BLOCK_E], tl.int32)
    for start in range(0, num_tiles, BLOCK_T):
        tile = start + tl.arange(0, BLOCK_T)
        ptrs = counts_ptr + tile[:, None] * BINS + experts[None, :]
        mask = (tile < num_tiles)[:, None]
        counts = tl.load(ptrs, mask=mask, other=0)
        tl.store(ptrs, tl.cumsum(counts, axis=0) - counts + total[None, :], mask=mask)
        total += tl.sum(counts, axis=0)
    tl.store(counts_ptr + num_tiles * BINS + experts, total)


@triton.jit(do_not_specialize=["num_assignments", "num_tiles", "num_rows"])
def _place_assignments_kernel(
    ids_ptr,
    counts_ptr,
    sorted_ptr,
    tokens_per_expert_ptr,
    offsets_ptr,
    num_assignments,
    num_tiles,
    num_rows,
    num_experts,
    stride_t,
    stride_k,
    K: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_previous_kernel(OVERLAP, True)
    pid = tl.program_id(0)
    experts = tl.arange(0, BINS)
    totals = tl.load(counts_ptr + num_tiles * BINS + experts).to(tl.int64)
    aligned = (totals + (ALIGNMENT - 1)) // ALIGNMENT * ALIGNMENT
    ends = tl.cumsum(aligned, axis=0)
    if pid == 0:
        own = experts < num_experts
        tl.store(tokens_per_expert_ptr + experts, totals, mask=own)
        tl.store(offsets_ptr + experts, tl.minimum(ends, num_rows).to(tl.int32), mask=own)
    if pid < num_tiles:
        # A row past the last is not written, whichever it is.
        first_rows = ends - aligned + tl.load(counts_ptr + pid * BINS + experts)
        first_rows = tl.minimum(first_rows, num_rows).to(tl.int32)
        lanes = tl.arange(0, BLOCK)
        earlier = lanes[None, :] < lanes[:, None]
        for start in range(0, TILE, BLOCK):
            index = pid * TILE + start + lanes
            ids, valid = _load_ids(
                ids_ptr, index, num_assignments, num_experts, stride_t, stride_k, K
            )
            # No lane has the expert of one that is dropped.
            own = tl.where(valid, ids, -1)
            same = (own[None, :] == ids[:, None]) & earlier
            rows = tl.gather(first_rows, ids, axis=0) + tl.sum(same.to(tl.int32), axis=1)
            # Below zero is past 2^31.
            inside = (rows >= 0) & (rows < num_rows)
            tl.store(sorted_ptr + rows, index, mask=valid & inside)
            if TILE > BLOCK:
                first_rows = tl.minimum(first_rows + tl.histogram(ids, BINS, mask=valid), num_rows)


@triton.jit(do_not_specialize=["num_tokens"])
def _ids_from_map_kernel(
    map_ptr,
    ids_ptr,
    num_tokens,
    num_experts,
    stride_t,
    stride_e,
    K: tl.constexpr,
    PADDED_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_previous_kernel(OVERLAP, True)
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    experts = tl.arange(0, BLOCK_E)
    inside = tokens < num_tokens
    is_set = tl.load(
        map_ptr + tokens[:, None] * stride_t + experts[None, :].to(tl.int64) * stride_e,
        mask=inside[:, None] & (experts < num_experts)[None, :],
        other=0,
    )
    is_set = (is_set != 0).to(tl.int32)
    rank = tl.cumsum(is_set, axis=1) - 1
    tl.store(
        ids_ptr + tokens[:, None] * K + rank,
        tl.broadcast_to(experts[None, :], [BLOCK_T, BLOCK_E]),
        mask=(is_set != 0) & (rank < K),
    )
    ks = tl.arange(0, PADDED_K)
    missing = (ks[None, :] >= tl.sum(is_set, axis=1)[:, None]) & (ks < K)[None, :]
    tl.store(
        ids_ptr + tokens[:, None] * K + ks[None, :],
        tl.full([BLOCK_T, PADDED_K], -1, tl.int32),
        mask=inside[:, None] & missing,
    )


@triton.jit(do_not_specialize=["num_rows"])
def _order_from_counts_kernel(
    counts_ptr,
    sorted_ptr,
    tokens_per_expert_ptr,
    offsets_ptr,
    num_rows,
    num_ranks,
    num_experts,
    stride_r,
    stride_e,
    ALIGNMENT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program for each segment: the rows of one expert that came from one rank."""
    wait_for_previous_kernel(OVERLAP, True)
    pid = tl.program_id(0)
    rank, expert = pid // num_experts, pid % num_experts
    ranks = tl.arange(0, BLOCK_R)[:, None]
    experts = tl.arange(0, BLOCK_E)
    counts = tl.load(
        counts_ptr + ranks.to(tl.int64) * stride_r + experts[None, :].to(tl.int64) * stride_e,
        mask=(ranks < num_ranks) & (experts < num_experts)[None, :],
        other=0,
    )
    counts = tl.maximum(counts.to(tl.int64), 0)
    earlier_rank = tl.where(ranks < rank, counts, 0)
    own_rank = tl.where(ranks == rank, counts, 0)
    per_expert = tl.sum(counts, axis=0)
    aligned = (per_expert + (ALIGNMENT - 1)) // ALIGNMENT * ALIGNMENT
    own = experts == expert
    before = experts < expert
    # Sums of integers, exact in any order.
    total = tl.sum(tl.where(own, per_expert, 0), axis=0)
    length = tl.sum(tl.where(own, tl.sum(own_rank, axis=0), 0), axis=0)
    source = tl.sum(
        tl.sum(earlier_rank, axis=0) + tl.where(before, tl.sum(own_rank, axis=0), 0), axis=0
    )
    group = tl.sum(tl.where(before, aligned, 0), axis=0)
    end = group + tl.sum(tl.where(own, aligned, 0), axis=0)
    target = group + tl.sum(tl.where(own, tl.sum(earlier_rank, axis=0), 0), axis=0)
    if rank == 0:
        tl.store(tokens_per_expert_ptr + expert, total)
        tl.store(offsets_ptr + expert, tl.minimum(end, num_rows).to(tl.int32))
    lanes = tl.arange(0, BLOCK)
    for start in range(0, tl.minimum(length, tl.maximum(num_rows - target, 0)), BLOCK):
        rows = start + lanes
        sources = source + rows
        tl.store(
            sorted_ptr + target + rows,
            tl.where(sources < 2147483648, sources, -1).to(tl.int32),
            mask=(rows < length) & (target + rows < num_rows),
        )
    padding = tl.full([BLOCK], -1, tl.int32)
    if rank == num_ranks - 1:
        for start in range(group + total, tl.minimum(end, num_rows), BLOCK):
            rows = start + lanes
            tl.store(sorted_ptr + rows, padding, mask=(rows < end) & (rows < num_rows))
    # What lies behind the last group, a block for each program in turn.
    last = tl.sum(aligned, axis=0)
    for start in range(last + pid * BLOCK, num_rows, num_ranks * num_experts * BLOCK):
        rows = start + lanes
        tl.store(sorted_ptr + rows, padding, mask=rows < num_rows)


def from_counts(counts: Tensor, alignment: int, num_rows: int) -> Launch:
    """Of (counts [ranks, E], sorted, tokens_per_expert, offsets)."""
    num_ranks, num_experts = counts.shape
    block_r, block_e = next_power_of_2(num_ranks), next_power_of_2(num_experts)
    return Launch(
        _order_from_counts_kernel,
        num_ranks * num_experts,
        counts.device,
        num_rows,
        num_ranks,
        num_experts,
        *counts.stride(),
        ALIGNMENT=alignment,
        BLOCK_R=block_r,
        BLOCK_E=block_e,
        BLOCK=SEGMENT_BLOCK,
        num_warps=min(max(block_r * block_e // 1024, 1), 16),
        overlap=True,
    )


def ids_from_map(routing_map: Tensor, topk: int) -> Launch:
    """Of (routing_map as bytes [tokens, E], ids int32 [tokens, topk])."""
    num_tokens, num_experts = routing_map.shape
    block_e = next_power_of_2(num_experts)
    block_t = max(MAP_BLOCK // block_e, 1)
    return Launch(
        _ids_from_map_kernel,
        triton.cdiv(num_tokens, block_t),
        routing_map.device,
        num_tokens,
        num_experts,
        *routing_map.stride(),
        K=topk,
        PADDED_K=next_power_of_2(topk),
        BLOCK_T=block_t,
        BLOCK_E=block_e,
        overlap=True,
    )


def expert_permutation(
    expert_ids: Tensor, num_experts: int, alignment: int, num_rows: int
) -> tuple[Launch, Launch, Launch]:
    """Of (ids, counts, sorted), (counts) and (ids, counts, sorted, tokens_per_expert, offsets).

    For ``expert_ids`` [tokens, K]. ``counts`` is scratch, for each tile's counts and the totals.
    """
    device, (num_tokens, topk) = expert_ids.device, expert_ids.shape
    num_assignments = num_tokens * topk
    tile, num_bins = tile_size(num_assignments, num_experts), bins(num_experts)
    num_tiles = triton.cdiv(num_assignments, tile)
    sizes = num_assignments, num_tiles, num_rows, num_experts, *expert_ids.stride()
    options: dict[str, Any] = {
        "K": topk,
        "TILE": tile,
        "BLOCK": BLOCK,
        "BINS": num_bins,
        "overlap": True,
    }
    block_e = min(SCAN_EXPERTS, num_bins)
    return (
        Launch(
            _count_experts_kernel,
            max(num_tiles, triton.cdiv(num_rows, FILL_BLOCK)),
            device,
            *sizes,
            FILL=FILL_BLOCK,
            num_warps=min(max(num_bins // 512, 2), 8),
            **options,
        ),
        Launch(
            _scan_tiles_kernel,
            num_bins // block_e,
            device,
            num_tiles,
            BINS=num_bins,
            BLOCK_T=min(next_power_of_2(num_tiles), SCAN_TILES),
            BLOCK_E=block_e,
            overlap=True,
        ),
        Launch(
            _place_assignments_kernel,
            max(num_tiles, 1),
            device,
            *sizes,
            ALIGNMENT=alignment,
            # At T 8192, K 8, E 128 one warp took 13.0 us for the whole op and four 14.4, and at
            # (4096, 8, 256) 13.0 and 9.8, on an H200.
            num_warps=1 if num_bins <= 128 else min(max(num_bins // 256, 4), 8),
            **options,
        ),
    )
