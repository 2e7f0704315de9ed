"""The direct path of sequence_aux_loss gives what the dispatcher gives."""

import pytest
import torch

from moe_custom_ops import make_workspace, sequence_aux_loss, sequence_aux_loss_workspace_size
from moe_custom_ops.sequence_aux_loss import direct as own
from moe_custom_ops.testing import assert_same_bits, make_probs
from tests.sequence_aux_loss.test_ops import BAD_CALLS, bad

pytestmark = pytest.mark.kernels

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
FORWARD = ["_sequence_tile_sums_kernel", "_sequence_sums_kernel", "_sequence_loss_kernel"]


def move(device, *tensors):
    return [x.to(device) if isinstance(x, torch.Tensor) else x for x in tensors]


def inputs(layout, dtype=torch.float32):
    """(probs, counts, cu_seqlens, token_mask)"""
    counts = torch.randint(0, 99, (3, 16), generator=torch.Generator().manual_seed(0))
    probs, _ = make_probs(60, 16, dtype=dtype)
    mask = torch.arange(60) % 3 > 0 if "masked" in layout else None
    if "packed" in layout:
        return probs, counts, torch.tensor([2, 30, 30, 57]), mask
    return probs.view(3, 20, 16), counts, None, None if mask is None else mask.view(3, 20)


LAYOUTS = ["batch", "batch masked", "packed", "packed masked"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("given", [False, True])
def test_bits_of_loss_and_gradient(dtype, layout, given, launched, kernel_device):
    probs, counts, ends, mask = inputs(layout, dtype)
    expected_probs = probs.clone().requires_grad_()
    expected = torch.ops.moe.sequence_aux_loss(expected_probs, counts, 2, 0.1, ends, mask)
    expected.backward(torch.tensor(0.3, dtype=expected.dtype))
    assert not launched

    workspace = None
    if given:
        size = sequence_aux_loss_workspace_size(60, 3, 16, dtype)
        workspace = make_workspace(size, kernel_device).fill_(255)
    own_probs, counts, ends, mask = move(kernel_device, probs, counts, ends, mask)
    own_probs.requires_grad_()
    for _ in range(3):
        own_probs.grad = None
        launched.clear()
        loss = sequence_aux_loss(own_probs, counts, 2, 0.1, ends, mask, workspace)
        loss.backward(torch.tensor(0.3, dtype=loss.dtype, device=kernel_device))
        assert launched == [*FORWARD, "_grad_rows_kernel"]
        assert_same_bits(loss.detach(), expected.detach(), "loss")
        assert_same_bits(own_probs.grad, expected_probs.grad, "gradient")
        assert own_probs.grad.dtype == dtype and own_probs.grad.abs().sum() > 0
    assert len(own._PLANS) == 1


@pytest.mark.parametrize("shape", [(0, 5, 8), (2, 0, 8), (2, 5, 0), (1, 700, 8), (3, 1, 2304)])
def test_sizes(shape, launched, kernel_device):
    probs = torch.rand(shape).softmax(-1)
    counts = torch.ones(shape[0], shape[2])
    expected = torch.ops.moe.sequence_aux_loss(probs, counts, 2, 0.1)
    probs, counts = move(kernel_device, probs, counts)
    probs.requires_grad_()
    for _ in range(2):
        loss = sequence_aux_loss(probs, counts, 2, 0.1)
        assert_same_bits(loss.detach(), expected)
        (grad,) = torch.autograd.grad(loss, probs)
        assert grad.shape == shape


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradient_of_the_gradient(layout, launched, kernel_device):
    probs, counts, ends, mask = inputs(layout, torch.float64)
    weights = torch.rand(probs.shape, dtype=torch.float64)

    def second(device, loss_of):
        p, n, c, m, w = move(device, probs.clone(), counts, ends, mask, weights)
        loss = loss_of(p.requires_grad_(), n, 2, 100.0, c, m) ** 2
        (grad,) = torch.autograd.grad(loss, p, create_graph=True)
        (grad,) = torch.autograd.grad((grad * w).sum(), p)
        return grad.cpu()

    expected = second("cpu", torch.ops.moe.sequence_aux_loss)
    actual = second(kernel_device, sequence_aux_loss)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=0)
    assert expected.abs().max() > 0


def test_saved_tensors_that_come_back_with_other_strides(launched, kernel_device):
    probs, counts, ends, _ = inputs("packed")
    expected_probs = probs.clone().requires_grad_()
    torch.ops.moe.sequence_aux_loss(expected_probs, counts, 2, 0.1, ends).backward()
    probs, counts, ends = move(kernel_device, probs, counts.t().contiguous().t(), ends)
    dense = lambda x: x.clone(memory_format=torch.contiguous_format)  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(dense, lambda x: x):
        loss = sequence_aux_loss(probs.requires_grad_(), counts, 2, 0.1, ends)
    loss.backward()
    assert launched == FORWARD
    assert_same_bits(probs.grad, expected_probs.grad)


@pytest.mark.parametrize(("change", "error", "message"), BAD_CALLS)
def test_bad_input(change, error, message, launched, kernel_device):
    good = bad({})
    good = dict(zip(good, move(kernel_device, *good.values()), strict=True))
    moved = {k: v.to(kernel_device) for k, v in change.items() if getattr(v, "is_cpu", False)}
    sequence_aux_loss(**good)
    launched.clear()
    with pytest.raises(error, match=f"sequence_aux_loss: .*{message}"):
        sequence_aux_loss(**{**good, **change, **moved})
    assert not launched
