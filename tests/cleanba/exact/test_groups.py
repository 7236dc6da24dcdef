"""Gradients by group are the gradient of the whole batch, and sums have one order."""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from cleanba import cleanba_impala as impala
from cleanba import cleanba_ppo as ppo
from cleanba.actor_learner import GroupRollout
from cleanba.environments import EnvSpec
from cleanba.exact.groups import GroupExchange, tree_sum
from cleanba.exact.placement import Hardware, Placement, plan
from cleanba.networks import make_network
from cleanba.training import TrainState

ENVS, STEPS, ACTIONS = 8, 12, 3


class Shapes(NamedTuple):
    """What a trainer's `make_learn` needs to know of a run."""

    network: Any
    minibatch_size: int
    microbatch_size: int
    placement: Placement
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
    return make_network("mlp", ACTIONS, hiddens=(16,), portable=True)


@pytest.fixture(scope="module")
def params(network):
    return network.init(jax.random.key(0), np.zeros((1, 4), np.float32))


def soak(value):
    """Leave a parameter to `make soak`: each one compiles a trainer's learning step."""
    return pytest.param(value, marks=pytest.mark.soak)


def assert_close(a, b):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5), a, b)


def descend(monkeypatch, module):
    """Replace a trainer's optimizer by gradient descent, whose steps show gradients as they are."""
    monkeypatch.setattr(module, "make_optimizer", lambda args, n: (optax.sgd(0.01), lambda u: 0.01))


def learn_from(module, args, network, params, size, micro, groups, *data):
    """Learn on one device; return new parameters and the last minibatch's metrics."""
    placement = plan(Hardware(num_actor_threads=1), groups, 0, 1)
    exchange = GroupExchange(placement)
    learn = module.make_learn(args, Shapes(network, size, micro, placement), exchange)
    opt_state = module.make_optimizer(args, 10)[0].init(params)
    params, _, metrics = learn(params, opt_state, *jax.device_put(data, exchange.lead))
    return params, metrics


@pytest.mark.slow
@pytest.mark.parametrize("groups", [soak(1), 2, soak(4), soak(8)])
@pytest.mark.parametrize("microbatches", [soak(1), 3])
def test_ppo_learns_from_every_minibatch_of_all_groups_as_from_one_batch(
    network, params, monkeypatch, groups, microbatches
):
    descend(monkeypatch, ppo)
    args = ppo.Args(num_minibatches=2, update_epochs=2)
    rollout = make_rollout(network, params, lambda _, lp, v: ppo.Behaviour(lp, v))
    batch_of = ppo.make_batch(network, args)
    keys = jax.random.split(jax.random.key(5), groups)
    prepared = [
        batch_of(params, part, key, np.int32(1))
        for part, key in zip(split(rollout, groups), keys, strict=True)
    ]
    batches = [batch for batch, _ in prepared]
    moments = ppo.combine_moments(tuple(m for _, m in prepared))
    size = STEPS * ENVS // groups // args.num_minibatches
    actual, metrics = learn_from(
        ppo, args, network, params, size, size // microbatches, groups, batches, [moments] * groups
    )
    expected = params
    for minibatch in range(args.update_epochs * args.num_minibatches):

        def pick(batch, minibatch=minibatch):
            rows = batch.order.reshape(-1)[minibatch * size : (minibatch + 1) * size]
            return jax.tree.map(lambda x: x[rows], batch._replace(order=None))

        whole = jax.tree.map(lambda *x: jnp.concatenate(x), *map(pick, batches))
        ones = jax.tree.map(
            lambda x: x[0], ppo.minibatch_moments(whole.advantages[None], whole.mask[None])
        )

        def loss(params, whole=whole, ones=ones):
            return ppo.ppo_loss(*network.apply(params, whole.obs), whole, ones, args).loss

        value, gradient = jax.value_and_grad(loss)(expected)
        expected = jax.tree.map(lambda p, g: p - 0.01 * g, expected, gradient)
    assert_close(actual, expected)
    assert_close(metrics["loss"], value)
    assert_close(metrics["grad_norm"], optax.global_norm(gradient))


