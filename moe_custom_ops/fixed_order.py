"""Sums whose order is written here and nowhere else, in plain PyTorch.

``triton_common`` has the same order for kernels. Both spell every addition out, since a library sum
may pick its order by device, build or number of threads.
"""

import torch
from torch import Tensor

MAX_TILE_TOKENS = 512
MIN_TILE_TOKENS = 8
TILE_ELEMENTS = 8192
# The finest chunk of columns that a kernel cuts a tile into; it bounds the workspace.
MIN_CHUNK_COLUMNS = 64


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def tree_sum(x: Tensor, dim: int) -> Tensor:
    """Sum over ``dim`` by a binary tree of adjacent pairs: ((x0 + x1) + (x2 + x3)) + ...

    The extent is padded with zeros to a power of two, so the bits do not depend on how far it is
    padded. A sum over no elements is zero.
    """
    x = x.movedim(dim, 0)
    padding = next_power_of_2(x.shape[0]) - x.shape[0]
    if padding:
        x = torch.cat([x, x.new_zeros(padding, *x.shape[1:])])
    while x.shape[0] > 1:
        x = x[0::2] + x[1::2]
    return x[0]


def tile_tokens(num_columns: int) -> int:
    """Tokens per tile: a power of two that depends on the number of columns alone.

    Written as comparisons so that a symbolic number of columns is bounded, not fixed, by it.
    """
    tokens = MAX_TILE_TOKENS
    while tokens > MIN_TILE_TOKENS and tokens * num_columns > TILE_ELEMENTS:
        tokens //= 2
    return tokens


def num_tiles(num_tokens: int, num_columns: int) -> int:
    tokens = tile_tokens(num_columns)
    return (num_tokens + tokens - 1) // tokens


def max_chunks(num_columns: int) -> int:
    """The most chunks, a power of two, that a kernel cuts the columns of a tile into."""
    chunks = 1
    while chunks * MIN_CHUNK_COLUMNS < num_columns:
        chunks *= 2
    return chunks


def tile_sums(probs: Tensor, counts: Tensor, token_mask: Tensor | None = None) -> Tensor:
    """sum_c counts[c] * sum_{t in tile} probs[t, c] for each tile of [T, columns]: [tiles].

    A sum over the tokens of the tile, times the counts, then a sum over the columns. Masked tokens
    keep their place in the tile and add zero, whatever they hold.
    """
    num_tokens, num_columns = probs.shape
    dtype = accumulator_dtype(probs.dtype)
    tiles, tokens = num_tiles(num_tokens, num_columns), tile_tokens(num_columns)
    if token_mask is not None:
        probs = torch.where(token_mask[:, None], probs, 0.0)
    x = torch.nn.functional.pad(probs.to(dtype), (0, 0, 0, tiles * tokens - num_tokens))
    column_sums = tree_sum(x.view(tiles, tokens, num_columns), dim=1)
    return tree_sum(column_sums * counts.to(dtype), dim=1)


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 accumulates in float64, every other dtype in float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to nearest even; float64 reaches a half type through float32 on every backend."""
    if x.dtype == torch.float64 and dtype in (torch.bfloat16, torch.float16):
        x = x.to(torch.float32)
    return x.to(dtype)
