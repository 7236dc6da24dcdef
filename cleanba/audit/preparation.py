"""Prepares a program to repeat the updates of a record, which somebody else may have written."""

import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from cleanba.audit.segments import Mismatch, NotRepeatable
from cleanba.record import RecordError, Run
from cleanba.record.checkpoints import check_same
from cleanba.record.encoding import describe_error, jsonable
from cleanba.run.command_line import BadInput
from cleanba.run.options import RunOptions


class Size(msgspec.Struct):
    """Hyperparameters that decide how much memory and time an update takes, and their limits."""

    num_envs: Annotated[int, Meta(ge=1, le=4096)]
    num_steps: Annotated[int, Meta(ge=1, le=2**16)]
    sync_interval: Annotated[int, Meta(ge=1, le=2**16)] = 1
    update_epochs: Annotated[int, Meta(ge=1, le=1000)] = 1
    num_minibatches: Annotated[int, Meta(ge=1, le=2**16)] = 1
    gradient_accumulation_steps: Annotated[int, Meta(ge=1, le=2**16)] = 1
    xla_cpu_pool_size: Annotated[int, Meta(ge=1, le=1024)] = 1
    torch_threads: Annotated[int, Meta(ge=1, le=1024)] = 1
    channels: Annotated[list[Annotated[int, Meta(ge=1, le=512)]], Meta(max_length=3)] | None = None
    hiddens: Annotated[list[Annotated[int, Meta(ge=1, le=8192)]], Meta(max_length=8)] | None = None


def check_size(run: Run) -> None:
    """Refuse to repeat what would take too much memory or time.

    Raises:
      NotRepeatable: with one line.
    """
    try:
        size = msgspec.convert(run.info.hyperparameters, Size)
    except msgspec.ValidationError as error:
        raise NotRepeatable(f"hyperparameters: {describe_error(error)}") from None
    steps = size.num_envs * max(size.num_steps, size.sync_interval)
    if steps > 2**18:
        raise NotRepeatable(f"batches of {steps} steps are too large")


def platform_of(run: Run) -> Literal["cpu", "auto"]:
    """Return the platform on which jax repeats a run: the CPU, if that computed it."""
    return "cpu" if run.info.hardware.get("platform") == "cpu" else "auto"


def prepare_again(
    run: Run,
    args_class: Callable[..., Any],
    prepare: Callable[[Any], Any],
    pinned: Callable[[Any], Mapping[str, Mapping[str, Any]]],
    **fields: Any,
) -> Any:
    """Check a program's command line again, with the hyperparameters of a record.

    Args:
      run: the record.
      args_class: command line of its program; its field `run` is a `RunOptions`.
      prepare: checks it, and returns what a run begins with; its field `spec` is an `EnvSpec`.
      pinned: takes that, and returns what must be equal in the record, by the parts of `run.json`
        (`hyperparameters`, `versions`, `hardware`) and name.
      **fields: of the command line, such as `hardware`, in which the repetition may differ from the record.

    Returns:
      What `prepare` returned.

    Raises:
      NotRepeatable: with one line, if this machine or version cannot compute the record's bits.
      Mismatch: if the environment has another number of actions than the record.
    """
    info = run.info
    # Nothing is written there.
    folder = RunOptions(runs_dir=os.path.join(tempfile.gettempdir(), "cleanba-audit"))
    try:
        options = {**info.hyperparameters, "env_id": info.env_id, "seed": info.seed}
        args = msgspec.convert(options, args_class)
        setup = prepare(replace(args, run=folder, **fields))
    except msgspec.ValidationError as error:
        raise NotRepeatable(f"hyperparameters: {describe_error(error)}") from None
    except (BadInput, RecordError) as error:
        raise NotRepeatable(str(error)) from None
    if setup.spec.num_actions != info.num_actions:  # environments do not check actions
        raise Mismatch(f"run.json: {info.env_id} has {setup.spec.num_actions} actions")
    now = pinned(setup)
    then = {
        "hyperparameters": info.hyperparameters,
        "versions": info.versions,
        "hardware": {name: info.hardware.get(name) for name in now["hardware"]},
    }
    try:
        check_same(jsonable(then), now, "its training", "repeated")
    except RecordError as error:
        raise NotRepeatable(str(error)) from None
    return setup
