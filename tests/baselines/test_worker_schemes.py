"""Worker schemes on Ray: each part against an oracle, each link by what it does to lag, deaths survived."""

import contextlib
import copy
import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
import rlax
import torch
from torch import distributions

from baselines.torch_losses import clipped_surrogate, impala_loss
from baselines.torch_networks import make_network
from baselines.worker_schemes import actors, options
from baselines.worker_schemes.__main__ import (
    Recorder,
    make_places,
    make_update_worker,
    ray_for,
)
from baselines.worker_schemes.algorithms.impala import vtrace_loss
from baselines.worker_schemes.algorithms.ppo import ppo_loss
from baselines.worker_schemes.algorithms.sac import sac_loss
from baselines.worker_schemes.control import ActionBounds, SACNetwork
from baselines.worker_schemes.on_policy import GAEStorage, VTraceStorage
from baselines.worker_schemes.parts import Moment, Rollout
from baselines.worker_schemes.replay import (
    ReplayStorage,
    SumTree,
    Transitions,
    n_step_transitions,
)
from baselines.worker_schemes.targets import move_targets
from baselines.worker_schemes.worker_pool import WorkerPool
from baselines.worker_schemes.workers import (
    Collected,
    CollectionWorker,
    EnvOptions,
    Gradient,
    UpdateWorker,
    load_parameters,
    parameters_of,
)
from cleanba.record import read_run
from cleanba.run.command_line import BadInput
from tests.command_lines import parsed

ROOT = Path(__file__).resolve().parents[2]
T, B, A = 6, 3, 4


def make_rollout(rng, length=T):
    dones = rng.random((length, B)) < 0.3
    return Rollout(
        obs=rng.normal(size=(length + 1, B, 5)).astype(np.float32),
        actions=rng.integers(A, size=(length, B)),
        rewards=rng.normal(size=(length, B)).astype(np.float32),
        terminated=dones & (rng.random((length, B)) < 0.5),
        dones=dones,
        resets=np.concatenate([np.zeros((1, B), bool), dones[:-1]]),
        logits=rng.normal(size=(length, B, A)).astype(np.float32),
        values=rng.normal(size=(length + 1, B)).astype(np.float32),
        states=np.empty((length, B, 0), np.float32),
    )


def without_values(rollout):
    """Make a rollout's actions continuous, so that the actor has no action values."""
    shape = rollout.dones.shape
    return rollout._replace(
        actions=np.zeros((*shape, 2), np.float32), logits=np.empty((*shape, 0), np.float32)
    )


def storage(**changes):
    settings = {
        "gamma": 0.9, "gae_lambda": 0.8, "num_epochs": 2, "num_minibatches": 3, "clip_rewards": False,
    }  # fmt: skip
    return GAEStorage(0, **(settings | changes))


def batches_of(some):
    found = []
    while (batch := some.next()) is not None:
        found.append(batch)
    return found


@pytest.mark.parametrize("clip_rewards", [False, True])
def test_epochs_take_every_real_step_once_and_advantages_and_returns_are_rlax_s(clip_rewards):
    rng = np.random.default_rng(0)
    rollouts = [make_rollout(rng), make_rollout(rng, length=4)]  # the second was ended early
    some = storage(clip_rewards=clip_rewards)
    assert some.next() is None
    some.put(rollouts)
    batches = batches_of(some)
    assert len(batches) == 6
    expected = []
    for rollout in rollouts:
        gae = jax.vmap(rlax.truncated_generalized_advantage_estimation, (1, 1, None, 1), 1)
        rewards = rollout.rewards.clip(-1, 1) if clip_rewards else rollout.rewards
        advantages = gae(
            jnp.asarray(rewards),
            jnp.float32(0.9 * ~rollout.dones),
            0.8,
            jnp.asarray(rollout.values),
        )
        pairs = np.stack([advantages, advantages + rollout.values[:-1]], axis=-1)
        expected += pairs[~rollout.resets].tolist()
    for epoch in (batches[:3], batches[3:]):
        found = [pair for b in epoch for pair in zip(b.advantages, b.returns, strict=True)]
        assert len(found) == sum((~r.resets).sum() for r in rollouts)
        np.testing.assert_allclose(sorted(found), sorted(expected), atol=1e-5)
    assert batches[0].actions.tolist() != batches[3].actions.tolist()


def test_ppo_loss_agrees_with_rlax():
    rng = np.random.default_rng(1)
    torch.manual_seed(0)
    network = make_network("mlp", (5,), A)
    some = storage(num_minibatches=1)
    some.put([make_rollout(rng)])
    batch = some.next()
    loss = ppo_loss(network, batch, 0.25, clip_coef=0.2, ent_coef=0.03, vf_coef=0.7)
    logits, values = (x.detach().numpy() for x in network(batch.obs))
    log_policy = np.asarray(jax.nn.log_softmax(logits))
    ratio = np.exp(log_policy[np.arange(len(values)), batch.actions] - batch.logprobs.numpy())
    advantages = batch.advantages.numpy()
    advantages = (advantages - advantages.mean()) / (advantages.std(ddof=1) + 1e-8)
    policy_loss = rlax.clipped_surrogate_pg_loss(jnp.asarray(ratio), jnp.asarray(advantages), 0.15)
    value_loss = 0.5 * np.square(values - batch.returns.numpy()).mean()
    entropy = -(np.exp(log_policy) * log_policy).sum(-1).mean()
    np.testing.assert_allclose(loss["policy_loss"].item(), policy_loss, atol=1e-5)
    np.testing.assert_allclose(loss["value_loss"].item(), value_loss, rtol=1e-5)
    total = policy_loss + 0.7 * value_loss - 0.03 * entropy
    np.testing.assert_allclose(loss["loss"].item(), total, rtol=1e-5)


