"""The command line: `python -m baselines.moolib_atari --env Breakout-v5`."""

from dataclasses import asdict

import torch

from baselines.moolib_atari.experiment import CHECKPOINT
from baselines.moolib_atari.launch import (
    Broker,
    PeerFailed,
    announce_begun,
    find_torchrun,
    train_under_torchrun,
)
from baselines.moolib_atari.options import Args, Plan, prepare
from baselines.moolib_atari.recorder import Recorder, sizes_at
from baselines.torch_io import PACKAGES, describe_device
from cleanba.record import read_run
from cleanba.record.files import read_arrays
from cleanba.run.arguments import hyperparameters
from cleanba.run.command_line import run_command_line
from cleanba.run.log import ResumePoint, RunLog, run_info


def begin_record(plan: Plan, resume: bool) -> tuple[RunLog, Recorder, float]:
    """Begin the record of a run, or resume it from its checkpoint.

    Returns:
      The log, the recorder that writes to it, and the run's seconds at the checkpoint.
    """
    args, directory = plan.args, plan.run.directory
    version, steps, seconds = 1, 0, 0.0
    resume = resume and (directory / "run.json").is_file()
    if resume and (directory / CHECKPOINT).is_file():
        arrays = read_arrays(directory / CHECKPOINT)
        version, steps, seconds = (
            arrays[name].item() for name in ("version", "steps", "wall_time")
        )
    use_cuda = not args.hardware.disable_cuda and torch.cuda.is_available()
    device = torch.device("cuda" if use_cuda else "cpu")
    info = run_info(
        plan.run,
        program="moolib_atari",
        hyperparameters=hyperparameters(args) | {"network": plan.network},
        hardware=asdict(args.hardware) | describe_device(device),
        packages=PACKAGES,
    )
    point = None
    if resume:
        point = ResumePoint(sizes_at(directory, version, steps, seconds), steps)
    log = RunLog(
        plan.run,
        info,
        total_steps=args.total_steps,
        overwrite=args.run.overwrite,
        progress="lines" if args.run.progress else None,
        resume=point,
    )
    last_rollouts: dict[int, int] = {}
    for row in read_run(directory).rollouts():
        last_rollouts[row.actor] = max(row.rollout, last_rollouts.get(row.actor, 0))
    return log, Recorder(log, version, steps, last_rollouts), seconds


def main(args: Args) -> None:
    """Check the options, train, and record it."""
    torchrun = find_torchrun()
    plan = prepare(args, torchrun)
    if torchrun is not None and torchrun.rank > 0:
        train_under_torchrun(plan, torchrun)
        return
    if torchrun is not None and not torchrun.resumes:
        announce_begun(torchrun)
    resumes = torchrun is not None and torchrun.resumes
    log, recorder, seconds_before = begin_record(plan, resumes)
    with log:
        if torchrun is not None:
            train_under_torchrun(plan, torchrun, recorder, seconds_before)
        else:
            with Broker(plan.args, plan.spec, plan.network, plan.run.directory, recorder) as broker:
                broker.run()
        if recorder.steps < plan.args.total_steps:
            raise PeerFailed("the last peers exited before they reported what they had learned")


if __name__ == "__main__":
    run_command_line(Args, main, "IMPALA as moolib's Atari example builds it, instrumented.")
