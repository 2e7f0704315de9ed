"""The modules: own workspaces, one graph, parity of a training step."""

import copy
import io

import pytest
import torch
from torch._dynamo.utils import counters

from moe_custom_ops.nn import AuxLoss, MoE, WeightedRestore
from moe_custom_ops.testing import assert_same_bits, make_assignments, make_probs
from tests.compiling import compile_fresh, graphs

HIDDEN, EXPERTS, TOPK, MAX_TOKENS = 32, 6, 2, 256


def make_layer(**options):
    torch.manual_seed(0)
    return MoE(HIDDEN, 48, EXPERTS, TOPK, MAX_TOKENS, **options)


def plain_moe(layer, x):
    """The layer's formula by a loop over tokens and experts."""
    tokens = x.reshape(-1, HIDDEN)
    probs = (tokens @ layer.router.weight.T).softmax(-1)
    scores, ids = probs.topk(TOPK)
    scores = scores / scores.sum(-1, keepdim=True)

    def swiglu(h):
        gate, value = h.chunk(2, -1)
        return torch.nn.functional.silu(gate) * value

    outs = []
    for t in range(tokens.shape[0]):
        out = 0
        for k in range(TOPK):
            expert = ids[t, k]
            out = out + scores[t, k] * (swiglu(tokens[t] @ layer.up[expert]) @ layer.down[expert])
        if layer.shared_up is not None:
            out = out + layer.shared_down(swiglu(layer.shared_up(tokens[t])))
        outs.append(out)
    counts = torch.bincount(ids.flatten(), minlength=EXPERTS)
    loss = EXPERTS * 1e-2 / TOPK / tokens.shape[0] ** 2 * (probs.sum(0) * counts).sum()
    return torch.stack(outs).view_as(x), loss, counts


@pytest.mark.parametrize("shared", [0, 16])
def test_moe_against_a_loop(shared):
    layer = make_layer(shared_intermediate_size=shared)
    x = torch.randn(2, 9, HIDDEN)
    weight = torch.randn(2, 9, HIDDEN)
    results = []
    for function in (layer, lambda y: plain_moe(layer, y)):
        leaf = x.clone().requires_grad_()
        layer.zero_grad()
        out, loss, counts = function(leaf)
        ((out * weight).sum() + loss).backward()
        grads = {name: p.grad.clone() for name, p in layer.named_parameters()}
        results.append((out, loss, counts, leaf.grad, grads))
    (out, loss, counts, x_grad, grads), expected = results
    assert torch.equal(counts, expected[2])
    close = {"rtol": 1e-4, "atol": 1e-6}
    torch.testing.assert_close(out, expected[0], **close)
    torch.testing.assert_close(loss, expected[1], rtol=1e-5, atol=0)
    torch.testing.assert_close(x_grad, expected[3], **close)
    assert set(grads) == {name for name, _ in layer.named_parameters()}
    for name, grad in grads.items():
        assert (grad.abs() > 1e-4).any(), name
        torch.testing.assert_close(grad, expected[4][name], **close)


def test_moe_is_one_graph_for_all_token_counts():
    layer = make_layer(shared_intermediate_size=16)
    compiled = compile_fresh(layer, "aot_eager")
    for num_tokens in (5, 17, 256):
        x = torch.randn(num_tokens, HIDDEN)
        out, loss, counts = compiled(x)
        expected, expected_loss, expected_counts = layer(x)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(loss, expected_loss)
        assert torch.equal(counts, expected_counts)
    assert graphs() == 1


def test_an_expert_without_tokens_gets_a_zero_gradient():
    layer = make_layer()
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[:2] = 10 * torch.rand(2, HIDDEN)
    out, _, counts = layer(torch.rand(8, HIDDEN))
    assert counts.tolist() == [8, 8, 0, 0, 0, 0]
    out.sum().backward()
    assert (layer.up.grad[2:] == 0).all() and (layer.up.grad[:2] != 0).any()


def test_no_tokens():
    layer = make_layer()
    x = torch.empty(0, HIDDEN, requires_grad=True)
    out, loss, counts = layer(x)
    (out.sum() + loss).backward()
    assert out.shape == (0, HIDDEN) and loss.item() == 0 and counts.sum() == 0
    assert layer.router.weight.grad is not None and layer.up.grad is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shared", [0, 16])
def test_autocast_runs_the_experts_in_its_dtype_and_the_router_in_float32(dtype, shared):
    layer = make_layer(shared_intermediate_size=shared)
    x = torch.randn(8, HIDDEN, requires_grad=True)
    expected, expected_loss, _ = layer(x)
    with torch.autocast("cpu", dtype):
        out, loss, _ = layer(x)
    assert out.dtype == dtype and loss.dtype == torch.float32
    assert_same_bits(loss, expected_loss)
    torch.testing.assert_close(out.float(), expected, rtol=0.05, atol=0.02)
    out.float().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad.dtype == torch.float32 and (parameter.grad != 0).any(), name
    compiled = compile_fresh(layer, "aot_eager")
    with torch.autocast("cpu", dtype):
        assert compiled(x)[0].dtype == dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("how", ["to", "argument", "default"])
