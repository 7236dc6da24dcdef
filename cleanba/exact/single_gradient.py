"""Updates with one environment group and one gradient call per minibatch: nothing to move or to sum.

Only one layout is possible then, so gradient and optimizer step may be one executable, and a whole
update one compiled loop.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def make_learn(
    gradient: Callable[..., Any],
    optimizer_step: Callable[..., tuple[Any, Any, Any]],
    *,
    num_minibatches: int,
    loop: bool,
) -> Callable[..., tuple[Any, Any, Any]]:
    """Return the function that goes through the minibatches of an update.

    Args:
      gradient: (params, *data of the group, minibatch, start) to a pytree of sums.
      optimizer_step: (params, opt_state, tuple of sums) to (params, opt_state, metrics).
      num_minibatches: of an update.
      loop: compile one loop over all minibatches. XLA computes its own convolutions slowly inside a loop on
        a CPU; networks with these go through the minibatches one by one.

    Returns:
      The function from (params, opt_state, *data, each a list of one) to (params, opt_state, metrics of
      the last minibatch).
    """

    def step(params: Any, opt_state: Any, minibatch: jax.Array, *data: Any) -> tuple[Any, Any, Any]:
        sums = gradient(params, *data, minibatch, np.int32(0))
        return optimizer_step(params, opt_state, (sums,))

    compiled_step = jax.jit(step, donate_argnums=1)

    @jax.jit(donate_argnums=1)
    def all_steps(params: Any, opt_state: Any, *data: Any) -> tuple[Any, Any, Any]:
        def body(carry: tuple[Any, Any], minibatch: jax.Array) -> tuple[tuple[Any, Any], Any]:
            *carry, metrics = step(*carry, minibatch, *data)
            return tuple(carry), metrics

        carry, metrics = jax.lax.scan(
            body, (params, opt_state), jnp.arange(num_minibatches, dtype=jnp.int32)
        )
        return *carry, jax.tree.map(lambda x: x[-1], metrics)

    if loop:
        return lambda params, opt_state, *data: all_steps(
            params, opt_state, *(group for (group,) in data)
        )

    def learn(params: Any, opt_state: Any, *data: Sequence[Any]) -> tuple[Any, Any, Any]:
        for minibatch in map(np.int32, range(num_minibatches)):
            params, opt_state, metrics = compiled_step(
                params, opt_state, minibatch, *(group for (group,) in data)
            )
        return params, opt_state, metrics

    return learn
