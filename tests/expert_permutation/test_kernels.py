"""The kernels of expert_permutation against its reference, under the interpreter and on a GPU."""

import pytest
import torch

from moe_custom_ops import (
    expert_permutation,
    expert_permutation_from_map,
    expert_permutation_workspace_size,
    make_workspace,
)
from moe_custom_ops.op import registered
from moe_custom_ops.permutation import plans, reference
from moe_custom_ops.permutation.arguments import check_ids, num_counts
from tests.expert_permutation.test_ops import BAD_CALLS, good
from tests.poison import untouched

pytestmark = pytest.mark.kernels

KERNELS = ["_count_experts_kernel", "_scan_tiles_kernel", "_place_assignments_kernel"]


def draw(num_tokens, topk, num_experts, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, num_experts + 1, (num_tokens, topk), generator=generator)


def check(expert_ids, num_experts, device, alignment=1, num_rows=None, warps=None):
    num_rows = check_ids(expert_ids, num_experts, alignment, num_rows, None)
    arguments = num_experts, alignment, num_rows
    expected = reference.expert_permutation(expert_ids, *arguments)
    # A row more than there is, and scratch and results that hold something else.
    size = num_counts(expert_ids.numel(), num_experts)
    counts = torch.full((size + 1,), 12345, dtype=torch.int32, device=device)
    results = [torch.full((x.numel() + 1,), 12345, dtype=x.dtype, device=device) for x in expected]
    ids = expert_ids.to(device)
    launches = plans.order_launches(ids, num_experts, ids.shape[1], alignment, num_rows)
    for launch in launches:
        if warps is not None:
            launch.options["num_warps"] = warps
    count, scan, place = launches
    count(ids, counts, results[0])
    scan(counts)
    place(ids, counts, *results)
    for actual, exact in zip(results, expected, strict=True):
        assert torch.equal(actual[:-1].cpu(), exact) and actual[-1] == 12345
    assert counts[-1] == 12345


@pytest.mark.parametrize("num_tokens", [0, 1, 31, 32, 65, 700])
@pytest.mark.parametrize(("topk", "num_experts"), [(1, 1), (2, 5), (3, 64), (8, 300)])
def test_sizes(num_tokens, topk, num_experts, kernel_device):
    check(draw(num_tokens, topk, num_experts), num_experts, kernel_device)


def test_many_experts(kernel_device):
    check(draw(70, 4, 4096), 4096, kernel_device, alignment=8)


@pytest.mark.parametrize("alignment", [1, 3, 128])
@pytest.mark.parametrize("num_rows", [None, 0, 1, 100, 5000])
def test_alignment_and_rows(alignment, num_rows, kernel_device):
    check(draw(90, 3, 7), 7, kernel_device, alignment, num_rows)


def test_groups_whose_end_does_not_fit_32_bits(kernel_device):
    """Rows past ``num_rows`` are dropped, whatever the alignment makes of them."""
    ids = draw(90, 3, 7)
    check(ids, 7, kernel_device, alignment=2**30, num_rows=50)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_strides(dtype, kernel_device):
    ids = draw(60, 6, 9).to(dtype)
    for view in (ids, ids[:, ::2], ids[::3], ids.t()):
        check(view, 9, kernel_device)


def test_a_stride_whose_product_with_k_passes_2_31(kernel_device):
    memory = untouched(3, 2**30, dtype=torch.int32, device=kernel_device)
    spread = memory[:, :4].t()
    spread.copy_(draw(4, 3, 3))
    num_rows = check_ids(spread, 3, 1, None, None)
    results = registered(plans.order, 2, 4)(spread, None, 3, 3, 1, num_rows)
    expected = reference.expert_permutation(spread.cpu(), 3, 1, num_rows)
    for actual, exact in zip(results, expected, strict=True):
        assert torch.equal(actual.cpu(), exact)


def test_one_expert_takes_all_and_others_none(kernel_device):
    ids = torch.full((300, 2), 3)
    check(ids, 8, kernel_device, alignment=16)
    check(ids * 0 - 1, 8, kernel_device)
    ids = torch.tensor([2**32 + 3, -(2**40), 3]).expand(90, 3)
    check(ids, 8, kernel_device)


