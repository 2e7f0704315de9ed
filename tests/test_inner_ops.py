"""Anyone can call an inner op with anything: what its kernels rely on is refused by name."""

import pytest
import torch

from moe_custom_ops import op
from moe_custom_ops.losses import plans as losses
from moe_custom_ops.permutation import plans as permutation
from moe_custom_ops.rows import plans as rows

PROBS, COUNTS = torch.rand(6, 4), torch.ones(4)
BATCH, OF_EACH = torch.rand(2, 3, 4), torch.ones(2, 4)
ORDER, SLOTS = torch.arange(6), torch.arange(6, dtype=torch.int32).view(3, 2)
GRAD, ROWS, SCORES = torch.rand(3, 5), torch.rand(6, 5), torch.rand(3, 2)
MASK = torch.ones(6)
PLANS = {
    "aux_loss_sums_of_rank": op.registered(losses.aux_loss_sums, 3),
    "sequence_aux_loss_sums_of_rank": op.registered(losses.sequence_aux_loss_sums, 4),
    "order_from_counts": op.registered(permutation.order_from_counts, 1, 2),
    "inverse": op.registered(permutation.inverse, 1, 2),
    "restore_grads": op.registered(rows.restore_backward, 5, 1),
    "scores_to_rows_forward": op.registered(rows.scores_to_rows, 3),
    "rows_to_scores_forward": op.registered(rows.rows_to_scores, 3),
}


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("aux_loss_sums_of_rank", (PROBS, COUNTS, MASK, 4), "token_mask must be bool"),
        (
            "sequence_aux_loss_sums_of_rank",
            (PROBS, OF_EACH, torch.tensor([0.0, 2.0, 6.0]), None, 4),
            "cu_seqlens must be int32 or int64",
        ),
        ("order_from_counts", (torch.ones(2, 4).long(), 8, 0), "alignment must be at least 1"),
        ("inverse", (ORDER.float(), 3, 2), "token_indices_sorted must be int32 or int64"),
        ("inverse", (ORDER, -3, 2), "num_tokens must be at least 0"),
        (
            "restore_grads",
            (GRAD, ROWS, SCORES, ORDER.float(), SLOTS, True),
            "token_indices_sorted must be int32 or int64",
        ),
        (
            "restore_grads",
            (GRAD.long(), None, None, ORDER, SLOTS, True),
            "grad must be float32, bfloat16, float16 or float64",
        ),
        (
            "restore_grads",
            (GRAD.double(), ROWS, SCORES, ORDER, SLOTS, True),
            "rows must be float64, got float32, not that of grad",
        ),
        ("scores_to_rows_forward", (SCORES, ORDER[:, None], SLOTS), "must be of shape .N."),
        ("scores_to_rows_forward", (SCORES, ORDER.float(), SLOTS), "must be int32 or int64"),
        ("rows_to_scores_forward", (ROWS, ORDER, SLOTS), "row_scores must be of shape .N."),
        ("rows_to_scores_forward", (ROWS[0, 0], ORDER, SLOTS), "row_scores must be of shape .N."),
    ],
)
def test_what_is_wrong_is_refused_by_name(name, arguments, message, planned):
    call = PLANS[name] if planned else getattr(torch.ops.moe, name)
    with pytest.raises((TypeError, ValueError), match=message):
        call(*arguments)


def test_a_rank_has_room_for_its_tiles_alone():
    sums = torch.ops.moe.sequence_aux_loss_sums_of_rank(BATCH, OF_EACH, None, None, 3)
    assert sums.shape == (2, 3) and (sums[:, 0] > 0).all() and (sums[:, 1:] == 0).all()
    with pytest.raises(ValueError, match="size must be at least 1"):
        torch.ops.moe.aux_loss_sums_of_rank(PROBS, COUNTS, None, 0)
