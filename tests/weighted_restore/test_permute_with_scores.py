"""permute_with_scores: rows and scores in expert-major order."""

import pytest
import torch
from torch.library import opcheck

from moe_custom_ops import (
    inverse_permutation,
    make_workspace,
    permute,
    permute_with_scores,
    restore,
)
from moe_custom_ops.op import registered
from moe_custom_ops.rows import ops, plans
from moe_custom_ops.testing import assert_same_bits, make_assignments
from tests.compiling import compile_fresh, graphs
from tests.conftest import dispatched

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
FORWARD = ["_permute_kernel", "_scores_to_rows_kernel"]


def make(num_tokens=9, dtype=torch.float32, scores_dtype=torch.float32, seed=0):
    """(tokens, top_scores, token_indices_sorted) with padding and a duplicate."""
    scores, indices = make_assignments(num_tokens, 3, 8, seed=seed, alignment=4)
    generator = torch.Generator().manual_seed(seed)
    indices[:2] = indices[indices >= 0][-1]
    tokens = torch.randn(num_tokens, 20, generator=generator)
    return tokens.to(dtype), scores.to(scores_dtype), indices


def scores_by_hand(scores, indices):
    owners = {a: i for i, a in enumerate(indices.tolist())}
    flat, result = scores.flatten(), torch.zeros(len(indices), dtype=scores.dtype)
    for i, a in enumerate(indices.tolist()):
        if 0 <= a < flat.numel() and owners[a] == i:
            result[i] = flat[a]
    return result


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("given", [False, True])
def test_values(dtype, given):
    tokens, scores, indices = make(scores_dtype=dtype)
    scores[4] = torch.nan
    inverse = inverse_permutation(indices, 9, 3) if given else None
    rows, row_scores = permute_with_scores(tokens, scores, indices, None, inverse)
    assert_same_bits(rows, permute(tokens, indices, 3))
    assert_same_bits(row_scores, scores_by_hand(scores, indices))
    assert row_scores[indices < 0].eq(0).all()


def test_gradients():
    tokens, scores, indices = make(dtype=torch.float64, scores_dtype=torch.float64)
    leaves = (tokens.requires_grad_(), scores.requires_grad_())
    call = lambda t, s: permute_with_scores(t, s, indices)  # noqa: E731
    assert torch.autograd.gradcheck(call, leaves)
    assert torch.autograd.gradgradcheck(call, leaves)


