"""HTS-RL: the same bits for any number of actors, one update of lag, and its gradient where it says."""

import copy
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rlax
import torch

from baselines import hts_rl
from baselines.one_environment import channels_first
from baselines.torch_networks import make_network
from baselines.worker_processes import Clock
from cleanba.environments import describe_env
from cleanba.record import read_run
from cleanba.run.command_line import BadInput
from tests.command_lines import parsed

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "baselines" / "hts_rl.py"
S, N, A = 4, 3, 3
A2C = hts_rl.Args(
    algorithm="a2c", num_envs=N, num_steps=S, sync_interval=S, learning_rate=1e-2, gae_lambda=1.0,
    total_timesteps=10 * S * N, max_grad_norm=100.0,
)  # fmt: skip
PPO = replace(A2C, algorithm="ppo", gae_lambda=0.95, num_minibatches=2, update_epochs=2)


def test_numbers_draw_actions_as_likely_as_the_policy_has_them():
    logits = torch.log(torch.tensor([[0.2, 0.3, 0.5]]))
    for number, action in ((0.0, 0), (0.19, 0), (0.21, 1), (0.49, 1), (0.51, 2), (1 - 1e-16, 2)):
        assert hts_rl.sample(logits, torch.tensor([number], dtype=torch.float64)) == action
    numbers = torch.arange(1000, dtype=torch.float64) / 1000
    drawn = hts_rl.sample(logits.expand(1000, -1), numbers)
    np.testing.assert_allclose(np.bincount(drawn) / 1000, [0.2, 0.3, 0.5], atol=0.002)


def test_every_environment_draws_the_randomness_of_its_actions_by_itself():
    class Full(Exception):
        """An executor has filled its part of the storage."""

    class Queue:
        def put(self, index):
            raise Full

    def filled(seed):
        steps, envs = 64, 3
        args = replace(A2C, env_id="CartPole-v1", seed=seed, num_envs=envs, sync_interval=steps)
        spec = describe_env(args.env_id)
        shared = hts_rl.make_shared(args, spec, make_network("mlp", spec.obs_shape, 2))
        for index in range(envs):
            shared.begin[index].put(0)
            for _ in range(steps):
                shared.ready[index].put(0)  # actions 0, whatever the observation
            with pytest.raises(Full):
                hts_rl.execute(index, args, spec, shared._replace(full=Queue()), time.perf_counter)
        return shared.storages.uniforms[0].numpy()

    first, again, other = filled(1), filled(1), filled(2)
    np.testing.assert_array_equal(first, again)
    drawn = np.concatenate([first, other], axis=1)
    assert ((drawn >= 0) & (drawn < 1)).all()
    assert len(np.unique(drawn)) == drawn.size  # no environment, run or step has another's number
    correlations = np.corrcoef(drawn.T)[~np.eye(drawn.shape[1], dtype=bool)]
    assert np.abs(correlations).max() < 0.5  # 4 standard errors of 64 steps


@pytest.mark.parametrize("lambda_", [1.0, 0.95, 0.0])
def test_returns_agree_with_rlax(lambda_):
    rng = np.random.default_rng(0)
    rewards, values = rng.normal(size=(S, N)), rng.normal(size=(S + 1, N))
    dones = rng.random((S, N)) < 0.3
    ours = hts_rl.generalized_returns(
        torch.tensor(rewards), torch.tensor(dones), torch.tensor(values), 0.9, lambda_
    )
    advantages = jax.vmap(rlax.truncated_generalized_advantage_estimation, (1, 1, None, 1), 1)(
        jnp.float32(rewards), jnp.float32(0.9 * ~dones), lambda_, jnp.float32(values)
    )
    np.testing.assert_allclose(ours, advantages + values[:-1], atol=1e-5)


@pytest.fixture
def networks():
    """The newest parameters, and those that collected the data."""
    torch.manual_seed(0)
    behaviour = make_network("mlp", (4,), A)
    newest = copy.deepcopy(behaviour)
    with torch.no_grad():
        for parameter in newest.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return newest, behaviour


