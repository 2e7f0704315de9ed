"""The fused restore, weighted or not: expert-major rows straight to token order."""

from .api import restore, weighted_restore
from .ops import weighted_restore_workspace_size

__all__ = ["restore", "weighted_restore", "weighted_restore_workspace_size"]
