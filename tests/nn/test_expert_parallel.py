"""Experts spread over 2 and 4 ranks against the same layer on one."""

import copy
import functools
import itertools
import pickle

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as collectives
from torch.utils.checkpoint import checkpoint

from moe_custom_ops import aux_loss, expert_permutation, permute, weighted_restore
from moe_custom_ops.nn import MoE
from moe_custom_ops.testing import assert_close_in_norm, assert_same_bits
from tests.compiling import compile_fresh, graphs
from tests.ranks import run_checks

HIDDEN, EXPERTS, TOPK, MAX_TOKENS = 16, 8, 2, 64
SIZES = [[5, 0, 9, 12], [6, 7, 2, 3]]  # tokens of each rank, by seed


def device_of(group):
    return f"cuda:{group.rank()}" if dist.get_backend(group) == "nccl" else "cpu"


def make(group=None, **options):
    """A layer, with its rank's part of the weights of the one-rank layer of the same options."""
    device = device_of(group) if group else "cpu"
    torch.manual_seed(0)
    one = MoE(HIDDEN, 24, EXPERTS, TOPK, MAX_TOKENS, shared_intermediate_size=8, **options)
    return one, spread(one, group, device, **options) if group else None


def spread(one, group, device, **options):
    layer = MoE(
        *(HIDDEN, 24, EXPERTS, TOPK, MAX_TOKENS),
        shared_intermediate_size=8,
        process_group=group,
        device=device,
        **options,
    )
    state, each = one.state_dict(), EXPERTS // group.size()
    own = slice(group.rank() * each, (group.rank() + 1) * each)
    layer.load_state_dict({k: v[own] if k in ("up", "down") else v for k, v in state.items()})
    return layer


def inputs(world_size, seed=0):
    return [
        torch.randn(SIZES[seed][r], HIDDEN, generator=torch.Generator().manual_seed(10 * seed + r))
        for r in range(world_size)
    ]


def gradients(run, layer, x, autocast=False, device="cpu"):
    """(output, {name: gradient}) of a loss of every output element and the balancing loss."""
    layer.zero_grad()
    x = x.to(device).requires_grad_()
    with torch.autocast(device.split(":")[0], torch.bfloat16, enabled=autocast):
        out, loss, _ = run(x)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(len(x))).to(device)
    ((out.float() * weight).sum() + loss).backward()
    return out.detach().cpu(), {
        "x": x.grad.cpu(),
        **{name: p.grad.cpu() for name, p in layer.named_parameters()},
    }


def compare(group, one, layer, run=None, autocast=False, tolerance=1e-5, seed=0):
    """This rank's output and gradients, its experts' of all ranks' tokens, against one rank's."""
    world_size, rank = group.size(), group.rank()
    own, device = inputs(world_size, seed)[rank], device_of(group)
    out, actual = gradients(layer if run is None else run, layer, own, autocast, device)
    expected = [gradients(one, one, x, autocast) for x in inputs(world_size, seed)]
    each = EXPERTS // world_size
    experts = slice(rank * each, (rank + 1) * each)
    if len(own):
        assert_close_in_norm(out, expected[rank][0], tolerance, "output")
    for name, gradient in actual.items():
        if name in ("up", "down"):
            exact = sum(g[name] for _, g in expected)[experts]
        else:
            exact = expected[rank][1][name]
        if len(own) or name in ("up", "down"):
            assert_close_in_norm(gradient, exact, tolerance, f"gradient of {name}")
        else:
            assert not gradient.any(), name


def check_transports(group):
    ways = itertools.product(
        (None, MAX_TOKENS),
        (("fused_weighted_sum", "post"), ("fused_weighted_sum", "activation"),
         ("weighted_sum", "pre"), ("legacy_bmm", "post")),
    )  # fmt: skip
    for capacity, (combine_impl, score_apply) in ways:
        options = {"combine_impl": combine_impl, "score_apply": score_apply}
        one, _ = make(**options)
        layer = spread(one, group, device_of(group), rank_capacity=capacity, **options)
        compare(group, one, layer)
        compare(group, one, layer, autocast=True, tolerance=3e-2)
        if capacity is not None:
            assert layer.num_dropped == 0