@pytest.fixture
def storages():
    rng = np.random.default_rng(1)

    def tensor(x):
        return torch.from_numpy(np.stack([x, x]))

    return hts_rl.Storages(
        obs=tensor(rng.normal(size=(S + 1, N, 4)).astype(np.float32)),
        uniforms=tensor(rng.random((S, N))),
        actions=tensor(rng.integers(0, A, (S, N))),
        versions=tensor(np.ones((S, N), np.int64)),
        rewards=tensor(rng.normal(size=(S, N)).astype(np.float32)),
        dones=tensor(rng.random((S, N)) < 0.2),
        episode_returns=tensor(np.zeros((S, N))),
        episode_lengths=tensor(np.zeros((S, N), np.int64)),
        times=tensor(np.zeros((N, 3))),
    )


def a2c_gradient(at, behaviour, storages, weigh=None):
    """By hand: the gradient of the A2C loss at some parameters, of data of a behaviour policy."""
    obs = storages.obs[0]
    with torch.no_grad():
        values = behaviour(obs.flatten(0, 1))[1].view(S + 1, N)
    returns = torch.zeros(S, N)
    later = values[-1]
    for t in reversed(range(S)):
        reward = storages.rewards[0, t].clamp(-1, 1)
        later = reward + A2C.gamma * later * (~storages.dones[0, t])
        returns[t] = later
    logits, v = at(obs[:-1].flatten(0, 1))
    policy = torch.distributions.Categorical(logits=logits)
    logprob = policy.log_prob(storages.actions[0].flatten())
    advantage = (returns.flatten() - v).detach()
    if weigh is not None:
        before = torch.distributions.Categorical(logits=behaviour(obs[:-1].flatten(0, 1))[0])
        ratio = (logprob - before.log_prob(storages.actions[0].flatten())).exp()
        advantage = advantage * ratio.clamp(max=1.0).detach()
    loss = (
        -(advantage * logprob).mean()
        + A2C.vf_coef * (returns.flatten() - v).square().mean()
        - A2C.ent_coef * policy.entropy().mean()
    )
    return torch.autograd.grad(loss, list(at.parameters()))


