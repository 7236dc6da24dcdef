"""Gradients by group are the gradient of the whole batch, and sums have one order."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cleanba import cleanba_impala as impala
from cleanba import cleanba_ppo as ppo
from cleanba.actor_learner import GroupRollout
from cleanba.environments import EnvSpec
from cleanba.groupwise import GroupExchange, fingerprint, tree_sum
from cleanba.networks import make_network
from cleanba.placement import Hardware, plan
from cleanba.reduction import make_gradient, make_learn

ENVS, STEPS, ACTIONS = 8, 12, 3


class Shapes(NamedTuple):
    """What minibatches need to know of a run."""

    network: Any
    minibatch_size: int
    microbatch_size: int
    num_updates: int = 10
    spec: EnvSpec = EnvSpec("vectors", (4,), np.dtype(np.float32), ACTIONS, False, 500)


def make_rollout(network, params, behaviour):
    rng = np.random.default_rng(0)
    obs = rng.normal(size=(STEPS + 1, ENVS, 4)).astype(np.float32)
    logits, values = network.apply(params, obs[:-1].reshape(-1, 4))
    logits = np.asarray(logits).reshape(STEPS, ENVS, -1) + rng.normal(size=(STEPS, ENVS, ACTIONS))
    actions = rng.integers(0, ACTIONS, (STEPS, ENVS)).astype(np.int32)
    log_probs = jax.nn.log_softmax(logits)
    logprob = np.take_along_axis(np.asarray(log_probs), actions[..., None], 2)[..., 0]
    return GroupRollout(
        obs=obs,
        dones=rng.random((STEPS + 1, ENVS)) < 0.1,
        actions=actions,
        rewards=rng.normal(size=(STEPS, ENVS)).astype(np.float32),
        behaviour=behaviour(np.float32(logits), np.float32(logprob), values.reshape(STEPS, ENVS)),
    )


def split(rollout, groups):
    """Cut a rollout into groups of environments."""
    size = ENVS // groups
    return [
        jax.tree.map(lambda x, g=g: x[:, g * size : (g + 1) * size], rollout) for g in range(groups)
    ]


@pytest.fixture(scope="module")
def network():
    return make_network("mlp", ACTIONS, hiddens=(16,))


@pytest.fixture(scope="module")
def params(network):
    return network.init(jax.random.key(0), np.zeros((1, 4), np.float32))


def assert_close(a, b):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5), a, b)


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_ppo_gradients_by_group_are_one_big_batch_gradient(network, params, groups, microbatches):
    args = ppo.Args(num_minibatches=2, update_epochs=2)
    rollout = make_rollout(network, params, lambda _, lp, v: ppo.Behaviour(lp, v))
    prepare = ppo.make_prepare(network, args)
    keys = jax.random.split(jax.random.key(5), groups)
    prepared = [
        prepare(params, part, key, np.int32(1))
        for part, key in zip(split(rollout, groups), keys, strict=True)
    ]
    batches = [batch for batch, _ in prepared]
    moments = ppo.combine_moments(tuple(m for _, m in prepared))
    size = STEPS * ENVS // groups // args.num_minibatches
    micro = size // microbatches
    setup = Shapes(network, minibatch_size=size, microbatch_size=micro)
    gradient, add_gradient = make_gradient(ppo.make_minibatches(args, setup)[0])
    for minibatch in range(4):
        results = []
        for batch in batches:
            inputs = (params, batch, moments, np.int32(minibatch))
            result = gradient(*inputs, np.int32(0))
            for m in range(1, microbatches):
                result = add_gradient(result, *inputs, np.int32(m * micro))
            results.append(result)
        actual, losses = tree_sum(results)

        def pick(batch, minibatch=minibatch):
            rows = batch.order.reshape(-1)[minibatch * size : (minibatch + 1) * size]
            return jax.tree.map(lambda x: x[rows], batch._replace(order=None))

        whole = jax.tree.map(lambda *x: jnp.concatenate(x), *map(pick, batches))
        ones = jax.tree.map(
            lambda x: x[0], ppo.minibatch_moments(whole.advantages[None], whole.mask[None])
        )

        def loss(params, whole=whole, ones=ones):
            return ppo.ppo_loss(*network.apply(params, whole.obs), whole, ones, args).loss

        value, expected = jax.value_and_grad(loss)(params)
        assert_close(actual, expected)
        assert_close(losses.loss, value)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("microbatch", [1, 2])
def test_impala_gradients_by_group_are_one_big_batch_gradient(network, params, groups, microbatch):
    args = impala.Args(num_minibatches=1)
    rollout = make_rollout(network, params, lambda logits, *_: logits)
    setup = Shapes(network, minibatch_size=ENVS // groups, microbatch_size=microbatch)
    gradient, add_gradient = make_gradient(impala.make_minibatches(args, setup)[0])
    results = []
    for part in split(rollout, groups):
        result = gradient(params, part, (), np.int32(0), np.int32(0))
        for start in range(microbatch, ENVS // groups, microbatch):
            result = add_gradient(result, params, part, (), np.int32(0), np.int32(start))
        results.append(result)
    actual, losses = tree_sum(results)

    def loss(params):
        logits, values = network.apply(params, rollout.obs.reshape(-1, 4))
        logits = logits.reshape(STEPS + 1, ENVS, -1)[:-1]
        return impala.impala_loss(logits, values.reshape(STEPS + 1, ENVS), rollout, args).loss

    value, expected = jax.value_and_grad(loss)(params)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max()),
        actual,
        expected,
    )
    np.testing.assert_allclose(losses.loss, value, rtol=1e-5)
    assert losses.count == (~rollout.dones[:-1]).sum()


@pytest.mark.parametrize("algorithm", ["ppo", "impala"])
def test_all_ways_to_add_gradients_learn_the_same_to_1e_5(network, params, algorithm):
    """By group or by device, in one group or two, in one call or in several, in a compiled loop or not."""
    module = {"ppo": ppo, "impala": impala}[algorithm]
    args = module.Args(num_minibatches=2, learning_rate=1e-3)
    if algorithm == "ppo":
        rollout = make_rollout(network, params, lambda _, lp, v: ppo.Behaviour(lp, v))
        prepare = ppo.make_prepare(network, args)
        # the same minibatches for any number of groups: all steps of some environments
        batch, _ = prepare(params, rollout, jax.random.key(5), np.int32(1))
        rows = np.arange(STEPS * ENVS).reshape(STEPS, 2, 2, 2)  # steps, half, quarter, environment
    else:
        rollout = make_rollout(network, params, lambda logits, *_: logits)
    learned = {}
    ways = (
        ("groups", 1, 1, True), ("groups", 1, 1, False), ("groups", 1, 2, True), ("groups", 2, 1, True),
        ("groups", 2, 2, True), ("psum", 1, 1, True), ("psum", 2, 1, True),
    )  # fmt: skip
    for reduction, groups, calls, loop in ways:
        units = ENVS // groups * (STEPS if algorithm == "ppo" else 1)
        size = units // 2
        setup = Shapes(network, minibatch_size=size, microbatch_size=size // calls)
        minibatches, _ = module.make_minibatches(args, setup)
        assert minibatches.loop
        exchange = GroupExchange(plan(Hardware(num_actor_threads=1), groups, 0, 1))
        learn = make_learn(reduction, minibatches._replace(loop=loop), exchange)
        optimizer, _ = module.make_optimizer(args, 10)
        if algorithm == "ppo":
            # minibatch m has half m of each group's rows; a group is a quarter of both halves, or all
            data = []
            for g in range(groups):
                part = rows if groups == 1 else rows[:, :, g : g + 1]
                order = np.concatenate([part[:, m].reshape(-1) for m in range(2)])
                epochs = np.tile(order, (args.update_epochs, 1)).astype(np.int32)
                data.append(batch._replace(order=epochs))
            halves = np.stack([rows[:, m].reshape(-1) for m in range(2)] * args.update_epochs)
            moments = ppo.minibatch_moments(batch.advantages[halves], batch.mask[halves])
            shared = [moments] * groups
        else:
            envs = np.arange(ENVS).reshape(2, 2, 2)
            data = []
            for g in range(groups):
                own = envs if groups == 1 else envs[:, g : g + 1]
                data.append(jax.tree.map(lambda x, own=own: x[:, own.reshape(-1)], rollout))
            shared = [()] * groups
        data, shared = jax.device_put((data, shared), exchange.lead)
        new, _, metrics = learn(params, optimizer.init(params), data, shared)
        learned[reduction, groups, calls, loop] = (new, metrics["loss"])
    reference = learned.pop(("groups", 2, 2, True))
    assert (
        np.abs(
            reference[0]["params"]["actor"]["kernel"] - params["params"]["actor"]["kernel"]
        ).max()
        > 1e-4
    )
    for other in learned.values():
        assert_close(other, reference)


def test_tree_sum_adds_pairwise_in_the_order_of_the_groups():
    values = [np.float32(x) for x in (1e8, 1.0, -1e8, 1.0, 3.0)]
    expected = ((values[0] + values[1]) + (values[2] + values[3])) + values[4]
    assert tree_sum(values) == expected
    assert tree_sum(values) != np.float32(np.float64(values).sum())  # the order matters here


def test_a_fingerprint_sees_every_bit_name_and_shape():
    params = {"a": np.arange(4, dtype=np.float32), "b": {"c": np.zeros((2, 2), np.float32)}}
    original = fingerprint(params)
    assert original == fingerprint({"b": params["b"], "a": params["a"].copy()})
    flipped = params["a"].copy()
    flipped.view(np.uint32)[2] ^= 1
    assert (
        len(
            {
                original,
                fingerprint(params | {"a": flipped}),
                fingerprint({"x": params["a"], "b": params["b"]}),
                fingerprint(params | {"a": params["a"].reshape(2, 2)}),
                fingerprint(params | {"a": params["a"].view(np.int32)}),
            }
        )
        == 5
    )