def test_the_clipped_surrogate_has_a_gradient_only_where_it_is_not_clipped():
    ratio = torch.tensor([0.5, 0.5, 1.0, 1.5, 1.5], requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0])
    values = clipped_surrogate(ratio, advantages, 0.2)
    np.testing.assert_allclose(values.detach(), [0.5, -0.8, 1.0, 1.2, -1.5], rtol=1e-6)
    values.sum().backward()
    assert ratio.grad.tolist() == [1.0, 0.0, 1.0, 0.0, -1.0]


def test_vtrace_loss_is_impala_s_and_of_several_rollouts_the_mean_over_their_steps():
    rng = np.random.default_rng(2)
    torch.manual_seed(0)
    network = make_network("mlp", (5,), A)
    rollouts = [make_rollout(rng), make_rollout(rng, length=4)]
    loss = partial(vtrace_loss, gamma=0.9, ent_coef=0.03, vf_coef=0.7, clip_rewards=True)
    counts = [(~r.resets).sum() for r in rollouts]
    parts = [loss(network, [r], 0.0)["loss"].item() for r in rollouts]
    first = rollouts[0]
    logits, values = network(torch.from_numpy(first.obs).flatten(0, 1))
    real = torch.from_numpy(~first.resets).float()
    expected = impala_loss(
        logits.view(T + 1, B, A)[:-1], values.view(T + 1, B), torch.from_numpy(first.logits),
        torch.from_numpy(first.actions), torch.from_numpy(first.rewards.clip(-1, 1)),
        torch.from_numpy(first.dones), real, discounting=0.9, baseline_cost=0.7, entropy_cost=0.03,
    ).loss  # fmt: skip
    np.testing.assert_allclose(parts[0], (expected / counts[0]).item(), rtol=1e-5)
    whole = loss(network, rollouts, 0.0)["loss"].item()
    np.testing.assert_allclose(whole, np.average(parts, weights=counts), rtol=1e-5)
    some = VTraceStorage(0)
    some.put(rollouts)
    assert some.next() == rollouts
    assert some.next() is None


BOUNDS = ActionBounds((-2.0, -1.0), (2.0, 3.0))


@pytest.fixture
def control():
    torch.manual_seed(3)
    network = SACNetwork(5, BOUNDS, (16,), 0.3)
    with torch.no_grad():
        for target in network.targets.parameters():
            target += 0.1 * torch.randn_like(target)
    return network


def test_sac_s_log_probabilities_are_those_of_a_squashed_gaussian(control):
    obs, noise = torch.randn(7, 5), torch.randn(7, 2)
    actions, logprob = control.sample(obs, noise)
    mean, log_std = control.policy(obs).chunk(2, dim=-1)
    std = torch.exp(-5 + 3.5 * (torch.tanh(log_std) + 1))
    squash = [
        distributions.TanhTransform(),
        distributions.AffineTransform(torch.tensor([0.0, 1.0]), torch.tensor([2.0, 2.0])),
    ]
    policy = distributions.TransformedDistribution(distributions.Normal(mean, std), squash)
    scaled = control.middle + control.scale * actions
    np.testing.assert_allclose(
        logprob.detach(), policy.log_prob(scaled).sum(-1).detach(), rtol=1e-3, atol=1e-3
    )


def transitions(network):
    rng = np.random.default_rng(4)
    draw = lambda *shape: torch.from_numpy(rng.standard_normal(shape, np.float32))  # noqa: E731
    return Transitions(
        draw(8, 5), draw(8, 2).clamp(-1, 1), draw(8), draw(8, 5), 0.9 * (torch.arange(8) % 3 != 0).float(),
        draw(2, 8, 2), torch.ones(8),
    )  # fmt: skip


def test_each_of_sac_s_losses_moves_its_own_parameters_alone(control):
    batch = transitions(control)
    losses = sac_loss(control, batch, 0.0)
    parts = {
        "value_loss": control.critics.parameters(),
        "policy_loss": control.policy.parameters(),
        "alpha_loss": [control.log_alpha],
    }
    learned = [p for p in control.parameters() if p.requires_grad]
    owners = {id(p): name for name, group in parts.items() for p in group}
    assert len(owners) == len(learned)
    for name in parts:
        gradients = torch.autograd.grad(losses[name], learned, allow_unused=True, retain_graph=True)
        for parameter, gradient in zip(learned, gradients, strict=True):
            moved = gradient is not None and gradient.abs().sum() > 0
            assert moved == (owners[id(parameter)] == name)


def test_sac_s_policy_and_temperature_losses_are_those_of_the_paper(control):
    """A policy loss with the smaller of two critics; the entropy sought is minus two components."""
    batch = transitions(control)
    with torch.no_grad():
        actions, logprob = control.sample(batch.obs, batch.noise[0])
        inputs = torch.cat([batch.obs, actions], -1)
        lower = torch.minimum(*(critic(inputs)[:, 0] for critic in control.critics))
    losses = sac_loss(control, batch, 0.0)
    policy_loss = (0.3 * logprob - lower).mean().item()
    alpha_loss = (-0.3 * (logprob - 2)).mean().item()
    np.testing.assert_allclose(losses["policy_loss"].item(), policy_loss, rtol=1e-5)
    np.testing.assert_allclose(losses["alpha_loss"].item(), alpha_loss, rtol=1e-5)