def test_scores_before_the_experts_are_scores_behind_them():
    """restore(rows * row_scores) is the weighted sum of the rows."""
    tokens, scores, indices = make(dtype=torch.float64, scores_dtype=torch.float64)
    leaves = (tokens.requires_grad_(), scores.requires_grad_())
    rows, row_scores = permute_with_scores(*leaves, indices)
    out = restore(rows * row_scores[:, None], indices, 9, 3)
    held = torch.zeros(27, dtype=torch.bool).scatter_(0, indices[indices >= 0], True).view(9, 3)
    expected = tokens * (scores * held).sum(-1, keepdim=True)
    torch.testing.assert_close(out, expected)
    for actual, exact in zip(
        torch.autograd.grad(out.square().sum(), leaves),
        torch.autograd.grad(expected.square().sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(actual, exact)
        assert exact.abs().sum() > 0


@pytest.mark.parametrize("grad", [False, True])
def test_opcheck(grad):
    tokens, scores, indices = make()
    scores.requires_grad_(grad)
    inverse = inverse_permutation(indices, 9, 3)
    workspace = make_workspace(112, "cpu")
    for inversion in ((None, None), (workspace, None), (None, inverse)):
        call = (tokens, scores, indices, *inversion)
        opcheck(torch.ops.moe.permute_with_scores.default, call)
    opcheck(torch.ops.moe.scores_to_rows.default, (scores, indices, inverse))
    rows = torch.randn(len(indices), requires_grad=grad)
    opcheck(torch.ops.moe.rows_to_scores.default, (rows, indices, inverse))
    if not grad:
        opcheck(torch.ops.moe.scores_to_rows_forward.default, (scores, indices, inverse))
        opcheck(torch.ops.moe.rows_to_scores_forward.default, (rows, indices, inverse))


def test_one_graph_for_all_token_counts():
    compiled = compile_fresh(permute_with_scores)
    for num_tokens in (2, 3, 16, 65):
        tokens, scores, indices = make(num_tokens)
        leaves = (tokens.requires_grad_(), scores.requires_grad_())
        results = [f(*leaves, indices) for f in (compiled, permute_with_scores)]
        for actual, exact in zip(*results, strict=True):
            assert_same_bits(actual.detach(), exact.detach())
        grads = [torch.autograd.grad(sum(x.square().sum() for x in r), leaves) for r in results]
        for actual, exact in zip(*grads, strict=True):
            torch.testing.assert_close(actual, exact)
    assert graphs() == 1


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"top_scores": torch.ones(9, 3).int()},
            TypeError,
            "top_scores must be float32, .*got int32",
        ),
        (
            {"top_scores": torch.rand(8, 3)},
            ValueError,
            r"top_scores must be of shape .*got \[8, 3\]",
        ),
        ({"top_scores": torch.rand(9, 0)}, ValueError, "with K >= 1, got"),
        (
            {"top_scores": torch.tensor(1.0)},
            ValueError,
            r"top_scores must be of shape \[T, K\], got",
        ),
        ({"tokens": torch.rand(9)}, ValueError, r"tokens must be of shape \[T, H\]"),
        ({"inverse": torch.zeros(9, 2).int()}, ValueError, r"inverse must be .*got \[9, 2\]"),
    ],
)
def test_bad_input(change, error, message):
    tokens, scores, indices = make()
    call = {"tokens": tokens, "top_scores": scores, "token_indices_sorted": indices, **change}
    for op in (permute_with_scores, torch.ops.moe.permute_with_scores):
        with pytest.raises(error, match=f"permute_with_scores: .*{message}"):
            op(**call)
    with pytest.raises(
        TypeError, match="permute_with_scores: top_scores must be a Tensor, got int"
    ):
        permute_with_scores(tokens, 1, indices)


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("given", [False, True])
def test_the_direct_path(dtype, given, launched, kernel_device):
    tokens, scores, indices = make(scores_dtype=dtype)
    grad = torch.randn(len(indices)).to(dtype)
    leaf = scores.clone().requires_grad_()
    with dispatched():
        rows, row_scores = torch.ops.moe.permute_with_scores(tokens, leaf, indices)
        (expected,) = torch.autograd.grad(row_scores, leaf, grad)
    assert not launched
    tokens, indices = tokens.to(kernel_device), indices.to(kernel_device)
    inverse = inverse_permutation(indices, 9, 3) if given else None
    wide = scores.to(kernel_device).repeat_interleave(2, dim=1)[:, ::2]
    for own in (scores.to(kernel_device), wide):
        own = own.detach().requires_grad_()
        for own_grad in (grad, grad.repeat_interleave(2)[::2], grad[:1].expand(len(grad))):
            launched.clear()
            results = permute_with_scores(tokens, own, indices, None, inverse)
            assert launched == ["_invert_at_once_kernel"] * (not given) + FORWARD
            assert_same_bits(results[0], rows)
            assert_same_bits(results[1].detach(), row_scores.detach())
            (actual,) = torch.autograd.grad(results[1], own, own_grad.to(kernel_device))
            assert launched[-1] == "_rows_to_scores_kernel"
            if own_grad.stride(0):
                assert_same_bits(actual, expected)


@pytest.mark.kernels
def test_the_cuda_implementations(kernel_device):
    _, scores, indices = make()
    inverse = inverse_permutation(indices, 9, 3)
    inverse[0, 0], inverse[0, 1] = 10**6, -7
    moved = [x.to(kernel_device) for x in (scores, indices, inverse)]
    row_scores = registered(plans.scores_to_rows, 3)(*moved)
    assert_same_bits(row_scores, ops._scores_to_rows_cpu(scores, indices, inverse))
    back = registered(plans.rows_to_scores, 3)(row_scores, *moved[1:])
    assert_same_bits(back, ops._rows_to_scores_cpu(row_scores.cpu(), indices, inverse))
    for run, first, change, message in (
        (registered(plans.scores_to_rows, 3), moved[0], moved[2].long(), "slots must be int32"),
        (registered(plans.scores_to_rows, 3), moved[0], moved[2][:2], "slots must be of shape"),
        (registered(plans.rows_to_scores, 3), row_scores, moved[2].long(), "slots must be int32"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            run(first, moved[1], change)
