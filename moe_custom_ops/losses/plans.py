"""The launches, sizes and allocations of the losses."""

import functools

import torch
from torch import Tensor

from .. import workspace as workspaces
from ..backend import as_bytes, float64_bits, load_kernels
from ..fixed_order import accumulator_dtype, next_power_of_2, tree_sum
from ..launch import (
    Launch,
    Run,
    allocator,
    cdiv,
    contiguous_stride,
    few_programs,
    strides,
    triton_dtype,
)
from . import arguments, reference
from .reference import MIN_CHUNK_COLUMNS, max_chunks, num_slots, num_tiles, tile_tokens

# The most columns of one program that sums a tile.
MAX_CHUNK_COLUMNS = 512
# Below as many programs, columns are cut finer. Of no device: it decides the size of a workspace.
FEW_PROGRAMS = 512
MAX_GROUPS = 8
# Partial sums that one step of the final tree adds.
FINAL_BLOCK = 4096
# Sequence bounds that one step of the search compares, and sums that one step of a tree adds.
SEARCH_BLOCK = 1024
TREE_BLOCK = 1024
# Columns of one program that writes rows of a gradient.
GRAD_BLOCK = 1024

_kernels = functools.partial(load_kernels, __package__)


def chunk_columns(num_tiles: int, num_columns: int) -> int:
    """Columns per program: a subtree of the tree over columns, so no choice changes a bit."""
    padded = next_power_of_2(num_columns)
    columns = min(padded, MAX_CHUNK_COLUMNS)
    while columns > MIN_CHUNK_COLUMNS and num_tiles * (padded // columns) < FEW_PROGRAMS:
        columns //= 2
    return columns


def num_chunks(num_tiles: int, num_columns: int) -> int:
    """Chunks of columns per tile, a power of two."""
    return next_power_of_2(num_columns) // chunk_columns(num_tiles, num_columns)


def tile_options(
    block_t: int, block_c: int, probs: Tensor, few: bool, num_warps: int | None = None
) -> dict[str, int]:
    """Groups of tokens side by side, warps and registers of a thread for the sums of a tile.

    Left alone, Triton 3.9 takes 48 to 80 registers, and a few loads at a time: aux_loss of
    (8192, 8) and (131072, 8) took 5.3 and 6.6 us on an H200, and takes 2.4 and 3.2.
    """
    stride_t, stride_c = probs.stride()[-2:]
    num_columns = probs.shape[-1]
    aligned = stride_c == 1 and stride_t % 16 == 0 and num_columns % 16 == 0
    # What Triton knows of no alignment of is loaded one by one, to a register each.
    itemsize = probs.itemsize if aligned else max(probs.itemsize, 4)
    threads_per_token = max(block_c * itemsize // 16, 1)
    if num_warps is None:
        # A thread has 32 loads in flight, which are 128 registers: more of either was slower.
        loads = block_t * threads_per_token
        fewest = 2 if few or threads_per_token < 8 else 1
        num_warps = min(max(threads_per_token // 32, loads // 1024, fewest), 4)
    # Groups that fill the threads with 16-byte loads. More of narrow rows touch more lines with one
    # load: on an H200 32 groups, not 8, took 1.9 times as long for 1048576 tokens of 8 experts.
    groups = min(max(32 * num_warps // threads_per_token, 1), MAX_GROUPS, block_t)

    registers = block_t * block_c * itemsize // (128 * num_warps)
    if num_warps == 1:
        # Without a bound Triton 3.9 takes 66 on capability 8.0. With it, 3.6 takes 130 on an H200
        # for bfloat16 of (131072, 128), not the 128 that let 2048 programs be one wave: 10.5 us,
        # not 9.9.
        registers += 32
    elif registers <= 64:
        # Eight groups do not fit 64: (8192, 8) took 3.0 us, not 2.4. Fewer do: (8192, 128) took 3.2
        # us, and with 80 3.6.
        registers = 64 if aligned and groups < MAX_GROUPS else 96
    elif not aligned or (groups > 1 and not num_columns == block_c == 64):
        # Groups that are added across threads need a few more, which cost a program of eight on a
        # multiprocessor. 64 experts do without, and took 0.92 of the time over sequences; 60 and
        # 128 spill, and took 1.06 and 1.17 times as long.
        registers += 16
    return {"GROUPS": groups, "num_warps": num_warps, "maxnreg": min(registers, 255)}


def num_partials(num_tokens: int, num_columns: int) -> tuple[int, int]:
    """(chunks per tile, a power of two; partial sums in all)."""
    tiles = num_tiles(num_tokens, num_columns)
    chunks = num_chunks(tiles, num_columns)
    return chunks, tiles * chunks


def aux_tile_sums(
    probs: Tensor,
    tokens_per_expert: Tensor,
    token_mask: Tensor | None,
    num_warps: int | None = None,
) -> Launch:
    """Of (probs, tokens_per_expert, token_mask as bytes, partials).

    Writes the sum of every (tile, chunk of columns) to ``partials``.
    """
    num_tokens, num_columns = probs.shape
    chunks, count = num_partials(num_tokens, num_columns)
    block_t, block_c = tile_tokens(num_columns), next_power_of_2(num_columns) // chunks
    few = count <= few_programs(probs.device)
    return Launch(
        _kernels()._aux_loss_tile_sums_kernel,
        count,
        probs.device,
        num_tokens,
        num_columns,
        *probs.stride(),
        *tokens_per_expert.stride(),
        *strides(token_mask, 1),
        CHUNKS=chunks,
        BLOCK_T=block_t,
        BLOCK_C=block_c,
        ACC=triton_dtype(accumulator_dtype(probs.dtype)),
        RUN_AHEAD=not few,
        overlap=True,
        **tile_options(block_t, block_c, probs, few, num_warps),
    )


def aux_from_tile_sums(num_partials: int, dtype: torch.dtype, device: torch.device) -> Launch:
    """Of (partials, total, loss, scale, bits of a float64).

    Adds ``partials`` by the tree over tiles, and writes the loss and, if asked for, the scale that
    it carries. The float64 is C, or C * total * total with a total on the device.
    """
    blocks = (num_partials + FINAL_BLOCK - 1) // FINAL_BLOCK
    return Launch(
        _kernels()._aux_loss_from_tile_sums_kernel,
        1,
        device,
        num_partials,
        blocks,
        BLOCK=min(next_power_of_2(num_partials), FINAL_BLOCK),
        MAX_BLOCKS=next_power_of_2(blocks),
        ACC=triton_dtype(dtype),
        num_warps=4,
        overlap=True,
    )


def _blocks(count: int) -> tuple[int, int]:
    """(leaves per step, steps) of a tree over ``count`` leaves, both powers of two."""
    block = min(next_power_of_2(count), TREE_BLOCK)
    return block, next_power_of_2(cdiv(count, block))


def sequence_tile_sums(
    probs: Tensor,
    tokens_per_expert: Tensor,
    cu_seqlens: Tensor | None,
    token_mask: Tensor | None,
    num_slots: int,
    num_warps: int | None = None,
) -> Launch:
    """Of (probs, tokens_per_expert, cu_seqlens, token_mask as bytes, partials, tile_lengths).

    Writes each slot's weighted sums to ``partials``, its number of tokens to ``tile_lengths``.
    """
    num_tokens, num_columns = probs.shape[-2:]
    num_sequences = tokens_per_expert.shape[0]
    slots = num_slots if num_sequences else 0
    if cu_seqlens is None:
        slots = num_sequences * num_tiles(num_tokens, num_columns)
    chunks = num_chunks(num_slots, num_columns)
    block_t, block_c = tile_tokens(num_columns), next_power_of_2(num_columns) // chunks
    few = slots * chunks <= few_programs(probs.device)
    return Launch(
        _kernels()._sequence_tile_sums_kernel,
        slots * chunks,
        probs.device,
        num_tokens,
        num_sequences,
        num_columns,
        *(0, *probs.stride())[-3:],
        *tokens_per_expert.stride(),
        *strides(cu_seqlens, 1),
        *(0, *strides(token_mask, 2))[-2:],
        CHUNKS=chunks,
        BLOCK_T=block_t,
        BLOCK_C=block_c,
        BLOCK_B=min(next_power_of_2(num_sequences + 1), SEARCH_BLOCK),
        ACC=triton_dtype(accumulator_dtype(probs.dtype)),
        RUN_AHEAD=not few,
        overlap=True,
        **tile_options(block_t, block_c, probs, few, num_warps),
    )


def sequence_from_tile_sums(
    probs: Tensor, tokens_per_expert: Tensor, cu_seqlens: Tensor | None, num_slots: int
) -> tuple[Launch, Launch]:
    """The first of (partials, tile_lengths, cu_seqlens, sums, lengths) adds the slots of each
    sequence: the weighted ones to ``sums`` [sequences], the numbers of tokens to ``lengths`` int64.

    The second of (sums, lengths, loss, scales, bits of num_experts * coeff / topk as a float64)
    adds the sequences, and writes the loss and the scale [sequences] of each, which may replace the
    sums.
    """
    num_tokens, num_columns = probs.shape[-2:]
    num_sequences = tokens_per_expert.shape[0]
    acc = triton_dtype(accumulator_dtype(probs.dtype))
    chunks = num_chunks(num_slots, num_columns)
    block, steps = _blocks(num_tiles(num_tokens, num_columns) * chunks)
    add_slots = Launch(
        _kernels()._sequence_sums_kernel,
        num_sequences,
        probs.device,
        num_tokens,
        *strides(cu_seqlens, 1),
        CHUNKS=chunks,
        BLOCK_T=tile_tokens(num_columns),
        BLOCK=block,
        MAX_BLOCKS=steps,
        ACC=acc,
        num_warps=4,
        overlap=True,
    )
    block, steps = _blocks(num_sequences)
    add_sequences = Launch(
        _kernels()._sequence_loss_kernel,
        1,
        probs.device,
        num_sequences,
        BLOCK=block,
        MAX_BLOCKS=steps,
        ACC=acc,
        num_warps=4,
        overlap=True,
    )
    return add_slots, add_sequences


def grad_rows(
    grad: Tensor,
    scales: Tensor,
    counts: Tensor,
    shape: torch.Size,
    dtype: torch.dtype,
    repeated: bool,
) -> Run:
    """A plan for the rows, one of a sequence, that the gradient of probs of ``shape`` repeats.

    The counts are [sequences, columns], or [columns] of one sequence, and so are the rows; where
    they are to be ``repeated`` they are allocated as that gradient, of stride 0 over the tokens.
    """
    num_columns = counts.shape[-1]
    block = min(next_power_of_2(num_columns), GRAD_BLOCK)
    blocks = cdiv(num_columns, block)
    launch = Launch(
        _kernels()._grad_rows_kernel,
        counts.numel() // max(num_columns, 1) * blocks,
        counts.device,
        num_columns,
        *(0, *counts.stride())[-2:],
        BLOCKS=blocks,
        BLOCK=block,
        num_warps=4,
        overlap=True,
    )
    rows_shape = tuple(counts.shape)
    stride = contiguous_stride(rows_shape)
    if repeated and shape.numel():
        rows_shape, stride = tuple(shape), (*stride[:-1], 0, 1)
    device = counts.device

    def run(grad: Tensor, scales: Tensor, counts: Tensor) -> Tensor:
        rows = allocator(device)(rows_shape, stride, dtype)
        # A hook on saved tensors may have brought them with other strides.
        launch(grad, scales.contiguous(), counts, rows)
        return rows

    return run


def aux_loss(
    probs: Tensor,
    tokens_per_expert: Tensor,
    token_mask: Tensor | None,
    total: Tensor | None,
    sums: Tensor | None,
    workspace: Tensor | None,
    num_experts: int,
    topk: int,
    coeff: float,
) -> Run:
    """A plan for (loss, C), from the ``sums`` of all ranks' tiles where they are given."""
    given = probs, tokens_per_expert, 1 if total is None else total
    arguments.check_aux_loss(*given, num_experts, topk, workspace, token_mask)
    device, dtype = probs.device, accumulator_dtype(probs.dtype)
    count = num_partials(*probs.shape)[1]
    if sums is None:
        tile_sums = aux_tile_sums(probs, tokens_per_expert, token_mask)
    else:
        arguments.check_sums(sums, dtype)
        count = sums.shape[0]
    from_tile_sums = aux_from_tile_sums(count, dtype, device)

    def run(
        probs: Tensor,
        tokens_per_expert: Tensor,
        token_mask: Tensor | None,
        total: Tensor | None,
        sums: Tensor | None,
        workspace: Tensor | None,
        num_experts: int,
        topk: int,
        coeff: float,
        total_int: int,
    ) -> tuple[Tensor, Tensor]:
        empty = allocator(device)
        loss, scale = empty((), (), dtype), empty((), (), dtype)
        if total is None and total_int == 0:
            return loss.zero_(), scale.zero_()
        if sums is None:
            if workspace is None:
                sums = empty((count,), (1,), dtype)
            else:
                sums = workspaces.view(workspace, count, dtype)
            tile_sums(probs, tokens_per_expert, as_bytes(token_mask), sums)
        numerator = num_experts * coeff / topk
        if total is None:
            numerator = numerator / total_int / total_int
        from_tile_sums(sums, total, loss, scale, float64_bits(numerator))
        return loss, scale

    return run


def aux_loss_sums(probs: Tensor, tokens_per_expert: Tensor, token_mask: Tensor | None) -> Run:
    """A plan for the sums of this rank's tiles, and zeros behind them [size]."""
    arguments.check_aux_loss(probs, tokens_per_expert, 1, 1, 1, None, token_mask)
    device, dtype = probs.device, accumulator_dtype(probs.dtype)
    count, tiles = num_partials(*probs.shape)[1], num_tiles(*probs.shape)
    tile_sums = aux_tile_sums(probs, tokens_per_expert, token_mask)

    def run(
        probs: Tensor, tokens_per_expert: Tensor, token_mask: Tensor | None, size: int
    ) -> Tensor:
        partials = allocator(device)((count,), (1,), dtype)
        tile_sums(probs, tokens_per_expert, as_bytes(token_mask), partials)
        return padded(tree_sum(partials.view(tiles, count // max(tiles, 1)), dim=1), size)

    return run


def padded(sums: Tensor, size: int) -> Tensor:
    """[size]: ``sums``, then zeros."""
    arguments.check_size(sums.shape[0], size)
    return torch.nn.functional.pad(sums, (0, size - sums.shape[0]))


class _Slots:
    """Sums and numbers of tokens of the tiles of sequences, each in a slot of its own."""

    def __init__(
        self,
        probs: Tensor,
        tokens_per_expert: Tensor,
        cu_seqlens: Tensor | None,
        token_mask: Tensor | None,
    ) -> None:
        num_experts = probs.shape[-1]
        self.device, self.dtype = probs.device, accumulator_dtype(probs.dtype)
        self.count = num_slots(
            arguments.num_tokens_of(probs), tokens_per_expert.shape[0], num_experts
        )
        self.num_sums = self.count * max_chunks(num_experts)
        self.chunks = num_chunks(self.count, num_experts)
        self.launch = sequence_tile_sums(
            probs, tokens_per_expert, cu_seqlens, token_mask, self.count
        )

    def __call__(
        self,
        probs: Tensor,
        tokens_per_expert: Tensor,
        cu_seqlens: Tensor | None,
        token_mask: Tensor | None,
        workspace: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """(sums [slots * chunks, or more], int32 [slots])"""
        empty = allocator(self.device)
        if workspace is None:
            sums = empty((self.num_sums,), (1,), self.dtype)
            lengths = empty((self.count,), (1,), torch.int32)
        else:
            sums = workspaces.view(workspace, self.num_sums, self.dtype)
            offset = workspaces.align(self.num_sums * self.dtype.itemsize)
            lengths = workspaces.view(workspace[offset:], self.count, torch.int32)
        mask = as_bytes(token_mask)
        self.launch(probs, tokens_per_expert, cu_seqlens, mask, sums, lengths)
        return sums, lengths


def sequence_aux_loss(
    probs: Tensor,
    tokens_per_expert: Tensor,
    cu_seqlens: Tensor | None,
    token_mask: Tensor | None,
    sums: Tensor | None,
    lengths: Tensor | None,
    workspace: Tensor | None,
    topk: int,
    coeff: float,
) -> Run:
    """A plan for (loss, C [sequences]).

    Where the sequences have tokens on other ranks too, ``lengths`` and the ``sums`` of all tiles in
    order take the place of its own.
    """
    inputs = probs, tokens_per_expert, cu_seqlens
    given = probs, tokens_per_expert, topk, cu_seqlens, token_mask, workspace
    arguments.check_sequence_aux_loss(*given)
    arguments.check_sums_of_sequences(
        tokens_per_expert, sums, lengths, accumulator_dtype(probs.dtype)
    )
    device, dtype = probs.device, accumulator_dtype(probs.dtype)
    num_sequences = tokens_per_expert.shape[0]
    slots = _Slots(*inputs, token_mask)
    add_slots, add_sequences = sequence_from_tile_sums(*inputs, slots.count)

    def run(
        probs: Tensor,
        tokens_per_expert: Tensor,
        cu_seqlens: Tensor | None,
        token_mask: Tensor | None,
        sums: Tensor | None,
        lengths: Tensor | None,
        workspace: Tensor | None,
        topk: int,
        coeff: float,
    ) -> tuple[Tensor, Tensor]:
        empty = allocator(device)
        loss, scales = empty((), (), dtype), empty((num_sequences,), (1,), dtype)
        if sums is None:
            partials, tile_lengths = slots(
                probs, tokens_per_expert, cu_seqlens, token_mask, workspace
            )
            own_lengths = empty((num_sequences,), (1,), torch.int64)
            add_slots(partials, tile_lengths, cu_seqlens, scales, own_lengths)
            # The scales take the place of the sums.
            sums, lengths = scales, own_lengths if lengths is None else lengths.contiguous()
        else:
            assert lengths is not None
            sums = (tree_sum(sums, dim=1) if sums.dim() == 2 else sums).contiguous()
            lengths = lengths.contiguous()
        numerator = probs.shape[-1] * coeff / topk
        add_sequences(sums, lengths, loss, scales, float64_bits(numerator))
        return loss, scales

    return run


def sequence_aux_loss_sums(
    probs: Tensor,
    tokens_per_expert: Tensor,
    cu_seqlens: Tensor | None,
    token_mask: Tensor | None,
) -> Run:
    """A plan for the sums of this rank's tiles of each sequence, and zeros behind them."""
    arguments.check_sequence_aux_loss(probs, tokens_per_expert, 1, cu_seqlens, token_mask, None)
    slots = _Slots(probs, tokens_per_expert, cu_seqlens, token_mask)

    def run(
        probs: Tensor,
        tokens_per_expert: Tensor,
        cu_seqlens: Tensor | None,
        token_mask: Tensor | None,
        size: int,
    ) -> Tensor:
        sums, _ = slots(probs, tokens_per_expert, cu_seqlens, token_mask, None)
        partials = sums[: slots.count * slots.chunks].view(slots.count, slots.chunks)
        return reference.padded_sequences(partials, probs, tokens_per_expert, cu_seqlens, size)

    return run