def test_sac_s_targets_have_a_value_after_a_cut_and_none_after_an_end(control):
    batch = transitions(control)
    with torch.no_grad():
        action, logprob = control.sample(batch.next_obs, batch.noise[1])
        inputs = torch.cat([batch.next_obs, action], -1)
        lower = torch.minimum(*(target(inputs)[:, 0] for target in control.targets))
        goal = batch.rewards + torch.where(
            torch.arange(8) % 3 == 0, 0, 0.9 * (lower - 0.3 * logprob)
        )
        inputs = torch.cat([batch.obs, (batch.actions - control.middle) / control.scale], -1)
        errors = [(critic(inputs)[:, 0] - goal).square().mean() for critic in control.critics]
    loss = sac_loss(control, batch, 0.0)["value_loss"]
    np.testing.assert_allclose(loss.item(), sum(errors).item(), rtol=1e-5)


def test_target_critics_follow_by_a_share(control):
    before = copy.deepcopy(control.targets)
    move_targets(control, polyak=0.75)
    for old, critic, new in zip(
        before.parameters(), control.critics.parameters(), control.targets.parameters(), strict=True
    ):
        np.testing.assert_allclose(new, (0.75 * old + 0.25 * critic).detach(), rtol=1e-5, atol=1e-6)


def test_the_replay_storage_keeps_the_newest_real_transitions():
    rng = np.random.default_rng(5)
    cut = partial(n_step_transitions, n=1, gamma=0.9)
    some = ReplayStorage(0, cut=cut, capacity=20, first=16, batch_size=200, num_updates=2)
    rollouts = [make_rollout(rng) for _ in range(4)]
    for number, rollout in enumerate(rollouts):
        rollout.rewards[:] = 100 * number + np.arange(T * B).reshape(T, B)
        rollout = without_values(rollout)
        some.put([rollout])
        if not number:
            assert (~rollout.resets).sum() < 16
            assert some.next() is None  # not enough yet
    rewards = [r for rollout in rollouts for r in rollout.rewards[~rollout.resets].tolist()]
    batches = batches_of(some)
    assert len(batches) == 2
    assert set(batches[0].rewards.tolist()) == set(rewards[-20:])
    # observations belong to their rewards
    number, step = divmod(int(batches[0].rewards[0]), 100)
    obs = rollouts[number].obs[step // B, step % B]
    assert (batches[0].obs[0].numpy() == obs).all()
    assert (batches[0].next_obs[0].numpy() == rollouts[number].obs[step // B + 1, step % B]).all()


def test_the_replay_storage_gives_as_many_batches_for_rollouts_together_as_one_by_one():
    rng = np.random.default_rng(6)
    cut = partial(n_step_transitions, n=1, gamma=0.9)
    some = ReplayStorage(0, cut=cut, capacity=200, first=16, batch_size=4, num_updates=3)
    some.put([without_values(make_rollout(rng)) for _ in range(4)])
    assert len(batches_of(some)) == 4 * 3
    some.put([without_values(make_rollout(rng))])
    assert len(batches_of(some)) == 3


@pytest.mark.parametrize("size", [1, 2, 7, 64])
def test_a_sum_tree_finds_what_cumulative_sums_do(size):
    rng = np.random.default_rng(size)
    tree, plain = SumTree(size), np.zeros(size)
    for _ in range(20):
        places = rng.integers(size, size=5)
        values = rng.random(5) * (rng.random(5) < 0.8)
        tree.set(places, values)
        plain[places] = values
        assert (tree[np.arange(size)] == plain).all()
        assert tree.total == pytest.approx(plain.sum())
        sums = rng.random(50) * plain.sum() * 0.999
        if plain.sum():
            expected = np.searchsorted(np.cumsum(plain), sums, side="right")
            np.testing.assert_array_equal(tree.find(sums), expected)


def test_transitions_are_drawn_in_proportion_to_their_errors_and_weighted_for_it():
    some = ReplayStorage(
        0, cut=partial(n_step_transitions, n=1, gamma=0.9), capacity=32, first=1, batch_size=20_000,
        num_updates=2, priority_exponent=0.5, importance_exponent=0.4,
    )  # fmt: skip
    rollout = make_rollout(np.random.default_rng(6), length=4)
    rollout = without_values(rollout)
    rollout.resets[:] = False
    rollout.rewards[:] = np.arange(4 * B).reshape(4, B)
    some.put([rollout])
    first = some.next()
    assert (first.weights == 1).all()  # new ones are all as likely
    counts = np.bincount(first.rewards.long(), minlength=12)
    assert (abs(counts / 20_000 - 1 / 12) < 0.01).all()
    errors = 1 + first.rewards  # of each, by its number
    some.reprioritize(errors)
    batch = some.next()
    shares = np.sqrt(1 + np.arange(12))
    shares /= shares.sum()
    counts = np.bincount(batch.rewards.long(), minlength=12)
    np.testing.assert_allclose(counts / 20_000, shares, atol=0.01)
    weights = (12 * shares) ** -0.4
    expected = (weights / weights.max())[batch.rewards.long().numpy()]
    np.testing.assert_allclose(batch.weights, expected, rtol=1e-4)
    some.put([rollout])  # as likely as the most likely so far
    counts = np.bincount(some.next().rewards.long(), minlength=12)
    shares = np.sqrt(1 + np.arange(12)) + np.sqrt(12)
    np.testing.assert_allclose(counts / 20_000, shares / shares.sum(), atol=0.01)


def test_weights_count_in_the_critics_loss_alone_and_errors_are_theirs(control):
    batch = transitions(control)
    plain = sac_loss(control, batch, 0.0)
    half = sac_loss(control, batch._replace(weights=torch.full((8,), 0.5)), 0.0)
    assert half["value_loss"].item() == pytest.approx(plain["value_loss"].item() / 2)
    assert half["policy_loss"].item() == plain["policy_loss"].item()
    assert plain["errors"].shape == (8,)
    one = torch.zeros(8)
    one[3] = 8.0
    only = sac_loss(control, batch._replace(weights=one), 0.0)
    # the squares of two critics' errors, whose mean size is what is returned
    assert only["value_loss"].item() >= 2 * plain["errors"][3].item() ** 2 - 1e-5


def test_parameters_travel_whole(control):
    other = SACNetwork(5, BOUNDS, (16,), 0.5)
    load_parameters(other, [array.copy() for array in parameters_of(control)])
    for mine, theirs in zip(
        control.state_dict().values(), other.state_dict().values(), strict=True
    ):
        assert (mine == theirs).all()


# Schemes, on one Ray for all tests.


@pytest.fixture(scope="module")
def on_ray():
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    import ray

    ray.init(
        address="local", num_cpus=16, include_dashboard=False, logging_level="ERROR",
        object_store_memory=1 << 28, runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}},
    )  # fmt: skip
    yield ray
    ray.shutdown()


SMALL = {
    "env_id": "CartPole-v1", "num_envs": 4, "num_steps": 16, "num_minibatches": 2, "update_epochs": 2,
    "total_timesteps": 10_000,
}  # fmt: skip


@pytest.fixture
def updater(tmp_path):
    """Return what makes the update worker of a scheme; its workers end with the test."""
    made = []

    def make(**changes):
        plan = options.prepare(parsed(options.Args, **(SMALL | {"runs_dir": tmp_path} | changes)))
        made.append(make_update_worker(plan))
        return made[-1]

    yield make
    for worker in made:
        worker.end()


def test_a_single_thread_needs_no_ray_and_gives_the_same_bits_again(updater):
    results = []
    for _ in range(2):
        worker = updater()
        updates = [worker.step() for _ in range(12)]
        results.append([array.copy() for array in parameters_of(worker.network)])
        assert [u.version for u in updates] == list(range(2, 14))
        assert updates[-1].steps == 3 * 64
        assert all(g.version == u.version - 1 for u in updates for g in u.gradients)
        assert [len(u.gradients[0].collected) for u in updates] == [1, 0, 0, 0] * 3
    for first, second in zip(*results, strict=True):
        assert (first == second).all()


def test_every_rollout_is_learned_from_whole_and_with_one_learning_rate(updater):
    worker = updater(total_timesteps=128, anneal=True)
    updates = []
    while not worker.done:
        updates.append(worker.step())
    assert [u.steps for u in updates] == [64] * 4 + [128] * 4
    rate = updates[0].learning_rate
    assert [u.learning_rate for u in updates] == [rate] * 4 + [rate / 2] * 4


def test_sac_acts_at_random_until_its_first_update_and_never_again(control):
    network, obs = control, np.zeros((3, 5), np.float32)
    act, states = actors.act_by_sampling, np.empty((3, 0), np.float32)
    with torch.no_grad():
        first = act(network, obs, states, np.random.default_rng(7), Moment(1, 0, 1, 0)).actions
        later = act(network, obs, states, np.random.default_rng(7), Moment(2, 0, 1, 0)).actions
    evenly = np.random.default_rng(7).uniform(-1, 1, first.shape)
    scale, middle = network.scale.numpy(), network.middle.numpy()
    np.testing.assert_allclose(first, middle + scale * evenly, rtol=1e-6)
    noise = torch.from_numpy(np.random.default_rng(7).standard_normal(first.shape, np.float32))
    with torch.no_grad():
        drawn = network.sample(torch.from_numpy(obs), noise)[0].numpy()
    np.testing.assert_allclose(later, middle + scale * drawn, rtol=1e-6)


def test_sac_updates_policy_critics_and_temperature(updater):
    worker = updater(
        agent="sac", env_id="Pendulum-v1", num_envs=2, num_steps=8, start_steps=64, batch_size=16,
        num_updates=4,
    )  # fmt: skip
    before = [array.copy() for array in parameters_of(worker.network)]
    updates = [worker.step() for _ in range(8)]
    assert updates[-1].steps == 64 + 16  # what fills the storage, and one rollout more
    changed = {
        name.split(".")[0]
        for name, old, new in zip(
            worker.network.state_dict(), before, parameters_of(worker.network), strict=True
        )
        if (old != new).any()
    }
    assert changed == {"policy", "critics", "targets", "log_alpha"}


def test_waiting_for_rollouts_and_computing_gradients_are_counted_apart(updater):
    worker = updater()
    inner = worker._workers._local
    algorithm = inner._agent.algorithm

    def slow_loss(*args):
        time.sleep(0.1)
        return algorithm.loss(*args)

    inner._agent = inner._agent._replace(algorithm=algorithm._replace(loss=slow_loss))
    rows = []
    recorder = Recorder(SimpleNamespace(write=lambda row, *_: rows.append(row)))
    for _ in range(8):
        recorder.write(worker.step(), worker.network, worker.done)
    for row in rows:
        busy = row.rollout_queue_get_time + row.training_time
        assert row.training_time >= 0.1
        assert busy <= row.update_seconds + 1e-3
    # a rollout is learned from four times, and waited for once
    assert [row.rollout_queue_get_time > 1e-3 for row in rows] == [True, False, False, False] * 2


@pytest.mark.slow
@pytest.mark.parametrize("agent", ["ppo", "impala"])
def test_atari_is_learned_from(updater, agent):
    worker = updater(agent=agent, env_id="Breakout-v5", num_envs=2, num_steps=8)
    before = [array.copy() for array in parameters_of(worker.network)]
    for _ in range(2):
        (gradient,) = worker.step().gradients
        assert np.isfinite(gradient.losses["loss"])
    for old, new in zip(before, parameters_of(worker.network), strict=True):
        assert (old != new).any()


def test_nothing_lags_where_nothing_goes_on_beside_it(updater):
    worker = updater(scheme="async-rapid", gradient_workers=0, collection_workers=0)
    updates = [worker.step() for _ in range(12)]
    assert all(g.version == u.version - 1 for u in updates for g in u.gradients)
    collected = [(u.version - 1, c) for u in updates for g in u.gradients for c in g.collected]
    assert len(collected) == 3
    assert all(c.version == version for version, c in collected)


@pytest.mark.slow
def test_synchronous_workers_have_no_lag_and_their_mean_gradient_is_applied(on_ray, updater):
    results = []
    for _ in range(2):
        worker = updater(scheme="dppo", collection_workers=1)
        before = [p.detach().numpy().copy() for p in worker.network.parameters()]
        update = worker.step()
        assert len(update.gradients) == 2
        mean = [
            np.mean(parts, axis=0)
            for parts in zip(*(g.gradients for g in update.gradients), strict=True)
        ]
        norm = np.sqrt(sum(np.square(part).sum() for part in mean))
        assert update.grad_norm == pytest.approx(norm, rel=1e-5)
        # Adam's first step: its learning rate, in the direction of the clipped gradient
        for old, new, gradient in zip(before, worker.network.parameters(), mean, strict=True):
            clipped = gradient * min(1.0, 0.5 / norm)
            expected = old - 2.5e-4 * clipped / (np.abs(clipped) + 1e-5)
            np.testing.assert_allclose(new.detach(), expected, atol=1e-6)
        updates = [update, *(worker.step() for _ in range(7))]
        collected = [(u.version, c) for u in updates for g in u.gradients for c in g.collected]
        assert sorted({c.worker for _, c in collected}) == [0, 1]
        assert all(c.version == version - 1 for version, c in collected)
        assert updates[-1].steps == 2 * 2 * 64
        results.append([array.copy() for array in parameters_of(worker.network)])
    for first, second in zip(*results, strict=True):
        assert (first == second).all()


@pytest.mark.soak
def test_asynchronous_collection_lags_and_asynchronous_gradients_are_late(on_ray, updater):
    def step_until_late(worker, versions_of):
        """Step on until something was late: while a worker is still starting, nobody is."""
        deadline = time.monotonic() + 300
        updates, late = [], []
        while len(updates) < 30 or max(late) < 1:
            assert time.monotonic() < deadline
            updates.append(worker.step())
            late += [updates[-1].version - 1 - version for version in versions_of(updates[-1])]
        assert min(late) >= 0
        assert len(late) == len(updates)
        assert all(len(u.gradients) == 1 for u in updates)
        return updates

    # two workers, of which one collects while the other is learned from
    updates = step_until_late(
        updater(scheme="impala", agent="impala"),
        lambda u: [c.version for g in u.gradients for c in g.collected],
    )
    assert all(g.version == u.version - 1 for u in updates for g in u.gradients)

    step_until_late(updater(scheme="appo"), lambda u: [g.version for g in u.gradients])


@pytest.mark.slow
def test_asynchronous_workers_learn_from_all_that_they_have_collected(on_ray, updater):
    worker = updater(scheme="appo", total_timesteps=512)
    updates = []
    while not worker.done:
        updates.append(worker.step())
    rollouts = sum(len(g.collected) for u in updates for g in u.gradients)
    assert worker.steps == worker._learned == 64 * rollouts >= 512
    assert len(updates) == 4 * rollouts  # 2 epochs of 2 minibatches


class Scripted:
    """In place of two asynchronous gradient workers: answers in a given order, each of a rollout's two."""

    size, replaced = 2, ()

    def __init__(self, network, order):
        self.zeros = [np.zeros_like(p.detach().numpy()) for p in network.parameters()]
        self.order, self.asked, self.answers = iter(order), set(), [0, 0]

    def share(self, value):
        return value

    def ask(self, index, *arguments):
        self.asked.add(index)

    def take(self):
        index = next(self.order)
        self.asked.remove(index)  # whoever was not asked cannot answer
        second = self.answers[index] % 2 == 1
        self.answers[index] += 1
        collected = [] if second else [Collected(None, index, 1, 64, [], 0.0, 0.0, 0.0, 0.0, 0.0)]
        return index, Gradient(self.zeros, 1, {}, collected, 0.0, 0.0, second, [])

    def end(self):
        pass


def test_an_asynchronous_run_ends_when_each_worker_has_learned_from_its_rollout(tmp_path):
    agent = options.prepare(parsed(options.Args, **SMALL, runs_dir=tmp_path)).agent
    pool = Scripted(agent.make_network(), [0, 0, 1, 0, 0, 1])
    worker = UpdateWorker(
        agent,
        pool,
        asynchronous=True,
        preemption_threshold=1.0,
        total_steps=128,
        max_grad_norm=1.0,
        anneal=True,
    )
    updates, done = [], []
    while not worker.done:
        updates.append(worker.step())
        done.append(worker.done)
    # 128 steps are there with the third answer; worker 0 has a rollout left, and 1 the rest of its own
    assert [u.steps for u in updates] == [64, 64, 128, 192, 192, 192]
    assert done == [False] * 5 + [True]
    # falls by what was learned from to the end, not while that goes on
    rate = updates[0].learning_rate
    assert [u.learning_rate / rate for u in updates] == [1, 1, 0.5, 0.5, 0.5, 0]


class InStep:
    """A pool of two synchronous workers; `exhausted` has, for each update, who learned from a last batch."""

    size = 2

    def __init__(self, network, exhausted):
        self.zeros = [np.zeros(p.shape, np.float32) for p in network.parameters()]
        self.exhausted, self.collecting, self.replaced = list(exhausted), [], []

    def share(self, value):
        return value

    def ask(self, index, method, *arguments):
        if method == "collect":
            self.collecting[-1].append(index)

    def take_all(self, threshold=1.0, preempt=None):
        if preempt is not None:
            return [None] * len(self.collecting[-1])
        ends = self.exhausted.pop(0)
        return [Gradient(self.zeros, 1, {}, [], 0.0, 0.0, end, []) for end in ends]


def test_only_workers_without_a_batch_collect_and_preempt_each_other(tmp_path):
    """A replaced worker is out of step: it collects when the other learns."""
    agent = options.prepare(parsed(options.Args, **SMALL, runs_dir=tmp_path)).agent
    pool = InStep(agent.make_network(), [(True, True), (False, True), (True, False), (True, True)])
    worker = UpdateWorker(
        agent,
        pool,
        asynchronous=False,
        preemption_threshold=0.5,
        total_steps=10**6,
        max_grad_norm=1.0,
        anneal=False,
    )
    for _ in range(4):
        pool.collecting.append([])
        worker.step()
    assert pool.collecting == [[0, 1], [0, 1], [1], [0]]


class Sleeper:
    """A worker that dies, fails or sleeps as it is asked to."""

    def __init__(self, index, incarnation):
        self.index, self.incarnation, self.told = index, incarnation, False

    def pid(self):
        return os.getpid()

    def fail(self):
        raise ValueError(f"planted in worker {self.index}")

    def die(self):
        os._exit(1)

    def answer(self, seconds):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self.told:
            time.sleep(0.01)
        return self.index, self.incarnation

    def tell(self):
        self.told = True

    def end(self):
        pass


@pytest.mark.slow
def test_a_dead_worker_is_replaced_and_asked_again(on_ray):
    pool = WorkerPool("test", Sleeper, 2, {"num_cpus": 0})
    for index in range(2):
        pool.ask(index, "pid")
    pids = pool.take_all()
    pool.ask(0, "answer", 0.0)
    pool.ask(1, "answer", 2.0)
    assert pool.take() == (0, (0, 0))
    os.kill(pids[1], signal.SIGKILL)
    pool.ask(0, "answer", 0.0)
    assert pool.take() == (0, (0, 0))  # the living are not kept
    assert pool.take() == (1, (1, 1))
    assert pool.replaced == ["test worker 1 has died, and was replaced"]
    pool.end()


@pytest.mark.slow
def test_a_worker_s_error_is_no_death(on_ray):
    pool = WorkerPool("test", Sleeper, 1, {"num_cpus": 0})
    pool.ask(0, "fail")
    with pytest.raises(ValueError, match="planted in worker 0"):
        pool.take()
    assert pool.replaced == []
    pool.end()


@pytest.mark.soak
def test_a_worker_that_dies_again_and_again_ends_the_run(on_ray):
    pool = WorkerPool("test", Sleeper, 1, {"num_cpus": 0})
    pool.ask(0, "die")
    with pytest.raises(RuntimeError, match="test worker 0 has died 3 times in a row: "):
        pool.take()
    pool.end()


def refuse_to_start(index, incarnation):
    raise ImportError("planted: no module named gym")


@pytest.mark.slow
def test_a_worker_that_cannot_be_made_is_not_made_again_and_again(on_ray):
    pool = WorkerPool("test", refuse_to_start, 1, {"num_cpus": 0})
    pool.ask(0, "pid")
    with pytest.raises(on_ray.exceptions.RayActorError, match="planted: no module named gym"):
        pool.take()
    assert pool.replaced == []
    pool.end()


def test_a_rollout_preempted_before_it_begins_is_short_and_waiting_is_measured(tmp_path):
    plan = options.prepare(parsed(options.Args, **SMALL, runs_dir=tmp_path))
    envs = EnvOptions("CartPole-v1", 1, 4, 16, "machado", 1)
    worker = CollectionWorker(plan.agent, envs, 0, 0)
    parameters = parameters_of(plan.agent.make_network())
    found = []
    for version in (1, 2, 2, 3):
        if version == 2 and len(found) == 1:
            worker.preempt(2)
        if version == 3:
            time.sleep(0.2)
        found.append(worker.collect(parameters, version))
    worker.end()
    # once, though the next rollout may be of the same version (SAC's first)
    assert [len(one.rollout.rewards) for one in found] == [16, 4, 16, 16]
    assert found[0].wait_time == 0
    assert found[3].wait_time >= 0.2  # idle before the request for version 3
    assert found[1].wait_time < found[3].wait_time


@pytest.mark.slow
def test_the_others_are_preempted_at_the_threshold(on_ray):
    pool = WorkerPool("test", Sleeper, 3, {"num_cpus": 0})
    for index in range(3):
        pool.ask(index, "pid")
    pool.take_all()  # all have started, which may take long
    for index, seconds in enumerate((0.0, 0.2, 60.0)):
        pool.ask(index, "answer", seconds)
    begin = time.monotonic()
    assert pool.take_all(0.6, ("tell",)) == [(0, 0), (1, 0), (2, 0)]
    assert time.monotonic() - begin < 30
    pool.end()


# Whole runs.

SHORT = ("--env-id", "CartPole-v1", "--num-envs", 4)


def start(runs_dir, *args, num_steps=16):
    words = [sys.executable, "-m", "baselines.worker_schemes", *SHORT, "--num-steps", num_steps]
    words += ["--runs-dir", runs_dir, *args]
    return subprocess.Popen(
        list(map(str, words)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )


def num_updates(runs_dir):
    return sum(p.read_bytes().count(b"\n") for p in runs_dir.glob("default/*/updates.jsonl"))


def num_replaced(runs_dir):
    return sum(u.num_replaced for u in record_in(runs_dir).updates())


def wait_for(process, condition):
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def workers_of(process, kind):
    """Return the processes of some workers."""
    tree = psutil.Process(process.pid).children(recursive=True)
    return [p for p in tree if p.cmdline() and p.cmdline()[0].startswith(f"ray::{kind}Worker")]


def record_in(runs_dir):
    (folder,) = runs_dir.glob("default/*__*")
    return read_run(folder)


@pytest.mark.soak
def test_a_killed_worker_of_either_kind_is_replaced_and_reported(tmp_path):
    process = start(
        tmp_path, "--gradient-workers", 1, "--collection-workers", 1, "--total-timesteps", 10_000,
        "--gradients", "asynchronous", "--collection", "asynchronous",
    )  # fmt: skip
    wait_for(process, lambda: num_updates(tmp_path) > 20)
    for reported, kind in enumerate(("Collection", "Gradient"), start=1):
        workers = workers_of(process, kind)
        assert len(workers) == 1
        workers[0].kill()
        wait_for(process, lambda n=reported: num_replaced(tmp_path) == n)
    printed, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    for kind in ("collection", "gradient"):
        assert re.search(rf"{kind} worker \d has died, and was replaced", printed), printed
    record = record_in(tmp_path)
    assert record.completed
    updates, rollouts = record.updates(), record.rollouts()
    assert sum(u.num_replaced for u in updates) == 2
    assert [u.version for u in updates] == list(range(2, len(updates) + 2))
    # no rollout is learned from twice, though numbers begin anew with a newcomer
    assert sum(r.steps for r in rollouts) == updates[-1].step >= 10_000
    assert all(r.learner_version >= r.version_last for r in rollouts)
    assert all(u.version - 1 >= u.gradient_version for u in updates)


@pytest.mark.soak
def test_the_record_is_described_and_a_preempted_rollout_is_shorter(tmp_path):
    process = start(tmp_path, "--scheme", "ddppo", "--total-timesteps", 40_000, num_steps=512)
    wait_for(process, lambda: num_updates(tmp_path) > 2)
    slow = workers_of(process, "Gradient")[0]
    with contextlib.suppress(psutil.NoSuchProcess):
        while process.poll() is None:
            slow.suspend()
            time.sleep(0.2)
            slow.resume()
            time.sleep(0.2)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    record = record_in(tmp_path)
    described = set(re.findall(r"`(\w+)`", (ROOT / "docs" / "run-record.md").read_text()))
    assert set(record.info.hardware) <= described
    assert record.path.name == "schemes_ppo-ddppo__g2-c0__CartPole-v1__s1"
    # gradient workers wait for rollouts and compute in turn, so no second counts twice
    for update in record.updates():
        busy = update.rollout_queue_get_time + update.training_time
        assert busy <= update.update_seconds + 1e-3
    # and so do collection workers: collect, and wait for the next parameters
    spent = sum(u.rollout_time + u.params_queue_get_time for u in record.updates())
    assert spent <= record.updates()[-1].wall_time
    steps = [r.steps for r in record.rollouts()]
    assert max(steps) == 512 * 4
    assert 512 <= min(steps) < 512 * 4  # a quarter of a rollout at least
    assert record.updates()[-1].fingerprint


@pytest.mark.soak
def test_sac_learns_from_several_collection_workers_with_priorities(tmp_path):
    process = start(
        tmp_path, "--agent", "sac", "--scheme", "ape-x", "--env-id", "Pendulum-v1", "--start-steps", 512,
        "--num-updates", 8, "--total-timesteps", 16_384, num_steps=64,
    )  # fmt: skip
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    record = record_in(tmp_path)
    assert record.info.hyperparameters["priority_exponent"] == 0.6
    assert {r.actor for r in record.rollouts()} == {0, 1}
    updates = record.updates()
    assert updates[-1].step >= 16_384
    assert updates[-1].value_loss != updates[0].value_loss


class Placed:
    """A worker that says which Ray node it is on, and its own workers are."""

    def __init__(self, index, incarnation):
        self.workers = WorkerPool("inner", NodeName, 2, {"num_cpus": 1})

    def nodes(self):
        for index in range(2):
            self.workers.ask(index, "node")
        return NodeName().node(), self.workers.take_all()


class NodeName:
    def __init__(self, *_):
        pass

    def node(self):
        import ray

        return ray.get_runtime_context().get_node_id()


def place_on_nodes(folder):
    plan = options.prepare(
        parsed(options.Args, **SMALL, runs_dir=folder, scheme="rapid", local_nodes=2)
    )
    with ray_for(plan):
        pool = WorkerPool("outer", Placed, 2, {"num_cpus": 1}, make_places(plan))
        for index in range(2):
            pool.ask(index, "nodes")
        print(json.dumps(pool.take_all()))


@pytest.mark.soak
def test_each_node_has_a_gradient_worker_and_its_collection_workers(tmp_path):
    # in a process of its own: this one may be connected to another Ray
    code = f"from tests.baselines.test_worker_schemes import *; place_on_nodes({str(tmp_path)!r})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=300
    )
    assert done.returncode == 0, done.stderr
    (one, ones), (two, twos) = json.loads(done.stdout.splitlines()[-1])
    assert one != two
    assert ones == [one, one]
    assert twos == [two, two]


@pytest.mark.slow
def test_a_cluster_that_is_there_is_joined_and_left_running(on_ray, tmp_path):
    from ray._private.state import jobs  # the public `list_jobs` asks a dashboard

    address = on_ray.get_runtime_context().gcs_address
    before = len(jobs())
    words = ("--scheme", "dppo", "--total-timesteps", 512, "--ray-address", address)
    process = start(tmp_path, *words)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    record = record_in(tmp_path)
    assert record.completed
    assert record.info.hardware["ray_address"] == address
    assert len(jobs()) == before + 1  # the run was this cluster's, and not one of its own
    pool = WorkerPool("test", Sleeper, 1, {"num_cpus": 1})
    pool.ask(0, "answer", 0.0)
    assert pool.take() == (0, (0, 0))
    pool.end()


@pytest.mark.soak
def test_a_run_without_an_address_joins_no_cluster(on_ray, tmp_path, monkeypatch):
    from ray._private.state import jobs

    monkeypatch.setenv("RAY_ADDRESS", on_ray.get_runtime_context().gcs_address)
    before = len(jobs())
    process = start(tmp_path, "--scheme", "dppo", "--total-timesteps", 512)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert len(jobs()) == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"agent": "sac"}, "--agent sac: CartPole-v1 needs to have continuous actions"),
        ({"env_id": "HalfCheetah-v4"}, "needs discrete actions"),
        ({"network": "nature"}, "--network nature: observations are (4,); choose mlp"),
        (
            {"scheme": "appo", "preemption_threshold": 0.5},
            "--preemption-threshold 0.5: only for synchronous",
        ),
        ({"num_minibatches": 9}, "--num-minibatches 9: too many for the 64 steps"),
        (
            {"scheme": "ddppo", "num_minibatches": 3},
            "--num-minibatches 3: too many for the 16 steps of the shortest rollout",
        ),
        ({"total_timesteps": 10}, "--total-timesteps 10: a rollout holds 64 steps"),
        ({"ray_address": "auto", "local_nodes": 2}, "--local-nodes: starts a cluster on this"),
        ({"priority_exponent": 0.5}, "--priority-exponent 0.5: only with --storage per"),
        ({"storage": "per"}, "--storage per: --agent ppo takes gae, returns"),
        (
            {"agent": "dqn", "actor": "softmax"},
            "--actor softmax: --agent dqn takes epsilon-greedy, ape-x",
        ),
        ({"agent": "td3"}, "--agent td3: CartPole-v1 needs to have continuous actions"),
        ({"agent": "dqn", "env_id": "Pendulum-v1"}, "needs discrete actions"),
        (
            {
                "agent": "sac",
                "env_id": "Pendulum-v1",
                "storage": "per",
                "first_priorities": "actors",
            },
            "--first-priorities actors: --agent sac has no action values",
        ),
        (
            {"agent": "rainbow", "first_priorities": "actors"},
            "--first-priorities actors: only without a distribution",
        ),
        ({"value_range": (1.0, 1.0)}, "--value-range 1 1: the first must be smaller"),
        ({"collection_workers": -1}, "--collection-workers -1: must be 0 or more"),
        (
            {"preemption_threshold": 0.0},
            "--preemption-threshold 0.0: must be more than 0 and at most 1",
        ),
    ],
)
def test_bad_input_is_refused(tmp_path, changes, message):
    with pytest.raises(BadInput, match=re.escape(message)):
        options.prepare(parsed(options.Args, **(SMALL | {"runs_dir": tmp_path} | changes)))
    assert list(tmp_path.iterdir()) == []


def test_a_scheme_with_workers_is_refused_without_ray(tmp_path, monkeypatch):
    monkeypatch.setattr(options, "find_spec", lambda _: None)
    options.prepare(parsed(options.Args, **SMALL, runs_dir=tmp_path))  # one thread needs none
    with pytest.raises(BadInput, match="--scheme appo: Ray is not installed"):
        options.prepare(parsed(options.Args, **SMALL, runs_dir=tmp_path, scheme="appo"))


def test_schemes_are_choices_of_arguments():
    named = options.choose_scheme(options.Args(scheme="rapid"))
    said = options.Args(
        gradient_workers=2, collection_workers=2, gradients="synchronous", collection="asynchronous"
    )
    assert options.choose_scheme(said) == named
    assert options.choose_scheme(options.Args(scheme="rapid", gradient_workers=5)) == (
        named._replace(gradient_workers=5)
    )
