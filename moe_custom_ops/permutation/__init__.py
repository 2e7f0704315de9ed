"""The order in which experts take the tokens' assignments, and its inverse."""

from .api import (
    compose_permutations,
    expert_permutation,
    expert_permutation_from_counts,
    expert_permutation_from_map,
    inverse_permutation,
)
from .arguments import expert_permutation_workspace_size

__all__ = [
    "compose_permutations",
    "expert_permutation",
    "expert_permutation_from_counts",
    "expert_permutation_from_map",
    "expert_permutation_workspace_size",
    "inverse_permutation",
]
