"""The way from an op to its Triton kernels: imported at the first CUDA call, or refused."""

import functools
import importlib
from types import ModuleType

import torch


@functools.cache
def load_kernels(package: str) -> ModuleType:
    """The module ``kernels`` of an op's package.

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
