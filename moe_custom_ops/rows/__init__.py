"""The copies of rows into the order of the experts, and the sums back."""

from .api import permute, permute_with_scores, restore, weighted_restore
from .arguments import permute_workspace_size, weighted_restore_workspace_size

__all__ = [
    "permute",
    "permute_with_scores",
    "permute_workspace_size",
    "restore",
    "weighted_restore",
    "weighted_restore_workspace_size",
]
