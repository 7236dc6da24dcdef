"""The agents and schemes of the paper, by name. Imports no torch, so that the launcher can list them."""

from collections.abc import Mapping
from typing import Literal, NamedTuple

AGENTS = ("ppo", "impala", "sac")

Link = Literal["synchronous", "asynchronous"]


class Scheme(NamedTuple):
    """How many workers there are, and how they are synchronised (figure 5 of the paper)."""

    gradient_workers: int  # 0: one, in the process of the update worker
    collection_workers: int  # of each gradient worker; 0: one, in its process
    gradients: Link
    collection: Link
    # share of workers that finish their rollouts before the others are told to end theirs
    preemption_threshold: float = 1.0
    priority_exponent: float = 0.0  # of a replay buffer


SCHEMES: Mapping[str, Scheme] = {
    "single-threaded": Scheme(0, 0, "synchronous", "synchronous"),
    "dppo": Scheme(2, 0, "synchronous", "synchronous"),
    # of two workers; DD-PPO has 0.6, of many
    "ddppo": Scheme(2, 0, "synchronous", "synchronous", preemption_threshold=0.5),
    "appo": Scheme(2, 0, "asynchronous", "synchronous"),
    "impala": Scheme(0, 2, "synchronous", "asynchronous"),
    "ape-x": Scheme(0, 2, "synchronous", "asynchronous", priority_exponent=0.6),
    "rapid": Scheme(2, 2, "synchronous", "asynchronous"),
    "async-rapid": Scheme(2, 2, "asynchronous", "asynchronous"),
}
