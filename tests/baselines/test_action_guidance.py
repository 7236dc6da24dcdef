"""Action guidance: the schedule, the two rewards, PPO off-policy, and what a run records."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from baselines import action_guidance as guidance
from baselines import microrts
from baselines.microrts import Task
from baselines.microrts_rollouts import Rollout
from baselines.ppo_microrts import Transitions
from cleanba.record import read_run
from cleanba.run.command_line import BadInput
from tests.baselines.test_ppo_microrts import needs_game
from tests.command_lines import parsed

ROOT = Path(__file__).resolve().parents[2]
TASK = Task("MicrortsProduceCombatUnitHRL-v1", 10, 10)
T, B = 8, 4
ARGS = guidance.Args(
    strategy="long", positive_learning=True, num_envs=B, num_steps=T, total_timesteps=10 * T * B,
    num_minibatches=2,
)  # fmt: skip


@pytest.mark.parametrize(
    ("strategy", "step", "expected"),
    [
        ("long", 0, 0.95),
        ("long", 2e6, 0.95),
        ("long", 5.5e6, 0.475),
        ("long", 9e6, 0.0),
        ("long", 1e7, 0.0),
        ("short", 0.8e6, 0.95),
        ("short", 1.3e6, 0.475),
        ("short", 1.8e6, 0.0),
        ("mixed", 3e6, 0.725),
        ("mixed", 4e6, 0.5),
        ("mixed", 1e7, 0.5),
    ],
)
def test_guidance_falls_as_in_the_paper(strategy, step, expected):
    """Section 8.4.2: shifts of 2, 0.8 and 2 and adaptations of 7, 1 and 2 million steps, of 10 million."""
    share = guidance.guided_share(guidance.SCHEDULES[strategy], step / 1e7)
    assert share == pytest.approx(expected, abs=1e-9)


@pytest.fixture(scope="module")
def network():
    return guidance.Network(TASK.components, portable=True)


@pytest.fixture(scope="module")
def obs():
    """The first states of some games, with units where they could be."""
    rng = np.random.default_rng(0)
    obs = np.zeros((T + 1, B, *TASK.obs_shape), np.uint8)
    obs[..., microrts.OWNER, 1, 1] = obs[..., microrts.OWNER, 2, 1] = microrts.MINE
    obs[..., microrts.OWNER, 8, 8] = microrts.ENEMY
    obs[..., microrts.UNIT_TYPE, :, :] = np.where(obs[..., microrts.OWNER, :, :], 4, 0)
    obs[..., 0, :, :] = rng.integers(0, 5, obs[..., 0, :, :].shape)
    return obs


@pytest.fixture(scope="module")
def policies(network, obs):
    return [network.init(jax.random.key(seed), obs[0]) for seed in (1, 2)]


def test_the_policy_that_acts_judges_and_all_policies_value(network, policies, obs):
    act = guidance.make_act(network, jax.random.key(0))
    by = {
        name: [np.array(x) for x in act(given, obs[0], np.int32(3))]
        for name, given in {
            "main": (policies, np.float32(0.0)),
            "auxiliary": (policies, np.float32(1.0)),
            "alone": (policies[1:], np.float32(0.0)),
        }.items()
    }
    for name, policy in (("main", policies[0]), ("auxiliary", policies[1])):
        actions, logprobs, values = by[name]
        logits, _ = network.apply(policy, obs[0])
        logits[0] = jnp.where(microrts.source_mask(obs[0]), logits[0], -1e8)
        logits[7] = jnp.where(microrts.target_mask(obs[0]), logits[7], -1e8)
        parts = [torch.distributions.Categorical(logits=torch.tensor(np.array(x))) for x in logits]
        expected = [part.log_prob(torch.tensor(actions[:, i])) for i, part in enumerate(parts)]
        np.testing.assert_allclose(logprobs.T, np.stack(expected), rtol=1e-5)
        assert values.shape == (B, 2)
        for i in range(2):
            np.testing.assert_allclose(
                values[:, i], network.apply(policies[i], obs[0])[1], rtol=1e-5
            )
    assert not (by["main"][1] == by["auxiliary"][1]).all()
    assert by["alone"][2].shape == (B, 1)


def test_the_loss_has_one_clipped_ratio_for_each_action(network, policies, obs):
    rng = np.random.default_rng(0)
    act = guidance.make_act(network, jax.random.key(0))
    actions, logprobs, values = act((policies[:1], np.float32(0.0)), obs[0], np.int32(0))
    log_ratios = rng.normal(0, 0.1, (B, 8)).astype(np.float32)  # of the components
    advantages = rng.normal(size=B).astype(np.float32)
    minibatch = Transitions(
        obs[0], actions, logprobs - log_ratios, values[:, 0], advantages, values[:, 0]
    )
    _, metrics = guidance.ppo_loss(policies[0], network, minibatch, guidance.Args(clip_coef=0.2))
    ratios = np.exp(log_ratios.sum(axis=1))
    weights = (advantages - advantages.mean()) / advantages.std()
    expected = np.maximum(-weights * ratios, -weights * ratios.clip(0.8, 1.2)).mean()
    np.testing.assert_allclose(metrics["policy_loss"], expected, rtol=1e-4)


def test_the_share_of_guided_steps_is_the_one_asked_for(network, policies, obs):
    act = guidance.make_act(network, jax.random.key(0))
    guided = 0
    for step in range(400):
        here, always = (
            np.array(act((policies, np.float32(x)), obs[0], np.int32(step))[1]) for x in (0.3, 1.0)
        )
        guided += (here == always).all()
    assert 0.2 < guided / 400 < 0.4


def rollout_of(network, policies, obs, sparse, shaped):
    """A rollout with given rewards of combat units (sparse) and buildings (shaped)."""
    act = guidance.make_act(network, jax.random.key(0))
    steps = [act((policies, np.float32(0.5)), obs[t], np.int32(t)) for t in range(T)]
    actions, logprobs, values = (np.stack(x) for x in zip(*steps, strict=True))
    rewards = np.zeros((T, B, 7), np.float32)
    rewards[..., 5], rewards[..., 3] = sparse, shaped
    return Rollout(
        obs,
        actions,
        logprobs,
        values,
        rewards,
        np.zeros((T, B), bool),
        np.zeros((T, B, 3), np.int32),
    )


def changed(before, after):
    return [
        not all(
            jax.tree.leaves(jax.tree.map(lambda x, y: bool((x == y).all()), old.params, new.params))
        )
        for old, new in zip(before, after, strict=True)
    ]


def test_with_positive_learning_a_policy_skips_rollouts_without_its_reward(network, policies, obs):
    rng = np.random.default_rng(1)
    some = rng.random((T, B)) < 0.3
    for sparse, shaped, expected in (
        (0, 0, [False, False]),
        (0, some, [False, True]),
        (some, 0, [True, True]),
    ):
        learner = guidance.Learner(ARGS, TASK, network)
        before = list(learner.states)
        metrics = learner.learn(rollout_of(network, policies, obs, sparse, shaped))
        assert changed(before, learner.states) == expected
        assert np.isfinite(metrics["loss"]) == any(expected)


def test_a_skipped_update_does_not_delay_the_learning_rate(network, policies, obs):
    empty = rollout_of(network, policies, obs, 0, 0)
    full = rollout_of(network, policies, obs, 1, 0)
    learner = guidance.Learner(ARGS, TASK, network)
    rates = [learner.learn(rollout)["learning_rate"] for rollout in (empty, full, full)]
    np.testing.assert_allclose(rates, [2.5e-4, 0.9 * 2.5e-4, 0.8 * 2.5e-4])
    used = learner.states[0].opt_state[1].hyperparams["learning_rate"]
    np.testing.assert_allclose(used, rates[-1], rtol=1e-6)


def test_each_policy_learns_from_its_own_reward(network, policies, obs):
    """With a constant reward, the value function moves towards it."""
    args = replace(
        ARGS, learning_rate=3e-3, clip_coef=10.0, gamma=0.0, gae_lambda=0.0, anneal_lr=False
    )
    learner = guidance.Learner(args, TASK, network)
    rollout = rollout_of(network, learner.params, obs, 0, 1.0)
    before = [float(network.apply(p, obs[0])[1].mean()) for p in learner.params]
    for _ in range(30):
        learner.learn(rollout)
    after = [float(network.apply(p, obs[0])[1].mean()) for p in learner.params]
    assert after[1] - before[1] > 0.3  # the shaped reward is 1 in each step
    assert after[0] == before[0]  # the sparse one is 0, and skipped


@needs_game
def test_a_random_opponent_wins_games_and_waiting_never_does():
    """The game's own random numbers have no seed: played until a game is lost."""
    games = microrts.MicroRTS(microrts.describe_task("MicrortsRandomEnemyHRL3-v1"), 4)
    games.reset()
    waiting = np.zeros((4, 8), np.int32)
    lost = False
    for _ in range(20 * 600):
        step = games.step(waiting)
        assert np.abs(step.rewards).max() <= microrts.TICKS_PER_STEP  # also when a last unit dies
        matches = set(step.rewards[step.dones, 0].tolist())
        assert matches <= {-1.0, 0.0}
        if lost := -1.0 in matches:
            break
    games.close()
    assert lost, "no game of at least 80"


@needs_game
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["sparse", "mixed-plo"])
def test_a_run_is_recorded(tmp_path, strategy):
    name, _, positive = strategy.partition("-")
    flag = "--positive-learning" if positive else "--no-positive-learning"
    command = [
        sys.executable, "baselines/action_guidance.py", "--strategy", name, flag, "--total-timesteps", "1600",
        "--num-envs", "4", "--num-steps", "100", "--no-progress", "--runs-dir", str(tmp_path),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (folder,) = tmp_path.glob("default/*")
    run = read_run(folder)
    assert run.completed
    assert not run.problems
    assert run.info.system == f"action_guidance_{strategy}"
    assert len(run.updates()) == 4
    assert [e.length for e in run.episodes()] == [400] * 4


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"env_id": "MicrortsMining4x4F9-v0"}, "choose from MicrortsAttackHRL-v1"),
        ({"num_minibatches": 3}, "must divide the 1024 steps"),
        ({"total_timesteps": 100}, "one update learns from 1024 steps"),
    ],
)
def test_bad_input_is_one_line(tmp_path, args, message):
    with pytest.raises(BadInput, match=message) as caught:
        guidance.prepare(parsed(guidance.Args, runs_dir=tmp_path, **args))
    assert "\n" not in str(caught.value)
