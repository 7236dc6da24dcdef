"""Cleanba: distributed PPO and IMPALA whose results do not depend on the hardware.

Importing this package imports nothing heavy: `cleanba.record` is read by tools without jax.
"""

# In every record. Only the same version resumes a run, because another may compute other bits.
__version__ = "0.3.0.dev0"
