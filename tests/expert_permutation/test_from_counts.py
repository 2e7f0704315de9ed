"""expert_permutation_from_counts, and permutations composed."""

import pytest
import torch
from torch.library import opcheck

from moe_custom_ops import (
    compose_permutations,
    expert_permutation,
    expert_permutation_from_counts,
    make_workspace,
    permute,
)
from moe_custom_ops.op import registered
from moe_custom_ops.permutation import plans, reference
from tests.compiling import compile_fresh, graphs


def draw(num_ranks, num_experts, most=9, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, most, (num_ranks, num_experts), generator=generator)


def check(results, counts, num_rows, alignment=1):
    """Against the order of the experts that the rows were sent for."""
    experts = torch.arange(counts.shape[1]).expand(counts.shape).flatten()
    ids = experts.repeat_interleave(counts.cpu().clamp(min=0).flatten().long())[:, None]
    arguments = counts.shape[1], alignment, num_rows
    expected = torch.ops.moe.expert_permutation(ids, *arguments)
    for actual, exact in zip(results, expected, strict=True):
        assert actual.dtype == exact.dtype and torch.equal(actual.cpu(), exact)


CASES = [(1, 1), (2, 3), (8, 16), (3, 200)]


@pytest.mark.parametrize(("num_ranks", "num_experts"), CASES)
@pytest.mark.parametrize("alignment", [1, 4])
def test_values(num_ranks, num_experts, alignment):
    counts = draw(num_ranks, num_experts)
    for num_rows in (0, 1, 50, int(counts.sum()), 5000):
        results = expert_permutation_from_counts(counts, num_rows, alignment)
        check(results, counts, num_rows, alignment)
    counts[0] = 0
    check(expert_permutation_from_counts(counts.int(), 99), counts, 99)
    counts[0] = -3
    check(expert_permutation_from_counts(counts, 99), counts, 99)


def test_rows_of_two_ranks_become_expert_major():
    counts = draw(4, 5)
    rows = torch.randn(int(counts.sum()), 6)
    order, totals, offsets = expert_permutation_from_counts(counts, rows.shape[0])
    segments = rows.split(counts.flatten().tolist())
    expected = [segments[r * 5 + e] for e in range(5) for r in range(4)]
    assert torch.equal(permute(rows, order, 1), torch.cat(expected))
    assert torch.equal(totals, counts.sum(0)) and torch.equal(offsets.long(), totals.cumsum(0))


def test_two_orders_in_one_pass():
    ids = torch.randint(-1, 6, (20, 2), generator=torch.Generator().manual_seed(0))
    first, _, _ = expert_permutation(ids, 6, 4)
    counts = draw(3, 4)
    second, _, _ = expert_permutation_from_counts(counts, int(counts.sum()) + 9, 2)
    tokens = torch.randn(20, 3)
    both = compose_permutations(first, second)
    assert both.dtype == torch.int32
    expected = permute(permute(tokens, first, 2), second, 1)
    assert torch.equal(permute(tokens, both, 2), expected) and expected.abs().sum() > 0
    compiled = compile_fresh(compose_permutations)
    assert torch.equal(compiled(first, second), both)


def test_composing_checks_its_arguments():
    order = torch.arange(4)
    with pytest.raises(TypeError, match="compose_permutations: second must be a Tensor, got int"):
        compose_permutations(order, 1)
    with pytest.raises(TypeError, match="first must be int32 or int64, got float32"):
        compose_permutations(order.float(), order)
    with pytest.raises(ValueError, match=r"second must be of shape \[N\], got \[2, 2\]"):
        compose_permutations(order, order.view(2, 2))


def test_opcheck():
    opcheck(torch.ops.moe.expert_permutation_from_counts.default, (draw(3, 4), 40, 2))
    workspace = make_workspace(0, "cpu")
    opcheck(torch.ops.moe.expert_permutation_from_counts.default, (draw(3, 4), 40, 2, workspace))
    opcheck(torch.ops.moe.order_from_counts.default, (draw(3, 4), 40, 2))


def test_one_graph_for_all_sizes():
    def layer(rows, counts):
        return permute(rows, expert_permutation_from_counts(counts, rows.shape[0], 2)[0], 1)

    compiled = compile_fresh(layer)
    counts = draw(3, 4)
    for num_rows in (40, 64, 200):
        rows = torch.randn(num_rows, 3)
        assert torch.equal(compiled(rows, counts), layer(rows, counts))
    assert graphs() == 1


def test_one_graph_for_all_counts():
    compiled = compile_fresh(lambda counts: expert_permutation_from_counts(counts, 99))
    for num_ranks, num_experts in ((2, 3), (3, 2), (4, 9), (8, 7)):
        counts = draw(num_ranks, num_experts)
        check(compiled(counts), counts, 99)
    assert graphs() == 1


