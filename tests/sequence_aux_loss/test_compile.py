"""sequence_aux_loss inside torch.compile on the CPU."""

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from moe_custom_ops import make_workspace, sequence_aux_loss, sequence_aux_loss_workspace_size
from moe_custom_ops.testing import assert_same_bits, make_probs
from tests.compiling import calls_in_generated_code, compile_fresh, graphs


def pack(lengths, seed=0):
    probs, _ = make_probs(sum(lengths), 24, seed=seed)
    counts = torch.arange(len(lengths) * 24).view(-1, 24) % 7
    return probs, counts, torch.tensor([0, *lengths]).cumsum(0)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("given", [False, True])
def test_one_graph_for_all_packs(backend, given):
    workspace = None
    if given:
        workspace = make_workspace(sequence_aux_loss_workspace_size(2000, 8, 24), "cpu")
    compiled = compile_fresh(
        lambda p, n, ends: sequence_aux_loss(p, n, 2, 0.1, ends, None, workspace), backend
    )
    for lengths in ([5, 9], [100, 3, 1], [400, 0, 600, 7, 33]):
        probs, counts, ends = pack(lengths)
        eager, traced = probs.clone().requires_grad_(), probs.clone().requires_grad_()
        loss = compiled(traced, counts, ends)
        expected = sequence_aux_loss(eager, counts, 2, 0.1, ends)
        assert_same_bits(loss, expected, f"loss of {lengths}")
        loss.backward()
        expected.backward()
        assert_same_bits(traced.grad, eager.grad, f"gradient of {lengths}")
    assert graphs() == 1


def test_bounds_that_are_a_slice():
    probs, counts, ends = pack([30, 34])
    longer = torch.cat([torch.tensor([0, 0, 7]), ends])
    leaf = probs.requires_grad_()
    compiled = compile_fresh(lambda p, n, e: sequence_aux_loss(p, n, 2, 0.1, e[3:]))
    (grad,) = torch.autograd.grad(compiled(leaf, counts, longer), leaf)
    (expected,) = torch.autograd.grad(sequence_aux_loss(leaf, counts, 2, 0.1, ends), leaf)
    assert_same_bits(grad, expected)


def test_one_graph_for_all_batches():
    compiled = compile_fresh(lambda p, n, m: sequence_aux_loss(p, n, 2, 0.1, token_mask=m))
    for num_sequences, length in ((2, 5), (3, 300), (7, 64)):
        probs, counts, _ = pack([length] * num_sequences)
        probs = probs.view(num_sequences, length, 24)
        mask = torch.arange(num_sequences * length).view(num_sequences, length) % 3 > 0
        expected = sequence_aux_loss(probs, counts, 2, 0.1, token_mask=mask)
        assert_same_bits(compiled(probs, counts, mask), expected)
    assert graphs() == 1


@pytest.mark.parametrize("layout", ["batch", "packed"])
def test_the_gradient_fuses_into_the_softmax_backward(layout):
    probs, counts, ends = pack([30, 34])
    if layout == "batch":
        probs, ends = probs[:60].view(2, 30, 24), None
    logits = torch.randn_like(probs).requires_grad_()
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: sequence_aux_loss(x.softmax(-1), counts, 2, 0.1, ends), fullgraph=True
    )
    _, (_, backward) = run_and_get_code(lambda: compiled(logits).backward())
    allocated = calls_in_generated_code(backward).splitlines()
    whole = str(tuple(logits.shape))
    assert not any(whole in line for line in allocated), allocated
    compiled_grad, logits.grad = logits.grad, None
    sequence_aux_loss(logits.softmax(-1), counts, 2, 0.1, ends).backward()
    torch.testing.assert_close(compiled_grad, logits.grad, rtol=1e-4, atol=1e-7)
    assert (logits.grad.abs() > 1e-6).any()


def test_two_calls_share_a_workspace_in_place():
    workspace = make_workspace(sequence_aux_loss_workspace_size(64, 2, 24), "cpu")
    first, second = pack([30, 34]), pack([1, 63], seed=1)

    def both(p, q):
        return sequence_aux_loss(p, first[1], 2, 0.1, first[2], None, workspace) * (
            sequence_aux_loss(q, second[1], 2, 0.1, second[2], None, workspace)
        )

    leaves = [first[0].requires_grad_(), second[0].requires_grad_()]
    expected = torch.autograd.grad(both(*leaves), leaves)
    torch._dynamo.reset()
    compiled = torch.compile(both, fullgraph=True)
    loss, (code, *_) = run_and_get_code(compiled, *leaves)
    for actual, exact in zip(torch.autograd.grad(loss, leaves), expected, strict=True):
        assert_same_bits(actual, exact)
    lines = calls_in_generated_code(code)
    assert lines.count("torch.ops.moe.sequence_aux_loss_forward_in") == 2
    assert "uint8" not in lines and "clone" not in lines
