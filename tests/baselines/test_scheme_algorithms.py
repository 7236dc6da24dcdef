"""The algorithms of the worker schemes against rlax and closed forms, their storages and actors."""

import re
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rlax
import torch

from baselines.torch_networks import make_network
from baselines.worker_schemes import actors, options
from baselines.worker_schemes.__main__ import make_update_worker
from baselines.worker_schemes.algorithms.a2c import a2c_loss
from baselines.worker_schemes.algorithms.dqn import dqn_loss, project
from baselines.worker_schemes.algorithms.td3 import td3_loss
from baselines.worker_schemes.control import ActionBounds, DeterministicNetwork
from baselines.worker_schemes.on_policy import Steps
from baselines.worker_schemes.parts import Moment, Rollout
from baselines.worker_schemes.q_networks import DQNNetwork, NoisyLinear, QNetwork
from baselines.worker_schemes.replay import ReplayStorage, Transitions, n_step_transitions
from baselines.worker_schemes.schemes import ACTORS, ALGORITHMS, SCHEMES, STORAGES, choose_part
from baselines.worker_schemes.targets import move_targets_every
from cleanba.run.command_line import BadInput
from tests.command_lines import parsed

ROOT = Path(__file__).resolve().parents[2]
T, B, A, N = 12, 3, 4, 16
NO_STATES = np.empty((0, 0), np.float32)  # of actors without
SUPPORT = tuple(np.linspace(-2.0, 3.0, 11).tolist())


def draw(rng, *shape):
    return torch.from_numpy(rng.standard_normal(shape, np.float32))


def make_rollout(rng, terminates=True):
    dones = rng.random((T, B)) < 0.25
    return Rollout(
        obs=np.arange((T + 1) * B, dtype=np.float32).reshape(T + 1, B, 1),
        actions=rng.integers(A, size=(T, B)),
        rewards=rng.standard_normal((T, B), np.float32),
        terminated=dones & terminates,
        dones=dones,
        resets=np.concatenate([np.zeros((1, B), bool), dones[:-1]]),
        logits=rng.standard_normal((T, B, A), np.float32),
        values=rng.standard_normal((T + 1, B), np.float32),
        states=np.empty((T, B, 0), np.float32),
    )


def test_a2c_loss_agrees_with_rlax():
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    network = make_network("mlp", (5,), A)
    torch.nn.init.normal_(network.actor.weight)
    batch = Steps(
        draw(rng, N, 5), torch.from_numpy(rng.integers(A, size=N)), draw(rng, N), draw(rng, N), draw(rng, N)
    )  # fmt: skip
    losses = a2c_loss(network, batch, 0.0, ent_coef=0.03, vf_coef=0.7)
    logits, values = (jnp.asarray(x.detach().numpy()) for x in network(batch.obs))
    actions, advantages, returns = (
        jnp.asarray(x.numpy()) for x in (batch.actions, batch.advantages, batch.returns)
    )
    policy = rlax.policy_gradient_loss(logits, actions, advantages, jnp.ones(N))
    entropy = rlax.entropy_loss(logits, jnp.ones(N))
    value = jnp.mean(rlax.l2_loss(values, returns))
    assert losses["policy_loss"].item() == pytest.approx(float(policy), rel=1e-5)
    assert losses["value_loss"].item() == pytest.approx(float(value), rel=1e-5)
    assert losses["loss"].item() == pytest.approx(
        float(policy + 0.7 * value + 0.03 * entropy), rel=1e-5
    )


