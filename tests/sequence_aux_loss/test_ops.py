"""Registration, values, gradients and bad input of sequence_aux_loss on the CPU."""

import itertools

import pytest
import torch
from torch.library import opcheck

from moe_custom_ops import aux_loss, make_workspace, sequence_aux_loss
from moe_custom_ops import sequence_aux_loss_workspace_size as workspace_size
from moe_custom_ops.losses import reference
from moe_custom_ops.testing import assert_same_bits, assert_within, make_probs

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
OP = torch.ops.moe.sequence_aux_loss.default
LENGTHS = [37, 0, 5, 1, 128, 0]


def packed(lengths=LENGTHS, num_experts=8, dtype=torch.float32, head=0, tail=0):
    """(probs [T, E], counts [B, E], cu_seqlens [B + 1]), with tokens outside every sequence."""
    probs, _ = make_probs(head + sum(lengths) + tail, num_experts, dtype=dtype)
    ends = torch.tensor([head, *lengths]).cumsum(0)
    counts = torch.stack(
        [
            torch.bincount(own.float().topk(2).indices.flatten(), minlength=num_experts)
            if len(own)
            else torch.zeros(num_experts, dtype=torch.int64)
            for own in probs[head : head + sum(lengths)].split(lengths)
        ]
    )
    return probs, counts, ends


def batch(num_sequences=3, length=20, num_experts=8, dtype=torch.float32):
    """(probs [B, S, E], counts [B, E])"""
    probs, counts, _ = packed([length] * num_sequences, num_experts, dtype)
    return probs.view(num_sequences, length, num_experts), counts


