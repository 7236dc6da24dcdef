"""Statistics of runs: scores, intervals, learning curves, policy lag, reproducibility.

Importers fill `analysis.tables.Tables`; everything else is small functions on those tables and on
arrays. Nothing here imports a trainer. The command is `python -m analysis`, and the functions for notebooks
are those below, one per result (see `analysis.notebook`).
"""

from analysis.notebook import (
    aggregate,
    by_environment,
    compare,
    curves,
    load,
    probability_of_improvement,
    profiles,
    sample_efficiency,
)
from analysis.tables import InputError

__all__ = [
    "InputError",
    "aggregate",
    "by_environment",
    "compare",
    "curves",
    "load",
    "probability_of_improvement",
    "profiles",
    "sample_efficiency",
]