@pytest.mark.slow
@pytest.mark.parametrize("groups", [soak(1), 2, soak(4)])
@pytest.mark.parametrize("microbatch", [soak(1), 2])
def test_impala_learns_from_every_minibatch_of_all_groups_as_from_one_batch(
    network, params, monkeypatch, groups, microbatch
):
    descend(monkeypatch, impala)
    size = ENVS // groups
    args = impala.Args(num_minibatches=2 if size > 2 else 1)
    size //= args.num_minibatches
    rollout = make_rollout(network, params, lambda logits, *_: logits)
    parts = split(rollout, groups)
    actual, metrics = learn_from(
        impala, args, network, params, size, min(size, microbatch), groups, parts
    )
    expected = params
    for first in range(0, args.num_minibatches * size, size):
        rows = [jax.tree.map(lambda x, f=first: x[:, f : f + size], part) for part in parts]
        whole = jax.tree.map(lambda *x: np.concatenate(x, axis=1), *rows)
        num_envs = whole.dones.shape[1]

        def loss(params, whole=whole, num_envs=num_envs):
            logits, values = network.apply(params, whole.obs.reshape(-1, 4))
            logits = logits.reshape(STEPS + 1, num_envs, -1)[:-1]
            return impala.impala_loss(logits, values.reshape(STEPS + 1, num_envs), whole, args).loss

        value, gradient = jax.value_and_grad(loss)(expected)
        expected = jax.tree.map(lambda p, g: p - 0.01 * g, expected, gradient)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max()),
        actual,
        expected,
    )
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-4)
    np.testing.assert_allclose(metrics["grad_norm"], optax.global_norm(gradient), rtol=1e-4)


