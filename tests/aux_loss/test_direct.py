"""aux_loss past the dispatcher, and its CUDA implementation, give what the CPU gives."""

import gc
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from moe_custom_ops import aux_loss, aux_loss_workspace_size, make_workspace, op
from moe_custom_ops.losses import ops, plans
from moe_custom_ops.testing import assert_same_bits, make_probs
from tests.aux_loss.test_ops import BAD_CALLS, bad
from tests.conftest import dispatched

pytestmark = pytest.mark.kernels

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
FORWARD = ["_aux_loss_tile_sums_kernel", "_aux_loss_from_tile_sums_kernel"]
GRADIENT = "_grad_rows_kernel"


# What the op is registered with for CUDA; under the interpreter it takes CPU tensors.
CUDA = op.registered(plans.aux_loss, 6, 3)
SUMS_OF_RANK = op.registered(plans.aux_loss_sums, 3)


def on(device, call):
    return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in call.items()}


def moved(device, *arguments):
    return [x.to(device) if isinstance(x, torch.Tensor) else x for x in arguments]


def garbage(num_bytes, device):
    return torch.full((num_bytes,), 255, dtype=torch.uint8, device=device)


def check(actual, expected):
    for a, b, what in zip(actual, expected, ("loss", "scale"), strict=True):
        assert_same_bits(a, b, what)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("total", [60, torch.tensor(59.5), torch.tensor([0])])
@pytest.mark.parametrize(("masked", "given"), [(False, False), (True, True)])
def test_bits_of_loss_and_gradient(dtype, total, masked, given, launched, kernel_device):
    probs, counts = make_probs(60, 16, dtype=dtype)
    probs[3] *= 1e30 if dtype != torch.float16 else 1
    mask = torch.arange(60) % 3 > 0 if masked else None
    call = {
        "tokens_per_expert": counts,
        "total_num_tokens": total,
        "num_experts": 8,
        "topk": 2,
        "coeff": 1e-2,
        "token_mask": mask,
    }
    expected_probs = probs.clone().requires_grad_()
    with dispatched():
        expected = torch.ops.moe.aux_loss(expected_probs, **call)
        expected.backward(torch.tensor(0.3, dtype=expected.dtype))
    assert not launched and not op.PLANS

    call = on(kernel_device, call)
    if given:
        call["workspace"] = make_workspace(aux_loss_workspace_size(60, 16, dtype), kernel_device)
        call["workspace"].fill_(255)
    own_probs = probs.to(kernel_device).requires_grad_()
    for _ in range(3):
        own_probs.grad = None
        launched.clear()
        loss = aux_loss(own_probs, **call)
        loss.backward(torch.tensor(0.3, dtype=loss.dtype, device=kernel_device))
        assert launched == [*FORWARD, GRADIENT]
        assert_same_bits(loss.detach(), expected.detach(), "loss")
        assert_same_bits(own_probs.grad, expected_probs.grad, "gradient")
        assert own_probs.grad.dtype == dtype
    assert [key[0] for key in op.PLANS] == [plans.aux_loss, plans.grad_rows]


def test_the_gradient_is_a_row_from_one_launch(launched, kernel_device):
    probs, counts = make_probs(5000, 64)
    probs = probs.to(kernel_device).requires_grad_()
    loss = aux_loss(probs, counts.to(kernel_device), 5000, 64, 8, 1e-2)
    launched.clear()
    (grad,) = torch.autograd.grad(loss, probs)
    assert grad.stride() == (0, 1) and grad.untyped_storage().nbytes() == 64 * 4
    assert launched == [GRADIENT]


@pytest.mark.parametrize(
    ("num_tokens", "columns"), [(0, 1), (0, 2304), (1, 7), (129, 7), (129, 1), (9, 2304)]
)
def test_sizes_and_strides(num_tokens, columns, launched, kernel_device):
    probs, counts = make_probs(num_tokens, columns)
    call = (max(num_tokens, 1), columns, 1, 0.1)
    expected = torch.ops.moe.aux_loss(probs, counts, *call)
    wide = torch.full((columns, 3 * num_tokens + 1), torch.nan, device=kernel_device)
    strided = wide.T[1::3]
    strided.copy_(probs)
    counts = counts.to(kernel_device)
    for own_probs in (probs.to(kernel_device), strided):
        for _ in range(2):
            assert_same_bits(aux_loss(own_probs, counts, *call), expected)
    assert launched == FORWARD * 4


