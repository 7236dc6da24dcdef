"""From the rollouts of all environment groups to new parameters: two ways to add their gradients.

`groups`, the default: a gradient for each group, in an executable whose shapes no layout changes,
moved to one device and added there in a fixed tree (groupwise.py). The bits are the same on every
layout.

`psum`: what data-parallel trainers ordinarily do. Each learner device takes the gradient of all its
groups at once, and a collective adds over devices. Fewer and larger calls, and other bits for other
numbers of devices: offered to show the price and the difference (`make bench`, `make certify`).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cleanba.groupwise import GroupExchange, tree_sum

# (params, opt_state, data of each local group, shared of each local group) to (params, opt_state,
# metrics); `shared` is what a loss needs to know of each whole minibatch, [M, ...].
Learn = Callable[[Any, Any, Sequence[Any], Sequence[Any]], tuple[Any, Any, Any]]


class Minibatches(NamedTuple):
    """How a group's data is cut, and what is computed of a part."""

    count: int  # of an update, M
    size: int  # units that a group has in one
    microbatch_size: int  # units in one call of the gradient function, a divisor of `size`
    take: Callable[[Any, jax.Array, int], Any]  # (data, first unit, units) to a part of it
    axis: int  # of a part, along which its units lie
    gradient: Callable[[Any, Any, Any], Any]  # (params, part, shared of its minibatch) to sums
    apply: Callable[[Any, Any, Any], tuple[Any, Any, Any]]  # (params, opt_state, sums)
    loop: bool  # one compiled loop may go through them; on a CPU, XLA does convolutions badly there


def make_learn(reduction: str, minibatches: Minibatches, exchange: GroupExchange) -> Learn:
    """Return the function that goes through the minibatches of an update, by either reduction."""
    make = {"groups": _learn_by_group, "psum": _learn_by_device}[reduction]
    return make(minibatches, exchange)


def make_gradient(minibatches: Minibatches) -> tuple[Callable, Callable]:
    """Return the compiled gradient of a microbatch of a group, and the same added to a sum.

    Both take (params, data, shared, minibatch, start), the last two as integers: the microbatch begins
    at unit `start` of the group's part of that minibatch.
    """

    def gradient(
        params: Any, data: Any, shared: Any, minibatch: jax.Array, start: jax.Array
    ) -> Any:
        first = minibatch * minibatches.size + start
        part = minibatches.take(data, first, minibatches.microbatch_size)
        return minibatches.gradient(params, part, jax.tree.map(lambda x: x[minibatch], shared))

    def add_gradient(total: Any, *inputs: Any) -> Any:
        return jax.tree.map(jnp.add, total, gradient(*inputs))

    return jax.jit(gradient), jax.jit(add_gradient, donate_argnums=0)


def _learn_by_group(minibatches: Minibatches, exchange: GroupExchange) -> Learn:
    gradient, add_gradient = make_gradient(minibatches)

    @jax.jit(donate_argnums=1)
    def apply(params: Any, opt_state: Any, groups: tuple[Any, ...]) -> tuple[Any, Any, Any]:
        return minibatches.apply(params, opt_state, tree_sum(groups))

    starts = [np.int32(s) for s in range(0, minibatches.size, minibatches.microbatch_size)]

    def step(params: Any, opt_state: Any, data: Any, shared: Any, minibatch: jax.Array) -> Any:
        sums = gradient(params, data, shared, minibatch, starts[0])
        return minibatches.apply(params, opt_state, sums)

    jitted_step = jax.jit(step, donate_argnums=1)

    @jax.jit(donate_argnums=1)
    def all_steps(params: Any, opt_state: Any, data: Any, shared: Any) -> tuple[Any, Any, Any]:
        def body(carry: tuple[Any, Any], minibatch: jax.Array) -> tuple[tuple[Any, Any], Any]:
            *carry, metrics = step(*carry, data, shared, minibatch)
            return tuple(carry), metrics

        numbers = jnp.arange(minibatches.count, dtype=jnp.int32)
        carry, metrics = jax.lax.scan(body, (params, opt_state), numbers)
        return *carry, jax.tree.map(lambda x: x[-1], metrics)

    def learn_alone(
        params: Any, opt_state: Any, data: Sequence[Any], shared: Sequence[Any]
    ) -> tuple[Any, Any, Any]:
        if minibatches.loop:
            return all_steps(params, opt_state, data[0], shared[0])
        metrics = None
        for minibatch in map(np.int32, range(minibatches.count)):
            params, opt_state, metrics = jitted_step(
                params, opt_state, data[0], shared[0], minibatch
            )
        return params, opt_state, metrics

    if exchange.layout.num_groups == 1 and len(starts) == 1:
        # One gradient, and so one layout: nothing to move or to add before the step.
        return learn_alone

    def learn(
        params: Any, opt_state: Any, data: Sequence[Any], shared: Sequence[Any]
    ) -> tuple[Any, Any, Any]:
        metrics = None
        for minibatch in map(np.int32, range(minibatches.count)):
            results = []
            for inputs in zip(exchange.spread(params), data, shared, strict=True):
                result = gradient(*inputs, minibatch, starts[0])
                for start in starts[1:]:
                    result = add_gradient(result, *inputs, minibatch, start)
                results.append(result)
            params, opt_state, metrics = apply(params, opt_state, exchange.gather(results))
        return params, opt_state, metrics

    return learn


