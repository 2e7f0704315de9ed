"""The adapter against Megatron-Core's own router, dispatchers and functions, on the CPU."""

import contextlib
import functools
import types
import warnings

import pytest
import torch
import torch.distributed as dist

from moe_custom_ops.testing import assert_close_in_norm, assert_same_bits
from tests.ranks import run_checks

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("megatron.core")
    from megatron.core import parallel_state
    from megatron.core.transformer.moe import moe_utils, token_dispatcher
    from megatron.core.transformer.moe import router as library_router
    from megatron.core.transformer.transformer_config import TransformerConfig

    from moe_custom_ops.integrations import megatron as adapter

HIDDEN, EXPERTS, TOPK, SEQUENCE, BATCH = 16, 8, 3, 10, 2
KINDS = ["MoEAllGatherTokenDispatcher", "MoEAlltoAllTokenDispatcher"]


class _Stream:
    """What the library asks of a CUDA stream, which a CPU has none of."""

    def wait_stream(self, other):
        pass

    def record_event(self):
        return types.SimpleNamespace(synchronize=lambda: None)


@contextlib.contextmanager
def without_cuda(device="cpu"):
    """The library allocates on the current CUDA device, and copies on a stream of its own."""
    patch = pytest.MonkeyPatch()
    # Without TransformerEngine 0.16.1 reads a name that it has not set.
    patch.setattr(moe_utils, "te_general_gemm", None, raising=False)
    if not torch.cuda.is_available():
        stream = _Stream()

        def to_host(x, as_numpy=False, record_stream=False):
            return x.tolist() if as_numpy and isinstance(x, torch.Tensor) else x

        # The library makes lists of splits only where they come from a GPU.
        patch.setattr(token_dispatcher, "maybe_move_tensor_to_cpu", to_host)
        patch.setattr(torch.cuda, "current_device", lambda: device)
        patch.setattr(torch.cuda, "current_stream", lambda: stream)
        patch.setattr(torch.cuda, "Stream", _Stream)
        patch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    parallel_state._set_global_memory_buffer()
    try:
        yield
    finally:
        parallel_state.destroy_global_memory_buffer()
        patch.undo()


def config(**change):
    options = {
        "num_layers": 1,
        "hidden_size": HIDDEN,
        "num_attention_heads": 2,
        "num_moe_experts": EXPERTS,
        "moe_router_topk": TOPK,
        "add_bias_linear": False,
        "moe_router_load_balancing_type": "none",
        **change,
    }
    return TransformerConfig(**options)


def groups(group):
    names = ("ep", "expt_tp", "tp_ep", "tp", "cp", "tp_cp", "tp_dp_cp")
    alone = [dist.new_group([rank]) for rank in range(group.size())][group.rank()]
    whole = {"ep", "tp_ep", "tp_cp", "tp_dp_cp"}
    return types.SimpleNamespace(**{n: group if n in whole else alone for n in names})


