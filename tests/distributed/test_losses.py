"""The losses over 1, 2, 4 and 8 ranks against one process, bit for bit."""

import functools
import itertools

import pytest
import torch
import torch.distributed as dist

import moe_custom_ops as m
from moe_custom_ops.distributed import (
    aux_loss,
    running_aux_loss,
    sequence_aux_loss,
    tile_tokens,
)
from moe_custom_ops.testing import assert_same_bits, make_probs
from tests.compiling import compile_fresh, graphs
from tests.ranks import run_checks

EXPERTS, TOPK, COEFF = 64, 2, 1e-2
TILE = tile_tokens(EXPERTS)
TILES = 11


def device_of(group):
    return torch.device("cuda", group.rank()) if dist.get_backend(group) == "nccl" else "cpu"


def share(num_tiles, num_tokens, size):
    """Bounds of each rank's tokens: unequal numbers of whole tiles, the last rank with any a part.

    With four ranks or more, the second and the last one are empty.
    """
    ranks = [r for r in range(size) if size < 4 or r not in (1, size - 1)]
    cuts = [0]
    for rank in range(size):
        place = sum(r <= rank for r in ranks)
        own = num_tiles if place == len(ranks) else num_tiles * place**2 // len(ranks) ** 2
        cuts.append(min(own * TILE, num_tokens) if rank in ranks else cuts[-1])
    return list(itertools.pairwise(cuts))


@functools.cache
def batch(dtype=torch.float32, num_tokens=TILES * TILE - 5):
    probs, _ = make_probs(num_tokens, EXPERTS, dtype=dtype)
    ids = probs.float().topk(TOPK).indices
    return probs, ids, torch.arange(num_tokens) % 7 != 3


def counts_of(ids, mask=None):
    return torch.bincount(ids[mask].flatten() if mask is not None else ids.flatten(), minlength=64)


def loss_and_gradient(function, probs):
    leaf = probs.clone().requires_grad_()
    loss = function(leaf)
    (3.0 * loss).backward()
    return loss.detach(), leaf.grad


def one_process(probs, ids, mask=None):
    counts, total = counts_of(ids, mask), probs.shape[0] if mask is None else int(mask.sum())
    return loss_and_gradient(
        lambda p: m.aux_loss(p, counts, total, EXPERTS, TOPK, COEFF, token_mask=mask), probs
    )


def own_part(group, masked=False, dtype=torch.float32):
    probs, ids, mask = batch(dtype)
    start, end = share(TILES, probs.shape[0], group.size())[group.rank()]
    own = slice(start, end)
    mask = mask[own] if masked else None
    counts = counts_of(ids[own], mask)
    total = end - start if mask is None else int(mask.sum())
    device = device_of(group)
    place = [x if x is None else x.to(device) for x in (probs[own], counts, mask)]
    return *place, total, own


def check_the_loss_of_one_process(group):
    for dtype, masked in itertools.product(
        (torch.float32, torch.bfloat16, torch.float64), (False, True)
    ):
        whole, ids, mask = batch(dtype)
        expected, gradient = one_process(whole, ids, mask if masked else None)
        probs, counts, mask, total, own = own_part(group, masked, dtype)
        before = counts.clone()
        totals = (total, torch.tensor(total, device=probs.device, dtype=torch.int32))
        for given, max_tokens in itertools.product(totals, (None, whole.shape[0])):
            options = {"token_mask": mask, "max_tokens": max_tokens}
            loss, grad = loss_and_gradient(
                lambda p, t=given, o=options, c=counts: aux_loss(
                    p, c, t, EXPERTS, TOPK, COEFF, group, **o
                ),
                probs,
            )
            assert_same_bits(loss, expected, f"loss of {dtype}")
            assert_same_bits(grad, gradient[own], f"gradient of {dtype}")
        assert torch.equal(counts, before)


def check_the_share_of_a_rank(group):
    whole, ids, _ = batch()
    expected, gradient = one_process(whole, ids)
    probs, counts, _, total, own = own_part(group)
    loss, grad = loss_and_gradient(
        lambda p: aux_loss(p, counts, total, EXPERTS, TOPK, COEFF, group, reduction="partial"),
        probs,
    )
    assert_same_bits(grad, gradient[own])
    shares = [torch.empty_like(loss) for _ in range(group.size())]
    dist.all_gather(shares, loss)
    torch.testing.assert_close(torch.stack(shares).sum().cpu(), expected, rtol=1e-6, atol=0)
    own_share = (COEFF * EXPERTS / TOPK / len(whole) ** 2) * (
        probs.double().cpu() * counts_of(ids)
    ).sum()
    torch.testing.assert_close(loss.double().cpu(), own_share, rtol=1e-6, atol=0)