def test_each_signature_has_a_plan_of_its_own(launched, kernel_device):
    """Aligned and misaligned data, other dtypes and strides, one after the other, twice."""
    probs, counts = make_probs(40, 16)
    flat = torch.zeros(40 * 16 + 1, device=kernel_device)
    misaligned = flat[1:].view(40, 16)
    misaligned.copy_(probs)
    values = [misaligned, probs.to(kernel_device), probs.double().to(kernel_device)]
    values += [misaligned[:, :8], probs.to(kernel_device)[:, :8]]
    own_counts = [counts, counts.double(), counts.repeat_interleave(2)[::2]]
    for _ in range(2):
        for p in values:
            for n in own_counts:
                n = n[: p.shape[1]]
                for coeff in (0.1, 0.2):
                    expected = torch.ops.moe.aux_loss(p.cpu(), n, 40, 8, 2, coeff)
                    own_n = n.to(kernel_device)
                    assert_same_bits(aux_loss(p, own_n, 40, 8, 2, coeff), expected)
    assert launched == FORWARD * (2 * 5 * 3 * 2)


def test_an_int_total_needs_no_plan_of_its_own(launched, kernel_device):
    probs, counts = make_probs(40, 16)
    own_probs, own_counts = probs.to(kernel_device), counts.to(kernel_device)
    for total in (1, 40, 39, 2**40, 2**62):
        expected = torch.ops.moe.aux_loss(probs, counts, total, 8, 2, 0.1)
        assert_same_bits(aux_loss(own_probs, own_counts, total, 8, 2, 0.1), expected)
    assert len(op.PLANS) == 1


def test_gradient_of_the_gradient(launched, kernel_device):
    """Of a function of loss and gradient: d/dx (loss^2 + sum(w * d(loss^2)/dx))."""
    probs, counts = make_probs(40, 16, dtype=torch.float64)
    weights = torch.rand(40, 16, dtype=torch.float64)

    def second(probs, counts, weights, loss_of):
        probs = probs.clone().requires_grad_()
        loss = loss_of(probs, counts, 40, 8, 2, 100.0) ** 2
        (grad,) = torch.autograd.grad(loss, probs, create_graph=True)
        (grad,) = torch.autograd.grad((grad * weights).sum(), probs)
        return grad.cpu()

    with dispatched():
        expected = second(probs, counts, weights, torch.ops.moe.aux_loss)
    assert not launched
    actual = second(*moved(kernel_device, probs, counts, weights), aux_loss)
    # The last gradient asks for no graph, so it comes from the kernel again.
    assert launched == [*FORWARD, GRADIENT]
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=0)
    assert expected.abs().min() > 0


def test_batched_and_repeated_gradients(launched, kernel_device):
    probs, counts = make_probs(40, 16)
    probs = probs.to(kernel_device).requires_grad_()
    loss = aux_loss(probs, counts.to(kernel_device), 40, 8, 2, 0.1)
    (once,) = torch.autograd.grad(loss, probs, retain_graph=True)
    (again,) = torch.autograd.grad(loss, probs, retain_graph=True)
    assert_same_bits(again, once)
    grads = torch.tensor([1.0, 3.0], device=kernel_device)
    (both,) = torch.autograd.grad(loss, probs, grads, is_grads_batched=True)
    assert_same_bits(both[0].contiguous(), once.contiguous())
    assert both[1].sum() > 2.9 * once.sum() > 0


def test_an_incoming_gradient_may_lie_anywhere(launched, kernel_device):
    probs, counts = make_probs(40, 16)
    probs = probs.to(kernel_device).requires_grad_()
    loss = aux_loss(probs, counts.to(kernel_device), 40, 8, 2, 0.1)
    grads = torch.tensor([5.0, 3.0, 3.0], device=kernel_device)
    (a,) = torch.autograd.grad(loss, probs, grads[1], retain_graph=True)
    (b,) = torch.autograd.grad(loss, probs, grads[2].clone(), retain_graph=True)
    (c,) = torch.autograd.grad(loss, probs, grads[2], retain_graph=True)
    assert_same_bits(a, b)
    assert_same_bits(c, b)
    assert b.abs().sum() > 0


