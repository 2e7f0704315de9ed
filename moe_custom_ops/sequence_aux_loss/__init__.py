"""The load-balancing auxiliary loss of each sequence, averaged over sequences."""

from .api import sequence_aux_loss
from .ops import sequence_aux_loss_workspace_size

__all__ = ["sequence_aux_loss", "sequence_aux_loss_workspace_size"]
