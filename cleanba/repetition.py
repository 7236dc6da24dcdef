"""Makes the updates of a recorded run of a Cleanba trainer again, one at a time, for an audit.

On one device and without threads, which compute the same bits as any layout.
"""

import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import msgspec
import numpy as np

from cleanba.actor_learner import collect
from cleanba.audit.segments import Mismatch, NotRepeatable, Repeated, Replayed, check_size
from cleanba.environments import Episode
from cleanba.exact.placement import Hardware
from cleanba.preparation import Setup, pinned
from cleanba.record import RecordError, Run, fingerprint
from cleanba.record.actions import combine_digests
from cleanba.record.checkpoints import check_same
from cleanba.record.encoding import describe_error, jsonable
from cleanba.run.command_line import BadInput
from cleanba.run.options import RunOptions
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
        # The optimiser reuses the memory of its state.
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
    """Prepare to make the updates of a record again.

    Args:
      run: the record; somebody else may have written it.
      args_class: command line of its trainer.
      prepare: checks it.
      make_trainer: compiles it.

    Raises:
      NotRepeatable: with one line, if this machine or version cannot compute its bits.
      Mismatch: if the environment has another number of actions than the record.
    """
    options = dict(run.info.hyperparameters)
    check_size(run)
    hardware = Hardware(
        num_actor_threads=1, xla_cpu_pool_size=options.pop("xla_cpu_pool_size", None)
    )
    # Nothing is written there.
    folder = RunOptions(runs_dir=os.path.join(tempfile.gettempdir(), "cleanba-audit"))
    try:
        args = msgspec.convert(options, args_class)
        setup = prepare(replace(args, hardware=hardware, run=folder))
    except msgspec.ValidationError as error:
        raise NotRepeatable(f"hyperparameters: {describe_error(error)}") from None
    except (BadInput, RecordError) as error:
        raise NotRepeatable(str(error)) from None
    if setup.spec.num_actions != run.info.num_actions:  # environments do not check actions
        raise Mismatch(f"run.json: {run.info.env_id} has {setup.spec.num_actions} actions")
    now = pinned(setup.hyperparameters, setup.placement)
    then = {
        "hyperparameters": run.info.hyperparameters,
        "versions": run.info.versions,
        "hardware": {name: run.info.hardware.get(name) for name in now["hardware"]},
    }
    try:
        check_same(jsonable(then), now, "its training")
    except RecordError as error:
        raise NotRepeatable(str(error).replace("resumed", "repeated")) from None
    return Repetition(setup, make_trainer(setup))
