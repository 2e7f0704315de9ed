"""Drawn calls of every op, valid and invalid, and what must hold of each.

``strategies``, ``mutations`` and ``running`` need hypothesis; what a printed call imports does not.
``python -m moe_custom_ops.testing.fuzz --examples 100000`` runs many.
"""

from . import tensors
from .calls import Call, Refusal
from .properties import Seen, check

__all__ = ["Call", "Refusal", "Seen", "check", "tensors"]
