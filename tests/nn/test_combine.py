"""Which choices go together, and a training step by each against the fused one."""

import functools

import pytest
import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from moe_custom_ops.nn import MoE
from moe_custom_ops.testing import assert_close_in_norm
from tests.compiling import compile_fresh

HIDDEN, EXPERTS, TOPK, MAX_TOKENS = 32, 6, 2, 64
VALID = {
    ("fused_weighted_sum", "post"),
    ("fused_weighted_sum", "activation"),
    ("weighted_sum", "post"),
    ("weighted_sum", "pre"),
    ("weighted_sum", "activation"),
    ("legacy_bmm", "post"),
}


def make(**options):
    torch.manual_seed(0)
    return MoE(HIDDEN, 48, EXPERTS, TOPK, MAX_TOKENS, **options)


def save_products(ctx, op, *args, **kwargs):
    save = op in (torch.ops.moe.grouped_mm_fallback.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE


def recomputed(layer, selective):
    options = {}
    if selective:
        options["context_fn"] = functools.partial(
            create_selective_checkpoint_contexts, save_products
        )
    return lambda x: checkpoint(layer, x, use_reentrant=False, **options)


WAYS = {
    "eager": lambda layer: layer,
    "recomputed": lambda layer: recomputed(layer, False),
    "selective": lambda layer: recomputed(layer, True),
    "compiled": lambda layer: compile_fresh(layer, "aot_eager"),
    "compiled, recomputed": lambda layer: compile_fresh(recomputed(layer, False), "aot_eager"),
    "compiled, selective": lambda layer: compile_fresh(recomputed(layer, True), "aot_eager"),
}


def step(way, device="cpu", autocast=False, optimizer="sgd", **options):
    """(loss, output, {name: gradient}, {name: change}) of one step from one state and batch."""
    layer = make(device=device, shared_intermediate_size=16, **options)
    x = torch.randn(3, 20, HIDDEN, generator=torch.Generator().manual_seed(1)).to(device)
    target = torch.randn(3, 20, HIDDEN, generator=torch.Generator().manual_seed(2)).to(device)
    x.requires_grad_()
    if optimizer == "sgd":
        update = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    else:
        # Adam divides by the gradient's own size: without eps, rounding of small ones is all.
        update = torch.optim.AdamW(layer.parameters(), lr=1e-2, eps=1e-3)
    before = {name: p.detach().clone() for name, p in layer.named_parameters()}
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        out, aux, _ = WAYS[way](layer)(x)
        loss = (out.float() - target).square().mean() + aux
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in layer.named_parameters()}
    gradients["x"] = x.grad
    update.step()
    changes = {name: p.detach() - before[name] for name, p in layer.named_parameters()}
    return loss.detach(), out.detach(), gradients, changes


def compare(actual, expected, tolerance):
    loss, out, gradients, changes = actual
    expected_loss, expected_out, expected_gradients, expected_changes = expected
    assert_close_in_norm(loss, expected_loss, tolerance, "loss")
    assert_close_in_norm(out.float(), expected_out.float(), tolerance, "output")
    assert set(gradients) == set(expected_gradients) >= {"router.weight", "up", "down", "x"}
    for name, gradient in expected_gradients.items():
        assert_close_in_norm(gradients[name], gradient, tolerance, f"gradient of {name}")
    for name, change in expected_changes.items():
        assert_close_in_norm(changes[name], change, tolerance, f"change of {name}")


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("autocast", [False, True])
def test_a_step_by_the_fused_combine_is_the_eager_step(way, autocast, optimizer):
    if optimizer == "adamw" and "," in way:
        pytest.skip("the gradients are compared with the other optimizer")
    run = functools.partial(step, autocast=autocast, optimizer=optimizer)
    expected = run("eager", combine_impl="weighted_sum")
    # Of bf16 the two round different sums; of float32 only the order of the sums differs.
    tolerance = 2e-2 if autocast else 1e-5
    if optimizer == "adamw":
        tolerance *= 10
    compare(run(way), expected, tolerance)
    if way == "eager":
        compare(run(way, combine_impl="legacy_bmm"), expected, tolerance)