@pytest.mark.parametrize("n", [1, 3, 50])
@pytest.mark.parametrize("terminates", [True, False])
def test_transitions_of_n_steps_are_rlax_s_returns_with_the_true_last_observation(n, terminates):
    rollout = make_rollout(np.random.default_rng(1), terminates)
    found, errors = n_step_transitions(rollout, None, n=n, gamma=0.9)
    # bootstraps from the index of the observation, so that a return names it
    values = rollout.obs[..., 0] * 1e-3
    targets = found.rewards + found.discounts * found.next_obs[:, 0] * np.float32(1e-3)
    expected = np.zeros((T, B), np.float32)
    for b in range(B):
        t = 0
        while t < T:  # each episode by itself, without the step that only resets
            t += int(rollout.resets[t, b])
            end = t
            while end < T - 1 and not rollout.dones[end, b]:
                end += 1
            if t > end:
                break
            discounts = np.full(end - t + 1, 0.9)
            discounts[-1] *= not rollout.terminated[end, b]
            expected[t : end + 1, b] = rlax.n_step_bootstrapped_returns(
                rollout.rewards[t : end + 1, b], discounts, values[t + 1 : end + 2, b], min(n, end - t + 1)
            )  # fmt: skip
            t = end + 1
    real = ~rollout.resets
    np.testing.assert_allclose(targets, expected[real], rtol=1e-4, atol=1e-5)
    assert (found.obs == rollout.obs[:-1][real]).all()
    # the acting network's own errors, for the first priorities
    ends = found.next_obs[:, 0].astype(int)
    bootstrap = rollout.values[ends // B, ends % B]
    chosen = np.take_along_axis(rollout.logits, rollout.actions[..., None], -1)[..., 0][real]
    np.testing.assert_allclose(
        errors, abs(found.rewards + found.discounts * bootstrap - chosen), rtol=1e-5, atol=1e-6
    )


def dqn(seed=2, **changes):
    torch.manual_seed(seed)
    settings = {"dueling": False, "noisy": False, "support": (0.0,)} | changes
    network = DQNNetwork(QNetwork("mlp", (5,), A, (16, 8), **settings))
    with torch.no_grad():
        for target in network.target.parameters():
            target += 0.3 * torch.randn_like(target)
    return network


def transitions(rng, actions, size=0):
    discounts = 0.9 * (torch.arange(N) % 3 != 0).float()
    return Transitions(
        draw(rng, N, 5), actions, draw(rng, N), draw(rng, N, 5), discounts, draw(rng, 2, N, size),
        torch.from_numpy(rng.random(N, np.float32)),
    )  # fmt: skip


def discrete(rng):
    return transitions(rng, torch.from_numpy(rng.integers(A, size=N)))


def arrays(*tensors):
    return [jnp.asarray(x.detach().numpy()) for x in tensors]


@pytest.mark.parametrize("double", [False, True])
def test_dqn_loss_agrees_with_rlax(double):
    network, batch = dqn(), discrete(np.random.default_rng(3))
    losses = dqn_loss(network, batch, 0.0, double=double)
    q, q_target, q_online = arrays(
        *(part(obs)[..., 0] for part, obs in (
            (network.online, batch.obs), (network.target, batch.next_obs), (network.online, batch.next_obs),
        ))
    )  # fmt: skip
    data = arrays(batch.actions, batch.rewards, batch.discounts)
    if double:
        errors = jax.vmap(rlax.double_q_learning)(q, *data, q_target, q_online)
    else:
        errors = jax.vmap(rlax.q_learning)(q, *data, q_target)
    np.testing.assert_allclose(losses["errors"], abs(errors), rtol=1e-4, atol=1e-5)
    loss = jnp.mean(jnp.asarray(batch.weights.numpy()) * rlax.huber_loss(errors))
    assert losses["loss"].item() == pytest.approx(float(loss), rel=1e-4)
    learned = [p for p in network.parameters() if p.requires_grad]
    assert len(learned) == len(list(network.online.parameters()))


@pytest.mark.parametrize("double", [False, True])
def test_distributional_loss_agrees_with_rlax(double):
    network = dqn(support=SUPPORT)
    batch = discrete(np.random.default_rng(4))
    losses = dqn_loss(network, batch, 0.0, double=double)
    atoms = jnp.asarray(SUPPORT, jnp.float32)
    logits, target = arrays(network.online(batch.obs), network.target(batch.next_obs))
    (online,) = arrays(network.online(batch.next_obs))
    data = arrays(batch.actions, batch.rewards, batch.discounts)
    if double:
        selector = (jax.nn.softmax(online) * atoms).sum(-1)
        expected = jax.vmap(
            rlax.categorical_double_q_learning, in_axes=(None, 0, 0, 0, 0, None, 0, 0)
        )(atoms, logits, *data, atoms, target, selector)
    else:
        expected = jax.vmap(rlax.categorical_q_learning, in_axes=(None, 0, 0, 0, 0, None, 0))(
            atoms, logits, *data, atoms, target
        )
    weighted = jnp.mean(jnp.asarray(batch.weights.numpy()) * expected)
    assert losses["loss"].item() == pytest.approx(float(weighted), rel=1e-4)
    # the divergence is what the cross-entropy exceeds the targets' own entropy by
    probs = jax.nn.softmax(target)
    chooser = jax.nn.softmax(online) if double else probs
    probs = probs[jnp.arange(N), (chooser @ atoms).argmax(-1)]
    returns = data[1][:, None] + data[2][:, None] * atoms
    targets = jax.vmap(rlax.categorical_l2_project, (0, 0, None))(returns, probs, atoms)
    entropies = -jax.scipy.special.xlogy(targets, targets).sum(-1)
    np.testing.assert_allclose(losses["errors"], expected - entropies, rtol=1e-4, atol=1e-5)


def test_projection_agrees_with_rlax_and_keeps_the_mean_inside_the_support():
    rng = np.random.default_rng(5)
    support = torch.tensor(SUPPORT)
    returns, probs = draw(rng, N, 11) * 3, draw(rng, N, 11).softmax(dim=-1)
    found = project(support, returns, probs)
    ours = jax.vmap(rlax.categorical_l2_project, in_axes=(0, 0, None))(
        *arrays(returns.sort(dim=-1).values, probs), jnp.asarray(SUPPORT)
    )
    found_sorted = project(support, returns.sort(dim=-1).values, probs)
    np.testing.assert_allclose(found_sorted, ours, rtol=1e-4, atol=1e-5)
    clipped = returns.clamp(SUPPORT[0], SUPPORT[-1])
    np.testing.assert_allclose(
        (found * support).sum(-1), (clipped * probs).sum(-1), rtol=1e-4, atol=1e-5
    )


def test_dueling_streams_give_values_plus_centred_advantages():
    network = dqn(dueling=True).online
    obs = draw(np.random.default_rng(6), N, 5)
    outputs = network(obs)[..., 0]
    features = network.trunk(obs)
    values, advantages = network.streams.value(features), network.streams.advantage(features)
    np.testing.assert_allclose(
        outputs.mean(dim=1).detach(), values[:, 0].detach(), rtol=1e-4, atol=1e-5
    )
    np.testing.assert_allclose(
        (outputs - outputs[:, :1]).detach(), (advantages - advantages[:, :1]).detach(), rtol=1e-4, atol=1e-5
    )  # fmt: skip


def test_noise_of_noisy_layers_is_factorized_and_has_their_standard_deviation():
    torch.manual_seed(7)
    layer = NoisyLinear(6, 4)
    x = torch.randn(1, 6)
    quiet = torch.nn.functional.linear(x, layer.weight, layer.bias)
    assert torch.equal(layer(x), quiet)  # before the first draw
    found = []
    for _ in range(4000):
        layer.resample()
        found.append((layer(x) - quiet)[0].detach())
    found = torch.stack(found)
    assert found.mean(dim=0).abs().max() < 0.05
    # Var of f(e) = sgn(e) sqrt|e| is E|e| = sqrt(2 / pi); weights have its square, biases itself
    variance = (2 / np.pi) ** 0.5
    inside = (layer.weight_sigma.square() * x.square()).sum(dim=1) * variance**2
    expected = inside + layer.bias_sigma.square() * variance
    np.testing.assert_allclose(found.var(dim=0), expected.detach(), rtol=0.15)


def test_ape_x_has_one_epsilon_for_each_environment_of_the_run():
    epsilons = np.concatenate([actors.ape_x_epsilons(Moment(1, w, 2, 0), 4) for w in range(2)])
    np.testing.assert_allclose(epsilons, 0.4 ** (1 + 7 * np.arange(8) / 7))
    network = dqn()
    obs = np.repeat(np.random.default_rng(8).standard_normal((1, 5), np.float32), 4, axis=0)
    with torch.no_grad():
        greedy = network.online.expected(network.online(torch.from_numpy(obs))).argmax(-1)[0].item()
        rng = np.random.default_rng(9)
        taken = [
            actors.act_with_own_epsilons(network, obs, NO_STATES, rng, Moment(1, 0, 2, 0)).actions
            for _ in range(4000)
        ]
    explored = (np.array(taken) != greedy).mean(axis=0)
    # a drawn action may be the greedy one
    np.testing.assert_allclose(explored, epsilons[:4] * (A - 1) / A, atol=0.02)


def test_epsilon_is_annealed_over_the_steps_of_all_workers():
    network, obs = dqn(), np.zeros((1, 5), np.float32)
    act = partial(actors.act_with_annealed_epsilon, last_epsilon=0.0, anneal_steps=1000)
    with torch.no_grad():
        greedy = network.online.expected(network.online(torch.from_numpy(obs))).argmax(-1).item()
        for steps, epsilon in ((0, 1.0), (250, 0.5), (500, 0.0), (10_000, 0.0)):
            rng = np.random.default_rng(10)
            moment = Moment(1, 0, 2, steps)
            taken = [act(network, obs, NO_STATES, rng, moment).actions[0] for _ in range(2000)]
            explored = np.mean(np.array(taken) != greedy)
            assert explored == pytest.approx(epsilon * (A - 1) / A, abs=0.04)


def test_an_actor_with_noisy_layers_draws_new_noise_from_its_own_generator():
    network = dqn(noisy=True)
    obs = draw(np.random.default_rng(11), 2, 5).numpy()
    moment = Moment(1, 0, 1, 0)
    with torch.no_grad():
        rng = np.random.default_rng(12)
        first, second = (
            actors.act_with_noisy_layers(network, obs, NO_STATES, rng, moment) for _ in range(2)
        )
        again = actors.act_with_noisy_layers(
            network, obs, NO_STATES, np.random.default_rng(12), moment
        )
    assert (first.logits != second.logits).any()
    assert (first.logits == again.logits).all()
    assert (first.actions == first.logits.argmax(-1)).all()


BOUNDS = ActionBounds((-2.0, -1.0), (2.0, 3.0))


def deterministic(num_critics):
    torch.manual_seed(13)
    network = DeterministicNetwork(5, BOUNDS, (16,), num_critics)
    with torch.no_grad():
        for group in (network.targets, network.target_policy):
            for target in group.parameters():
                target += 0.2 * torch.randn_like(target)
    return network


@pytest.mark.parametrize(("num_critics", "noise"), [(1, 0.0), (2, 0.4)])
def test_deterministic_losses_are_those_of_the_papers(num_critics, noise):
    network = deterministic(num_critics)
    rng = np.random.default_rng(14)
    batch = transitions(rng, 2 * draw(rng, N, 2), size=2)
    settings = {"target_noise": noise, "noise_clip": 0.3, "policy_every": 1}
    losses = td3_loss(network, batch, 0.0, **settings)
    with torch.no_grad():
        perturbed = torch.tanh(network.target_policy(batch.next_obs))
        perturbed = (perturbed + (noise * batch.noise[1]).clamp(-0.3, 0.3)).clamp(-1, 1)
        inputs = torch.cat([batch.next_obs, perturbed], -1)
        lower = torch.stack([target(inputs)[:, 0] for target in network.targets]).min(0).values
        goal = batch.rewards + batch.discounts * lower
        inputs = torch.cat([batch.obs, (batch.actions - network.middle) / network.scale], -1)
        errors = torch.stack([critic(inputs)[:, 0] - goal for critic in network.critics])
    expected = (batch.weights * errors.square()).mean(dim=1).sum()
    assert losses["value_loss"].item() == pytest.approx(expected.item(), rel=1e-5)
    np.testing.assert_allclose(losses["errors"], errors.abs().mean(0), rtol=1e-5, atol=1e-6)

    # The policy's gradient is rlax's deterministic one: it climbs the first critic.
    actions = torch.tanh(network.policy(batch.obs))
    slope = torch.autograd.grad(
        network.critics[0](torch.cat([batch.obs, actions], -1)).sum(), actions, retain_graph=True
    )[0]
    by_action = jax.grad(
        lambda a, dqda: jax.vmap(rlax.dpg_loss)(a, dqda).sum() / N  # a loss for each component
    )(*arrays(actions, slope))
    policy = list(network.policy.parameters())
    wanted = torch.autograd.grad(actions, policy, torch.from_numpy(np.array(by_action)))
    found = torch.autograd.grad(losses["policy_loss"], policy, retain_graph=True)
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-5)
    critics = list(network.critics.parameters())
    of_policy = torch.autograd.grad(losses["policy_loss"], critics, allow_unused=True)
    assert all(gradient is None for gradient in of_policy)


