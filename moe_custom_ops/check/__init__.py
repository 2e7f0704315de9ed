"""Whether a machine, or every rank of a cluster, gives the bits that this package promises.

``python -m moe_custom_ops.check``, also under ``torchrun``.
"""
