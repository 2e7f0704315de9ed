"""weighted_restore on a GPU: the ops against the CPU, compiled and captured."""

import itertools

import pytest
import torch
from torch._dynamo.utils import counters
from torch.library import opcheck

from moe_custom_ops import (
    make_workspace,
    restore,
    weighted_restore,
    weighted_restore_workspace_size,
)
from moe_custom_ops.testing import assert_same_bits, make_assignments

pytestmark = pytest.mark.cuda

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
NAMES = ("result", "gradient of rows", "gradient of scores", "gradient of addend")


def make(
    num_tokens, topk, hidden, dtype=torch.bfloat16, scores_dtype=torch.float32, seed=0, **options
):
    """(rows, top_scores, token_indices_sorted, addend, gradient of the result) on the CPU."""
    scores, indices = make_assignments(num_tokens, topk, max(16, topk), seed=seed, **options)
    generator = torch.Generator().manual_seed(seed)
    draw = lambda n: torch.randn(n, hidden, generator=generator).to(dtype)  # noqa: E731
    return (
        draw(indices.shape[0]),
        scores.to(scores_dtype),
        indices,
        draw(num_tokens),
        draw(num_tokens),
    )


def result_and_gradients(rows, scores, indices, addend, grad, function=weighted_restore, **options):
    leaves = [x.detach().requires_grad_() for x in (rows, scores, addend)]
    out = function(leaves[0], leaves[1], indices, leaves[2], **options)
    return out.detach(), *torch.autograd.grad(out, leaves, grad)


def check(call):
    expected = result_and_gradients(*call)
    actual = result_and_gradients(*(x.cuda() for x in call))
    for a, b, name in zip(actual, expected, NAMES, strict=True):
        assert_same_bits(a, b, name)


@pytest.mark.parametrize(("dtype", "scores_dtype"), list(itertools.product(DTYPES, DTYPES)))
def test_every_dtype_has_the_bits_of_the_cpu(dtype, scores_dtype):
    check(make(100, 3, 300, dtype, scores_dtype))


@pytest.mark.parametrize("hidden", [1, 7, 127, 130, 2880, 7168, 8192])
@pytest.mark.parametrize("topk", [1, 6, 8, 64])
def test_shapes_have_the_bits_of_the_cpu(hidden, topk):
    check(make(33, topk, hidden))


def test_padding_duplicates_drops_and_strides():
    rows, scores, indices, addend, grad = make(100, 4, 96, alignment=16)
    rows[indices < 0] = torch.nan
    indices[5:9] = indices[indices >= 0][-1]
    check((rows, scores, indices, addend, grad))
    check((rows[:-70], scores, indices[:-70].int(), addend, grad))
    check(
        (
            rows.t().contiguous().t(),
            scores,
            indices,
            addend,
            torch.ones((), dtype=grad.dtype).expand(100, 96),
        )
    )
    check((rows, scores, indices, addend, torch.cat([grad, grad], 1)[:, 96:]))


def test_no_byte_is_left_unwritten():
    call = [x.cuda() for x in make(100, 4, 96, alignment=16)]
    for tensor in result_and_gradients(*call):
        assert tensor.isfinite().all()


