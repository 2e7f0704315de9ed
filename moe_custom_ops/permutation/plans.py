"""The launches, sizes and allocations of orders and inverses."""

import functools
import math
from typing import Any

import torch
from torch import Tensor

from .. import workspace as workspaces
from ..backend import flat, load_kernels
from ..fixed_order import next_power_of_2
from ..launch import Launch, Run, allocator, cdiv, contiguous_stride
from . import arguments
from .reference import bins, tile_size

MIN_FILL, MAX_FILL = 64, 1024
MAP_BLOCK = 1024
SEGMENT_BLOCK = 1024
SCAN_TILES = 1024
SCAN_EXPERTS = 8
COUNT_BLOCK = 512
# Of 65536 assignments, blocks of 1024 took 2.9 us and of 256 2.4 us on an H200.
INVERT_BLOCK = 256
# Rows or assignments, at most, that are inverted with one launch, and what a program of it owns.
# On an H200 one launch took 0.7 us for 256 of them, 1.2 for 2048, 1.6 for 4096 and 2.8 for 8192;
# two launches took 1.5, 2.3, 2.3 and 2.4.
INVERT_AT_ONCE = 4096
OWN_ASSIGNMENTS = 128

_kernels = functools.partial(load_kernels, __package__)
_Result = tuple[Tensor, Tensor, Tensor]


def count_launch(counts: Tensor, alignment: int, num_rows: int) -> Launch:
    """Of (counts [ranks, E], sorted, tokens_per_expert, offsets)."""
    num_ranks, num_experts = counts.shape
    block_r, block_e = next_power_of_2(num_ranks), next_power_of_2(num_experts)
    return Launch(
        _kernels()._order_from_counts_kernel,
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


def order_launches(
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
    num_tiles = cdiv(num_assignments, tile)
    sizes = num_tiles, num_rows, num_experts
    common: dict[str, Any] = {"K": topk, "BINS": num_bins, "overlap": True}
    fill = next_power_of_2(cdiv(num_rows, max(num_tiles, 1)))
    fill = min(max(fill, MIN_FILL), MAX_FILL)
    programs = max(num_tiles, cdiv(num_rows, fill))
    if is_map:
        block = min(max(MAP_BLOCK // num_bins, 1), next_power_of_2(tile // topk))
        count = Launch(
            _kernels()._count_map_kernel,
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
            _kernels()._count_experts_kernel,
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
        _kernels()._scan_tiles_kernel,
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
        _kernels()._place_assignments_kernel,
        max(num_tiles, 1),
        device,
        num_assignments,
        tile,
        *sizes,
        *strides,
        ALIGNMENT=alignment,
        BLOCK=block,
        BLOCKS=cdiv(tile, block),
        num_warps=num_warps,
        **common,
    )
    return count, scan, place


def invert(token_indices_sorted: Tensor, num_assignments: int) -> list[Launch]:
    """Each of (token_indices_sorted, inverse), in order.

    They write the row of each assignment, or -1, to ``inverse`` int32 [num_assignments].
    """
    num_rows, device = token_indices_sorted.shape[0], token_indices_sorted.device
    stride = token_indices_sorted.stride(0)
    if max(num_rows, num_assignments) <= INVERT_AT_ONCE:
        return [
            Launch(
                _kernels()._invert_at_once_kernel,
                cdiv(num_assignments, OWN_ASSIGNMENTS),
                device,
                num_rows,
                num_assignments,
                stride,
                BLOCK_N=next_power_of_2(num_rows),
                BLOCK_A=OWN_ASSIGNMENTS,
                num_warps=16,
                overlap=True,
            )
        ]
    return [
        Launch(
            _kernels()._fill_inverse_kernel,
            cdiv(num_assignments, INVERT_BLOCK),
            device,
            num_assignments,
            BLOCK=INVERT_BLOCK,
            overlap=True,
        ),
        Launch(
            _kernels()._invert_kernel,
            cdiv(num_rows, INVERT_BLOCK),
            device,
            num_rows,
            num_assignments,
            stride,
            BLOCK=INVERT_BLOCK,
            overlap=True,
        ),
    ]


def _empty_results(device: torch.device, num_rows: int, num_experts: int) -> _Result:
    empty = allocator(device)
    return (
        empty((num_rows,), (1,), torch.int32),
        empty((num_experts,), (1,), torch.int64),
        empty((num_experts,), (1,), torch.int32),
    )


def order(
    routing: Tensor,
    workspace: Tensor | None,
    num_experts: int,
    topk: int,
    alignment: int,
    num_rows: int | None,
) -> Run:
    """A plan for the order of ids, or of a map; with room for all where no rows are given."""
    num_rows = arguments.check_order(routing, num_experts, topk, alignment, num_rows, workspace)
    is_map, device = routing.dtype == torch.bool, routing.device
    source = routing.view(torch.uint8) if is_map else flat(routing)
    ids_shape = source.shape[0], topk
    num_counts = arguments.num_counts(source.shape[0] * topk, num_experts)
    count, scan, place = order_launches(source, num_experts, topk, alignment, num_rows)

    def run(routing: Tensor, workspace: Tensor | None, *numbers: Any) -> _Result:
        empty = allocator(device)
        if workspace is None:
            counts = empty((num_counts,), (1,), torch.int32)
        else:
            counts = workspaces.view(workspace, num_counts, torch.int32)
        results = _empty_results(device, num_rows, num_experts)
        if is_map:
            ids = empty(ids_shape, (topk, 1), torch.int32)
            count(routing.view(torch.uint8), ids, counts, results[0])
        else:
            ids = flat(routing)
            count(ids, counts, results[0])
        scan(counts)
        place(ids, counts, *results)
        return results

    return run


def order_from_counts(counts: Tensor, num_rows: int, alignment: int) -> Run:
    """A plan for the order of rows that came rank by rank."""
    arguments.check_counts(counts, num_rows, alignment, None)
    launch, device, num_experts = (
        count_launch(counts, alignment, num_rows),
        counts.device,
        counts.shape[1],
    )

    def run(counts: Tensor, num_rows: int, alignment: int) -> _Result:
        results = _empty_results(device, num_rows, num_experts)
        launch(counts, *results)
        return results

    return run


def inverse(token_indices_sorted: Tensor, num_tokens: int, topk: int) -> Run:
    """A plan for the inverse [num_tokens, topk]."""
    arguments.check_inverse_permutation(token_indices_sorted, num_tokens, topk)
    device, shape = token_indices_sorted.device, (num_tokens, topk)
    launches, stride = invert(token_indices_sorted, math.prod(shape)), contiguous_stride(shape)

    def run(token_indices_sorted: Tensor, num_tokens: int, topk: int) -> Tensor:
        result = allocator(device)(shape, stride, torch.int32)
        for launch in launches:
            launch(token_indices_sorted, result)
        return result

    return run
