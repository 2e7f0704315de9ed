"""weighted_restore and restore in plain PyTorch, in the order of operations of the kernels.

Without scores a product is the row itself. Shapes: ``rows`` [N, H], ``top_scores`` [T, K], ``grad``
and ``addend`` [T, H], and the ``slots`` [T, K] of the inverse permutation: the row that holds an
assignment, or -1.
"""

import torch
from torch import Tensor

from ..fixed_order import accumulator_dtype, cast, tree_sum

# Lanes of the score gradient's accumulator: lane h % 512 adds its products in ascending order of h,
# then a tree adds the lanes. Every backend has this width: no block shape can change a bit. On an
# H200, 256 took 1.00 of the time of 512 at (T 8192, K 8, H 2048) and 1.40 at (32, 8, 7168); 1024
# took 1.12 and 0.94.
ACCUMULATOR_LANES = 512


def with_zero_row(x: Tensor) -> Tensor:
    """``x`` and one row of zeros, which index -1 then means."""
    return torch.nn.functional.pad(x, (0, 0, 0, 1))


def weighted_restore(
    rows: Tensor, top_scores: Tensor | None, slots: Tensor, addend: Tensor | None = None
) -> Tensor:
    """cast(addend[t] + sum_k top_scores[t, k] * rows[slots[t, k]]), k ascending: [T, H]."""
    dtype = accumulator_dtype(rows.dtype)
    num_tokens, topk = slots.shape
    padded = with_zero_row(rows)
    if addend is None:
        out = rows.new_zeros(num_tokens, rows.shape[1], dtype=dtype)
    else:
        out = addend.to(dtype)
    for k in range(topk):
        products = padded[slots[:, k]].to(dtype)
        if top_scores is not None:
            products = top_scores[:, k, None].to(dtype) * products
        # An assignment that no row holds adds zero whatever its score is, NaN included.
        out = out + torch.where(slots[:, k, None] < 0, 0.0, products)
    return cast(out, rows.dtype)


def grad_rows(
    grad: Tensor, top_scores: Tensor | None, slots: Tensor, assignments: Tensor
) -> Tensor:
    """top_scores[t, k] * grad[t] at the row of (t, k), zero at padding rows: [N, H].

    Without scores a copy of grad[t], of any dtype.
    """
    tokens = torch.where(assignments < 0, -1, assignments // slots.shape[1])
    copies = with_zero_row(grad)[tokens]
    if top_scores is None:
        return copies
    dtype = accumulator_dtype(grad.dtype)
    scores = torch.nn.functional.pad(top_scores.reshape(-1).to(dtype), (0, 1))[assignments]
    return cast(scores[:, None] * copies.to(dtype), grad.dtype)


def grad_scores(grad: Tensor, rows: Tensor, slots: Tensor, scores_dtype: torch.dtype) -> Tensor:
    """sum_h grad[t, h] * rows[slots[t, k], h], zero where no row holds (t, k): [T, K]."""
    dtype = accumulator_dtype(rows.dtype)
    padded = with_zero_row(rows)
    sums = []
    for k in range(slots.shape[1]):
        products = grad.to(dtype) * padded[slots[:, k]].to(dtype)
        products = torch.where(slots[:, k, None] < 0, 0.0, products)
        lanes = products.new_zeros(products.shape[0], ACCUMULATOR_LANES)
        for chunk in products.split(ACCUMULATOR_LANES, dim=1):
            lanes = lanes + torch.nn.functional.pad(chunk, (0, ACCUMULATOR_LANES - chunk.shape[1]))
        sums.append(tree_sum(lanes, dim=1))
    return cast(torch.stack(sums, dim=1), scores_dtype)


def row_assignments(slots: Tensor, token_indices_sorted: Tensor) -> Tensor:
    """The flat assignment that each row holds, or -1 for a padding row: int64 [N].

    A row that lost a duplicate to a higher row is a padding row.
    """
    index = token_indices_sorted.to(torch.int64)
    index = torch.where((index < 0) | (index >= slots.numel()), -1, index)
    owners = torch.nn.functional.pad(slots.reshape(-1), (0, 1), value=-1)[index]
    rows = torch.arange(index.shape[0], device=index.device)
    return torch.where(owners == rows, index, -1)


def scores_to_rows(top_scores: Tensor, assignments: Tensor) -> Tensor:
    """The score of each row's assignment, zero at padding rows: [N]."""
    return torch.nn.functional.pad(top_scores.reshape(-1), (0, 1))[assignments]


def rows_to_scores(row_scores: Tensor, slots: Tensor) -> Tensor:
    """The value of each assignment's row, zero where no row holds it: the shape of ``slots``."""
    index = torch.where((slots < 0) | (slots >= row_scores.shape[0]), -1, slots).long()
    return torch.nn.functional.pad(row_scores, (0, 1))[index]
