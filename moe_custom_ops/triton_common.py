"""What every kernel shares: the order of sums, the rounding of casts, the way to launch.

Importing this module needs triton; ops import it at their first CUDA call.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .fixed_order import MIN_CHUNK_COLUMNS, next_power_of_2

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

# The most columns of one program that sums a tile.
MAX_CHUNK_COLUMNS = 512
# Below as many programs, columns are cut finer. Of no device: it decides the size of a workspace.
FEW_PROGRAMS = 512
# Programs of a multiprocessor below which the calls of a stream fit the device together, and below
# which a launch is cut finer: 528 and 1056 on an H200, of which the figures beside the choices are.
FEW_PER_MULTIPROCESSOR, ENOUGH_PER_MULTIPROCESSOR = 4, 8
# What launches are cut for under the interpreter.
INTERPRETED_MULTIPROCESSORS = 128
MAX_GROUPS = 8
# The part of a loss's tile that is prefetched: what the DRAM delivers until the previous kernel has
# ended. On an H200 half of a tile made the kernel slower.
PREFETCH_FRACTION = tl.constexpr(8)
# The programs that prefetch: those of a first wave.
PREFETCH_PROGRAMS = tl.constexpr(2048)
# Columns of one program that writes rows of an auxiliary loss's gradient.
GRAD_BLOCK = 1024

_RUNTIME = triton.knobs.runtime
# What Triton asks too; a build of PyTorch for the CPU has neither.
_get_device: Any = getattr(torch._C, "_cuda_getDevice", None)
_get_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)

TRITON_DTYPES = {torch.float32: tl.float32, torch.float64: tl.float64}


@triton.constexpr_function
def log2(n):
    return n.bit_length() - 1


@triton.jit
def wait_for_previous_kernel(OVERLAP: tl.constexpr, RUN_AHEAD: tl.constexpr):
    """Let the next kernel's programs be placed, and wait until the previous kernel has ended.

    A kernel launched with ``overlap=True`` calls this before it touches memory. ``RUN_AHEAD`` lets
    the next kernel come before this one's wait is over. Small grids must not: those of several
    calls then fit the device at once, and on an H200 the loss of 131072 tokens of 8 experts took
    13.0 us a call, not 5.2.
    """
    if OVERLAP:
        if RUN_AHEAD:
            gdc_launch_dependents()
        gdc_wait()
        if not RUN_AHEAD:
            gdc_launch_dependents()


@triton.jit
def prefetch(ptrs, mask):
    """Have the lines of ``ptrs`` brought to the L2, before the previous kernel has ended.

    Every write passes through the L2, so what is there is never stale.
    """
    tl.inline_asm_elementwise(
        "{.reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.s32 $0, 0;}",
        "=r,l,r",
        [ptrs.to(tl.int64), mask.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def prefetch_tile(
    ptr,
    first_row,
    first_column,
    num_rows,
    num_columns,
    stride_r,
    stride_c,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Prefetch ``ROWS`` rows of ``COLUMNS`` columns, both powers of two, where kernels overlap.

    Narrow and strided rows are left alone: those of a loss gained nothing.
    """
    LINE: tl.constexpr = 1024 // ptr.dtype.element_ty.primitive_bitwidth
    if OVERLAP and COLUMNS >= LINE and ROWS > 0:  # noqa: SIM102  decided by the compiler
        if stride_c == 1 and tl.program_id(0) < PREFETCH_PROGRAMS:
            rows = first_row + tl.arange(0, ROWS)
            columns = first_column + tl.arange(0, COLUMNS // LINE) * LINE
            inside = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
            prefetch(ptr + rows[:, None] * stride_r + columns[None, :], inside)


@triton.jit
def tree_sum(x):
    """Sum of [M, N] over its last axis, N a power of two, by a tree of adjacent pairs: [M].

    A sum of two is one commutative addition, so the layout that the compiler picks cannot change
    the order. Adjacent pairs stay in a thread, then in a warp.
    """
    levels: tl.constexpr = log2(x.shape[1])
    for _ in tl.static_range(levels):
        x = tl.sum(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]), axis=2)
    return tl.reshape(x, [x.shape[0]])


