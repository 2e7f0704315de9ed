"""What every kernel shares: the order of sums, the rounding of casts, the way to launch.

Importing this module needs triton; ops import it at their first CUDA call.
"""

import contextlib
import functools
import struct
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
# Enough programs for every multiprocessor of a large GPU; below it, columns are cut finer.
FEW_PROGRAMS = 512

TRITON_DTYPES = {torch.float32: tl.float32, torch.float64: tl.float64}


@triton.constexpr_function
def log2(n):
    return n.bit_length() - 1


@triton.jit
def wait_for_previous_kernel(OVERLAP: tl.constexpr):
    """Let the next kernel's programs be placed, and wait until the previous kernel has ended.

    A kernel launched with ``overlap=True`` calls this before it touches memory.
    """
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()


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
    HAS_MASK: tl.constexpr,
):
    """Tree over ``COUNT`` consecutive tokens of each group, in registers: [GROUPS, BLOCK_C].

    ``ptrs`` and ``tokens`` are those of the groups' first tokens. A masked token is not read.
    """
    if COUNT == 1:
        token_mask = tokens < num_tokens
        if HAS_MASK:
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
            HAS_MASK,
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
            HAS_MASK,
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


def token_groups(
    block_t: int, block_c: int, dtype: torch.dtype, num_programs: int, num_warps: int | None = None
) -> tuple[int, int]:
    """(warps, groups of tokens side by side that fill their threads with 16-byte loads)."""
    threads_per_token = max(block_c * dtype.itemsize // 16, 1)
    if num_warps is None:
        num_warps = min(max(threads_per_token // 32, 2 if num_programs <= FEW_PROGRAMS else 1), 4)
    return num_warps, min(max(32 * num_warps // threads_per_token, 1), block_t)


def float64_bits(x: float) -> int:
    """A float argument of a kernel arrives as float32; its bits, as an integer, arrive whole."""
    return struct.unpack("<q", struct.pack("<d", x))[0]


def as_bytes(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.view(torch.uint8)


@functools.cache
def _can_overlap(device: torch.device) -> bool:
    """Programmatic dependent launch came with compute capability 9.0."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def launch(
    kernel: Any,
    num_programs: int,
    device: torch.device,
    *args: Any,
    overlap: bool = False,
    **options: Any,
) -> None:
    """Launch ``num_programs`` programs of ``kernel`` on the current stream of ``device``.

    ``overlap`` hides the latency of the launch behind the end of the kernel before it, where the
    device can; the kernel then takes an argument ``OVERLAP``.

    Floating-point contraction is off: a fused multiply-add rounds once where the order of
    operations that the reference shares rounds twice.
    """
    if num_programs == 0:
        return
    if overlap:
        options["OVERLAP"] = options["launch_pdl"] = _can_overlap(device)
    on_device = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with on_device:
        kernel[(num_programs,)](*args, enable_fp_fusion=False, **options)


def strides(tensor: Tensor | None, count: int) -> tuple[int, ...]:
    return (0,) * count if tensor is None else tensor.stride()
