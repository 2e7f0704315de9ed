"""Registration, values, gradients and bad input of weighted_restore on the CPU."""

import itertools

import pytest
import torch
from torch.library import opcheck

from moe_custom_ops import make_workspace, weighted_restore, weighted_restore_workspace_size
from moe_custom_ops.permutation.reference import invert
from moe_custom_ops.rows import reference
from moe_custom_ops.testing import (
    assert_same_bits,
    assert_within,
    make_assignments,
    permutation_of,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
OP = torch.ops.moe.weighted_restore.default


def make(
    num_tokens=7, topk=3, hidden=20, dtype=torch.float32, scores_dtype=torch.float32, **options
):
    """(rows, top_scores, token_indices_sorted, addend)"""
    scores, indices = make_assignments(num_tokens, topk, 8, **options)
    generator = torch.Generator().manual_seed(2)
    draw = lambda n: torch.randn(n, hidden, generator=generator).to(dtype)  # noqa: E731
    return draw(indices.shape[0]), scores.to(scores_dtype), indices, draw(num_tokens)


def workspace_for(scores):
    return make_workspace(weighted_restore_workspace_size(*scores.shape), scores.device)


def oracle(rows, scores, indices, addend=None):
    """The formula in float64 by a loop over rows: (result, sum of the absolute terms)."""
    num_tokens, topk = scores.shape
    out = torch.zeros(num_tokens, rows.shape[1], dtype=torch.float64)
    out = out if addend is None else out + addend.double()
    magnitude = out.abs()
    row_of = {int(a): i for i, a in enumerate(indices) if 0 <= a < scores.numel()}
    for assignment, row in row_of.items():
        term = scores.flatten()[assignment].double() * rows[row].double()
        token = assignment // topk
        out = out.index_add(0, torch.tensor([token]), term[None])
        magnitude = magnitude.index_add(0, torch.tensor([token]), term.abs()[None])
    return out, magnitude


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("with_addend", [False, True])
def test_opcheck_of_the_public_op(requires_grad, given, with_addend):
    rows, scores, indices, addend = make()
    for tensor in (rows, scores, addend):
        tensor.requires_grad_(requires_grad)
    workspace = workspace_for(scores) if given else None
    opcheck(OP, (rows, scores, indices, addend if with_addend else None, workspace))


@pytest.mark.parametrize("weighted", [False, True])
def test_opcheck_of_the_inner_ops(weighted):
    rows, scores, indices, addend = make()
    workspace = workspace_for(scores)
    inverse = torch.ops.moe.inverse(indices, 7, 3)
    scores, shape = (scores, (0, 0)) if weighted else (None, (7, 3))
    for start in (addend, None):
        given = rows, scores, indices, start
        opcheck(torch.ops.moe.restore_forward.default, (*given, *shape))
        opcheck(torch.ops.moe.restore_forward_in.default, (*given, workspace, *shape))
        opcheck(torch.ops.moe.restore_of_inverse.default, (*given, inverse, *shape))


@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck_of_the_backward(requires_grad):
    rows, scores, indices, addend = make()
    inverse = torch.ops.moe.inverse(indices, 7, 3)
    for tensor in (rows, scores, addend):
        tensor.requires_grad_(requires_grad)
    opcheck(torch.ops.moe.restore_gather.default, (rows, indices, inverse))
    for read, weights, need_rows in (
        (rows, scores, True),
        (None, scores, True),
        (None, None, True),
        (rows, scores, False),
    ):
        arguments = (addend, read, weights, indices, inverse, need_rows)
        opcheck(torch.ops.moe.restore_backward.default, arguments)
        if not requires_grad:
            opcheck(torch.ops.moe.restore_grads.default, arguments)


@pytest.mark.parametrize(("dtype", "scores_dtype"), list(itertools.product(DTYPES, DTYPES)))
def test_value_against_a_float64_oracle(dtype, scores_dtype):
    rows, scores, indices, addend = make(dtype=dtype, scores_dtype=scores_dtype)
    expected, magnitude = oracle(rows, scores, indices, addend)
    out = weighted_restore(rows, scores, indices, addend)
    assert out.dtype == dtype and out.is_contiguous()
    # One rounding of the result, and of each float32 step where the result is coarser.
    assert_within(out, expected, magnitude, roundings=7 if dtype.itemsize >= 4 else 0.51)


def test_batch_shape_of_the_scores_is_the_shape_of_the_result():
    rows, scores, indices, addend = make(num_tokens=6)
    flat = weighted_restore(rows, scores, indices, addend)
    batched = weighted_restore(rows, scores.view(2, 3, 3), indices, addend.view(2, 3, 20))
    assert batched.shape == (2, 3, 20)
    assert_same_bits(batched.flatten(0, 1), flat)
    single = weighted_restore(rows[:3], scores[0], torch.tensor([1, 0, 2]))
    assert single.shape == (20,)


@pytest.mark.parametrize(("dtype", "scores_dtype"), list(itertools.product(DTYPES, DTYPES)))
def test_gradients_against_a_float64_oracle(dtype, scores_dtype):
    rows, scores, indices, addend = make(dtype=dtype, scores_dtype=scores_dtype)
    grad = torch.randn(7, 20).to(dtype)
    ours = [tensor.clone().requires_grad_() for tensor in (rows, scores, addend)]
    out = weighted_restore(ours[0], ours[1], indices, ours[2])
    grads = torch.autograd.grad(out, ours, grad)
    theirs = [tensor.double().requires_grad_() for tensor in (rows, scores, addend)]
    reference_out, _ = oracle(theirs[0], theirs[1], indices, theirs[2])
    expected = torch.autograd.grad(reference_out, theirs, grad.double())
    magnitudes = [
        expected[0].abs(),
        torch.autograd.grad(
            oracle(rows.double().abs(), theirs[1], indices)[0], theirs[1], grad.double().abs()
        )[0],
        expected[2].abs(),
    ]
    for actual, exact, magnitude, tensor in zip(grads, expected, magnitudes, ours, strict=True):
        assert actual.dtype == tensor.dtype
        eps = torch.finfo(actual.dtype).eps
        # float32 steps inside, however fine the dtype of the gradient is.
        inner = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
        assert_within(actual, exact, magnitude, roundings=0.51 + 10 * inner / eps)


def test_gradients_against_autograd_through_the_reference():
    rows, scores, indices, addend = make(dtype=torch.float64, scores_dtype=torch.float64)
    slots = invert(indices, scores.numel()).view(scores.shape)
    inputs = [tensor.requires_grad_() for tensor in (rows, scores, addend)]
    ours = weighted_restore(rows, scores, indices, addend)
    theirs = reference.weighted_restore(rows, scores, slots, addend)
    assert_same_bits(ours, theirs)
    weight = torch.randn_like(ours)
    grads = torch.autograd.grad(ours, inputs, weight)
    expected = torch.autograd.grad(theirs, inputs, weight)
    torch.testing.assert_close(grads, expected, rtol=1e-13, atol=1e-13)
    assert all((grad != 0).any() for grad in grads)


@pytest.mark.parametrize("alignment", [1, 4])
@pytest.mark.parametrize("case", ["whole", "dropped", "duplicate"])
def test_gradcheck(alignment, case):
    rows, scores, indices, addend = make(4, 2, 5, torch.float64, torch.float64, alignment=alignment)
    if case == "dropped":
        rows, indices = rows[:-3], indices[:-3]
    elif case == "duplicate":
        indices[0] = indices[indices >= 0][-1]
    for tensor in (rows, scores, addend):
        tensor.requires_grad_()
    call = lambda r, s, a: weighted_restore(r, s, indices, a)  # noqa: E731
    assert torch.autograd.gradcheck(call, (rows, scores, addend))
    assert torch.autograd.gradgradcheck(call, (rows, scores, addend))


@pytest.mark.parametrize(
    ("rows_grad", "scores_grad", "addend_grad"), list(itertools.product([False, True], repeat=3))
)
def test_only_the_gradients_asked_for_are_computed(
    rows_grad, scores_grad, addend_grad, monkeypatch
):
    rows, scores, indices, addend = make()
    if not (rows_grad or scores_grad or addend_grad):
        assert not weighted_restore(rows, scores, indices, addend).requires_grad
        return
    computed = []
    for name in ("grad_rows", "grad_scores"):
        real = getattr(reference, name)
        monkeypatch.setattr(
            reference, name, lambda *a, n=name, f=real: (computed.append(n), f(*a))[1]
        )
    rows.requires_grad_(rows_grad)
    scores.requires_grad_(scores_grad)
    addend.requires_grad_(addend_grad)
    weighted_restore(rows, scores, indices, addend).sum().backward()
    assert computed == ["grad_rows"] * rows_grad + ["grad_scores"] * scores_grad
    for tensor in (rows, scores, addend):
        assert (tensor.grad is not None) == tensor.requires_grad


def test_mixed_dtypes_in_double_backward():
    rows, scores, indices, addend = make(5, 2, 12, torch.bfloat16, alignment=4)
    inputs = [tensor.requires_grad_() for tensor in (rows, scores, addend)]
    with torch.autocast("cpu", torch.bfloat16):
        out = weighted_restore(rows, scores, indices, addend)
    grads = torch.autograd.grad(out.float().square().sum(), inputs, create_graph=True)
    second = torch.autograd.grad(sum(grad.float().square().sum() for grad in grads), inputs)
    for tensor, grad in zip(inputs, second, strict=True):
        assert grad.dtype == tensor.dtype and grad.shape == tensor.shape
        assert grad.isfinite().all() and (grad != 0).any()


def test_double_backward_under_autocast():
    rows, scores, indices, _ = make(dtype=torch.bfloat16)

    def second(autocast):
        leaves = [rows.clone().requires_grad_(), scores.clone().requires_grad_()]
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = weighted_restore(*leaves, indices)
            grads = torch.autograd.grad(out.float().square().sum(), leaves, create_graph=True)
            return torch.autograd.grad(sum(g.float().square().sum() for g in grads), leaves)

    for plain, cast in zip(second(False), second(True), strict=True):
        assert_same_bits(cast, plain)
        assert plain.abs().sum() > 0


def test_padding_rows_may_hold_anything():
    rows, scores, indices, addend = make(alignment=4)
    padding = (indices < 0) | (indices >= scores.numel())
    assert padding.any()
    expected = weighted_restore(rows, scores, indices, addend)
    rows[padding] = torch.nan
    indices[padding] = torch.tensor([-1, -9, 21, 2**40]).repeat(20)[: padding.sum()]
    rows.requires_grad_()
    scores.requires_grad_()
    out = weighted_restore(rows, scores, indices, addend)
    assert_same_bits(out, expected)
    out.sum().backward()
    assert (rows.grad[padding] == 0).all()
    assert rows.grad.isfinite().all() and scores.grad.isfinite().all()


def test_dropped_assignments_add_zero_and_get_zero():
    rows, scores, indices, addend = make()
    kept, dropped = indices[:9], indices[9:]
    scores.flatten()[dropped[0]] = torch.nan
    scores.requires_grad_()
    out = weighted_restore(rows[:9], scores, kept, addend)
    expected, magnitude = oracle(rows[:9], scores.detach(), kept, addend)
    assert_within(out, expected, magnitude, roundings=7)
    out.sum().backward()
    assert (scores.grad.flatten()[dropped] == 0).all()
    assert (scores.grad.flatten()[kept] != 0).all()


def test_the_highest_row_wins_a_duplicate_in_forward_and_backward():
    rows, scores, indices, _ = make(num_tokens=2, topk=1, hidden=4)
    indices = torch.tensor([0, 0])
    rows.requires_grad_()
    out = weighted_restore(rows, scores, indices)
    assert_same_bits(out, torch.stack([scores[0] * rows[1], torch.zeros(4)]))
    out.sum().backward()
    assert (rows.grad[0] == 0).all() and (rows.grad[1] == scores[0]).all()


def test_the_same_expert_twice_is_two_assignments():
    indices = permutation_of(torch.tensor([[1, 1], [0, 1]]), 2)
    rows = torch.arange(4.0)[:, None].requires_grad_()
    out = weighted_restore(rows, torch.tensor([[1.0, 10.0], [100.0, 1000.0]]), indices)
    assert out.flatten().tolist() == [1 + 20, 0 + 3000]


@pytest.mark.parametrize(("num_tokens", "num_rows"), [(0, 0), (0, 4), (3, 0)])
def test_nothing_to_restore(num_tokens, num_rows):
    rows = torch.randn(num_rows, 5, requires_grad=True)
    scores = torch.rand(num_tokens, 2, requires_grad=True)
    indices = torch.arange(num_rows)
    out = weighted_restore(rows, scores, indices)
    assert out.shape == (num_tokens, 5)
    out.sum().backward()
    assert rows.grad.shape == rows.shape and (rows.grad == 0).all()
    assert scores.grad.shape == scores.shape and (scores.grad == 0).all()


@pytest.mark.parametrize("hidden", [0, 1, 7, 127, 130, 300])
@pytest.mark.parametrize("topk", [1, 3, 6, 8])
def test_shapes(hidden, topk):
    rows, scores, indices, addend = make(5, topk, hidden)
    expected, magnitude = oracle(rows, scores, indices, addend)
    assert_within(weighted_restore(rows, scores, indices, addend), expected, magnitude, topk + 2)


def test_a_token_has_the_same_bits_alone_and_in_a_batch():
    rows, scores, indices, addend = make(9, 3, 300, torch.bfloat16)
    out = weighted_restore(rows, scores, indices, addend)
    for token in range(9):
        own = indices // 3 == token
        alone = weighted_restore(
            rows[own],
            scores[token : token + 1],
            indices[own] - 3 * token,
            addend[token : token + 1],
        )
        assert_same_bits(alone[0], out[token])


def test_any_strides_of_inputs_and_gradients():
    rows, scores, indices, addend = make(6, 2, 20)
    inputs = [rows, scores, addend]
    strided = [
        rows.t().contiguous().t(),
        torch.cat([scores, scores], 1)[:, 2:],
        torch.randn(6, 40)[:, ::2].copy_(addend),
    ]
    expected = weighted_restore(inputs[0], inputs[1], indices, inputs[2])
    assert_same_bits(
        weighted_restore(
            strided[0], strided[1], indices.repeat_interleave(2)[::2].int(), strided[2]
        ),
        expected,
    )
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    out = weighted_restore(leaves[0], leaves[1], indices, leaves[2])
    for grad in (torch.ones(()).expand(6, 20), torch.randn(20, 6).t(), torch.randn(6, 50)[:, 7:27]):
        a = torch.autograd.grad(out, leaves, grad, retain_graph=True)
        b = torch.autograd.grad(out, leaves, grad.contiguous(), retain_graph=True)
        for x, y in zip(a, b, strict=True):
            assert_same_bits(x, y)


def test_two_backwards_of_one_graph_are_equal_whatever_the_workspace_holds():
    rows, scores, indices, addend = make()
    workspace = workspace_for(scores)
    inputs = [tensor.requires_grad_() for tensor in (rows, scores, addend)]
    out = weighted_restore(rows, scores, indices, addend, workspace)
    first = torch.autograd.grad(out.square().sum(), inputs, retain_graph=True)
    workspace.fill_(255)
    second = torch.autograd.grad(out.square().sum(), inputs)
    for a, b in zip(first, second, strict=True):
        assert_same_bits(a, b)


def test_what_the_scratch_holds_changes_nothing():
    rows, scores, indices, addend = make()
    given = rows, scores, indices, addend
    scratch = torch.randint(0, 256, (workspace_for(scores).shape[0],), dtype=torch.uint8)
    results = torch.ops.moe.restore_forward_in(*given, scratch, 0, 0)
    expected = torch.ops.moe.restore_forward(*given, 0, 0)
    for actual, exact in zip(results, expected, strict=True):
        assert torch.equal(actual, exact)
    # What it holds is no more than an inverse may hold, which is bounded.
    garbage = scratch[: 4 * scores.numel()].view(torch.int32).view(scores.shape)
    out = torch.ops.moe.restore_of_inverse(*given, garbage, 0, 0)
    assert out.shape == addend.shape and out.isfinite().all()
    with pytest.raises(ValueError, match="workspace must be at least 96 bytes"):
        torch.ops.moe.restore_forward_in(*given, scratch[:16], 0, 0)


def bad(change):
    rows, scores, indices, addend = make()
    call = {
        "rows": rows,
        "top_scores": scores,
        "token_indices_sorted": indices,
        "addend": addend,
        "workspace": None,
    }
    return {**call, **change}


BAD_CALLS = [
    ({"rows": None}, TypeError, "rows must be a Tensor, got NoneType"),
    ({"rows": torch.rand(21)}, ValueError, r"rows must be of shape \[N, H\], got \[21\]"),
    ({"rows": torch.ones(21, 20, dtype=torch.int8)}, TypeError, "rows must be float32.*got int8"),
    (
        {"top_scores": torch.rand(())},
        ValueError,
        r"top_scores must be of shape \[\*, K\].*got \[\]",
    ),
    ({"top_scores": torch.rand(7, 0)}, ValueError, r"top_scores must be .*K >= 1, got \[7, 0\]"),
    (
        {"top_scores": torch.ones(7, 3, dtype=torch.int64)},
        TypeError,
        "top_scores must be .*got int64",
    ),
    (
        {"top_scores": torch.rand(7, 3, device="meta")},
        ValueError,
        "top_scores must be on the device",
    ),
    (
        {"token_indices_sorted": torch.arange(20)},
        ValueError,
        r"token_indices_sorted must be of shape \[N\] = \[21\].*got \[20\]",
    ),
    (
        {"token_indices_sorted": torch.arange(21)[:, None]},
        ValueError,
        r"token_indices_sorted .*got \[21, 1\]",
    ),
    (
        {"token_indices_sorted": torch.arange(21.0)},
        TypeError,
        "token_indices_sorted must be int32 or int64, got float32",
    ),
    (
        {"token_indices_sorted": torch.arange(21, device="meta")},
        ValueError,
        "token_indices_sorted must be on",
    ),
    ({"addend": torch.rand(7, 19)}, ValueError, r"addend must be .*\[7, 20\], got \[7, 19\]"),
    ({"addend": torch.rand(1, 7, 20)}, ValueError, r"addend must be .*got \[1, 7, 20\]"),
    (
        {"addend": torch.rand(7, 20).half()},
        TypeError,
        "addend must be float32, got float16, not that of rows",
    ),
    ({"addend": torch.rand(7, 20, device="meta")}, ValueError, "addend must be on"),
    ({"workspace": "big"}, TypeError, "workspace must be a Tensor, got str"),
    (
        {"workspace": torch.empty(96, dtype=torch.int8)},
        TypeError,
        "workspace must be uint8, got int8",
    ),
    (
        {"workspace": torch.empty(80, dtype=torch.uint8)},
        ValueError,
        "workspace must be at least 96 bytes long, got 80 bytes",
    ),
    (
        {"workspace": torch.empty(97, dtype=torch.uint8)[1:]},
        ValueError,
        "workspace must be aligned",
    ),
    (
        {"workspace": torch.empty(192, dtype=torch.uint8)[::2]},
        ValueError,
        "workspace must be contiguous",
    ),
    (
        {"workspace": torch.empty(96, dtype=torch.uint8, device="meta")},
        ValueError,
        "workspace must be on",
    ),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD_CALLS)
def test_bad_input(change, error, message):
    with pytest.raises(error, match=f"weighted_restore: .*{message}"):
        weighted_restore(**bad(change))


@pytest.mark.parametrize(("change", "error", "message"), BAD_CALLS)
def test_bad_input_under_compile_has_the_same_message(change, error, message):
    call = bad(change)
    compiled = torch.compile(lambda: weighted_restore(**call), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=f"(?s)weighted_restore: .*{message}"):
        compiled()


@pytest.mark.parametrize("argument", ["rows", "top_scores", "addend"])
def test_forward_mode_is_refused(argument):
    call = bad({})
    with torch.autograd.forward_ad.dual_level():
        call[argument] = torch.autograd.forward_ad.make_dual(
            call[argument], torch.ones_like(call[argument])
        )
        with pytest.raises(NotImplementedError, match="weighted_restore: forward-mode AD"):
            weighted_restore(**call)


def test_the_result_may_be_changed_in_place():
    rows, scores, indices, addend = make()
    leaves = [rows.requires_grad_(), scores.requires_grad_()]
    out = weighted_restore(rows, scores, indices)
    expected = weighted_restore(rows, scores, indices).detach() + addend
    out += addend
    assert_same_bits(out, expected)
    grads = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
    for grad in grads:
        doubled = grad.detach() * 2
        assert_same_bits(grad.mul_(2), doubled)


@pytest.mark.parametrize("lead", [(6,), (1, 6), (6, 1), (2, 3)])
def test_the_result_is_contiguous_whatever_the_strides(lead):
    rows, scores, indices, addend = make(num_tokens=6, topk=2)
    expected = weighted_restore(rows, scores, indices, addend).view(*lead, 20)

    def transposed(x):
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)

    call = (
        transposed(rows),
        transposed(scores.view(*lead, 2)),
        indices,
        transposed(addend.view(*lead, 20)),
    )
    out = weighted_restore(*call)
    assert out.is_contiguous()
    assert_same_bits(out, expected)
    opcheck(OP, (*call, None))
    assert_same_bits(torch.compile(weighted_restore, fullgraph=True)(*call), expected)