def _learn_by_device(minibatches: Minibatches, exchange: GroupExchange) -> Learn:
    mesh = Mesh(np.array(exchange.learners), ("learner",))
    whole = NamedSharding(mesh, PartitionSpec())
    split = NamedSharding(mesh, PartitionSpec("learner"))
    local = [d for d in exchange.learners if d.process_index == jax.process_index()]
    stack = jax.jit(lambda *trees: jax.tree.map(lambda *x: jnp.stack(x), *trees))

    def everywhere(tree: Any) -> Any:
        copies = [jax.device_put(tree, device) for device in local]
        return jax.tree.map(
            lambda *x: jax.make_array_from_single_device_arrays(x[0].shape, whole, list(x)),
            *copies,
        )

    def by_device(groups: Sequence[Any]) -> Any:
        size = len(groups) // len(local)
        stacks = [stack(*groups[i : i + size]) for i in range(0, len(groups), size)]

        def join(*shards: jax.Array) -> jax.Array:
            shape = (len(shards[0]) * len(exchange.learners), *shards[0].shape[1:])
            return jax.make_array_from_single_device_arrays(shape, split, list(shards))

        return jax.tree.map(join, *stacks)

    def step(
        params: Any, opt_state: Any, data: Any, shared: Any, minibatch: jax.Array
    ) -> tuple[Any, Any, Any]:
        parts = jax.vmap(
            lambda group: minibatches.take(group, minibatch * minibatches.size, minibatches.size)
        )(data)

        def merge(x: jax.Array) -> jax.Array:
            x = jnp.moveaxis(x, 0, minibatches.axis)
            before, after = x.shape[: minibatches.axis], x.shape[minibatches.axis + 2 :]
            return x.reshape(*before, -1, *after)

        part = jax.tree.map(merge, parts)
        # what all groups know alike of the whole minibatch: the first one's will do
        sums = minibatches.gradient(params, part, jax.tree.map(lambda x: x[0, minibatch], shared))
        return minibatches.apply(params, opt_state, jax.lax.psum(sums, "learner"))

    everything, by_learner = PartitionSpec(), PartitionSpec("learner")
    sharded_step = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(everything, everything, by_learner, by_learner, everything),
            out_specs=everything,
            check_vma=False,
        ),
        donate_argnums=1,
    )

    def learn(
        params: Any, opt_state: Any, data: Sequence[Any], shared: Sequence[Any]
    ) -> tuple[Any, Any, Any]:
        params, opt_state = everywhere((params, opt_state))
        data, shared = by_device(data), by_device(shared)
        metrics = None
        for minibatch in range(minibatches.count):
            params, opt_state, metrics = sharded_step(
                params, opt_state, data, shared, np.int32(minibatch)
            )
        return jax.tree.map(lambda x: x.addressable_data(0), (params, opt_state, metrics))

    return learn
