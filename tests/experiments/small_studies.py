"""A study of four short runs, made by a program that writes records without training."""

from pathlib import Path

import msgspec

from cleanba import record
from experiments import systems

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


def statuses(folder):
    return {path.name: record.read_run(path).info.status for path in record.find_runs(folder)}
