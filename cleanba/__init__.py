"""Cleanba: distributed PPO and IMPALA whose results do not depend on the hardware.

Importing this package imports nothing heavy: `cleanba.record` is read by tools without jax.
"""

# Stored in every record. Only the same version can resume a run: another may compute different bits.
__version__ = "0.3.0.dev0"
