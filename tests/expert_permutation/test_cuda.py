"""expert_permutation on a GPU: the op against the CPU, compiled and captured."""

import pytest
import torch
from torch._dynamo.utils import counters
from torch.library import opcheck

from moe_custom_ops import (
    expert_permutation,
    expert_permutation_workspace_size,
    make_workspace,
)
from tests.compiling import compile_fresh

pytestmark = pytest.mark.cuda


def draw(num_tokens, topk, num_experts, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, num_experts + 1, (num_tokens, topk), generator=generator)


def check(results, expert_ids, *arguments):
    expected = torch.ops.moe.expert_permutation(expert_ids.cpu(), *arguments)
    for actual, exact in zip(results, expected, strict=True):
        assert torch.equal(actual.cpu(), exact)


@pytest.mark.parametrize(
    ("num_tokens", "topk", "num_experts", "alignment"),
    [
        (8192, 8, 128, 1),
        (4096, 8, 256, 128),
        (256, 8, 128, 16),
        (100_003, 3, 7, 1),
        (5000, 8, 4096, 8),
        (2**21, 2, 1, 1),
        (2**20 + 1, 4, 2304, 1),
    ],
)
def test_it_has_the_order_of_the_cpu(num_tokens, topk, num_experts, alignment):
    ids = draw(num_tokens, topk, num_experts)
    check(
        torch.ops.moe.expert_permutation(ids.cuda(), num_experts, alignment),
        ids,
        num_experts,
        alignment,
    )
    for _ in range(3):
        check(expert_permutation(ids.cuda(), num_experts, alignment), ids, num_experts, alignment)


def test_2_28_assignments():
    """Against counts and a few rows: the CPU would sort for a minute."""
    num_experts = 64
    ids = torch.arange(2**28, device="cuda", dtype=torch.int32).mul_(7919).remainder_(num_experts)
    order, counts, offsets = expert_permutation(ids.view(-1, 8), num_experts)
    assert torch.equal(counts, ids.view(-1, 2**14).long().flatten().bincount(minlength=64))
    assert torch.equal(offsets.long(), counts.cumsum(0))
    for e in (0, 17, 63):
        start, end = int(offsets[e] - counts[e]), int(offsets[e])
        own = order[start:end]
        assert (ids[own.long()] == e).all() and (own[1:] > own[:-1]).all()


@pytest.mark.parametrize("given", [False, True])
def test_opcheck(given):
    ids = draw(50, 3, 8).cuda()
    size = expert_permutation_workspace_size(50, 3, 8)
    workspace = make_workspace(size, "cuda") if given else None
    opcheck(torch.ops.moe.expert_permutation.default, (ids, 8, 4, None, workspace))


def test_reduce_overhead_skips_no_cuda_graph():
    workspace = make_workspace(expert_permutation_workspace_size(500, 3, 8), "cuda")

    def both(ids):
        first = expert_permutation(ids, 8, 4, None, workspace)
        return *first, *expert_permutation(ids + 1, 8)

    compiled = compile_fresh(both, mode="reduce-overhead")
    for num_tokens in (500, 500, 500, 77, 77):
        ids = draw(num_tokens, 3, 8, seed=num_tokens).cuda()
        torch.compiler.cudagraph_mark_step_begin()
        results = [x.clone() for x in compiled(ids)]
        check(results[:3], ids, 8, 4)
        check(results[3:], ids + 1, 8)
    assert counters["inductor"]["cudagraph_skips"] == 0


def test_captured_replay_reads_new_ids():
    static = draw(1000, 4, 60).cuda()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        expert_permutation(static, 60, 8)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = expert_permutation(static, 60, 8)
    for seed in range(3):
        ids = draw(1000, 4, 60, seed)
        static.copy_(ids)
        graph.replay()
        check(results, ids, 60, 8)


def test_nothing_waits_for_the_device():
    ids = draw(1000, 4, 60).cuda()
    expert_permutation(ids, 60)
    torch.cuda.set_sync_debug_mode("error")
    try:
        expert_permutation(ids, 60)
        torch.ops.moe.expert_permutation(ids, 60, 8)
    finally:
        torch.cuda.set_sync_debug_mode("default")