def test_any_dtype_of_layer(dtype, how):
    if how == "default":
        torch.set_default_dtype(dtype)
    try:
        layer = make_layer(
            shared_intermediate_size=16, **({"dtype": dtype} if how == "argument" else {})
        )
    finally:
        torch.set_default_dtype(torch.float32)
    layer = layer.to(dtype) if how == "to" else layer
    x = torch.randn(8, HIDDEN)
    out, loss, _ = layer(x.to(dtype))
    assert out.dtype == dtype and loss.dtype == torch.float32
    assert_same_bits(layer(x.to(dtype).double())[0], out)
    (out.float().sum() + loss).backward()
    assert all((p.grad != 0).any() for p in layer.parameters())


def test_autocast_leaves_float64_as_it_is():
    layer = make_layer(dtype=torch.float64, shared_intermediate_size=16)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(8, HIDDEN))[0].dtype == torch.float64


@pytest.mark.parametrize("strict", [False, True])
def test_export_keeps_the_token_count_symbolic(strict):
    layer = make_layer(shared_intermediate_size=16)
    tokens = torch.export.Dim("tokens", min=2, max=MAX_TOKENS)
    x = torch.randn(50, HIDDEN)
    shapes = ({0: tokens},)
    program = torch.export.export(layer, (x,), dynamic_shapes=shapes, strict=strict).module()
    more = torch.randn(99, HIDDEN)
    torch.testing.assert_close(program(more)[0], layer(more)[0])


def test_inputs_of_the_modules_are_checked():
    layer = make_layer()
    with pytest.raises(ValueError, match=r"MoE: x must be of shape \[\*, 32\], got \[8, 31\]"):
        layer(torch.randn(8, 31))
    with pytest.raises(TypeError, match=r"MoE: x must be float32, .* or float64, got int64"):
        layer(torch.ones(8, HIDDEN, dtype=torch.int64))
    with pytest.raises(ValueError, match="MoE: x must be a dense tensor, got torch"):
        layer(torch.ones(8, HIDDEN).to_sparse())
    with pytest.raises(ValueError, match="MoE: x must be on the device of the layer, cpu, got"):
        layer(torch.ones(8, HIDDEN, device="meta"))
    with pytest.raises(TypeError, match="MoE: x must be a Tensor, got list"):
        layer([1.0])
    with pytest.raises(ValueError, match="MoE: x must have at most max_tokens = 256 tok"):
        layer(torch.randn(257, HIDDEN))
    with pytest.raises(TypeError, match="AuxLoss: probs must be a Tensor, got float"):
        layer.aux_loss(1.0, torch.ones(6), 1)
    with pytest.raises(ValueError, match="aux_loss: probs must be of shape"):
        layer.aux_loss(torch.tensor(1.0), torch.ones(6), 1)
    with pytest.raises(TypeError, match="WeightedRestore: top_scores must be a Tensor, got list"):
        WeightedRestore(8, 2)(torch.randn(4, 8), [1.0], torch.arange(4))


def test_aux_loss_module_takes_a_mask():
    probs, counts = make_probs(60, EXPERTS)
    mask = torch.arange(60) % 3 > 0
    module = AuxLoss(EXPERTS, TOPK, 1e-2, MAX_TOKENS)
    expected = module(probs[mask].contiguous(), counts, 40)
    torch.testing.assert_close(
        module(probs.masked_fill(~mask[:, None], torch.nan), counts, 40, mask), expected
    )


def test_on_meta():
    layer = make_layer(device="meta", shared_intermediate_size=16)
    out, loss, counts = layer(torch.randn(8, HIDDEN, device="meta"))
    assert out.shape == (8, HIDDEN) and loss.shape == () and counts.shape == (EXPERTS,)


def test_the_output_may_be_changed_in_place():
    x = torch.randn(8, HIDDEN)
    layer = make_layer()
    out, _, _ = layer(x)
    out += x
    out.sum().backward()
    assert (layer.up.grad != 0).any()


def test_a_step_is_repeatable_bit_for_bit():
    def step():
        layer = make_layer(shared_intermediate_size=16)
        x = torch.randn(4, 50, HIDDEN, generator=torch.Generator().manual_seed(1))
        out, loss, _ = layer(x)
        (out.square().mean() + loss).backward()
        return [p.grad for p in layer.parameters()]

    for a, b in zip(step(), step(), strict=True):
        assert_same_bits(a, b)


def test_arguments_of_the_constructors_are_checked():
    with pytest.raises(ValueError, match="topk must be at most num_experts = 6, got 7"):
        MoE(HIDDEN, 48, EXPERTS, 7, MAX_TOKENS)
    with pytest.raises(ValueError, match="MoE: hidden_size must be at least 1, got 0"):
        MoE(0, 48, EXPERTS, TOPK, MAX_TOKENS)
    with pytest.raises(TypeError, match=r"MoE: intermediate_size must be an int, got float"):
        MoE(HIDDEN, 4.5, EXPERTS, TOPK, MAX_TOKENS)
    with pytest.raises(TypeError, match="MoE: aux_loss_coeff must be a number, got str"):
        MoE(HIDDEN, 48, EXPERTS, TOPK, MAX_TOKENS, aux_loss_coeff="x")
    with pytest.raises(TypeError, match=r"MoE: dtype must be a torch\.dtype, got 'float32'"):
        MoE(HIDDEN, 48, EXPERTS, TOPK, MAX_TOKENS, dtype="float32")
    with pytest.raises(TypeError, match="AuxLoss: coeff must be a number, got str"):
        AuxLoss(8, 2, "x", 5)
    with pytest.raises(ValueError, match="WeightedRestore: max_tokens must be at least 0, got -1"):
        WeightedRestore(-1, 2)