def check_one_graph_compiled(group):
    workspace = m.make_workspace(m.aux_loss_workspace_size(TILES * TILE, EXPERTS), device_of(group))

    def both(probs, counts, total):
        arguments = probs, counts, total, EXPERTS, TOPK, COEFF, group, workspace
        return aux_loss(*arguments), aux_loss(*arguments, reduction="partial")

    def pick(function, place, probs, counts, total):
        return loss_and_gradient(lambda p: function(p, counts, total)[place], probs)

    compiled = compile_fresh(both, "aot_eager")
    whole, ids, _ = batch()
    probs, counts, _, total, own = own_part(group)
    for num_tokens, place in itertools.product((TILE, 2 * TILE, 2 * TILE + 5), range(2)):
        few = whole[:num_tokens].to(probs.device)
        call = few, counts_of(ids[:num_tokens]).to(probs.device), num_tokens
        for a, b in zip(pick(compiled, place, *call), pick(both, place, *call), strict=True):
            assert_same_bits(a, b)
    assert graphs() == 1
    expected, gradient = one_process(whole, ids)
    loss, grad = loss_and_gradient(lambda p: compiled(p, counts, total)[0], probs)
    assert_same_bits(loss, expected)
    assert_same_bits(grad, gradient[own])


def check_compiled_by_inductor(group):
    whole, ids, _ = batch()
    expected, gradient = one_process(whole, ids)
    probs, counts, _, total, own = own_part(group)
    compiled = compile_fresh(
        lambda p, c: aux_loss(p, c, total, EXPERTS, TOPK, COEFF, group, max_tokens=TILES * TILE)
    )
    loss, grad = loss_and_gradient(lambda p: compiled(p, counts), probs)
    assert_same_bits(loss, expected)
    assert_same_bits(grad, gradient[own])


def check_running_counts(group):
    whole, ids, _ = batch()
    probs, counts, _, total, own = own_part(group)
    device = probs.device
    running = torch.zeros(EXPERTS, dtype=torch.int64, device=device)
    one_running = torch.zeros(EXPERTS, dtype=torch.int64)
    for step in range(3):
        shifted = (ids + step) % EXPERTS
        one_running += counts_of(shifted)
        mean = one_running.double() / (step + 1)
        expected, gradient = loss_and_gradient(
            lambda p, c=mean: m.aux_loss(p, c, len(whole), EXPERTS, TOPK, COEFF), whole
        )
        counts = counts_of(shifted[own]).to(device)
        before = running.clone()
        for number in (step, torch.tensor([step], device=device)):
            loss, grad = loss_and_gradient(
                lambda p, c=counts, r=running, n=number: running_aux_loss(
                    p, c, total, EXPERTS, TOPK, COEFF, group, r, n
                )[0],
                probs,
            )
            assert_same_bits(loss, expected)
            assert_same_bits(grad, gradient[own])
        result = running_aux_loss(probs, counts, total, EXPERTS, TOPK, COEFF, group, running, step)
        assert torch.equal(running, before)
        running = result[1]
        assert torch.equal(running.cpu(), one_running)


SEQUENCES = 3


def sequence_batch(masked):
    num_tokens = TILES * TILE - 5
    probs, _ = make_probs(SEQUENCES * num_tokens, EXPERTS, seed=1)
    probs = probs.view(SEQUENCES, num_tokens, EXPERTS)
    ids = probs.topk(TOPK).indices
    mask = (torch.arange(SEQUENCES * num_tokens) % 5 != 1).view(SEQUENCES, -1) if masked else None
    return probs, ids, mask


def sequence_counts(ids, mask):
    masks = [None] * len(ids) if mask is None else mask
    return torch.stack([counts_of(own, rows) for own, rows in zip(ids, masks, strict=True)])


def check_sequences(group):
    device = device_of(group)
    for masked in (False, True):
        whole, ids, mask = sequence_batch(masked)
        expected, gradient = loss_and_gradient(
            lambda p, i=ids, k=mask: m.sequence_aux_loss(
                p, sequence_counts(i, k), TOPK, COEFF, token_mask=k
            ),
            whole,
        )
        start, end = share(TILES, whole.shape[1], group.size())[group.rank()]
        own = slice(start, end)
        own_mask = None if mask is None else mask[:, own]
        counts = sequence_counts(ids[:, own], own_mask).to(device)
        own_mask = None if own_mask is None else own_mask.to(device)
        for reduction in ("global", "partial"):
            loss, grad = loss_and_gradient(
                lambda p, c=counts, k=own_mask, r=reduction: sequence_aux_loss(
                    p, c, TOPK, COEFF, group, token_mask=k, reduction=r
                ),
                whole[:, own].to(device),
            )
            assert_same_bits(grad, gradient[:, own])
            if reduction == "global":
                assert_same_bits(loss, expected)
            else:
                dist.all_reduce(loss)
                torch.testing.assert_close(loss.cpu(), expected, rtol=1e-6, atol=0)


