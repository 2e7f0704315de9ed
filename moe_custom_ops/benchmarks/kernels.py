"""A plain stream, to hold the ops against."""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _stream_kernel(
    sources_ptr,
    outs_ptr,
    READS: tl.constexpr,
    WRITES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, BLOCK)
    total = tl.full([BLOCK], 1.0, tl.float32)
    for buffer in tl.static_range(READS):
        total += tl.load(sources_ptr + (pid * READS + buffer) * BLOCK + places)
    if WRITES == 0:
        tl.store(outs_ptr + pid, tl.sum(total))
    for buffer in tl.static_range(WRITES):
        tl.store(outs_ptr + (pid * WRITES + buffer) * BLOCK + places, total)


def stream(mix: tuple[int, int], block: int, sources: Tensor, outs: Tensor) -> None:
    """A program reads R blocks in a row, adds them and writes the sums to W in a row.

    ``sources`` are float32 [programs * R * block], ``outs`` [programs * W * block], or [programs]
    where nothing is written but the sum of the sums.
    """
    reads, writes = mix
    grid = (outs.numel() // (writes * block) if writes else sources.numel() // (reads * block),)
    _stream_kernel[grid](sources, outs, reads, writes, BLOCK=block, num_warps=4)
