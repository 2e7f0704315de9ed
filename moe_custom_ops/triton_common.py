"""What every kernel shares: the order of sums, the rounding of casts.

Importing this module needs triton; ops import it at their first CUDA call.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

# The programs that prefetch: those of a first wave.
PREFETCH_PROGRAMS = tl.constexpr(2048)


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