def oracle(probs, counts, coeff, cu_seqlens, mask=None, topk=2):
    """(loss, gradient) of packed probs in float64."""
    num_experts = probs.shape[-1]
    mask = torch.ones(probs.shape[0], dtype=torch.bool) if mask is None else mask
    grad = torch.zeros(probs.shape, dtype=torch.float64)
    terms = []
    for b, (start, end) in enumerate(itertools.pairwise(cu_seqlens)):
        own = mask.clone()
        own[:start] = False
        own[end:] = False
        if own.any():
            scale = num_experts * coeff / topk / own.sum().double() ** 2
            terms.append(scale * (probs[own].double().sum(0) * counts[b]).sum())
            grad[own] = scale * counts[b].double()
    return sum(terms) / max(len(terms), 1), grad / max(len(terms), 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head", "tail"), [(0, 0), (3, 9)])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_packed_against_a_float64_oracle(dtype, head, tail, index_dtype):
    probs, counts, ends = packed(dtype=dtype, head=head, tail=tail)
    probs.requires_grad_()
    loss = sequence_aux_loss(probs, counts, 2, 0.1, ends.to(index_dtype))
    expected, grad = oracle(probs.detach(), counts, 0.1, ends)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert_within(loss, expected, expected, roundings=20)
    loss.backward()
    assert probs.grad.dtype == dtype
    assert_within(probs.grad, grad, grad, roundings=4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count_dtype", [torch.int32, torch.int64, torch.float32, torch.float64])
def test_batch_first_is_the_pack_of_its_sequences(dtype, count_dtype):
    probs, counts = batch(dtype=dtype)
    counts = counts.to(count_dtype)
    leaf, flat = probs.clone().requires_grad_(), probs.flatten(0, 1).requires_grad_()
    loss = sequence_aux_loss(leaf, counts, 2, 0.1)
    same = sequence_aux_loss(flat, counts, 2, 0.1, torch.tensor([0, 20, 40, 60]))
    assert_same_bits(loss, same)
    (grad,) = torch.autograd.grad(loss, leaf)
    assert grad.stride(1) == 0
    assert_same_bits(grad.flatten(0, 1), torch.autograd.grad(same, flat)[0])


def test_one_sequence_is_aux_loss():
    probs, counts = batch(1, 300)
    loss = aux_loss(probs[0], counts[0], 300, 8, 2, 0.1)
    assert_same_bits(sequence_aux_loss(probs, counts, 2, 0.1), loss)


def test_a_sequence_has_the_same_bits_wherever_it_lies():
    probs, counts, _ = packed([700])
    alone = sequence_aux_loss(probs, counts, 2, 0.1, torch.tensor([0, 700]))
    for before in (1, 511, 512, 1000):
        other = torch.rand(before, 8)
        ends = torch.tensor([before, before + 700])
        moved = sequence_aux_loss(torch.cat([other, probs]), counts, 2, 0.1, ends)
        assert_same_bits(moved, alone)


def test_padding_with_empty_sequences_changes_no_bit():
    probs, counts, ends = packed([30, 50])
    loss = sequence_aux_loss(probs, counts, 2, 0.1, ends)
    more = torch.cat([ends, ends[-1:].expand(6)])
    counts = torch.cat([counts, torch.full((6, 8), 77)])
    assert_same_bits(sequence_aux_loss(probs, counts, 2, 0.1, more), loss)


@pytest.mark.parametrize("dtype", DTYPES)
def test_masked_tokens_add_nothing_whatever_they_hold(dtype):
    probs, counts, ends = packed(dtype=dtype)
    mask = torch.arange(probs.shape[0]) % 3 > 0
    probs[~mask] = torch.nan
    probs.requires_grad_()
    loss = sequence_aux_loss(probs, counts, 2, 0.1, ends, mask)
    expected, grad = oracle(probs.detach(), counts, 0.1, ends, mask)
    assert_within(loss, expected, expected, roundings=20)
    loss.backward()
    assert (probs.grad[~mask] == 0).all()
    assert_within(probs.grad, grad, grad, roundings=4)


def test_a_mask_of_a_batch():
    probs, counts = batch()
    mask = torch.rand(3, 20, generator=torch.Generator().manual_seed(0)) < 0.5
    mask[1] = False
    leaf = probs.masked_fill(~mask[..., None], torch.nan).requires_grad_()
    loss = sequence_aux_loss(leaf, counts, 2, 0.1, token_mask=mask)
    ends = torch.tensor([0, 20, 40, 60])
    expected, grad = oracle(probs.flatten(0, 1), counts, 0.1, ends, mask.flatten())
    assert_within(loss, expected, expected, roundings=20)
    loss.backward()
    assert_within(leaf.grad.flatten(0, 1), grad, grad, roundings=4)


@pytest.mark.parametrize("case", ["no tokens", "no sequences", "all masked", "no batch", "no seq"])
def test_nothing_to_sum(case):
    counts, ends, mask = torch.ones(2, 8), torch.zeros(3, dtype=torch.int64), None
    probs = torch.rand(0, 8)
    if case == "no sequences":
        probs, counts, ends = torch.rand(5, 8), torch.ones(0, 8), torch.zeros(1, dtype=torch.int64)
    elif case == "all masked":
        probs, ends = torch.rand(5, 8), torch.tensor([0, 2, 5])
        mask = torch.zeros(5, dtype=torch.bool)
    elif case == "no batch":
        probs, counts, ends = torch.rand(0, 4, 8), torch.ones(0, 8), None
    elif case == "no seq":
        probs, ends = torch.rand(2, 0, 8), None
    probs.requires_grad_()
    loss = sequence_aux_loss(probs, counts, 2, 0.1, ends, mask)
    loss.backward()
    assert loss.item() == 0 and probs.grad.shape == probs.shape and (probs.grad == 0).all()


@pytest.mark.parametrize("layout", ["batch", "packed", "masked"])
def test_gradcheck(layout):
    probs, counts, ends = packed([4, 0, 7], dtype=torch.float64)
    mask = torch.arange(11) % 3 > 0 if layout == "masked" else None
    if layout == "batch":
        probs, ends, counts = probs[:10].view(2, 5, 8), None, counts[[0, 2]]
    probs.requires_grad_()
    call = lambda p: sequence_aux_loss(p, counts, 2, 10.0, ends, mask)  # noqa: E731
    assert torch.autograd.gradcheck(call, probs)
    assert torch.autograd.gradgradcheck(lambda p: call(p) ** 2, probs)


def test_against_autograd_through_the_reference():
    probs, counts, ends = packed()
    ours, theirs = probs.clone().requires_grad_(), probs.clone().requires_grad_()
    loss = sequence_aux_loss(ours, counts, 2, 0.1, ends)
    expected = reference.sequence_aux_loss(theirs, counts, 2, 0.1, ends)
    assert_same_bits(loss, expected)
    loss.backward()
    expected.backward()
    assert_within(ours.grad, theirs.grad, theirs.grad.abs(), roundings=4)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("layout", ["batch", "packed", "masked"])
def test_opcheck(requires_grad, given, layout):
    probs, counts, ends = packed()
    mask = torch.arange(probs.shape[0]) % 3 > 0 if layout == "masked" else None
    if layout == "batch":
        (probs, counts), ends = batch(), None
    probs.requires_grad_(requires_grad)
    size = workspace_size(probs.numel() // 8, counts.shape[0], 8)
    workspace = make_workspace(size, "cpu") if given else None
    opcheck(OP, (probs, counts, 2, 0.1, ends, mask, workspace))
    inner = (probs.detach(), counts, ends, mask, None, None)
    if given:
        opcheck(torch.ops.moe.sequence_aux_loss_forward_in.default, (*inner, workspace, 2, 0.1))
    else:
        opcheck(torch.ops.moe.sequence_aux_loss_forward.default, (*inner, 2, 0.1))


def test_a_masked_sequence_is_skipped_whatever_its_counts_hold():
    probs, counts, ends = packed([30, 50])
    expected = sequence_aux_loss(probs[:30], counts[:1], 2, 0.1, ends[:2])
    counts = counts.float()
    counts[1] = torch.nan
    mask = torch.arange(80) < 30
    leaf = probs.requires_grad_()
    loss = sequence_aux_loss(leaf, counts, 2, 0.1, ends, mask)
    assert_same_bits(loss, expected)
    (grad,) = torch.autograd.grad(loss, leaf)
    assert grad.isfinite().all() and (grad[30:] == 0).all() and (grad[:30] != 0).any()


def test_the_loss_may_be_changed_in_place():
    probs, counts = batch()
    leaf = probs.requires_grad_()
    loss = sequence_aux_loss(leaf, counts, 2, 0.1)
    expected = loss.detach() + 1
    loss += 1
    assert_same_bits(loss, expected)
    loss.backward()
    assert (leaf.grad != 0).any()


def test_counts_are_a_constant():
    probs, counts = batch()
    loss = sequence_aux_loss(probs, counts.float().requires_grad_(), 2, 0.1)
    assert not loss.requires_grad


def test_bounds_outside_the_pack_are_clamped():
    probs, counts, _ = packed([20, 30])
    clamped = sequence_aux_loss(probs, counts, 2, 0.1, torch.tensor([0, 20, 50]))
    wild = torch.tensor([-(2**40), 20, 2**40])
    assert_same_bits(sequence_aux_loss(probs, counts, 2, 0.1, wild), clamped)
    for ends in ([50, 20, 0], [2**62, -(2**62), 7], [30, 10, 20]):
        assert sequence_aux_loss(probs, counts, 2, 0.1, torch.tensor(ends)).isfinite()


def test_a_workspace_for_the_maximum_serves_smaller_calls():
    workspace = make_workspace(workspace_size(1000, 10, 8), "cpu")
    probs, counts, ends = packed()
    loss = sequence_aux_loss(probs, counts, 2, 0.1, ends, None, workspace)
    assert_same_bits(loss, sequence_aux_loss(probs, counts, 2, 0.1, ends))
    workspace.fill_(255)
    assert_same_bits(sequence_aux_loss(probs, counts, 2, 0.1, ends, None, workspace), loss)


def bad(change):
    probs, counts, ends = packed()
    call = {"probs": probs, "tokens_per_expert": counts, "topk": 2, "coeff": 0.1}
    return {**call, "cu_seqlens": ends, "token_mask": None, "workspace": None, **change}


BAD_CALLS = [
    ({"probs": None}, TypeError, "probs must be a Tensor, got NoneType"),
    ({"tokens_per_expert": None}, TypeError, "tokens_per_expert must be a Tensor, got NoneType"),
    ({"probs": 1.0}, TypeError, "probs must be a Tensor, got float"),
    ({"cu_seqlens": None}, ValueError, r"probs must be of shape \[batch, seq, experts\] without"),
    ({"probs": torch.rand(2, 3, 8)}, ValueError, r"probs must .* with them, got \[2, 3, 8\]"),
    ({"probs": torch.ones(171, 8).int()}, TypeError, "probs must be float32.*got int32"),
    (
        {"tokens_per_expert": torch.ones(6, 7)},
        ValueError,
        r"tokens_per_expert must be .*experts = 8, got \[6, 7\]",
    ),
    (
        {"tokens_per_expert": torch.ones(6, 8).bfloat16()},
        TypeError,
        r"tokens_per_expert must be .*got bfloat16 \(256",
    ),
    (
        {"cu_seqlens": torch.arange(6)},
        ValueError,
        r"cu_seqlens must be of shape \[sequences \+ 1\] = \[7\], got \[6\]",
    ),
    ({"cu_seqlens": torch.arange(7.0)}, TypeError, "cu_seqlens must be int32 or int64"),
    ({"cu_seqlens": torch.arange(7, device="meta")}, ValueError, "cu_seqlens must be on the dev"),
    ({"token_mask": torch.ones(171)}, TypeError, "token_mask must be bool, got float32"),
    (
        {"token_mask": torch.ones(6, dtype=torch.bool)},
        ValueError,
        r"token_mask must be of shape \[171\], that of probs without experts, got \[6\]",
    ),
    ({"topk": 0}, ValueError, "topk must be at least 1, got 0"),
    ({"coeff": None}, TypeError, "coeff must be a number, got NoneType"),
    (
        {"workspace": torch.empty(16, dtype=torch.uint8)},
        ValueError,
        "workspace must be at least 64 bytes long, got 16 bytes",
    ),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD_CALLS)
def test_bad_input(change, error, message):
    with pytest.raises(error, match=f"sequence_aux_loss: .*{message}"):
        sequence_aux_loss(**bad(change))


def test_bad_input_of_a_batch():
    probs, counts = batch()
    with pytest.raises(ValueError, match=r"\[batch, experts\] = \[3, 8\], got \[2, 8\]"):
        sequence_aux_loss(probs, counts[:2], 2, 0.1)
    with pytest.raises(ValueError, match=r"token_mask must be of shape \[3, 20\].*got \[60\]"):
        sequence_aux_loss(probs, counts, 2, 0.1, token_mask=torch.ones(60, dtype=torch.bool))
    with pytest.raises(ValueError, match="num_sequences must be at least 0, got -1"):
        workspace_size(8, -1, 8)


def test_forward_mode_is_refused():
    probs, counts = batch()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(probs, torch.ones_like(probs))
        with pytest.raises(NotImplementedError, match="sequence_aux_loss: forward-mode AD"):
            sequence_aux_loss(dual, counts, 2, 0.1)
