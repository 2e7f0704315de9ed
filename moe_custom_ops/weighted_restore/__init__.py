"""The fused weighted restore: expert-major rows straight to token order."""

from .api import weighted_restore
from .ops import weighted_restore_workspace_size

__all__ = ["weighted_restore", "weighted_restore_workspace_size"]
