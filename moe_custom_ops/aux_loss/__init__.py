"""The load-balancing auxiliary loss."""

from .api import aux_loss
from .ops import aux_loss_workspace_size

__all__ = ["aux_loss", "aux_loss_workspace_size"]
