"""CleanRL's PPO: its details, one by one, and Cleanba PPO's update where both compute the same."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rlax

from baselines import cleanrl_ppo as cleanrl
from cleanba import cleanba_ppo
from cleanba.actor_learner import GroupRollout
from cleanba.networks import make_network
from cleanba.record import read_run
from cleanba.run.arguments import hyperparameters
from tests.command_lines import parsed

ROOT = Path(__file__).resolve().parents[2]
T, B, A = 8, 6, 3
ARGS = cleanrl.Args(num_envs=B, num_steps=T, total_timesteps=10 * T * B, num_minibatches=2)


@pytest.fixture(scope="module")
def network():
    return make_network("mlp", A, portable=True)


@pytest.fixture(scope="module")
def params(network):
    return jax.jit(network.init)(jax.random.key(0), np.zeros((1, 4), np.float32))


@pytest.fixture(scope="module")
def rollout(network, params):
    """Steps as the policy makes them, with some ends of episodes."""
    rng = np.random.default_rng(0)
    obs = rng.normal(size=(T + 1, B, 4)).astype(np.float32)
    act = cleanrl.make_act(network)
    steps = [act(params, obs[t], jax.random.key(1), np.int32(t)) for t in range(T)]
    actions, logprobs, values = (np.stack(x) for x in zip(*steps, strict=True))
    return cleanrl.Rollout(
        obs=obs,
        dones=rng.random((T + 1, B)) < 0.2,
        actions=actions,
        logprobs=logprobs,
        values=values,
        rewards=rng.normal(size=(T, B)).astype(np.float32),
    )


def one_update(network, params, rollout, args, key=7):
    optimizer, _ = cleanrl.make_optimizer(args)
    update = cleanrl.make_update(network, args, optimizer, unroll=False)
    state = cleanrl.AgentState(params, optimizer.init(params))
    return update(state, rollout, jax.random.key(key))


def close(a, b, atol):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=atol), a, b)


def test_hyperparameters_are_those_of_cleanba_ppo():
    ours = hyperparameters(cleanrl.Args())
    cleanba = hyperparameters(cleanba_ppo.Args())
    shared = (ours.keys() & cleanba.keys()) - {"num_envs"}  # Cleanba's depends on the layout
    assert len(shared) > 18
    assert {name: ours[name] for name in shared} == {name: cleanba[name] for name in shared}
    assert ours["num_envs"] == 120


def test_advantages_agree_with_rlax(rollout):
    last_value = np.linspace(-1, 1, B).astype(np.float32)
    advantages, returns = cleanrl.gae(ARGS, rollout, last_value)
    values = np.concatenate([rollout.values, last_value[None]])
    discounts = ARGS.gamma * (1.0 - rollout.dones[1:])
    expected = jax.vmap(rlax.truncated_generalized_advantage_estimation, (1, 1, None, 1), 1)(
        jnp.asarray(rollout.rewards), jnp.float32(discounts), ARGS.gae_lambda, jnp.asarray(values)
    )
    np.testing.assert_allclose(advantages, expected, atol=1e-5)
    np.testing.assert_allclose(returns, advantages + rollout.values, atol=1e-6)


@pytest.mark.slow
def test_an_update_is_that_of_cleanba_ppo_where_no_permutation_matters(network, params, rollout):
    args = replace(ARGS, num_minibatches=1, update_epochs=3, learning_rate=1e-3)
    state, metrics = one_update(network, params, rollout, args)
    theirs = cleanba_ppo.Args(
        num_envs=B, num_steps=T, num_minibatches=1, update_epochs=3, learning_rate=1e-3
    )
    behaviour = cleanba_ppo.Behaviour(rollout.logprobs, rollout.values)
    group = GroupRollout(rollout.obs, rollout.dones, rollout.actions, rollout.rewards, behaviour)
    batch_of = cleanba_ppo.make_batch(network, theirs)
    batch, moments = batch_of(params, group, jax.random.key(0), np.int32(1))
    optimizer, _ = cleanba_ppo.make_optimizer(theirs, num_updates=10)
    expected, opt_state = params, optimizer.init(params)
    for epoch in range(3):

        def loss(params, epoch=epoch):
            whole = jax.tree.map(lambda x: x[epoch], moments)
            logits, values = network.apply(params, batch.obs)
            losses = cleanba_ppo.ppo_loss(logits, values, batch, whole, theirs)
            return losses.loss, losses

        grads, losses = jax.grad(loss, has_aux=True)(expected)
        updates, opt_state = optimizer.update(grads, opt_state, expected)
        expected = jax.tree.map(lambda p, u: p + u, expected, updates)
        for name, value in losses._asdict().items():
            np.testing.assert_allclose(metrics[name][epoch, 0], value, atol=1e-5)
    close(state.params, expected, 1e-5)
    moved = [
        np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (expected, params)), strict=True)
    ]
    assert max(moved) > 1e-3  # so that 1e-5 says something


@pytest.mark.soak
def test_unrolled_updates_learn_the_same(network, params, rollout):
    args = replace(ARGS, update_epochs=2)
    optimizer, _ = cleanrl.make_optimizer(args)
    state = cleanrl.AgentState(params, optimizer.init(params))
    results = [
        cleanrl.make_update(network, args, optimizer, unroll)(state, rollout, jax.random.key(0))
        for unroll in (False, True)
    ]
    close(*results, 1e-5)


def test_the_ratio_is_1_in_the_first_minibatch_and_not_after_it(network, params, rollout):
    _, metrics = one_update(network, params, rollout, replace(ARGS, learning_rate=0.01))
    assert metrics["approx_kl"].shape == (ARGS.update_epochs, ARGS.num_minibatches)
    assert abs(float(metrics["approx_kl"][0, 0])) < 1e-6
    assert float(metrics["clip_fraction"][0, 0]) == 0
    assert np.all(np.asarray(metrics["approx_kl"]).reshape(-1)[1:] > 1e-5)


@pytest.mark.slow
def test_an_epoch_learns_from_every_step_once(network, params, rollout):
    """Without a step (learning rate 0), the losses of an epoch's minibatches average to the batch's."""
    args = replace(ARGS, learning_rate=0.0, norm_adv=False, mask_resets=False)
    _, metrics = one_update(network, params, rollout, args)
    _, whole = one_update(network, params, rollout, replace(args, num_minibatches=1))
    for name in ("policy_loss", "value_loss", "entropy"):
        means = np.asarray(metrics[name]).mean(axis=1)
        np.testing.assert_allclose(means, whole[name][:, 0], atol=1e-5)
    parts = np.asarray(metrics["value_loss"])
    assert len(np.unique(parts.round(6))) == parts.size  # and each epoch cuts them anew


@pytest.mark.slow
def test_steps_that_reset_teach_nothing_unless_asked_for(network, params, rollout):
    args = replace(ARGS, num_minibatches=1)
    actions = np.where(rollout.dones[:-1], (rollout.actions + 1) % A, rollout.actions)
    logprobs = np.where(rollout.dones[:-1], rollout.logprobs - 1, rollout.logprobs)
    other = rollout._replace(actions=actions, logprobs=logprobs)
    assert rollout.dones[:-1].any()
    a, b = (one_update(network, params, r, args)[0].params for r in (rollout, other))
    close(a, b, 0)
    args = replace(args, mask_resets=False)
    a, b = (one_update(network, params, r, args)[0].params for r in (rollout, other))
    assert any((x != y).any() for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True))


def test_the_learning_rate_falls_to_0_by_update():
    """As reported, and as the optimizer takes it: Adam's steps, by hand."""
    _, learning_rate = cleanrl.make_optimizer(ARGS)
    assert learning_rate(0) == ARGS.learning_rate
    assert learning_rate(5) == pytest.approx(ARGS.learning_rate / 2)
    assert learning_rate(10) == 0
    args = replace(ARGS, update_epochs=1, num_minibatches=2, learning_rate=0.1)  # 10 updates
    optimizer, _ = cleanrl.make_optimizer(args)
    actual = jnp.zeros(2)
    state = optimizer.init(actual)
    m = v = expected = np.zeros(2)
    gradients = np.random.default_rng(0).normal(size=(6, 2))
    for i, g in enumerate(gradients):
        updates, state = optimizer.update(jnp.float32(g), state, actual)
        actual = actual + updates
        g = g * min(1, args.max_grad_norm / np.linalg.norm(g))
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        m_hat, v_hat = m / (1 - 0.9 ** (i + 1)), v / (1 - 0.999 ** (i + 1))
        expected = expected - 0.1 * (1 - (i // 2) / 10) * m_hat / (np.sqrt(v_hat) + args.adam_eps)
    np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_gradients_are_clipped_by_their_global_norm(network, params, rollout):
    """Adam forgets the scale of gradients, so it shows in its first moment: (1 - 0.9) x gradient."""
    args = replace(ARGS, num_minibatches=1, update_epochs=1, max_grad_norm=0.01)
    state, metrics = one_update(network, params, rollout, args)
    assert float(metrics["grad_norm"][0, 0]) > 0.02
    first_moment = state.opt_state[1][0].mu
    norm = np.sqrt(sum(float((x**2).sum()) for x in jax.tree.leaves(first_moment)))
    assert norm == pytest.approx(0.1 * 0.01, rel=1e-4)


def run(runs_dir, *args, code=0):
    command = [
        sys.executable, str(ROOT / "baselines" / "cleanrl_ppo.py"), "--env-id", "CartPole-v1",
        "--num-envs", "8", "--num-steps", "32", "--total-timesteps", "2048", "--no-progress",
        "--fingerprint-every", "1", "--runs-dir", str(runs_dir), *map(str, args),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_anew")
def test_a_run_is_recorded_and_the_same_again_on_other_hardware_settings(tmp_path):
    run(tmp_path, "--setting", "one", "--envpool-threads", 1)
    run(tmp_path, "--setting", "two", "--envpool-threads", 2)
    records = [read_run(folder) for folder in sorted(tmp_path.glob("default/*"))]
    assert [r.info.setting for r in records] == ["one", "two"]
    fingerprints = [[u.fingerprint for u in r.updates()] for r in records]
    assert fingerprints[0] == fingerprints[1]
    assert len(set(fingerprints[0])) == 2048 // 256
    record = records[0]
    assert record.completed
    assert record.problems == []
    assert [u.step for u in record.updates()] == list(range(256, 2049, 256))
    for rollout in record.rollouts():
        assert rollout.versions == [(rollout.learner_version, 256)]  # no lag, one policy
    episodes = record.episodes()
    assert all(e.episode_return == e.length for e in episodes)  # of CartPole
    counted = sum(e.length + 1 for e in episodes)  # with the step that resets
    assert 2048 - 8 * 500 < 2048 - 8 * max(e.length for e in episodes) < counted <= 2048
    assert max(u.approx_kl for u in record.updates()) < 0.02


@pytest.mark.slow
def test_atari_is_learned_from(tmp_path):
    run(
        tmp_path, "--env-id", "Breakout-v5", "--num-envs", 4, "--num-steps", 8, "--total-timesteps", 96,
        "--update-epochs", 1, "--num-minibatches", 2, "--network", "nature",
    )  # fmt: skip
    (folder,) = tmp_path.glob("default/*__Breakout-v5__*")
    record = read_run(folder)
    assert record.completed
    assert record.info.hyperparameters["network"] == "nature"
    assert len({u.fingerprint for u in record.updates()}) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_minibatches": 3}, "--num-minibatches 3: must divide the 256 steps"),
        ({"total_timesteps": 100}, "--total-timesteps 100: one update learns from 256 steps"),
        ({"network": "nature"}, "--network nature: observations are (4,); choose mlp"),
        ({"num_envs": 0}, "--num-envs 0: must be 1 or more"),
        ({"hiddens": (64, -1)}, "--hiddens -1: must be 1 or more"),
        ({"envpool_threads": 0}, "--envpool-threads 0: must be 1 or more"),
    ],
)
def test_bad_input_is_refused(tmp_path, options, message):
    usual = {"env_id": "CartPole-v1", "num_envs": 8, "num_steps": 32, "runs_dir": tmp_path}
    with pytest.raises(ValueError, match=re.escape(message)):
        cleanrl.prepare(parsed(cleanrl.Args, **(usual | options)))
    assert list(tmp_path.iterdir()) == []


DETAIL = re.compile(r"`([\w/]+\.py)` `([^`]+)`")


def test_the_table_of_details_quotes_code_of_the_files_that_it_names():
    quoted = DETAIL.findall((ROOT / "docs" / "ppo-details.md").read_text())
    assert len(quoted) > 60
    missing = [(name, quote) for name, quote in quoted if quote not in (ROOT / name).read_text()]
    assert missing == []


def test_the_tests_that_the_table_of_details_names_are_there():
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "ppo-details.md").read_text()))
    tests = "".join(path.read_text() for path in (ROOT / "tests").glob("*/test_*.py"))
    assert len(named) > 8
    assert [name for name in named if f"def {name}(" not in tests] == []