def test_ppo_permutes_anew_for_every_update_epoch_and_group(network, params, monkeypatch):
    args = ppo.Args(num_minibatches=2, update_epochs=2)
    placement = plan(Hardware(num_actor_threads=1), 2, 0, 1)
    exchange = GroupExchange(placement)
    learned = []

    def make_learn(args, setup, exchange):
        def learn(params, opt_state, batches, moments):
            learned.append(batches)
            return params, opt_state, {}

        return learn

    monkeypatch.setattr(ppo, "make_learn", make_learn)
    rollout = make_rollout(network, params, lambda _, lp, v: ppo.Behaviour(lp, v))
    same = jax.tree.map(lambda x: x[:, : ENVS // 2], rollout)
    size = STEPS * ENVS // 2 // args.num_minibatches
    update = ppo.make_update(args, Shapes(network, size, size, placement), exchange)
    for number in (1, 2):
        update(TrainState(params, None), {0: same, 1: same}, number)
    orders = [np.asarray(o) for batches in learned for batch in batches for o in batch.order]
    everything = np.arange(STEPS * ENVS // 2)
    assert all((np.sort(order) == everything).all() for order in orders)
    assert len({order.tobytes() for order in orders}) == 2 * 2 * 2  # updates x groups x epochs


def test_a_ppo_batch_masks_the_steps_that_reset(network, params):
    args = ppo.Args(num_minibatches=2, update_epochs=2)
    rollout = make_rollout(network, params, lambda _, lp, v: ppo.Behaviour(lp, v))
    batch, moments = ppo.make_batch(network, args)(params, rollout, jax.random.key(0), np.int32(1))
    np.testing.assert_array_equal(batch.mask.reshape(STEPS, ENVS), ~rollout.dones[:-1])
    assert moments.count.sum() == args.update_epochs * (~rollout.dones[:-1]).sum()


@pytest.mark.soak
@pytest.mark.parametrize("algorithm", ["ppo", "impala"])
def test_all_ways_to_add_gradients_learn_the_same_to_1e_5(network, params, algorithm):
    """By group or by device, in one group or two, in one call or in several, in a compiled loop or not."""
    module = {"ppo": ppo, "impala": impala}[algorithm]
    if algorithm == "ppo":
        rollout = make_rollout(network, params, lambda _, lp, v: ppo.Behaviour(lp, v))
        # the same minibatches for any number of groups: all steps of some environments
        batch_of = ppo.make_batch(network, ppo.Args(num_minibatches=2))
        batch, _ = batch_of(params, rollout, jax.random.key(5), np.int32(1))
        rows = np.arange(STEPS * ENVS).reshape(STEPS, 2, 2, 2)  # steps, half, quarter, environment
    else:
        rollout = make_rollout(network, params, lambda logits, *_: logits)
    learned = {}
    ways = (
        ("groups", 1, 1, True), ("groups", 1, 1, False), ("groups", 1, 2, True), ("groups", 2, 1, True),
        ("groups", 2, 2, True), ("psum", 1, 1, True), ("psum", 2, 1, True),
    )  # fmt: skip
    for reduction, groups, calls, vectors in ways:
        args = module.Args(num_minibatches=2, learning_rate=1e-3, reduction=reduction)
        units = ENVS // groups * (STEPS if algorithm == "ppo" else 1)
        size = units // 2
        placement = plan(Hardware(num_actor_threads=1), groups, 0, 1)
        setup = Shapes(network, size, size // calls, placement)
        if not vectors:  # images: no compiled loop over minibatches
            setup = setup._replace(spec=setup.spec._replace(obs_shape=(4, 1, 1)))
        exchange = GroupExchange(placement)
        learn = module.make_learn(args, setup, exchange)
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
            inputs = (data, [moments] * groups)
        else:
            envs = np.arange(ENVS).reshape(2, 2, 2)
            data = []
            for g in range(groups):
                own = envs if groups == 1 else envs[:, g : g + 1]
                data.append(jax.tree.map(lambda x, own=own: x[:, own.reshape(-1)], rollout))
            inputs = (data,)
        inputs = jax.device_put(inputs, exchange.lead)
        new, _, metrics = learn(params, optimizer.init(params), *inputs)
        learned[reduction, groups, calls, vectors] = (new, metrics["loss"])
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


@pytest.mark.slow
@pytest.mark.parametrize("module", [impala, ppo], ids=["impala", "ppo"])
def test_accumulated_gradients_are_averaged_before_a_step(network, params, module):
    epochs = {"update_epochs": 1} if module is ppo else {}
    once = module.Args(num_minibatches=1, **epochs)
    args = replace(once, gradient_accumulation_steps=2)
    if module is ppo:
        rollout = make_rollout(network, params, lambda _, lp, v: ppo.Behaviour(lp, v))
        batch_of = ppo.make_batch(network, args)
        prepared = [
            batch_of(params, part, jax.random.key(5), np.int32(1)) for part in split(rollout, 2)
        ]
        parts, moments = map(list, zip(*prepared, strict=True))
        whole = ppo.combine_moments(tuple(moments))
        of_halves = [(jax.tree.map(lambda x, m=m: x[m], whole),) for m in range(2)]
        size, data = STEPS * ENVS // 2 // 2, (parts, [whole] * 2)
    else:
        parts = split(make_rollout(network, params, lambda logits, *_: logits), 2)
        of_halves, size, data = [(), ()], ENVS // 2 // 2, (parts,)
    actual, _ = learn_from(module, args, network, params, size, size, 2, *data)
    gradient = jax.jit(module.make_gradient(network, args))
    first, second = (
        tree_sum([gradient(params, module.take(p, m * size, size), *extra)[0] for p in parts])
        for m, extra in enumerate(of_halves)
    )
    mean = jax.tree.map(lambda a, b: (a + b) / 2, first, second)
    optimizer, _ = module.make_optimizer(once, 10)
    updates, _ = optimizer.update(mean, optimizer.init(params), params)
    assert_close(actual, optax.apply_updates(params, updates))
