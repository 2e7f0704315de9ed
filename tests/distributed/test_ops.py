"""The ops under the distributed losses, one rank's part at a time."""

import pytest
import torch
from torch.library import opcheck

from moe_custom_ops import (
    aux_loss_workspace_size,
    make_workspace,
    sequence_aux_loss_workspace_size,
)
from moe_custom_ops.testing import assert_same_bits, make_probs

OPS = torch.ops.moe


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("mask", [None, torch.arange(1100) % 3 > 0])
def test_opcheck_of_aux_loss(requires_grad, mask):
    probs, counts = make_probs(1100, 8)
    opcheck(OPS.aux_loss_sums_of_rank.default, (probs, counts, mask, 5))
    total, sums = torch.tensor(1100), torch.rand(10)
    inner, numbers = (probs, counts, mask, total, sums), (8, 2, 0.1)
    opcheck(OPS.aux_loss_forward.default, (*inner, *numbers, 0))
    probs = probs.clone().requires_grad_(requires_grad)
    for given in (make_workspace(aux_loss_workspace_size(1100, 8)), None):
        call = (probs, counts, total, *numbers, given, mask, sums)
        opcheck(OPS.aux_loss_of_rank.default, call)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_opcheck_of_sequence_aux_loss(requires_grad, packed):
    probs, _ = make_probs(1400, 8)
    counts = torch.ones(2, 8, dtype=torch.int64)
    cu_seqlens = torch.tensor([0, 800, 1400]) if packed else None
    mask = torch.arange(1400) % 3 > 0
    if not packed:
        probs, mask = probs.view(2, 700, 8), mask.view(2, 700)
    opcheck(OPS.sequence_aux_loss_sums_of_rank.default, (probs, counts, cu_seqlens, mask, 3))
    workspace = make_workspace(sequence_aux_loss_workspace_size(1400, 2, 8))
    probs.requires_grad_(requires_grad)
    lengths = torch.tensor([900, 700])
    for sums in (None, torch.rand(2), torch.rand(2, 5)):
        for given in (workspace, None):
            call = (probs, counts, lengths, 2, 0.1, cu_seqlens, mask, given, sums)
            opcheck(OPS.sequence_aux_loss_of_rank.default, call)


@pytest.mark.parametrize(
    ("sums", "error", "message"),
    [
        (torch.rand(3).double(), TypeError, "sums must be float32, got float64"),
        (torch.rand(3, 1), ValueError, r"sums must be of shape \[tiles\], got \[3, 1\]"),
        (torch.rand(6)[::2], ValueError, "sums must be contiguous, got strides"),
    ],
)
def test_sums_that_are_refused(sums, error, message):
    probs, counts = make_probs(9, 8)
    total, numbers = torch.tensor(9), (8, 2, 0.1)
    with pytest.raises(error, match=message):
        OPS.aux_loss_forward(probs, counts, None, None, sums, *numbers, 9)
    for given in (probs, probs.clone().requires_grad_()):
        with pytest.raises(error, match=message):
            OPS.aux_loss_of_rank(given, counts, total, *numbers, None, None, sums)


def test_without_sums_there_are_this_ranks_own():
    """No scratch stands for them: a workspace that nobody wrote gave its garbage for them."""
    probs, counts = make_probs(9, 8)
    expected = OPS.aux_loss(probs, counts, 9, 8, 2, 0.1)
    assert expected > 0
    inner = (probs, counts, None, None, None)
    workspace = make_workspace(aux_loss_workspace_size(9, 8)).fill_(255)
    assert_same_bits(OPS.aux_loss_forward(*inner, 8, 2, 0.1, 9)[0], expected)
    assert_same_bits(OPS.aux_loss_forward_in(*inner, workspace, 8, 2, 0.1, 9)[0], expected)


@pytest.mark.parametrize(
    ("sums", "lengths", "error", "message"),
    [
        (torch.rand(2), None, ValueError, "lengths must be given with sums, got None"),
        (
            torch.rand(3),
            torch.ones(2).long(),
            ValueError,
            r"sums must be of shape \[sequences\] or",
        ),
        (torch.rand(2).double(), torch.ones(2).long(), TypeError, "sums must be float32, got fl"),
        (torch.rand(2), torch.ones(3).long(), ValueError, "lengths must be of shape"),
        (torch.rand(2), torch.ones(2), TypeError, "lengths must be int64, got float32"),
        (None, torch.ones(3).long(), ValueError, "lengths must be of shape"),
    ],
)
def test_sums_of_sequences_that_are_refused(sums, lengths, error, message):
    probs, counts = make_probs(6, 8)[0].view(2, 3, 8), torch.ones(2, 8)
    with pytest.raises(error, match=message):
        OPS.sequence_aux_loss_forward(probs, counts, None, None, sums, lengths, 2, 0.1)
    if lengths is not None:
        with pytest.raises(error, match=message):
            rest = None, None, None, sums
            OPS.sequence_aux_loss_of_rank(probs, counts, lengths, 2, 0.1, *rest)


def test_too_few_places():
    probs, counts = make_probs(1100, 8)
    with pytest.raises(ValueError, match="size must be at least 3, the number of tiles, got 2"):
        OPS.aux_loss_sums_of_rank(probs, counts, None, 2)
