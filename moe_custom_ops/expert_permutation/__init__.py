"""The order in which experts take the tokens' assignments."""

from .api import expert_permutation
from .ops import expert_permutation_workspace_size

__all__ = ["expert_permutation", "expert_permutation_workspace_size"]
