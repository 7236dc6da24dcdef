"""A fingerprint is of paths, shapes, types and bytes, and needs neither jax nor torch."""

import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import linen as nn

from cleanba.record import fingerprint
from cleanba.record.fingerprint import named_arrays


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


class Network(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.Conv(2, (2, 2), dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)(x))


def test_paths_are_those_of_jax():
    """jax's own paths are the oracle, on parameters of flax and on a dictionary of torch's names."""
    torch_state = {k: v.numpy() for k, v in torch.nn.LSTM(2, 3).state_dict().items()}
    for params in (Network().init(jax.random.key(0), np.zeros((1, 4, 4, 1))), torch_state):
        leaves = {jax.tree_util.keystr(p): v for p, v in jax.tree.leaves_with_path(params)}
        assert list(named_arrays(params)) == sorted(leaves)
        digest = hashlib.sha256()
        for path, leaf in sorted(leaves.items()):
            array = np.asarray(leaf)
            digest.update(f"{path} {array.shape} {array.dtype.str}\n".encode() + array.tobytes())
        assert fingerprint(params) == digest.hexdigest()
