"""Triton kernels of aux_loss: one launch for the tiles, one small launch for the tree over them."""

import struct

import triton
import triton.language as tl
from torch import Tensor

from ..fixed_order import accumulator_dtype
from ..triton_common import TRITON_DTYPES, launch, next_power_of_2, tree_sum, tree_sum_rows
from .reference import num_tiles, tile_tokens

MIN_CHUNK_COLUMNS = 64
MAX_CHUNK_COLUMNS = 512
# Enough programs for every multiprocessor of a large GPU; below it, columns are cut finer.
FEW_PROGRAMS = 256
FINAL_BLOCK = 4096


def chunk_columns(num_tokens: int, num_columns: int) -> int:
    """Columns per program. Chunks are subtrees of the tree over columns: no choice changes a bit."""
    columns = min(next_power_of_2(num_columns), MAX_CHUNK_COLUMNS)
    while (
        columns > MIN_CHUNK_COLUMNS
        and num_tiles(num_tokens, num_columns) * (num_columns // columns) < FEW_PROGRAMS
    ):
        columns //= 2
    return columns


def num_partials(num_tokens: int, num_columns: int) -> tuple[int, int]:
    """(chunks per tile, a power of two; partial sums in all)."""
    columns = next_power_of_2(num_columns)
    chunks = columns // chunk_columns(num_tokens, num_columns)
    return chunks, num_tiles(num_tokens, num_columns) * chunks


@triton.jit(do_not_specialize=["num_tokens", "num_columns"])
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
    BLOCK_C: tl.constexpr,
    ACC: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    columns = (pid % CHUNKS) * BLOCK_C + tl.arange(0, BLOCK_C)
    column_mask = columns < num_columns
    tokens = (pid // CHUNKS) * BLOCK_T + tl.arange(0, BLOCK_T)
    probs = tl.load(
        probs_ptr + tokens[:, None] * stride_t + columns[None, :] * stride_c,
        mask=(tokens < num_tokens)[:, None] & column_mask[None, :],
        other=0.0,
    ).to(ACC)  # [BLOCK_T, BLOCK_C]
    counts = tl.load(tokens_per_expert_ptr + columns * stride_n, mask=column_mask, other=0).to(ACC)
    products = tree_sum_rows(probs) * counts
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
):
    offsets = tl.arange(0, BLOCK)
    slots = tl.arange(0, MAX_BLOCKS)
    block_sums = tl.zeros([MAX_BLOCKS], ACC)
    for block in range(num_blocks):
        index = block.to(tl.int64) * BLOCK + offsets
        partials = tl.load(partials_ptr + index, mask=index < num_partials, other=0.0)
        block_sums = tl.where(slots == block, tree_sum(tl.reshape(partials, [1, BLOCK])), block_sums)
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


def tile_sums(probs: Tensor, tokens_per_expert: Tensor, partials: Tensor, num_warps: int = 4) -> None:
    """Write the partial sum of every (tile, chunk of columns) to ``partials``."""
    num_tokens, num_columns = probs.shape
    chunks, count = num_partials(num_tokens, num_columns)
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
        BLOCK_T=tile_tokens(num_columns),
        BLOCK_C=chunk_columns(num_tokens, num_columns),
        ACC=TRITON_DTYPES[accumulator_dtype(probs.dtype)],
        num_warps=num_warps,
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
    )
