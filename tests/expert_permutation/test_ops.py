"""expert_permutation on the CPU: its rules, its errors, opcheck."""

import math

import pytest
import torch
from torch.library import opcheck

from moe_custom_ops import (
    expert_permutation,
    expert_permutation_workspace_size,
    make_workspace,
)
from moe_custom_ops.permutation import plans, reference
from moe_custom_ops.permutation.arguments import worst_case_rows


def by_hand(expert_ids, num_experts, alignment, num_rows):
    """The rules, one assignment after the other."""
    groups = [[] for _ in range(num_experts)]
    for assignment, expert in enumerate(expert_ids.flatten().tolist()):
        if 0 <= expert < num_experts:
            groups[expert].append(assignment)
    order, ends = [], []
    for group in groups:
        order += group + [-1] * (-len(group) % alignment)
        ends.append(min(len(order), num_rows))
    order = (order + [-1] * num_rows)[:num_rows]
    return order, [len(group) for group in groups], ends


def check(results, expert_ids, num_experts, alignment=1, num_rows=None):
    if num_rows is None:
        num_rows = worst_case_rows(expert_ids.numel(), num_experts, alignment)
    expected = by_hand(expert_ids, num_experts, alignment, num_rows)
    assert [x.dtype for x in results] == [torch.int32, torch.int64, torch.int32]
    assert tuple(x.tolist() for x in results) == expected


def test_no_choice_needs_more_than_the_worst_case():
    for num_experts, alignment in ((1, 1), (3, 1), (3, 4), (8, 5)):
        for num_tokens in (0, 1, 2, 7):
            ids = torch.arange(num_tokens)[:, None] % num_experts
            order, counts, offsets = expert_permutation(ids, num_experts, alignment)
            assert offsets[-1] <= order.numel() and counts.sum() == num_tokens
            assert sorted(order[order >= 0].tolist()) == list(range(num_tokens))
            assert order.numel() % alignment == 0


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_leading_shapes_and_strides(dtype):
    ids = torch.randint(0, 5, (4, 6, 2), generator=torch.Generator().manual_seed(0)).to(dtype)
    for view in (ids, ids[:, ::2], ids.transpose(0, 1), ids[0], ids[0, 0], ids[:0]):
        check(expert_permutation(view, 5, 2), view, 5, 2)


def test_the_worst_case_is_that_of_the_groups_that_there_can_be():
    """One assignment has one group, however many experts there are."""
    order, _, offsets = expert_permutation(torch.tensor([[0]]), 4096, 2**20)
    assert order.shape == (2**20,) and offsets[-1] == 2**20


def test_ids_that_do_not_fit_32_bits_are_dropped():
    ids = torch.tensor([[2**32, 1], [-(2**32) + 1, 2**40 + 1]])
    check(expert_permutation(ids, 4), ids, 4)


def test_sizes_of_the_workspace():
    """Below 32 MB whatever the input, and never less for fewer tokens."""
    assert expert_permutation_workspace_size(2**25, 8, 4096) < 2**25
    assert expert_permutation_workspace_size(2**25, 8, 1) < 2**25
    sizes = [expert_permutation_workspace_size(t, 3, 100) for t in range(0, 200_000, 977)]
    assert sizes == sorted(sizes)


