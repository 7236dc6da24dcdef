"""How CleanRL and Cleanba name their runs, their settings and their scalars."""

import re
from collections.abc import Mapping
from typing import Any

from analysis.tables import UNKNOWN, InputError, RunKey
from cleanba.record.layout import Layout

# The curve is the first of these that a run has. Cleanba logs the mean of the last returns of all
# environments of an actor thread; CleanRL logs every episode, apart from its programs on EnvPool's XLA
# interface, which log a mean, too.
RETURNS = ("charts/episodic_return", "charts/avg_episodic_return")
LENGTHS = ("charts/episodic_length", "charts/avg_episodic_length")


def run_key(path: str, name: str, config: Mapping[str, Any]) -> RunKey:
    """Identify a run by its hyperparameters, or else by its name `<env>__<exp>__<seed>__<id>`.

    Args:
      path: file or folder of the run, for error messages and the key.
      name: name of the run.
      config: its hyperparameters; values may be text.
    """
    parts = name.split("__")
    named = parts if len(parts) >= 3 else [UNKNOWN, name or UNKNOWN, "0"]
    seed = str(config.get("seed", named[2]))
    if not seed.isdigit() or len(seed) > 15:
        raise InputError(f"{path}: the seed is no whole number from 0: {seed[:40]!r}")
    return RunKey(
        path,
        str(config.get("exp_name", named[1])),
        setting_name(config),
        str(config.get("env_id", named[0])),
        int(seed),
    )


def setting_name(config: Mapping[str, Any]) -> str:
    """Return the name of a Cleanba run's layout, such as `a0-l1,2-d2-t2`; UNKNOWN if it has none."""

    def numbers(name: str) -> tuple[int, ...]:  # values may be text: "[0, 1]", "2", "None"
        return tuple(map(int, re.findall(r"\d+", str(config.get(name)))))

    (processes, *_), (threads, *_) = (
        numbers("world_size") or (1,),
        numbers("num_actor_threads") or (1,),
    )
    try:
        actors, learners = numbers("actor_device_ids"), numbers("learner_device_ids")
        return Layout(actors, learners, processes, threads).name
    except ValueError:
        return UNKNOWN


def expected_steps(config: Mapping[str, Any]) -> float:
    """Return the planned agent steps of the run; NaN if its hyperparameters do not give them."""
    try:
        return float(config["total_timesteps"]) - float(config.get("batch_size", 0))
    except (KeyError, TypeError, ValueError):
        return float("nan")