def test_an_infinite_gradient_does_not_reach_a_dropped_assignment():
    rows, scores, indices, _ = make()
    leaves = [rows[:9].requires_grad_(), scores.requires_grad_()]
    out = weighted_restore(leaves[0], scores, indices[:9])
    (grad_scores,) = torch.autograd.grad(out, scores, torch.full_like(out, torch.inf))
    assert (grad_scores.flatten()[indices[9:]] == 0).all()


def test_double_backward_of_a_dropped_assignment_is_finite():
    rows, scores, indices, _ = make()
    dropped = indices[9:]
    scores.flatten()[dropped] = torch.nan
    leaves = [rows[:9].requires_grad_(), scores.requires_grad_()]
    upstream = torch.randn(7, 20, requires_grad=True)
    out = weighted_restore(*leaves, indices[:9])
    grads = torch.autograd.grad(out, leaves, upstream, create_graph=True)
    total = sum(grad.square().sum() for grad in grads)
    second = torch.autograd.grad(total, [*leaves, upstream], retain_graph=True)
    assert all(grad.isfinite().all() and (grad != 0).any() for grad in second)
    # An infinite gradient of a token reaches the scores of its rows, and no dropped one.
    infinite = torch.full((7, 20), torch.inf, requires_grad=True)
    grads = torch.autograd.grad(out, leaves, infinite, create_graph=True)
    (d_scores,) = torch.autograd.grad(grads[0].sum(), scores)
    assert (d_scores.flatten()[dropped] == 0).all()


def test_as_many_assignments_as_int32_cannot_count_are_refused():
    rows = torch.empty(1, 1).expand(2**31, 1)
    indices = torch.empty(1, dtype=torch.int64).expand(2**31)
    scores = torch.rand(3, 2)
    with pytest.raises(ValueError, match=r"rows must be of fewer than 2\^31 rows"):
        weighted_restore(rows, scores, indices)
    with pytest.raises(ValueError, match=r"top_scores must be of fewer than 2\^31 rows"):
        weighted_restore(torch.rand(6, 1), scores[:1, :1].expand(2**30, 2), torch.arange(6))


def test_workspace_size():
    assert weighted_restore_workspace_size(0, 2) == 0
    assert weighted_restore_workspace_size(5, 3) == 64
    with pytest.raises(ValueError, match="topk must be at least 1, got 0"):
        weighted_restore_workspace_size(5, 0)
    with pytest.raises(TypeError, match="num_tokens must be an int, got float"):
        weighted_restore_workspace_size(5.0, 2)
