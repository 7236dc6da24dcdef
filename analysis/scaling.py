"""A model of the speed of a layout, fitted to the times that Cleanba's README publishes.

The model of one iteration (one batch of rollouts) of the Cleanba architecture: every process handles
its share of the environments, and gradients are split over its learner devices. An actor device that
is also a learner device computes its inference between gradients. Concurrent actors and learners take
as long as the slower of them. A fixed time is lost in every
iteration (queues, copies). With several processes, gradients are exchanged between them.
"""

from typing import NamedTuple

import pandas as pd

from cleanba.record.layout import Layout


class PublishedTime(NamedTuple):
    """The published duration of a run."""

    hardware: str
    layout: str | None  # None where the README does not name it
    minutes: float


# Minutes of a run in Breakout-v5: Cleanba's README, section "Reproduction of all of our results" (an
# earlier version of its code).
README_RUN_TIMES = (
    PublishedTime("8 A100 (baseline)", None, 30.4671),
    PublishedTime("1 A100", "a0-l0-d1", 154.079),
    PublishedTime("2 A100", "a0-l0-d2", 93.3155),
    PublishedTime("2 A100", "a0-l1-d1", 121.107),
    PublishedTime("2 A100", "a0-l0,1-d1", 101.63),
    PublishedTime("3 A100", "a0-l1,2-d1", 70.2993),
    PublishedTime("4 A100", "a0-l1,2,3-d1", 52.5321),
    PublishedTime("4 A100", "a0-l0-d4", 58.4344),
    PublishedTime("5 A100", "a0-l1,2,3,4-d1", 44.8671),
    PublishedTime("7 A100", "a0-l1,2,3,4,5,6-d1", 38.4216),
    PublishedTime("7 TPUv3-8 cores", "a0-l1,2,3,4,5,6-d1", 124.397),
    PublishedTime("6 TPUv4 cores", "a0-l1,2-d1", 44.4206),
    PublishedTime("4 TPUv4 cores", "a0-l1-d1", 54.6161),
    PublishedTime("8 TPUv4 cores", "a0-l1-d2", 33.1134),
)
README_A100 = {
    row.layout: row.minutes for row in README_RUN_TIMES if row.layout and "A100" in row.hardware
}


class Times(NamedTuple):
    """Times of one iteration, all in one unit, for one process with all environments.

    Attributes:
      rollout: from the first to the last step of a rollout on one actor device.
      inference: the part of it that the device computes, which delays a learner on the same device.
      gradient: all gradients of an iteration on one learner device.
      fixed: lost in every iteration (queues, copies); divided by the number of processes, as the data are.
      transfer: exchange of gradients between processes, if there are two or more.
    """

    rollout: float
    inference: float
    gradient: float
    fixed: float = 0.0
    transfer: float = 0.0


def iteration_time(times: Times, layout: Layout) -> float:
    """Return the time of one iteration, in the unit of `times`.

    Args:
      times: of one iteration.
      layout: the layout to predict.
    """
    shared = set(layout.actors) & set(layout.learners)
    rollout = times.rollout / len(layout.actors)
    learning = times.gradient / len(layout.learners)
    if shared:
        learning += times.inference / len(layout.actors)
    busy = max(rollout, learning)
    transfer = times.transfer if layout.processes > 1 else 0.0
    return (times.fixed + busy) / layout.processes + transfer


def calibrate_readme() -> Times:
    """Fit the model to four of the README's layouts, in minutes per run.

    An additional learner device identifies the gradient time, a shared device the inference time, a second
    process the transfer time. The rollout is never the slower part in these four and is set to 0. The times
    of the other layouts are then predictions.
    """
    one, two = README_A100["a0-l1-d1"], README_A100["a0-l1,2-d1"]
    gradient = 2 * (one - two)
    fixed = one - gradient
    inference = README_A100["a0-l0,1-d1"] - gradient / 2 - fixed
    transfer = README_A100["a0-l0-d2"] - (fixed + gradient + inference) / 2
    return Times(0.0, inference, gradient, fixed, transfer)


def compare_readme() -> pd.DataFrame:
    """Return layout, published and predicted minutes, error (a share), and what was calibrated on."""
    times = calibrate_readme()
    used = ("a0-l1-d1", "a0-l1,2-d1", "a0-l0,1-d1", "a0-l0-d2")
    rows = []
    for name, published in README_A100.items():
        predicted = iteration_time(times, Layout.parse(name))
        rows.append((name, published, predicted, predicted / published - 1, name in used))
    return pd.DataFrame(
        rows, columns=["layout", "published", "predicted", "error", "calibrated_on"]
    )
