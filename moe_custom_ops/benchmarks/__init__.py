"""Measurements on a GPU: ``python -m moe_custom_ops.benchmarks``."""