def test_td3_updates_policy_and_targets_every_second_time_and_critics_always(tmp_path):
    plan = options.prepare(
        parsed(
            options.Args, agent="td3", env_id="Pendulum-v1", num_envs=2, num_steps=8, start_steps=64,
            batch_size=16, num_updates=4, total_timesteps=1000, runs_dir=tmp_path,
        )
    )  # fmt: skip
    worker = make_update_worker(plan)
    groups = ("policy", "critics", "target_policy", "targets")
    seen = []
    for _ in range(4):
        before = {name: copies(getattr(worker.network, name)) for name in groups}
        worker.step()
        after = {name: copies(getattr(worker.network, name)) for name in groups}
        seen.append({name for name in groups if after[name] != before[name]})
    worker.end()
    assert seen == [{"critics"}, set(groups), {"critics"}, set(groups)]


def copies(module):
    return [parameter.detach().numpy().tobytes() for parameter in module.parameters()]


def test_the_target_network_is_copied_after_so_many_updates():
    network = dqn()
    for number in range(1, 7):
        with torch.no_grad():
            for parameter in network.online.parameters():
                parameter += 1
        before = copies(network.target)
        move_targets_every(network, every=3)
        assert (copies(network.target) != before) == (number % 3 == 0)
        assert (copies(network.target) == copies(network.online)) == (number % 3 == 0)


