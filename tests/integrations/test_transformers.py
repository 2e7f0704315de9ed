"""The adapter against Transformers' own implementation, on tiny random models."""

import contextlib
import functools

import pytest
import torch

from moe_custom_ops.testing import assert_close_in_norm, assert_same_bits
from tests.compiling import compile_fresh
from tests.test_imports import run_python

transformers = pytest.importorskip("transformers")
adapter = pytest.importorskip("moe_custom_ops.integrations.transformers")
library = pytest.importorskip("transformers.integrations.moe")

COMMON = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
CONFIGS = {
    "mixtral": ("MixtralConfig", {"num_local_experts": 6, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"head_dim": 8, "moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 3},
    ),
    "olmoe": ("OlmoeConfig", {"num_experts": 6, "num_experts_per_tok": 3}),
    "gpt_oss": (
        "GptOssConfig",
        {
            "head_dim": 8,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            "num_key_value_heads": 4,
            "moe_intermediate_size": 24,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
}
# DeepSeek-V3 balances by a bias, and has no such loss.
WITH_LOSS = [name for name in CONFIGS if name != "deepseek_v3"]


@pytest.fixture(autouse=True)
def _registered():
    adapter.register()


def make_model(name, implementation="eager", **change):
    kind, options = CONFIGS[name]
    config = getattr(transformers, kind)(**{**COMMON, **options, **change})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        config, experts_implementation=implementation
    )
    with torch.no_grad():
        for parameter in model.parameters():
            # Biases start at zero, where a lost one would not be seen.
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model


def batch():
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 97, (3, 11), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def step(model, name, run=None):
    """(logits, loss, gradients by name) of a training step."""
    model.zero_grad()
    options = {"output_router_logits": True} if name in WITH_LOSS else {}
    out = (model if run is None else run)(**batch(), **options)
    out.loss.backward()
    gradients = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    return out.logits.detach(), out.loss.detach(), gradients


def compare(actual, expected, tolerance=1e-5):
    for a, b, what in zip(actual[:2], expected[:2], ("logits", "loss"), strict=True):
        assert_close_in_norm(a, b, tolerance, what)
    assert actual[2].keys() == expected[2].keys()
    for key, gradient in expected[2].items():
        assert_close_in_norm(actual[2][key], gradient, tolerance, key)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("stock", ["eager", "grouped_mm"])
def test_a_training_step_is_the_library_s(name, stock):
    model = make_model(name, stock)
    expected = step(model, name)
    assert any("experts" in key for key in expected[2])
    model.set_experts_implementation("moe_custom_ops")
    compare(step(model, name), expected)
    if name in WITH_LOSS:
        with adapter.use_load_balancing_loss(model):
            compare(step(model, name), expected)


def test_a_zeroed_gradient_would_fail():
    expected = step(make_model("mixtral"), "mixtral")
    for key, gradient in expected[2].items():
        with pytest.raises(AssertionError, match="relative error"):
            compare((*expected[:2], {**expected[2], key: 0 * gradient}), expected)


@pytest.mark.parametrize("name", CONFIGS)
def test_generation(name):
    options = {"max_new_tokens": 8, "do_sample": False}
    call = {key: value for key, value in batch().items() if key != "labels"}
    model = make_model(name).eval()
    expected = model.generate(**call, **options)
    model.set_experts_implementation("moe_custom_ops")
    assert torch.equal(model.generate(**call, **options), expected)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_compiled_training_step_has_no_graph_break(name):
    # One layer, with experts, as a compiler takes seconds for each.
    change = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    if name == "deepseek_v3":
        change = {"num_hidden_layers": 1, "first_k_dense_replace": 0}
    model = make_model(name, "moe_custom_ops", **change)
    expected = step(model, name)
    swapped = contextlib.nullcontext()
    if name in WITH_LOSS:
        swapped = adapter.use_load_balancing_loss(model)
    with swapped:
        compare(step(model, name, compile_fresh(model, "aot_eager")), expected)


@pytest.mark.parametrize("name", CONFIGS)
def test_gradient_checkpointing(name):
    model = make_model(name, "moe_custom_ops").train()
    expected = step(model, name)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    actual = step(model, name)
    for key, gradient in expected[2].items():
        assert_same_bits(actual[2][key], gradient, key)


def test_saving_and_loading(tmp_path):
    model = make_model("mixtral", "moe_custom_ops").eval()
    call = batch()
    expected = model(**call).logits
    model.save_pretrained(tmp_path)
    assert "moe_custom_ops" not in (tmp_path / "config.json").read_text()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, experts_implementation="moe_custom_ops"
    ).eval()
    assert loaded.config._experts_implementation == "moe_custom_ops"
    assert_same_bits(loaded(**call).logits, expected)


class _Config:
    _experts_implementation = "moe_custom_ops"


EXPERTS, TOPK, HIDDEN, WIDTH = 5, 3, 16, 24


def make_experts(*, bias=False, transposed=False, gate=True, norm=False, interleaved=False):
    """An experts module of each layout that the library has a decorator for."""

    class Experts(torch.nn.Module):
        def __init__(self, config):
            super().__init__()
            self.num_experts = EXPERTS
            self.act_fn = torch.nn.functional.silu
            up = 2 * WIDTH if gate else WIDTH
            name = "gate_up_proj" if gate else "up_proj"
            for key, inputs, outputs in ((name, HIDDEN, up), ("down_proj", WIDTH, HIDDEN)):
                shape = (inputs, outputs) if transposed else (outputs, inputs)
                setattr(self, key, torch.nn.Parameter(torch.randn(EXPERTS, *shape) / 4))
                if bias:
                    setattr(self, f"{key}_bias", torch.nn.Parameter(torch.randn(EXPERTS, outputs)))
            if norm:
                self.post_expert_norm = torch.nn.RMSNorm(HIDDEN)

        if interleaved:

            def _apply_gate(self, x):
                return self.act_fn(x[..., ::2].clamp(max=7.0)) * (x[..., 1::2] + 1)

    decorate = library.use_experts_implementation(
        is_concatenated=not interleaved,
        is_transposed=transposed,
        has_bias=bias,
        has_gate=gate,
        has_post_expert_norm=norm,
    )
    Experts.forward = library.batched_mm_experts_forward
    torch.manual_seed(0)
    return decorate(Experts)(_Config())


def call_experts(function, experts, tokens, ids, weights):
    leaves = [x.clone().requires_grad_() for x in (tokens, weights)]
    experts.zero_grad()
    out = function(experts, leaves[0], ids, leaves[1])
    (
        out.float() * torch.randn(out.shape, generator=torch.Generator().manual_seed(5))
    ).sum().backward()
    gradients = {key: p.grad.clone() for key, p in experts.named_parameters()}
    return {"out": out.detach(), "tokens": leaves[0].grad, "weights": leaves[1].grad, **gradients}


def routing(num_tokens=40, experts=EXPERTS):
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(num_tokens, experts, generator=generator)
    weights, ids = logits.softmax(-1).topk(TOPK)
    return torch.randn(num_tokens, HIDDEN, generator=generator), ids, weights


LAYOUTS = [
    {},
    {"bias": True},
    {"transposed": True},
    {"bias": True, "transposed": True, "interleaved": True},
    {"gate": False},
    {"gate": False, "bias": True},
    {"norm": True},
    {"norm": True, "bias": True, "transposed": True},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: ",".join(layout) or "plain")
@pytest.mark.parametrize("sentinels", [False, True])
def test_layouts_of_weights(layout, sentinels):
    experts = make_experts(**layout)
    tokens, ids, weights = routing(experts=EXPERTS + 3 if sentinels else EXPERTS)
    if sentinels:
        experts._is_expert_parallel = True
        elsewhere = ids >= EXPERTS
        assert elsewhere.any()
        ids, weights = ids.clamp(max=EXPERTS), weights.masked_fill(elsewhere, 0.0)
    call = functools.partial(call_experts, experts=experts, tokens=tokens, ids=ids, weights=weights)
    actual, expected = call(adapter.experts_forward), call(library.batched_mm_experts_forward)
    for key, value in expected.items():
        assert_close_in_norm(actual[key], value, 1e-5, key)
    if sentinels:
        assert not actual["weights"][elsewhere].any()


def test_memory_that_the_product_leaves_as_it_was_reaches_nothing(monkeypatch):
    """As on a GPU, where rows past the last offset are not written."""
    product = adapter._grouped_linear

    def leaving_nan(x, weight, offsets, **options):
        out = product(x, weight, offsets, **options)
        rows = torch.arange(out.shape[0])[:, None] >= offsets[-1]
        return torch.where(rows, torch.nan, out)

    monkeypatch.setattr(adapter, "_grouped_linear", leaving_nan)
    experts = make_experts(bias=True, norm=True)
    experts._is_expert_parallel = True
    tokens, ids, weights = routing(experts=EXPERTS + 3)
    ids = ids.clamp(max=EXPERTS)
    call = functools.partial(call_experts, experts=experts, tokens=tokens, ids=ids, weights=weights)
    for key, value in call(adapter.experts_forward).items():
        assert value.isfinite().all(), key


@pytest.mark.parametrize("scores", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hidden", [torch.float32, torch.bfloat16])
def test_dtypes_of_scores_and_tokens(scores, hidden):
    """Against the library in float64, no further than the library in the same dtypes is."""
    experts = make_experts(bias=True)
    tokens, ids, weights = routing()
    exact = call_experts(
        library.batched_mm_experts_forward, experts.double(), tokens.double(), ids, weights.double()
    )
    experts.bfloat16()
    call = functools.partial(
        call_experts, experts=experts, tokens=tokens.to(hidden), ids=ids, weights=weights.to(scores)
    )
    actual, stock = call(adapter.experts_forward), call(library.grouped_mm_experts_forward)
    for key, value in exact.items():
        assert actual[key].dtype == stock[key].dtype, key
        error = (stock[key].double() - value).norm() / value.norm()
        assert_close_in_norm(actual[key].double(), value, 1.2 * error.item(), key)


def test_no_token():
    experts = make_experts(bias=True)
    tokens, ids, weights = routing(0)
    out = adapter.experts_forward(experts, tokens, ids, weights)
    assert out.shape == (0, HIDDEN)


def logits_of_layers(num_layers=3, num_tokens=33, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    shape = num_layers, num_tokens, 8
    return tuple(torch.randn(shape, generator=generator).to(dtype).requires_grad_().unbind())


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("topk", [1, 2, 5])
def test_the_loss_is_the_library_s(masked, dtype, topk):
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    mask = batch()["attention_mask"] if masked else None
    results = []
    for function in (adapter.load_balancing_loss, load_balancing_loss_func):
        layers = logits_of_layers(dtype=dtype)
        loss = function(layers, 8, topk, mask)
        gradients = torch.autograd.grad(loss, layers)
        results.append((loss, torch.stack(gradients)))
    (loss, gradient), (expected, expected_gradient) = results
    assert loss.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    # One rounding of the gradient of the probabilities to their dtype, and that of the softmax.
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float64: 1e-6}[dtype]
    assert_close_in_norm(gradient, expected_gradient, tolerance)


def test_the_loss_of_no_logits_and_without_a_number_of_experts():
    assert adapter.load_balancing_loss(None, 8) == 0
    assert adapter.load_balancing_loss(torch.ones(2, 8), 8) == 0
    layers = logits_of_layers()
    assert_same_bits(
        adapter.load_balancing_loss(layers), adapter.load_balancing_loss(layers, 8, 2, None)
    )


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"gate_logits": ()}, ValueError, "gate_logits must be of at least one layer"),
        ({"gate_logits": (1.0,)}, TypeError, "gate_logits must be a Tensor, got float"),
        ({"num_experts": 4}, ValueError, "gate_logits must be of 4 columns, got 8"),
        ({"top_k": 0}, ValueError, "top_k must be at least 1, got 0"),
        ({"top_k": 9}, ValueError, "top_k must be at most num_experts = 8, got 9"),
        (
            {"gate_logits": (torch.ones(2, 8, dtype=torch.int64),)},
            TypeError,
            "gate_logits must be float32, .* got int64",
        ),
        (
            {
                "gate_logits": (torch.ones(2, 8), torch.ones(3, 8)),
                "attention_mask": torch.ones(1, 2),
            },
            ValueError,
            "gate_logits must be of as many tokens in each layer, got 3",
        ),
        (
            {"attention_mask": torch.ones(3, 4)},
            ValueError,
            r"attention_mask must be of one entry per token, 33, got \[3, 4\]",
        ),
    ],
)
def test_bad_input_of_the_loss(change, error, message):
    call = {"gate_logits": logits_of_layers(), "num_experts": 8, "top_k": 2, **change}
    with pytest.raises(error, match=f"load_balancing_loss: {message}"):
        adapter.load_balancing_loss(**call)


