"""Runs with known content, written by the one writer that trainers use."""

import hashlib
import sys
from pathlib import Path

import numpy as np
import pytest
from msgspec import UNSET

from cleanba.record import Episode, Rollout, RunInfo, RunWriter, Update
from cleanba.record.consistency import own_name

sys.path.append(str(Path(__file__).parents[1] / "experiments"))  # synthetic_runs


@pytest.fixture
def write_run(tmp_path):
    """Return a function that writes a run record and returns its folder."""

    def write(
        system="cleanba_ppo",
        setting="a0-l0-t1",
        env_id="Breakout-v5",
        seed=1,
        episodes=50,
        updates=10,
        returns=None,
        status="completed",
        folder=None,
        fingerprint="f",
        total_steps=1000,
    ):
        folder = folder or tmp_path / f"{system}__{setting}__{env_id}__s{seed}"
        program, fixed = own_name(system) or (UNSET, {})
        info = RunInfo(
            system=system,
            program=program,
            setting=setting,
            env_id=env_id,
            seed=seed,
            hyperparameters={"num_envs": 4, "total_timesteps": total_steps, **fixed},
            hardware={"platform": "cpu"},
        )
        returns = np.arange(episodes, dtype=float) if returns is None else np.asarray(returns)
        at = np.linspace(total_steps / max(len(returns), 1), total_steps, len(returns))
        per_update = total_steps // max(updates, 1)
        writer = RunWriter(folder, info)
        writer.write(
            *(
                Episode(
                    step=int(s),
                    wall_time=s / 100,
                    env_index=i % 4,
                    episode_return=float(r),
                    length=20,
                )
                for i, (s, r) in enumerate(zip(at, returns, strict=True))
            )
        )
        for u in range(updates):
            # 5 s of compilation in the first update, then 100 steps per second
            time = 5 + (u + 1) * per_update / 100
            writer.write(
                Update(
                    version=u + 2,
                    step=(u + 1) * per_update,
                    wall_time=time,
                    update_seconds=per_update / 100,
                    learning_rate=None,
                    loss=1.0 / (u + 1),
                    fingerprint=hashlib.sha256(f"{fingerprint}{u + 2}".encode()).hexdigest(),
                ),
                Rollout(
                    actor=0,
                    group=0,
                    rollout=u + 1,
                    steps=per_update,
                    wall_time=time - 0.5,
                    version_first=max(u, 1),
                    version_last=max(u, 1),
                    versions=[(max(u, 1), per_update)],
                    learner_version=u + 1,
                ),
            )
        if status is not None:  # else as if killed
            writer.close(status)
        return folder

    return write
