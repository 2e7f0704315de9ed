"""The documented function of sequence_aux_loss."""

import torch
from torch import Tensor

from .. import checks
from . import direct


def sequence_aux_loss(
    probs: Tensor,
    tokens_per_expert: Tensor,
    topk: int,
    coeff: float,
    cu_seqlens: Tensor | None = None,
    token_mask: Tensor | None = None,
    workspace: Tensor | None = None,
) -> Tensor:
    r"""Load-balancing loss of each sequence, averaged over the sequences that are not empty.

    .. math::
        \text{loss} = \frac{1}{B'} \sum_{b : L_b > 0}
            \frac{E \cdot \text{coeff}}{\text{topk} \cdot L_b^2}
            \sum_e n_{b,e} \sum_{t \in b} p_{t,e}

    with :math:`p` = ``probs``, :math:`n` = ``tokens_per_expert``, :math:`L_b` the number of
    (unmasked) tokens of sequence b and :math:`B'` the number of sequences that have any. This is
    the sequence-wise balance loss of DeepSeek-V3 (DeepSeek-AI 2024, equations 17 to 20), with
    counts over all of a token's ``topk`` experts. Empty sequences are skipped, so the number of
    sequences can be padded to a fixed one, for a CUDA graph.

    **One answer**, as :func:`aux_loss` promises it. A sequence's sum is taken in an order that
    begins at its own first token: it has the same bits wherever the sequence lies. The gradient is
    one row per sequence.

    Args:
        probs: router probabilities, batch-first [B, S, E], or packed [T, E] with ``cu_seqlens``;
            float32, bfloat16, float16 or float64, any strides.
        tokens_per_expert: number of assignments [B, E] of each sequence; int32, int64, float32 or
            float64. A constant: it receives no gradient.
        topk: experts per token, at least 1.
        coeff: weight of the loss, a constant of a compiled graph.
        cu_seqlens: for packed ``probs``, where each sequence begins and the last one ends [B + 1],
            ascending; int32 or int64, on the device of ``probs``, never copied to the host. Tokens
            before the first and behind the last add nothing.
        token_mask: optional bool [B, S] or [T], True for the tokens that count. The others add
            nothing and get a zero gradient, whatever they hold, NaN included. Count
            ``tokens_per_expert`` over the same tokens.
        workspace: scratch of at least :func:`sequence_aux_loss_workspace_size` bytes, made by
            :func:`make_workspace`; None allocates it.

    Returns:
        0-dim tensor: float64 for float64 ``probs``, else float32; 0 if every sequence is empty.

        The gradient of ``probs`` has their dtype. For batch-first probs without a mask it is
        expanded over the tokens (stride 0): what is written to one token's is written to all of
        its sequence, mostly without an error, so clone it first.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape, value or device, or the workspace is too
            small, misaligned or not contiguous.
        NotImplementedError: forward-mode AD, or a CUDA tensor on a ROCm build.

    Example:
        >>> probs = torch.rand(10, 4).softmax(-1)                   # sequences of 6 and 4 tokens
        >>> counts = torch.tensor([[3, 3, 3, 3], [2, 2, 2, 2]])
        >>> cu_seqlens = torch.tensor([0, 6, 10], dtype=torch.int32)
        >>> loss = sequence_aux_loss(probs, counts, 2, 1e-2, cu_seqlens)
    """
    arguments = (probs, tokens_per_expert, topk, coeff, cu_seqlens, token_mask, workspace)
    if not torch.compiler.is_compiling():
        loss = direct.sequence_aux_loss(*arguments)
        if loss is not None:
            return loss
    check_types(*arguments)
    return torch.ops.moe.sequence_aux_loss(*arguments)


def check_types(
    probs: object,
    tokens_per_expert: object,
    topk: object,
    coeff: object,
    cu_seqlens: object,
    token_mask: object,
    workspace: object,
) -> None:
    """Refuse what the schema would, by name."""
    checks.is_tensor("sequence_aux_loss", "probs", probs)
    checks.is_tensor("sequence_aux_loss", "tokens_per_expert", tokens_per_expert)
    checks.is_integer("sequence_aux_loss", "topk", topk)
    checks.is_number("sequence_aux_loss", "coeff", coeff)
    for name, tensor in (
        ("cu_seqlens", cu_seqlens),
        ("token_mask", token_mask),
        ("workspace", workspace),
    ):
        if tensor is not None:
            checks.is_tensor("sequence_aux_loss", name, tensor)