@pytest.mark.parametrize("num_experts", [20, 300])
@pytest.mark.parametrize("most", [1, 2, 5])
def test_tiles_grow_with_the_input(most, num_experts, kernel_device, monkeypatch):
    monkeypatch.setattr(reference, "MAX_TILES", most)
    ids = draw(333, 3, num_experts)
    assert reference.tile_size(ids.numel(), num_experts) > reference.MIN_TILE
    check(ids, num_experts, kernel_device, alignment=4)
    check(ids, num_experts, kernel_device, num_rows=500)


def test_a_scan_in_steps(kernel_device, monkeypatch):
    monkeypatch.setattr(plans, "SCAN_TILES", 2)
    check(draw(333, 3, 20), 20, kernel_device)


@pytest.mark.parametrize("warps", [1, 2, 4])
@pytest.mark.parametrize("tile", [32, 64, 128, 256])
def test_no_launch_choice_changes_a_result(tile, warps, kernel_device, monkeypatch):
    monkeypatch.setattr(reference, "MIN_TILE", tile)
    check(draw(333, 3, 20), 20, kernel_device, alignment=4, warps=warps)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("shape", [(40, 3), (4, 10, 3), (3,), (0, 3)])
def test_the_direct_path(given, shape, launched, kernel_device):
    ids = draw(40, 3, 8).view(4, 10, 3)[: shape[0] if len(shape) < 2 else None]
    ids = draw(40, 3, 8).flatten()[: int(torch.tensor(shape).prod())].view(shape)
    workspace = None
    if given:
        workspace = make_workspace(expert_permutation_workspace_size(40, 3, 8), kernel_device)
        workspace.fill_(255)
    expected = torch.ops.moe.expert_permutation(ids, 8, 4)
    assert not launched
    for _ in range(2):
        launched.clear()
        results = expert_permutation(ids.to(kernel_device), 8, 4, None, workspace)
        assert launched == KERNELS
        for actual, exact in zip(results, expected, strict=True):
            assert torch.equal(actual.cpu(), exact)


@pytest.mark.parametrize("given", [False, True])
def test_the_cuda_implementation(given, kernel_device):
    ids = draw(40, 3, 8)
    workspace = None
    if given:
        workspace = make_workspace(expert_permutation_workspace_size(40, 3, 8), kernel_device)
        workspace.fill_(255)
    results = registered(plans.order, 2, 4)(ids.to(kernel_device), workspace, 8, 3, 4, 150)
    expected = reference.expert_permutation(ids, 8, 4, 150)
    for actual, exact in zip(results, expected, strict=True):
        assert torch.equal(actual.cpu(), exact)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        *BAD_CALLS,
        ({"num_experts": 4.0}, TypeError, "num_experts must be an int, got float"),
        ({"alignment": True}, TypeError, "alignment must be an int, got bool"),
    ],
)
def test_bad_input(change, error, message, launched, kernel_device):
    """Past the dispatcher too what is wrong is an argument of the documented function."""
    call = {**good(), **change}
    if isinstance(call["alignment"], int) and call["alignment"] > 2:
        call["num_rows"] = None
    call = {k: x.to(kernel_device) if isinstance(x, torch.Tensor) else x for k, x in call.items()}
    with pytest.raises(error, match=message) as refused:
        expert_permutation(**call)
    assert str(refused.value).startswith("expert_permutation: ") and not launched


def test_a_bad_map(launched, kernel_device):
    routing_map = torch.ones(6, 4, dtype=torch.bool, device=kernel_device)
    for change, error, message in (
        ({"topk": 0}, ValueError, "topk must be at least 1, got 0"),
        ({"topk": 5}, ValueError, "topk must be at most E = 4, got 5"),
        ({"topk": 2.0}, TypeError, "topk must be an int, got float"),
        ({"routing_map": routing_map[0]}, ValueError, r"routing_map must be of shape \[T, E\]"),
        (
            {"routing_map": routing_map[:, :0]},
            ValueError,
            "routing_map must be .* E from 1 to 4096",
        ),
        ({"alignment": 0}, ValueError, "alignment must be at least 1, got 0"),
        ({"num_rows": -1}, ValueError, "num_rows must be at least 0, got -1"),
    ):
        with pytest.raises(error, match=f"expert_permutation_from_map: {message}"):
            expert_permutation_from_map(**{"routing_map": routing_map, "topk": 2, **change})
    assert not launched