@pytest.mark.kernels
def test_sources_past_2_31_are_padding(launched, kernel_device):
    """Counts that no all-to-all can have brought must not lead to rows that it brought."""
    counts = torch.tensor([[0, 2**32], [3, 0]])
    for own in (counts, counts.to(kernel_device)):
        order, _, _ = expert_permutation_from_counts(own, 8)
        assert order[:3].tolist() == [-1] * 3 and order[3:].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"counts": torch.rand(3, 4)}, TypeError, "counts must be int32 or int64, got float32"),
        ({"counts": torch.ones(3).int()}, ValueError, r"counts must be of shape \[R, E\]"),
        ({"counts": torch.ones(3, 0).int()}, ValueError, "at most 16384"),
        ({"counts": torch.ones(129, 128).int()}, ValueError, r"got \[129, 128\]"),
        ({"num_rows": -1}, ValueError, "num_rows must be at least 0, got -1"),
        ({"num_rows": 2**31}, ValueError, "num_rows must be fewer than"),
        ({"alignment": 0}, ValueError, "alignment must be at least 1, got 0"),
        ({"workspace": torch.zeros(3)}, TypeError, "workspace must be uint8, got float32"),
    ],
)
def test_bad_input(change, error, message):
    call = {"counts": draw(3, 4), "num_rows": 40, "alignment": 1, **change}
    for op in (expert_permutation_from_counts, torch.ops.moe.expert_permutation_from_counts):
        with pytest.raises(error, match=f"expert_permutation_from_counts: .*{message}"):
            op(**call)
    for wrong in ({"counts": 1}, {"num_rows": 1.0}, {"alignment": None}):
        with pytest.raises(TypeError, match=f"from_counts: {next(iter(wrong))} must be"):
            expert_permutation_from_counts(**{"counts": draw(3, 4), "num_rows": 4, **wrong})


@pytest.mark.kernels
@pytest.mark.parametrize(("num_ranks", "num_experts"), [(1, 1), (2, 3), (5, 7)])
@pytest.mark.parametrize("alignment", [1, 4])
def test_the_direct_path(num_ranks, num_experts, alignment, launched, kernel_device):
    counts = draw(num_ranks, num_experts)
    counts[0, 0] = 1500
    for own in (counts, counts.int().t().contiguous().t()):
        own = own.to(kernel_device)
        for num_rows in (0, 50, 3000):
            results = expert_permutation_from_counts(own, num_rows, alignment)
            check(results, counts, num_rows, alignment)
    check(expert_permutation_from_counts(own, 50, alignment), counts, 50, alignment)
    assert launched == ["_order_from_counts_kernel"] * 7


@pytest.mark.cuda
@pytest.mark.parametrize(("num_ranks", "num_experts"), [(3, 200), (64, 256), (4096, 4), (1, 4096)])
def test_many_segments(num_ranks, num_experts):
    counts = draw(num_ranks, num_experts)
    counts[0, 0] = 50_000
    for num_rows, alignment in ((1000, 1), (200_000, 8)):
        results = expert_permutation_from_counts(counts.cuda(), num_rows, alignment)
        check(results, counts, num_rows, alignment)


@pytest.mark.kernels
def test_the_cuda_implementation(kernel_device):
    counts = draw(3, 7)
    run = registered(plans.order_from_counts, 1, 2)
    check(run(counts.to(kernel_device), 90, 4), counts, 90, 4)


HUGE = [[[2**63 - 1 - 250], [2**63 - 1 - 249]], [[2**62, 2**62]], [[2**63 - 1, 5], [7, 2**33]]]


@pytest.mark.parametrize("counts", HUGE)
@pytest.mark.parametrize("alignment", [1, 4, 2**31 - 1])
def test_counts_whose_sums_do_not_fit_64_bits(counts, alignment):
    order, totals, offsets = expert_permutation_from_counts(torch.tensor(counts), 100, alignment)
    clamped = torch.tensor(counts).clamp(max=2**31)
    assert torch.equal(totals, clamped.sum(0)) and (offsets == 100).all()
    assert torch.equal(order[:100], torch.arange(100, dtype=torch.int32))


@pytest.mark.kernels
@pytest.mark.parametrize("counts", HUGE)
@pytest.mark.parametrize("alignment", [1, 4, 2**31 - 1])
def test_no_count_makes_the_kernel_write_beside_its_result(counts, alignment, kernel_device):
    counts = torch.tensor(counts, device=kernel_device)
    memory = torch.full((4096,), 12345, dtype=torch.int32, device=kernel_device)
    order = memory[2000:2100]
    totals = torch.zeros(counts.shape[1], dtype=torch.int64, device=kernel_device)
    offsets = totals.int()
    plans.count_launch(counts, alignment, 100)(counts, order, totals, offsets)
    expected = reference.from_counts(counts.cpu(), 100, alignment)
    for actual, exact in zip((order, totals, offsets), expected, strict=True):
        assert torch.equal(actual.cpu(), exact)
    assert (memory[:2000] == 12345).all() and (memory[2100:] == 12345).all()
