"""The fingerprint of parameters: one SHA-256 over all tensors."""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np


def named_arrays(params: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return the arrays of nested mappings by path, sorted by path.

    Args:
      params: mappings, nested to any depth, of arrays (NumPy's, or anything `np.asarray` takes).

    Returns:
      Array by path, such as `['params']['Dense_0']['kernel']`, as `jax.tree_util.keystr` spells it.
    """
    return dict(sorted(_leaves(params, "")))


def _leaves(params: Mapping[str, Any], path: str) -> Iterator[tuple[str, np.ndarray]]:
    for name, value in params.items():
        inner = f"{path}[{name!r}]"
        if isinstance(value, Mapping):
            yield from _leaves(value, inner)
        else:
            yield inner, np.asarray(value)


def fingerprint(params: Mapping[str, Any]) -> str:
    """Return the SHA-256 of parameters: path, shape, dtype and bytes of every tensor, by path.

    Args:
      params: see `named_arrays`.
    """
    digest = hashlib.sha256()
    for path, array in named_arrays(params).items():
        digest.update(f"{path} {array.shape} {array.dtype.str}\n".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
