"""The restores past the dispatcher, and the CUDA implementations, give what the CPU gives."""

from collections import Counter

import pytest
import torch

from moe_custom_ops import (
    make_workspace,
    op,
    permute_workspace_size,
    restore,
    weighted_restore,
    weighted_restore_workspace_size,
)
from moe_custom_ops.permutation import plans as inversions
from moe_custom_ops.rows import ops, plans
from moe_custom_ops.testing import assert_same_bits, make_assignments
from tests.conftest import dispatched
from tests.weighted_restore.test_ops import BAD_CALLS, bad

pytestmark = pytest.mark.kernels

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
INVERT, GATHER = "_invert_at_once_kernel", "_weighted_restore_kernel"
BACKWARD = "_weighted_restore_backward_kernel"


def make(dtype=torch.float32, lead=(6,), hidden=20, scores_dtype=torch.float32, **options):
    """(rows, top_scores, token_indices_sorted, addend, grad)"""
    num_tokens = torch.Size(lead).numel()
    scores, indices = make_assignments(num_tokens, 3, 8, **options)
    generator = torch.Generator().manual_seed(2)
    draw = lambda *shape: torch.randn(shape, generator=generator).to(dtype)  # noqa: E731
    scores = scores.to(scores_dtype).view(*lead, 3)
    return draw(indices.shape[0], hidden), scores, indices, draw(*lead, hidden), draw(*lead, hidden)


def through_the_dispatcher(rows, scores, indices, addend, workspace):
    return torch.ops.moe.weighted_restore(rows, scores, indices, addend, workspace)


def results(call, rows, scores, indices, addend, grad, device, workspace=None):
    """(result, gradients of those that are given)"""
    rows, scores, addend = (
        None if x is None else x.clone().to(device).requires_grad_() for x in (rows, scores, addend)
    )
    out = call(rows, scores, indices.to(device), addend, workspace)
    leaves = [x for x in (rows, scores, addend) if x is not None]
    return out.detach(), *torch.autograd.grad(out, leaves, grad.to(device))


def expect(rows, scores, indices, addend, grad):
    """On the CPU, where neither the result nor a gradient comes from a kernel."""
    with dispatched():
        return results(through_the_dispatcher, rows, scores, indices, addend, grad, "cpu")


def num_plans():
    return Counter(key[0] for key in op.PLANS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lead", [(6,), (2, 3), (2, 1, 3)])
@pytest.mark.parametrize(("with_addend", "given"), [(False, True), (True, False)])
def test_bits(dtype, lead, with_addend, given, launched, kernel_device):
    rows, scores, indices, addend, grad = make(dtype, lead)
    addend = addend if with_addend else None
    expected = expect(rows, scores, indices, addend, grad)
    assert not launched and not op.PLANS
    workspace = None
    if given:
        size = weighted_restore_workspace_size(6, 3)
        workspace = make_workspace(size, kernel_device).fill_(255)
    for _ in range(2):
        launched.clear()
        call = (rows, scores, indices, addend, grad, kernel_device, workspace)
        actual = results(weighted_restore, *call)
        assert launched == [INVERT, GATHER, BACKWARD]
        for a, b in zip(actual, expected, strict=True):
            assert_same_bits(a, b)
            assert a.abs().sum() > 0
    assert num_plans() == {plans.restore: 1, plans.restore_backward: 1}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_addend", [False, True])
def test_bits_without_weights(dtype, with_addend, launched, kernel_device):
    rows, _, indices, addend, grad = make(dtype, alignment=4)
    rows[indices < 0] = torch.nan
    addend = addend if with_addend else None

    def by_the_op(rows, _, indices, addend, workspace):
        return torch.ops.moe.restore(rows, indices, 6, 3, addend, workspace)

    def own_path(rows, _, indices, addend, workspace):
        return restore(rows, indices, 6, 3, addend, workspace)

    with dispatched():
        expected = results(by_the_op, rows, None, indices, addend, grad, "cpu")
    for _ in range(2):
        launched.clear()
        actual = results(own_path, rows, None, indices, addend, grad, kernel_device)
        assert launched == [INVERT, GATHER, "_permute_kernel"]
        for a, b in zip(actual, expected, strict=True):
            assert_same_bits(a, b)


@pytest.mark.parametrize("needs", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (0, 0, 0)])
def test_gradients_on_demand(needs, launched, kernel_device):
    rows, scores, indices, addend, grad = make()
    expected = expect(rows, scores, indices, addend, grad)[1:]
    inputs = [x.to(kernel_device) for x in (rows, scores, addend)]
    leaves = [x.requires_grad_() for x, need in zip(inputs, needs, strict=True) if need]
    out = weighted_restore(inputs[0], inputs[1], indices.to(kernel_device), inputs[2])
    assert out.requires_grad == bool(leaves)
    if leaves:
        grad = grad.to(kernel_device)
        grads = torch.autograd.grad(out, leaves, grad)
        wanted = [x for x, need in zip(expected, needs, strict=True) if need]
        for a, b in zip(grads, wanted, strict=True):
            assert_same_bits(a, b)
        assert grads[-1] is grad or not needs[2]
    assert launched.count(BACKWARD) == (needs[0] or needs[1])


