"""The torch IMPALA is the JAX one: networks, V-trace, losses, gradients, optimizer."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import rlax
import torch

from baselines import monobeast_study
from baselines.torch_losses import impala_loss, vtrace
from baselines.torch_networks import fixup_, make_network
from cleanba import cleanba_impala, networks
from cleanba.actor_learner import GroupRollout
from cleanba.run.command_line import parse
from tests.baselines.flax_weights import copy_from_flax, flax_like

STEPS, ENVS, ACTIONS = 5, 3, 4
NETWORKS = [*(pytest.param(n, marks=pytest.mark.slow) for n in ("resnet", "nature")), "mlp"]
OBS_SHAPES = {"resnet": (4, 84, 84), "nature": (4, 84, 84), "mlp": (6,)}


def make_obs(obs_shape, rng, *shape):
    if len(obs_shape) == 1:
        return rng.normal(size=(*shape, *obs_shape)).astype(np.float32)
    return rng.integers(0, 256, (*shape, *obs_shape)).astype(np.uint8)


def make_twins(name, obs_shape, rng):
    flax_network = networks.make_network(name, ACTIONS, portable=True)
    params = jax.jit(flax_network.init)(jax.random.key(0), make_obs(obs_shape, rng, 1))
    # biases and heads away from zero, so that a lost one is seen
    leaves, tree = jax.tree.flatten(params)
    leaves = [x + 0.02 * rng.normal(size=x.shape).astype(np.float32) for x in leaves]
    params = jax.tree.unflatten(tree, leaves)
    torch_network = make_network(name, obs_shape, ACTIONS)
    copy_from_flax(params, torch_network)
    return flax_network, params, torch_network


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_agree_with_the_jax_ones(name):
    rng = np.random.default_rng(0)
    flax_network, params, torch_network = make_twins(name, OBS_SHAPES[name], rng)
    obs = make_obs(OBS_SHAPES[name], rng, 3)
    expected = jax.jit(flax_network.apply)(params, obs)
    with torch.no_grad():
        actual = torch_network(torch.from_numpy(obs))
    for e, a in zip(expected, actual, strict=True):
        np.testing.assert_allclose(a.numpy(), e, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", NETWORKS)
def test_losses_and_gradients_agree_with_the_jax_impala(name):
    rng = np.random.default_rng(1)
    # Small images for the ResNet: where two pixels that are pooled, or a unit and zero, differ by a
    # rounding error, gradients take different ways, and among a million units some do.
    obs_shape = (4, 20, 20) if name == "resnet" else OBS_SHAPES[name]
    flax_network, params, torch_network = make_twins(name, obs_shape, rng)
    rollout = GroupRollout(
        obs=make_obs(obs_shape, rng, STEPS + 1, ENVS),
        dones=rng.random((STEPS + 1, ENVS)) < 0.3,
        actions=rng.integers(0, ACTIONS, (STEPS, ENVS)).astype(np.int32),
        rewards=rng.normal(size=(STEPS, ENVS)).astype(np.float32),
        behaviour=rng.normal(size=(STEPS, ENVS, ACTIONS)).astype(np.float32),
    )
    args = cleanba_impala.Args()

    def jax_loss(params):
        obs = rollout.obs.reshape(-1, *rollout.obs.shape[2:])
        logits, values = flax_network.apply(params, obs)
        logits = logits.reshape(STEPS + 1, ENVS, -1)[:-1]
        losses = cleanba_impala.impala_loss(
            logits, values.reshape(STEPS + 1, ENVS), jax.tree.map(jnp.asarray, rollout), args
        )
        return losses.loss, losses

    expected_gradients, expected = jax.jit(jax.grad(jax_loss, has_aux=True))(params)
    logits, values = torch_network(torch.from_numpy(rollout.obs).flatten(0, 1))
    losses = impala_loss(
        logits.view(STEPS + 1, ENVS, -1)[:-1],
        values.view(STEPS + 1, ENVS),
        torch.from_numpy(rollout.behaviour),
        torch.from_numpy(rollout.actions),
        torch.from_numpy(rollout.rewards),
        torch.from_numpy(rollout.dones[1:]),
        torch.from_numpy(1 - rollout.dones[:-1].astype(np.float32)),
        discounting=args.gamma,
        baseline_cost=args.vf_coef,
        entropy_cost=args.ent_coef,
    )
    losses.loss.backward()
    for field in expected._fields:
        value = getattr(losses, field).item()
        np.testing.assert_allclose(
            value, getattr(expected, field), rtol=1e-5, atol=1e-5, err_msg=field
        )
    gradients = {n: p.grad.numpy().copy() for n, p in torch_network.named_parameters()}
    expected_gradients = flax_like(expected_gradients, torch_network)
    assert gradients.keys() == expected_gradients.keys()
    # to 1e-5 of the largest of all: sums over thousands of pixels do not cancel to the last bit
    scale = max(np.abs(g).max() for g in expected_gradients.values())
    for parameter, gradient in gradients.items():
        difference = np.abs(gradient - expected_gradients[parameter]).max()
        assert difference < 1e-5 * scale, (parameter, difference, scale)


@pytest.mark.parametrize(("clip_rho", "clip_pg_rho"), [(1.0, 1.0), (1.3, 0.8)])
def test_vtrace_agrees_with_rlax(clip_rho, clip_pg_rho):
    rng = np.random.default_rng(2)
    v_tm1, v_t, r_t = rng.normal(size=(3, 20, 7)).astype(np.float32)
    discount_t = np.where(rng.random((20, 7)) < 0.2, 0, 0.99).astype(np.float32)
    rho_tm1 = np.exp(rng.normal(size=(20, 7))).astype(np.float32)
    expected = jax.vmap(
        lambda *x: rlax.vtrace_td_error_and_advantage(
            *x, clip_rho_threshold=clip_rho, clip_pg_rho_threshold=clip_pg_rho
        ),
        in_axes=1,
        out_axes=1,
    )(v_tm1, v_t, r_t, discount_t, rho_tm1)
    inputs = map(torch.from_numpy, (v_tm1, v_t, r_t, discount_t, rho_tm1))
    actual = vtrace(*inputs, clip_rho=clip_rho, clip_pg_rho=clip_pg_rho)
    np.testing.assert_allclose(actual.errors, expected.errors, atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(actual.pg_advantage, expected.pg_advantage, atol=1e-5, rtol=1e-5)


def test_vtrace_refuses_arrays_of_different_shapes():
    with pytest.raises(ValueError, match="one shape"):
        vtrace(*[torch.zeros(3, 2)] * 4, torch.zeros(3, 1))


def test_the_optimizer_is_rmsprop_of_optax_with_its_schedule():
    args = monobeast_study.Args(total_steps=8 * 80 * 5, learning_rate=0.01)
    weights = torch.nn.Linear(3, 2)
    start = [p.detach().numpy().copy() for p in weights.parameters()]
    optimizer, schedule = monobeast_study.make_optimizer(args, weights)
    reference = optax.rmsprop(
        lambda count: args.learning_rate * (1 - count / 5), decay=0.99, eps=0.01, eps_in_sqrt=False
    )
    params, state = start, reference.init(start)
    rng = np.random.default_rng(3)
    for _ in range(5):
        gradients = [rng.normal(size=p.shape).astype(np.float32) for p in start]
        for parameter, gradient in zip(weights.parameters(), gradients, strict=True):
            parameter.grad = torch.from_numpy(gradient.copy())
        optimizer.step()
        schedule.step()
        updates, state = reference.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
    for parameter, expected in zip(weights.parameters(), params, strict=True):
        np.testing.assert_allclose(parameter.detach().numpy(), expected, atol=1e-6)
    assert optimizer.param_groups[0]["lr"] == 0


def test_the_lstm_forgets_at_the_start_of_an_episode_and_only_then():
    torch.manual_seed(0)
    network = make_network("nature", (4, 84, 84), ACTIONS, use_lstm=True)
    obs = torch.randint(0, 256, (4, 1, 4, 84, 84), dtype=torch.uint8)
    reward, action = torch.randn(4, 1), torch.tensor([[1], [2], [0], [3]])
    done = torch.tensor([[True], [False], [True], [False]])
    zero = network.initial_state(1)
    other = tuple(torch.randn_like(s) for s in zero)
    with torch.no_grad():
        whole, _, _ = network(obs, reward, done, action, zero)
        # what came before an episode does not matter to it
        begun_elsewhere, _, _ = network(obs, reward, done, action, other)
        second_half, _, _ = network(obs[2:], reward[2:], done[2:], action[2:], other)
        # within an episode, it does; and the state carries it from call to call
        first, _, state = network(obs[:1], reward[:1], done[:1], action[:1], other)
        second, _, _ = network(obs[1:2], reward[1:2], done[1:2], action[1:2], state)
        without, _, _ = network(obs[1:2], reward[1:2], done[1:2], action[1:2], zero)
    torch.testing.assert_close(whole, begun_elsewhere)
    torch.testing.assert_close(whole[2:], second_half)
    torch.testing.assert_close(whole[:2], torch.cat([first, second]))
    assert not torch.allclose(second, without, atol=1e-4)


def test_a_residual_branch_begins_as_nothing_after_fixup():
    torch.manual_seed(0)
    network = make_network("resnet", (4, 84, 84), ACTIONS)
    fixup_(network.trunk)
    x = torch.randn(2, 16, 42, 42)
    with torch.no_grad():
        torch.testing.assert_close(network.trunk.blocks[0](x), x)
    deviation = network.trunk.blocks[1][0].conv_0.weight.std().item()
    expected = (2 / (9 * 32)) ** 0.5 * 6**-0.5  # He, for 6 branches of 2 convolutions
    assert deviation == pytest.approx(expected, rel=0.05)


def assert_orthogonal_with_the_gains_of_cleanrl(network):
    gains = {"actor": 0.01, "critic": 1.0}
    for name, parameter in network.named_parameters():
        weights = parameter.detach()
        if parameter.ndim == 1:
            assert not weights.any(), name
            continue
        weights = weights.flatten(1)
        gram = weights @ weights.T if len(weights) <= weights.shape[1] else weights.T @ weights
        gain = gains.get(name.split(".")[0], 2**0.5)
        torch.testing.assert_close(gram, gain**2 * torch.eye(len(gram)), atol=1e-5, rtol=1e-5)


def test_the_mlp_starts_orthogonal():
    assert_orthogonal_with_the_gains_of_cleanrl(
        make_network("mlp", (6,), ACTIONS, hiddens=(32, 16))
    )


def test_monobeast_s_nature_cnn_starts_as_torch_does_or_as_cleanba_does(tmp_path):
    flags = ["--env", "Pong-v5", "--network", "nature", "--runs-dir", str(tmp_path)]

    def initial(*more):
        args = parse(monobeast_study.Args, [*flags, *more], "")
        return monobeast_study.prepare(args).network

    torch.manual_seed(monobeast_study.Args().seed)
    expected = make_network("nature", (4, 84, 84), 18).state_dict()
    torch.testing.assert_close(dict(initial().state_dict()), dict(expected), atol=0, rtol=0)

    orthogonal = initial("--initialization", "orthogonal")
    assert_orthogonal_with_the_gains_of_cleanrl(orthogonal)
    flax_network = networks.make_network("nature", 18, portable=True)
    params = jax.jit(flax_network.init)(jax.random.key(0), np.zeros((1, 4, 84, 84), np.uint8))
    copy_from_flax(params, orthogonal)
    assert_orthogonal_with_the_gains_of_cleanrl(orthogonal)


def test_the_lstm_sees_the_last_reward_clipped_as_monobeast_s_does():
    torch.manual_seed(0)
    network = make_network("nature", (4, 84, 84), ACTIONS, use_lstm=True)
    obs = torch.randint(0, 256, (1, 1, 4, 84, 84), dtype=torch.uint8).expand(1, 4, -1, -1, -1)
    reward, zero = torch.tensor([[1.0, 50.0, -1.0, -7.0]]), torch.zeros(1, 4)
    with torch.no_grad():
        logits, *_ = network(obs, reward, zero.bool(), zero, network.initial_state(4))
    torch.testing.assert_close(logits[0, 0], logits[0, 1])
    torch.testing.assert_close(logits[0, 2], logits[0, 3])
    assert not torch.allclose(logits[0, 0], logits[0, 2], atol=1e-5)


@pytest.mark.parametrize("name", ["nature", "resnet"])
def test_images_need_not_be_square(name):
    network = make_network(name, (4, 72, 96), ACTIONS)
    logits, values = network(torch.zeros(2, 4, 72, 96, dtype=torch.uint8))
    assert logits.shape == (2, ACTIONS)
    assert values.shape == (2,)
