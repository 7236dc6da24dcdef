"""The command line: `python -m baselines.moolib_atari --env Breakout-v5`."""

from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from baselines import run_log
from baselines.moolib_atari.experiment import CHECKPOINT
from baselines.moolib_atari.launch import (
    Broker,
    PeerFailed,
    find_torchrun,
    say_begun,
    train_under_torchrun,
)
from baselines.moolib_atari.options import (
    HARDWARE,
    NOT_HYPERPARAMETERS,
    Args,
    Plan,
    prepare,
)
from baselines.moolib_atari.recorder import Recorder
from baselines.run_log import RunLog
from cleanba.command_line import run_command_line
from cleanba.record import read_run


def begin_record(plan: Plan, resume: bool) -> tuple[RunLog, Recorder, float]:
    """Begin the record of a run, or go on with it from its checkpoint.

    Returns:
      The record, what fills it, and the seconds that the run had taken until the checkpoint.
    """
    args = plan.args
    resume_at = None
    if resume:
        resume_at = (1, 0, 0.0)
        if (plan.run.directory / CHECKPOINT).is_file():
            with np.load(plan.run.directory / CHECKPOINT, allow_pickle=False) as arrays:
                names = ("version", "steps", "wall_time")
                resume_at = tuple(arrays[name].item() for name in names)
    hyperparameters: dict[str, Any] = {
        name: value for name, value in asdict(args).items() if name not in NOT_HYPERPARAMETERS
    }
    hyperparameters["network"] = plan.network
    use_cuda = not args.disable_cuda and torch.cuda.is_available()
    hardware = {name: getattr(args, name) for name in HARDWARE}
    hardware |= run_log.describe_device(torch.device("cuda" if use_cuda else "cpu"))
    log = RunLog(
        plan.run,
        hyperparameters,
        hardware,
        total_steps=args.total_steps,
        overwrite=args.overwrite and not resume,
        progress=args.progress,
        resume_at=resume_at,
    )
    if resume_at is None:
        return log, Recorder(log), 0.0
    last_rollouts: dict[int, int] = {}
    for row in read_run(plan.run.directory).lines("rollouts"):
        last_rollouts[row["actor"]] = max(row["rollout"], last_rollouts.get(row["actor"], 0))
    return log, Recorder(log, *resume_at[:2], last_rollouts), resume_at[2]


def main(args: Args) -> None:
    """Check the options, train, and record it."""
    torchrun = find_torchrun()
    plan = prepare(args, torchrun)
    if torchrun is not None and torchrun.rank > 0:
        train_under_torchrun(plan, torchrun)
        return
    if torchrun is not None and not torchrun.resumes:
        say_begun(torchrun)
    resumes = torchrun is not None and torchrun.resumes
    log, recorder, seconds_before = begin_record(plan, resumes)
    error: BaseException | None = None
    broker = None
    try:
        if torchrun is not None:
            train_under_torchrun(plan, torchrun, recorder, seconds_before)
        else:
            broker = Broker(plan.args, plan.spec, plan.network, plan.run.directory, recorder)
            broker.run()
        if recorder.steps < plan.args.total_steps:
            raise PeerFailed("the last peers have ended before they told what they learned")
    except BaseException as caught:
        error = caught
        raise
    finally:
        if broker is not None:
            broker.end()
        log.close(error)
    print(f"completed: {plan.run.directory}")


if __name__ == "__main__":
    run_command_line(Args, main, "IMPALA as moolib's Atari example builds it, instrumented.")
