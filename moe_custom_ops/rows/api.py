"""The documented functions of permute and of the restores."""

from torch import Tensor

from . import ops


def weighted_restore(
    rows: Tensor,
    top_scores: Tensor,
    token_indices_sorted: Tensor,
    addend: Tensor | None = None,
    workspace: Tensor | None = None,
    inverse: Tensor | None = None,
) -> Tensor:
    r"""Weighted sum of each token's expert rows, from expert-major order to token order.

    .. math::
        \text{out}_t = \text{addend}_t + \sum_{k=0}^{K-1} s_{t,k} \, \text{rows}_{\text{slot}(t,k)}

    with :math:`s` = ``top_scores`` and slot the inverse of ``token_indices_sorted``. This is the
    combine step of a mixture-of-experts layer (Shazeer et al. 2017, equation 1).

    Products and sums are float32 (float64 for float64 rows), k ascending; each product is rounded
    before it is added, and one cast ends the sum. There are no atomics in the gradients either:
    the bits of the result and of every gradient depend on the inputs alone.

    Args:
        rows: expert outputs [N, H], expert-major; bfloat16, float16, float32 or float64, any
            strides. N may be larger than T * K (padding) or smaller (dropped assignments).
        top_scores: weights [*, K] of T tokens; bfloat16, float16, float32 or float64. They are cast
            to the dtype of the sum first.
        token_indices_sorted: int32 or int64 [N]: row i holds flat assignment t * K + k. A negative
            value, or one of at least T * K, marks padding, which may hold anything, NaN included.
            Where two rows hold one assignment the higher row wins and the other is padding. An
            assignment that no row holds adds zero.
        addend: optional start of the sum [*, H] in the dtype of ``rows``: a shared expert's output
            or a residual.
        workspace: scratch of at least :func:`weighted_restore_workspace_size` bytes, made by
            :func:`make_workspace`; None allocates it.
        inverse: :func:`inverse_permutation` of ``token_indices_sorted``, int32 of the shape of
            ``top_scores``, where several ops of a layer share it; None inverts here. No workspace
            is needed then. One of another order gives results that are unspecified, and may differ
            from run to run; nothing beyond the tensors is read or written.

    Returns:
        [*, H] in the dtype of ``rows``, contiguous: ``top_scores`` [batch, seq, K] gives
        [batch, seq, H].

        Gradients go to ``rows`` (zero at padding), ``top_scores`` (zero where no row holds the
        assignment) and ``addend``, each in the dtype of its input; only those asked for are
        computed.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape or device, or the workspace is too small,
            misaligned or not contiguous.
        NotImplementedError: forward-mode AD, or a CUDA tensor on a ROCm build.

    Example:
        >>> rows = torch.randn(6, 16)                            # 3 tokens, 2 experts each
        >>> expert_ids = torch.tensor([[0, 1], [1, 0], [0, 1]])
        >>> token_indices_sorted = expert_ids.flatten().argsort(stable=True)
        >>> weighted_restore(rows, torch.rand(3, 2), token_indices_sorted).shape
        torch.Size([3, 16])
    """
    return ops.WEIGHTED_RESTORE(rows, top_scores, token_indices_sorted, addend, workspace, inverse)


def restore(
    rows: Tensor,
    token_indices_sorted: Tensor,
    num_tokens: int,
    topk: int,
    addend: Tensor | None = None,
    workspace: Tensor | None = None,
    inverse: Tensor | None = None,
) -> Tensor:
    r"""Sum of each token's expert rows, from expert-major order to token order.

    .. math::
        \text{out}_t = \text{addend}_t + \sum_{k=0}^{K-1} \text{rows}_{\text{slot}(t,k)}

    :func:`weighted_restore` with weights of one, which are neither read nor stored: the combine
    step of layers that apply the scores before or inside the experts, as Megatron-Core does, and
    the backward of a permutation. Sums are float32 (float64 for float64 rows), k ascending, and one
    cast ends them; there are no atomics.

    Args:
        rows: expert outputs [N, H], expert-major; bfloat16, float16, float32 or float64, any
            strides. N may be larger than num_tokens * topk (padding) or smaller (dropped
            assignments).
        token_indices_sorted: int32 or int64 [N], as in :func:`weighted_restore`.
        num_tokens: number T of tokens, at least 0.
        topk: experts per token K, at least 1.
        addend: optional start of the sum [T, H] in the dtype of ``rows``.
        workspace: scratch of at least :func:`weighted_restore_workspace_size` bytes, made by
            :func:`make_workspace`; None allocates it.
        inverse: :func:`inverse_permutation` of ``token_indices_sorted``, int32 [T, K], where
            several ops of a layer share it; None inverts here. No workspace is needed then. It
            must be that of this order, as for :func:`weighted_restore`.

    Returns:
        [T, H] in the dtype of ``rows``, contiguous. Gradients go to ``rows`` (zero at padding) and
        ``addend``; only those asked for are computed, and ``rows`` are not kept for them.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape, value or device, or the workspace is too small,
            misaligned or not contiguous.
        NotImplementedError: forward-mode AD, or a CUDA tensor on a ROCm build.

    Example:
        >>> rows = torch.randn(6, 16)                            # 3 tokens, 2 experts each
        >>> expert_ids = torch.tensor([[0, 1], [1, 0], [0, 1]])
        >>> token_indices_sorted = expert_ids.flatten().argsort(stable=True)
        >>> restore(rows, token_indices_sorted, num_tokens=3, topk=2).shape
        torch.Size([3, 16])
    """
    return ops.RESTORE(rows, token_indices_sorted, num_tokens, topk, addend, workspace, inverse)


