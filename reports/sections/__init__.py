"""The sections of a study's page: each computes its table, draws its figure and explains them.

A section function takes a `StudyRuns` and returns a `Section`, or None where the records have no data
for it.
"""

from collections.abc import Callable

from reports.page import Section
from reports.sections import comparison, data, execution, learning
from reports.study import StudyRuns

# In the order of the page.
SECTIONS: tuple[Callable[[StudyRuns], Section | None], ...] = (
    learning.aggregates,
    learning.profiles,
    learning.improvements,
    learning.efficiency,
    comparison.summary,
    data.settings,
    comparison.bits,
    comparison.pairs,
    comparison.systems,
    comparison.by_environment,
    learning.targets,
    learning.curves_steps,
    learning.curves_time,
    learning.scores,
    data.videos,
    execution.speeds,
    execution.run_times,
    execution.scaling,
    execution.speedups,
    execution.time,
    execution.lag,
    execution.changes,
    execution.value_loss,
    data.quality,
    data.runs,
)