def test_saved_tensors_are_watched(launched, kernel_device):
    probs, counts = make_probs(40, 16)
    probs, counts = probs.to(kernel_device).requires_grad_(), counts.to(kernel_device)
    loss = aux_loss(probs, counts, 40, 8, 2, 0.1)
    counts += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_counts_whose_memory_was_exchanged(launched, kernel_device):
    """``.data = ...`` is no change that autograd watches; the gradient reads what is there then."""
    probs, counts = make_probs(40, 16)
    own_probs, expected_probs = probs.to(kernel_device).requires_grad_(), probs.requires_grad_()
    with dispatched():
        torch.ops.moe.aux_loss(expected_probs, counts + 1, 40, 8, 2, 0.1).backward()
    own_counts = counts.to(kernel_device)
    loss = aux_loss(own_probs, own_counts, 40, 8, 2, 0.1)
    own_counts.data = (own_counts + 1).repeat_interleave(2)[::2]
    loss.backward()
    assert launched == [*FORWARD, GRADIENT]
    assert_same_bits(own_probs.grad, expected_probs.grad)


def test_counts_whose_layout_was_exchanged(launched, kernel_device):
    """At the address that they had."""
    probs, counts = make_probs(40, 16)
    own_probs = probs.to(kernel_device).requires_grad_()
    own_counts = counts.to(kernel_device)
    loss = aux_loss(own_probs, own_counts, 40, 8, 2, 0.1)
    own_counts.data = own_counts.data[:1].expand(16)
    loss.backward()
    assert launched == [*FORWARD, GRADIENT]
    assert (own_probs.grad == own_probs.grad[0, 0]).all() and own_probs.grad[0, 0] != 0


def test_a_negative_zero_is_a_coefficient_of_its_own(launched, kernel_device):
    probs, counts = make_probs(40, 16)
    probs, counts = probs.to(kernel_device), counts.to(kernel_device)
    for coeff in (0.0, -0.0, 0.0):
        loss = aux_loss(probs, counts, 40, 8, 2, coeff)
        assert loss == 0.0 and loss.signbit().item() == (str(coeff) == "-0.0")


def test_two_losses_of_one_tensor(launched, kernel_device):
    """Their gradients, which repeat one row, are not to be added into one another's memory."""
    probs, counts = make_probs(40, 16)
    own_probs, expected_probs = probs.to(kernel_device).requires_grad_(), probs.requires_grad_()
    with dispatched():
        first = torch.ops.moe.aux_loss(expected_probs, counts, 40, 8, 2, 0.1)
        (first + torch.ops.moe.aux_loss(expected_probs, counts + 3, 40, 8, 2, 0.1)).backward()
    counts = counts.to(kernel_device)
    for _ in range(2):
        own_probs.grad = None
        x = own_probs * 1
        first = aux_loss(x, counts, 40, 8, 2, 0.1)
        (first + aux_loss(x, counts + 3, 40, 8, 2, 0.1)).backward()
        assert own_probs.grad.is_contiguous()
        assert_same_bits(own_probs.grad, expected_probs.grad)


def test_counts_and_total_receive_no_gradient(launched, kernel_device):
    probs, counts = make_probs(40, 16)
    counts = counts.to(kernel_device).float().requires_grad_()
    total = torch.tensor(40.0, device=kernel_device, requires_grad=True)
    assert not aux_loss(probs.to(kernel_device), counts, total, 8, 2, 0.1).requires_grad
    probs = probs.to(kernel_device).requires_grad_()
    aux_loss(probs, counts, total, 8, 2, 0.1).backward()
    assert counts.grad is None and total.grad is None and probs.grad is not None


def test_the_gradient_is_a_constant_of_the_counts(launched, kernel_device):
    """As through the dispatcher: a penalty on the gradient does not train through the counts."""
    probs, counts = make_probs(40, 16)
    probs = probs.to(kernel_device).requires_grad_()
    counts = counts.to(kernel_device).float().requires_grad_()
    loss = aux_loss(probs, counts, 40, 8, 2, 0.1)
    (grad,) = torch.autograd.grad(loss, probs, create_graph=True)
    assert launched == FORWARD and not grad.requires_grad


