"""Trees of JAX arrays as named arrays, which is how a checkpoint holds them."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from cleanba.record.checkpoints import check_arrays


def to_arrays(tree: Any) -> dict[str, np.ndarray]:
    """Return the arrays of a tree by path, such as `['params']['Dense_0']['kernel']`."""
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def from_arrays(arrays: Mapping[str, np.ndarray], like: Any) -> Any:
    """Return a tree of arrays.

    Args:
      arrays: what `to_arrays` returned.
      like: a tree of the same structure, shapes and dtypes, or these alone.

    Raises:
      RecordError: with one line, if the arrays are those of another network or optimizer.
    """
    leaves = jax.tree.leaves_with_path(like)
    expected = {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
    check_arrays(arrays, expected)
    return jax.tree.unflatten(jax.tree.structure(like), [arrays[path] for path in expected])
