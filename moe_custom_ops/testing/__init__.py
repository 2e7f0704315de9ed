"""Input makers, bit comparison and error budgets for tests. Never imported at run time."""

from .compare import assert_close_in_norm, assert_same_bits, assert_within, canonical_bits
from .inputs import make_assignments, make_probs, permutation_of

__all__ = [
    "assert_close_in_norm",
    "assert_same_bits",
    "assert_within",
    "canonical_bits",
    "make_assignments",
    "make_probs",
    "permutation_of",
]
