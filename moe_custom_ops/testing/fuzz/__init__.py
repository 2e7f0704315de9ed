"""Drawn calls of every op, valid and invalid, and what must hold of each.

What a printed call imports needs no hypothesis; what draws one does.
``python -m moe_custom_ops.testing.fuzz --examples 100000`` runs many.
"""

from . import tensors
from .calls import Call, Refusal
from .properties import Seen, check

__all__ = ["Call", "Refusal", "Seen", "check", "tensors"]
