"""Schemes, and algorithms with the parts that they combine with, by name.

Imports no torch, so that the launcher can list them.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

Link = Literal["synchronous", "asynchronous"]


class Scheme(NamedTuple):
    """How many workers there are, and how they are synchronized (figure 5 of the paper)."""

    gradient_workers: int  # 0: one, in the process of the update worker
    collection_workers: int  # of each gradient worker; 0: one, in its process
    gradients: Link
    collection: Link
    # share of workers that finish their rollouts before the others are told to end theirs
    preemption_threshold: float = 1.0


SCHEMES: Mapping[str, Scheme] = {
    "single-threaded": Scheme(0, 0, "synchronous", "synchronous"),
    "dppo": Scheme(2, 0, "synchronous", "synchronous"),
    # of two workers; DD-PPO has 0.6, of many
    "ddppo": Scheme(2, 0, "synchronous", "synchronous", preemption_threshold=0.5),
    "appo": Scheme(2, 0, "asynchronous", "synchronous"),
    "impala": Scheme(0, 2, "synchronous", "asynchronous"),
    "ape-x": Scheme(0, 2, "synchronous", "asynchronous"),
    "rapid": Scheme(2, 2, "synchronous", "asynchronous"),
    "async-rapid": Scheme(2, 2, "asynchronous", "asynchronous"),
}


class Parts(NamedTuple):
    """The storages and actors that an algorithm combines with; the first of each is its default."""

    storages: tuple[str, ...]
    actors: tuple[str, ...]
    continuous: bool = False  # the kind of actions


_ON_POLICY = ("gae", "returns")
_REPLAY = ("replay", "per", "ere")
_OF_VALUES = ("epsilon-greedy", "ape-x", "noisy")
_CONTROL = (*_REPLAY, "her")

ALGORITHMS: Mapping[str, Parts] = {
    "ppo": Parts(_ON_POLICY, ("softmax",)),
    "impala": Parts(("v-trace",), ("softmax",)),
    "sac": Parts(_CONTROL, ("squashed-gaussian",), continuous=True),
    "a2c": Parts(_ON_POLICY[::-1], ("softmax",)),
    "dqn": Parts(_REPLAY, _OF_VALUES),
    "rainbow": Parts(("per", "replay", "ere"), ("noisy", "epsilon-greedy", "ape-x")),
    "r2d2": Parts(("per", "replay", "ere"), ("ape-x", "epsilon-greedy")),
    "ddpg": Parts(_CONTROL, ("gaussian",), continuous=True),
    "td3": Parts(_CONTROL, ("gaussian",), continuous=True),
    "mpo": Parts(_CONTROL, ("clipped-gaussian",), continuous=True),
    # its loss has no errors to set priorities by
    "mpc": Parts(("replay", "ere"), ("cem",), continuous=True),
}
AGENTS = tuple(ALGORITHMS)
REPLAY = (*_REPLAY, "her")
STORAGES = (*_ON_POLICY, "v-trace", *REPLAY)
ACTORS = ("softmax", *_OF_VALUES, "gaussian", "squashed-gaussian", "clipped-gaussian", "cem")

# What Ape-X has beside its workers, where the algorithm can take it.
APE_X_PARTS = {"storage": "per", "actor": "ape-x"}


def choose_part(
    agent: str, kind: Literal["storage", "actor"], given: str | None, scheme: str
) -> str:
    """Return the storage or actor of an agent.

    Args:
      agent: name of the algorithm.
      kind: of the part.
      given: name of the part, or None for the default.
      scheme: whose default comes before that of the algorithm.

    Raises:
      ValueError: with one line, if the algorithm cannot take the part.
    """
    parts = ALGORITHMS[agent]
    fitting = parts.storages if kind == "storage" else parts.actors
    if given is not None and given not in fitting:
        raise ValueError(f"--{kind} {given}: --agent {agent} takes {', '.join(fitting)}")
    of_scheme = APE_X_PARTS[kind] if scheme == "ape-x" else None
    return given or (of_scheme if of_scheme in fitting else fitting[0])
