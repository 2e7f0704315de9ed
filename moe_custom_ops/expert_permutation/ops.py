"""Registration of ``torch.ops.moe.expert_permutation``: schema, fake, dispatch. No gradient.

The public name is a composite. With a workspace it calls an op that mutates it; without one, a
functional op that allocates its own scratch, of a size that a graph need not know.
"""

import math

import torch
from torch import Tensor

from .. import checks
from .. import workspace as workspaces
from ..backend import load_kernels
from ..batching import register_vmap
from . import reference

OP = "expert_permutation"
MAX_EXPERTS = 4096
_Result = tuple[Tensor, Tensor, Tensor]


def expert_permutation_workspace_size(num_tokens: int, topk: int, num_experts: int) -> int:
    """Bytes of workspace that :func:`expert_permutation` needs, at most 16 MiB and 16 KiB.

    The size for a maximum of tokens serves every smaller number.

    Args:
        num_tokens: number of tokens, at least 0.
        topk: experts per token, at least 1.
        num_experts: experts, from 1 to 4096.

    Returns:
        Size in bytes, for :func:`make_workspace`.

    Raises:
        TypeError: an argument is not an int.
        ValueError: an argument is out of its range.
    """
    name = "expert_permutation_workspace_size"
    checks.integer(name, "num_tokens", num_tokens, 0)
    checks.integer(name, "topk", topk, 1)
    _check_experts(name, num_experts)
    return _size(num_tokens * topk, num_experts)


def _check_experts(name: str, num_experts: int) -> None:
    checks.integer(name, "num_experts", num_experts, 1)
    expected = f"at most {MAX_EXPERTS}"
    checks.value(num_experts <= MAX_EXPERTS, name, "num_experts", expected, num_experts)


def num_counts(num_assignments: int, num_experts: int) -> int:
    """int32 counts of scratch, for a symbolic number of assignments too."""
    most = reference.max_tiles(num_experts)
    blocks = (num_assignments + reference.BLOCK - 1) // reference.BLOCK
    # The totals lie behind the counts of the last tile.
    return (torch.sym_min(blocks, most) + 1) * reference.bins(num_experts)


def _size(num_assignments: int, num_experts: int) -> int:
    return workspaces.align(num_counts(num_assignments, num_experts) * torch.int32.itemsize)


def worst_case_rows(num_assignments: int, num_experts: int, alignment: int) -> int:
    """Rows that any choice of experts fits: no more groups than assignments are not empty."""
    padding = torch.sym_min(num_assignments, num_experts) * (alignment - 1)
    return (num_assignments + padding) // alignment * alignment


def check(
    expert_ids: Tensor,
    num_experts: int,
    alignment: int,
    num_rows: int | None,
    workspace: Tensor | None,
) -> int:
    """The number of rows, once all arguments are what the op takes."""
    checks.supported_device(OP, "expert_ids", expert_ids)
    checks.dtype(OP, "expert_ids", expert_ids, checks.INDEX_DTYPES)
    has_topk = expert_ids.dim() >= 1 and expert_ids.shape[-1] >= 1
    checks.shape(OP, "expert_ids", expert_ids, "[*, K] with K >= 1", has_topk)
    _check_experts(OP, num_experts)
    checks.integer(OP, "alignment", alignment, 1)
    num_assignments = math.prod(expert_ids.shape)
    if num_rows is None:
        num_rows = worst_case_rows(num_assignments, num_experts, alignment)
        # Without a minimum: a cached graph would decide it, and be for one side of it only.
        most_rows = num_assignments + num_experts * (alignment - 1)
    else:
        checks.integer(OP, "num_rows", num_rows, 0)
        most_rows = num_rows
    expected = "of fewer than 2^31 elements"
    checks.value(num_assignments < 2**31, OP, "expert_ids", expected, num_assignments)
    checks.value(most_rows < 2**31, OP, "num_rows", "fewer than 2^31", most_rows)
    if workspace is not None:
        workspaces.resolve(OP, workspace, _size(num_assignments, num_experts), expert_ids)
    return num_rows


