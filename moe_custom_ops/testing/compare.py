"""Comparison by bits, and comparison within an error budget that scales with the data."""

import torch
from torch import Tensor

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def canonical_bits(x: Tensor) -> Tensor:
    """The bits of ``x`` on the CPU as integers, with every NaN one pattern and -0 made +0."""
    x = x.detach().cpu().contiguous()
    if not x.is_floating_point():
        return x
    x = torch.where(x.isnan(), torch.full_like(x, torch.nan), x)
    x = torch.where(x == 0, torch.zeros_like(x), x)
    return x.view(_INTEGERS[x.dtype.itemsize])


def assert_same_bits(actual: Tensor, expected: Tensor, what: str = "result") -> None:
    """Equal dtype, shape and bits, up to the pattern of a NaN and the sign of a zero."""
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype} against {expected.dtype}"
    assert actual.shape == expected.shape, f"{what}: {actual.shape} against {expected.shape}"
    differs = canonical_bits(actual) != canonical_bits(expected)
    if differs.any():
        index = tuple(differs.nonzero()[0].tolist())
        raise AssertionError(
            f"{what}: {int(differs.sum())} of {differs.numel()} elements differ in their bits; at "
            f"{index}: {actual.detach().cpu()[index].item()!r} against "
            f"{expected.detach().cpu()[index].item()!r}"
        )


def assert_within(
    actual: Tensor,
    oracle: Tensor,
    magnitude: Tensor,
    roundings: float,
    what: str = "result",
) -> None:
    """|actual - oracle| <= magnitude * roundings * epsilon, elementwise, in float64.

    ``magnitude`` is the sum of the absolute values of the terms that make each element, and
    ``roundings`` how many roundings a term passes through on its way. Both come from the data, so
    that a zeroed result fails wherever its terms do not cancel: this is asserted too. The budget
    has one smallest subnormal on top, which a result in that range may be off by.
    """
    oracle = oracle.double().cpu()
    budget = budget_of(actual.dtype, magnitude, roundings)
    assert_within_budget(actual, oracle, budget, what)
    if oracle.numel() and (oracle != 0).any():
        assert (oracle.abs() > budget).any(), f"{what}: a result of zero would pass this budget"


def budget_of(dtype: torch.dtype, magnitude: Tensor, roundings: float) -> Tensor:
    """The budget of :func:`assert_within` for a result of ``dtype``, in float64."""
    eps, tiny = torch.finfo(dtype).eps, torch.finfo(dtype).smallest_normal
    return magnitude.double().cpu() * roundings * eps + tiny * eps


def assert_within_budget(actual: Tensor, oracle: Tensor, budget: Tensor, what: str) -> None:
    """|actual - oracle| <= budget, elementwise, whether or not zero would pass."""
    error = (actual.detach().double().cpu() - oracle).abs()
    worst = (error - budget).argmax() if error.numel() else 0
    assert (error <= budget).all(), (
        f"{what}: error {error.flatten()[worst].item():.3e} over a budget of "
        f"{budget.flatten()[worst].item():.3e}"
    )


def assert_close_in_norm(
    actual: Tensor | None, expected: Tensor | None, tolerance: float, what: str = "result"
) -> None:
    """||actual - expected|| <= tolerance * ||expected||, where there must be something to compare.

    With a tolerance below one, a missing or a zeroed tensor fails.
    """
    assert 0 < tolerance < 1, "a tolerance of one would pass a zeroed tensor"
    assert actual is not None and expected is not None, f"{what}: missing"
    assert actual.shape == expected.shape, f"{what}: {actual.shape} against {expected.shape}"
    scale = expected.detach().double().norm()
    assert scale > 0, f"{what}: nothing to compare with, all zero"
    error = (actual.detach().double() - expected.detach().double()).norm() / scale
    assert error <= tolerance, f"{what}: relative error {error:.2e} over {tolerance:.2e}"
