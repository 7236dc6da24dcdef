"""Hindsight experience replay on the goal tasks of EnvPool."""

import numpy as np
import pytest

from baselines.worker_schemes import options
from baselines.worker_schemes.goals import goal_task, hindsight_transitions
from baselines.worker_schemes.replay import n_step_transitions
from baselines.worker_schemes.workers import CollectionWorker, EnvOptions, parameters_of
from cleanba.run.command_line import BadInput
from tests.command_lines import parsed

COPIES, GAMMA = 3, 0.9


def collect(env_id, steps, tmp_path):
    said = {
        "agent": "ddpg", "storage": "her", "env_id": env_id, "num_envs": 3, "num_steps": steps,
        "hiddens": (8,), "runs_dir": tmp_path, "total_timesteps": 10_000,
    }  # fmt: skip
    agent = options.prepare(parsed(options.Args, **said)).agent
    collector = CollectionWorker(agent, EnvOptions(env_id, 1, 3, steps, "machado", 1), 0, 0)
    rollout = collector.collect(parameters_of(agent.make_network()), 1).rollout
    collector.end()
    return rollout


@pytest.mark.parametrize(
    ("env_id", "size"), [("FetchReach-v4", 3), ("FetchPush-v4", 3), ("PointMaze_UMaze-v3", 2)]
)
def test_rewards_of_goals_are_the_environment_s(env_id, size, tmp_path):
    rollout = collect(env_id, 60, tmp_path)
    real = ~rollout.resets
    obs = rollout.obs[1:][real]
    found = goal_task(env_id).reward(obs[:, -2 * size : -size], obs[:, -size:])
    assert (found == rollout.rewards[real]).all()


def test_copies_have_goals_that_were_achieved_later_in_their_episode(tmp_path):
    task, size = goal_task("FetchReach-v4"), 3
    rollout = collect("FetchReach-v4", 60, tmp_path)
    assert rollout.resets.any()
    rng = np.random.default_rng(0)
    found, errors = hindsight_transitions(
        rollout, rng, task=task, size=size, copies=COPIES, gamma=GAMMA
    )
    assert errors is None
    original, _ = n_step_transitions(rollout, rng, n=1, gamma=GAMMA)
    count = len(original.rewards)
    assert len(found.rewards) == (1 + COPIES) * count
    for mine, whole in zip(original, found, strict=True):
        assert (whole[:count] == mine).all()
    real = ~rollout.resets
    t, b = (indices[real] for indices in np.indices(real.shape))
    achieved = rollout.obs[1:, :, -2 * size : -size]
    chosen = set()
    for copy in range(1, 1 + COPIES):
        part = slice(copy * count, (copy + 1) * count)
        goals = found.obs[part, -size:]
        assert (found.next_obs[part, -size:] == goals).all()
        # the rest of the transition is the original one
        assert (found.obs[part, :-size] == original.obs[:, :-size]).all()
        assert (found.next_obs[part, :-size] == original.next_obs[:, :-size]).all()
        assert (found.actions[part] == original.actions).all()
        assert (
            found.rewards[part] == task.reward(found.next_obs[part, -2 * size : -size], goals)
        ).all()
        for i, goal in enumerate(goals):
            ends = np.flatnonzero(rollout.dones[t[i] :, b[i]])
            last = t[i] + ends[0] if len(ends) else len(real) - 1
            times = np.flatnonzero((achieved[:, b[i]] == goal).all(axis=-1))
            inside = times[(times >= t[i]) & (times <= last)]
            assert len(inside), "a goal of another episode, or of the past"
            chosen.add(int(inside[0]) - int(t[i]))
    assert {0, 1, 10} <= chosen
    # a goal that is achieved at once is rewarded
    rewarded = (found.rewards[count:] == 0).mean()
    assert rewarded > 5 * (original.rewards == 0).mean()


def test_a_task_without_sparse_rewards_for_goals_is_refused(tmp_path):
    for env_id in ("Pendulum-v1", "FetchReachDense-v4"):
        said = {"agent": "td3", "storage": "her", "env_id": env_id, "runs_dir": tmp_path}
        with pytest.raises(
            BadInput, match=f"^--storage her: {env_id} has no sparse rewards for goals$"
        ):
            options.prepare(parsed(options.Args, **said))


def test_returns_of_hindsight_have_one_step(tmp_path):
    said = {"storage": "her", "env_id": "FetchReach-v4", "runs_dir": tmp_path}
    assert options.complete(options.Args(agent="mpo", storage="her")).n_step == 1
    with pytest.raises(BadInput, match=r"^--n-step 3: must be 1 with --storage her$"):
        options.prepare(parsed(options.Args, agent="sac", n_step=3, **said))
