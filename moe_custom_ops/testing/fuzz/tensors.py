"""Tensors from a seed, a shape and a layout: what the source of a drawn call is written with."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# Far outside of any order, in the dtype that holds them.
_PADDING = (-1, -1, -1, -7)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(
    shape: Sequence[int], dtype: torch.dtype, seed: int, scale: float = 1.0, special: float = 0.0
) -> Tensor:
    """Normal values times ``scale``, of which a share of ``special`` are NaN, infinite or zero."""
    generator = _generator(seed)
    x = torch.randn(shape, generator=generator) * scale
    if special:
        odd = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0])
        values = odd[torch.randint(5, x.shape, generator=generator)]
        x = torch.where(torch.rand(x.shape, generator=generator) < special, values, x)
    return x.to(dtype)


def probabilities(shape: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    """Softmax of normal logits over the last dimension."""
    return torch.randn(shape, generator=_generator(seed)).softmax(-1).to(dtype)


def integers(shape: Sequence[int], dtype: torch.dtype, seed: int, low: int, high: int) -> Tensor:
    """Uniform integers in [low, high), as any dtype."""
    return torch.randint(low, high, shape, generator=_generator(seed)).to(dtype)


def bits(shape: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    """Any pattern of bits."""
    x = torch.randint(256, (*shape, dtype.itemsize), generator=_generator(seed), dtype=torch.uint8)
    return x.view(dtype)[..., 0]


def bools(shape: Sequence[int], seed: int, share: float) -> Tensor:
    return torch.rand(shape, generator=_generator(seed)) < share


def order(
    num_assignments: int,
    num_rows: int,
    dtype: torch.dtype,
    seed: int,
    dropped: int = 0,
    duplicates: int = 0,
) -> Tensor:
    """Assignments in random rows, padding in the others: [num_rows].

    At least ``dropped`` of them have no row, and ``duplicates`` of the rows repeat another's.
    """
    generator = _generator(seed)
    limits = torch.iinfo(dtype)
    far = (num_assignments, num_assignments + 5, limits.max, limits.min)
    padding = torch.tensor([*_PADDING, *far])
    result = padding[torch.randint(len(padding), (num_rows,), generator=generator)]
    held = max(0, min(num_assignments - dropped, num_rows))
    rows = torch.randperm(num_rows, generator=generator)
    result[rows[:held]] = torch.randperm(num_assignments, generator=generator)[:held]
    if held:
        others = torch.randint(held, (min(duplicates, num_rows),), generator=generator)
        result[rows[-len(others) :] if len(others) else rows[:0]] = result[rows[others]]
    return result.to(dtype)


def bounds(num_tokens: int, num_sequences: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Ascending ``cu_seqlens`` inside of a pack, some of its sequences empty."""
    ends = torch.randint(num_tokens + 1, (num_sequences + 1,), generator=_generator(seed))
    return ends.sort().values.to(dtype)


def with_nan(x: Tensor, where: Tensor) -> Tensor:
    """``x`` with NaN where nothing may read it."""
    x = x.clone()
    x[where] = torch.nan
    return x


def padding(order: Tensor, num_assignments: int) -> Tensor:
    """Which rows hold no assignment."""
    return (order < 0) | (order >= num_assignments)


def laid_out(
    x: Tensor,
    axes: Sequence[int] | None = None,
    steps: Sequence[int] | None = None,
    offset: int = 0,
) -> Tensor:
    """The values of ``x`` elsewhere in memory.

    Dimensions lie in the order of ``axes``, ``steps`` elements of their own apart, ``offset``
    elements into the storage. What lies between is NaN, or -1.
    """
    axes = tuple(range(x.dim())) if axes is None else tuple(axes)
    steps = (1,) * x.dim() if steps is None else tuple(steps)
    sizes = [x.shape[axis] * steps[axis] for axis in axes]
    memory = torch.empty(offset + math.prod(sizes), dtype=x.dtype)
    memory.view(torch.uint8).fill_(1 if x.dtype == torch.bool else 255)
    view = memory[offset:].view(sizes)
    view = view.permute([axes.index(axis) for axis in range(x.dim())])
    view = view[tuple(slice(None, None, step) for step in steps)]
    view.copy_(x)
    return view


def expanded(x: Tensor, dim: int) -> Tensor:
    """The first of ``x`` along ``dim`` in place of all, at stride 0."""
    if x.shape[dim] == 0:
        return x
    return x.narrow(dim, 0, 1).clone().expand(x.shape)


def scratch(num_bytes: int, fill: int = 255) -> Tensor:
    """A workspace amid memory that is not its own."""
    return torch.full((num_bytes + 32,), fill, dtype=torch.uint8)[16 : 16 + num_bytes]


def storage(x: Tensor) -> Tensor:
    """The bytes of all memory that ``x`` is a part of."""
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())


def again(x: Tensor, device: torch.device | str) -> Tensor:
    """``x`` at the same place in a copy of its memory on ``device``."""
    if x.layout != torch.strided or x.is_meta:
        return x
    memory = storage(x).clone().to(device).untyped_storage()
    place = x.storage_offset(), x.shape, x.stride()
    return torch.empty(0, dtype=x.dtype, device=device).set_(memory, *place)
