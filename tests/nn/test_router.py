"""The router against loops, its balance, and the losses of recipes."""

import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from moe_custom_ops.nn import MoE, Router
from tests.compiling import compile_fresh, graphs

HIDDEN, EXPERTS, TOPK = 16, 12, 3


def make(**options):
    torch.manual_seed(0)
    return Router(HIDDEN, EXPERTS, TOPK, **options)


def by_hand(router, x):
    """(weights, ids) of one token, in Python floats."""
    logits = (router.weight.double() @ x.double()).tolist()
    if router.score_func == "softmax":
        total = sum(map(math.exp, logits))
        scores = [math.exp(v) / total for v in logits]
    else:
        scores = [1 / (1 + math.exp(-v)) for v in logits]
    bias = [0.0] * EXPERTS if router.expert_bias is None else router.expert_bias.tolist()
    choice = [s + b for s, b in zip(scores, bias, strict=True)]
    per_group = EXPERTS // router.num_groups
    groups = range(router.num_groups)
    best = {g: sum(sorted(choice[g * per_group : (g + 1) * per_group])[-2:]) for g in groups}
    chosen = sorted(groups, key=best.__getitem__)[-router.topk_groups :]
    eligible = [e for e in range(EXPERTS) if e // per_group in chosen]
    ids = sorted(eligible, key=choice.__getitem__, reverse=True)[:TOPK]
    weights = [scores[e] for e in ids]
    if router.route_norm:
        weights = [w / sum(scores[e] for e in ids) for w in weights]
    return [router.route_scale * w for w in weights], ids


@pytest.mark.parametrize("score_func", ["softmax", "sigmoid"])
@pytest.mark.parametrize("groups", [(1, 1), (4, 2), (12, 5), (3, 1)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("norm", [(True, 1.0), (False, 2.5), (True, 2.5)])
def test_choice_and_weights(score_func, groups, bias, norm):
    router = make(
        score_func=score_func,
        num_groups=groups[0],
        topk_groups=groups[1],
        expert_bias=bias,
        route_norm=norm[0],
        route_scale=norm[1],
    )
    if bias:
        router.expert_bias.copy_(torch.randn(EXPERTS))
    x = torch.randn(20, HIDDEN)
    weights, ids, probs, logits = router(x)
    assert (weights.dtype, ids.dtype, probs.dtype) == (torch.float32, torch.int64, torch.float32)
    torch.testing.assert_close(logits, x @ router.weight.T)
    torch.testing.assert_close(probs.sum(1), torch.ones(20))
    for t in range(20):
        expected, expected_ids = by_hand(router, x[t])
        assert ids[t].tolist() == expected_ids
        torch.testing.assert_close(weights[t], torch.tensor(expected), rtol=1e-5, atol=1e-6)


def test_weights_come_from_unbiased_scores_and_have_their_gradient():
    router = make(score_func="sigmoid", expert_bias=True, route_norm=False)
    router.expert_bias[5] = 100.0
    weights, ids, _, _ = router(torch.randn(7, HIDDEN))
    assert (ids[:, 0] == 5).all() and (weights <= 1).all()
    weights.sum().backward()
    assert (router.weight.grad[5] != 0).all()


def test_sigmoid_scores_that_all_underflow_stay_finite():
    router = make(score_func="sigmoid")
    torch.nn.init.constant_(router.weight, -20.0)
    weights, _, probs, _ = router(torch.ones(2, HIDDEN))
    (weights.sum() + probs.sum()).backward()
    assert not weights.any() and not probs.any() and router.weight.grad.isfinite().all()


def test_the_bias_is_float32_whatever_the_default():
    torch.set_default_dtype(torch.bfloat16)
    try:
        router = make(expert_bias=True)
    finally:
        torch.set_default_dtype(torch.float32)
    assert router.expert_bias.dtype == torch.float32


def test_only_rows_of_tokens_are_routed():
    with pytest.raises(ValueError, match=r"tokens must be of shape \[T, hidden_size\], got \[2, 3"):
        make(expert_bias=True)(torch.randn(2, 3, HIDDEN))


def test_autocast_leaves_the_router_in_float32():
    router, x = make(), torch.randn(9, HIDDEN)
    expected = router(x)
    with torch.autocast("cpu", torch.bfloat16):
        for actual, exact in zip(router(x), expected, strict=True):
            assert torch.equal(actual, exact)


def layer_with_bias(**options):
    torch.manual_seed(0)
    return MoE(HIDDEN, 8, EXPERTS, TOPK, 64, expert_bias=True, **options)


WAYS = {
    "eager": lambda layer: layer,
    "recomputed": lambda layer: lambda x: checkpoint(layer, x, use_reentrant=False),
    "reentrant": lambda layer: lambda x: checkpoint(layer, x, use_reentrant=True),
    "compiled": lambda layer: compile_fresh(layer, "aot_eager"),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_bias_follows_the_load_of_the_steps_since_its_last_update(way):
    layer = layer_with_bias()
    run, total = WAYS[way](layer), torch.zeros(EXPERTS, dtype=torch.int64)
    for num_tokens in (20, 33):
        x = torch.randn(num_tokens, HIDDEN, requires_grad=True)
        out, loss, counts = run(x)
        (out.sum() + loss).backward()
        total += counts
    with torch.no_grad():
        layer(torch.randn(11, HIDDEN))
    assert torch.equal(layer.router.counts, total)
    layer.update_expert_bias(0.1)
    mean = total.double().mean()
    expected = [0.1 * ((mean > c).item() - (mean < c).item()) for c in total.double()]
    torch.testing.assert_close(layer.router.expert_bias, torch.tensor(expected))
    assert not layer.router.counts.any()
    assert "router.expert_bias" in layer.state_dict() and "router.counts" not in layer.state_dict()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_layer_of_another_dtype_keeps_its_bias(dtype):
    layer = layer_with_bias()
    layer.router.expert_bias.copy_(torch.randn(EXPERTS))
    expected = layer.router.expert_bias.clone()
    layer.to(dtype)
    assert torch.equal(layer.router.expert_bias, expected)
    assert layer.router.counts.dtype == torch.int64
    assert layer.to("meta").router.expert_bias.is_meta


@pytest.mark.parametrize("frozen", [(), ("router",), ("up", "down"), ("router", "up", "down")])
@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("needs_input", [False, True])
def test_the_load_is_counted_whatever_is_frozen(frozen, recomputed, needs_input):
    layer = layer_with_bias(shared_intermediate_size=8)
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name.split(".")[0] not in frozen)
    x = torch.randn(5, HIDDEN, requires_grad=needs_input)
    out, _, counts = WAYS["recomputed" if recomputed else "eager"](layer)(x)
    out += 1.0
    expected = counts.clone()
    # As a caller does who sums over ranks.
    counts *= 2
    out.sum().backward()
    assert torch.equal(layer.router.counts, expected)


def test_reset_parameters_zeroes_what_is_counted():
    with torch.device("meta"):
        layer = layer_with_bias()
    layer = layer.to_empty(device="cpu")
    layer.router.expert_bias.fill_(torch.nan)
    layer.router.counts.fill_(-1)
    layer.reset_parameters()
    assert not layer.router.expert_bias.any() and not layer.router.counts.any()


@pytest.mark.parametrize("shape", [(0, HIDDEN), (3, 0, HIDDEN), (1, HIDDEN), (HIDDEN,)])
def test_odd_shapes_with_every_option(shape):
    layer = layer_with_bias(
        score_func="sigmoid",
        num_groups=4,
        topk_groups=2,
        sequence_aux_loss_coeff=0.1,
        z_loss_coeff=0.1,
    )
    out, loss, counts = layer(torch.randn(shape))
    (out.sum() + loss).backward()
    assert out.shape == shape and loss.isfinite()
    assert counts.sum() == TOPK * (out.numel() // HIDDEN)


def test_the_bias_balances():
    layer = layer_with_bias(aux_loss_coeff=0.0)
    layer.router.expert_bias[0] = 1.0
    x = torch.randn(64, HIDDEN)
    loads = []
    for _ in range(30):
        out, _, counts = layer(x)
        out.sum().backward()
        layer.update_expert_bias(0.05)
        loads.append(counts.max().item())
    assert loads[0] == 64 and loads[-1] < 32


@pytest.mark.parametrize("shape", [(3, 10), (10,), (2, 2, 5), (0, 4)])
def test_losses_of_recipes(shape):
    options = {"aux_loss_coeff": 0.5, "sequence_aux_loss_coeff": 0.25, "z_loss_coeff": 0.125}
    torch.manual_seed(0)
    layer = MoE(HIDDEN, 8, EXPERTS, TOPK, 64, **options)
    x = torch.randn(*shape, HIDDEN)
    _, loss, counts = layer(x)
    _, ids, probs, logits = layer.router(x.reshape(-1, HIDDEN))
    num_tokens = len(ids)
    if num_tokens == 0:
        assert loss == 0
        return
    expected = 0.5 * EXPERTS / TOPK / num_tokens**2 * (probs.sum(0) * counts).sum()
    length = shape[-1]
    for own_probs, own_ids in zip(probs.split(length), ids.split(length), strict=True):
        own = torch.bincount(own_ids.flatten(), minlength=EXPERTS)
        balance = EXPERTS / TOPK / length**2 * (own_probs.sum(0) * own).sum()
        expected = expected + 0.25 * balance * length / num_tokens
    expected = expected + 0.125 * logits.logsumexp(-1).square().mean()
    torch.testing.assert_close(loss, expected)
    (gradient,) = torch.autograd.grad(loss, layer.router.weight)
    (exact,) = torch.autograd.grad(expected, layer.router.weight)
    torch.testing.assert_close(gradient, exact, rtol=1e-4, atol=1e-6)
    assert gradient.norm() > 1e-3


def test_all_options_are_one_graph_for_all_token_counts():
    layer = layer_with_bias(
        score_func="sigmoid",
        num_groups=4,
        topk_groups=2,
        route_scale=2.5,
        sequence_aux_loss_coeff=0.1,
        z_loss_coeff=0.1,
    )
    compiled = compile_fresh(layer, "aot_eager")
    for length in (5, 9, 16):
        x = torch.randn(4, length, HIDDEN)
        for actual, expected in zip(compiled(x), layer(x), strict=True):
            torch.testing.assert_close(actual, expected)
    assert graphs() == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"score_func": "relu"}, "score_func must be 'softmax' or 'sigmoid', got 'relu'"),
        ({"num_groups": 5}, "num_groups must be a divisor of num_experts = 12, got 5"),
        ({"topk_groups": 2}, "topk_groups must be at most num_groups = 1, got 2"),
        ({"num_groups": 6}, "topk must be at most the 2 experts that a token may choose"),
        ({"num_groups": 0}, "num_groups must be at least 1, got 0"),
    ],
)
def test_bad_options(change, message):
    with pytest.raises(ValueError, match=f"Router: {message}"):
        make(**change)
    with pytest.raises(TypeError, match="Router: route_scale must be a number, got str"):
        make(route_scale="1")
    with pytest.raises(TypeError, match="Router: route_norm must be a bool, got str"):
        make(route_norm="no")
    with pytest.raises(ValueError, match="router must have expert_bias=True, got False"):
        make().update_expert_bias()
    with pytest.raises(TypeError, match="update_expert_bias: rate must be a number, got str"):
        make(expert_bias=True).update_expert_bias("fast")
    with pytest.raises(TypeError, match="update_expert_bias: group must be a ProcessGroup, got st"):
        make(expert_bias=True).update_expert_bias(group="world")
