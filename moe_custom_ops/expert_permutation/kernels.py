"""Triton kernels of expert_permutation: count by tiles, scan over tiles, place.

Tiles of consecutive assignments. An assignment's row is the start of its expert's group, plus the
assignments of that expert in earlier tiles, and earlier in its own. All are integers, and each is
counted by one program: nothing depends on an order of arrival.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..fixed_order import next_power_of_2
from ..triton_common import Launch, wait_for_previous_kernel
from .reference import bins, tile_size

MIN_FILL, MAX_FILL = 64, 1024
MAP_BLOCK = 1024
SEGMENT_BLOCK = 1024
SCAN_TILES = 1024
SCAN_EXPERTS = 8
COUNT_BLOCK = 512


@triton.jit
def _load_ids(ids_ptr, index, inside, num_experts, stride_t, stride_k, K: tl.constexpr):
    """(expert of each assignment, whether there is one)"""
    token, k = (index // K).to(tl.int64), (index % K).to(tl.int64)
    ids = tl.load(ids_ptr + token * stride_t + k * stride_k, mask=inside, other=-1)
    valid = (ids >= 0) & (ids < num_experts)
    return tl.where(valid, ids, 0).to(tl.int32), valid


@triton.jit
def _fill_rows(sorted_ptr, num_rows, FILL: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * FILL + tl.arange(0, FILL)
    tl.store(sorted_ptr + rows, tl.full([FILL], -1, tl.int32), mask=rows < num_rows)


@triton.jit(do_not_specialize=["num_assignments", "tile", "num_tiles", "num_rows"])
def _count_experts_kernel(
    ids_ptr,
    counts_ptr,
    sorted_ptr,
    num_assignments,
    tile,
    num_tiles,
    num_rows,
    num_experts,
    stride_t,
    stride_k,
    K: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    FILL: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The assignments of each expert in each tile; and every row as padding."""
    wait_for_previous_kernel(OVERLAP, True)
    pid = tl.program_id(0)
    _fill_rows(sorted_ptr, num_rows, FILL)
    if pid < num_tiles:
        first = pid * tile
        length = tl.minimum(tile, num_assignments - first)
        counts = tl.zeros([BINS], tl.int32)
        for block in range(BLOCKS):
            lanes = block * BLOCK + tl.arange(0, BLOCK)
            ids, valid = _load_ids(
                ids_ptr, first + lanes, lanes < length, num_experts, stride_t, stride_k, K
            )
            counts += tl.histogram(ids, BINS, mask=valid)
        tl.store(counts_ptr + pid * BINS + tl.arange(0, BINS), counts)


