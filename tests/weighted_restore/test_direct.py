"""The direct path of weighted_restore and restore gives what the dispatcher gives."""

import pytest
import torch

from moe_custom_ops import (
    make_workspace,
    restore,
    weighted_restore,
    weighted_restore_workspace_size,
)
from moe_custom_ops.testing import assert_same_bits, make_assignments
from moe_custom_ops.weighted_restore import direct as own
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lead", [(6,), (2, 3), (2, 1, 3)])
@pytest.mark.parametrize(("with_addend", "given"), [(False, True), (True, False)])
def test_bits(dtype, lead, with_addend, given, launched, kernel_device):
    rows, scores, indices, addend, grad = make(dtype, lead)
    addend = addend if with_addend else None
    expected = results(through_the_dispatcher, rows, scores, indices, addend, grad, "cpu")
    assert not launched
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
    assert len(own._PLANS) == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_addend", [False, True])
def test_bits_without_weights(dtype, with_addend, launched, kernel_device):
    rows, _, indices, addend, grad = make(dtype, alignment=4)
    rows[indices < 0] = torch.nan
    addend = addend if with_addend else None

    def dispatched(rows, _, indices, addend, workspace):
        return torch.ops.moe.restore(rows, indices, 6, 3, addend, workspace)

    def own_path(rows, _, indices, addend, workspace):
        return restore(rows, indices, 6, 3, addend, workspace)

    expected = results(dispatched, rows, None, indices, addend, grad, "cpu")
    for _ in range(2):
        launched.clear()
        actual = results(own_path, rows, None, indices, addend, grad, kernel_device)
        assert launched == [INVERT, GATHER, "_permute_kernel"]
        for a, b in zip(actual, expected, strict=True):
            assert_same_bits(a, b)


@pytest.mark.parametrize("needs", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (0, 0, 0)])
def test_gradients_on_demand(needs, launched, kernel_device):
    rows, scores, indices, addend, grad = make()
    expected = results(through_the_dispatcher, rows, scores, indices, addend, grad, "cpu")[1:]
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
    grads = [
        torch.ones(()).expand(2, 3, 20),
        torch.cat([grad, grad], -1)[..., 20:],
        grad.transpose(0, 1).contiguous().transpose(0, 1),
        torch.cat([torch.zeros(1), grad.flatten()])[1:].view(2, 3, 20),
        grad,
    ]
    for grad in grads:
        expected = results(through_the_dispatcher, rows, scores, indices, None, grad, "cpu")
        own_rows, own_scores, own_indices, own_grad = (
            x.to(kernel_device) for x in (rows, scores, indices, grad)
        )
        own_rows.requires_grad_()
        own_scores.requires_grad_()
        for _ in range(2):
            out = weighted_restore(own_rows, own_scores, own_indices)
            actual = torch.autograd.grad(out, (own_rows, own_scores), own_grad)
            for a, b in zip(actual, expected[1:], strict=True):
                assert_same_bits(a, b)
    assert len(own._PLANS) == 1


@pytest.mark.parametrize("num_tokens", [0, 1, 33])
@pytest.mark.parametrize("hidden", [0, 1, 300])
def test_sizes(num_tokens, hidden, launched, kernel_device):
    rows, scores, indices, addend, grad = make(lead=(num_tokens,), hidden=hidden)
    call = (rows, scores, indices, addend, grad)
    for a, b in zip(
        results(weighted_restore, *call, kernel_device),
        results(through_the_dispatcher, *call, "cpu"),
        strict=True,
    ):
        assert a.shape == b.shape
        assert_same_bits(a, b)


def test_large_permutations_take_two_launches(launched, kernel_device, monkeypatch):
    from moe_custom_ops.weighted_restore import inverse_kernels

    monkeypatch.setattr(inverse_kernels, "INVERT_AT_ONCE", 0)
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

    expected = second(through_the_dispatcher, "cpu")
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
    expected = results(through_the_dispatcher, strided, *call, "cpu")
    dense = lambda x: x.clone(memory_format=torch.contiguous_format)  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(dense, lambda x: x):
        actual = results(weighted_restore, strided, *call, kernel_device)
    for a, b in zip(actual, expected, strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("change", ["strides", "alignment"])
def test_slots_that_come_back_changed(change, launched, kernel_device):
    rows, scores, indices, _, grad = make()
    call = (rows, scores, indices, None, grad)
    expected = results(through_the_dispatcher, *call, "cpu")

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
    assert BACKWARD not in launched or kernel_device == "cuda"


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