def routing(seed, num_tokens=SEQUENCE * BATCH, uneven=False):
    """(routing map [T, E], probs [T, E]) as a router of the library makes them."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_tokens, EXPERTS, generator=generator)
    if uneven:
        logits[:, 5:] = -20.0
    probs, routing_map = moe_utils.topk_routing_with_score_function(logits, TOPK)
    return routing_map, probs


def expert(rows, tokens_per_expert, row_probs, first):
    """Something that differs by expert, is not linear, and takes the probs inside."""
    expert_of_row = torch.repeat_interleave(
        torch.arange(len(tokens_per_expert)), torch.as_tensor(tokens_per_expert)
    )
    factor = (first + expert_of_row + 1.0)[:, None].to(rows.dtype)
    return (rows * factor).tanh() * row_probs[:, None].to(rows.dtype)


def make_dispatcher(module, kind, group, options):
    num_local = EXPERTS // group.size()
    local = [group.rank() * num_local + i for i in range(num_local)]
    dispatcher_class = getattr(module, kind)
    return dispatcher_class(num_local, local, config(**options), groups(group)), local[0]


def layer(dispatcher, first, hidden, routing_map, probs):
    hidden, probs = dispatcher.dispatch_preprocess(hidden, routing_map, probs)
    hidden, probs = dispatcher.token_dispatch(hidden, probs)
    rows, counts, row_probs = dispatcher.dispatch_postprocess(hidden, probs)
    out = dispatcher.combine_preprocess(expert(rows, counts, row_probs, first))
    return dispatcher.combine_postprocess(dispatcher.token_combine(out)), counts


def run_layer(module, kind, group, *, drop=False, uneven=False, dtype=torch.float32):
    options = {"moe_token_dispatcher_type": "alltoall"} if "Alltoall" in kind else {}
    if drop:
        options["moe_expert_capacity_factor"] = 1.0
    dispatcher, first = make_dispatcher(module, kind, group, options)
    routing_map, probs = routing(7 + group.rank(), uneven=uneven)
    if drop:
        # A router with a capacity takes experts away from some tokens.
        routing_map = routing_map & (torch.rand(routing_map.shape) > 0.3)
    generator = torch.Generator().manual_seed(group.rank())
    hidden = torch.randn(SEQUENCE, BATCH, HIDDEN, generator=generator).to(dtype).requires_grad_()
    probs = (probs * routing_map).detach().requires_grad_()
    out, counts = layer(dispatcher, first, hidden, routing_map, probs)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(9))
    (out.float() * weight).sum().backward()
    return {"out": out, "hidden": hidden.grad, "probs": probs.grad}, torch.as_tensor(counts)


def check_dispatchers(group):
    with without_cuda():
        for kind in KINDS:
            for options in ({}, {"drop": True}, {"uneven": True}):
                torch.manual_seed(group.rank())
                expected, counts = run_layer(token_dispatcher, kind, group, **options)
                torch.manual_seed(group.rank())
                actual, own_counts = run_layer(adapter, kind, group, **options)
                assert torch.equal(counts, own_counts)
                for key, value in expected.items():
                    assert_close_in_norm(actual[key], value, 1e-6, f"{kind} {options} {key}")


def check_state_that_a_graph_brings_back(group):
    """A partial CUDA graph replays ``dispatch_preprocess`` and restores ``cudagraph_attrs``."""
    with without_cuda():
        dispatcher, first = make_dispatcher(adapter, KINDS[1], group, {})
        generator = torch.Generator().manual_seed(group.rank())
        hidden = torch.randn(SEQUENCE, BATCH, HIDDEN, generator=generator)
        own, other = routing(7 + group.rank()), routing(70 + group.rank(), uneven=True)
        expected, _ = layer(dispatcher, first, hidden, *own)
        kept = dispatcher.dispatch_preprocess(hidden, *own)
        state = {name: getattr(dispatcher, name, None) for name in dispatcher.cudagraph_attrs}
        dispatcher.dispatch_preprocess(hidden, *other)
        for name, value in state.items():
            if "." not in name:
                setattr(dispatcher, name, value)
        rows, counts, row_probs = dispatcher.dispatch_postprocess(*dispatcher.token_dispatch(*kept))
        out = dispatcher.combine_preprocess(expert(rows, counts, row_probs, first))
        actual = dispatcher.combine_postprocess(dispatcher.token_combine(out))
        assert_same_bits(actual, expected)


def check_a_sum_in_bfloat16_is_rounded_once(group):
    """Of the same rows, no further from a float64 sum than the library, which rounds each step."""
    if group.size() > 1:
        # There the library's reduction adds up in bfloat16 whatever a rank sends.
        return
    with without_cuda():
        for kind in KINDS:
            exact, _ = run_layer(token_dispatcher, kind, group, dtype=torch.float64)
            stock, _ = run_layer(token_dispatcher, kind, group, dtype=torch.bfloat16)
            own, _ = run_layer(adapter, kind, group, dtype=torch.bfloat16)
            error = [(x["out"].double() - exact["out"]).norm() for x in (own, stock)]
            assert 0 < error[0] <= error[1]


def make_router(module, group, kind, **change):
    options = {"moe_router_load_balancing_type": kind, "moe_aux_loss_coeff": 0.1, **change}
    torch.manual_seed(0)
    made = module.TopKRouter(config(**options), groups(group))
    made.set_layer_number(1)
    return made.train()


def route(router, group, padded, steps=2):
    """Losses' gradient alone: probs are multiplied by zero."""
    moe_utils.clear_aux_losses_tracker()
    moe_utils.get_moe_layer_wise_logging_tracker().clear()
    for step in range(steps):
        generator = torch.Generator().manual_seed(10 * step + group.rank())
        x = torch.randn(SEQUENCE, BATCH, HIDDEN, generator=generator)
        # Of a router, True is padding.
        mask = (torch.arange(SEQUENCE * BATCH).view(SEQUENCE, BATCH) % 4 == 1) if padded else None
        probs, _ = router(x, mask)
        (0.0 * probs).sum().backward()
    logged = moe_utils.get_moe_layer_wise_logging_tracker()
    values = {name: entry["values"].clone() for name, entry in logged.items()}
    return router.weight.grad, values


def check_routers(group):
    with without_cuda():
        for kind in ("aux_loss", "seq_aux_loss", "global_aux_loss"):
            for padded in (False, True):
                results = [
                    route(make_router(module, group, kind), group, padded)
                    for module in (library_router, adapter)
                ]
                (expected, expected_logged), (actual, logged) = results
                what = f"{kind}, padded: {padded}"
                assert_close_in_norm(actual, expected, 1e-5, what)
                assert logged.keys() == expected_logged.keys() and len(logged) == 1
                for name, value in logged.items():
                    assert_close_in_norm(value, expected_logged[name], 1e-6, what)


