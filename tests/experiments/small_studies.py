"""A study of four short runs, made by a program that writes records without training."""

import json
from pathlib import Path

import msgspec
import synthetic_runs

from cleanba import record
from experiments import attempts, state, systems

PROGRAM = str(Path(__file__).parent / "synthetic_runs.py")
PPO = ("cleanba_ppo", "cleanba_ppo-sync")

STUDY = """
title = "A study"
question = "Is it?"
[settings.one]
num_actor_threads = 1
actor_device_ids = [0]
learner_device_ids = [0]
host_devices = 1
cores = 1
[[runs]]
systems = ["cleanba_ppo", "cleanba_ppo-sync"]
settings = ["one"]
env_ids = ["CartPole-v1"]
seeds = [1, 2]
total_timesteps = 2048
[runs.hyperparameters]
num_envs = 8
"""
NAMES = [f"cleanba_ppo{a}__one__CartPole-v1__s{s}" for a in ("", "-sync") for s in (1, 2)]


def synthetic_system(name):
    """Describe a PPO system whose program is synthetic_runs.py, which cannot resume."""
    flags = msgspec.structs.replace(systems.SYSTEMS[name].flags, resume="", num_checkpoints="")
    return msgspec.structs.replace(systems.SYSTEMS[name], script=PROGRAM, flags=flags)


def end_early(run, runs_dir, code=-15, checkpoint_every=2):
    """Write the files of a run that ended halfway, by a signal (-code) or with an exit code."""
    folder = state.run_dir(run, runs_dir)
    command = systems.command(run, runs_dir)
    synthetic_runs.write_run(folder, status="running", steps=run.total_timesteps, command=command)
    info = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(info | {"checkpoint_every": checkpoint_every}))
    log = state.log_file(run, runs_dir)
    log.parent.mkdir(exist_ok=True)
    log.write_text("# now\nan earlier attempt\nerror: no room\n")
    events = state.attempts_file(run, runs_dir)
    attempts.append(events, attempts.started(len("# now\nan earlier attempt\n")))
    attempts.append(events, attempts.ended(code))


def statuses(folder):
    return {path.name: record.read_run(path).info.status for path in record.find_runs(folder)}