@pytest.mark.parametrize(
    "module",
    [AuxLoss(EXPERTS, TOPK, 1e-2, MAX_TOKENS), WeightedRestore(MAX_TOKENS, TOPK), make_layer()],
    ids=["AuxLoss", "WeightedRestore", "MoE"],
)
def test_workspaces_travel_and_are_not_saved(module):
    assert not any("workspace" in name for name in module.state_dict())
    buffers = dict(module.named_buffers())
    assert buffers and all(name.endswith("workspace") for name in buffers)
    assert all(buffer.numel() > 0 for buffer in buffers.values())
    twins = (copy.deepcopy(module), copy.deepcopy(module).bfloat16(), _saved_and_loaded(module))
    for twin in twins:
        for name, buffer in twin.named_buffers():
            assert buffer.dtype == torch.uint8 and buffer.shape == buffers[name].shape
    if isinstance(module, MoE):
        x = torch.randn(8, HIDDEN)
        for twin in (twins[0], twins[2]):
            assert_same_bits(twin(x)[0], module(x)[0])
        assert twins[1](x)[0].dtype == torch.bfloat16


def _saved_and_loaded(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_more_tokens_than_the_maximum_are_refused():
    module = AuxLoss(8, 2, 1e-2, max_tokens=5)
    probs, counts = make_probs(6, 8)
    assert module(probs[:5], counts, 5).item() > 0
    with pytest.raises(ValueError, match="AuxLoss: probs must have at most max_tokens = 5 "):
        module(probs, counts, 6)
    scores, indices = make_assignments(9, 2, 8)
    restore = WeightedRestore(8, 2)
    assert restore(torch.randn(16, 4), scores[:8], indices[indices < 16]).shape == (8, 4)
    with pytest.raises(ValueError, match="WeightedRestore: top_scores must have at most max_to"):
        restore(torch.randn(18, 4), scores, indices)


@pytest.mark.cuda
def test_reduce_overhead_skips_no_cuda_graph():
    torch._dynamo.reset()
    counters.clear()
    layer = make_layer(dtype=torch.bfloat16, device="cuda", shared_intermediate_size=16)
    compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    for _ in range(5):
        x = torch.randn(64, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        # A gradient kept from the last step would lie in memory that this step's replay reuses.
        layer.zero_grad(set_to_none=True)
        torch.compiler.cudagraph_mark_step_begin()
        out, loss, _ = compiled(x)
        (out.float().square().mean() + loss).backward()
        assert (x.grad != 0).any()
    assert counters["inductor"]["cudagraph_skips"] == 0


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_nothing_waits_for_the_device(dtype):
    layer = make_layer(dtype=dtype, device="cuda", shared_intermediate_size=16)
    x = torch.randn(64, HIDDEN, device="cuda", dtype=dtype)

    def step():
        out, loss, _ = layer(x)
        (out.float().square().mean() + loss).backward()

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_captured_training_step_has_the_bits_of_the_eager_step(dtype):
    def train(captured):
        layer = make_layer(dtype=dtype, device="cuda", shared_intermediate_size=16)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2, capturable=True, fused=True)
        x = torch.zeros(64, HIDDEN, device="cuda", dtype=dtype)
        target = torch.zeros_like(x)

        def step():
            optimizer.zero_grad(set_to_none=True)
            out, aux, _ = layer(x)
            loss = (out - target).float().square().mean() + aux
            loss.backward()
            optimizer.step()
            return loss

        def load(seed):
            generator = torch.Generator().manual_seed(seed)
            x.copy_(torch.randn(64, HIDDEN, generator=generator))
            target.copy_(torch.randn(64, HIDDEN, generator=generator))

        # The gradient accumulators must be created on the stream of the capture's warm-up.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for seed in range(3):
                load(seed)
                step()
        torch.cuda.current_stream().wait_stream(side)
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                loss = step()
        losses = []
        for seed in range(3, 23):
            load(seed)
            if captured:
                graph.replay()
                losses.append(loss.detach().clone())
            else:
                losses.append(step().detach())
        return losses, [p.detach() for p in layer.parameters()]

    (losses, parameters), (expected_losses, expected_parameters) = train(True), train(False)
    for a, b in zip(losses, expected_losses, strict=True):
        assert_same_bits(a, b, "loss")
    for a, b in zip(parameters, expected_parameters, strict=True):
        assert_same_bits(a, b, "parameter")
    assert len({loss.item() for loss in losses}) == 20
