"""sequence_aux_loss past the dispatcher, and its CUDA implementation, give what the CPU gives."""

import gc
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from moe_custom_ops import make_workspace, op, sequence_aux_loss, sequence_aux_loss_workspace_size
from moe_custom_ops.losses import ops, plans
from moe_custom_ops.testing import assert_same_bits, make_probs
from tests.conftest import dispatched
from tests.sequence_aux_loss.test_ops import BAD_CALLS, bad

pytestmark = pytest.mark.kernels

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
FORWARD = ["_sequence_tile_sums_kernel", "_sequence_sums_kernel", "_sequence_loss_kernel"]
GRADIENT = "_grad_rows_kernel"
# What the op is registered with for CUDA; under the interpreter it takes CPU tensors.
CUDA = op.registered(plans.sequence_aux_loss, 7, 2)
SUMS_OF_RANK = op.registered(plans.sequence_aux_loss_sums, 4)


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
    with dispatched():
        expected = torch.ops.moe.sequence_aux_loss(expected_probs, counts, 2, 0.1, ends, mask)
        expected.backward(torch.tensor(0.3, dtype=expected.dtype))
    assert not launched and not op.PLANS

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
        assert launched == [*FORWARD, GRADIENT]
        assert_same_bits(loss.detach(), expected.detach(), "loss")
        assert_same_bits(own_probs.grad, expected_probs.grad, "gradient")
        assert own_probs.grad.dtype == dtype and own_probs.grad.abs().sum() > 0
    assert [key[0] for key in op.PLANS] == [plans.sequence_aux_loss, plans.grad_rows]


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

    with dispatched():
        expected = second("cpu", torch.ops.moe.sequence_aux_loss)
    assert not launched
    actual = second(kernel_device, sequence_aux_loss)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=0)
    assert expected.abs().max() > 0


def test_saved_tensors_that_come_back_with_other_strides(launched, kernel_device):
    probs, counts, ends, _ = inputs("packed")
    expected_probs = probs.clone().requires_grad_()
    with dispatched():
        torch.ops.moe.sequence_aux_loss(expected_probs, counts, 2, 0.1, ends).backward()
    probs, counts, ends = move(kernel_device, probs, counts.t().contiguous().t(), ends)
    dense = lambda x: x.clone(memory_format=torch.contiguous_format)  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(dense, lambda x: x):
        loss = sequence_aux_loss(probs.requires_grad_(), counts, 2, 0.1, ends)
    loss.backward()
    assert launched == [*FORWARD, GRADIENT]
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


def test_numbers_for_a_float_stay_past_the_dispatcher(launched, kernel_device, monkeypatch):
    monkeypatch.setattr(ops.SEQUENCE_AUX_LOSS, "op", None)
    probs, counts, ends, _ = inputs("packed")
    own_probs, own_counts, own_ends = move(kernel_device, probs, counts, ends)
    for coeff in (1, 0, -3, np.float64(1e-2), 1e-2):
        launched.clear()
        expected = torch.ops.moe.sequence_aux_loss(probs, counts, 2, coeff, ends)
        loss = sequence_aux_loss(own_probs, own_counts, 2, coeff, own_ends)
        assert launched == FORWARD
        assert_same_bits(loss, expected)


def test_equal_numbers_of_other_types_are_refused_all_the_same(launched, kernel_device):
    """They have the key of a plan that is there."""
    probs, counts, ends, _ = move(kernel_device, *inputs("packed"))
    sequence_aux_loss(probs, counts, 1, 1.0, ends)
    launched.clear()
    for topk, coeff, message in [
        (True, 1.0, "topk must be an int, got bool"),
        (1.0, 1.0, "topk must be an int, got float"),
        (1, True, "coeff must be a number, got bool"),
    ]:
        with pytest.raises(TypeError, match=f"sequence_aux_loss: {message}"):
            sequence_aux_loss(probs, counts, topk, coeff, ends)
    assert not launched


