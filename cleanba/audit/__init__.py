"""Checks of the guarantee (certify) and of finished records (replay)."""