def check_packs(group):
    """Sequences of odd lengths, whole ones on each rank, or of whole tiles on several."""
    device, size = device_of(group), group.size()
    lengths = torch.tensor([70, 0, 2 * TILE, 33, 3 * TILE + 9, 1])
    probs, _ = make_probs(int(lengths.sum()), EXPERTS, seed=2)
    ids = probs.topk(TOPK).indices
    ends = lengths.cumsum(0)
    starts = ends - lengths
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), ends])
    mask = torch.arange(len(probs)) % 5 != 1
    # Of sequence 4, every rank up to the third holds a tile and the next one the rest.
    parts = [[] for _ in range(size)]
    for b, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        for rank in range(size):
            own = (start, end) if rank == b % size else (start, start)
            if b == 4 and size > 1:
                cuts = [min(start + r * TILE, end) for r in range(size)] + [end]
                own = (cuts[rank], cuts[rank + 1])
            parts[rank].append(torch.arange(*own))
    for masked in (False, True):
        whole_mask = mask if masked else None
        of_sequences = [torch.arange(a, b) for a, b in zip(starts, ends, strict=True)]

        def counts(places, keep=whole_mask):
            kept = [p if keep is None else p[keep[p]] for p in places]
            return torch.stack([counts_of(ids[p]) for p in kept])

        whole_counts = counts(of_sequences)
        expected, gradient = loss_and_gradient(
            lambda p, k=whole_mask, c=whole_counts: m.sequence_aux_loss(
                p, c, TOPK, COEFF, cu_seqlens, k
            ),
            probs,
        )
        own = parts[group.rank()]
        places = torch.cat(own)
        own_cu = torch.tensor([0, *torch.tensor([len(p) for p in own]).cumsum(0)])
        own_mask = None if whole_mask is None else whole_mask[places].to(device)
        call = functools.partial(
            sequence_aux_loss,
            tokens_per_expert=counts(own).to(device),
            topk=TOPK,
            coeff=COEFF,
            group=group,
            cu_seqlens=own_cu.int().to(device),
            token_mask=own_mask,
        )
        loss, grad = loss_and_gradient(call, probs[places].to(device))
        assert_same_bits(loss, expected)
        assert_same_bits(grad, gradient[places])
        _, grad = loss_and_gradient(
            lambda p, call=call: call(p, reduction="partial"), probs[places].to(device)
        )
        assert_same_bits(grad, gradient[places])


def check_sequences_compiled(group):
    device = device_of(group)
    whole, ids, _ = sequence_batch(False)
    expected, gradient = loss_and_gradient(
        lambda p: m.sequence_aux_loss(p, sequence_counts(ids, None), TOPK, COEFF), whole
    )
    start, end = share(TILES, whole.shape[1], group.size())[group.rank()]
    own = slice(start, end)
    counts = sequence_counts(ids[:, own], None).to(device)
    compiled = compile_fresh(lambda p, c: sequence_aux_loss(p, c, TOPK, COEFF, group), "aot_eager")
    loss, grad = loss_and_gradient(lambda p: compiled(p, counts), whole[:, own].to(device))
    assert_same_bits(loss, expected)
    assert_same_bits(grad, gradient[:, own])


def check_equal_messages_of_one_rank_stay_two(group):
    """One rank, without tokens, has the same counts for two layers: its graph has two messages."""
    device, start = device_of(group), group.rank() == 0
    num_tokens = 0 if start else TILE
    probs = [torch.rand(num_tokens, EXPERTS, device=device).requires_grad_() for _ in range(2)]
    counts = [counts_of(p.topk(TOPK).indices.cpu()).to(device) for p in probs]
    counts = [counts[0], counts[0]] if start else counts
    for reduction in ("global", "partial"):

        def layers(first, second, n, m, reduction=reduction):
            call = functools.partial(aux_loss, group=group, reduction=reduction)
            numbers = EXPERTS, TOPK, COEFF
            return call(first, n, len(first), *numbers), call(second, m, len(second), *numbers)

        expected = layers(*probs, *counts)
        # Every rank compiles its own C++, for which eight of them take minutes.
        for backend in ("aot_eager", "inductor")[: 2 if group.size() <= 2 else 1]:
            actual = compile_fresh(layers, backend)(*probs, *counts)
            for a, b in zip(actual, expected, strict=True):
                assert_same_bits(a, b)


