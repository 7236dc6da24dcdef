"""µRTS: the game's tasks, masks and their gradient, and PPO with each strategy."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rlax
import torch

from baselines import microrts
from baselines import ppo_microrts as ppo
from baselines.microrts import MicroRTS, Task
from cleanba.audit import replay
from cleanba.record import read_run
from cleanba.run.command_line import BadInput
from tests.command_lines import parsed

ROOT = Path(__file__).resolve().parents[2]
TASK = Task("MicrortsMining4x4F9-v0", 4, 4)
needs_game = pytest.mark.skipif(
    find_spec("gym_microrts") is None or shutil.which("java") is None,
    reason="needs µRTS (make setup MICRORTS=1; apt install default-jre-headless)",
)


def first_observation():
    """The first state of the 4x4 map: mines in two corners, a base and a worker of each player."""
    obs = np.zeros((5, 4, 4), np.uint8)
    obs[0] = [[1, 0, 0, 0], [0, 1, 10, 0], [0, 10, 1, 0], [0, 0, 0, 1]]
    obs[1] = [[20, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 20]]
    obs[2] = [[0, 0, 0, 0], [0, 1, 1, 0], [0, 2, 2, 0], [0, 0, 0, 0]]
    obs[3] = [[1, 0, 0, 0], [0, 4, 2, 0], [0, 2, 4, 0], [0, 0, 0, 1]]
    return obs


# Masks and their gradient.


def test_the_gradient_of_a_masked_policy_is_the_paper_s_worked_example():
    """Section 7.3: four actions with equal logits, the third is invalid, the first was chosen."""
    logits = jnp.ones((1, 4))
    chosen = jnp.zeros((1, 1), jnp.int32)

    def log_prob(logits, mask):
        masked = jnp.where(mask, logits, ppo.MASKED)
        return ppo.log_probabilities([jax.nn.log_softmax(masked)], chosen)[0, 0]

    def gradient(mask):
        return jax.grad(log_prob)(logits, jnp.asarray(mask))[0]

    np.testing.assert_allclose(gradient([True] * 4), [0.75, -0.25, -0.25, -0.25], atol=1e-6)
    masked = gradient([True, True, False, True])
    np.testing.assert_allclose(masked, [2 / 3, -1 / 3, 0, -1 / 3], atol=1e-6)
    assert masked[2] == 0


def test_masks_hold_the_units_that_may_be_chosen():
    obs = first_observation()
    assert np.flatnonzero(microrts.source_mask(obs)).tolist() == [5, 6]
    assert np.flatnonzero(microrts.target_mask(obs)).tolist() == [9, 10]
    obs[microrts.CURRENT_ACTION, 1, 1] = 1  # the worker moves
    assert np.flatnonzero(microrts.source_mask(obs)).tolist() == [6]


def test_invalid_actions_are_counted_by_kind():
    obs = np.repeat(first_observation()[None], 6, axis=0)
    obs[3:5, microrts.CURRENT_ACTION, 1, 1] = 1
    obs[5, microrts.CURRENT_ACTION, 2, 1] = 1
    actions = np.zeros((6, 8), np.int32)
    actions[:, 0] = [
        5,
        3,
        9,
        5,
        5,
        9,
    ]  # own worker, nothing, enemy's base, busy worker twice, busy enemy
    actions[:, 1] = [1, 1, 1, 1, microrts.NOOP, 1]
    counts = microrts.invalid_counts(obs, actions)
    assert counts.tolist() == [[0, 0, 0], [1, 0, 0], [0, 0, 1], [0, 1, 0], [0, 0, 0], [0, 1, 1]]


def test_of_several_reward_functions_each_is_clipped_over_a_step():
    ticks = np.array([[[1.0, -2e9]], [[1.0, 2e9]], [[1.0, 0.25]]])  # a unit dies, another appears
    assert microrts.step_rewards(ticks).tolist() == [[1, 0.25]]
    assert microrts.step_rewards(ticks[:2]).tolist() == [[1, 0]]
    assert microrts.step_rewards(ticks[:1]).tolist() == [[1, -1]]
    harvested = np.array([[[2.0]], [[0.0]], [[1.0]]])
    assert microrts.step_rewards(harvested).tolist() == [[3]]


def test_an_attack_is_sent_as_an_offset_and_out_of_reach_as_a_noop():
    actions = np.zeros((3, 8), np.int32)
    actions[:, 1] = [5, 5, 1]
    actions[:, 0] = [11, 0, 0]  # (1, 1) and (0, 0) on a map of 10 columns
    actions[:, 7] = [30, 99, 99]  # (0, 3), (9, 9), (9, 9)
    sent = microrts.game_actions(actions, 10)
    assert sent[:, 1].tolist() == [5, microrts.NOOP, 1]
    assert sent[0, 7] == (2 + 3) * 7 + (-1 + 3)
    assert (actions[:, 7] == [30, 99, 99]).all()


def test_observations_are_the_paper_s_planes():
    planes = np.array(ppo.encode(jnp.asarray(first_observation())[None]))[0]
    assert planes.shape == (4, 4, 27)
    worker = [0, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0]
    assert planes[1, 1].tolist() == worker
    assert planes[0, 0, 5:10].tolist() == [0, 0, 0, 0, 1]  # 4 resources and more


# The algorithm.


@pytest.fixture(scope="module")
def agent():
    return ppo.make_agent(TASK, portable=True)


@pytest.fixture(scope="module")
def params(agent):
    return agent.init(jax.random.key(0), TASK.obs_shape)


@pytest.fixture(scope="module")
def batch():
    """A batch of the states of some random games, and random actions."""
    rng = np.random.default_rng(0)
    n = 12
    obs = np.repeat(first_observation()[None], n, axis=0)
    obs[:, microrts.CURRENT_ACTION] = rng.integers(0, 2, (n, 4, 4)) * (obs[:, 3] > 0)
    actions = np.stack([rng.integers(0, size, n) for size in TASK.components], axis=1)
    actions[:, 0], actions[:, 7] = 5, 10  # units that may be chosen
    obs[:, microrts.CURRENT_ACTION, 1, 1] = obs[:, microrts.CURRENT_ACTION, 2, 2] = 0
    scalars = {
        name: jnp.asarray(rng.normal(size=n), jnp.float32)
        for name in ("values", "advantages", "returns")
    }
    scalars["logprobs"] = jnp.asarray(rng.normal(-1.5, 0.3, (n, 8)), jnp.float32)
    return ppo.Transitions(jnp.asarray(obs), jnp.asarray(actions, jnp.int32), **scalars)


def torch_log_policies(agent, params, batch, masked):
    logits = [torch.tensor(np.array(x)) for x in agent.logits(params, batch.obs)]
    if masked:
        for position, mask in ((0, microrts.source_mask), (7, microrts.target_mask)):
            allowed = torch.tensor(np.array(mask(np.array(batch.obs))))
            logits[position] = torch.where(allowed, logits[position], torch.tensor(-1e8))
    return [torch.distributions.Categorical(logits=x) for x in logits]


@pytest.mark.parametrize("objective", ["components", "action"])
@pytest.mark.parametrize("strategy", ["masking", "naive", "penalty"])
def test_the_loss_is_that_of_torch_s_distributions(agent, params, batch, strategy, objective):
    args = ppo.Args(strategy=strategy, objective=objective)
    loss, metrics = ppo.ppo_loss(params, agent, batch, args)

    parts = torch_log_policies(agent, params, batch, masked=strategy == "masking")
    actions = torch.tensor(np.array(batch.actions)).T
    logprobs = torch.stack([x.log_prob(a) for x, a in zip(parts, actions, strict=True)], dim=1)
    entropy = sum(x.entropy() for x in parts)
    old, values, advantages, returns = (
        torch.tensor(np.array(x))
        for x in (batch.logprobs, batch.values, batch.advantages, batch.returns)
    )
    if objective == "components":  # ppo_4x4.py, lines 467 to 479
        entropy_loss = -(logprobs.exp() * logprobs).mean()
    else:
        logprobs, old = logprobs.sum(dim=1, keepdim=True), old.sum(dim=1, keepdim=True)
        entropy_loss = -entropy.mean()
    ratio, weights = (logprobs - old).exp(), advantages[:, None]
    policy_loss = torch.max(-weights * ratio, -weights * ratio.clamp(0.8, 1.2)).mean()
    new = torch.tensor(np.array(agent.values(params, batch.obs)))
    change = values + (new - values).clamp(-0.2, 0.2)
    value_loss = 0.5 * torch.max((new - returns) ** 2, (change - returns) ** 2).mean()
    expected = policy_loss + 0.01 * entropy_loss + value_loss
    np.testing.assert_allclose(float(metrics["entropy"]), float(entropy.mean()), rtol=1e-5)
    np.testing.assert_allclose(float(loss), float(expected), rtol=1e-4)
    clipped = ((ratio - 1).abs() > 0.2).double().mean()
    np.testing.assert_allclose(float(metrics["clip_fraction"]), float(clipped), rtol=1e-6)


def test_with_masking_no_gradient_reaches_the_logits_of_invalid_units(agent, params, batch):
    """With naive masking it does."""

    def last_bias(strategy):
        args = ppo.Args(strategy=strategy)
        grads = jax.grad(lambda p: ppo.ppo_loss(p, agent, batch, args)[0])(params)
        return np.array(grads["policy"]["params"]["Dense_1"]["bias"])

    never = ~microrts.source_mask(np.array(batch.obs)).any(axis=0)
    assert never.any()
    assert not last_bias("masking")[:16][never].any()
    assert last_bias("naive")[:16][never].all()


def test_advantages_are_rlax_s():
    rng = np.random.default_rng(1)
    rewards, values = (jnp.asarray(rng.normal(size=(7, 3)), jnp.float32) for _ in range(2))
    discounts = 0.99 * (1.0 - jnp.asarray(rng.random((7, 3)) < 0.3))
    last = jnp.asarray(rng.normal(size=3), jnp.float32)
    advantages, returns = ppo.gae(rewards, discounts, values, last, 0.97)
    for i in range(3):
        expected = rlax.truncated_generalized_advantage_estimation(
            rewards[:, i], discounts[:, i], 0.97, jnp.append(values[:, i], last[i])
        )
        np.testing.assert_allclose(advantages[:, i], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(returns, advantages + values, rtol=1e-6)


def test_masked_units_are_never_sampled_and_naive_judges_without_the_mask(agent, params, batch):
    key, step = jax.random.key(3), np.int32(0)
    drawn = {
        strategy: [np.array(x) for x in ppo.make_act(agent, strategy, key)(params, batch.obs, step)]
        for strategy in ("masking", "naive", "penalty")
    }
    allowed = microrts.source_mask(np.array(batch.obs))
    sources = drawn["masking"][0][:, 0]
    assert allowed[np.arange(len(sources)), sources].all()
    np.testing.assert_array_equal(drawn["naive"][0], drawn["masking"][0])
    assert (drawn["naive"][1] <= drawn["masking"][1]).all()
    assert (drawn["naive"][1][:, 0] < drawn["masking"][1][:, 0]).all()
    free = drawn["penalty"][0][:, 0]
    assert not allowed[np.arange(len(free)), free].all()
    for strategy in ("masking", "naive"):
        judged = batch._replace(actions=jnp.asarray(drawn[strategy][0]))
        parts = torch_log_policies(agent, params, judged, masked=strategy == "masking")
        actions = torch.tensor(np.array(judged.actions)).T
        expected = [x.log_prob(a).numpy() for x, a in zip(parts, actions, strict=True)]
        np.testing.assert_allclose(drawn[strategy][1].T, expected, rtol=1e-5)


# The game.


def masked_random_actions(task, obs, rng):
    actions = np.stack([rng.integers(0, size, len(obs)) for size in task.components], axis=1)
    for i, allowed in enumerate(microrts.source_mask(obs)):
        if allowed.any():
            actions[i, 0] = rng.choice(np.flatnonzero(allowed))
    return actions.astype(np.int32)


@needs_game
@pytest.mark.parametrize("env_id", ppo.TASKS)
def test_a_game_begins_as_its_map_and_depends_on_actions_alone(env_id):
    task = microrts.describe_task(env_id)
    results = []
    for _ in range(2):
        games = MicroRTS(task, 2)
        obs = games.reset()
        assert obs.shape == (2, *task.obs_shape)
        assert microrts.source_mask(obs).sum() == 4  # a base and a worker in each
        if env_id == TASK.env_id:
            np.testing.assert_array_equal(obs[0], first_observation())
        rng = np.random.default_rng(0)
        for t in range(1, 201):
            step = games.step(masked_random_actions(task, obs, rng))
            assert step.dones.tolist() == [t == 200] * 2
            results.append(step)
            obs = step.obs
        np.testing.assert_array_equal(obs, games.reset())  # the ended episodes have been reset
        games.close()
    for ours, theirs in zip(results[:200], results[200:], strict=True):
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(a, b)


@needs_game
def test_harvesting_and_returning_a_resource_give_one_each():
    """The worker goes from (1, 1) to (1, 0), harvests at (0, 0), goes back and returns it at (2, 1)."""
    games = MicroRTS(TASK, 1)
    games.reset()
    move, harvest, bring = 1, 2, 3
    north, east, south, west = range(4)
    plan = [(5, move, 2, north), (1, harvest, 3, west), (1, move, 2, south), (5, bring, 4, east)]
    rewards = []
    for source, kind, parameter, direction in plan:
        action = np.zeros((1, 8), np.int32)
        action[0, [0, 1, parameter]] = source, kind, direction
        step = games.step(action)
        assert not step.invalid.any()
        rewards.append(float(step.rewards[0, 0]))
        for _ in range(3):  # actions of several ticks go on
            waited = games.step(np.array([[5, 0, 0, 0, 0, 0, 0, 0]], np.int32))
            rewards[-1] += float(waited.rewards[0, 0])
    games.close()
    assert rewards == [0, 1, 0, 1]


def count_invalid(episode):
    return episode.invalid_null + episode.invalid_busy + episode.invalid_owner


def command(runs, *args):
    return [
        sys.executable, "baselines/ppo_microrts.py", "--total-timesteps", "1024", "--num-envs", "4",
        "--num-steps", "64", "--no-progress", "--runs-dir", str(runs), *args,
    ]  # fmt: skip


@needs_game
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["masking", "naive", "penalty"])
def test_a_run_is_recorded_and_can_be_repeated(tmp_path, strategy):
    args = ("--strategy", strategy, "--checkpoint-every", "2", "--keep-checkpoints", "all")
    done = subprocess.run(command(tmp_path, *args), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (folder,) = tmp_path.glob("default/*")
    run = read_run(folder)
    assert run.completed
    assert not run.problems
    assert run.info.num_actions == TASK.num_actions
    assert len(run.updates()) == 4
    episodes = run.episodes()
    assert [e.length for e in episodes] == [200] * 4
    found = [count_invalid(e) for e in episodes]
    # A masked source can only be wrong while all units are busy.
    assert max(found) < 20 if strategy != "penalty" else min(found) > 100
    again = [
        sys.executable,
        "-m",
        "cleanba.audit.replay",
        str(folder),
        "--segments",
        "2",
        "--no-progress",
    ]
    again += ["--module", "baselines.ppo_microrts"]
    done = subprocess.run(again, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "verified: 4 of 4 episodes, 1,024 steps" in done.stdout
    assert "repeated: 4 updates, in 2 of 2 segments" in done.stdout


@needs_game
@pytest.mark.slow
def test_masking_removed_records_what_is_played_without_a_mask(tmp_path):
    args = ("--strategy", "removed")
    done = subprocess.run(command(tmp_path, *args), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (folder,) = tmp_path.glob("default/*")
    run = read_run(folder)
    assert run.completed
    assert not run.problems
    assert min(map(count_invalid, run.episodes())) > 100
    assert {e.step for e in run.episodes()} == {
        1024
    }  # after the update with which they were played
    outcome = replay.judge(run, segments=2, seed=0, module="baselines.ppo_microrts")
    assert outcome.verdict == "consistent only"
    # It trains as masking does.
    done = subprocess.run(command(tmp_path / "x"), cwd=ROOT, capture_output=True, text=True)
    (other,) = (tmp_path / "x").glob("default/*")
    assert run.updates()[-1].fingerprint == read_run(other).updates()[-1].fingerprint


@needs_game
@pytest.mark.soak
@pytest.mark.skipif(
    os.uname().machine != "x86_64" or not shutil.which("qemu-x86_64"),
    reason="needs qemu-x86_64 (Debian: apt install qemu-user)",
)
def test_another_processor_computes_the_same_bits(tmp_path):
    fingerprints = []
    for setting, emulator in (("native", ()), ("haswell", ("qemu-x86_64", "-cpu", "Haswell"))):
        words = command(tmp_path, "--setting", setting, "--no-compilation-cache")
        done = subprocess.run([*emulator, *words], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        (folder,) = tmp_path.glob(f"default/*{setting}*")
        fingerprints.append(read_run(folder).updates()[-1].fingerprint)
    assert fingerprints[0] == fingerprints[1]


# Bad input.


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"env_id": "Breakout-v5"}, "--env-id Breakout-v5: choose from MicrortsMining4x4F9-v0"),
        ({"num_minibatches": 3}, "must divide the 2048 steps"),
        ({"total_timesteps": 100}, "one update learns from 2048 steps"),
        ({"invalid_penalty": -1}, "--invalid-penalty"),
    ],
)
def test_bad_input_is_one_line(tmp_path, args, message):
    with pytest.raises(BadInput, match=message) as caught:
        ppo.prepare(parsed(ppo.Args, runs_dir=tmp_path, **args))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("module", "java", "message"),
    [
        (None, "java", "µRTS is not installed: make setup MICRORTS=1"),
        ("found", None, "apt install default-jre-headless"),
    ],
)
def test_without_the_game_or_java_one_line_names_what_is_missing(
    tmp_path, monkeypatch, module, java, message
):
    monkeypatch.setattr(microrts.importlib.util, "find_spec", lambda name: module)
    monkeypatch.setattr(microrts.shutil, "which", lambda name: java)
    with pytest.raises(BadInput, match=message) as caught:
        ppo.prepare(ppo.Args(run=replace(ppo.RunOptions(), runs_dir=str(tmp_path))))
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())