def filled(n=1, **changes):
    settings = {"capacity": 64, "first": 1, "batch_size": 5000, "num_updates": 4}
    cut = partial(n_step_transitions, n=n, gamma=0.9)
    storage = ReplayStorage(0, cut=cut, **(settings | changes))
    rollout = make_rollout(np.random.default_rng(15))
    rollout = rollout._replace(
        resets=np.zeros((T, B), bool), rewards=np.arange(T * B, dtype=np.float32).reshape(T, B)
    )
    storage.put([rollout])
    return storage, rollout


def test_recent_experience_is_emphasized_more_from_batch_to_batch():
    storage, _ = filled(ere_eta=0.998, ere_smallest=10)
    for k in range(1, 5):
        newest = max(int(T * B * 0.998 ** (250 * k)), 10)
        rewards = storage.next().rewards
        assert set(rewards.long().tolist()) == set(range(T * B - newest, T * B))


def test_new_transitions_have_the_priorities_of_their_actors():
    storage, rollout = filled(priority_exponent=0.5, actor_priorities=True)
    _, errors = n_step_transitions(rollout, None, n=1, gamma=0.9)
    counts = np.bincount(storage.next().rewards.long(), minlength=T * B)
    shares = np.sqrt(errors + 1e-6)
    np.testing.assert_allclose(counts / 5000, shares / shares.sum(), atol=0.015)


