"""expert_permutation_from_map."""

import pytest
import torch
from torch.library import opcheck

from moe_custom_ops import (
    expert_permutation,
    expert_permutation_from_map,
    expert_permutation_workspace_size,
    make_workspace,
)
from moe_custom_ops.op import registered
from moe_custom_ops.permutation import plans, reference
from moe_custom_ops.permutation.arguments import check_map
from tests.compiling import compile_fresh, graphs


def draw(num_tokens, num_experts, topk=3, seed=0):
    """Rows that have from none to more than ``topk`` experts set."""
    generator = torch.Generator().manual_seed(seed)
    share = topk / num_experts
    return torch.rand(num_tokens, num_experts, generator=generator) < share


def ids_by_hand(routing_map, topk):
    rows = [row.nonzero().flatten().tolist()[:topk] for row in routing_map.cpu()]
    ids = [row + [-1] * (topk - len(row)) for row in rows]
    return torch.tensor(ids, dtype=torch.int64).view(len(rows), topk)


def check(results, routing_map, topk, *arguments):
    ids = ids_by_hand(routing_map, topk)
    expected = torch.ops.moe.expert_permutation(ids, routing_map.shape[1], *arguments)
    for actual, exact in zip(results, expected, strict=True):
        assert torch.equal(actual.cpu(), exact)


@pytest.mark.parametrize(("num_tokens", "num_experts"), [(0, 4), (1, 1), (60, 7), (300, 300)])
def test_values(num_tokens, num_experts):
    routing_map = draw(num_tokens, num_experts)
    topk = min(3, num_experts)
    check(expert_permutation_from_map(routing_map, topk, 4), routing_map, topk, 4)
    check(expert_permutation_from_map(routing_map, topk, 1, 50), routing_map, topk, 1, 50)


def test_a_full_map_is_what_topk_makes_of_it():
    ids = torch.rand(50, 9, generator=torch.Generator().manual_seed(0)).topk(4).indices
    routing_map = torch.zeros(50, 9, dtype=torch.bool).scatter_(1, ids, True)
    expected = expert_permutation(ids.sort(dim=1).values, 9)
    for actual, exact in zip(expert_permutation_from_map(routing_map, 4), expected, strict=True):
        assert torch.equal(actual, exact)


@pytest.mark.parametrize("given", [False, True])
def test_opcheck(given):
    workspace = make_workspace(expert_permutation_workspace_size(20, 3, 8), "cpu")
    call = (draw(20, 8), 3, 4, None, workspace if given else None)
    opcheck(torch.ops.moe.expert_permutation_from_map.default, call)
    inner = 8, 3, 4, 20
    if given:
        opcheck(torch.ops.moe.order_in.default, (call[0], workspace, *inner))
    else:
        opcheck(torch.ops.moe.order.default, (call[0], *inner))


def test_one_graph_for_all_token_counts():
    compiled = compile_fresh(lambda x: expert_permutation_from_map(x, 3, 4))
    for num_tokens in (2, 3, 16, 65, 200):
        routing_map = draw(num_tokens, 8)
        check(compiled(routing_map), routing_map, 3, 4)
    assert graphs() == 1


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"routing_map": torch.ones(6, 4)}, TypeError, "routing_map must be bool, got float32"),
        ({"routing_map": torch.ones(6).bool()}, ValueError, r"routing_map must be of shape \[T, E"),
        ({"routing_map": torch.ones(6, 0).bool()}, ValueError, "E from 1 to 4096, got"),
        (
            {"routing_map": torch.nested.nested_tensor([torch.ones(2) > 0, torch.ones(1) > 0])},
            ValueError,
            "routing_map must be a dense tensor, got nested",
        ),
        ({"topk": 5}, ValueError, "topk must be at most E = 4, got 5"),
        ({"topk": 0}, ValueError, "topk must be at least 1, got 0"),
        ({"alignment": 0}, ValueError, "alignment must be at least 1, got 0"),
        ({"num_rows": -1}, ValueError, "num_rows must be at least 0, got -1"),
    ],
)
def test_bad_input(change, error, message):
    call = {"routing_map": torch.ones(6, 4).bool(), "topk": 2, **change}
    for op in (expert_permutation_from_map, torch.ops.moe.expert_permutation_from_map):
        with pytest.raises(error, match=f"expert_permutation_from_map: .*{message}"):
            op(**call)
    with pytest.raises(TypeError, match="from_map: routing_map must be a Tensor, got list"):
        expert_permutation_from_map([[True]], 1)


@pytest.mark.kernels
@pytest.mark.parametrize(("num_tokens", "num_experts"), [(0, 4), (1, 1), (70, 7), (50, 300)])
@pytest.mark.parametrize("topk", [1, 3, 8])
def test_the_direct_path(num_tokens, num_experts, topk, launched, kernel_device):
    topk = min(topk, num_experts)
    routing_map = draw(num_tokens, num_experts, topk)
    views = (routing_map, routing_map.t().contiguous().t(), routing_map.repeat(1, 2)[:, ::2])
    for own in views:
        own = own.to(kernel_device)
        for _ in range(2 if own is views[0] else 1):
            launched.clear()
            check(expert_permutation_from_map(own, topk, 2), own, topk, 2)
            assert launched[0] == "_count_map_kernel" and len(launched) == 3


@pytest.mark.kernels
@pytest.mark.parametrize("num_experts", [40, 4096])
@pytest.mark.parametrize("given", [False, True])
def test_the_cuda_implementation(num_experts, given, launched, kernel_device, monkeypatch):
    """Tiles of whole tokens of 5, a block of which is a part of a tile."""
    monkeypatch.setattr(reference, "MAX_TILES", 3)
    monkeypatch.setattr(plans, "MAP_BLOCK", 512)
    routing_map = draw(90, num_experts, 5)
    workspace = None
    if given:
        size = expert_permutation_workspace_size(90, 5, num_experts)
        workspace = make_workspace(size, kernel_device).fill_(255)
    num_rows = check_map(routing_map, 5, 4, None, None)
    own, run = routing_map.to(kernel_device), registered(plans.order, 2, 4)
    check(run(own, workspace, num_experts, 5, 4, num_rows), routing_map, 5, 4)
    assert len(launched) == 3
