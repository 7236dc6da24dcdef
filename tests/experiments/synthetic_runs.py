"""Writes run records like a trainer's, without training: curves, updates and rollouts of a formula.

As a program it takes the flags of the Cleanba trainers; the environment variable SYNTHETIC_BEHAVIOUR says
what is to go wrong, and SYNTHETIC_FAIL_SEED with which seed alone.
"""

import argparse
import hashlib
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
from msgspec import UNSET

from cleanba import record
from cleanba.record.consistency import own_name
from experiments import systems
from experiments.study import find_study, load_study


def write_run(
    folder: Path,
    system="cleanba_ppo",
    setting="a0-l0-t1",
    env_id="CartPole-v1",
    seed=1,
    steps=51_200,
    num_envs=8,
    num_steps=64,
    sps=5_000.0,
    leaks_after=None,
    status="completed",
    error=None,
    command=("a_formula.py",),
    overwrite=False,
    study="quickstart",
    hardware=None,
    before_end=None,
):
    """Write one record.

    Args:
      folder: the run's folder.
      sps: steps per second of the made-up run.
      leaks_after: policy version from which on the hardware setting leaks into the parameters and
        the returns; None for never.
      hardware: further fields of the record's hardware.
      status: how the run ends; anything but `completed` stops half-way. `running` ends like a
        killed process, with a torn last line.
      before_end: called with the writer before the record is closed.
    """
    batch = num_envs * num_steps
    updates = steps // batch
    if status != "completed":
        updates //= 2
    rng = np.random.default_rng([seed, len(env_id), len(system)])
    leak = np.random.default_rng(list(setting.encode()))
    low, high = (-1.0, 1.0) if env_id.startswith("Catch") else (20.0, 480.0)
    sync = system.endswith("-sync")
    program, fixed = own_name(system) or (UNSET, {})
    info = record.RunInfo(
        system=system,
        setting=setting,
        env_id=env_id,
        seed=seed,
        study=study,
        hyperparameters={"total_timesteps": steps, "num_envs": num_envs, **fixed},
        program=program,
        hardware={
            "platform": "cpu",
            "num_actor_threads": 1 if setting.endswith("1") else 2,
            **(hardware or {}),
        },
        versions={"python": "3.11", "jax": "0.10.2"},
        revision="0123456789" * 4,
        command=list(command),
    )
    invalid = {"invalid_null": 3, "invalid_busy": 1, "invalid_owner": 0}
    invalid = invalid if system.startswith("ppo_microrts") else {}
    writer = record.RunWriter(folder, info, overwrite=overwrite)
    compile_time, seconds = 1.5, batch / sps
    for update in range(1, updates + 1):
        step, now = update * batch, compile_time + update * seconds
        leaking = leaks_after is not None and update + 1 > leaks_after
        mean = low + (high - low) / (1 + np.exp(-8 * (step / steps - 0.4)))
        mean += leak.normal(0, (high - low) / 10) if leaking else 0.0
        noise = rng.normal(0, (high - low) / 20, size=4)
        episodes = [
            record.Episode(
                step=step,
                wall_time=now,
                env_index=index,
                episode_return=float(mean + noise[index]),
                length=40,
                **invalid,
            )
            for index in range(4)
        ]
        seen = (system, env_id, seed, update, setting if leaking else "")
        row = record.Update(
            version=update + 1,
            step=step,
            wall_time=now,
            update_seconds=seconds,
            learning_rate=1e-3,
            loss=0.5,
            policy_loss=0.1,
            value_loss=0.4,
            entropy=0.6,
            grad_norm=0.3,
            rollout_queue_get_time=(0.6 if sync else 0.3) * seconds,
            params_queue_get_time=(0.4 if sync else 0.05) * seconds,
            rollout_queue_put_time=0.02 * seconds,
            rollout_time=0.55 * seconds,
            inference_time=0.3 * seconds,
            env_time=0.2 * seconds,
            training_time=(0.4 if sync else 0.7) * seconds,
            fingerprint=hashlib.sha256(repr(seen).encode()).hexdigest(),
        )
        version = update if sync else max(1, update - 1)
        rollouts = [
            record.Rollout(
                actor=0,
                group=group,
                rollout=update,
                steps=batch // 2,
                wall_time=now - seconds / 2,
                version_first=version,
                version_last=version,
                versions=[(version, batch // 2)],
                learner_version=update,
            )
            for group in (0, 1)
        ]
        writer.write(*episodes, *rollouts, row)
    if before_end is not None:
        before_end(writer)
    if status == "running":
        with open(folder / "episodes.jsonl", "a") as file:
            file.write('{"step": 1')
    else:
        writer.close(status, error)


def monobeast_run(
    folder, setting, seed, changes, num_actors, env_id="Catch-v0", command=(), **more
):
    """A record as monobeast writes it: 2 of the actors' rollouts an update, whose policy changes."""
    hyperparameters = {"num_actors": num_actors, "batch_size": 2, "num_learner_threads": 1, **more}
    info = record.RunInfo(
        system="monobeast",
        program="monobeast_study",
        setting=setting,
        env_id=env_id,
        seed=seed,
        hyperparameters=hyperparameters,
        command=list(command),
    )
    with record.RunWriter(folder, info) as writer:
        for update in range(1, 101):
            step, now = 160 * update, 0.1 * update
            row = record.Update(
                version=update + 1,
                step=step,
                wall_time=now,
                update_seconds=0.1,
                learning_rate=1e-3,
                loss=None,
                value_loss=100.0 / update + seed,
                rollout_queue_get_time=0.03,
                params_queue_get_time=0.0,
                rollout_queue_put_time=0.0,
                rollout_time=0.4,
                inference_time=0.1,
                env_time=0.2,
                training_time=0.06,
            )
            first = max(1, update - changes)
            versions = [(version, 10) for version in range(first, update + 1)]
            rollouts = [
                record.Rollout(
                    actor=actor,
                    group=None,
                    rollout=update,
                    steps=10 * len(versions),
                    wall_time=now,
                    version_first=first,
                    version_last=update,
                    versions=versions,
                    learner_version=update,
                )
                for actor in (0, 1)
            ]
            episode = record.Episode(
                step=step, wall_time=now, env_index=0, episode_return=1.0, length=9
            )
            writer.write(row, *rollouts, episode)


def study_folder(
    root: Path,
    systems=("cleanba_ppo", "cleanba_ppo-sync"),
    settings=("a0-l0-t1", "a0-l0,1-t2"),
    env_ids=("CartPole-v1", "Catch-v0"),
    seeds=(1, 2, 3),
    leaky=(),
    **options,
):
    """Write the records of a whole study, each system a bit faster with the second setting."""
    for s, system in enumerate(systems):
        for h, setting in enumerate(settings):
            for env_id in env_ids:
                for seed in seeds:
                    write_run(
                        root / record.run_name(system, setting, env_id, seed),
                        system,
                        setting,
                        env_id,
                        seed,
                        sps=4_000.0 * (1 + 0.4 * h + 0.2 * s) + 50 * seed,
                        leaks_after=10 if system in leaky else None,
                        **options,
                    )
    return root


def run_study(runs, name):
    """Write a record of a formula for every run of the smaller preset of a study."""
    study = load_study(find_study(name))
    for run in study.runs:
        ids = ("actor_device_ids", "learner_device_ids")
        hardware = {name: list(getattr(run.setting, name)) for name in ids}
        write_run(
            runs / study.name / record.run_name(run.system, run.setting.name, run.env_id, run.seed),
            run.system, run.setting.name, run.env_id, run.seed, steps=10_240, study=study.name,
            command=systems.command(run, runs),
            hardware={**hardware, "num_processes": run.setting.processes, **dict(run.setting.flags)},
        )  # fmt: skip
    return study


def main():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for flag in ("--env-id", "--runs-dir", "--study", "--setting"):
        parser.add_argument(flag, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--total-timesteps", type=int, required=True)
    parser.add_argument("--concurrency", action=argparse.BooleanOptionalAction, required=True)
    parser.add_argument("--overwrite", action="store_true")
    options, _ = parser.parse_known_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    print(f"cores {sorted(os.sched_getaffinity(0))}", flush=True)
    behaviour = os.environ.get("SYNTHETIC_BEHAVIOUR", "complete")
    if os.environ.get("SYNTHETIC_FAIL_SEED", "") not in ("", str(options.seed)):
        behaviour = "complete"
    if behaviour == "import":
        import a_module_that_is_not_installed  # noqa: F401
    if behaviour == "late":
        time.sleep(60)
    system = "cleanba_ppo" if options.concurrency else "cleanba_ppo-sync"
    name = record.run_name(system, options.setting, options.env_id, options.seed)
    folder = Path(options.runs_dir) / options.study / name
    if behaviour == "refuse":
        print("error: there is no environment 'Nothing-v0'", file=sys.stderr)
        sys.exit(2)

    def before_end(writer):
        if behaviour == "fail":
            writer.close("failed", ValueError("the actor [bold]thread[/bold] died"))
            sys.exit(1)
        if behaviour == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if behaviour == "full disk":  # its record cannot be ended
            print("OSError: [Errno 28] No space left on device", flush=True)
            os._exit(1)
        if behaviour == "slow":
            try:
                print("asleep", flush=True)
                time.sleep(60)
            except SystemExit:
                writer.close("interrupted", "SIGTERM")
                raise

    try:
        write_run(
            folder,
            system,
            options.setting,
            options.env_id,
            options.seed,
            options.total_timesteps,
            command=sys.argv,
            overwrite=options.overwrite,
            study=options.study,
            before_end=before_end,
        )
    except record.RecordError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
