"""The unit of gradient is the environment group, and groups are added in one fixed order.

Each group's part of a computation runs in an executable whose shapes do not depend on the layout;
results are moved, never added, between devices and processes; and every process then adds all G of
them in the same pairwise tree. So the layout decides only where something is computed. A
`lax.psum` over devices would add in an order that depends on the number of devices.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cleanba.exact.placement import Placement


def tree_sum(values: Sequence[Any]) -> Any:
    """Add pytrees of equal structure in a pairwise tree: ((0 + 1) + (2 + 3)) + ...

    Args:
      values: one pytree per environment group, in the order of the groups.

    Returns:
      Their sum.
    """
    values = list(values)
    while len(values) > 1:
        pairs = [
            jax.tree.map(jnp.add, values[i], values[i + 1]) for i in range(0, len(values) - 1, 2)
        ]
        values = pairs + values[len(pairs) * 2 :]
    return values[0]


def sum_over_microbatches(
    gradient: Callable[..., Any], minibatch_size: int, microbatch_size: int
) -> Callable[..., Any]:
    """Return the compiled gradient of a group's part of a minibatch, added up in calls of fixed size.

    Args:
      gradient: (..., start) to a pytree: the gradient of the microbatch that begins at unit `start`.
      minibatch_size: units that a group has in a minibatch.
      microbatch_size: units in one call, a divisor of `minibatch_size`.

    Returns:
      The function from (...) to the sum over all microbatches, in their order.
    """
    starts = [np.int32(start) for start in range(0, minibatch_size, microbatch_size)]
    first_gradient = jax.jit(gradient)

    @jax.jit(donate_argnums=0)
    def add_gradient(total: Any, *inputs: Any) -> Any:
        return jax.tree.map(jnp.add, total, gradient(*inputs))

    def summed(*inputs: Any) -> Any:
        total = first_gradient(*inputs, starts[0])
        for start in starts[1:]:
            total = add_gradient(total, *inputs, start)
        return total

    return summed


def on_device(tree: Any, device: jax.Device) -> Any:
    """Copy a pytree of arrays to a device; a pytree that is already there is returned unchanged.

    `jax.device_put` to the same device can take longer than a computation on a small array.
    """
    there = {device}
    if all(isinstance(x, jax.Array) and x.devices() == there for x in jax.tree.leaves(tree)):
        return tree
    return jax.device_put(tree, device)


class GroupExchange:
    """Moves pytrees between the learner devices of the groups and the device of the update.

    Every process computes the whole update on its first learner device, from the same G group
    results, so that parameters never have to be compared or averaged.
    """

    def __init__(self, placement: Placement):
        """Look up the devices of a placement."""
        devices = jax.local_devices()
        self.placement = placement
        self.lead = devices[placement.learner_device_ids[0]]
        self._group_devices = [
            devices[placement.learner_of_group[g]] for g in placement.local_groups
        ]
        by_process = [
            [d for d in jax.devices() if d.process_index == p]
            for p in range(placement.num_processes)
        ]
        # learner devices of all processes, in the order of the groups
        self.learners = [own[i] for own in by_process for i in placement.learner_device_ids]
        if placement.num_processes > 1:
            leads = [own[placement.learner_device_ids[0]] for own in by_process]
            mesh = Mesh(np.array(leads), ("process",))
            self._split = NamedSharding(mesh, PartitionSpec("process"))
            whole = NamedSharding(mesh, PartitionSpec())
            self._all_gather = jax.jit(lambda tree: tree, out_shardings=whole)
            self._stack = jax.jit(lambda *trees: jax.tree.map(lambda *x: jnp.stack(x), *trees))
            self._unstack = jax.jit(
                lambda tree: tuple(
                    jax.tree.map(lambda x, i=i: x[i], tree) for i in range(placement.num_groups)
                )
            )

    def device_of(self, group: int) -> jax.Device:
        """Return the learner device of a local group."""
        return self._group_devices[self.placement.local_groups.index(group)]

    def spread(self, tree: Any) -> list[Any]:
        """Copy a pytree from the lead device to the learner device of every local group."""
        copies = {device: on_device(tree, device) for device in set(self._group_devices)}
        return [copies[device] for device in self._group_devices]

    def gather(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """Collect one pytree per group of all processes, on the lead device of this one.

        Args:
          values: one pytree per local group, each on its group's learner device.

        Returns:
          One pytree per group of the run, in the order of the groups.
        """
        local = tuple(on_device(value, self.lead) for value in values)
        if self.placement.num_processes == 1:
            return local
        stacked = self._stack(*local)

        def to_global(x: jax.Array) -> jax.Array:
            shape = (self.placement.num_groups, *x.shape[1:])
            return jax.make_array_from_single_device_arrays(shape, self._split, [x])

        gathered = self._all_gather(jax.tree.map(to_global, stacked))
        return self._unstack(jax.tree.map(lambda x: x.addressable_data(0), gathered))

    def gather_bytes(self, payload: bytes) -> list[bytes]:
        """Collect bytes from every process, in the order of the processes."""
        if self.placement.num_processes == 1:
            return [payload]
        from jax.experimental import multihost_utils

        lengths = multihost_utils.process_allgather(np.array([len(payload)], np.int32)).ravel()
        padded = np.zeros(int(lengths.max()), np.uint8)
        padded[: len(payload)] = np.frombuffer(payload, np.uint8)
        rows = multihost_utils.process_allgather(padded).reshape(len(lengths), -1)
        return [row[:n].tobytes() for row, n in zip(rows, lengths, strict=True)]
