"""sequence_aux_loss on a GPU: the op against the CPU, compiled and captured."""

import pytest
import torch
from torch._dynamo.utils import counters
from torch.library import opcheck

from moe_custom_ops import make_workspace, sequence_aux_loss, sequence_aux_loss_workspace_size
from moe_custom_ops.testing import assert_same_bits, make_probs

pytestmark = pytest.mark.cuda

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def pack(lengths, num_experts=64, dtype=torch.float32, seed=0):
    """(probs, counts, cu_seqlens, mask) on the CPU; masked probs are NaN."""
    probs, _ = make_probs(sum(lengths), num_experts, dtype=dtype, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, 99, (len(lengths), num_experts), generator=generator)
    mask = torch.rand(probs.shape[0], generator=generator) < 0.9
    return (
        probs.masked_fill(~mask[:, None], torch.nan),
        counts,
        torch.tensor([0, *lengths]).cumsum(0),
        mask,
    )


def loss_and_gradient(probs, counts, ends, mask, function=sequence_aux_loss, **options):
    probs = probs.detach().requires_grad_()
    loss = function(probs, counts, 2, 0.1, ends, mask, **options)
    return loss.detach(), torch.autograd.grad(loss, probs)[0]


def to_gpu(call):
    return [x if x is None else x.cuda() for x in call]


def assert_same(actual, expected):
    assert_same_bits(actual[0], expected[0], "loss")
    assert_same_bits(actual[1], expected[1], "gradient")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_experts", [1, 8, 64, 160, 2304])
def test_cpu_and_gpu_have_the_same_bits(dtype, num_experts):
    call = pack([1000, 0, 1, 513, 77], num_experts, dtype)
    assert_same(loss_and_gradient(*to_gpu(call)), loss_and_gradient(*call))
    probs, counts, _, mask = call
    batch = (probs[:1500].view(3, 500, -1), counts[:3], None, mask[:1500].view(3, 500))
    assert_same(loss_and_gradient(*to_gpu(batch)), loss_and_gradient(*batch))


def test_opcheck():
    call = to_gpu(pack([30, 0, 5]))
    call[0].requires_grad_()
    opcheck(torch.ops.moe.sequence_aux_loss.default, (*call[:2], 2, 0.1, *call[2:], None))


@pytest.mark.parametrize("given", [False, True])
def test_reduce_overhead_skips_no_cuda_graph(given):
    torch._dynamo.reset()
    counters.clear()
    size = sequence_aux_loss_workspace_size(4000, 4, 64)
    options = {"workspace": make_workspace(size, "cuda") if given else None}
    compiled = torch.compile(
        lambda p, n, ends, m: sequence_aux_loss(p, n, 2, 0.1, ends, m, **options),
        fullgraph=True,
        mode="reduce-overhead",
    )
    for seed, lengths in enumerate(
        ([1000] * 4, [4000, 0, 0, 0], [1, 2, 3, 3994], [999, 1001, 7, 1993])
    ):
        call = pack(lengths, seed=seed)
        torch.compiler.cudagraph_mark_step_begin()
        static = to_gpu(call)
        static[0].requires_grad_()
        loss = compiled(*static)
        (grad,) = torch.autograd.grad(loss, static[0])
        assert_same((loss, grad), loss_and_gradient(*call))
    assert counters["inductor"]["cudagraph_skips"] == 0


def test_bounds_that_are_a_slice_in_a_compiled_graph():
    probs, counts, ends, mask = to_gpu(pack([1000, 0, 700]))
    longer = torch.cat([ends.new_tensor([0, 0, 7]), ends])
    compiled = torch.compile(
        lambda p, n, topk, coeff, e, m: sequence_aux_loss(p, n, topk, coeff, e[3:], m),
        fullgraph=True,
    )
    actual = loss_and_gradient(probs, counts, longer, mask, compiled)
    assert_same(actual, loss_and_gradient(probs, counts, ends, mask))


def test_captured_replay_reads_new_lengths():
    static = to_gpu(pack([1000] * 4))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        loss_and_gradient(*static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = loss_and_gradient(*static)
    for seed, lengths in enumerate(([4000, 0, 0, 0], [1, 2, 3, 3994], [0, 0, 0, 4000])):
        call = pack(lengths, seed=seed)
        for buffer, new in zip(static, call, strict=True):
            buffer.copy_(new)
        graph.replay()
        assert_same(captured, loss_and_gradient(*call))


def test_nothing_waits_for_the_device():
    call = to_gpu(pack([100, 0, 50]))
    loss_and_gradient(*call)
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss_and_gradient(*call)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_more_than_2_31_elements():
    probs = torch.zeros(2, 2**23 + 5, 128, dtype=torch.bfloat16, device="cuda")
    probs[-1, -1, -1] = 0.5
    counts = torch.ones(2, 128, device="cuda")
    length = float(probs.shape[1])
    expected = 128 / 2 / length / length / 2 * 0.5
    loss = sequence_aux_loss(probs, counts, 2, 1.0)
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    ends = torch.tensor([0, 2**23 + 5, 2**24 + 10], device="cuda")
    assert_same_bits(sequence_aux_loss(probs.flatten(0, 1), counts, 2, 1.0, ends), loss)