def flat(expert_ids: Tensor) -> Tensor:
    """[*, K] as [T, K]: a view where the leading strides allow it."""
    if expert_ids.dim() == 2:
        return expert_ids
    return expert_ids.reshape(math.prod(expert_ids.shape[:-1]), expert_ids.shape[-1])


def _empty_results(expert_ids: Tensor, num_experts: int, num_rows: int) -> _Result:
    return (
        expert_ids.new_empty(num_rows, dtype=torch.int32),
        expert_ids.new_empty(num_experts, dtype=torch.int64),
        expert_ids.new_empty(num_experts, dtype=torch.int32),
    )


def _launch(
    expert_ids: Tensor, num_experts: int, alignment: int, num_rows: int, workspace: Tensor | None
) -> _Result:
    size = num_counts(expert_ids.numel(), num_experts)
    if workspace is None:
        counts = expert_ids.new_empty(size, dtype=torch.int32)
    else:
        counts = workspaces.scratch(OP, workspace, size, torch.int32)
    results = _empty_results(expert_ids, num_experts, num_rows)
    kernels = load_kernels(__package__)
    ids = flat(expert_ids)
    count, scan, place = kernels.expert_permutation(ids, num_experts, alignment, num_rows)
    count(ids, counts, results[0])
    scan(counts)
    place(ids, counts, *results)
    return results


@torch.library.custom_op("moe::expert_permutation_alone", mutates_args=(), device_types="cpu")
def expert_permutation_alone(
    expert_ids: Tensor, num_experts: int, alignment: int, num_rows: int
) -> _Result:
    """(token_indices_sorted, tokens_per_expert, offsets), with scratch of its own."""
    return reference.expert_permutation(expert_ids, num_experts, alignment, num_rows)


@expert_permutation_alone.register_kernel("cuda")
def _(expert_ids: Tensor, num_experts: int, alignment: int, num_rows: int) -> _Result:
    return _launch(expert_ids, num_experts, alignment, num_rows, None)


@expert_permutation_alone.register_fake
def _(expert_ids: Tensor, num_experts: int, alignment: int, num_rows: int) -> _Result:
    return _empty_results(expert_ids, num_experts, num_rows)


@torch.library.custom_op(
    "moe::expert_permutation_in", mutates_args={"workspace"}, device_types="cpu"
)
def expert_permutation_in(
    expert_ids: Tensor, num_experts: int, alignment: int, num_rows: int, workspace: Tensor
) -> _Result:
    """The same, with ``workspace`` for its scratch."""
    return reference.expert_permutation(expert_ids, num_experts, alignment, num_rows)


@expert_permutation_in.register_kernel("cuda")
def _(
    expert_ids: Tensor, num_experts: int, alignment: int, num_rows: int, workspace: Tensor
) -> _Result:
    return _launch(expert_ids, num_experts, alignment, num_rows, workspace)


@expert_permutation_in.register_fake
def _(
    expert_ids: Tensor, num_experts: int, alignment: int, num_rows: int, workspace: Tensor
) -> _Result:
    return _empty_results(expert_ids, num_experts, num_rows)


def _expert_permutation(
    expert_ids: Tensor,
    num_experts: int,
    alignment: int = 1,
    num_rows: int | None = None,
    workspace: Tensor | None = None,
) -> _Result:
    num_rows = check(expert_ids, num_experts, alignment, num_rows, workspace)
    arguments = expert_ids, num_experts, alignment, num_rows
    if workspace is None:
        return torch.ops.moe.expert_permutation_alone(*arguments)
    return torch.ops.moe.expert_permutation_in(*arguments, workspace)


torch.library.define(
    "moe::expert_permutation",
    "(Tensor expert_ids, int num_experts, int alignment=1, SymInt? num_rows=None, "
    "Tensor(a!)? workspace=None) -> (Tensor, Tensor, Tensor)",
)
torch.library.impl("moe::expert_permutation", "CompositeImplicitAutograd", _expert_permutation)
register_vmap("expert_permutation")