def test_any_strides_of_the_gradient(launched, kernel_device):
    rows, scores, indices, _, grad = make(lead=(2, 3))
    own_rows, own_scores, own_indices, grad = (
        x.to(kernel_device) for x in (rows, scores, indices, grad)
    )
    own_rows.requires_grad_()
    own_scores.requires_grad_()
    one, zero = torch.ones((), device=kernel_device), torch.zeros(1, device=kernel_device)
    grads = [
        one.expand(2, 3, 20),
        torch.cat([grad, grad], -1)[..., 20:],
        grad.transpose(0, 1).contiguous().transpose(0, 1),
        torch.cat([zero, grad.flatten()])[1:].view(2, 3, 20),
        grad,
    ]
    for own_grad in grads:
        expected = expect(rows, scores, indices, None, own_grad.cpu())
        for _ in range(2):
            out = weighted_restore(own_rows, own_scores, own_indices)
            actual = torch.autograd.grad(out, (own_rows, own_scores), own_grad)
            for a, b in zip(actual, expected[1:], strict=True):
                assert_same_bits(a, b)
    assert num_plans() == {plans.restore: 1, plans.restore_backward: 5}


@pytest.mark.parametrize("num_tokens", [0, 1, 33])
@pytest.mark.parametrize("hidden", [0, 1, 300])
def test_sizes(num_tokens, hidden, launched, kernel_device):
    rows, scores, indices, addend, grad = make(lead=(num_tokens,), hidden=hidden)
    call = (rows, scores, indices, addend, grad)
    for a, b in zip(
        results(weighted_restore, *call, kernel_device),
        expect(*call),
        strict=True,
    ):
        assert a.shape == b.shape
        assert_same_bits(a, b)


def test_large_permutations_take_two_launches(launched, kernel_device, monkeypatch):
    monkeypatch.setattr(inversions, "INVERT_AT_ONCE", 0)
    rows, scores, indices, _, _ = make()
    out = weighted_restore(*(x.to(kernel_device) for x in (rows, scores, indices)))
    assert launched == ["_fill_inverse_kernel", "_invert_kernel", GATHER]
    assert_same_bits(out, torch.ops.moe.weighted_restore(rows, scores, indices))


def test_gradient_of_the_gradient(launched, kernel_device):
    rows, scores, indices, addend, grad = make(torch.float64, scores_dtype=torch.float64)
    weights = [torch.rand_like(rows), torch.rand_like(scores)]

    def second(call, device):
        leaves = [x.clone().to(device).requires_grad_() for x in (rows, scores, grad)]
        out = call(leaves[0], leaves[1], indices.to(device), addend.to(device), None)
        grads = torch.autograd.grad(out, leaves[:2], leaves[2], create_graph=True)
        loss = sum((g * w.to(device)).sum() for g, w in zip(grads, weights, strict=True))
        return [x.cpu() for x in torch.autograd.grad(loss, leaves)]

    with dispatched():
        expected = second(through_the_dispatcher, "cpu")
    assert not launched
    actual = second(weighted_restore, kernel_device)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
        assert b.abs().min() > 0


def test_batched_gradients(launched, kernel_device):
    rows, scores, indices, _, grad = make()
    rows, scores = (x.to(kernel_device).requires_grad_() for x in (rows, scores))
    out = weighted_restore(rows, scores, indices.to(kernel_device))
    grads = torch.stack([grad, 3 * grad]).to(kernel_device)
    batched = torch.autograd.grad(out, (rows, scores), grads, True, is_grads_batched=True)
    for i in range(2):
        for a, b in zip(
            batched, torch.autograd.grad(out, (rows, scores), grads[i], True), strict=True
        ):
            assert_same_bits(a[i].contiguous(), b)
            assert b.abs().sum() > 0