@pytest.mark.parametrize("mode_in", ["forward", "backward", "both"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_one_pass_of_which_is_under_a_mode(layout, mode_in, launched, kernel_device):
    """Each pass is to save what the other does: PyTorch compares them."""
    probs, counts, ends, mask = inputs(layout)
    expected_probs = probs.clone().requires_grad_()
    with dispatched():
        loss = torch.ops.moe.sequence_aux_loss(expected_probs, counts, 2, 0.1, ends, mask)
        loss.backward()
    probs, counts, ends, mask = move(kernel_device, probs, counts, ends, mask)
    probs.requires_grad_()

    def region(probs):
        return sequence_aux_loss(probs * 1, counts, 2, 0.1, ends, mask)

    mode = FlopCounterMode(display=False)
    # Without the early stop PyTorch sees a tensor too many, too.
    with mode if mode_in != "backward" else nullcontext(), set_checkpoint_early_stop(False):
        loss = checkpoint(region, probs, use_reentrant=False)
    forward = list(launched)
    with FlopCounterMode(display=False) if mode_in != "forward" else nullcontext():
        loss.backward()
    if kernel_device == "cpu":
        # Under a mode the dispatcher takes the CPU's implementation.
        assert forward == (FORWARD if mode_in == "backward" else [])
        assert launched[len(forward) :] == ([*FORWARD, GRADIENT] if mode_in == "forward" else [])
    assert_same_bits(probs.grad, expected_probs.grad)
    assert probs.grad.abs().sum() > 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_compiled_autograd_over_a_forward_past_the_dispatcher(layout, launched, kernel_device):
    probs, counts, ends, mask = move(kernel_device, *inputs(layout))
    probs.requires_grad_()
    loss = sequence_aux_loss(probs, counts, 2, 0.1, ends, mask)
    (expected,) = torch.autograd.grad(loss, probs)
    launched.clear()
    loss = sequence_aux_loss(probs, counts, 2, 0.1, ends, mask)
    compiler = torch.compile(fullgraph=True, backend="eager")
    with torch._dynamo.compiled_autograd._enable(compiler):
        loss.backward()
    assert launched == FORWARD
    assert_same_bits(probs.grad, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_loss_that_is_kept_keeps_no_input(layout, launched, kernel_device):
    """One of each step is kept for a log."""
    probs, *constants = move(kernel_device, *inputs(layout))
    probs.requires_grad_()
    counts, ends, mask = constants
    storages = [StorageWeakRef(x.untyped_storage()) for x in constants if x is not None]
    loss = sequence_aux_loss(probs, counts, 2, 0.1, ends, mask)
    loss.backward()
    assert launched[:3] == FORWARD
    del constants, counts, ends, mask
    gc.collect()
    assert all(x.expired() for x in storages)
    assert loss.requires_grad


def own_sequences(lengths, layout, columns):
    """(probs, counts, cu_seqlens, token_mask), in a pack of one tile at least."""
    counts = torch.ones(len(lengths), columns)
    if layout == "batch":
        probs = make_probs(30 * len(lengths), columns)[0].view(len(lengths), 30, columns)
        return probs, counts, None, None
    probs, _ = make_probs(max(sum(lengths), 600), columns)
    mask = torch.arange(probs.shape[0]) % 3 > 0 if layout == "masked" else None
    return probs, counts, torch.tensor([0, *lengths]).cumsum(0), mask


def scratch(call, device):
    probs, counts = call[:2]
    size = sequence_aux_loss_workspace_size(probs.shape[:-1].numel(), *counts.shape)
    return torch.full((size,), 255, dtype=torch.uint8, device=device)


def check(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("lengths", [[], [0, 0], [40, 0, 7], [700]])
@pytest.mark.parametrize("layout", ["packed", "masked", "batch"])
@pytest.mark.parametrize("given", [False, True])
def test_the_cuda_implementation(lengths, layout, given, kernel_device):
    call = own_sequences(lengths, layout, 16)
    expected = torch.ops.moe.sequence_aux_loss_forward(*call, None, None, 2, 0.1)
    workspace = scratch(call, kernel_device) if given else None
    for _ in range(2):
        actual = CUDA(*move(kernel_device, *call), None, None, workspace, 2, 0.1)
        check(actual, expected)
    on_cpu = (*call, None, None, scratch(call, "cpu"), 2, 0.1)
    check(torch.ops.moe.sequence_aux_loss_forward_in(*on_cpu), expected)


def test_the_cuda_implementation_stays_inside_its_scratch(kernel_device):
    call = move(kernel_device, *own_sequences([700], "packed", 16))
    with pytest.raises(ValueError, match="workspace must be at least"):
        CUDA(*call, None, None, scratch(call, kernel_device)[:-16], 2, 0.1)


@pytest.mark.parametrize("lengths", [[], [0, 0], [40, 0, 7], [700, 600]])
@pytest.mark.parametrize(("layout", "columns"), [("packed", 16), ("batch", 16), ("batch", 700)])
@pytest.mark.parametrize("given", [False, True])
def test_the_sums_of_sequences_of_a_rank(lengths, layout, columns, given, kernel_device):
    call = own_sequences(lengths, layout, columns)

    def run(sums_of_rank, loss_of, workspace, device):
        inputs = move(device, *call)
        own = sums_of_rank(*inputs, 5)
        lengths = torch.arange(inputs[1].shape[0], device=device)
        results = [own]
        # One sum of each sequence, the sums of its tiles, and none but this rank's.
        for sums in (own[:, 0], torch.cat([own, own], dim=1), None):
            results += loss_of(*inputs, sums, lengths, *workspace, 2, 0.1)
        return results

    workspace = [scratch(call, kernel_device) if given else None]
    actual = run(SUMS_OF_RANK, CUDA, workspace, kernel_device)
    moe = torch.ops.moe
    check(
        actual,
        run(moe.sequence_aux_loss_sums_of_rank, moe.sequence_aux_loss_forward, [], "cpu"),
    )
    assert actual[0].shape == (len(lengths), 5)


@pytest.mark.parametrize(
    ("sums", "lengths", "error", "message"),
    [
        (torch.rand(2), None, ValueError, "lengths must be given with sums, got None"),
        (torch.rand(3), torch.ones(2).long(), ValueError, "sums must be of shape"),
        (torch.rand(2).double(), torch.ones(2).long(), TypeError, "sums must be float32, got fl"),
        (torch.rand(2), torch.ones(3).long(), ValueError, "lengths must be of shape"),
        (torch.rand(2), torch.ones(2), TypeError, "lengths must be int64, got float32"),
        (None, torch.ones(3).long(), ValueError, "lengths must be of shape"),
    ],
)
def test_sums_that_the_cuda_implementation_refuses(sums, lengths, error, message, kernel_device):
    probs, counts = make_probs(6, 8)[0].view(2, 3, 8), torch.ones(2, 8)
    call = move(kernel_device, probs, counts, None, None, sums, lengths)
    with pytest.raises(error, match=message):
        CUDA(*call, None, 2, 0.1)


def test_scales_that_come_back_with_other_strides(launched, kernel_device):
    """The gradient's kernel reads them one after the other."""
    probs, counts = make_probs(10, 4)
    probs, counts = probs.view(2, 5, 4), torch.stack([counts, counts + 1])
    strided = lambda x: torch.stack([x, x * 0 + 1], -1)  # noqa: E731

    def gradient(device, hooks):
        own = probs.to(device).requires_grad_()
        with hooks:
            loss = sequence_aux_loss(own, counts.to(device), 2, 0.1)
        return torch.autograd.grad(loss, own)[0]

    with dispatched():
        expected = gradient("cpu", nullcontext())
    hooks = torch.autograd.graph.saved_tensors_hooks(strided, lambda x: x[..., 0])
    actual = gradient(kernel_device, hooks)
    assert launched[-1] == "_grad_rows_kernel"
    assert_same_bits(actual.contiguous(), expected.contiguous())