@triton.jit(do_not_specialize=["num_tokens", "tile", "num_tiles", "num_rows"])
def _count_map_kernel(
    map_ptr,
    ids_ptr,
    counts_ptr,
    sorted_ptr,
    num_tokens,
    tile,
    num_tiles,
    num_rows,
    num_experts,
    stride_t,
    stride_e,
    K: tl.constexpr,
    PADDED_K: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    FILL: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The same from a map, for tiles of whole tokens; and the experts that each token has set."""
    wait_for_previous_kernel(OVERLAP, True)
    pid = tl.program_id(0)
    _fill_rows(sorted_ptr, num_rows, FILL)
    if pid < num_tiles:
        first = pid * tile
        length = tl.minimum(tile, num_tokens - first)
        # Four experts to a word, a byte each: sums along either axis take a quarter of the work.
        words = tl.arange(0, BINS // 4)
        ks = tl.arange(0, PADDED_K)
        tile_ids_ptr = ids_ptr + first.to(tl.int64) * K
        counts0 = tl.zeros([BINS // 4], tl.int32)
        counts1, counts2, counts3 = counts0, counts0, counts0
        for start in range(0, length, BLOCK):
            lanes = start + tl.arange(0, BLOCK)
            inside = lanes < length
            tokens = (first + lanes).to(tl.int64)
            bits = tl.zeros([BLOCK, BINS // 4], tl.int32)
            for byte in tl.static_range(4):
                experts = words * 4 + byte
                is_set = tl.load(
                    map_ptr + tokens[:, None] * stride_t + experts[None, :].to(tl.int64) * stride_e,
                    mask=inside[:, None] & (experts < num_experts)[None, :],
                    other=0,
                )
                bits |= (is_set != 0).to(tl.int32) << (8 * byte)
            # Each byte plus those below it.
            upto = bits * 0x01010101
            of_word = upto >> 24
            before = tl.cumsum(of_word, axis=1) - of_word
            kept = tl.zeros([BLOCK, BINS // 4], tl.int32)
            for byte in tl.static_range(4):
                rank = before + ((upto >> (8 * byte)) & 255) - 1
                is_kept = (((bits >> (8 * byte)) & 1) != 0) & (rank < K)
                tl.store(
                    tile_ids_ptr + lanes[:, None] * K + rank,
                    tl.broadcast_to((words * 4 + byte)[None, :], [BLOCK, BINS // 4]),
                    mask=is_kept,
                )
                kept |= is_kept.to(tl.int32) << (8 * byte)
            missing = (ks[None, :] >= tl.sum(of_word, axis=1)[:, None]) & (ks < K)[None, :]
            tl.store(
                tile_ids_ptr + lanes[:, None] * K + ks[None, :],
                tl.full([BLOCK, PADDED_K], -1, tl.int32),
                mask=inside[:, None] & missing,
            )
            # A block has fewer tokens than a byte counts.
            kept = tl.sum(kept, axis=0)
            counts0 += kept & 255
            counts1 += (kept >> 8) & 255
            counts2 += (kept >> 16) & 255
            counts3 += (kept >> 24) & 255
        counts_ptrs = counts_ptr + pid * BINS + words * 4
        tl.store(counts_ptrs, counts0)
        tl.store(counts_ptrs + 1, counts1)
        tl.store(counts_ptrs + 2, counts2)
        tl.store(counts_ptrs + 3, counts3)


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


@triton.jit(do_not_specialize=["num_assignments", "tile", "num_tiles", "num_rows"])
def _place_assignments_kernel(
    ids_ptr,
    counts_ptr,
    sorted_ptr,
    tokens_per_expert_ptr,
    offsets_ptr,
    num_assignments,
    tile,
    num_tiles,
    num_rows,
    num_experts,
    stride_t,
    stride_k,
    K: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
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
        first_rows = ends - aligned + tl.load(counts_ptr + pid * BINS + experts)
        # A row past the last is not written, whichever it is.
        first_rows = tl.minimum(first_rows, num_rows).to(tl.int32)
        first = pid * tile
        length = tl.minimum(tile, num_assignments - first)
        order = tl.arange(0, BLOCK)
        # The first axis lies in registers: summing it takes no exchange between threads.
        earlier = order[:, None] < order[None, :]
        for block in range(BLOCKS):
            lanes = block * BLOCK + order
            ids, valid = _load_ids(
                ids_ptr, first + lanes, lanes < length, num_experts, stride_t, stride_k, K
            )
            # No lane has the expert of one that is dropped.
            same = (tl.where(valid, ids, -1)[:, None] == ids[None, :]) & earlier
            rows = tl.gather(first_rows, ids, axis=0) + tl.sum(same.to(tl.int32), axis=0)
            # Below zero is past 2^31.
            inside = (rows >= 0) & (rows < num_rows)
            tl.store(sorted_ptr + rows, first + lanes, mask=valid & inside)
            if BLOCKS > 1:
                first_rows = tl.minimum(first_rows + tl.histogram(ids, BINS, mask=valid), num_rows)


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
    counts = tl.minimum(tl.maximum(counts.to(tl.int64), 0), 2147483648)
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


def _place_block(tile: int, num_bins: int) -> tuple[int, int]:
    """(assignments that are compared with one another, warps)

    One block where it is small, as each must add its counts by a histogram. That is cheap for few
    experts: of 2^20 assignments of 64, blocks of 32 took 33 us, of 64 41 and of 128 57 on an H200.
    """
    if tile <= 64:
        return next_power_of_2(tile), 1 if num_bins <= 256 else 2
    return (32, 1) if num_bins <= 256 else (128, 4)


def expert_permutation(
    routing: Tensor, num_experts: int, topk: int, alignment: int, num_rows: int
) -> tuple[Launch, Launch, Launch]:
    """The launches that count, scan and place.

    ``routing`` is expert ids [tokens, topk], or, as bytes, a map [tokens, num_experts]. The count
    takes (ids, counts, sorted) or (map, ids, counts, sorted), where it writes ids int32
    [tokens, topk]; the scan takes (counts), the placement (ids, counts, sorted, tokens_per_expert,
    offsets). ``counts`` is scratch, for each tile's counts and the totals.
    """
    device, num_tokens = routing.device, routing.shape[0]
    is_map = routing.dtype == torch.uint8
    num_assignments = num_tokens * topk
    tile, num_bins = tile_size(num_assignments, num_experts), bins(num_experts)
    if is_map:
        tile = max(tile // topk, 1) * topk
    num_tiles = triton.cdiv(num_assignments, tile)
    sizes = num_tiles, num_rows, num_experts
    common: dict[str, Any] = {"K": topk, "BINS": num_bins, "overlap": True}
    fill = next_power_of_2(triton.cdiv(num_rows, max(num_tiles, 1)))
    fill = min(max(fill, MIN_FILL), MAX_FILL)
    programs = max(num_tiles, triton.cdiv(num_rows, fill))
    if is_map:
        block = min(max(MAP_BLOCK // num_bins, 1), next_power_of_2(tile // topk))
        count = Launch(
            _count_map_kernel,
            programs,
            device,
            num_tokens,
            tile // topk,
            *sizes,
            *routing.stride(),
            PADDED_K=next_power_of_2(topk),
            BLOCK=block,
            FILL=fill,
            num_warps=min(max(block * num_bins // 512, 1), 4),
            **common,
        )
        strides: tuple[int, ...] = topk, 1
    else:
        block = min(tile, COUNT_BLOCK)
        count = Launch(
            _count_experts_kernel,
            programs,
            device,
            num_assignments,
            tile,
            *sizes,
            *routing.stride(),
            BLOCK=block,
            BLOCKS=tile // block,
            FILL=fill,
            num_warps=max(block // 128, 1),
            **common,
        )
        strides = routing.stride()
    block_e = min(SCAN_EXPERTS, num_bins)
    scan = Launch(
        _scan_tiles_kernel,
        num_bins // block_e,
        device,
        num_tiles,
        BINS=num_bins,
        BLOCK_T=min(next_power_of_2(num_tiles), SCAN_TILES),
        BLOCK_E=block_e,
        num_warps=8,
        overlap=True,
    )
    block, num_warps = _place_block(tile, num_bins)
    place = Launch(
        _place_assignments_kernel,
        max(num_tiles, 1),
        device,
        num_assignments,
        tile,
        *sizes,
        *strides,
        ALIGNMENT=alignment,
        BLOCK=block,
        BLOCKS=triton.cdiv(tile, block),
        num_warps=num_warps,
        **common,
    )
    return count, scan, place