def check_a_step(group):
    """Loss, output, gradients and the optimizer's change, fused against eager on the same ranks."""
    x = inputs(group.size())[group.rank()]
    for capacity, autocast, recompute in itertools.product(
        (None, MAX_TOKENS), (False, True), (False, True)
    ):
        results = []
        for combine_impl in ("fused_weighted_sum", "weighted_sum"):
            options = {"combine_impl": combine_impl}
            one, _ = make(**options)
            layer = spread(one, group, device_of(group), rank_capacity=capacity, **options)
            own = combine_impl == "fused_weighted_sum" and recompute
            run = functools.partial(checkpoint, layer, use_reentrant=False) if own else layer
            before = {name: p.detach().clone() for name, p in layer.named_parameters()}
            out, found = gradients(run, layer, x, autocast, device_of(group))
            torch.optim.AdamW(layer.parameters(), lr=1e-2, eps=1e-3).step()
            changes = {name: p.detach() - before[name] for name, p in layer.named_parameters()}
            results.append(({"output": out, **found}, changes))
        (fused, fused_changes), (eager, eager_changes) = results
        tolerance = 2e-2 if autocast else 1e-5
        for name, expected in eager.items():
            if expected.any():
                assert_close_in_norm(fused[name].float(), expected.float(), tolerance, name)
        for name, change in eager_changes.items():
            assert_close_in_norm(fused_changes[name], change, 10 * tolerance, f"change of {name}")
        experts = ("up", "down") if not len(x) else tuple(eager_changes)
        assert all(fused[name].norm() > 0 for name in experts)


def check_recomputation(group):
    for capacity in (None, 2):
        one, _ = make()
        layer = spread(one, group, device_of(group), rank_capacity=capacity)
        run = functools.partial(checkpoint, layer, use_reentrant=False)
        if capacity is None:
            compare(group, one, layer, run)
            continue
        counts = []
        for way in (layer, run):
            gradients(way, layer, inputs(group.size())[group.rank()], device=device_of(group))
            counts.append(layer.num_dropped.item())
            layer.num_dropped.zero_()
        assert counts[0] == counts[1] and (counts[0] > 0) == (SIZES[0][group.rank()] > 0)


def check_compiled(group):
    for capacity in (None, MAX_TOKENS):
        one, _ = make()
        layer = spread(one, group, device_of(group), rank_capacity=capacity)
        with torch._dynamo.config.patch(capture_scalar_outputs=True):
            run = compile_fresh(layer, "aot_eager")
            for seed in range(2):
                compare(group, one, layer, run, seed=seed)
            # PyTorch makes a graph of its own for no token.
            assert graphs() == (1 if SIZES[0][group.rank()] else 2)


def check_overflow(group):
    """What is dropped is counted, and the output is that of the assignments that remain."""
    capacity = 3
    one, _ = make()
    layer = spread(one, group, device_of(group), rank_capacity=capacity)
    x = inputs(group.size())[group.rank()]
    tokens = x.to(device_of(group))
    with torch.no_grad():
        out, _, _ = layer(tokens)
        scores, ids, _, _ = one.router(x)
        sent = dict.fromkeys(range(group.size()), 0)
        order = sorted(range(ids.numel()), key=lambda i: (ids.flatten()[i].item(), i))
        kept = torch.zeros(ids.numel(), dtype=torch.bool)
        for i in order:
            to = ids.flatten()[i].item() // (EXPERTS // group.size())
            kept[i] = sent[to] < capacity
            sent[to] += 1
        expected = one.shared_down(_swiglu(one.shared_up(x)))
        for i in kept.nonzero().flatten().tolist():
            token, expert = i // TOPK, ids.flatten()[i]
            row = _swiglu(x[token] @ one.up[expert]) @ one.down[expert]
            expected[token] += scores.flatten()[i] * row
    if len(x):
        assert_close_in_norm(out.cpu(), expected, 1e-5)
    assert layer.num_dropped == (~kept).sum()
    with torch.no_grad():
        layer(tokens)
    assert layer.num_dropped == 2 * (~kept).sum()


