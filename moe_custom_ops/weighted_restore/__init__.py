"""The fused restore, weighted or not, and permute, its adjoint."""

from . import ops  # noqa: F401  registers them
from .api import (
    inverse_permutation,
    permute,
    permute_with_scores,
    restore,
    weighted_restore,
)
from .arguments import permute_workspace_size, weighted_restore_workspace_size

__all__ = [
    "inverse_permutation",
    "permute",
    "permute_with_scores",
    "permute_workspace_size",
    "restore",
    "weighted_restore",
    "weighted_restore_workspace_size",
]
