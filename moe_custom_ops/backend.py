"""The way from an op to its Triton kernels: imported at the first CUDA call, or refused."""

import functools
import importlib
import math
import struct
from types import ModuleType

import torch
from torch import Tensor


@functools.cache
def load_kernels(package: str) -> ModuleType:
    """The module of a room's kernels.

    Raises:
        NotImplementedError: PyTorch was built for ROCm.
        ImportError: triton is missing.

    Neither falls back to another implementation: whoever measures the kernels measures them.
    """
    op = package.rpartition(".")[2]
    alternative = "move its inputs to the CPU, where plain PyTorch gives the same bits"
    if torch.version.hip is not None:
        raise NotImplementedError(
            f"{op}: the CUDA kernels are not supported on ROCm; {alternative}"
        )
    try:
        importlib.import_module("triton")
    except ImportError as error:
        raise ImportError(
            f"{op}: the CUDA kernels need triton >= 3.6, which cannot be imported; "
            f"install it, or {alternative}"
        ) from error
    return importlib.import_module(f"{package}.kernels")


def float64_bits(x: float) -> int:
    """A float argument of a kernel arrives as float32; its bits, as an integer, arrive whole."""
    return struct.unpack("<q", struct.pack("<d", x))[0]


def flat(tensor: Tensor) -> Tensor:
    """[*, X] as [T, X]: a view where the leading strides allow it."""
    if tensor.dim() == 2:
        return tensor
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])


def as_bytes(mask: Tensor | None) -> Tensor | None:
    """A bool mask as kernels read it."""
    return None if mask is None else mask.view(torch.uint8)
