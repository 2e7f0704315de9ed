"""DeepSpeed's fused combine: its formula, its rejections, and a layer that selects it.

DeepSpeed has no wheel, so CI has the formula and a stand-in for its layer; with DeepSpeed on the
path the last test runs its own combine and its own layer's module.
"""

import itertools
import sys
import types

import pytest
import torch

from moe_custom_ops.integrations import deepspeed as adapter
from moe_custom_ops.testing import assert_close_in_norm, make_assignments

BATCH, SEQUENCE, TOPK, EXPERTS, HIDDEN = 2, 9, 3, 8, 16
SHAPE = (BATCH, SEQUENCE, HIDDEN)


def call(dtype=torch.float32):
    scores, order = make_assignments(BATCH * SEQUENCE, TOPK, EXPERTS)
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(len(order), HIDDEN, generator=generator).to(dtype)
    return rows.requires_grad_(), scores.requires_grad_(), order


def formula(rows, scores, order):
    """In float64: a token's rows times its scores, added."""
    placed = torch.zeros(len(order), HIDDEN, dtype=torch.float64).index_put((order,), rows.double())
    weighted = placed.view(-1, TOPK, HIDDEN) * scores.double()[..., None]
    return weighted.sum(1).view(SHAPE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("flat", [True, False])
def test_the_combine(dtype, flat):
    rows, scores, order = call(dtype)
    given = scores if flat else scores.view(BATCH, SEQUENCE, TOPK)
    out = adapter.fused_weighted_restore(rows, given, order, top_k=TOPK, shape=SHAPE)
    assert out.dtype == dtype and out.shape == SHAPE
    expected = formula(rows, scores, order)
    tolerance = {torch.bfloat16: 4e-3, torch.float16: 5e-4}.get(dtype, 1e-6)
    assert_close_in_norm(out.double(), expected, tolerance)
    weight = torch.randn(SHAPE)
    grads = torch.autograd.grad((out.double() * weight).sum(), (rows, scores))
    exact = torch.autograd.grad((expected * weight).sum(), (rows, scores))
    for grad, expected_grad in zip(grads, exact, strict=True):
        assert_close_in_norm(grad, expected_grad, 2 * tolerance)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"combined_rows": [1.0]}, TypeError, "combined_rows must be a Tensor, got list"),
        ({"top_k": 0}, ValueError, "top_k must be at least 1, got 0"),
        ({"top_k": 2}, ValueError, r"top_scores must be of 2 \* 9 \* 2 scores, got 54"),
        ({"shape": (2, 9)}, ValueError, r"shape must be \(batch, seq, hidden\), got \(2, 9\)"),
        ({"shape": 6}, ValueError, r"shape must be \(batch, seq, hidden\), got 6"),
        ({"shape": (-2, -9, 16)}, ValueError, r"shape must be \(batch, seq, hidden\), got \(-2"),
        ({"shape": (2, 9, 15)}, ValueError, r"combined_rows must be of shape \[N, 15\], got"),
    ],
)
def test_bad_input(change, error, message):
    rows, scores, order = call()
    arguments = {
        "combined_rows": rows,
        "top_scores": scores,
        "token_indices_sorted": order,
        "top_k": TOPK,
        "shape": SHAPE,
        **change,
    }
    with pytest.raises(error, match=f"fused_weighted_restore: {message}"):
        adapter.fused_weighted_restore(**arguments)


REJECTIONS = {
    "score_apply": ("pre", "score_apply must be 'post', got 'pre'"),
    "combine_impl": ("legacy_bmm", "combine_impl must be 'auto' or 'fused_weighted_sum', got 'leg"),
    "tensor_parallel_size": (2, "tensor_parallel.autotp_size must be 1, got 2"),
    "expert_tensor_parallel_size": (4, "expert_tensor_parallel_size must be 1, got 4"),
    "comm_backend": ("deepep", "comm_backend must be 'comm', got 'deepep'"),
}


@pytest.mark.parametrize(
    "names", [n for k in (1, 2, 5) for n in itertools.combinations(REJECTIONS, k)], ids=",".join
)
def test_no_rejection_hides_another(names):
    with pytest.raises(ValueError, match="check_config") as raised:
        adapter.check_config(**{name: REJECTIONS[name][0] for name in names})
    for name, (_, message) in REJECTIONS.items():
        assert (message in str(raised.value)) == (name in names), name
    adapter.check_config()
    adapter.check_config(combine_impl="fused_weighted_sum")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"comm_backend": "DeepEP"}, "comm_backend must be 'comm', got 'DeepEP', which is not kn"),
        ({"tensor_parallel_size": 0}, "autotp_size must be an int of 1, got 0"),
        ({"tensor_parallel_size": "2"}, "autotp_size must be an int of 1, got '2'"),
        ({"expert_tensor_parallel_size": None}, "size must be an int of 1, got None"),
    ],
)
def test_what_is_no_config_hides_nothing_either(change, message):
    with pytest.raises(ValueError, match=message) as raised:
        adapter.check_config("pre", **change)
    assert "score_apply must be 'post', got 'pre'" in str(raised.value)


