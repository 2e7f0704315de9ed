"""Sums whose order is written here and nowhere else, in plain PyTorch.

``triton_common`` has the same order for kernels. Both spell every addition out, since a library sum
may pick its order by device, build or number of threads.
"""

import torch
from torch import Tensor


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


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 accumulates in float64, every other dtype in float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to nearest even; float64 reaches a half type through float32 on every backend."""
    if x.dtype == torch.float64 and dtype in (torch.bfloat16, torch.float16):
        x = x.to(torch.float32)
    return x.to(dtype)