def test_saved_tensors_that_come_back_with_other_strides(launched, kernel_device):
    """``save_on_cpu`` and its like make them dense."""
    probs, counts = make_probs(40, 16)
    own_probs, expected_probs = probs.to(kernel_device).requires_grad_(), probs.requires_grad_()
    with dispatched():
        torch.ops.moe.aux_loss(expected_probs, counts, 40, 8, 2, 0.1).backward()
    strided = counts.to(kernel_device).repeat_interleave(2)[::2]
    dense = lambda x: x.clone(memory_format=torch.contiguous_format)  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(dense, lambda x: x):
        loss = aux_loss(own_probs, strided, 40, 8, 2, 0.1)
    loss.backward()
    assert launched == [*FORWARD, GRADIENT]
    assert_same_bits(own_probs.grad, expected_probs.grad)


def test_saved_tensors_that_come_back_lazily_negated(launched, kernel_device):
    """In the layout that was saved, over other numbers."""
    probs, counts = make_probs(40, 16)
    own_probs, expected_probs = probs.to(kernel_device).requires_grad_(), probs.requires_grad_()
    with dispatched():
        torch.ops.moe.aux_loss(expected_probs, counts, 40, 8, 2, 0.1).backward()

    def negated(x):
        return torch._neg_view(-x)

    with torch.autograd.graph.saved_tensors_hooks(negated, lambda x: x):
        loss = aux_loss(own_probs, counts.float().to(kernel_device), 40, 8, 2, 0.1)
    loss.backward()
    assert launched == FORWARD
    assert_same_bits(own_probs.grad, expected_probs.grad)


