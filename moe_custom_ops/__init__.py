"""Deterministic PyTorch operators for the non-GEMM half of a mixture-of-experts layer."""

from .losses import (
    aux_loss,
    aux_loss_workspace_size,
    sequence_aux_loss,
    sequence_aux_loss_workspace_size,
)
from .permutation import (
    compose_permutations,
    expert_permutation,
    expert_permutation_from_counts,
    expert_permutation_from_map,
    expert_permutation_workspace_size,
    inverse_permutation,
)
from .rows import (
    permute,
    permute_with_scores,
    permute_workspace_size,
    restore,
    weighted_restore,
    weighted_restore_workspace_size,
)
from .workspace import make_workspace

__all__ = [
    "aux_loss",
    "aux_loss_workspace_size",
    "compose_permutations",
    "expert_permutation",
    "expert_permutation_from_counts",
    "expert_permutation_from_map",
    "expert_permutation_workspace_size",
    "inverse_permutation",
    "make_workspace",
    "permute",
    "permute_with_scores",
    "permute_workspace_size",
    "restore",
    "sequence_aux_loss",
    "sequence_aux_loss_workspace_size",
    "weighted_restore",
    "weighted_restore_workspace_size",
]
