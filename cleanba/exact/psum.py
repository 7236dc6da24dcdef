"""Gradients summed by device with `lax.psum`, as in ordinary data-parallel training.

Each learner device computes the gradient of all its groups at once, and a collective sums over devices:
fewer and larger calls, and bits that depend on the number of devices. It exists to measure the cost of
exactness (`make bench`) and to show the difference (`make certify`). The default sums by environment
group (groups.py).
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cleanba.exact.groups import GroupExchange


def make_learn(
    take: Callable[..., Any],
    gradient: Callable[..., Any],
    optimizer_step: Callable[..., tuple[Any, Any, Any]],
    exchange: GroupExchange,
    *,
    num_minibatches: int,
    minibatch_size: int,
    axis: int,
) -> Callable[..., tuple[Any, Any, Any]]:
    """Return the function that goes through the minibatches of an update, by device.

    Args:
      take: (data of a group, first unit, units) to a part of it.
      gradient: (params, part, *shared of its minibatch) to a pytree of sums.
      optimizer_step: (params, opt_state, tuple of sums) to (params, opt_state, metrics).
      exchange: the devices.
      num_minibatches: of an update.
      minibatch_size: units that a group has in a minibatch.
      axis: of a part, along which its units lie.

    Returns:
      The function from (params, opt_state, data of each local group, *shared of each local group,
      [num_minibatches, ...] each) to (params, opt_state, metrics of the last minibatch).
    """
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
        count = len(groups) // len(local)
        stacks = [stack(*groups[i : i + count]) for i in range(0, len(groups), count)]

        def join(*shards: jax.Array) -> jax.Array:
            shape = (len(shards[0]) * len(exchange.learners), *shards[0].shape[1:])
            return jax.make_array_from_single_device_arrays(shape, split, list(shards))

        return jax.tree.map(join, *stacks)

    def merge(x: jax.Array) -> jax.Array:
        x = jnp.moveaxis(x, 0, axis)
        return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])

    def step(
        params: Any, opt_state: Any, minibatch: jax.Array, inputs: tuple[Any, ...]
    ) -> tuple[Any, Any, Any]:
        data, *shared = inputs
        first = minibatch * minibatch_size
        parts = jax.vmap(lambda group: take(group, first, minibatch_size))(data)
        # Values shared by all groups of a minibatch are equal, so the first group's are used.
        shared = jax.tree.map(lambda x: x[0, minibatch], shared)
        sums = gradient(params, jax.tree.map(merge, parts), *shared)
        return optimizer_step(params, opt_state, (jax.lax.psum(sums, "learner"),))

    everything, by_learner = PartitionSpec(), PartitionSpec("learner")
    compiled_step = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(everything, everything, everything, by_learner),
            out_specs=everything,
            check_vma=False,
        ),
        donate_argnums=1,
    )

    def learn(
        params: Any, opt_state: Any, *inputs: Sequence[Any]
    ) -> tuple[Any, Any, dict[str, jax.Array]]:
        params, opt_state = everywhere((params, opt_state))
        by_learners = tuple(by_device(groups) for groups in inputs)
        for minibatch in map(np.int32, range(num_minibatches)):
            params, opt_state, metrics = compiled_step(params, opt_state, minibatch, by_learners)
        return jax.tree.map(lambda x: x.addressable_data(0), (params, opt_state, metrics))

    return learn
