"""Modules over the ops, and what training recipes need around them."""

from .attach import attach_loss
from .modules import AuxLoss, WeightedRestore
from .moe import MoE
from .router import Router

__all__ = ["AuxLoss", "MoE", "Router", "WeightedRestore", "attach_loss"]