def test_more_than_2_31_elements():
    hidden, num_rows = 8192, 2**18 + 8
    rows = torch.zeros(num_rows, hidden, dtype=torch.bfloat16, device="cuda")
    rows[-1] = 3.0
    indices = torch.arange(num_rows, device="cuda")
    scores = torch.full((num_rows // 2, 2), 0.5, device="cuda").requires_grad_()
    rows.requires_grad_()
    out = weighted_restore(rows, scores, indices)
    assert (out[-1] == 1.5).all() and (out[:-1] == 0).all()
    out.sum().backward()
    assert (rows.grad == 0.5).all()
    assert scores.grad[-1, 1].item() == 3.0 * hidden


@pytest.mark.parametrize("given", [False, True])
def test_opcheck(given):
    rows, scores, indices, addend, _ = (x.cuda() for x in make(30, 3, 40))
    workspace = make_workspace(weighted_restore_workspace_size(30, 3), "cuda") if given else None
    for tensor in (rows, scores, addend):
        tensor.requires_grad_()
    opcheck(torch.ops.moe.weighted_restore.default, (rows, scores, indices, addend, workspace))


def test_gradgradcheck():
    rows, scores, indices, addend, _ = (
        x.cuda() for x in make(4, 2, 5, torch.float64, torch.float64, alignment=4)
    )
    leaves = [x.requires_grad_() for x in (rows, scores, addend)]
    call = lambda r, s, a: weighted_restore(r, s, indices, a)  # noqa: E731
    assert torch.autograd.gradcheck(call, leaves, nondet_tol=0.0)
    assert torch.autograd.gradgradcheck(call, leaves)


def test_repeats_under_load_have_the_same_bits():
    call = [x.cuda() for x in make(2000, 8, 512)]
    expected = result_and_gradients(*call)
    for _ in range(20):
        for a, b, name in zip(result_and_gradients(*call), expected, NAMES, strict=True):
            assert_same_bits(a, b, name)


@pytest.mark.parametrize("given", [False, True])
def test_reduce_overhead_skips_no_cuda_graph(given):
    torch._dynamo.reset()
    counters.clear()
    workspace = make_workspace(weighted_restore_workspace_size(500, 4), "cuda") if given else None
    compiled = torch.compile(
        lambda r, s, i, a: weighted_restore(r, s, i, a, workspace),
        fullgraph=True,
        mode="reduce-overhead",
    )
    for seed in range(6):
        call = [x.cuda() for x in make(500, 4, 256, seed=seed)]
        torch.compiler.cudagraph_mark_step_begin()
        actual = result_and_gradients(*call, function=compiled)
        for a, b, name in zip(actual, result_and_gradients(*call), NAMES, strict=True):
            assert_same_bits(a, b, name)
    assert counters["inductor"]["cudagraph_skips"] == 0


def test_captured_replay_reads_new_inputs():
    static = [x.cuda() for x in make(500, 4, 256)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        result_and_gradients(*static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = result_and_gradients(*static)
    for seed in range(4):
        call = make(500, 4, 256, seed=seed)
        for buffer, new in zip(static, call, strict=True):
            buffer.copy_(new)
        graph.replay()
        for a, b, name in zip(captured, result_and_gradients(*call), NAMES, strict=True):
            assert_same_bits(a, b, name)


def test_nothing_waits_for_the_device():
    call = [x.cuda() for x in make(500, 4, 256)]
    result_and_gradients(*call)
    torch.cuda.set_sync_debug_mode("error")
    try:
        result_and_gradients(*call)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", DTYPES)
def test_restore_has_the_bits_of_the_cpu(dtype):
    rows, _, indices, addend, grad = make(100, 3, 300, dtype, alignment=16)
    rows[indices < 0] = torch.nan

    def run(rows, indices, addend, grad):
        leaves = [rows.detach().requires_grad_(), addend.detach().requires_grad_()]
        out = restore(leaves[0], indices, 100, 3, leaves[1])
        return out.detach(), *torch.autograd.grad(out, leaves, grad)

    expected = run(rows, indices, addend, grad)
    for a, b in zip(run(*(x.cuda() for x in (rows, indices, addend, grad))), expected, strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("call", [weighted_restore, torch.ops.moe.weighted_restore])
def test_peak_memory_is_the_results_and_four_bytes_an_assignment(call):
    rows, scores, indices, _, grad = (x.cuda() for x in make(8192, 4, 512))
    leaves = [rows.requires_grad_(), scores.requires_grad_()]
    slots, rounding = 4 * scores.numel(), 4096

    def peak(function):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = function()
        return torch.cuda.max_memory_allocated() - before, result

    for _ in range(2):
        forward, out = peak(lambda: call(*leaves, indices))
        assert out.nbytes <= forward <= out.nbytes + slots + rounding
        backward, grads = peak(lambda out=out: torch.autograd.grad(out, leaves, grad))
        asked = sum(x.nbytes for x in grads)
        assert asked <= backward <= asked + slots + rounding
    out = call(rows, scores.detach(), indices)
    backward, _ = peak(lambda: torch.autograd.grad(out, rows, grad))
    assert backward <= rows.nbytes + slots + rounding


def test_a_device_that_is_not_current():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    call = make(100, 3, 300)
    expected = result_and_gradients(*call)
    for _ in range(2):
        actual = result_and_gradients(*(x.to("cuda:1") for x in call))
        for a, b, name in zip(actual, expected, NAMES, strict=True):
            assert_same_bits(a, b, name)