@triton.jit
def tree_sum_rows(x):
    """Sum of [M, N] over its first axis, M a power of two, by a tree of adjacent pairs: [N]."""
    levels: tl.constexpr = log2(x.shape[0])
    for _ in tl.static_range(levels):
        x = tl.sum(tl.reshape(x, [x.shape[0] // 2, 2, x.shape[1]]), axis=1)
    return tl.reshape(x, [x.shape[1]])


@triton.jit
def cast(x, dtype: tl.constexpr):
    """``x`` rounded to nearest even in ``dtype``; float64 reaches a half type through float32."""
    if x.dtype == tl.float64 and (dtype == tl.bfloat16 or dtype == tl.float16):
        x = x.to(tl.float32)
    if INTERPRETED and x.dtype == tl.float32 and dtype == tl.bfloat16:
        # The interpreter truncates this cast, and garbles subnormals. Adding half of the last kept
        # place, less one if that place is even, rounds the float's integer pattern to nearest even;
        # NaN keeps its top bits.
        bits = x.to(tl.uint32, bitcast=True)
        rounded = bits + 0x7FFF + ((bits >> 16) & 1)
        bits = tl.where(x == x, rounded, bits | 0x400000)
        return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def widen(x, ACC: tl.constexpr):
    """``x`` in the accumulator's dtype; exact, but for integers and float64 in a float32 sum."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        bits = x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        return bits.to(tl.float32, bitcast=True).to(ACC)
    else:
        return x.to(ACC)


@triton.jit
def float64_from_bits(bits):
    """The inverse of ``float64_bits``."""
    return bits.to(tl.int64).to(tl.float64, bitcast=True)


@triton.jit
def sum_tokens(
    ptrs,
    token_mask_ptr,
    tokens,
    num_tokens,
    stride_t,
    stride_m,
    column_mask,
    COUNT: tl.constexpr,
    ACC: tl.constexpr,
):
    """Tree over ``COUNT`` consecutive tokens of each group, in registers: [GROUPS, BLOCK_C].

    ``ptrs`` and ``tokens`` are those of the groups' first tokens. A masked token is not read.
    """
    if COUNT == 1:
        token_mask = tokens < num_tokens
        if token_mask_ptr is not None:
            kept = tl.load(token_mask_ptr + tokens * stride_m, mask=token_mask, other=0) != 0
            token_mask = token_mask & kept
        mask = token_mask[:, None] & column_mask[None, :]
        # Each value is read once.
        probs = tl.load(ptrs, mask=mask, other=0.0, eviction_policy="evict_first")
        return widen(probs, ACC)
    else:
        HALF: tl.constexpr = COUNT // 2
        left = sum_tokens(
            ptrs,
            token_mask_ptr,
            tokens,
            num_tokens,
            stride_t,
            stride_m,
            column_mask,
            HALF,
            ACC,
        )
        ptrs += HALF * stride_t
        right = sum_tokens(
            ptrs,
            token_mask_ptr,
            tokens + HALF,
            num_tokens,
            stride_t,
            stride_m,
            column_mask,
            HALF,
            ACC,
        )
        return left + right


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
        # A profiler's hooks, which Triton calls with what a launch does, leave it to Triton.
        hooks = getattr(_RUNTIME.launch_enter_hook, "calls", True)
        if compiled is not None and index == _get_device() and not hooks:
            run, num_programs, function, metadata, constants = compiled
            # No launch metadata, and no hook before or behind it. Tensors go as addresses: of a
            # tensor, Triton asks the driver whether its memory is on a GPU.
            run(
                num_programs,
                1,
                1,
                _get_stream(index),
                function,
                metadata,
                None,
                None,
                None,
                *[x if x is None or type(x) is int else x.data_ptr() for x in first],
                *constants,
            )
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
            compiled = kernel.run, self.grid[0], kernel.function, kernel.packed_metadata
            self.compiled = *compiled, constants
            self.keep_alive = kernel  # which unloads its code when it is dropped


def strides(tensor: Tensor | None, count: int) -> tuple[int, ...]:
    return (0,) * count if tensor is None else tensor.stride()


@triton.jit(do_not_specialize=["scale_bits"], do_not_specialize_on_alignment=["grad_ptr"])
def _grad_rows_kernel(
    grad_ptr,
    scales_ptr,
    counts_ptr,
    rows_ptr,
    scale_bits: tl.int64,
    num_columns,
    stride_nb,
    stride_n,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_previous_kernel(OVERLAP, True)
    pid = tl.program_id(0).to(tl.int64)
    sequence = pid // BLOCKS
    columns = (pid % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < num_columns
    grad = tl.load(grad_ptr)
    if scales_ptr is None:
        scale = float64_from_bits(scale_bits).to(grad.dtype)
    else:
        scale = tl.load(scales_ptr + sequence)
    counts = tl.load(counts_ptr + sequence * stride_nb + columns * stride_n, mask=mask, other=0)
    rows = (grad * scale) * counts.to(grad.dtype)
    # Where no token counts, whatever the counts and the incoming gradient hold.
    rows = tl.where(scale == 0.0, 0.0, rows)
    rows_ptrs = rows_ptr + sequence * num_columns + columns
    tl.store(rows_ptrs, cast(rows, rows_ptr.dtype.element_ty), mask=mask)


def grad_rows(counts: Tensor) -> Launch:
    """Of (gradient of an auxiliary loss, scales [sequences], counts, rows, bits of a float64).

    Writes the row over the columns that the gradient of probs repeats for every token of a
    sequence, in the dtype of ``rows``. ``counts`` are [sequences, columns], or [columns] of one.
    The float64 is the scale where there are no ``scales``.
    """
    num_columns = counts.shape[-1]
    block = min(next_power_of_2(num_columns), GRAD_BLOCK)
    blocks = triton.cdiv(num_columns, block)
    return Launch(
        _grad_rows_kernel,
        counts.numel() // max(num_columns, 1) * blocks,
        counts.device,
        num_columns,
        *(0, *counts.stride())[-2:],
        BLOCKS=blocks,
        BLOCK=block,
        num_warps=4,
        overlap=True,
    )