def test_a_mask_longer_than_the_tokens_counts_by_its_last_columns():
    layers = torch.randn(2, 6, 8).unbind()
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 0, 1, 1]])
    assert_same_bits(
        adapter.load_balancing_loss(layers, 8, 2, mask),
        adapter.load_balancing_loss(layers, 8, 2, mask[:, 2:]),
    )


@pytest.mark.parametrize("batch_size", [1, 2])
def test_cached_decoding_with_router_logits(batch_size):
    model = make_model("mixtral", "moe_custom_ops").eval()
    model.config.output_router_logits = True
    call = {key: value[:batch_size] for key, value in batch().items() if key != "labels"}
    options = {"max_new_tokens": 4, "do_sample": False}
    with adapter.use_load_balancing_loss(model):
        out = model.generate(**call, **options)
    model.config.output_router_logits = False
    assert torch.equal(out, model.generate(**call, **options))


@pytest.mark.parametrize("change", ["three axes", "flat", "int16", "uint8"])
def test_other_forms_of_the_routing(change):
    experts = make_experts(bias=True)
    tokens, ids, weights = routing()
    expected = adapter.experts_forward(experts, tokens, ids, weights)
    if change == "three axes":
        weights = weights[..., None]
    elif change == "flat":
        weights = weights.flatten()
    else:
        ids = ids.to(getattr(torch, change))
    assert_same_bits(adapter.experts_forward(experts, tokens, ids, weights), expected)