@pytest.mark.parametrize("correction", ["delayed-gradient", "truncated-is", "none"])
def test_the_gradient_is_computed_where_the_correction_says(networks, storages, correction):
    newest, behaviour = networks
    at = behaviour if correction == "delayed-gradient" else newest
    weigh = True if correction == "truncated-is" else None
    expected = a2c_gradient(at, behaviour, storages, weigh)
    before = [p.detach().clone() for p in newest.parameters()]
    learner = hts_rl.Learner(replace(A2C, correction=correction), newest, 10)
    learner.learn(storages, 0, behaviour.state_dict())
    # the first step of RMSProp, whose average of squares was 0
    for old, new, g in zip(before, newest.parameters(), expected, strict=True):
        step = A2C.learning_rate * g / ((0.01 * g.square()).sqrt() + A2C.optimizer_eps)
        torch.testing.assert_close(new.detach(), old - step, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("unrolls", [1, 2])
def test_delayed_epochs_of_ppo_are_those_of_ppo_at_the_behaviour_policy(
    networks, storages, unrolls
):
    """Where newest and behaviour are the same, the delay changes nothing; else it adds their difference."""
    newest, behaviour = networks

    def learn(network, correction):
        network = copy.deepcopy(network)
        args = replace(PPO, correction=correction, optimizer="adam")
        args = replace(args, num_steps=S // unrolls, sync_interval=S)
        hts_rl.Learner(args, network, 10).learn(storages, 0, behaviour.state_dict())
        return list(network.parameters())

    at_behaviour = learn(behaviour, "none")
    delayed = learn(behaviour, "delayed-gradient")
    elsewhere = learn(newest, "delayed-gradient")
    for a, b, c, old, start in zip(
        at_behaviour, delayed, elsewhere, behaviour.parameters(), newest.parameters(), strict=True
    ):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(a - old, c - start, atol=1e-5, rtol=1e-4)
        assert (a - old).abs().max() > 1e-3


def test_ppo_with_truncated_importance_sampling_starts_at_the_newest_policy(networks, storages):
    newest, behaviour = networks
    learner = hts_rl.Learner(replace(PPO, correction="truncated-is"), newest, 10)
    learner._behaviour.load_state_dict(behaviour.state_dict())
    with torch.no_grad():
        data = learner._weigh(learner._read(storages, 0, 0))
        now, then = (
            torch.distributions.Categorical(logits=network(data.obs)[0]).log_prob(data.actions)
            for network in (newest, behaviour)
        )
    torch.testing.assert_close(data.logprobs, now)
    torch.testing.assert_close(data.weights, torch.minimum((now - then).exp(), torch.tensor(1.0)))
    assert 0 < data.weights.min() < 1


def test_each_unroll_is_weighted_by_the_policy_that_is_newest_then(networks, storages, monkeypatch):
    newest, behaviour = networks
    args = replace(A2C, correction="truncated-is", num_steps=S // 2, sync_interval=S)
    learner = hts_rl.Learner(replace(args, learning_rate=0.01), newest, 10)
    a2c, found, actions = learner._a2c, [], []

    def look(data):
        actions.append(data.actions)
        with torch.no_grad():
            now = torch.distributions.Categorical(logits=learner.network(data.obs)[0])
        found.append((data.logprobs, now.log_prob(data.actions)))
        return a2c(data)

    monkeypatch.setattr(learner, "_a2c", look)
    learner.learn(storages, 0, behaviour.state_dict())
    assert len(found) == 2
    assert torch.equal(torch.cat(actions), storages.actions[0].flatten())  # each unroll once
    for said, now in found:
        torch.testing.assert_close(said, now)


def test_ppo_loss_agrees_with_rlax_and_kostrikovs_formulas(networks, storages):
    newest, behaviour = networks
    args = replace(PPO, correction="none", clip_coef=0.05)
    learner = hts_rl.Learner(args, behaviour, 10)
    learner._behaviour.load_state_dict(behaviour.state_dict())
    with torch.no_grad():
        data = learner._read(storages, 0, 0)
    advantages = data.returns - data.values
    losses = hts_rl.ppo_loss(newest, data, advantages, args)
    logits, values = (x.detach().numpy() for x in newest(data.obs))
    log_policy = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    logprobs = log_policy[np.arange(len(logits)), data.actions]
    old = data.values.numpy()
    returns = data.returns.numpy()
    ratio = jnp.exp(logprobs - data.logprobs.numpy())
    policy_loss = rlax.clipped_surrogate_pg_loss(ratio, jnp.asarray(advantages), args.clip_coef)
    entropy = -rlax.entropy_loss(jnp.asarray(logits), jnp.ones(len(logits)))
    clipped = old + np.clip(values - old, -args.clip_coef, args.clip_coef)
    assert (clipped != values).any()
    squares = np.maximum((values - returns) ** 2, (clipped - returns) ** 2)
    value_loss = 0.5 * squares.mean()
    np.testing.assert_allclose(losses.policy_loss.item(), policy_loss, atol=1e-5)
    np.testing.assert_allclose(losses.entropy.item(), entropy, atol=1e-5)
    np.testing.assert_allclose(losses.value_loss.item(), value_loss, atol=1e-5)
    whole = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy
    np.testing.assert_allclose(losses.loss.item(), whole, atol=1e-5)


def test_gradients_are_clipped_and_the_learning_rate_falls_to_0(networks, storages):
    newest, behaviour = networks
    args = replace(A2C, max_grad_norm=0.01, anneal_lr=True)
    before = [p.detach().clone() for p in newest.parameters()]
    expected = a2c_gradient(behaviour, behaviour, storages)
    norm = torch.sqrt(sum(g.square().sum() for g in expected))
    learner = hts_rl.Learner(args, newest, num_updates=4)
    metrics = learner.learn(storages, 0, behaviour.state_dict())
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    assert norm > 0.02
    for old, new, g in zip(before, newest.parameters(), expected, strict=True):
        g = g * 0.01 / norm
        step = args.learning_rate * g / ((0.01 * g.square()).sqrt() + args.optimizer_eps)
        torch.testing.assert_close(new.detach(), old - step, atol=1e-5, rtol=1e-3)
    rates = [metrics["learning_rate"]]
    rates += [learner.learn(storages, 0, behaviour.state_dict())["learning_rate"] for _ in range(3)]
    np.testing.assert_allclose(rates, args.learning_rate * np.array([1, 0.75, 0.5, 0.25]))


def test_ppo_normalizes_advantages_over_the_unroll(networks, storages, monkeypatch):
    seen = []
    loss = hts_rl.ppo_loss

    def spy(network, data, advantages, args):
        seen.append(advantages)
        return loss(network, data, advantages, args)

    monkeypatch.setattr(hts_rl, "ppo_loss", spy)
    newest, behaviour = networks
    args = replace(PPO, update_epochs=1)
    hts_rl.Learner(args, newest, 10).learn(storages, 0, behaviour.state_dict())
    whole = torch.cat(seen)
    assert len(seen) == args.num_minibatches
    assert len(whole) == S * N
    assert whole.mean().abs() < 1e-6
    assert whole.std() == pytest.approx(1, abs=1e-3)


def command(runs_dir, *args, env_id="CartPole-v1", num_envs=6):
    return [
        sys.executable, str(SCRIPT), "--env-id", env_id, "--num-envs", str(num_envs), "--runs-dir",
        str(runs_dir), "--no-progress", *map(str, args),
    ]  # fmt: skip


def run(runs_dir, *args, code=0, **kwargs):
    words = command(runs_dir, *args, **kwargs)
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stderr


SHORT = {
    "a2c": ("--algorithm", "a2c", "--total-timesteps", 6 * 5 * 40),
    "ppo": ("--algorithm", "ppo", "--num-steps", 32, "--total-timesteps", 6 * 32 * 8),
    "ppo-interval": (
        "--algorithm", "ppo", "--num-steps", 16, "--sync-interval", 32, "--total-timesteps", 6 * 32 * 8,
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == "ppo" else [pytest.mark.soak]) for n in SHORT]
)
def test_the_same_bits_for_1_2_4_and_8_actors(tmp_path, name):
    results = []
    for actors in (1, 2, 4, 8):
        # other times, too, as on other machines
        run(
            tmp_path,
            *SHORT[name],
            "--num-actors",
            actors,
            "--step-delay-seconds",
            1e-4 * (actors - 1),
        )
        (folder,) = tmp_path.glob(f"default/*__actors{actors}__*")
        record = read_run(folder)
        assert record.completed
        assert record.problems == []
        episodes = [(e.step, e.env_index, e.episode_return) for e in record.episodes()]
        losses = [u.loss for u in record.updates()]
        results.append((record.updates()[-1].fingerprint, losses, episodes))
    assert all(result == results[0] for result in results)
    assert len(set(results[0][1])) > 5
    assert len(results[0][2]) > 10


@pytest.mark.slow
def test_atari_is_learned_from_with_the_same_bits(tmp_path):
    results = []
    for actors in (1, 3):
        words = ("--network", "nature", "--total-timesteps", 4 * 5 * 8, "--num-actors", actors)
        run(tmp_path, *words, env_id="Breakout-v5", num_envs=4)
        (folder,) = tmp_path.glob(f"default/*__actors{actors}__Breakout-v5__*")
        updates = read_run(folder).updates()
        results.append((updates[-1].fingerprint, [u.loss for u in updates]))
    assert results[0] == results[1]
    assert len(set(results[0][1])) == 8


@pytest.mark.soak
def test_football_is_learned_from_with_channels_first_and_the_same_bits(tmp_path):
    image = np.arange(72 * 96 * 4, dtype=np.uint8).reshape(72, 96, 4)
    assert (channels_first(image) == image.transpose(2, 0, 1)).all()
    assert channels_first(image.transpose(2, 0, 1)).shape == (4, 72, 96)
    env_id = "gfootball/academy_empty_goal_close-v1"
    results = []
    for actors in (1, 3):
        words = ("--total-timesteps", 120, "--num-actors", actors)
        run(tmp_path, *words, env_id=env_id, num_envs=2)
        (folder,) = tmp_path.glob(
            f"default/*__actors{actors}__gfootball-academy_empty_goal_close-v1__*"
        )
        record = read_run(folder)
        assert record.completed
        updates = record.updates()
        results.append((updates[-1].fingerprint, [u.loss for u in updates]))
    assert results[0] == results[1]
    assert len(set(results[0][1])) == 12


@pytest.mark.slow
def test_the_policy_that_acts_is_one_update_behind_and_never_changes_in_between(tmp_path):
    run(tmp_path, *SHORT["a2c"])
    run(tmp_path, *SHORT["a2c"], "--schedule", "synchronous")
    lags = {}
    for folder in tmp_path.glob("default/*"):
        record = read_run(folder)
        rollouts = record.rollouts()
        assert all(r.versions == [(r.version_first, 5)] for r in rollouts)
        assert [r.learner_version for r in rollouts] == [v for v in range(1, 41) for _ in range(6)]
        if record.info.system == "hts_rl_a2c":
            gradients = [u.gradient_version for u in record.updates()]
            assert gradients == [1, *range(1, 40)]
        lags[record.info.system] = [r.learner_version - r.version_first for r in rollouts]
        assert sum(r.steps for r in rollouts) == record.updates()[-1].step == 1200
    assert lags["hts_rl_a2c"] == [0] * 6 + [1] * 39 * 6  # the first storage has nothing before it
    assert lags["hts_rl_a2c-sync"] == [0] * 40 * 6


@pytest.mark.soak
def test_no_update_takes_less_time_than_its_steps(tmp_path):
    """Also the last: its steps were collected beside the one before, and nothing is beside it."""
    words = ("--algorithm", "ppo", "--num-steps", 32, "--total-timesteps", 6 * 32 * 5)
    run(tmp_path, *words, "--step-delay-seconds", 0.02)
    (folder,) = tmp_path.glob("default/*")
    updates = read_run(folder).updates()
    assert len(updates) == 5
    for update in updates[1:]:
        assert update.update_seconds > 0.5 * update.rollout_time > 0.2
        spent = update.rollout_queue_get_time + update.training_time
        assert spent <= update.update_seconds + 1e-3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sync_interval": 7}, "--sync-interval 7: must be a multiple of --num-steps 5"),
        ({"total_timesteps": 10}, "--total-timesteps 10: a storage holds 80 steps"),
        ({"algorithm": "ppo", "num_minibatches": 7}, "--num-minibatches 7: must divide the 2048"),
        ({"num_actors": 0}, "--num-actors 0: must be 1 or more"),
        ({"sync_interval": 0}, "--sync-interval 0: must be 1 or more"),
        ({"hiddens": (64, 0)}, "--hiddens 0: must be 1 or more"),
        (
            {"env_id": "FrozenLake-v1"},
            "--env-id FrozenLake-v1: its observations are single numbers",
        ),
    ],
)
def test_bad_input_is_refused(tmp_path, options, message):
    usual = {"env_id": "CartPole-v1", "runs_dir": tmp_path}
    with pytest.raises(BadInput) as caught:
        hts_rl.prepare(parsed(hts_rl.Args, **(usual | options)))
    assert message in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_record_starts_when_its_clock_does(tmp_path):
    plan = hts_rl.prepare(parsed(hts_rl.Args, env_id="CartPole-v1", runs_dir=tmp_path))
    clock = Clock()
    clock.started = "2026-01-02T03:04:05+00:00"
    with hts_rl.begin_log(plan, torch.device("cpu"), clock):
        pass
    assert read_run(plan.run.directory).info.started == clock.started
