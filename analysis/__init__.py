"""Statistics of runs: scores, intervals, learning curves, policy lag, reproducibility.

Importers fill `analysis.tables.Tables`; everything else is small functions on those tables and on
arrays. Nothing here imports a trainer. The command is `python -m analysis`.
"""
