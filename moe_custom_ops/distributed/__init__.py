"""The losses of tokens that are spread over ranks, with the bits of one rank."""

from .agreement import check_agreement
from .losses import aux_loss, running_aux_loss, sequence_aux_loss, tile_tokens

__all__ = [
    "aux_loss",
    "check_agreement",
    "running_aux_loss",
    "sequence_aux_loss",
    "tile_tokens",
]
