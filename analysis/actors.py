"""How many actors and learners share the work of an update, from a run's hyperparameters.

The record gives times per rollout and per update. To turn them into shares of an actor's or a
learner's time, one must know how many of them work in parallel. Systems express that through
different hyperparameters.
"""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class ActorsAndLearners(NamedTuple):
    """The parallelism of a run.

    Attributes:
      rollouts_per_actor: rollouts of one actor that an update uses, on average.
      learner_threads: threads or workers that compute updates in parallel.
    """

    rollouts_per_actor: float = 1.0
    learner_threads: float = 1.0


def _worker_schemes(options: Mapping[str, Any]) -> ActorsAndLearners:
    asynchronous_gradients = options.get("gradients") == "asynchronous"
    learners = max(options["gradient_workers"], 1) if asynchronous_gradients else 1
    collectors = max(options["collection_workers"], 1)
    used = 1 if options["collection"] == "asynchronous" else collectors
    return ActorsAndLearners(used / collectors / learners, float(learners))


def _monobeast(options: Mapping[str, Any]) -> ActorsAndLearners:
    rollouts = float(options["batch_size"]) / float(options["num_actors"])
    return ActorsAndLearners(rollouts, float(options.get("num_learner_threads", 1)))


# A hyperparameter that only this kind of system has -> how to read its parallelism.
KINDS: Mapping[str, Callable[[Mapping[str, Any]], ActorsAndLearners]] = {
    "collection_workers": _worker_schemes,
    "num_actors": _monobeast,
}


def actors_and_learners(hyperparameters: object) -> ActorsAndLearners:
    """Return the parallelism of a run; one rollout per actor and one learner if nothing is known."""
    if isinstance(hyperparameters, Mapping):
        for name, read in KINDS.items():
            if name in hyperparameters:
                with contextlib.suppress(KeyError, TypeError, ValueError):  # another system's
                    return read(hyperparameters)
    return ActorsAndLearners()
