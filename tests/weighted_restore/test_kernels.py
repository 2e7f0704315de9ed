"""The Triton kernels against the reference, bit for bit: on a GPU, or under the interpreter."""

import itertools

import pytest
import torch

from moe_custom_ops.permutation import plans as inversions
from moe_custom_ops.permutation.reference import invert
from moe_custom_ops.rows import plans, reference
from moe_custom_ops.testing import assert_same_bits, make_assignments
from tests.poison import untouched

pytestmark = pytest.mark.kernels

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def empty(*shape, dtype, device):
    """Memory that no kernel has written: NaN."""
    return torch.full(shape, torch.nan, dtype=dtype, device=device)


def run(
    rows,
    scores,
    indices,
    addend,
    grad,
    device,
    topk=None,
    num_warps=2,
    block_h=None,
    block_k=None,
    few_rows=None,
):
    """(out, inverse, grad_rows, grad_scores) from the kernels; ``topk`` where no scores give it."""
    move = lambda x: None if x is None else x.to(device)  # noqa: E731
    rows, scores, indices, addend, grad = map(move, (rows, scores, indices, addend, grad))
    num_tokens, topk = grad.shape[0], topk or scores.shape[1]
    inverse = torch.full((num_tokens * topk,), 12345, dtype=torch.int32, device=device)
    for launch in inversions.invert(indices, num_tokens * topk):
        launch(indices, inverse)
    out = empty(num_tokens, rows.shape[1], dtype=rows.dtype, device=device)
    slots = torch.full((num_tokens, topk), 12345, dtype=torch.int32, device=device)
    options = {"num_warps": num_warps, "block_h": block_h, "few_rows": few_rows}
    launch = plans.restore_launch(rows, scores, addend, num_tokens, topk, **options)
    launch(rows, scores, inverse, addend, out, slots)
    assert torch.equal(slots.flatten(), inverse)
    grad_rows = empty(*rows.shape, dtype=rows.dtype, device=device)
    if scores is None:
        options = {"num_warps": num_warps, "block_h": block_h}
        plans.permute_launch(grad, indices, topk, **options)(grad, indices, slots, grad_rows)
        return out, inverse, grad_rows, None
    grad_scores = torch.full(scores.shape, torch.nan, dtype=scores.dtype, device=device)
    options = {"num_warps": num_warps, "block_k": block_k, "few_rows": few_rows}
    launch = plans.restore_backward_launch(grad, rows, scores, indices, topk, True, **options)
    launch(grad, rows, scores, indices, slots, grad_rows, grad_scores)
    return out, inverse, grad_rows, grad_scores


def expect(rows, scores, indices, addend, grad, topk):
    num_tokens = grad.shape[0]
    slots = invert(indices, num_tokens * topk).view(num_tokens, topk)
    assignments = reference.row_assignments(slots, indices)
    return (
        reference.weighted_restore(rows, scores, slots, addend),
        slots.flatten().to(torch.int32),
        reference.grad_rows(grad, scores, slots, assignments),
        None if scores is None else reference.grad_scores(grad, rows, slots, scores.dtype),
    )


def check(rows, scores, indices, addend, grad, device, **options):
    actual = run(rows, scores, indices, addend, grad, device, **options)
    topk = options.get("topk") or scores.shape[1]
    expected = expect(rows, scores, indices, addend, grad, topk)
    names = ("out", "inverse", "grad_rows", "grad_scores")
    for a, b, name in zip(actual, expected, names, strict=True):
        if b is not None:
            assert_same_bits(a, b, name)


def inputs(num_tokens, topk, hidden, dtype=torch.float32, scores_dtype=torch.float32, **options):
    scores, indices = make_assignments(num_tokens, topk, max(8, topk), **options)
    generator = torch.Generator().manual_seed(1)
    draw = lambda n: torch.randn(n, hidden, generator=generator).to(dtype)  # noqa: E731
    return (
        draw(indices.shape[0]),
        scores.to(scores_dtype),
        indices,
        draw(num_tokens),
        draw(num_tokens),
    )


