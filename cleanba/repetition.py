"""Repeats the updates of a recorded run of a Cleanba trainer, one at a time, for an audit.

It uses one device and no actor threads, and computes the same bits as every layout.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from cleanba.actor_learner import collect
from cleanba.audit.preparation import platform_of, prepare_again
from cleanba.audit.segments import Repeated, Replayed
from cleanba.environments import Episode
from cleanba.exact.placement import Hardware
from cleanba.preparation import Setup, pinned
from cleanba.record import Run, fingerprint
from cleanba.record.actions import combine_digests
from cleanba.training import Trainer, from_arrays, make_group, to_arrays


class Repetition:
    """The training of a recorded run, from its beginning; see `audit.segments.Repetition`."""

    def __init__(self, setup: Setup, trainer: Trainer):
        """Make the environments.

        Args:
          setup: of the run.
          trainer: compiled for it.
        """
        self._setup, self._trainer = setup, trainer
        groups, device = range(setup.placement.num_groups), trainer.exchange.lead
        self._groups = [make_group(setup, trainer.act, group, device) for group in groups]
        self._state = trainer.state
        # The optimizer reuses the memory of its state.
        self._shapes = jax.eval_shape(lambda: trainer.state)
        self._acting = trainer.state.params  # parameters that collect the next rollout
        self._number = 0  # updates replayed or made

    def replay(self, actions: np.ndarray) -> Replayed:
        """Step the environments through recorded actions [T, N]."""
        self._number += 1
        parts = np.split(actions, len(self._groups), axis=1)
        replayed = [
            group.replay(np.ascontiguousarray(part))
            for group, part in zip(self._groups, parts, strict=True)
        ]
        return Replayed(
            actions,
            combine_digests(digest for digest, _ in replayed),
            self._merge([episodes for _, episodes in replayed]),
        )

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Take the learner's state from a checkpoint after the updates so far."""
        state, acting = from_arrays(arrays, self._shapes, self._setup.args.concurrency)
        self._state, self._acting = jax.device_put((state, acting), self._trainer.exchange.lead)

    def update(self) -> Repeated:
        """Collect a rollout, and learn from it."""
        self._number += 1
        collect(self._groups, self._setup.args.num_steps, self._acting)
        exchange = self._trainer.exchange
        finished = [group.finish_rollout(exchange.device_of(group.index)) for group in self._groups]
        data = {group.index: part[0] for group, part in zip(self._groups, finished, strict=True)}
        before = self._state.params
        self._state, metrics = self._trainer.update(self._state, data, self._number)
        self._acting = before if self._setup.args.concurrency else self._state.params
        traces = [trace for _, trace, _ in finished]
        replayed = Replayed(
            np.concatenate([trace.actions for trace in traces], axis=1),
            combine_digests(trace.digest for trace in traces),
            self._merge([episodes for _, _, episodes in finished]),
        )
        return Repeated(replayed, {name: float(x) for name, x in jax.device_get(metrics).items()})

    def fingerprint(self) -> str:
        """Return the fingerprint of the parameters."""
        return fingerprint(self._state.params)

    def arrays(self) -> dict[str, np.ndarray]:
        """Return what a checkpoint after the last update holds."""
        previous = self._acting if self._setup.args.concurrency else None
        return to_arrays(self._state, previous)

    def close(self) -> None:
        """Free the environments."""
        for group in self._groups:
            group.close()

    def _merge(self, groups: list[list[Episode]]) -> list[Episode]:
        size = self._setup.group_size
        episodes = [
            e._replace(index=g * size + e.index) for g, ended in enumerate(groups) for e in ended
        ]
        return sorted(episodes, key=lambda e: (e.t, e.index))


def repetition_of(
    run: Run,
    args_class: Callable[..., Any],
    prepare: Callable[[Any], Setup],
    make_trainer: Callable[[Setup], Trainer],
) -> Repetition:
    """Prepare to repeat the updates of a record; see `prepare_again`.

    Args:
      run: the record.
      args_class: command line of its trainer.
      prepare: checks a command line, and returns the setup of a run.
      make_trainer: compiles the trainer for a setup.
    """
    pool = run.info.hyperparameters.get("xla_cpu_pool_size")  # without portable arithmetic
    setup = prepare_again(
        run,
        args_class,
        prepare,
        lambda setup: pinned(setup.hyperparameters, setup.placement),
        hardware=Hardware(num_actor_threads=1, xla_cpu_pool_size=pool, platform=platform_of(run)),
    )
    return Repetition(setup, make_trainer(setup))
