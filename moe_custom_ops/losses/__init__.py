"""The load-balancing auxiliary losses, of all tokens and of each sequence."""

from .api import aux_loss, sequence_aux_loss
from .arguments import aux_loss_workspace_size, sequence_aux_loss_workspace_size

__all__ = [
    "aux_loss",
    "aux_loss_workspace_size",
    "sequence_aux_loss",
    "sequence_aux_loss_workspace_size",
]