def test_saved_tensors_that_come_back_with_other_strides(launched, kernel_device):
    rows, scores, indices, _, grad = make()
    strided = rows.t().contiguous().t()
    call = (scores.repeat(1, 2)[:, ::2], indices.repeat_interleave(2)[::2], None, grad)
    expected = expect(strided, *call)
    dense = lambda x: x.clone(memory_format=torch.contiguous_format)  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(dense, lambda x: x):
        actual = results(weighted_restore, strided, *call, kernel_device)
    for a, b in zip(actual, expected, strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("change", ["strides", "alignment"])
def test_slots_that_come_back_changed(change, launched, kernel_device):
    rows, scores, indices, _, grad = make()
    call = (rows, scores, indices, None, grad)
    expected = expect(*call)

    def unpack(x):
        if x.dtype != torch.int32:
            return x
        if change == "strides":
            return x.t().contiguous().t()
        return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)

    for function in (weighted_restore, through_the_dispatcher):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
            actual = results(function, *call, kernel_device)
        for a, b in zip(actual, expected, strict=True):
            assert_same_bits(a, b)
    # A backward goes past the dispatcher too where its forward did not.
    assert launched.count(BACKWARD) == 2


def test_what_the_backward_does_not_read_is_not_saved(launched, kernel_device):
    rows, scores, indices, addend, _ = (x.to(kernel_device) for x in make())
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda x: x):
        for function in (weighted_restore, torch.ops.moe.weighted_restore):
            function(rows, scores, indices, addend.clone().requires_grad_())
    assert not kept


@pytest.mark.parametrize(("change", "error", "message"), BAD_CALLS)
def test_bad_input(change, error, message, launched, kernel_device):
    good = bad({})
    good = {k: v.to(kernel_device) if isinstance(v, torch.Tensor) else v for k, v in good.items()}
    moved = {k: v for k, v in change.items() if getattr(v, "is_cpu", False)}
    if "workspace" in moved and kernel_device != "cpu":
        pytest.skip("a copy would lose the alignment and the strides that are the mistake")
    change = {**change, **{k: v.to(kernel_device) for k, v in moved.items()}}
    message = message.replace("cpu", str(torch.empty(0, device=kernel_device).device))
    weighted_restore(**good)
    launched.clear()
    with pytest.raises(error, match=f"weighted_restore: .*{message}"):
        weighted_restore(**{**good, **change})
    assert not launched


def moved(device, *arguments):
    return [x.to(device) if isinstance(x, torch.Tensor) else x for x in arguments]


def garbage(num_bytes, device):
    return torch.full((num_bytes,), 255, dtype=torch.uint8, device=device)