def test_no_gradient_comes_of_none(launched, kernel_device):
    class Stop(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            return None

    probs, counts = make_probs(40, 16)
    probs = probs.to(kernel_device).requires_grad_()
    loss = Stop.apply(aux_loss(probs, counts.to(kernel_device), 40, 8, 2, 0.1))
    assert torch.autograd.grad(loss, probs, allow_unused=True) == (None,)
    assert launched == FORWARD


def test_an_int_coefficient_is_rounded_as_by_the_dispatcher(launched, kernel_device):
    probs, counts = make_probs(40, 15, dtype=torch.float64)
    call = (40, 3, 1, 2**53 + 1)
    expected = torch.ops.moe.aux_loss(probs, counts, *call)
    assert_same_bits(aux_loss(probs.to(kernel_device), counts.to(kernel_device), *call), expected)


def test_no_gradient_is_recorded_where_none_is_asked_for(launched, kernel_device):
    probs, counts = make_probs(40, 16)
    probs, counts = probs.to(kernel_device).requires_grad_(), counts.to(kernel_device)
    with torch.no_grad():
        assert aux_loss(probs, counts, 40, 8, 2, 0.1).grad_fn is None
    with torch.inference_mode():
        assert aux_loss(probs, counts, 40, 8, 2, 0.1).is_inference()
    assert aux_loss(probs, counts, 40, 8, 2, 0.1).grad_fn is not None
    assert launched == FORWARD * 3


@pytest.mark.parametrize(("change", "error", "message"), BAD_CALLS)
def test_bad_input(change, error, message, launched, kernel_device):
    own = {k: v for k, v in change.items() if getattr(v, "is_cpu", False)}
    if "workspace" in own and kernel_device != "cpu":
        pytest.skip("a copy would lose the alignment and the strides that are the mistake")
    change = {**change, **on(kernel_device, own)}
    message = message.replace("cpu", str(torch.empty(0, device=kernel_device).device))
    good = on(kernel_device, bad({}))
    aux_loss(**good)
    launched.clear()
    with pytest.raises(error, match=f"aux_loss: .*{message}"):
        aux_loss(**{**good, **change})
    assert not launched


def test_numbers_for_a_float_stay_past_the_dispatcher(launched, kernel_device, monkeypatch):
    monkeypatch.setattr(ops.AUX_LOSS, "op", None)
    probs, counts = make_probs(40, 16)
    own_probs, own_counts = moved(kernel_device, probs, counts)
    for coeff in (1, 0, -3, np.float64(1e-2), 1e-2):
        launched.clear()
        expected = torch.ops.moe.aux_loss(probs, counts, 40, 8, 2, coeff)
        loss = aux_loss(own_probs, own_counts, 40, 8, 2, coeff)
        assert launched == FORWARD
        assert_same_bits(loss, expected)


def test_equal_numbers_of_other_types_are_refused_all_the_same(launched, kernel_device):
    """They have the key of a plan that is there."""
    probs, counts = moved(kernel_device, *make_probs(40, 16))
    good = {"total_num_tokens": 40, "num_experts": 2, "topk": 1, "coeff": 1.0}
    aux_loss(probs, counts, **good)
    launched.clear()
    for change, message in [
        ({"topk": True}, "topk must be an int, got bool"),
        ({"topk": 1.0}, "topk must be an int, got float"),
        ({"num_experts": 2.0}, "num_experts must be an int, got float"),
        ({"total_num_tokens": 40.0}, "total_num_tokens must be a Tensor or an int, got float"),
        ({"coeff": True}, "coeff must be a number, got bool"),
    ]:
        with pytest.raises(TypeError, match=f"aux_loss: {message}"):
            aux_loss(probs, counts, **{**good, **change})
    assert not launched


@pytest.mark.parametrize("mode_in", ["forward", "backward", "both"])
@pytest.mark.parametrize(("masked", "given"), [(False, False), (True, True)])
def test_a_checkpoint_one_pass_of_which_is_under_a_mode(
    masked, given, mode_in, launched, kernel_device
):
    """Each pass is to save what the other does: PyTorch compares them."""
    probs, counts = make_probs(40, 16)
    mask = torch.arange(40) % 3 > 0 if masked else None
    expected_probs = probs.clone().requires_grad_()
    with dispatched():
        torch.ops.moe.aux_loss(expected_probs, counts, 40, 8, 2, 0.1, None, mask).backward()
    probs, counts, mask = moved(kernel_device, probs, counts, mask)
    probs.requires_grad_()
    size = aux_loss_workspace_size(40, 16)
    workspace = make_workspace(size, kernel_device) if given else None

    def region(probs):
        return aux_loss(probs * 1, counts, 40, 8, 2, 0.1, workspace, mask)

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


def test_compiled_autograd_over_a_forward_past_the_dispatcher(launched, kernel_device):
    probs, counts = moved(kernel_device, *make_probs(40, 16))
    probs.requires_grad_()
    (expected,) = torch.autograd.grad(aux_loss(probs, counts, 40, 8, 2, 0.1), probs)
    launched.clear()
    for mask in (None, torch.ones(40, dtype=torch.bool, device=kernel_device)):
        probs.grad = None
        loss = aux_loss(probs, counts, 40, 8, 2, 0.1, None, mask)
        with torch._dynamo.compiled_autograd._enable(
            torch.compile(fullgraph=True, backend="eager")
        ):
            loss.backward()
        assert_same_bits(probs.grad, expected)
    assert launched == FORWARD * 2


def test_a_loss_that_is_kept_keeps_no_input(launched, kernel_device):
    """One of each step is kept for a log."""
    probs, counts = moved(kernel_device, *make_probs(40, 16))
    mask = torch.ones(40, dtype=torch.bool, device=kernel_device)
    total = torch.tensor(40, device=kernel_device)
    probs.requires_grad_()
    inputs = [StorageWeakRef(x.untyped_storage()) for x in (counts, mask, total)]
    loss = aux_loss(probs, counts, total, 8, 2, 0.1, None, mask)
    loss.backward()
    assert launched[:2] == FORWARD
    del counts, mask, total
    gc.collect()
    assert [x.expired() for x in inputs] == [True] * 3
    assert loss.requires_grad


@pytest.mark.parametrize(
    ("num_tokens", "total"),
    [
        (0, 0),
        (0, 7),
        (60, 40),
        (60, torch.tensor(39.5)),
        (60, torch.tensor(0)),
        (0, torch.tensor(0)),
    ],
)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("given", [False, True])
def test_the_cuda_implementation(num_tokens, total, masked, given, kernel_device):
    probs, counts = make_probs(num_tokens, 16)
    mask = torch.arange(num_tokens) % 3 > 0 if masked else None
    tensor, number = (total, 0) if isinstance(total, torch.Tensor) else (None, total)
    size = aux_loss_workspace_size(num_tokens, 16)
    workspace = garbage(size, kernel_device) if given else None
    inputs, numbers = (probs, counts, mask, tensor, None), (8, 2, 1e-2, number)
    expected = torch.ops.moe.aux_loss_forward(*inputs, *numbers)
    for _ in range(2):
        check(CUDA(*moved(kernel_device, *inputs), workspace, *numbers), expected)
    on_cpu = torch.ops.moe.aux_loss_forward_in(*inputs, garbage(size, "cpu"), *numbers)
    check(on_cpu, expected)


def test_the_cuda_implementation_stays_inside_its_scratch(kernel_device):
    probs, counts = moved(kernel_device, *make_probs(5000, 16))
    with pytest.raises(ValueError, match="workspace must be at least"):
        CUDA(probs, counts, None, None, None, garbage(16, kernel_device), 8, 2, 1.0, 5000)


@pytest.mark.parametrize(("num_tokens", "columns"), [(0, 16), (700, 16), (40, 700)])
@pytest.mark.parametrize("masked", [False, True])
def test_the_sums_of_a_rank(num_tokens, columns, masked, kernel_device):
    probs, counts = make_probs(num_tokens, columns)
    mask = torch.arange(num_tokens) % 3 > 0 if masked else None

    def run(sums_of_rank, loss_of, device):
        inputs = moved(device, probs, counts, mask)
        own = sums_of_rank(*inputs, 9)
        rest = None, torch.cat([own, own]), *loss_of[1:], columns, 2, 1e-2, 50
        return own, *loss_of[0](*inputs, *rest)

    expected = run(torch.ops.moe.aux_loss_sums_of_rank, (torch.ops.moe.aux_loss_forward,), "cpu")
    size = aux_loss_workspace_size(num_tokens, columns)
    for workspace in (None, garbage(size, kernel_device)):
        actual = run(SUMS_OF_RANK, (CUDA, workspace), kernel_device)
        for a, b in zip(actual, expected, strict=True):
            assert_same_bits(a, b)
    assert expected[0].shape == (9,) and (expected[0] != 0).any() == (num_tokens > 0)
    for sums_of_rank, device in (
        (SUMS_OF_RANK, kernel_device),
        (torch.ops.moe.aux_loss_sums_of_rank, "cpu"),
    ):
        for wrong in {-1, 0} if num_tokens else {-1}:
            with pytest.raises(ValueError, match="size must be at least"):
                sums_of_rank(*moved(device, probs, counts, mask), wrong)


@pytest.mark.parametrize(
    ("sums", "error", "message"),
    [
        (torch.rand(3).double(), TypeError, "sums must be float32, got float64"),
        (torch.rand(3, 1), ValueError, r"sums must be of shape \[tiles\], got \[3, 1\]"),
        (torch.rand(6)[::2], ValueError, "sums must be contiguous, got strides"),
    ],
)
def test_sums_that_the_cuda_implementation_refuses(sums, error, message, kernel_device):
    inputs = moved(kernel_device, *make_probs(9, 8))
    if not sums.is_contiguous():
        sums = sums.to(kernel_device).repeat_interleave(2)[::2]
    with pytest.raises(error, match=message):
        CUDA(*inputs, None, None, sums.to(kernel_device), None, 8, 2, 0.1, 9)


def test_no_token_and_a_total_of_zero_hide_infinity(kernel_device):
    probs = torch.full((60, 16), torch.inf, device=kernel_device)
    counts = torch.ones(16, device=kernel_device)
    nobody = torch.zeros(60, dtype=torch.bool, device=kernel_device)
    for total, total_int in ((None, 0), (torch.tensor(0, device=kernel_device), 0)):
        for mask in (nobody, None) if total is not None else (nobody,):
            result = CUDA(probs, counts, mask, total, None, None, 8, 2, 1e-2, total_int)
            assert [x.item() for x in result] == [0, 0]