def check_one_graph_for_all_numbers_of_sequences(group):
    device = device_of(group)
    compiled = compile_fresh(lambda p, c: sequence_aux_loss(p, c, TOPK, COEFF, group), "aot_eager")
    for num_sequences in range(2, 14):
        generator = torch.Generator().manual_seed(num_sequences)
        probs = torch.rand(num_sequences, 12, EXPERTS, generator=generator).to(device)
        counts = torch.ones(num_sequences, EXPERTS, dtype=torch.int64, device=device)
        call = probs, counts
        expected = sequence_aux_loss(*call, TOPK, COEFF, group)
        assert_same_bits(compiled(*call), expected)
    assert graphs() == 1


def check_no_token_anywhere(group):
    device = device_of(group)
    probs = torch.rand(0, EXPERTS, device=device)
    counts = torch.zeros(EXPERTS, dtype=torch.int32, device=device)
    for reduction in ("global", "partial"):
        loss, grad = loss_and_gradient(
            lambda p, r=reduction: aux_loss(p, counts, 0, EXPERTS, TOPK, COEFF, group, reduction=r),
            probs,
        )
        assert loss == 0 and grad.shape == (0, EXPERTS)


def check_capture(group):
    """With NCCL: no sync, one graph, replayed on other tokens, counts and totals."""
    if device_of(group) == "cpu":
        return
    whole, ids, _ = batch()
    probs, counts, _, total, own = own_part(group)
    total = torch.tensor(total, device=probs.device)
    leaf = probs.clone().requires_grad_()

    def step(loss_of_call):
        leaf.grad = None
        loss = loss_of_call()
        (3.0 * loss).backward()
        return loss.detach(), leaf.grad

    def of_aux_loss(**options):
        return aux_loss(leaf, counts, total, EXPERTS, TOPK, COEFF, group, **options)

    def of_sequences():
        return sequence_aux_loss(leaf[None], counts[None], TOPK, COEFF, group)

    calls = (
        of_aux_loss,
        lambda: of_aux_loss(reduction="partial"),
        lambda: of_aux_loss(max_tokens=len(whole)),
        of_sequences,
    )
    for call in calls:
        counts.copy_(counts_of(ids[own]))
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step(call)
            torch.cuda.set_sync_debug_mode("error")
            try:
                step(call)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step(call)
        for shift in (0, 1):
            moved = (ids + shift) % EXPERTS
            counts.copy_(counts_of(moved[own]))
            graph.replay()
            replayed = [x.clone() for x in captured]
            for actual, exact in zip(replayed, step(call), strict=True):
                assert_same_bits(actual, exact)
            if call is of_aux_loss:
                expected, gradient = one_process(whole, moved)
                assert_same_bits(replayed[0], expected)
                assert_same_bits(replayed[1], gradient[own])


CHECKS = [
    check_the_loss_of_one_process,
    check_the_share_of_a_rank,
    check_one_graph_compiled,
    check_compiled_by_inductor,
    check_running_counts,
    check_sequences,
    check_packs,
    check_sequences_compiled,
    check_equal_messages_of_one_rank_stay_two,
    check_one_graph_for_all_numbers_of_sequences,
    check_no_token_anywhere,
    check_capture,
]


def checks_of(world_size):
    return [c for c in CHECKS if world_size <= 2 or c is not check_compiled_by_inductor]


@functools.cache
def outcomes(world_size, backend="gloo", **environment):
    return run_checks(world_size, checks_of(world_size), backend, **environment)


@pytest.mark.parametrize(
    ("world_size", "check"),
    [(size, check) for size in (1, 2, 4, 8) for check in checks_of(size)],
    ids=lambda value: value if isinstance(value, int) else value.__name__,
)
def test_on_the_cpu(world_size, check):
    assert outcomes(world_size).get(check.__name__, "did not run") == ""


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("algorithm", ["Ring", "Tree"])
def test_on_two_gpus(check, algorithm):
    # NCCL has trees for all-reduces alone, and with "Tree" for all it refuses to gather.
    setting = {"Ring": "ring", "Tree": "ring;allreduce:tree"}[algorithm]
    assert outcomes(2, "nccl", NCCL_ALGO=setting).get(check.__name__, "did not run") == ""
