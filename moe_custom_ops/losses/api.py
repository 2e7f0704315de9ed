"""The documented functions of the losses."""

from torch import Tensor

from . import ops


def aux_loss(
    probs: Tensor,
    tokens_per_expert: Tensor,
    total_num_tokens: Tensor | int,
    num_experts: int,
    topk: int,
    coeff: float,
    workspace: Tensor | None = None,
    token_mask: Tensor | None = None,
) -> Tensor:
    r"""Load-balancing loss of a mixture-of-experts router, in a fixed order of operations.

    .. math::
        \text{loss} = C \sum_c n_c \sum_t p_{t,c}, \qquad
        C = \frac{\text{num\_experts} \cdot \text{coeff}}{\text{topk} \cdot \text{total}^2}

    with :math:`p` = ``probs``, :math:`n` = ``tokens_per_expert`` and total = ``total_num_tokens``.
    This is the loss of Switch Transformer (Fedus et al. 2021, equations 4 to 6), normalised over
    top-k assignments as Megatron-Core does: with perfectly even routing it is ``coeff``.

    **One answer.** The bits of the loss depend on the input values alone: not on the device, the
    launch, the run, or whether it runs eager, compiled or in a CUDA graph. Tokens are cut into
    tiles whose size depends on the number of columns alone; every sum is a binary tree of adjacent
    elements; there are no atomics. The promise covers this op, not the matrix product and softmax
    that made ``probs``. The gradient, ``(grad * C) * tokens_per_expert[c]``, has the same bits
    too, unless ``torch.compile`` fuses it into another operation of yours.

    Args:
        probs: router probabilities [tokens, columns]; float32, bfloat16, float16 or float64, any
            strides. Columns are a multiple of ``num_experts``: a sequence-level loss puts B
            sequences side by side, columns = B * num_experts.
        tokens_per_expert: number of assignments per column [columns]; int32, int64, float32 or
            float64. A constant: it receives no gradient.
        total_num_tokens: tokens that the counts were taken over. An int of at least 1 (0 is fine
            when ``probs`` has no tokens, or with a ``token_mask``), or a one-element int32, int64,
            float32 or float64 tensor on the device of ``probs``, which is never rounded or copied
            to the host and may change between replays of a CUDA graph. Where it is 0, loss and
            gradient are 0. A constant: it receives no gradient.
        num_experts: experts of the layer, at least 1.
        topk: experts per token, at least 1.
        coeff: weight of the loss, a constant of a compiled graph. For a schedule pass 1.0 and
            scale the result by a tensor.
        workspace: scratch of at least :func:`aux_loss_workspace_size` bytes, made by
            :func:`make_workspace`; None allocates it.
        token_mask: optional bool [tokens], True for the tokens that count. The others add nothing
            and get a zero gradient, whatever they hold, NaN included. Count ``tokens_per_expert``
            and ``total_num_tokens`` over the same tokens.

    Returns:
        0-dim tensor: float64 for float64 ``probs``, else float32.

        The gradient of ``probs`` is a row expanded over the tokens (stride 0), in the dtype of
        ``probs``: what is written to one token's is written to all, mostly without an error, so
        clone it first. (With a ``token_mask`` it is an ordinary tensor.)

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape, value or device, or the workspace is too
            small, misaligned or not contiguous.
        NotImplementedError: forward-mode AD, or a CUDA tensor on a ROCm build.

    Example:
        >>> probs = torch.rand(8, 4).softmax(-1)
        >>> counts = torch.tensor([4, 4, 4, 4])
        >>> loss = aux_loss(probs, counts, 8, num_experts=4, topk=2, coeff=1e-2)
    """
    return ops.AUX_LOSS(
        probs, tokens_per_expert, total_num_tokens, num_experts, topk, coeff, workspace, token_mask
    )


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
    return ops.SEQUENCE_AUX_LOSS(
        probs, tokens_per_expert, topk, coeff, cu_seqlens, token_mask, workspace
    )
