"""Deterministic PyTorch operators for the non-GEMM half of a mixture-of-experts layer."""

from .aux_loss import aux_loss, aux_loss_workspace_size
from .expert_permutation import (
    compose_permutations,
    expert_permutation,
    expert_permutation_from_counts,
    expert_permutation_from_map,
    expert_permutation_workspace_size,
)
from .sequence_aux_loss import sequence_aux_loss, sequence_aux_loss_workspace_size
from .weighted_restore import (
    inverse_permutation,
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
