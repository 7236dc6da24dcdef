"""The command line: `python -m baselines.moolib_atari --env Breakout-v5`."""

from dataclasses import asdict
from typing import Any

import torch

from baselines import run_log
from baselines.moolib_atari.launch import Broker, Recorder
from baselines.moolib_atari.options import HARDWARE, NOT_HYPERPARAMETERS, Args, prepare
from baselines.run_log import RunLog
from cleanba.command_line import run_command_line


def main(args: Args) -> None:
    """Check the options, train, and record it."""
    plan = prepare(args)
    args = plan.args
    hyperparameters: dict[str, Any] = {
        name: value for name, value in asdict(args).items() if name not in NOT_HYPERPARAMETERS
    }
    hyperparameters["network"] = plan.network
    use_cuda = not args.disable_cuda and torch.cuda.is_available()
    hardware = {name: getattr(args, name) for name in HARDWARE}
    hardware |= {"num_processes": args.num_peers}
    hardware |= run_log.describe_device(torch.device("cuda" if use_cuda else "cpu"))
    log = RunLog(
        plan.run,
        hyperparameters,
        hardware,
        total_steps=args.total_steps,
        overwrite=args.overwrite,
        progress=args.progress,
    )
    recorder = Recorder(log)
    error: BaseException | None = None
    broker = None
    try:
        broker = Broker(args, plan.spec, plan.network, plan.run.directory, recorder)
        broker.run(args.num_peers, args.max_restarts)
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
