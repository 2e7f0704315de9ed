"""weighted_restore inside torch.compile on the CPU."""

import pytest
import torch
from expecttest import assert_expected_inline
from torch._inductor.utils import run_and_get_code

from moe_custom_ops import make_workspace, weighted_restore, weighted_restore_workspace_size
from moe_custom_ops.testing import assert_same_bits, make_assignments
from tests.compiling import calls_in_generated_code, compile_fresh, graphs

TOKEN_COUNTS = [2, 3, 16, 65, 200]


def make(num_tokens, hidden=20, seed=0):
    scores, indices = make_assignments(num_tokens, 3, 8, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(indices.shape[0], hidden, generator=generator)
    addend = torch.randn(num_tokens, hidden, generator=generator)
    return rows, scores, indices, addend


def maximum_workspace():
    return make_workspace(weighted_restore_workspace_size(max(TOKEN_COUNTS), 3), "cpu")


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("given", [False, True])
def test_one_graph_for_all_token_counts(backend, given):
    workspace = maximum_workspace() if given else None
    compiled = compile_fresh(lambda r, s, i, a: weighted_restore(r, s, i, a, workspace), backend)
    for num_tokens in TOKEN_COUNTS:
        rows, scores, indices, addend = make(num_tokens)
        leaves = [tensor.requires_grad_() for tensor in (rows, scores, addend)]
        out = compiled(rows, scores, indices, addend)
        expected = weighted_restore(rows, scores, indices, addend)
        assert_same_bits(out, expected, f"result of {num_tokens} tokens")
        weight = torch.randn_like(out)
        grads = torch.autograd.grad(out, leaves, weight)
        for actual, exact in zip(grads, torch.autograd.grad(expected, leaves, weight), strict=True):
            assert_same_bits(actual, exact, f"gradient of {num_tokens} tokens")
    assert graphs() == 1


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_no_token_and_one_token_work(num_tokens):
    compiled = compile_fresh(weighted_restore)
    call = make(num_tokens)
    assert_same_bits(compiled(*call), weighted_restore(*call))


def test_the_workspace_is_written_in_place_without_a_clone():
    workspace = maximum_workspace()
    rows, scores, indices, addend = make(16)

    def twice(rows, scores, indices, addend, workspace):
        first = weighted_restore(rows, scores, indices, addend, workspace)
        return weighted_restore(rows, scores, indices, first, workspace)

    torch._dynamo.reset()
    compiled = torch.compile(twice, fullgraph=True)
    out, (code,) = run_and_get_code(compiled, rows, scores, indices, addend, workspace)
    assert_same_bits(out, twice(rows, scores, indices, addend, workspace))
    assert_expected_inline(
        calls_in_generated_code(code),
        """\
buf0 = torch.ops.moe.restore_forward_in.default(input0, input1, input2, input3, input4, 0, 0)
buf4 = torch.ops.moe.restore_forward_in.default(input0, input1, input2, buf2, input4, 0, 0)""",
    )


def test_two_calls_share_a_workspace_and_keep_their_own_gradients():
    a, b = make(16), make(16, seed=1)
    workspace = maximum_workspace()
    leaves = [
        a[0].requires_grad_(),
        a[1].requires_grad_(),
        b[0].requires_grad_(),
        b[1].requires_grad_(),
    ]

    def both(ar, ascore, br, bscore):
        first = weighted_restore(ar, ascore, a[2], None, workspace)
        return (first * weighted_restore(br, bscore, b[2], None, workspace)).sum()

    grads = torch.autograd.grad(compile_fresh(both)(*leaves), leaves)
    first, second = weighted_restore(*a[:3]), weighted_restore(*b[:3])
    own = torch.autograd.grad(first, leaves[:2], second.detach())
    own += torch.autograd.grad(second, leaves[2:], first.detach())
    for actual, expected in zip(grads, own, strict=True):
        assert_same_bits(actual, expected)


@pytest.mark.parametrize("compiled", [False, True])
def test_checkpointed_recomputation_has_the_same_bits(compiled):
    rows, scores, indices, addend = make(16)
    leaves = [rows.requires_grad_(), scores.requires_grad_()]
    workspace = maximum_workspace()

    def block(rows, scores):
        return weighted_restore(rows * 2, scores, indices, addend, workspace).square()

    def step(rows, scores):
        return torch.utils.checkpoint.checkpoint(block, rows, scores, use_reentrant=False)

    expected = block(*leaves)
    out = compile_fresh(step)(*leaves) if compiled else step(*leaves)
    assert_same_bits(out, expected)
    grads = torch.autograd.grad(out.sum(), leaves)
    for actual, exact in zip(grads, torch.autograd.grad(expected.sum(), leaves), strict=True):
        assert_same_bits(actual, exact)


def test_export():
    class Combine(torch.nn.Module):
        def forward(self, rows, scores, indices):
            return weighted_restore(rows, scores, indices)

    tokens = torch.export.Dim("tokens", min=2, max=4096)
    shapes = ({0: 3 * tokens}, {0: tokens}, {0: 3 * tokens})
    program = torch.export.export(Combine(), make(16)[:3], dynamic_shapes=shapes)
    call = make(33)[:3]
    assert_same_bits(program.module()(*call), weighted_restore(*call))
