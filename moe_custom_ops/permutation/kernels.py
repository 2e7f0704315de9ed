"""Triton kernels of orders (count by tiles, scan over tiles, place) and of the inverse.

Tiles of consecutive assignments. An assignment's row is the start of its expert's group, plus the
assignments of that expert in earlier tiles, and earlier in its own. All are integers, and each is
counted by one program: nothing depends on an order of arrival.
"""

import triton
import triton.language as tl

from ..triton_common import prefetch, wait_for_previous_kernel

INDICES_PER_LINE = tl.constexpr(16)


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


@triton.jit(do_not_specialize=["num_rows", "num_assignments"])
def _invert_at_once_kernel(
    indices_ptr,
    inverse_ptr,
    num_rows,
    num_assignments,
    stride,
    BLOCK_N: tl.constexpr,
    BLOCK_A: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Both of the kernels below in one: each program looks through all rows for its assignments."""
    rows = tl.arange(0, BLOCK_N).to(tl.int64)
    first = tl.program_id(0).to(tl.int64) * BLOCK_A
    if OVERLAP:
        prefetch(indices_ptr + rows * stride, (rows < num_rows) & (rows % INDICES_PER_LINE == 0))
    wait_for_previous_kernel(OVERLAP, True)
    own = first + tl.arange(0, BLOCK_A)
    end = tl.minimum(first + BLOCK_A, num_assignments)
    tl.store(inverse_ptr + own, tl.full([BLOCK_A], -1, tl.int32), mask=own < end)
    index = tl.load(indices_ptr + rows * stride, mask=rows < num_rows, other=-1).to(tl.int64)
    held = (index >= first) & (index < end)
    # The maxima of all threads come behind the stores of all threads.
    tl.debug_barrier()
    tl.atomic_max(inverse_ptr + index, rows.to(tl.int32), mask=held, sem="relaxed")


@triton.jit(do_not_specialize=["num_assignments"])
def _fill_inverse_kernel(
    indices_ptr,
    inverse_ptr,
    num_assignments,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_previous_kernel(OVERLAP, True)
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(inverse_ptr + offsets, tl.full([BLOCK], -1, tl.int32), mask=offsets < num_assignments)


@triton.jit(do_not_specialize=["num_rows", "num_assignments"])
def _invert_kernel(
    indices_ptr,
    inverse_ptr,
    num_rows,
    num_assignments,
    stride,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if OVERLAP:
        prefetch(indices_ptr + rows * stride, (rows < num_rows) & (rows % INDICES_PER_LINE == 0))
    wait_for_previous_kernel(OVERLAP, True)
    index = tl.load(indices_ptr + rows * stride, mask=rows < num_rows, other=-1).to(tl.int64)
    held = (index >= 0) & (index < num_assignments)
    # An integer maximum commutes: the highest row wins a duplicate in any order of arrival.
    tl.atomic_max(inverse_ptr + index, rows.to(tl.int32), mask=held, sem="relaxed")