def _swiglu(x):
    gate, value = x.chunk(2, -1)
    return torch.nn.functional.silu(gate) * value


def check_what_is_not_waited_for(group):
    """An AsyncCollectiveTensor goes into any op, which reads it when it has come."""
    device = device_of(group)

    def summed(x):
        return collectives.all_reduce(x.to(device), "sum", group)

    torch.manual_seed(0)
    probs, tokens = torch.rand(50, EXPERTS), torch.randn(50, HIDDEN)
    ids = probs.topk(TOPK).indices
    kind = type(summed(tokens))
    assert kind.__name__ == "AsyncCollectiveTensor"
    world = group.size()
    order, counts, _ = expert_permutation(summed(ids) // world, EXPERTS)
    expected, expected_counts, _ = expert_permutation(ids, EXPERTS)
    assert torch.equal(order.cpu(), expected) and torch.equal(counts.cpu(), expected_counts)
    own = expected.to(device)
    rows = permute(summed(tokens), own, TOPK)
    assert_same_bits(rows, permute(tokens.to(device) * world, own, TOPK))
    back = weighted_restore(summed(rows), summed(probs[:, :TOPK]), own)
    scores = (probs[:, :TOPK] * world).to(device)
    assert_same_bits(back, weighted_restore(rows * world, scores, own))
    loss = aux_loss(summed(probs), expected_counts.to(device), 50, EXPERTS, TOPK, 1.0)
    scaled = (probs * world).to(device)
    exact = aux_loss(scaled, expected_counts.to(device), 50, EXPERTS, TOPK, 1.0)
    assert_same_bits(loss, exact)


def check_bias_of_all_ranks(group):
    _, layer = make(group, expert_bias=True)
    x = inputs(group.size())[group.rank()].to(device_of(group))
    out, _, counts = layer(x)
    out.sum().backward()
    total = counts.clone()
    dist.all_reduce(total, group=group)
    layer.update_expert_bias(0.5)
    under = total.sum() - total * EXPERTS
    assert torch.equal(layer.router.expert_bias, 0.5 * under.sign())


def check_refusals_come_before_collectives(group):
    _, layer = make(group)
    layer.up.data = layer.up.data.to(torch.float8_e4m3fn)
    if group.rank() == 0:
        # The others call nothing: a collective here would wait for them.
        with pytest.raises(TypeError, match="got float8_e4m3fn, which no combine"):
            layer(torch.randn(4, HIDDEN, device=device_of(group)))
        with pytest.raises(ValueError, match="x must be of shape"):
            layer(torch.randn(4, HIDDEN + 1, device=device_of(group)))


def check_a_rank_that_receives_nothing(group):
    for capacity in (None, MAX_TOKENS):
        one, _ = make(aux_loss_coeff=0.0)
        with torch.no_grad():
            one.router.weight[TOPK:] = 0.0
            one.router.weight[:TOPK] = torch.tensor([1.0, 0.9])[:, None]
        options = {"aux_loss_coeff": 0.0, "rank_capacity": capacity}
        layer = spread(one, group, device_of(group), **options)
        x = inputs(group.size())[group.rank()].abs().to(device_of(group))
        out, _, counts = layer(x)
        assert counts[TOPK:].sum() == 0
        out.square().sum().backward()
        assert (layer.up.grad.norm() > 0) == (group.rank() == 0)
        if len(x):
            assert_close_in_norm(out.cpu(), one(x.cpu())[0], 1e-5)


def check_capture(group):
    """Of the fixed capacity: no sync, and a graph that is replayed on new tokens."""
    if device_of(group) == "cpu":
        return
    capacity = 32
    one, _ = make(dtype=torch.bfloat16)
    layer = spread(one, group, device_of(group), rank_capacity=capacity, dtype=torch.bfloat16)
    x = torch.zeros(MAX_TOKENS, HIDDEN, device=device_of(group), dtype=torch.bfloat16)

    def step():
        layer.zero_grad(set_to_none=True)
        out, loss, _ = layer(x)
        (out.float().square().mean() + loss).backward()
        return out

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    gradients = [p.grad for p in layer.parameters()]
    layer.num_dropped.zero_()
    for seed in range(3):
        generator = torch.Generator().manual_seed(100 * seed + group.rank())
        x.copy_(torch.randn(MAX_TOKENS, HIDDEN, generator=generator))
        graph.replay()
        replayed = [captured.clone(), *(g.clone() for g in gradients)]
        expected = [step(), *(p.grad for p in layer.parameters())]
        for actual, exact in zip(replayed, expected, strict=True):
            assert_same_bits(actual, exact)
    # By the replays and by the steps beside them.
    assert layer.num_dropped > 0 and layer.num_dropped % 2 == 0


def check_inputs_of_which_some_need_a_gradient(group):
    for capacity, score_apply in itertools.product((None, MAX_TOKENS), ("post", "activation")):
        options = {"score_apply": score_apply}
        one, _ = make(**options)
        layer = spread(one, group, device_of(group), rank_capacity=capacity, **options)
        x = inputs(group.size())[group.rank()].to(device_of(group))
        out, loss, _ = layer(x.requires_grad_(group.rank() == 0))
        (out.sum() + loss).backward()
        assert layer.up.grad.norm() > 0


def check_copies(group):
    _, layer = make(group)
    x = inputs(group.size())[group.rank()].to(device_of(group))
    expected = layer(x)[0]
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert_same_bits(twin(x)[0], expected)


def check_ranks_of_one_seed_start_as_one_layer(group):
    torch.manual_seed(3)
    one = MoE(HIDDEN, 24, EXPERTS, TOPK, MAX_TOKENS)
    torch.manual_seed(3)
    layer = MoE(HIDDEN, 24, EXPERTS, TOPK, MAX_TOKENS, process_group=group)
    for name in ("router.weight", "up", "down"):
        whole, own = one.get_parameter(name), layer.get_parameter(name)
        own_part = whole if name == "router.weight" else whole.chunk(group.size())[group.rank()]
        assert torch.equal(own, own_part), name


def check_a_group_of_others_is_refused(group):
    other = dist.new_group([0])
    if group.rank() != 0:
        with pytest.raises(ValueError, match="process_group must be a group with this rank, got"):
            MoE(HIDDEN, 24, EXPERTS, TOPK, MAX_TOKENS, process_group=other)
        _, layer = make(group, expert_bias=True)
        with pytest.raises(ValueError, match="group must be a group with this rank, got one"):
            layer.update_expert_bias(group=other)


CHECKS = [
    check_ranks_of_one_seed_start_as_one_layer,
    check_a_group_of_others_is_refused,
    check_transports,
    check_a_step,
    check_recomputation,
    check_compiled,
    check_overflow,
    check_what_is_not_waited_for,
    check_bias_of_all_ranks,
    check_refusals_come_before_collectives,
    check_a_rank_that_receives_nothing,
    check_inputs_of_which_some_need_a_gradient,
    check_copies,
    check_capture,
]


@functools.cache
def outcomes(world_size, backend="gloo"):
    return run_checks(world_size, CHECKS, backend)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("world_size", [2, 4])
def test_on_the_cpu(check, world_size):
    assert outcomes(world_size).get(check.__name__, "did not run") == ""


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_two_gpus(check):
    assert outcomes(2, "nccl").get(check.__name__, "did not run") == ""


def test_what_is_no_group():
    with pytest.raises(TypeError, match="process_group must be a ProcessGroup, got int"):
        MoE(HIDDEN, 24, EXPERTS, TOPK, MAX_TOKENS, process_group=3)


def test_what_goes_with_no_group():
    with pytest.raises(ValueError, match="rank_capacity must be None without a process_group, got"):
        MoE(HIDDEN, 24, EXPERTS, TOPK, MAX_TOKENS, rank_capacity=4)
