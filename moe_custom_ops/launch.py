"""Launching a Triton kernel. Importing this needs no triton."""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Untyped: what it has depends on PyTorch's build.
guards: Any = torch._C._dynamo.guards

Run = Callable[..., Any]
_Shape = tuple[int, ...]

# Programs of a multiprocessor below which the calls of a stream fit the device together, and below
# which a launch is cut finer: 528 and 1056 on an H200, of which the figures beside the choices are.
FEW_PER_MULTIPROCESSOR, ENOUGH_PER_MULTIPROCESSOR = 4, 8
# What launches are cut for under the interpreter.
INTERPRETED_MULTIPROCESSORS = 128

# What Triton asks too; a build of PyTorch for the CPU has neither.
_get_device: Any = getattr(torch._C, "_cuda_getDevice", None)
_get_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


@functools.cache
def _runtime() -> Any:
    import triton

    return triton.knobs.runtime


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def few_programs(device: torch.device) -> int:
    """Launches of no more must not run ahead: several calls would fit the device at once."""
    return FEW_PER_MULTIPROCESSOR * _multiprocessors(device)


def enough_programs(device: torch.device) -> int:
    """Launches of fewer are cut finer."""
    return ENOUGH_PER_MULTIPROCESSOR * _multiprocessors(device)


@functools.cache
def _can_overlap(device: torch.device) -> bool:
    """Programmatic dependent launch came with compute capability 9.0."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


class Launch:
    """A kernel with all but its first arguments fixed: call it with those, and it is launched.

    It runs on the current stream of ``device``. A second call must bring tensors of the dtypes and
    the alignment, to 16 bytes, of the first: it reuses what was compiled for them, which takes half
    the host time of letting Triton look it up.

    ``overlap`` hides the latency of the launch behind the end of the kernel before it, where the
    device can; the kernel then takes an argument ``OVERLAP``.

    Floating-point contraction is off: a fused multiply-add rounds once where the order of
    operations that the reference shares rounds twice.
    """

    def __init__(
        self,
        kernel: Any,
        num_programs: int,
        device: torch.device,
        *arguments: Any,
        overlap: bool = False,
        **options: Any,
    ) -> None:
        if overlap:
            options["OVERLAP"] = options["launch_pdl"] = _can_overlap(device)
        self.kernel, self.grid, self.index = kernel, (num_programs, 1, 1), device.index
        self.arguments, self.options = arguments, {"enable_fp_fusion": False, **options}
        self.compiled: tuple[Any, ...] | None = None

    def __call__(self, *first: Any) -> None:
        compiled, index = self.compiled, self.index
        if (
            compiled is not None
            and index == _get_device()
            # A profiler's hooks, which Triton calls with what a launch does, leave it to Triton.
            and not getattr(_runtime().launch_enter_hook, "calls", True)
        ):
            launch, head, constants = compiled
            # Tensors go as addresses: of a tensor, Triton asks the driver whether it is on a GPU.
            own = [x if x is None or type(x) is int else x.data_ptr() for x in first]
            launch(*self.grid, _get_stream(index), *head, *own, *constants)
        elif self.grid[0] == 0:
            return
        elif index is None:  # on the CPU, under the interpreter
            self._launch(first)
        else:
            with torch.cuda.device(index):
                self._launch(first)

    def _launch(self, first: tuple[Any, ...]) -> None:
        kernel = self.kernel[self.grid](*first, *self.arguments, **self.options)
        if kernel is not None:  # as it is from the interpreter
            names = self.kernel.arg_names[len(first) + len(self.arguments) :]
            constants = (*self.arguments, *(self.options[name] for name in names))
            self.compiled = *_launcher(kernel), constants
            self.keep_alive = kernel  # which unloads its code when it is dropped


def _launcher(kernel: Any) -> tuple[Any, tuple[Any, ...]]:
    """What launches a compiled kernel, and what it takes between the stream and the arguments.

    No launch metadata, and no hook before or behind it. Of Triton 3.6 it is the C function without
    the Python around it, which allocates what our kernels do not use: on an H200's host 5.0 us a
    launch, not 6.0.
    """
    run, function, metadata = kernel.run, kernel.function, kernel.packed_metadata
    sizes = getattr(run, "global_scratch_size", None), getattr(run, "profile_scratch_size", None)
    if sizes == (0, 0) and not hasattr(run, "kernel_signature"):
        modes = run.launch_cooperative_grid, run.launch_pdl
        return run.launch, (function, *modes, None, None, metadata, None, None, None)
    return run, (function, metadata, None, None, None)


def strides(tensor: Tensor | None, count: int) -> tuple[int, ...]:
    return (0,) * count if tensor is None else tensor.stride()


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(max(1, math.prod(shape[i + 1 :])) for i in range(len(shape)))


def triton_dtype(dtype: torch.dtype) -> Any:
    """What Triton calls an accumulator's dtype."""
    import triton.language as tl

    return {torch.float32: tl.float32, torch.float64: tl.float64}[dtype]


def allocator(device: torch.device) -> Callable[[_Shape, _Shape, torch.dtype], Tensor]:
    """What makes an uninitialised tensor of (shape, stride, dtype) on ``device``.

    Where that is the current device it is what Inductor's code allocates with, in a third of the
    time of ``torch.empty``. It takes plain tuples, no ``torch.Size``.
    """
    if device.type == "cuda" and device.index == _get_device():
        return guards._empty_strided_cuda
    return lambda shape, stride, dtype: torch.empty_strided(
        shape, stride, dtype=dtype, device=device
    )
