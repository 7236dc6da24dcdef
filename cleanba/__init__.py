"""Cleanba: distributed PPO and IMPALA whose results do not depend on the hardware.

Importing this package imports nothing heavy: `cleanba.record` is read by tools without jax.
"""
