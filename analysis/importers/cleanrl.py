"""How CleanRL and Cleanba name their runs, their settings and their scalars."""

from collections.abc import Mapping
from typing import Any

from analysis.tables import UNKNOWN, InputError, RunKey

# The first that a run has is its curve. Cleanba logs the average of the last return of every
# environment of an actor thread; CleanRL logs every episode.
RETURNS = ("charts/episodic_return", "charts/avg_episodic_return")
LENGTHS = ("charts/episodic_length", "charts/avg_episodic_length")


def run_key(path: str, name: str, config: Mapping[str, Any]) -> RunKey:
    """Identify a run by its hyperparameters, or else by its name `<env>__<exp>__<seed>__<id>`.

    Args:
      path: where the run was read.
      name: of the run.
      config: its hyperparameters; values may be text.
    """
    parts = name.split("__")
    named = parts if len(parts) >= 3 else [UNKNOWN, name or UNKNOWN, "0"]
    seed = str(config.get("seed", named[2]))
    if not seed.lstrip("-").isdigit() or len(seed) > 15:
        raise InputError(f"{path}: the seed is not an integer: {seed[:40]!r}")
    return RunKey(
        path,
        str(config.get("exp_name", named[1])),
        setting_name(config),
        str(config.get("env_id", named[0])),
        int(seed),
    )


def setting_name(config: Mapping[str, Any]) -> str:
    """Name a hardware setting as Cleanba does, with the actor threads: `a0-l1,2-t2-d2`."""

    def ids(value: Any) -> str:
        return str(value).strip("[]()").replace(" ", "")

    if "actor_device_ids" not in config:
        return UNKNOWN
    name = f"a{ids(config['actor_device_ids'])}-l{ids(config.get('learner_device_ids', '?'))}"
    name += f"-t{config.get('num_actor_threads', 1)}"
    world = str(config.get("world_size", 1))
    return name if world in ("1", "None") else f"{name}-d{world}"


def expected_steps(config: Mapping[str, Any]) -> float:
    """Return how many agent steps the run was to take; NaN if its hyperparameters do not say."""
    try:
        return float(config["total_timesteps"]) - float(config.get("batch_size", 0))
    except (KeyError, TypeError, ValueError):
        return float("nan")
