"""vmap over the public ops: each element has the bits of a call of its own."""

import pytest
import torch

from moe_custom_ops import (
    aux_loss,
    aux_loss_workspace_size,
    make_workspace,
    restore,
    sequence_aux_loss,
    weighted_restore,
    weighted_restore_workspace_size,
)
from moe_custom_ops.testing import assert_same_bits

BATCH = 3
GENERATOR = torch.Generator().manual_seed(0)
ROWS = torch.randn(BATCH, 12, 5, generator=GENERATOR)
SCORES = torch.rand(BATCH, 4, 3, generator=GENERATOR)
INDICES = torch.stack([torch.randperm(12, generator=GENERATOR) for _ in range(BATCH)])
PROBS = torch.rand(BATCH, 6, 8, generator=GENERATOR)
COUNTS = torch.randint(1, 9, (BATCH, 8), generator=GENERATOR)
ENDS = torch.tensor([[0, 4, 6], [0, 0, 5], [1, 2, 6]])
WORKSPACE = make_workspace(
    max(aux_loss_workspace_size(6, 8), weighted_restore_workspace_size(4, 3))
)

CASES = {
    "weighted_restore": (weighted_restore, (ROWS, SCORES, INDICES)),
    "one permutation": (lambda r: weighted_restore(r, SCORES[0], INDICES[0]), (ROWS,)),
    "workspace": (lambda r, i: weighted_restore(r, SCORES[1], i, None, WORKSPACE), (ROWS, INDICES)),
    "restore": (lambda r, i: restore(r, i, 4, 3), (ROWS, INDICES)),
    "aux_loss": (lambda p, n: aux_loss(p, n, 6, 8, 2, 0.1, WORKSPACE), (PROBS, COUNTS)),
    "device total": (lambda p, t: aux_loss(p, COUNTS[0], t, 8, 2, 0.1), (PROBS, COUNTS[:, 0])),
    "packs": (
        lambda p, c: sequence_aux_loss(p, COUNTS[:2], 2, 0.1, c),
        (PROBS, ENDS),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_each_element_has_the_bits_of_its_own_call(name):
    call, inputs = CASES[name]
    expected = torch.stack([call(*(x[i] for x in inputs)) for i in range(BATCH)])
    assert_same_bits(torch.vmap(call)(*inputs), expected)
    moved = [inputs[0].movedim(0, 1), *inputs[1:]]
    in_dims = (1, *(0 for _ in inputs[1:]))
    assert_same_bits(torch.vmap(call, in_dims=in_dims)(*moved), expected)


@pytest.mark.parametrize("name", CASES)
def test_gradients_through_vmap(name):
    call, inputs = CASES[name]
    leaf = inputs[0].clone().requires_grad_()
    torch.vmap(call)(leaf, *inputs[1:]).square().sum().backward()
    expected = inputs[0].clone().requires_grad_()
    sum(
        call(expected[i], *(x[i] for x in inputs[1:])).square().sum() for i in range(BATCH)
    ).backward()
    assert_same_bits(leaf.grad, expected.grad)
    assert leaf.grad.abs().sum() > 0


def test_vmap_within_vmap():
    nested = torch.vmap(torch.vmap(lambda p: aux_loss(p, COUNTS[0], 6, 8, 2, 0.1)))
    actual = nested(PROBS.expand(2, *PROBS.shape))
    expected = torch.stack([aux_loss(p, COUNTS[0], 6, 8, 2, 0.1) for p in PROBS])
    assert_same_bits(actual[1], expected)


@pytest.mark.parametrize("name", CASES)
def test_a_batch_of_none(name):
    call, inputs = CASES[name]
    one = call(*(x[0] for x in inputs))
    result = torch.vmap(call)(*(x[:0] for x in inputs))
    assert result.shape == (0, *one.shape) and result.dtype == one.dtype