@pytest.mark.parametrize("name", ["eager", "grouped_mm"])
def test_no_other_implementation_is_overridden(name):
    with pytest.raises(
        ValueError, match=f"register: name must be a name that is not taken, got '{name}"
    ):
        adapter.register(name)
    with pytest.raises(TypeError, match="register: name must be a str, got int"):
        adapter.register(3)


def test_contexts_that_end_in_any_order():
    from transformers.models.mixtral import modeling_mixtral as module

    original, model = module.load_balancing_loss_func, make_model("mixtral")
    contexts = [adapter.use_load_balancing_loss(model) for _ in range(2)]
    for context in contexts:
        context.__enter__()
    contexts[0].__exit__(None, None, None)
    assert module.load_balancing_loss_func is adapter.load_balancing_loss
    contexts[1].__exit__(None, None, None)
    assert module.load_balancing_loss_func is original
    not_a_model = adapter.use_load_balancing_loss("mixtral")
    with pytest.raises(TypeError, match=r"model must be an nn\.Module, got str"), not_a_model:
        pass


def test_the_loss_is_given_back():
    from transformers.models.mixtral import modeling_mixtral as module

    original, model = module.load_balancing_loss_func, make_model("mixtral")
    swapped = adapter.use_load_balancing_loss(model)
    with pytest.raises(RuntimeError, match="in the middle"), swapped:
        assert module.load_balancing_loss_func is adapter.load_balancing_loss
        raise RuntimeError("in the middle")
    assert module.load_balancing_loss_func is original