def test_rewards_are_clipped_before_they_are_added_up():
    storage, _ = filled(n=3, clip_rewards=True)
    assert storage.next().rewards.max() == pytest.approx(1 + 0.9 + 0.81)


def completed(agent, **said):
    return options.complete(options.Args(agent=agent, **said))


@pytest.mark.parametrize("agent", ["sac", "td3", "ddpg", "mpo", "mpc"])
def test_the_optimizer_s_epsilon_is_that_of_continuous_actions_too(tmp_path, agent):
    args = parsed(
        options.Args, agent=agent, env_id="Pendulum-v1", optimizer_eps=0.125, runs_dir=tmp_path
    )
    worker = make_update_worker(options.prepare(args))
    assert {group["eps"] for group in worker._optimizer.param_groups} == {0.125}


def test_ape_x_is_as_published_where_the_algorithm_can_be():
    ours = completed("dqn", scheme="ape-x")
    assert (ours.storage, ours.actor, ours.first_priorities) == ("per", "ape-x", "actors")
    assert (ours.double, ours.dueling, ours.n_step, ours.priority_exponent) == (True, True, 3, 0.6)
    for distributional in (
        completed("rainbow", scheme="ape-x"),
        completed("dqn", scheme="ape-x", num_atoms=51),
    ):
        assert (distributional.actor, distributional.first_priorities) == ("ape-x", "largest")
    of_sac = completed("sac", scheme="ape-x")
    assert (of_sac.storage, of_sac.actor) == ("per", "squashed-gaussian")
    assert (of_sac.first_priorities, of_sac.n_step) == ("largest", 1)
    assert completed("impala", scheme="ape-x").storage == "v-trace"
    assert completed("sac", scheme="impala").storage == "replay"
    rainbow = completed("rainbow")
    assert (rainbow.storage, rainbow.actor, rainbow.num_atoms) == ("per", "noisy", 51)