@pytest.mark.parametrize(("dtype", "scores_dtype"), list(itertools.product(DTYPES, DTYPES)))
def test_every_dtype(dtype, scores_dtype, kernel_device):
    check(*inputs(13, 2, 300, dtype, scores_dtype), kernel_device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_addend", [False, True])
def test_without_scores(dtype, with_addend, kernel_device):
    rows, _, indices, addend, grad = inputs(13, 3, 300, dtype, alignment=4)
    rows[indices < 0] = torch.nan
    check(rows, None, indices, addend if with_addend else None, grad, kernel_device, topk=3)


@pytest.mark.parametrize("dropped", [0, 5])
def test_the_ways_to_invert(dropped, kernel_device, monkeypatch):
    """In one program, and by one kernel after the other."""
    rows, scores, indices, addend, grad = inputs(90, 3, 2, alignment=8)
    indices[:4] = indices[200]
    kept = slice(dropped, None)
    for at_once in (2**20, 0):
        monkeypatch.setattr(inversions, "INVERT_AT_ONCE", at_once)
        assert len(inversions.invert(indices, 270)) == (1 if at_once else 2)
        check(rows[kept], scores, indices[kept], addend, grad, kernel_device)


@pytest.mark.parametrize("topk", [1, 3, 8])
@pytest.mark.parametrize("hidden", [0, 1, 7, 130, 256, 2880])
def test_shapes(hidden, topk, kernel_device):
    check(*inputs(5, topk, hidden), kernel_device)


@pytest.mark.parametrize("num_assignments", [1, 127, 128, 129, 4096])
@pytest.mark.parametrize("num_rows", [0, 1, 300])
def test_sizes_of_an_inversion(num_rows, num_assignments, kernel_device):
    """Of one launch, whose programs own 128 assignments each."""
    generator = torch.Generator().manual_seed(2)
    indices = torch.randint(-2, num_assignments + 2, (num_rows,), generator=generator)
    inverse = torch.full((num_assignments + 1,), 12345, dtype=torch.int32, device=kernel_device)
    (launch,) = inversions.invert(indices.to(kernel_device), num_assignments)
    launch(indices.to(kernel_device), inverse)
    assert torch.equal(inverse[:-1].cpu().long(), invert(indices, num_assignments))
    assert inverse[-1] == 12345


@pytest.mark.parametrize("hidden", [7168, 7176, 8192])
def test_wide_rows(hidden, kernel_device):
    check(*inputs(2, 2, hidden, torch.bfloat16), kernel_device)


def test_many_assignments_per_token(kernel_device):
    check(*inputs(3, 64, 130), kernel_device)


@pytest.mark.parametrize("num_tokens", [0, 1, 33])
def test_token_counts(num_tokens, kernel_device):
    check(*inputs(num_tokens, 2, 40), kernel_device)


def test_no_addend(kernel_device):
    rows, scores, indices, _, grad = inputs(9, 2, 40)
    check(rows, scores, indices, None, grad, kernel_device)


def test_padding_rows_may_hold_nan(kernel_device):
    rows, scores, indices, addend, grad = inputs(9, 2, 300, alignment=16)
    assert (indices == -1).any()
    indices[indices == -1] = torch.tensor([-1, -7, 18, 10**6]).repeat(64)[: (indices == -1).sum()]
    rows[(indices < 0) | (indices >= 18)] = torch.nan
    check(rows, scores, indices, addend, grad, kernel_device)
    for result in run(rows, scores, indices, addend, grad, kernel_device):
        assert not result.isnan().any()


def test_dropped_assignments_add_zero(kernel_device):
    rows, scores, indices, addend, grad = inputs(9, 2, 40)
    scores[indices[12] // 2, indices[12] % 2] = torch.nan
    out, _, _, grad_scores = run(rows[:12], scores, indices[:12], addend, grad, kernel_device)
    assert not out.isnan().any()
    assert (grad_scores.flatten()[indices[12:].to(kernel_device)] == 0).all()
    check(rows[:12], scores, indices[:12], addend, grad, kernel_device)


def test_the_highest_row_wins_a_duplicate(kernel_device):
    rows, scores, indices, addend, grad = inputs(9, 2, 40)
    indices[:5] = indices[16]
    _, inverse, grad_rows, _ = run(rows, scores, indices, addend, grad, kernel_device)
    assert inverse[indices[16]] == 16
    assert (grad_rows[:5] == 0).all()
    check(rows, scores, indices, addend, grad, kernel_device)


def test_int32_indices_and_strides(kernel_device):
    rows, scores, indices, addend, grad = inputs(20, 3, 65)
    check(rows, scores, indices.int(), addend, grad, kernel_device)
    check(
        rows.t().contiguous().t(),
        scores.repeat(1, 2)[:, 1:4],
        indices.repeat_interleave(2)[::2],
        addend.repeat(1, 2)[:, 65:],
        grad[:1, :1].expand(20, 65),
        kernel_device,
    )


@pytest.mark.parametrize("magnitude", [1e-44, 1e-38, 1e30])
def test_extreme_magnitudes(magnitude, kernel_device):
    rows, scores, indices, addend, grad = inputs(20, 3, 65)
    check(rows * magnitude, scores, indices, addend * magnitude, grad, kernel_device)


def test_no_launch_choice_changes_a_bit(kernel_device):
    call = inputs(6, 5, 3000, torch.bfloat16)
    choices = [(1, 64, 1), (2, 256, 2), (4, 512, 4), (4, 1024, 8), (8, 2048, 16)]
    for num_warps, block_h, block_k in choices:
        options = {"num_warps": num_warps, "block_h": block_h}
        rows, _, indices, addend, grad = call
        for few_rows in (False, True):
            options["few_rows"] = few_rows
            check(*call, kernel_device, **options, block_k=block_k)
            check(rows, None, indices, addend, grad, kernel_device, topk=5, **options)


def test_few_rows_of_many_assignments(kernel_device, monkeypatch):
    """The forward then reads row after row, the backward moves those of a token together."""
    monkeypatch.setattr(plans, "enough_programs", lambda device: 10)
    rows, scores, indices, addend, grad = inputs(30, 3, 9)
    scores[indices[80] // 3] = torch.nan
    # Few are up to 3 of 8: 33 of 90, and not 34.
    for kept, few in (
        (slice(0), True),
        (slice(33), True),
        (slice(1, 80, 7), True),
        (slice(34), False),
    ):
        launch = plans.restore_backward_launch(grad, rows[kept], scores, indices[kept], 3, True)
        assert launch.options["COMPACT"] is few
        assert (plans.restore_launch(rows[kept], scores, None, 30, 3).options["LOADS"] == 1) is few
        check(rows[kept], scores, indices[kept], addend, grad, kernel_device)


def test_what_is_absent_makes_a_negative_zero_positive(kernel_device):
    """Skipping an absent row is not to be seen: the reference adds a zero for it."""
    rows, scores, indices, addend, grad = inputs(4, 2, 40)
    rows, addend = torch.full_like(rows, -0.0), torch.full_like(addend, -0.0)
    for kept, negative in ((8, True), (0, False)):
        call = rows[:kept], scores, indices[:kept], addend, grad
        check(*call, kernel_device)
        out, *_ = run(*call, kernel_device)
        assert torch.equal(out.signbit().cpu(), torch.full((4, 40), negative))


def test_products_are_rounded_before_they_are_added(kernel_device):
    """A fused multiply-add would keep the low bits of the product and give another result."""
    x = torch.tensor(1.0 + 2.0**-12)
    rows, scores = x.reshape(1, 1), x.reshape(1, 1)
    addend = -(x * x).reshape(1, 1)
    out, *_ = run(rows, scores, torch.tensor([0]), addend, addend, kernel_device)
    assert out.item() == 0.0
    assert (x.double() * x.double() + addend.double()).item() != 0.0


def test_garbage_in_the_inverse_is_bounded(kernel_device):
    """Slots that are no row read nothing, and every element is still written."""
    rows, scores, indices, addend, grad = (x.to(kernel_device) for x in inputs(9, 2, 40))
    garbage = torch.tensor([-5, 18, 2**31 - 1, -(2**31), 3, 3], dtype=torch.int32).repeat(3)
    out = empty(9, 40, dtype=rows.dtype, device=kernel_device)
    slots = torch.full((9, 2), 12345, dtype=torch.int32, device=kernel_device)
    launch = plans.restore_launch(rows, scores, addend, 9, 2)
    launch(rows, scores, garbage.to(kernel_device), addend, out, slots)
    assert slots.flatten().cpu().tolist() == [-1, -1, -1, -1, 3, 3] * 3
    grads = [empty(*x.shape, dtype=x.dtype, device=kernel_device) for x in (rows, scores)]
    launch = plans.restore_backward_launch(grad, rows, scores, indices, 2, True)
    launch(grad, rows, scores, indices, slots, *grads)
    for result in (out, *grads):
        assert not result.isnan().any()


def test_subnormal_bfloat16(kernel_device):
    rows, scores, indices, addend, grad = inputs(20, 3, 65, torch.bfloat16)
    tiny = lambda x: (x.float() * 1e-39).bfloat16()  # noqa: E731
    assert (tiny(rows) != 0).any()
    check(tiny(rows), scores, indices, tiny(addend), grad, kernel_device)


def test_float64_reaches_a_half_type_through_float32(kernel_device):
    """1 + 2^-8 + 2^-40 is a tie in float32's eyes, which rounds to even: 1."""
    row = torch.tensor([[1 + 2.0**-8 + 2.0**-40]], dtype=torch.float64)
    one = torch.ones(1, 1, dtype=torch.float64)
    call = (row, one.bfloat16(), torch.tensor([0]), one, one)
    _, _, _, grad_scores = run(*call, kernel_device)
    assert grad_scores.item() == 1.0
    check(*call, kernel_device)


@pytest.mark.parametrize("wide", ["rows", "addend", "grad"])
def test_strides_of_more_than_2_31_elements(wide, kernel_device):
    """They fit 32 bits only while they are counted in units of a load. Two pages are touched."""
    names = ("rows", "scores", "indices", "addend", "grad")
    call = dict(zip(names, inputs(2, 1, 16, torch.bfloat16), strict=True))
    stride = 2**32
    memory = untouched(stride + 16, dtype=torch.bfloat16, device=kernel_device)
    spread = memory.as_strided((2, 16), (stride, 1))
    spread.copy_(call[wide])
    expected = expect(*call.values(), 1)
    actual = run(**{**call, wide: spread}, device=kernel_device)
    for a, b in zip(actual, expected, strict=True):
        assert_same_bits(a, b)


def test_scores_of_a_wide_stride(kernel_device):
    """Its product with k passes 2^31. Three pages are touched."""
    rows, scores, indices, addend, grad = inputs(2, 3, 16)
    memory = untouched(3, 2**30, device=kernel_device)
    spread = memory[:, :2].t()
    spread.copy_(scores)
    expected = expect(rows, scores, indices, addend, grad, 3)
    actual = run(rows, spread, indices, addend, grad, kernel_device)
    for a, b in zip(actual, expected, strict=True):
        assert_same_bits(a, b)
