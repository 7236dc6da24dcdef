"""A model of the speed of a layout, fitted to the times that Cleanba's README and paper published.

The model of one iteration (one batch of rollouts) of the Cleanba architecture: every process handles
its share of the environments, and gradients are split over its learner devices. An actor device that
is also a learner device computes its inference between gradients. Concurrent actors and learners take
as long as the slower of them; without concurrency they take turns. A fixed time is lost in every
iteration (queues, copies). With several processes, gradients are exchanged between them.
"""

from typing import NamedTuple

import numpy as np
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
# Cleanba paper (arXiv 2310.00036), appendix F: steps per second on 128 A100s, and efficiency of
# scaling from 16 to 128 of them with the batch growing in proportion.
PAPER_SPS_128, PAPER_EFFICIENCY = 403_253.0, 0.93


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


def iteration_time(times: Times, layout: Layout, concurrent: bool = True) -> float:
    """Return the time of one iteration, in the unit of `times`.

    Args:
      times: of one iteration.
      layout: the layout to predict.
      concurrent: whether actors and learner work at the same time (the Cleanba architecture).
    """
    shared = set(layout.actors) & set(layout.learners)
    rollout = times.rollout / len(layout.actors)
    learning = times.gradient / len(layout.learners)
    if concurrent and shared:
        learning += times.inference / len(layout.actors)
    busy = max(rollout, learning) if concurrent else rollout + learning
    transfer = times.transfer if layout.processes > 1 else 0.0
    return (times.fixed + busy) / layout.processes + transfer


def weak_scaling(work: float, latency: float, devices: np.ndarray) -> np.ndarray:
    """Return the efficiency of scaling with a batch in proportion to the devices.

    The work per device is constant; a ring all-reduce among p devices adds the latency of 2 (p - 1) messages.

    Args:
      work: time that one device computes per iteration.
      latency: of one message, times the gradients per iteration, in the unit of `work`.
      devices: numbers of devices, `[D]`.

    Returns:
      `[D]`: SPS per device over that of a single one.
    """
    return work / (work + 2 * (np.asarray(devices) - 1) * latency)


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


def compare_paper() -> pd.DataFrame:
    """Return devices, SPS and efficiency relative to 16 devices, according to the model.

    The paper prints two numbers: the SPS at 128 devices and the efficiency from 16 to 128. They determine
    the model's two parameters, so the rows for 32 and 64 are predictions, and nothing tests the model.
    """
    devices = np.array([16, 32, 64, 128])
    # efficiency(128) / efficiency(16) = 0.93 solves for latency / work
    latency = (1 - PAPER_EFFICIENCY) / (2 * (PAPER_EFFICIENCY * 127 - 15))
    efficiency = weak_scaling(1.0, latency, devices)
    speed = efficiency * devices
    speed *= PAPER_SPS_128 / speed[-1]
    return pd.DataFrame(
        {"devices": devices, "sps": speed, "efficiency": efficiency / efficiency[0]}
    )