@pytest.fixture
def library(monkeypatch):
    """A module with a layer, which calls what it finds in ``fused_token_ops``."""
    module = types.ModuleType("stand_in_for_auto_ep_layer")
    ops = module.fused_token_ops = types.SimpleNamespace(
        fused_weighted_restore=None, assert_supported=None
    )

    class Layer:
        combine_impl, score_apply, comm_backend = "weighted_sum", "post", "comm"

        def combine(self, rows, scores, order):
            ops.assert_supported(rows, score_apply=self.score_apply)
            return ops.fused_weighted_restore(
                rows, top_scores=scores, token_indices_sorted=order, top_k=TOPK, shape=SHAPE
            )

    Layer.__module__ = module.__name__
    module.Layer = Layer
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def test_a_layer_selects_it(library):
    layer = library.Layer()
    adapter.select(layer)
    assert layer.combine_impl == "fused_weighted_sum"
    rows, scores, order = call()
    out = layer.combine(rows, scores, order)
    assert_close_in_norm(out.double(), formula(rows, scores, order), 1e-6)
    with pytest.raises(TypeError, match=r"rows must be float32, .*, got int64"):
        layer.combine(rows.long(), scores, order)


@pytest.mark.parametrize(
    ("attributes", "config", "message"),
    [
        ({"score_apply": "pre"}, {}, "score_apply must be 'post'"),
        ({"combine_impl": "legacy_bmm"}, {}, "combine_impl must be 'auto'"),
        ({"comm_backend": "deepep"}, {}, "comm_backend must be 'comm'"),
        ({}, {"tensor_parallel_size": 2}, "autotp_size must be 1, got 2"),
        (
            {"folding_group_handles": types.SimpleNamespace(spec=types.SimpleNamespace(tp_size=2))},
            {},
            "autotp_size must be 1, got 2",
        ),
        ({}, {"expert_tensor_parallel_size": 2}, "expert_tensor_parallel_size must be 1, got 2"),
    ],
)
def test_a_layer_that_is_refused_stays_as_it_is(attributes, config, message, library):
    layer = library.Layer()
    for name, value in attributes.items():
        setattr(layer, name, value)
    before = layer.combine_impl
    with pytest.raises(ValueError, match=message):
        adapter.select(layer, **config)
    assert layer.combine_impl == before
    assert library.fused_token_ops.fused_weighted_restore is None


def test_a_layer_of_one_rank_has_no_exchange_to_reduce(library):
    layer = library.Layer()
    layer.comm_backend, layer.ep_size = "deepep", 1
    adapter.select(layer)
    assert layer.combine_impl == "fused_weighted_sum"


def test_a_subclass_of_elsewhere(library):
    layer = type("Own", (library.Layer,), {"__module__": __name__})()
    adapter.select(layer)
    assert library.fused_token_ops.fused_weighted_restore is adapter.fused_weighted_restore


def test_what_is_no_layer():
    with pytest.raises(ValueError, match="layer must be a layer of AutoEP, got Linear"):
        adapter.select(torch.nn.Linear(2, 2))


def test_against_the_library():
    module = pytest.importorskip("deepspeed.module_inject.auto_ep_layer")
    rows, scores, order = call()
    stock = module.combine_from_routed(rows, scores, order, TOPK, "post", "weighted_sum", SHAPE)
    own = adapter.fused_weighted_restore(rows, scores, order, TOPK, SHAPE)
    assert_close_in_norm(own, stock, 1e-6)
    originals = {
        name: getattr(module.fused_token_ops, name)
        for name in ("fused_weighted_restore", "assert_supported")
    }
    layer = module.AutoEPMoELayer.__new__(module.AutoEPMoELayer)
    torch.nn.Module.__init__(layer)
    layer.combine_impl, layer.score_apply, layer.comm_backend = "weighted_sum", "post", "comm"
    try:
        adapter.select(layer)
        assert module.fused_token_ops.fused_weighted_restore is adapter.fused_weighted_restore
        module.fused_token_ops.assert_supported(rows, score_apply="post")
    finally:
        for name, original in originals.items():
            setattr(module.fused_token_ops, name, original)
