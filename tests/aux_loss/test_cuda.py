"""aux_loss on a GPU: the ops against the CPU, compiled and captured."""

import pytest
import torch
from torch._dynamo.utils import counters
from torch.library import opcheck

from moe_custom_ops import aux_loss, aux_loss_workspace_size, make_workspace
from moe_custom_ops.testing import assert_same_bits, make_probs

pytestmark = pytest.mark.cuda

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def loss_and_gradient(probs, counts, total, **options):
    probs = probs.detach().requires_grad_()
    loss = aux_loss(probs, counts, total, probs.shape[1], 2, 1e-2, **options)
    return loss.detach(), torch.autograd.grad(loss, probs)[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (1000, 8), (100_003, 64), (777, 2304), (300, 16384)])
def test_cpu_and_gpu_have_the_same_bits(dtype, shape):
    probs, counts = make_probs(*shape, dtype=dtype)
    for total in (shape[0], torch.tensor(shape[0] - 0.5)):
        expected = loss_and_gradient(probs, counts, total)
        on_gpu = total.cuda() if isinstance(total, torch.Tensor) else total
        actual = loss_and_gradient(probs.cuda(), counts.cuda(), on_gpu)
        assert_same_bits(actual[0], expected[0], "loss")
        assert_same_bits(actual[1], expected[1], "gradient")


@pytest.mark.parametrize("given", [False, True])
def test_opcheck(given):
    probs, counts = make_probs(300, 16)
    probs = probs.cuda().requires_grad_()
    workspace = make_workspace(aux_loss_workspace_size(300, 16), "cuda") if given else None
    opcheck(torch.ops.moe.aux_loss.int, (probs, counts.cuda(), 300, 8, 2, 1e-2, workspace))
    total = torch.tensor(300, device="cuda")
    opcheck(torch.ops.moe.aux_loss.default, (probs, counts.cuda(), total, 8, 2, 1e-2, workspace))


def test_repeats_on_many_streams_have_the_same_bits():
    probs, counts = (x.cuda() for x in make_probs(20_000, 64))
    expected = aux_loss(probs, counts, 20_000, 64, 2, 1e-2)
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    losses = []
    for i in range(64):
        with torch.cuda.stream(streams[i % 4]):
            losses.append(aux_loss(probs, counts, 20_000, 64, 2, 1e-2))
    torch.cuda.synchronize()
    for loss in losses:
        assert_same_bits(loss, expected)


def test_more_than_2_31_elements():
    probs = torch.zeros(2**24 + 5, 128, dtype=torch.bfloat16, device="cuda")
    probs[-1, -1] = 0.5
    counts = torch.ones(128, device="cuda")
    assert aux_loss(probs, counts, 1, 128, 2, 1.0).item() == 32.0


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("total_kind", ["int", "tensor"])
def test_reduce_overhead_skips_no_cuda_graph(given, total_kind):
    torch._dynamo.reset()
    counters.clear()
    probs, counts = (x.cuda() for x in make_probs(4096, 64))
    workspace = make_workspace(aux_loss_workspace_size(4096, 64), "cuda") if given else None
    total = 4096 if total_kind == "int" else torch.tensor(4096, device="cuda")
    call = lambda p, n: aux_loss(p, n, total, 64, 2, 1e-2, workspace)  # noqa: E731
    compiled = torch.compile(call, fullgraph=True, mode="reduce-overhead")
    for seed in range(6):
        probs, counts = (x.cuda() for x in make_probs(4096, 64, seed=seed))
        probs.requires_grad_()
        torch.compiler.cudagraph_mark_step_begin()
        loss = compiled(probs, counts)
        expected = call(probs, counts)
        (grad,) = torch.autograd.grad(loss, probs)
        assert_same_bits(loss, expected)
        assert_same_bits(grad, torch.autograd.grad(expected, probs)[0])
    assert counters["inductor"]["cudagraph_skips"] == 0


def test_captured_replay_reads_new_inputs_and_totals():
    probs, counts = (x.cuda() for x in make_probs(5000, 64))
    total = torch.tensor(5000.0, device="cuda")
    probs.requires_grad_()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        loss = aux_loss(probs, counts, total, 64, 2, 1e-2)
        torch.autograd.grad(loss, probs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = aux_loss(probs, counts, total, 64, 2, 1e-2)
        (grad,) = torch.autograd.grad(loss, probs)
    for seed, value in enumerate((5000.0, 4321.5, 0.0, 77.0)):
        new_probs, new_counts = make_probs(5000, 64, seed=seed)
        with torch.no_grad():
            probs.copy_(new_probs)
        counts.copy_(new_counts)
        total.fill_(value)
        graph.replay()
        expected = loss_and_gradient(new_probs, new_counts, torch.tensor(value))
        assert_same_bits(loss, expected[0], "loss")
        assert_same_bits(grad, expected[1], "gradient")


def test_nothing_waits_for_the_device():
    probs, counts = (x.cuda() for x in make_probs(500, 64))
    total = torch.tensor(500, device="cuda")
    loss_and_gradient(probs, counts, total)
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss_and_gradient(probs, counts, total)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_backward_allocates_no_tensor_of_the_size_of_probs():
    probs, counts = (x.cuda() for x in make_probs(65_536, 64))
    probs.requires_grad_()
    loss = aux_loss(probs, counts, 65_536, 64, 2, 1e-2)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    (grad,) = torch.autograd.grad(loss, probs)
    assert grad.shape == probs.shape
    assert torch.cuda.max_memory_allocated() - before < 100_000


def test_a_mask_of_no_token_takes_a_total_of_zero():
    probs = torch.full((60, 16), torch.inf, device="cuda", requires_grad=True)
    nobody = torch.zeros(60, dtype=torch.bool, device="cuda")
    for total in (0, torch.tensor(0, device="cuda")):
        loss = aux_loss(probs, torch.ones(16, device="cuda"), total, 16, 2, 1e-2, None, nobody)
        (grad,) = torch.autograd.grad(loss, probs)
        assert loss.item() == 0 and (grad == 0).all()


def test_a_device_that_is_not_current():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    probs, counts = make_probs(500, 64)
    expected = loss_and_gradient(probs, counts, 500)
    actual = loss_and_gradient(probs.to("cuda:1"), counts.to("cuda:1"), 500)
    assert_same_bits(actual[0], expected[0])
    assert_same_bits(actual[1], expected[1])


def test_a_workspace_on_the_cpu_is_refused():
    probs, counts = (x.cuda() for x in make_probs(500, 64))
    with pytest.raises(ValueError, match="workspace must be on the device of its inputs, cuda:0"):
        aux_loss(probs, counts, 500, 64, 2, 1e-2, make_workspace(4096, "cpu"))
