"""A plain stream, to hold the ops against."""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _stream_kernel(
    sources_ptr,
    outs_ptr,
    num_elements,
    READS: tl.constexpr,
    WRITES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    places = pid * BLOCK + tl.arange(0, BLOCK)
    mask = places < num_elements
    total = tl.full([BLOCK], 1.0, tl.float32)
    for buffer in tl.static_range(READS):
        total += tl.load(sources_ptr + buffer * num_elements + places, mask=mask, other=0.0)
    if WRITES == 0:
        tl.store(outs_ptr + pid, tl.sum(total))
    for buffer in tl.static_range(WRITES):
        tl.store(outs_ptr + buffer * num_elements + places, total, mask=mask)


def stream(reads: int, writes: int, sources: Tensor, outs: Tensor) -> None:
    """Read float32 [reads, n], write [writes, n]; where nothing is written, a value per block."""
    num_elements = max(sources.shape[1], outs.shape[1])
    grid = (triton.cdiv(num_elements, BLOCK),)
    _stream_kernel[grid](sources, outs, num_elements, reads, writes, BLOCK=BLOCK, num_warps=8)
