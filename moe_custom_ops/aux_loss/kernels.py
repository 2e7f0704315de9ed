"""Triton kernels of aux_loss: one launch for the tiles, one small launch for the tree over them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..fixed_order import accumulator_dtype, next_power_of_2, num_tiles, tile_tokens
from ..triton_common import (
    PREFETCH_FRACTION,
    TRITON_DTYPES,
    Launch,
    few_programs,
    float64_from_bits,
    num_chunks,
    prefetch_tile,
    strides,
    sum_tokens,
    tile_options,
    tree_sum,
    tree_sum_rows,
    wait_for_previous_kernel,
)
from ..triton_common import (
    grad_rows as grad_rows,
)

# Partial sums that one step of the final tree adds.
FINAL_BLOCK = 4096


def num_partials(num_tokens: int, num_columns: int) -> tuple[int, int]:
    """(chunks per tile, a power of two; partial sums in all)."""
    tiles = num_tiles(num_tokens, num_columns)
    chunks = num_chunks(tiles, num_columns)
    return chunks, tiles * chunks


@triton.jit(do_not_specialize=["num_tokens"])
def _aux_loss_tile_sums_kernel(
    probs_ptr,
    tokens_per_expert_ptr,
    token_mask_ptr,
    partials_ptr,
    num_tokens,
    num_columns,
    stride_t,
    stride_c,
    stride_n,
    stride_m,
    CHUNKS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ACC: tl.constexpr,
    RUN_AHEAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    first_token = (pid // CHUNKS) * BLOCK_T
    first_column = (pid % CHUNKS) * BLOCK_C
    prefetch_tile(
        probs_ptr,
        first_token,
        first_column,
        num_tokens,
        num_columns,
        stride_t,
        stride_c,
        BLOCK_T // PREFETCH_FRACTION,
        BLOCK_C,
        OVERLAP,
    )
    wait_for_previous_kernel(OVERLAP, RUN_AHEAD)
    columns = first_column + tl.arange(0, BLOCK_C)
    column_mask = columns < num_columns
    # Each thread adds the tokens of its own group; only the groups are added across threads.
    GROUP_TOKENS: tl.constexpr = BLOCK_T // GROUPS
    tokens = first_token + tl.arange(0, GROUPS) * GROUP_TOKENS
    ptrs = probs_ptr + tokens[:, None] * stride_t + columns[None, :] * stride_c
    sums = sum_tokens(
        ptrs,
        token_mask_ptr,
        tokens,
        num_tokens,
        stride_t,
        stride_m,
        column_mask,
        GROUP_TOKENS,
        ACC,
    )
    # Loaded after the tokens: loaded first, its conversion held their loads up, and the kernel took
    # 1.1 to 1.7 times as long on an H200.
    counts = tl.load(tokens_per_expert_ptr + columns * stride_n, mask=column_mask, other=0).to(ACC)
    products = tree_sum_rows(sums) * counts
    tl.store(partials_ptr + pid + tl.arange(0, 1), tree_sum(tl.reshape(products, [1, BLOCK_C])))


@triton.jit(do_not_specialize=["scale_bits", "num_partials", "num_blocks"])
def _aux_loss_from_tile_sums_kernel(
    partials_ptr,
    total_ptr,
    loss_ptr,
    scale_ptr,
    scale_bits: tl.int64,
    num_partials,
    num_blocks,
    BLOCK: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
    ACC: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_previous_kernel(OVERLAP, True)
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

    scale = float64_from_bits(scale_bits)
    if total_ptr is not None:
        total = tl.load(total_ptr).to(tl.float64)
        scale = tl.where(total == 0.0, 0.0, scale / total / total).to(ACC)
        loss = tl.where(total == 0.0, 0.0, scale * total_sum)
    else:
        scale = scale.to(ACC)
        loss = scale * total_sum
    if scale_ptr is not None:
        tl.store(scale_ptr, scale)
    tl.store(loss_ptr + tl.arange(0, 1), loss)


def tile_sums(
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
        _aux_loss_tile_sums_kernel,
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
        ACC=TRITON_DTYPES[accumulator_dtype(probs.dtype)],
        RUN_AHEAD=not few,
        overlap=True,
        **tile_options(block_t, block_c, probs, few, num_warps),
    )


def loss_from_tile_sums(num_partials: int, dtype: torch.dtype, device: torch.device) -> Launch:
    """Of (partials, total, loss, scale, bits of a float64).

    Adds ``partials`` by the tree over tiles, and writes the loss and, if asked for, the scale that
    it carries. The float64 is C, or C * total * total with a total on the device.
    """
    blocks = (num_partials + FINAL_BLOCK - 1) // FINAL_BLOCK
    return Launch(
        _aux_loss_from_tile_sums_kernel,
        1,
        device,
        num_partials,
        blocks,
        BLOCK=min(next_power_of_2(num_partials), FINAL_BLOCK),
        MAX_BLOCKS=next_power_of_2(blocks),
        ACC=TRITON_DTYPES[dtype],
        num_warps=4,
        overlap=True,
    )
