"""The losses agree with rlax, optax and closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import rlax

from cleanba import cleanba_impala as impala
from cleanba import cleanba_ppo as ppo
from cleanba.actor_learner import GroupRollout

T, B, A = 7, 5, 4


def variants(function):
    """The function, and the function under jit."""
    return [function, jax.jit(function)]


@pytest.fixture
def rollout():
    rng = np.random.default_rng(0)
    dones = rng.random((T + 1, B)) < 0.2
    return GroupRollout(
        obs=np.zeros((T + 1, B, 1), np.float32),
        dones=dones,
        actions=rng.integers(0, A, (T, B)).astype(np.int32),
        rewards=rng.normal(size=(T, B)).astype(np.float32),
        behaviour=rng.normal(size=(T, B, A)).astype(np.float32),
    )


def test_generalized_advantages_agree_with_rlax():
    rng = np.random.default_rng(1)
    r_t, values = rng.normal(size=(T, B)), rng.normal(size=(T + 1, B))
    discount_t = 0.99 * (rng.random((T, B)) > 0.2)
    expected = jax.vmap(rlax.truncated_generalized_advantage_estimation, (1, 1, None, 1), 1)(
        *(jnp.asarray(x, jnp.float32) for x in (r_t, discount_t)), 0.95, jnp.float32(values)
    )
    for function in variants(ppo.generalized_advantages):
        actual = function(jnp.float32(r_t), jnp.float32(discount_t), 0.95, values[:-1], values[1:])
        np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_moments_of_groups_combine_to_those_of_the_whole_minibatch():
    rng = np.random.default_rng(2)
    values = rng.normal(3.0, 5.0, size=(3, 4, 50)).astype(np.float32)  # groups, minibatches, n
    mask = (rng.random(values.shape) < 0.9).astype(np.float32)
    combined = ppo.combine_moments(
        tuple(ppo.minibatch_moments(v, m) for v, m in zip(values, mask, strict=True))
    )
    for minibatch in range(4):
        kept = values[:, minibatch][mask[:, minibatch] > 0]
        assert combined.count[minibatch] == len(kept)
        np.testing.assert_allclose(combined.mean[minibatch], kept.mean(), rtol=1e-5)
        deviation = np.sqrt(combined.deviations[minibatch] / combined.count[minibatch])
        np.testing.assert_allclose(deviation, kept.std(), rtol=1e-5)


def ppo_batch(n=40, seed=3):
    rng = np.random.default_rng(seed)
    f = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    mask = (rng.random(n) < 0.8).astype(np.float32)
    batch = ppo.Batch(
        f(n, 2), rng.integers(0, A, n), -1.4 + 0.2 * f(n), f(n), f(n), mask, order=None
    )
    moments = jax.tree.map(
        lambda x: x[0], ppo.minibatch_moments(batch.advantages[None], mask[None])
    )
    return f(n, A), f(n), batch, moments


def reference_ppo_loss(logits, value, batch, args):
    """CleanRL's loss, on the unmasked transitions alone, in NumPy with float64."""
    keep = batch.mask > 0
    logits, value = np.float64(logits)[keep], np.float64(value)[keep]
    log_probs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    log_ratio = log_probs[np.arange(keep.sum()), batch.actions[keep]] - batch.logprobs[keep]
    ratio = np.exp(log_ratio)
    adv = batch.advantages[keep]
    adv = (adv - adv.mean()) / (adv.std() + 1e-8)
    clipped = np.clip(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
    policy = np.maximum(-adv * ratio, -adv * clipped).mean()
    value_loss = 0.5 * ((value - batch.returns[keep]) ** 2).mean()
    entropy = -(np.exp(log_probs) * log_probs).sum(1).mean()
    return {
        "loss": policy + args.vf_coef * value_loss - args.ent_coef * entropy,
        "policy_loss": policy,
        "value_loss": value_loss,
        "entropy": entropy,
        "approx_kl": ((ratio - 1) - log_ratio).mean(),
        "clip_fraction": (np.abs(ratio - 1) > args.clip_coef).mean(),
    }


def test_ppo_loss_agrees_with_cleanrls_formulas_and_ignores_reset_steps():
    args = ppo.Args()
    logits, value, batch, moments = ppo_batch()
    expected = reference_ppo_loss(logits, value, batch, args)
    for function in variants(lambda *x: ppo.ppo_loss(*x, args)):
        for name, actual in function(logits, value, batch, moments)._asdict().items():
            np.testing.assert_allclose(actual, expected[name], atol=1e-5, err_msg=name)
    changed = batch._replace(
        advantages=np.where(batch.mask > 0, batch.advantages, 1e6),
        returns=np.where(batch.mask > 0, batch.returns, 1e6),
    )
    again = ppo.ppo_loss(logits, value, changed, moments, args)
    np.testing.assert_array_equal(again, ppo.ppo_loss(logits, value, batch, moments, args))


def test_a_ppo_minibatch_of_reset_steps_alone_has_no_loss():
    logits, value, batch, _ = ppo_batch()
    mask = np.zeros_like(batch.mask)
    moments = jax.tree.map(
        lambda x: x[0], ppo.minibatch_moments(batch.advantages[None], mask[None])
    )
    losses = ppo.ppo_loss(logits, value, batch._replace(mask=mask), moments, ppo.Args())
    assert [float(loss) for loss in losses] == [0.0] * len(losses)


def test_parts_of_a_ppo_minibatch_add_up_to_the_whole():
    args = ppo.Args()
    logits, value, batch, moments = ppo_batch()
    whole = ppo.ppo_loss(logits, value, batch, moments, args)

    def part(s):
        rows = jax.tree.map(lambda x: x[s], batch._replace(order=None))
        return ppo.ppo_loss(logits[s], value[s], rows, moments, args)

    parts = [part(slice(i, i + 10)) for i in range(0, 40, 10)]
    np.testing.assert_allclose(np.sum(parts, axis=0), whole, atol=1e-5)


def reference_impala_loss(logits, values, rollout, args):
    """The loss from rlax's V-trace and losses, one environment at a time."""
    total = 0.0
    for b in range(B):
        ratios = rlax.categorical_importance_sampling_ratios(
            logits[:, b], rollout.behaviour[:, b], rollout.actions[:, b]
        )
        clips = dict(clip_rho_threshold=args.rho_clip, clip_pg_rho_threshold=args.pg_rho_clip)
        done = rollout.dones[:, b].astype(np.float32)
        v = values[:, b]
        out = rlax.vtrace_td_error_and_advantage(
            v[:-1], v[1:], rollout.rewards[:, b], 0.99 * (1 - done[1:]), ratios,
            lambda_=args.vtrace_lambda, **clips,
        )  # fmt: skip
        weights = 1 - done[:-1]
        policy = T * rlax.policy_gradient_loss(
            logits[:, b], rollout.actions[:, b], out.pg_advantage, weights
        )
        value = 0.5 * jnp.sum(jnp.square(out.errors) * weights)
        entropy = T * rlax.entropy_loss(logits[:, b], weights)  # rlax's is negative
        total += policy + args.vf_coef * value + args.ent_coef * entropy
    return total


@pytest.mark.parametrize(
    "options", [{}, {"rho_clip": 0.9, "pg_rho_clip": 0.5, "vtrace_lambda": 0.7}]
)
def test_impala_loss_and_gradient_agree_with_rlax(rollout, options):
    args = impala.Args(**options)
    rng = np.random.default_rng(4)
    logits = jnp.float32(rng.normal(size=(T, B, A)))
    values = jnp.float32(rng.normal(size=(T + 1, B)))
    reference = jax.jit(
        jax.value_and_grad(lambda x, v: reference_impala_loss(x, v, rollout, args), (0, 1))
    )
    expected = reference(logits, values)

    def loss(logits, values):
        return impala.impala_loss(logits, values, rollout, args).loss

    for function in variants(jax.value_and_grad(loss, (0, 1))):
        actual = function(logits, values)
        np.testing.assert_allclose(actual[0], expected[0], rtol=1e-5)
        for a, e in zip(actual[1], expected[1], strict=True):
            np.testing.assert_allclose(a, e, atol=1e-5)


def test_reset_steps_do_not_train_impala(rollout):
    args = impala.Args()
    logits, values = jnp.zeros((T, B, A)), jnp.zeros((T + 1, B))
    resets = rollout.dones[:-1]
    assert resets.any()
    other = rollout._replace(
        actions=np.where(resets, (rollout.actions + 1) % A, rollout.actions),
        rewards=np.where(resets, 100.0, rollout.rewards).astype(np.float32),
    )

    def gradient(rollout):
        return jax.grad(lambda x, v: impala.impala_loss(x, v, rollout, args).loss, (0, 1))(
            logits, values
        )

    for a, b in zip(gradient(rollout), gradient(other), strict=True):
        np.testing.assert_array_equal(a, b)
    assert not np.asarray(gradient(rollout)[0])[resets].any()


def steps(optimizer, gradients, params):
    state = optimizer.init(params)
    for gradient in gradients:
        updates, state = optimizer.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
    return params


def test_adam_clips_and_anneals_as_in_closed_form():
    args = ppo.Args(learning_rate=0.1, update_epochs=1, num_minibatches=2)
    gradients = [jnp.array([3.0, -4.0]), jnp.array([0.1, 0.2]), jnp.array([-0.3, 0.1])]
    optimizer, learning_rate = ppo.make_optimizer(args, num_updates=4)
    actual = steps(optimizer, gradients, jnp.zeros(2))
    m = v = p = np.zeros(2)
    for i, g in enumerate(np.float64(gradients)):
        g = g * min(1, args.max_grad_norm / np.linalg.norm(g))
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        lr = 0.1 * (1 - (i // 2) / 4)
        m_hat, v_hat = m / (1 - 0.9 ** (i + 1)), v / (1 - 0.999 ** (i + 1))
        p = p - lr * m_hat / (np.sqrt(v_hat) + 1e-5)
    np.testing.assert_allclose(actual, p, atol=1e-5)
    assert learning_rate(0) == pytest.approx(0.1)
    assert learning_rate(3) == pytest.approx(0.025)


def test_rmsprop_has_its_epsilon_outside_the_root_and_anneals_once_per_update():
    args = impala.Args(learning_rate=0.1, num_minibatches=2)
    gradients = [jnp.array([30.0, -40.0]), jnp.array([0.01, 0.02]), jnp.array([-0.03, 0.01])]
    optimizer, _ = impala.make_optimizer(args, num_updates=10)
    actual = steps(optimizer, gradients, jnp.zeros(2))
    v = p = np.zeros(2)
    for i, g in enumerate(np.float64(gradients)):
        g = g * min(1, args.max_grad_norm / np.linalg.norm(g))
        v = 0.99 * v + 0.01 * g**2
        p = p - 0.1 * (1 - (i // 2) / 10) * g / (np.sqrt(v) + 0.01)
    np.testing.assert_allclose(actual, p, atol=1e-5)