def permute(
    tokens: Tensor,
    token_indices_sorted: Tensor,
    topk: int,
    workspace: Tensor | None = None,
    inverse: Tensor | None = None,
) -> Tensor:
    r"""Copies of the tokens in expert-major order.

    .. math::
        \text{rows}_i = \text{tokens}_{\lfloor \text{token\_indices\_sorted}_i / K \rfloor}

    and zero for padding. This is the dispatch step of a mixture-of-experts layer; it is the adjoint
    of :func:`restore`, which is its backward. A token is read once and its K rows are written.

    Args:
        tokens: [T, H] of any strides; bfloat16, float16, float32 or float64. Without a gradient
            also float8, integers and bool: quantised tokens, or their scales.
        token_indices_sorted: int32 or int64 [N]: row i is for flat assignment t * K + k, as
            :func:`expert_permutation` gives it. A negative value, or one of at least T * K, marks
            padding; so does an assignment that a higher row holds too.
        topk: experts per token K, at least 1.
        workspace: scratch of at least :func:`permute_workspace_size` bytes, made by
            :func:`make_workspace`; None allocates it. It is used where no gradient is recorded:
            for one the inverse is kept, in memory of its own.
        inverse: :func:`inverse_permutation` of ``token_indices_sorted``, int32 [T, K], where
            several ops of a layer share it; None inverts here. No workspace is needed then. It
            must be that of this order, as for :func:`weighted_restore`.

    Returns:
        [N, H] in the dtype of ``tokens``, contiguous.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape, value or device, or the workspace is too small,
            misaligned or not contiguous.
        NotImplementedError: forward-mode AD, or a CUDA tensor on a ROCm build.

    Example:
        >>> tokens = torch.arange(6.0).view(3, 2)
        >>> expert_ids = torch.tensor([[0, 1], [1, 0], [0, 1]])
        >>> permute(tokens, expert_ids.flatten().argsort(stable=True), topk=2)[:, 0].tolist()
        [0.0, 2.0, 4.0, 0.0, 2.0, 4.0]
    """
    return ops.PERMUTE(tokens, token_indices_sorted, topk, workspace, inverse)


def permute_with_scores(
    tokens: Tensor,
    top_scores: Tensor,
    token_indices_sorted: Tensor,
    workspace: Tensor | None = None,
    inverse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Copies of the tokens in expert-major order, and their scores in that order.

    For layers that apply the scores before or inside the experts, and then use :func:`restore`.

    Args:
        tokens: [T, H], as in :func:`permute`.
        top_scores: [T, K] of any strides; bfloat16, float16, float32 or float64.
        token_indices_sorted: int32 or int64 [N], as in :func:`permute`.
        workspace: checked, but not needed: the inverse serves both results.
        inverse: :func:`inverse_permutation` of ``token_indices_sorted``, int32 [T, K], where
            several ops of a layer share it; None inverts here.

    Returns:
        ``rows`` [N, H] as of :func:`permute`, and ``row_scores`` [N] in the dtype of
        ``top_scores``, zero for padding. Gradients go to ``tokens`` and to ``top_scores`` (zero
        where no row holds the assignment), without atomics.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape or device, or the workspace is too small,
            misaligned or not contiguous.
        NotImplementedError: forward-mode AD, or a CUDA tensor on a ROCm build.

    Example:
        >>> order = torch.tensor([0, 2, 1, -1])                  # 2 tokens, 2 experts each
        >>> scores = torch.tensor([[0.75, 0.25], [0.5, 0.5]])
        >>> permute_with_scores(torch.rand(2, 8), scores, order)[1].tolist()
        [0.75, 0.5, 0.25, 0.0]
    """
    return ops.PERMUTE_WITH_SCORES(tokens, top_scores, token_indices_sorted, workspace, inverse)