@pytest.mark.parametrize("way", ["eager", "recomputed", "compiled"])
@pytest.mark.parametrize("autocast", [False, True])
def test_scores_in_the_activation(way, autocast):
    run = functools.partial(step, score_apply="activation", autocast=autocast)
    expected = run("eager", combine_impl="weighted_sum")
    compare(run(way), expected, 2e-2 if autocast else 1e-5)
    # The experts are linear in their activations: it is the same function as weighting outputs.
    compare(expected, run("eager", score_apply="post"), 3e-2 if autocast else 1e-5)


def test_scores_before_the_experts_are_another_function():
    pre = step("eager", combine_impl="weighted_sum", score_apply="pre")
    post = step("eager", combine_impl="weighted_sum")
    with pytest.raises(AssertionError, match="relative error"):
        compare(pre, post, 1e-2)
    compare(step("compiled", combine_impl="weighted_sum", score_apply="pre"), pre, 1e-5)


@pytest.mark.parametrize("name", ["router.weight", "up", "down", "x", "shared_up.weight"])
def test_a_zeroed_or_missing_gradient_would_fail(name):
    expected = step("eager")
    for wrong in (torch.zeros_like(expected[2][name]), None):
        broken = (*expected[:2], {**expected[2], name: wrong}, expected[3])
        with pytest.raises(AssertionError, match=f"gradient of {name}"):
            compare(broken, expected, 0.5)
    compare(expected, expected, 1e-9)


@pytest.mark.parametrize("combine_impl", ["fused_weighted_sum", "weighted_sum", "legacy_bmm"])
@pytest.mark.parametrize("score_apply", ["post", "pre", "activation"])
def test_what_cannot_be_honoured_is_refused_when_the_layer_is_built(combine_impl, score_apply):
    options = {"combine_impl": combine_impl, "score_apply": score_apply}
    if (combine_impl, score_apply) in VALID:
        out, _, _ = make(**options)(torch.randn(5, HIDDEN))
        assert (out != 0).any()
        return
    message = rf"combine_impl='{combine_impl}' must have .* got '{score_apply}'.* use combine_impl="
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_no_choice_at_all():
    with pytest.raises(ValueError, match="combine_impl must be 'fused_weighted_sum', 'weighted_s"):
        make(combine_impl="bmm")
    with pytest.raises(ValueError, match="score_apply must be 'post', 'pre' or 'activation', got"):
        make(score_apply="after")


@pytest.mark.parametrize("combine_impl", ["fused_weighted_sum", "weighted_sum", "legacy_bmm"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int32, torch.complex64])
def test_a_dtype_or_device_that_no_combine_has(combine_impl, dtype):
    message = f"experts must be of float32, .* got {str(dtype)[6:]}, which no combine_impl takes"
    with pytest.raises(TypeError, match=message):
        make(dtype=dtype, combine_impl=combine_impl)
    layer = make(combine_impl=combine_impl)
    layer.up = torch.nn.Parameter(layer.up.data.to(dtype), requires_grad=False)
    with pytest.raises(TypeError, match=message):
        layer(torch.randn(4, HIDDEN))
    with pytest.raises(ValueError, match="'mps', which has no kernels of this package; move the"):
        make(device="mps")


def test_a_build_without_kernels_is_refused_when_the_layer_is_built(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.0")
    from moe_custom_ops.backend import load_kernels

    load_kernels.cache_clear()
    for device in ("cuda", torch.device("cuda", 1)):
        with pytest.raises(NotImplementedError, match="not supported on ROCm; move its inputs"):
            make(device=device)


@pytest.mark.cuda
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("score_apply", ["post", "activation"])
def test_a_step_on_a_gpu(way, autocast, score_apply):
    run = functools.partial(step, device="cuda", autocast=autocast, score_apply=score_apply)
    expected = run("eager", combine_impl="weighted_sum")
    compare(run(way), expected, 2e-2 if autocast else 1e-4)
