"""Adapters for frameworks, one module each: import the one you want. None patches at import."""
