"""restore: what weighted_restore is with weights of one, without the weights."""

import pytest
import torch
from torch.library import opcheck

from moe_custom_ops import (
    make_workspace,
    restore,
    weighted_restore,
    weighted_restore_workspace_size,
)
from moe_custom_ops.testing import assert_same_bits, make_assignments
from tests.compiling import compile_fresh, graphs

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def make(num_tokens=7, topk=3, hidden=20, dtype=torch.float32, **options):
    """(rows, token_indices_sorted, addend)"""
    _, indices = make_assignments(num_tokens, topk, 8, **options)
    generator = torch.Generator().manual_seed(2)
    draw = lambda n: torch.randn(n, hidden, generator=generator).to(dtype)  # noqa: E731
    return draw(indices.shape[0]), indices, draw(num_tokens)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ["whole", "padded", "dropped", "duplicate"])
def test_bits_of_result_and_gradients(dtype, case):
    rows, indices, addend = make(dtype=dtype, alignment=4 if case == "padded" else 1)
    if case == "padded":
        rows[indices < 0] = torch.nan
    if case == "dropped":
        rows, indices = rows[:17], indices[:17]
    if case == "duplicate":
        indices[:3] = indices[9]
    grad = torch.randn(7, 20).to(dtype)
    ours = [rows.clone().requires_grad_(), addend.clone().requires_grad_()]
    out = restore(ours[0], indices, 7, 3, ours[1])
    theirs = [rows.clone().requires_grad_(), addend.clone().requires_grad_()]
    expected = weighted_restore(theirs[0], torch.ones(7, 3), indices, theirs[1])
    assert_same_bits(out.detach(), expected.detach())
    grads = torch.autograd.grad(out, ours, grad)
    for a, b in zip(grads, torch.autograd.grad(expected, theirs, grad), strict=True):
        assert a.dtype == dtype and a.abs().sum() > 0
        assert_same_bits(a, b)


def test_values():
    rows = torch.tensor([[1.0], [2.0], [4.0], [8.0]])
    indices = torch.tensor(
        [3, 0, -1, 1]
    )  # row 0 holds (token 1, slot 1), row 1 (0, 0), row 3 (0, 1)
    assert restore(rows, indices, 2, 2).tolist() == [[10.0], [1.0]]
    assert restore(rows, indices, 3, 2, torch.ones(3, 1)).tolist() == [[11.0], [2.0], [1.0]]


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("given", [False, True])
def test_opcheck(requires_grad, given):
    rows, indices, addend = make()
    rows.requires_grad_(requires_grad)
    workspace = make_workspace(weighted_restore_workspace_size(7, 3), "cpu") if given else None
    opcheck(torch.ops.moe.restore.default, (rows, indices, 7, 3, None, workspace))
    opcheck(torch.ops.moe.restore.default, (rows, indices, 7, 3, addend, workspace))


@pytest.mark.parametrize("case", ["whole", "padded", "duplicate"])
def test_gradcheck(case):
    rows, indices, addend = make(3, 2, 4, torch.float64, alignment=4 if case == "padded" else 1)
    if case == "duplicate":
        indices[0] = indices[-1]
    inputs = (rows.requires_grad_(), addend.requires_grad_())
    call = lambda rows, addend: restore(rows, indices, 3, 2, addend)  # noqa: E731
    assert torch.autograd.gradcheck(call, inputs)
    assert torch.autograd.gradgradcheck(call, inputs)


@pytest.mark.parametrize("trained_router", [None, False, True])
def test_only_the_gradient_of_scores_keeps_the_rows(trained_router):
    rows, indices, _ = make()
    rows.requires_grad_()
    kept = []

    def keep(x):
        kept.append(x.shape)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        if trained_router is None:
            restore(rows, indices, 7, 3)
        else:
            weighted_restore(rows, torch.rand(7, 3, requires_grad=trained_router), indices)
    assert (rows.shape in kept) == bool(trained_router)
    assert (7, 3) in kept


def test_one_graph_for_all_token_counts():
    compiled = compile_fresh(restore)
    for num_tokens in (2, 3, 16, 65, 0, 1):
        rows, indices, addend = make(num_tokens)
        rows.requires_grad_()
        out = compiled(rows, indices, num_tokens, 3, addend)
        expected = restore(rows, indices, num_tokens, 3, addend)
        assert_same_bits(out, expected)
        weight = torch.randn_like(out)
        actual = torch.autograd.grad(out, rows, weight)
        assert_same_bits(actual[0], torch.autograd.grad(expected, rows, weight)[0])
        if num_tokens == 65:
            assert graphs() == 1


def test_a_token_count_that_depends_on_data():
    rows, indices, addend = make(num_tokens=3, topk=2)

    def call(rows, indices, num_tokens, addend):
        num_tokens = num_tokens.item()
        torch._check(num_tokens >= 0)
        return restore(rows, indices, num_tokens, 2, addend)

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = compile_fresh(call, "aot_eager")
        for given in (addend, None):
            out = compiled(rows, indices, torch.tensor(3), given)
            assert_same_bits(out, restore(rows, indices, 3, 2, given))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"rows": 3}, TypeError, "rows must be a Tensor, got int"),
        ({"rows": torch.ones(21)}, ValueError, r"rows must be of shape \[N, H\], got \[21\]"),
        ({"rows": torch.ones(21, 20, dtype=torch.int32)}, TypeError, "rows must be .*got int32"),
        ({"token_indices_sorted": torch.zeros(20).long()}, ValueError, r"\[N\] = \[21\].*got \[20"),
        (
            {"token_indices_sorted": torch.zeros(21)},
            TypeError,
            "must be int32 or int64, got float32",
        ),
        ({"num_tokens": -1}, ValueError, "num_tokens must be at least 0, got -1"),
        ({"num_tokens": 7.0}, TypeError, "num_tokens must be an int, got float"),
        ({"num_tokens": 2**30}, ValueError, r"num_tokens \* topk must be fewer than 2\^31"),
        ({"num_tokens": 2**63}, ValueError, "num_tokens must fit 64 bits, got 9223372036854775808"),
        ({"topk": 2**63}, ValueError, "topk must fit 64 bits, got 9223372036854775808"),
        ({"topk": 0}, ValueError, "topk must be at least 1, got 0"),
        ({"topk": True}, TypeError, "topk must be an int, got bool"),
        ({"addend": torch.ones(7, 19)}, ValueError, r"addend must be .*\[7, 20\], got \[7, 19\]"),
        ({"addend": torch.ones(7, 20).half()}, TypeError, "addend must be float32, got float16"),
        ({"workspace": torch.empty(16, dtype=torch.uint8)}, ValueError, "at least 96 bytes long"),
    ],
)
def test_bad_input(change, error, message):
    rows, indices, _ = make()
    call = {"rows": rows, "token_indices_sorted": indices, "num_tokens": 7, "topk": 3}
    with pytest.raises(error, match=f"restore: .*{message}"):
        restore(**{**call, **change})