CHECKS = [
    check_dispatchers,
    check_state_that_a_graph_brings_back,
    check_a_sum_in_bfloat16_is_rounded_once,
    check_routers,
]


@functools.cache
def outcomes(world_size):
    return run_checks(world_size, CHECKS)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("world_size", [1, 2])
def test_over_ranks(check, world_size):
    assert outcomes(world_size).get(check.__name__, "did not run") == ""


@pytest.fixture
def alone(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    with without_cuda():
        yield dist.group.WORLD
    dist.destroy_process_group()


def test_convert_keeps_state_and_changes_classes(alone):
    model = torch.nn.Module()
    model.layer = torch.nn.Module()
    model.layer.router = make_router(library_router, alone, "aux_loss")
    dispatcher, _ = make_dispatcher(token_dispatcher, KINDS[0], alone, {})
    model.layer.token_dispatcher = dispatcher
    before = {key: value.clone() for key, value in model.state_dict().items()}
    assert adapter.convert(model) == 2
    assert type(model.layer.router) is adapter.TopKRouter
    assert type(model.layer.token_dispatcher) is adapter.MoEAllGatherTokenDispatcher
    for key, value in model.state_dict().items():
        assert_same_bits(value, before[key])
    assert adapter.convert([model]) == 2
    with pytest.raises(TypeError, match=r"convert: model must be an nn\.Module or a list of them"):
        adapter.convert("model")
    with pytest.raises(
        ValueError, match=r"convert: model must be with a TopKRouter, .* got Linear"
    ):
        adapter.convert(torch.nn.Linear(2, 2))


def test_padding_to_a_capacity_is_refused(alone):
    options = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
    dispatcher, first = make_dispatcher(adapter, KINDS[1], alone, options)
    routing_map, probs = routing(1)
    message = "moe_pad_expert_input_to_capacity must be False with this dispatcher; leave the lib"
    with pytest.raises(ValueError, match=message):
        layer(dispatcher, first, torch.randn(SEQUENCE, BATCH, HIDDEN), routing_map, probs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "case",
    ["plain", "float", "tensor", "masked", "sequences", "mean counts", "bf16 counts", "int16"],
)
def test_the_loss_is_the_library_s(dtype, fused, case):
    generator = torch.Generator().manual_seed(4)
    probs = torch.randn(24, EXPERTS, generator=generator).softmax(-1).to(dtype)
    counts = torch.randint(1, 20, (EXPERTS,), generator=generator)
    total, mask = 24, None
    if case == "tensor":
        total = torch.tensor(61) / TOPK
    elif case == "masked":
        # Of this function, True counts.
        mask, total = torch.arange(24) % 3 > 0, torch.tensor(16.0)
    elif case == "sequences":
        probs, counts, total = probs.view(6, -1), counts.repeat(4), 6
    elif case == "float":
        total = 61 / TOPK
    elif case in ("bf16 counts", "int16"):
        counts = counts.to(torch.bfloat16 if case == "bf16 counts" else torch.int16)
    elif case == "mean counts":
        counts = counts / 3
    results = []
    for function, is_fused in (
        (adapter.switch_load_balancing_loss_func, fused),
        (moe_utils.switch_load_balancing_loss_func, False),
    ):
        leaf = probs.clone().requires_grad_()
        loss = function(leaf, counts, total, TOPK, EXPERTS, 0.1, is_fused, mask)
        results.append((loss, *torch.autograd.grad(loss, leaf)))
    (loss, grad), (expected, expected_grad) = results
    assert loss.dtype == expected.dtype and grad.dtype == expected_grad.dtype
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-6
    assert_close_in_norm(loss, expected, tolerance, "loss")
    assert_close_in_norm(grad, expected_grad, tolerance, "gradient")


def round_trip(module, tokens, probs, routing_map, fused):
    leaves = [tokens.clone().requires_grad_(), probs.clone().requires_grad_()]
    rows, row_probs, indices = module.permute(leaves[0], routing_map, leaves[1], fused=fused)
    weighted = module.unpermute(
        rows * 2, indices, tokens.shape, probs=leaves[1], routing_map=routing_map, fused=fused
    )
    plain = module.unpermute(rows * row_probs[:, None], indices, tokens.shape, fused=fused)
    generator = torch.Generator().manual_seed(6)
    weights = [torch.randn(tokens.shape, generator=generator) for _ in range(2)]
    (weighted * weights[0] + plain * weights[1]).sum().backward()
    grads = [leaf.grad for leaf in leaves]
    return {"rows": rows, "row_probs": row_probs, "indices": indices, "weighted": weighted,
            "plain": plain, "tokens": grads[0], "probs": grads[1]}  # fmt: skip


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dropped", [False, True])
def test_permute_and_unpermute(fused, dropped):
    routing_map, probs = routing(3)
    if dropped:
        routing_map = routing_map & (torch.rand(routing_map.shape) > 0.5)
    tokens = torch.randn(SEQUENCE * BATCH, HIDDEN)
    actual = round_trip(adapter, tokens, probs, routing_map, fused)
    expected = round_trip(moe_utils, tokens, probs, routing_map, False)
    for key in ("rows", "row_probs", "indices"):
        assert torch.equal(actual[key], expected[key]), key
    for key in ("weighted", "plain", "tokens", "probs"):
        assert_close_in_norm(actual[key], expected[key], 1e-6, key)


def test_permute_without_probs_and_of_nothing():
    routing_map, _ = routing(3)
    tokens = torch.randn(SEQUENCE * BATCH, HIDDEN)
    rows, row_probs, indices = adapter.permute(tokens, routing_map.int())
    assert row_probs is None and torch.equal(rows, tokens[indices])
    empty = torch.zeros_like(routing_map)
    rows, _, indices = adapter.permute(tokens, empty)
    assert rows.shape == (0, HIDDEN)
    assert not adapter.unpermute(rows, indices, tokens.shape).any()
    rows, _, indices = adapter.permute(tokens[:0], routing_map[:0])
    assert adapter.unpermute(rows, indices, tokens[:0].shape).shape == (0, HIDDEN)


def test_what_the_functions_refuse():
    routing_map, probs = routing(3)
    tokens = torch.randn(SEQUENCE * BATCH, HIDDEN)
    with pytest.raises(ValueError, match="permute: drop_and_pad must be False, got True"):
        adapter.permute(tokens, routing_map, drop_and_pad=True)
    for change, error, message in (
        ((tokens, routing_map[0]), ValueError, r"routing_map must be of shape \[20, experts\]"),
        ((tokens, routing_map[:5]), ValueError, r"routing_map must be of shape \[20, experts\]"),
        ((tokens[:5], routing_map), ValueError, r"routing_map must be of shape \[5, experts\]"),
        ((tokens[0], routing_map), ValueError, r"tokens must be of shape \[tokens, hidden\]"),
        ((tokens, routing_map, probs[:, :4]), ValueError, r"probs must be of shape \[20, 8\]"),
        ((tokens, routing_map, probs[:5]), ValueError, r"probs must be of shape \[20, 8\]"),
        ((tokens, routing_map, [1.0]), TypeError, "probs must be a Tensor, got list"),
    ):
        with pytest.raises(error, match=f"permute: {message}"):
            adapter.permute(*change)
    rows, _, indices = adapter.permute(tokens, routing_map)
    both = {"probs": probs, "routing_map": routing_map}
    for change, message in (
        ({**both, "probs": probs[:, :4]}, r"probs must be of shape \[20, 8\]"),
        ({**both, "routing_map": routing_map[:, :4]}, r"probs must be of shape \[20, 4\]"),
        ({"restore_shape": torch.Size([7, HIDDEN])}, r"restore_shape must be \[20, 16\], got"),
        ({"restore_shape": torch.Size([20, 11])}, r"restore_shape must be \[20, 16\], got"),
        ({"restore_shape": 12}, r"restore_shape must be \[20, 16\], got 12"),
        ({"permuted_tokens": rows[1:]}, r"permuted_tokens must be of shape \[60, hidden\]"),
    ):
        call = {
            "permuted_tokens": rows,
            "sorted_indices": indices,
            "restore_shape": tokens.shape,
            **change,
        }
        with pytest.raises(ValueError, match=f"unpermute: {message}"):
            adapter.unpermute(**call)
    with pytest.raises(ValueError, match="sorted_indices must be the third result of this mod"):
        adapter.unpermute(rows, indices.clone(), tokens.shape)
    with pytest.raises(TypeError, match="unpermute: routing_map must be a Tensor, got NoneType"):
        adapter.unpermute(rows, indices, tokens.shape, probs=probs)
    with pytest.raises(ValueError, match="unpermute: drop_and_pad must be False, got True"):
        adapter.unpermute(rows, indices, tokens.shape, drop_and_pad=True)


def test_what_the_loss_refuses():
    probs, counts = torch.rand(4, EXPERTS), torch.ones(EXPERTS)
    loss = functools.partial(adapter.switch_load_balancing_loss_func, probs, counts, 4, 2, EXPERTS)
    with pytest.raises(TypeError, match="padding_mask must be bool, got float32"):
        loss(0.1, padding_mask=torch.ones(4))
    with pytest.raises(TypeError, match="moe_aux_loss_coeff must be a number, got NoneType"):
        loss(None)
