"""Run time and latency of actors and learners in HTS-RL's claims, by formula and by simulation.

Source: Liu et al., "High-throughput synchronous deep RL" (arXiv 2012.09849), section 4.2 (claims 1
and 2), appendices A and B.
"""

import numpy as np
from scipy.special import gammaincinv


def expected_run_time(
    states: int, environments: int, interval: int, shape: float, rate: float, actor_time: float
) -> float:
    """Return the expected time to collect states, by claim 1 (extreme value theory).

    n environments synchronize every a steps, so K states need K / (n a) rounds. A round waits for
    the slowest environment: the largest of n sums of a step times, which are Gamma(a x shape,
    rate). The largest of n has the mean F^-1(1 - 1/n) + gamma (F^-1(1 - 1/(n e)) - F^-1(1 - 1/n))
    of its Gumbel limit, gamma being the Euler-Mascheroni constant. Actors add a x c per round.

    Args:
      states: K.
      environments: n, at least 2.
      interval: a, steps between synchronizations.
      shape: of the Gamma distribution of one step's time; 1 is exponential.
      rate: of the same, 1/s; mean step time is shape / rate.
      actor_time: c, seconds per step.

    Returns:
      Seconds.
    """
    if environments < 2:
        raise ValueError("the formula needs at least two environments")
    # quantiles of the sum of `interval` step times
    location = gammaincinv(interval * shape, 1 - 1 / environments) / rate
    scale = gammaincinv(interval * shape, 1 - 1 / (environments * np.e)) / rate - location
    rounds = states / (environments * interval)
    return float(rounds * (location + np.euler_gamma * scale + interval * actor_time))


def simulated_run_time(
    states: int,
    environments: int,
    interval: int,
    shape: float,
    rate: float,
    actor_time: float,
    rng: np.random.Generator,
) -> float:
    """Return the time that one simulated collection took; arguments as for `expected_run_time`."""
    rounds = max(round(states / (environments * interval)), 1)
    times = rng.gamma(shape * interval, 1 / rate, size=(rounds, environments))
    scale = states / (environments * interval) / rounds
    return float(scale * np.sum(times.max(axis=1) + interval * actor_time))


def expected_latency(actors: int, actor_rate: float, learner_rate: float) -> float:
    """Return the expected policy latency of an asynchronous system, by claim 2 (M/M/1 queue).

    Args:
      actors: number of actors.
      actor_rate: data per second of each, Poisson.
      learner_rate: data per second that the learner takes, exponential.

    Returns:
      rho / (1 - rho) with the utilization rho = actors x actor_rate / learner_rate; infinite from
      rho = 1 on.
    """
    utilization = actors * actor_rate / learner_rate
    return utilization / (1 - utilization) if utilization < 1 else float("inf")


def simulated_latency(
    actors: int,
    actor_rate: float,
    learner_rate: float,
    rng: np.random.Generator,
    arrivals: int = 200_000,
) -> float:
    """Return the mean length of the data queue that a simulated arrival finds (excluding itself).

    By PASTA this is the time average of the queue, in service included: the number of updates
    between the data's production and its use.

    Args:
      actors: number of actors.
      actor_rate: data per second of each.
      learner_rate: data per second that the learner takes.
      rng: the generator to draw from.
      arrivals: number of simulated arrivals; the first tenth is excluded.
    """
    arrive = np.cumsum(rng.exponential(1 / (actors * actor_rate), arrivals))
    serve = rng.exponential(1 / learner_rate, arrivals)
    # Departure of i is max(arrival of i, departure of i - 1) + service of i, which unrolls to a
    # running maximum of arrival minus the service time of all earlier ones.
    total = np.cumsum(serve)
    depart = np.maximum.accumulate(arrive - (total - serve)) + total
    waiting = np.arange(arrivals) - np.searchsorted(depart, arrive, side="right")
    return float(waiting[arrivals // 10 :].mean())


def figure_4a() -> list[dict[str, float]]:
    """Return run time against the variance of the step time.

    As figure 4(a): exponential steps of rate beta have variance 1 / beta^2.
    """
    rng = np.random.default_rng(0)
    rows = []
    for variance in np.linspace(0.5, 8, 16):
        given = (10_000, 16, 4, 1.0, 1 / np.sqrt(variance), 0.0)
        rows.append(
            {
                "variance": float(variance),
                "formula": expected_run_time(*given),
                "simulated": simulated_run_time(*given, rng),
            }
        )
    return rows


def figure_4b() -> list[dict[str, float]]:
    """Return run time against the synchronization interval, as figure 4(b)."""
    rng = np.random.default_rng(0)
    rows = []
    for interval in (1, 2, 4, 8, 16, 32, 64, 128):
        given = (10_000, 16, interval, 1.0, 2.0, 0.0)
        rows.append(
            {
                "interval": float(interval),
                "formula": expected_run_time(*given),
                "simulated": simulated_run_time(*given, rng),
            }
        )
    return rows


def figure_4c() -> list[dict[str, float]]:
    """Return latency against the number of actors, as figure 4(c).

    The available text of the paper does not give its two rates. These replace them: a learner that
    keeps up with 40 actors, which gives a curve of the same shape.
    """
    actor_rate, learner_rate = 100.0, 4000.0
    rng = np.random.default_rng(0)
    return [
        {
            "actors": float(n),
            "formula": expected_latency(n, actor_rate, learner_rate),
            "simulated": simulated_latency(n, actor_rate, learner_rate, rng),
        }
        for n in (1, 4, 8, 16, 24, 32, 36, 38)
    ]
