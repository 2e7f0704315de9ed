"""aux_loss inside torch.compile on the CPU."""

import pytest
import torch
from expecttest import assert_expected_inline
from torch._inductor.utils import run_and_get_code

from moe_custom_ops import aux_loss, aux_loss_workspace_size, make_workspace
from moe_custom_ops.testing import assert_same_bits, make_probs
from tests.compiling import calls_in_generated_code, compile_fresh, graphs

TOKEN_COUNTS = [2, 3, 64, 65, 1000]


def maximum_workspace(columns):
    return make_workspace(aux_loss_workspace_size(max(TOKEN_COUNTS), columns), "cpu")


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("given", [False, True])
def test_one_graph_for_all_token_counts(backend, given):
    workspace = maximum_workspace(24) if given else None
    compiled = compile_fresh(
        lambda p, n, total: aux_loss(p, n, total, 24, 2, 1e-2, workspace), backend
    )
    for num_tokens in TOKEN_COUNTS:
        probs, counts = make_probs(num_tokens, 24)
        eager, traced = probs.clone().requires_grad_(), probs.clone().requires_grad_()
        expected = aux_loss(eager, counts, num_tokens + 1, 24, 2, 1e-2)
        loss = compiled(traced, counts, num_tokens + 1)
        assert_same_bits(loss, expected, f"loss of {num_tokens} tokens")
        loss.backward()
        expected.backward()
        assert_same_bits(traced.grad, eager.grad, f"gradient of {num_tokens} tokens")
    assert graphs() == 1


def test_a_device_total_is_one_graph_too():
    compiled = compile_fresh(lambda p, n, total: aux_loss(p, n, total, 24, 2, 1e-2))
    for num_tokens, total in ((5, 5.0), (70, 69.5), (300, 0.0)):
        probs, counts = make_probs(num_tokens, 24)
        loss = compiled(probs, counts, torch.tensor(total))
        assert_same_bits(loss, aux_loss(probs, counts, torch.tensor(total), 24, 2, 1e-2))
    assert graphs() == 1


def test_a_token_count_that_depends_on_data():
    def kept_loss(probs, counts, keep):
        kept = probs[keep]
        return aux_loss(kept, counts, kept.shape[0], 24, 2, 1e-2)

    probs, counts = make_probs(64, 24)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = compile_fresh(kept_loss, "aot_eager")
        for modulus in (2, 3):
            keep = torch.arange(64) % modulus > 0
            assert_same_bits(compiled(probs, counts, keep), kept_loss(probs, counts, keep))


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_no_token_and_one_token_work(num_tokens):
    compiled = compile_fresh(lambda p, n: aux_loss(p, n, num_tokens, 24, 2, 1e-2))
    probs, counts = make_probs(num_tokens, 24)
    assert_same_bits(compiled(probs, counts), aux_loss(probs, counts, num_tokens, 24, 2, 1e-2))


def test_the_workspace_is_written_in_place_without_a_clone():
    """Two calls on one workspace, which a read after the second write would make a clone of."""
    workspace = maximum_workspace(24)

    def two_losses(probs, counts, workspace):
        first = aux_loss(probs, counts, 64, 24, 2, 1e-2, workspace)
        return first + aux_loss(probs * 2, counts, 64, 24, 2, 1e-2, workspace)

    probs, counts = make_probs(64, 24)
    torch._dynamo.reset()
    compiled = torch.compile(two_losses, fullgraph=True)
    loss, (code,) = run_and_get_code(compiled, probs, counts, workspace)
    assert_same_bits(loss, two_losses(probs, counts, workspace))
    assert_expected_inline(
        calls_in_generated_code(code),
        """\
buf0 = torch.ops.moe.aux_loss_forward_in.default(input0, input1, None, None, None, input2, 24, 2, 0.01, 64)
buf4 = empty_strided_cpu((64, 24), (24, 1), torch.float32)
buf5 = torch.ops.moe.aux_loss_forward_in.default(buf4, input1, None, None, None, input2, 24, 2, 0.01, 64)""",  # noqa: E501
    )


def test_two_calls_share_a_workspace_and_keep_their_own_gradients():
    probs, counts = make_probs(64, 24)
    other, other_counts = make_probs(64, 24, seed=1)
    workspace = maximum_workspace(24)

    def both(p, q):
        return aux_loss(p, counts, 64, 24, 2, 1.0, workspace) + 3 * aux_loss(
            q, other_counts, 32, 24, 2, 1.0, workspace
        )

    leaves = [probs.requires_grad_(), other.requires_grad_()]
    compiled = compile_fresh(both)
    grads = torch.autograd.grad(compiled(*leaves), leaves)
    own = [
        torch.autograd.grad(aux_loss(probs, counts, 64, 24, 2, 1.0), probs)[0],
        torch.autograd.grad(
            aux_loss(other, other_counts, 32, 24, 2, 1.0), other, torch.tensor(3.0)
        )[0],
    ]
    for actual, expected in zip(grads, own, strict=True):
        assert_same_bits(actual, expected)


def test_the_gradient_fuses_into_the_softmax_backward():
    """The compiled backward holds one [T, columns] result and no other buffer of that size."""
    logits = torch.randn(64, 24, requires_grad=True)
    _, counts = make_probs(64, 24)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: aux_loss(x.softmax(-1), counts, 64, 24, 2, 1e-2), fullgraph=True
    )
    _, (_, backward) = run_and_get_code(lambda: compiled(logits).backward())
    allocated = [line for line in calls_in_generated_code(backward).splitlines() if "empty" in line]
    assert not any("(64, 24)" in line for line in allocated), allocated
    assert "torch.ops.moe" not in backward[backward.index("def call(") :]
    compiled_grad, logits.grad = logits.grad, None
    aux_loss(logits.softmax(-1), counts, 64, 24, 2, 1e-2).backward()
    torch.testing.assert_close(compiled_grad, logits.grad, rtol=1e-4, atol=1e-9)
    assert (logits.grad.abs() > 1e-8).any()


@pytest.mark.parametrize("compiled", [False, True])
def test_checkpointed_recomputation_has_the_same_bits(compiled):
    logits = torch.randn(64, 24, requires_grad=True)
    _, counts = make_probs(64, 24)
    workspace = maximum_workspace(24)

    def block(x):
        return aux_loss(x.softmax(-1), counts, 64, 24, 2, 1e-2, workspace)

    def step(x):
        return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)

    (expected,) = torch.autograd.grad(block(logits), logits)
    loss = compile_fresh(step)(logits) if compiled else step(logits)
    (grad,) = torch.autograd.grad(loss, logits)
    if compiled:  # Inductor's softmax and its backward have bits of their own.
        torch.testing.assert_close(loss, block(logits), rtol=1e-6, atol=0)
        torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-9)
        assert (expected.abs() > 1e-8).any()
    else:
        assert_same_bits(loss, block(logits))
        assert_same_bits(grad, expected)


def test_export():
    class Router(torch.nn.Module):
        def forward(self, logits, counts):
            return aux_loss(logits.softmax(-1), counts, logits.shape[0], 24, 2, 1e-2)

    logits = torch.randn(64, 24)
    _, counts = make_probs(64, 24)
    dim = torch.export.Dim("tokens", min=2, max=4096)
    program = torch.export.export(Router(), (logits, counts), dynamic_shapes=({0: dim}, None))
    more = torch.randn(100, 24)
    assert_same_bits(program.module()(more, counts), Router()(more, counts))