def check(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        assert (a is None) == (b is None)
        if b is not None:
            assert_same_bits(a, b)


@pytest.mark.parametrize("num_tokens", [0, 6])
@pytest.mark.parametrize("num_rows", [0, 5, 18, 30])
@pytest.mark.parametrize("with_addend", [False, True])
def test_the_cuda_implementations_of_the_restores(
    num_tokens, num_rows, with_addend, launched, kernel_device
):
    scores, indices = make_assignments(num_tokens, 3, 8)
    indices = torch.cat([indices, torch.full((30,), -1)])[:num_rows]
    rows = torch.randn(num_rows, 20)
    lead = (2, num_tokens // 2)
    scores, grad = scores.view(*lead, 3), torch.randn(*lead, 20)
    addend = torch.randn(*lead, 20) if with_addend else None
    inverse = torch.ops.moe.inverse(indices, num_tokens, 3)
    size = weighted_restore_workspace_size(num_tokens, 3)

    def run(restore, backward, device):
        own = moved(device, rows, scores, indices, addend)
        own_rows, own_scores, own_indices, own_addend = own
        own_grad, own_inverse = moved(device, grad, inverse.view(*lead, 3))
        flat_addend = None if own_addend is None else own_addend.flatten(0, 1)
        results = []
        for given, workspace in (
            (None, garbage(size, device)),
            (None, None),
            (own_inverse, None),
        ):
            results += restore(*own, given, workspace, 0, 0)
            given = None if given is None else given.flatten(0, 1)
            call = own_rows, None, own_indices, flat_addend, given, workspace
            results += restore(*call, num_tokens, 3)
        slots = results[1]
        grads = backward(own_grad, own_rows, own_scores, own_indices, slots, True)
        only_scores = backward(own_grad, own_rows, own_scores, own_indices, slots, False)
        only_rows = backward(own_grad, None, own_scores, own_indices, slots, True)
        plain_rows = backward(own_grad, None, None, own_indices, slots, True)
        assert only_scores[0].shape == only_rows[1].shape == plain_rows[1].shape == (0,)
        assert_same_bits(only_scores[1], grads[1])
        assert_same_bits(only_rows[0], grads[0])
        return *results, *grads, plain_rows[0]

    expected = run(ops._restore_cpu, ops._restore_backward_cpu, "cpu")
    assert not launched
    assert [x is None for x in expected[1:12:2]] == [False] * 4 + [True] * 2
    check(run(ops._restore_cuda, ops._restore_backward_cuda, kernel_device), expected)
    assert launched.count(GATHER) == 6
    assert launched.count(INVERT) == 4


@pytest.mark.parametrize("num_tokens", [0, 6])
@pytest.mark.parametrize("num_rows", [0, 5, 18, 30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.float8_e4m3fn])
def test_the_cuda_implementation_of_permute(num_tokens, num_rows, dtype, launched, kernel_device):
    _, indices = make_assignments(num_tokens, 3, 8)
    indices = torch.cat([indices, torch.full((30,), -1)])[:num_rows]
    tokens = torch.randn(num_tokens, 20)
    tokens = tokens > 0 if dtype == torch.bool else tokens.to(dtype)
    inverse = torch.ops.moe.inverse(indices, num_tokens, 3)
    size = permute_workspace_size(num_tokens, 3)

    def run(permute, device):
        own_tokens, own_indices, own_inverse = moved(device, tokens, indices, inverse)
        results = []
        for given, workspace in (
            (None, garbage(size, device)),
            (None, None),
            (own_inverse, None),
            (own_inverse.t().contiguous().t(), None),
        ):
            rows, slots = permute(own_tokens, own_indices, given, workspace, 3)
            assert rows.dtype == dtype and (slots is None) == (given is not None)
            # With a workspace the slots lie in it, where no caller looks for them.
            results.append(rows.view(torch.uint8) if dtype.itemsize == 1 else rows)
            results.append(slots if workspace is None else None)
        return results

    expected = run(ops._permute_cpu, "cpu")
    assert not launched
    check(run(ops._permute_cuda, kernel_device), expected)
    assert launched.count(INVERT) == 2 and launched.count("_permute_kernel") == 4


def test_a_call_of_an_implementation_with_wrong_lengths_is_refused(launched, kernel_device):
    scores, indices = make_assignments(6, 3, 8)
    rows, grad = torch.randn(18, 20), torch.randn(6, 20)
    slots = torch.zeros(6, 3, dtype=torch.int32)
    grad, rows, scores, indices, slots = moved(kernel_device, grad, rows, scores, indices, slots)
    for changed, message in [
        ((grad, rows, scores, indices[:9], slots), "token_indices_sorted must be of shape"),
        ((grad, rows, scores, indices, slots[:2]), "top_scores must be of shape"),
        ((grad[:2], rows, scores, indices, slots), "grad must be of shape"),
        ((grad, rows[:, :9], scores, indices, slots), "rows must be of shape"),
        ((grad, rows, scores, indices, slots.long()), "slots must be int32"),
        ((grad, rows, None, indices, slots), "top_scores must be given with rows"),
    ]:
        for backward in (ops._restore_backward_cuda, ops._restore_backward_cpu):
            with pytest.raises((ValueError, TypeError), match=f"restore_backward: {message}"):
                backward(*changed, True)
    scratch = garbage(96, kernel_device)
    for changed, message in [
        ((rows, scores, indices[:9], None, None, None), "token_indices_sorted must be of shape"),
        ((rows, scores, indices, None, slots[:5], None), "inverse must be of shape"),
        ((rows, scores, indices, None, slots.long(), None), "inverse must be int32"),
        ((rows, scores, indices, grad[:1], None, None), "addend must be of shape"),
        ((rows, scores, indices, None, None, scratch[:64]), "workspace must be at least 80 bytes"),
        ((rows, scores[:, :0], indices, None, None, None), "top_scores must be of shape"),
    ]:
        for run in (ops._restore_cuda, ops._restore_cpu):
            with pytest.raises((ValueError, TypeError), match=f"weighted_restore: {message}"):
                run(*changed, 0, 0)
    for changed, message in [
        ((rows[0], indices, None, None, 3), "tokens must be of shape"),
        ((grad, indices[None], None, None, 3), "token_indices_sorted must be of shape"),
        ((grad, indices, slots[:2], None, 3), "inverse must be of shape"),
        ((grad, indices, None, scratch[:64], 3), "workspace must be at least 80 bytes"),
        ((grad, indices, None, None, 0), "topk must be at least 1"),
    ]:
        for run in (ops._permute_cuda, ops._permute_cpu):
            with pytest.raises((ValueError, TypeError), match=f"permute: {message}"):
                run(*changed)
    assert not launched


def test_slots_of_any_strides(kernel_device, launched):
    scores, indices = make_assignments(6, 3, 8)
    arguments = (torch.randn(6, 20), torch.randn(18, 20), scores, indices)
    grad, rows, scores, indices = moved(kernel_device, *arguments)
    out, slots = ops._restore_cuda(rows, scores, indices, None, None, None, 0, 0)
    strided = slots.t().contiguous().t()
    assert not strided.is_contiguous()
    backward = ops._restore_backward_cuda
    check(
        backward(grad, rows, scores, indices, strided, True),
        backward(grad, rows, scores, indices, slots, True),
    )
    again, none = ops._restore_cuda(rows, scores, indices, None, strided, None, 0, 0)
    assert_same_bits(again, out)
    assert none is None
