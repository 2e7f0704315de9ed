"""``torch.func.vmap`` over the public ops.

PyTorch has no batching rule of its own for a composite whose schema mutates a workspace.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def register_vmap(name: str) -> None:
    """Batch the op ``moe::<name>``: one call for each element, and the results stacked."""
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.moe, packet), overload or "default")

    def rule(
        info: Any, in_dims: tuple[int | None, ...], *arguments: Any, **options: Any
    ) -> tuple[Any, Any]:
        def call(pick: Callable[[Tensor, int], Tensor]) -> Any:
            pairs = zip(arguments, in_dims, strict=True)
            return op(*[x if dim is None else pick(x, dim) for x, dim in pairs], **options)

        def zeros(x: Tensor, dim: int) -> Tensor:
            return x.new_zeros([*x.shape[:dim], *x.shape[dim + 1 :]])

        if info.batch_size == 0:
            results = [call(zeros)]
        else:
            results = [call(lambda x, dim, i=i: x.select(dim, i)) for i in range(info.batch_size)]  # type: ignore[misc]

        def stack(elements: Sequence[Tensor]) -> Tensor:
            return torch.stack(tuple(elements))[: info.batch_size]

        if isinstance(results[0], Tensor):
            return stack(results), 0
        stacks = tuple(map(stack, zip(*results, strict=True)))
        return stacks, (0,) * len(stacks)

    torch.library.register_vmap(f"moe::{name}", rule)
