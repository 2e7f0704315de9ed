"""``torch.func.vmap`` over the public ops.

PyTorch has no batching rule of its own for a composite whose schema mutates a workspace.
"""

from typing import Any

import torch
from torch import Tensor


def register_vmap(name: str) -> None:
    """Batch the op ``moe::<name>``: one call for each element, and the results stacked."""
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.moe, packet), overload or "default")

    def rule(
        info: Any, in_dims: tuple[int | None, ...], *arguments: Any, **options: Any
    ) -> tuple[Tensor, int]:
        def element(i: int) -> list[Any]:
            pairs = zip(arguments, in_dims, strict=True)
            return [x if dim is None else x.select(dim, i) for x, dim in pairs]

        return torch.stack([op(*element(i), **options) for i in range(info.batch_size)]), 0

    torch.library.register_vmap(f"moe::{name}", rule)