def test_a_model_without_the_loss():
    message = r"model must be of a class whose module has load_balancing_loss_func.*got DeepseekV3"
    swapped = adapter.use_load_balancing_loss(make_model("deepseek_v3"))
    with pytest.raises(ValueError, match=message), swapped:
        pass


def test_a_loss_of_other_parameters_is_left_alone():
    from transformers.models.switch_transformers import modeling_switch_transformers as module

    part = torch.nn.Linear(2, 2)
    part.__class__ = type("Part", (torch.nn.Linear,), {"__module__": module.__name__})
    swapped = adapter.use_load_balancing_loss(part)
    with pytest.raises(ValueError, match="model must be of a class whose module has"), swapped:
        pass


def test_nothing_is_patched_at_import(root):
    run_python(
        """
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.mixtral import modeling_mixtral
before = dict(ALL_EXPERTS_FUNCTIONS), modeling_mixtral.load_balancing_loss_func
import moe_custom_ops.integrations.transformers as adapter
assert (dict(ALL_EXPERTS_FUNCTIONS), modeling_mixtral.load_balancing_loss_func) == before
adapter.register()
assert ALL_EXPERTS_FUNCTIONS["moe_custom_ops"] is adapter.experts_forward
""",
        root,
    )


def test_the_package_does_not_import_it(root):
    run_python(
        """
import sys
import moe_custom_ops, moe_custom_ops.nn, moe_custom_ops.integrations
assert "transformers" not in sys.modules
""",
        root,
    )