@pytest.mark.parametrize("num_experts", [1, 5, 16, 4096])
@pytest.mark.parametrize("topk", [1, 3, 65, 127, 200])
@pytest.mark.parametrize("num_assignments", [0, 1, 128, 129, 2**18, 2**18 + 1, 2**28])
def test_the_workspace_holds_the_tiles_that_are_counted(num_assignments, topk, num_experts):
    num_tokens = num_assignments // topk
    size = expert_permutation_workspace_size(num_tokens, topk, num_experts)
    tile = reference.tile_size(num_tokens * topk, num_experts)
    # Of expert ids, and of a map's whole tokens.
    for own in (tile, max(tile // topk, 1) * topk):
        num_tiles = math.ceil(num_tokens * topk / own)
        assert (num_tiles + 1) * reference.bins(num_experts) * 4 <= size < 2**25
    assert tile >= reference.MIN_TILE and tile & (tile - 1) == 0


@pytest.mark.parametrize("given", [False, True])
def test_opcheck(given):
    ids = torch.randint(-1, 6, (9, 2))
    workspace = make_workspace(expert_permutation_workspace_size(9, 2, 5), "cpu") if given else None
    opcheck(torch.ops.moe.expert_permutation.default, (ids, 5, 4, None, workspace))
    if given:
        opcheck(torch.ops.moe.order_in.default, (ids, workspace, 5, 2, 4, 20))
    else:
        opcheck(torch.ops.moe.order.default, (ids, 5, 2, 4, 20))


def good():
    return {
        "expert_ids": torch.zeros(6, 2, dtype=torch.int64),
        "num_experts": 4,
        "alignment": 2,
        "num_rows": 16,
        "workspace": None,
    }


BAD_CALLS = [
    ({"expert_ids": torch.zeros(6, 2)}, TypeError, "expert_ids must be int32 or int64, got float"),
    ({"expert_ids": torch.tensor(1)}, ValueError, r"expert_ids must be of shape \[\*, K\] with K"),
    ({"expert_ids": torch.zeros(6, 0, dtype=torch.int32)}, ValueError, r"got \[6, 0\]"),
    ({"num_experts": 0}, ValueError, "num_experts must be at least 1, got 0"),
    ({"num_experts": 4097}, ValueError, "num_experts must be at most 4096, got 4097"),
    ({"alignment": 0}, ValueError, "alignment must be at least 1, got 0"),
    ({"alignment": 2**30}, ValueError, r"alignment must be such that .* got 1073741824, which ta"),
    (
        {"expert_ids": torch.nested.nested_tensor([torch.tensor([1, 2]), torch.tensor([1])])},
        ValueError,
        "expert_ids must be a dense tensor, got nested",
    ),
    ({"alignment": 2**31}, ValueError, "alignment must be less than 2\\^31, got 2147483648"),
    ({"num_rows": -1}, ValueError, "num_rows must be at least 0, got -1"),
    ({"num_rows": 2**31}, ValueError, "num_rows must be fewer than 2\\^31"),
    ({"workspace": torch.zeros(9)}, TypeError, "workspace must be uint8, got float32"),
    ({"workspace": torch.zeros(16, dtype=torch.uint8)}, ValueError, "workspace must be at least"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD_CALLS)
def test_bad_input(change, error, message):
    call = {**good(), **change}
    if call["alignment"] > 2:
        call["num_rows"] = None
    for op in (expert_permutation, torch.ops.moe.expert_permutation):
        with pytest.raises(error, match=message):
            op(**call)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"expert_ids": [[0, 1]]}, "expert_ids must be a Tensor, got list"),
        ({"num_experts": 4.0}, "num_experts must be an int, got float"),
        ({"alignment": None}, "alignment must be an int, got NoneType"),
        ({"num_rows": "9"}, "num_rows must be an int or None, got str"),
        ({"workspace": 9}, "workspace must be a Tensor, got int"),
    ],
)
def test_wrong_types(change, message):
    with pytest.raises(TypeError, match=f"expert_permutation: {message}"):
        expert_permutation(**{**good(), **change})


def test_a_batch_is_mapped():
    ids = torch.randint(-1, 5, (3, 6, 2))
    batched = torch.func.vmap(lambda x: torch.ops.moe.expert_permutation(x, 4, 2))(ids)
    for b in range(3):
        for actual, expected in zip(batched, expert_permutation(ids[b], 4, 2), strict=True):
            assert torch.equal(actual[b], expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"topk": 3}, r"routing must be of shape \[\*, topk\] = \[\*, 3\], got \[6, 2\]"),
        ({"num_experts": 5000}, "num_experts must be at most 4096, got 5000"),
        ({"alignment": 0}, "alignment must be at least 1, got 0"),
        ({"routing": torch.ones(6, 4).bool()}, r"routing must be of shape \[T, num_experts\] = "),
        ({"routing": torch.ones(2, 3, 8).bool()}, r"\[T, num_experts\] = \[T, 8\], got \[2, 3, 8"),
    ],
)
def test_the_inner_ops_check_what_they_rely_on(change, message):
    routing = torch.zeros(6, 2, dtype=torch.int64)
    call = {"routing": routing, "num_experts": 8, "topk": 2, "alignment": 1, "num_rows": 12}
    call |= change
    workspace = make_workspace(4096, "cpu")
    with pytest.raises(ValueError, match=message):
        torch.ops.moe.order(**call)
    with pytest.raises(ValueError, match=message):
        torch.ops.moe.order_in(**call, workspace=workspace)
    with pytest.raises(ValueError, match=message):
        plans.order(**call, workspace=workspace)
