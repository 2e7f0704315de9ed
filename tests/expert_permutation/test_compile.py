"""expert_permutation inside torch.compile on the CPU."""

import pytest
import torch
from expecttest import assert_expected_inline
from torch._inductor.utils import run_and_get_code

from moe_custom_ops import (
    expert_permutation,
    expert_permutation_workspace_size,
    make_workspace,
)
from tests.compiling import calls_in_generated_code, compile_fresh, graphs

TOKEN_COUNTS = [2, 3, 16, 65, 200]


def make(num_tokens):
    return torch.randint(-1, 9, (num_tokens, 3), generator=torch.Generator().manual_seed(0))


def maximum_workspace():
    return make_workspace(expert_permutation_workspace_size(max(TOKEN_COUNTS), 3, 8), "cpu")


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("alignment", [1, 4])
def test_one_graph_for_all_token_counts(backend, given, alignment):
    workspace = maximum_workspace() if given else None
    compiled = compile_fresh(
        lambda ids: expert_permutation(ids, 8, alignment, None, workspace), backend
    )
    for num_tokens in TOKEN_COUNTS:
        ids = make(num_tokens)
        expected = expert_permutation(ids, 8, alignment)
        for actual, exact in zip(compiled(ids), expected, strict=True):
            assert torch.equal(actual, exact)
    assert graphs() == 1


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_no_token_and_one_token_work(num_tokens):
    compiled = compile_fresh(lambda ids: expert_permutation(ids, 8, 4))
    ids = make(num_tokens)
    for actual, exact in zip(compiled(ids), expert_permutation(ids, 8, 4), strict=True):
        assert torch.equal(actual, exact)


def test_the_workspace_is_written_in_place_without_a_clone():
    workspace = maximum_workspace()

    def twice(ids, workspace):
        first = expert_permutation(ids, 8, 1, None, workspace)[0]
        # The second call's order follows from the first's.
        return expert_permutation(first.view(-1, 3) % 8, 8, 1, 48, workspace)

    torch._dynamo.reset()
    compiled = torch.compile(twice, fullgraph=True)
    results, (code,) = run_and_get_code(compiled, make(16), workspace)
    for actual, expected in zip(results, twice(make(16), workspace), strict=True):
        assert torch.equal(actual, expected)
    assert_expected_inline(
        calls_in_generated_code(code),
        """\
buf0 = torch.ops.moe.order_in.default(input0, input1, 8, 3, 1, 48)
buf6 = torch.ops.moe.order_in.default(buf5, input1, 8, 3, 1, 48)""",
    )


def test_export():
    class Order(torch.nn.Module):
        def forward(self, ids):
            return expert_permutation(ids, 8, 4)

    tokens = torch.export.Dim("tokens", min=2, max=4096)
    program = torch.export.export(Order(), (make(16),), dynamic_shapes=({0: tokens},))
    for actual, exact in zip(
        program.module()(make(33)), expert_permutation(make(33), 8, 4), strict=True
    ):
        assert torch.equal(actual, exact)
