import pytest
import torch

from moe_custom_ops.fixed_order import next_power_of_2, tree_sum
from moe_custom_ops.testing import assert_same_bits, assert_within, canonical_bits


def test_tree_sum_adds_adjacent_pairs():
    x = torch.tensor([1e8, 1.0, -1e8, 1.0, 3.0])
    pairs = (x[0] + x[1]) + (x[2] + x[3])
    assert_same_bits(tree_sum(x, 0), (pairs + ((x[4] + 0) + 0)))


@pytest.mark.parametrize("n", [0, 1, 2, 3, 7, 8, 100])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_tree_sum_of_any_extent(n, dim):
    x = (
        torch.randn(n, 3, dtype=torch.float64)
        if dim == 0
        else torch.randn(3, n, dtype=torch.float64)
    )
    torch.testing.assert_close(tree_sum(x, dim), x.sum(dim))


def test_padding_does_not_change_bits():
    x = torch.randn(37)
    assert_same_bits(tree_sum(torch.cat([x, torch.zeros(91)]), 0), tree_sum(x, 0))


def test_next_power_of_2():
    assert [next_power_of_2(n) for n in (0, 1, 2, 3, 4, 5, 1023, 1025)] == [
        1,
        1,
        2,
        4,
        4,
        8,
        1024,
        2048,
    ]


def test_the_comparison_sees_one_bit_and_folds_nan_and_zero():
    x = torch.tensor([1.0, torch.nan, 0.0])
    y = torch.tensor([1.0, -torch.nan, -0.0])
    y.view(torch.int32)[1] |= 7
    assert_same_bits(x, y)
    y.view(torch.int32)[0] += 1
    with pytest.raises(AssertionError, match=r"1 of 3 elements differ in their bits; at \(0,\)"):
        assert_same_bits(x, y)
    with pytest.raises(AssertionError, match=r"float32 against torch\.float64"):
        assert_same_bits(x, y.double())
    assert canonical_bits(x)[2] == 0


def test_the_budget_refuses_an_error_a_nan_and_a_zero():
    x = torch.tensor([1.0, 2.0])
    assert_within(x, x.double(), x, roundings=1)
    for wrong in (x * (1 + 3e-7), x * torch.nan, torch.zeros(2)):
        with pytest.raises(AssertionError, match="over a budget of"):
            assert_within(wrong, x.double(), x, roundings=1)
    with pytest.raises(AssertionError, match="a result of zero would pass"):
        assert_within(x * 1e-30, x * 1e-30, x, roundings=1)
