"""The documented function of aux_loss."""

import torch
from torch import Tensor

from .. import checks
from . import direct


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
    arguments = (
        probs, tokens_per_expert, total_num_tokens, num_experts, topk, coeff, workspace, token_mask
    )  # fmt: skip
    if not torch.compiler.is_compiling():
        loss = direct.aux_loss(*arguments)
        if loss is not None:
            return loss
    check_types(*arguments)
    return torch.ops.moe.aux_loss(*arguments)


def check_types(
    probs: object,
    tokens_per_expert: object,
    total_num_tokens: object,
    num_experts: object,
    topk: object,
    coeff: object,
    workspace: object,
    token_mask: object,
) -> None:
    """Refuse what the schema would, by name."""
    checks.is_tensor("aux_loss", "probs", probs)
    checks.is_tensor("aux_loss", "tokens_per_expert", tokens_per_expert)
    if not isinstance(total_num_tokens, Tensor):
        checks.is_integer("aux_loss", "total_num_tokens", total_num_tokens, "a Tensor or an int")
    checks.is_integer("aux_loss", "num_experts", num_experts)
    checks.is_integer("aux_loss", "topk", topk)
    checks.is_number("aux_loss", "coeff", coeff)
    if workspace is not None:
        checks.is_tensor("aux_loss", "workspace", workspace)
    if token_mask is not None:
        checks.is_tensor("aux_loss", "token_mask", token_mask)