def environment(agent):
    return "Pendulum-v1" if ALGORITHMS[agent].continuous else "CartPole-v1"


@pytest.mark.parametrize("agent", ["impala", "dqn", "a2c"])
def test_rollouts_too_short_for_ppo_are_long_enough_for_others(agent, tmp_path):
    said = {"env_id": "CartPole-v1", "num_envs": 1, "num_steps": 5, "runs_dir": tmp_path}
    options.prepare(parsed(options.Args, agent=agent, **said))
    with pytest.raises(BadInput, match="too many for the 5 steps"):
        options.prepare(parsed(options.Args, agent="ppo", num_minibatches=1, **said))


SMALL = {
    "r2d2": {"burn_in": 4, "unroll": 8, "lstm_width": 5},
    "mpc": {"plans": 4, "elites": 2, "horizon": 3},
}


@pytest.mark.parametrize("agent", ALGORITHMS)
def test_every_combination_of_parts_learns_or_is_one_clear_line(agent, tmp_path):
    parts = ALGORITHMS[agent]
    for storage in STORAGES:
        for actor in ACTORS:
            said = {
                "agent": agent, "storage": storage, "actor": actor, "env_id": environment(agent),
                "num_envs": 2, "num_steps": 8, "total_timesteps": 64, "start_steps": 0, "num_updates": 2,
                "num_minibatches": 1, "batch_size": 4, "hiddens": (8,), "runs_dir": tmp_path,
            } | SMALL.get(agent, {})  # fmt: skip
            if storage == "her":
                said["env_id"] = "FetchReach-v4"
            if storage not in parts.storages or actor not in parts.actors:
                kind = "storage" if storage not in parts.storages else "actor"
                with pytest.raises(BadInput, match=f"^--{kind} .*: --agent {agent} takes "):
                    options.prepare(parsed(options.Args, **said))
                continue
            worker = make_update_worker(options.prepare(parsed(options.Args, **said)))
            before = copies(worker.network)
            (gradient,) = worker.step().gradients
            worker.end()
            assert np.isfinite(gradient.losses["loss"])
            assert copies(worker.network) != before, (storage, actor)


def test_the_table_of_combinations_in_the_docs_is_the_one_in_the_code():
    text = (ROOT / "docs" / "baselines.md").read_text()
    table = re.findall(r"^\| `(\w+)` \|[^|]*\| (`[^|]*) \| (`[^|]*) \|$", text, re.MULTILINE)
    found = {
        agent: tuple(tuple(re.findall(r"`([^`]+)`", cell)) for cell in cells)
        for agent, *cells in table
        if agent in ALGORITHMS
    }
    assert found == {agent: (p.storages, p.actors) for agent, p in ALGORITHMS.items()}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_takes_every_algorithm(scheme):
    for agent, parts in ALGORITHMS.items():
        assert choose_part(agent, "storage", None, scheme) in parts.storages
        assert choose_part(agent, "actor", None, scheme) in parts.actors
