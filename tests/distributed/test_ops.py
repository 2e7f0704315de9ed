"""The ops under the distributed losses, one rank's part at a time."""

import pytest
import torch
from torch.library import opcheck

from moe_custom_ops import aux_loss_workspace_size, make_workspace
from moe_custom_ops.testing import make_probs

OPS = torch.ops.moe


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("mask", [None, torch.arange(1100) % 3 > 0])
def test_opcheck_of_aux_loss(requires_grad, mask):
    probs, counts = make_probs(1100, 8)
    workspace = make_workspace(aux_loss_workspace_size(1100, 8))
    OPS.aux_loss_tile_sums(probs, counts, mask, workspace)
    opcheck(OPS.aux_loss_padded_sums.default, (probs, workspace, 5))
    for given in (workspace, None):
        opcheck(OPS.aux_loss_sums_of_rank.default, (probs, counts, 8, 2, 5, given, mask))
    sums = torch.rand(10)
    call = (probs.requires_grad_(requires_grad), counts, mask, torch.tensor(1100), 0, 8, 2, 0.1)
    opcheck(OPS.aux_loss_from_tile_sums.default, (*call, None, sums))


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_opcheck_of_sequence_aux_loss(requires_grad, packed):
    probs, _ = make_probs(1400, 8)
    counts = torch.ones(2, 8, dtype=torch.int64)
    cu_seqlens = torch.tensor([0, 800, 1400]) if packed else None
    mask = torch.arange(1400) % 3 > 0
    if not packed:
        probs, mask = probs.view(2, 700, 8), mask.view(2, 700)
    call = (probs, counts, 2, 3, cu_seqlens, mask, None)
    opcheck(OPS.sequence_aux_loss_sums_of_rank.default, call)
    probs.requires_grad_(requires_grad)
    lengths = torch.tensor([900, 700])
    for sums in (None, torch.rand(2), torch.rand(2, 5)):
        call = (probs, counts, lengths, 2, 0.1, cu_seqlens, mask, None, sums)
        opcheck(OPS.sequence_aux_loss_of_rank.default, call)


@pytest.mark.parametrize(
    ("sums", "workspace", "error", "message"),
    [
        (torch.rand(3).double(), None, TypeError, "sums must be float32, got float64"),
        (torch.rand(3, 1), None, ValueError, r"sums must be of shape \[tiles\], got \[3, 1\]"),
        (torch.rand(6)[::2], None, ValueError, "sums must be contiguous, got strides"),
        (None, None, ValueError, "workspace must be given without sums, got None"),
    ],
)
def test_sums_that_are_refused(sums, workspace, error, message):
    probs, counts = make_probs(9, 8)
    with pytest.raises(error, match=message):
        OPS.aux_loss_from_tile_sums(probs, counts, None, None, 9, 8, 2, 0.1, workspace, sums)


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
        (torch.rand(2), torch.ones(3).long(), ValueError, "lengths must be of shape"),
        (torch.rand(2), torch.ones(2), TypeError, "lengths must be int64, got float32"),
        (None, torch.ones(2).long(), ValueError, "workspace must be given without sums"),
    ],
)
def test_sums_of_sequences_that_are_refused(sums, lengths, error, message):
    probs, counts = make_probs(6, 8)[0].view(2, 3, 8), torch.ones(2, 8)
    with pytest.raises(error, match=message):
        OPS.sequence_aux_loss_from_tile_sums(probs, counts, None, None, 2, 0.1, None, sums, lengths)


def test_too_few_places():
    probs, counts = make_probs(1100, 8)
    with pytest.raises(ValueError, match="size must be at least 3, the number of tiles, got 2"):
        OPS.aux_loss_sums_of_rank(probs, counts, 8, 2, 2)
