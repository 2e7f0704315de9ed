"""Triton kernels of aux_loss: one launch for the tiles, one small launch for the tree over them."""

import struct

import triton
import triton.language as tl
from torch import Tensor

from ..fixed_order import accumulator_dtype
from ..triton_common import (
    TRITON_DTYPES,
    launch,
    next_power_of_2,
    tree_sum,
    tree_sum_rows,
    wait_for_previous_kernel,
)
from .reference import num_tiles, tile_tokens

MIN_CHUNK_COLUMNS = 64
MAX_CHUNK_COLUMNS = 512
# Enough programs for every multiprocessor of a large GPU; below it, columns are cut finer.
FEW_PROGRAMS = 512
FINAL_BLOCK = 4096


def chunk_columns(num_tokens: int, num_columns: int) -> int:
    """Columns per program: a subtree of the tree over columns, so no choice changes a bit."""
    padded = next_power_of_2(num_columns)
    columns = min(padded, MAX_CHUNK_COLUMNS)
    tiles = num_tiles(num_tokens, num_columns)
    while columns > MIN_CHUNK_COLUMNS and tiles * (padded // columns) < FEW_PROGRAMS:
        columns //= 2
    return columns


def num_partials(num_tokens: int, num_columns: int) -> tuple[int, int]:
    """(chunks per tile, a power of two; partial sums in all)."""
    columns = next_power_of_2(num_columns)
    chunks = columns // chunk_columns(num_tokens, num_columns)
    return chunks, num_tiles(num_tokens, num_columns) * chunks


@triton.jit
def _sum_tokens(
    ptrs, tokens, num_tokens, stride_t, column_mask, COUNT: tl.constexpr, ACC: tl.constexpr
):
    """Tree over ``COUNT`` consecutive tokens of each group, in registers: [GROUPS, BLOCK_C]."""
    if COUNT == 1:
        mask = (tokens < num_tokens)[:, None] & column_mask[None, :]
        return tl.load(ptrs, mask=mask, other=0.0).to(ACC)
    else:
        HALF: tl.constexpr = COUNT // 2
        left = _sum_tokens(ptrs, tokens, num_tokens, stride_t, column_mask, HALF, ACC)
        ptrs += HALF * stride_t
        right = _sum_tokens(ptrs, tokens + HALF, num_tokens, stride_t, column_mask, HALF, ACC)
        return left + right


@triton.jit(do_not_specialize=["num_tokens"])
def _aux_loss_tile_sums_kernel(
    probs_ptr,
    tokens_per_expert_ptr,
    partials_ptr,
    num_tokens,
    num_columns,
    stride_t,
    stride_c,
    stride_n,
    CHUNKS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ACC: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_previous_kernel(OVERLAP)
    pid = tl.program_id(0).to(tl.int64)
    columns = (pid % CHUNKS) * BLOCK_C + tl.arange(0, BLOCK_C)
    column_mask = columns < num_columns
    # Each thread adds the tokens of its own group; only the groups are added across threads.
    GROUP_TOKENS: tl.constexpr = BLOCK_T // GROUPS
    tokens = (pid // CHUNKS) * BLOCK_T + tl.arange(0, GROUPS) * GROUP_TOKENS
    ptrs = probs_ptr + tokens[:, None] * stride_t + columns[None, :] * stride_c
    sums = _sum_tokens(ptrs, tokens, num_tokens, stride_t, column_mask, GROUP_TOKENS, ACC)
    # Loaded after the tokens: loaded first, its conversion held their loads up, and the kernel took
    # 1.1 to 1.7 times as long on an H200.
    counts = tl.load(tokens_per_expert_ptr + columns * stride_n, mask=column_mask, other=0).to(ACC)
    products = tree_sum_rows(sums) * counts
    tl.store(partials_ptr + pid + tl.arange(0, 1), tree_sum(tl.reshape(products, [1, BLOCK_C])))


@triton.jit(do_not_specialize=["num_partials", "num_blocks", "scale_bits"])
def _aux_loss_from_tile_sums_kernel(
    partials_ptr,
    total_ptr,
    loss_ptr,
    scale_ptr,
    num_partials,
    num_blocks,
    scale_bits,
    BLOCK: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
    ACC: tl.constexpr,
    DEVICE_TOTAL: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_previous_kernel(OVERLAP)
    offsets = tl.arange(0, BLOCK).to(tl.int64)
    slots = tl.arange(0, MAX_BLOCKS)
    block_sums = tl.zeros([MAX_BLOCKS], ACC)
    for block in range(num_blocks):
        index = block * BLOCK + offsets
        partials = tl.load(partials_ptr + index, mask=index < num_partials, other=0.0)
        block_sums = tl.where(
            slots == block, tree_sum(tl.reshape(partials, [1, BLOCK])), block_sums
        )
    total_sum = tree_sum(tl.reshape(block_sums, [1, MAX_BLOCKS]))  # [1]

    # A float argument would arrive as float32, so the host sends the bits of its float64.
    scale = scale_bits.to(tl.int64).to(tl.float64, bitcast=True)
    if DEVICE_TOTAL:
        total = tl.load(total_ptr).to(tl.float64)
        scale = tl.where(total == 0.0, 0.0, scale / total / total).to(ACC)
        loss = tl.where(total == 0.0, 0.0, scale * total_sum)
    else:
        scale = scale.to(ACC)
        loss = scale * total_sum
    tl.store(scale_ptr, scale)
    tl.store(loss_ptr + tl.arange(0, 1), loss)


def tile_sums(
    probs: Tensor, tokens_per_expert: Tensor, partials: Tensor, num_warps: int | None = None
) -> None:
    """Write the partial sum of every (tile, chunk of columns) to ``partials``."""
    num_tokens, num_columns = probs.shape
    chunks, count = num_partials(num_tokens, num_columns)
    block_t, block_c = tile_tokens(num_columns), chunk_columns(num_tokens, num_columns)
    # As many tokens side by side as fill the threads with 16-byte loads.
    threads_per_token = max(block_c * probs.dtype.itemsize // 16, 1)
    if num_warps is None:
        num_warps = min(max(threads_per_token // 32, 2 if count <= FEW_PROGRAMS else 1), 4)
    groups = min(max(32 * num_warps // threads_per_token, 1), block_t)
    launch(
        _aux_loss_tile_sums_kernel,
        count,
        probs.device,
        probs,
        tokens_per_expert,
        partials,
        num_tokens,
        num_columns,
        *probs.stride(),
        *tokens_per_expert.stride(),
        CHUNKS=chunks,
        BLOCK_T=block_t,
        GROUPS=groups,
        BLOCK_C=block_c,
        ACC=TRITON_DTYPES[accumulator_dtype(probs.dtype)],
        num_warps=num_warps,
        overlap=True,
    )


def loss_from_tile_sums(
    partials: Tensor, total: Tensor | None, scale: float, loss: Tensor, loss_scale: Tensor
) -> None:
    """Add ``partials`` by the tree over tiles and write the loss and the scale that it carries.

    ``scale`` is C, or C * total * total where the total is on the device.
    """
    blocks = (partials.shape[0] + FINAL_BLOCK - 1) // FINAL_BLOCK
    launch(
        _aux_loss_from_tile_sums_kernel,
        1,
        partials.device,
        partials,
        total,
        loss,
        loss_scale,
        partials.shape[0],
        blocks,
        struct.unpack("<q", struct.pack("<d", scale))[0],
        BLOCK=min(next_power_of_2(max(partials.shape[0], 1)), FINAL_BLOCK),
        MAX_BLOCKS=next_power_of_2(max(blocks, 1)),
        ACC=TRITON_DTYPES[loss.dtype],
        DEVICE_TOTAL=total is not None,
        num_warps=4,
        overlap=True,
    )
