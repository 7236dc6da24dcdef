"""Copies the parameters of a Flax network of cleanba/networks.py into its torch twin."""

import numpy as np
import torch


def _conv(kernel):
    return np.transpose(kernel, (3, 2, 0, 1))  # HWIO to OIHW


def copy_from_flax(params, network):
    """Load Flax parameters into a torch network of the same name and sizes."""
    p = params["params"]
    state = {}

    def put(name, layer, conv=False):
        kernel = np.asarray(layer["kernel"])
        state[f"{name}.weight"] = _conv(kernel) if conv else kernel.T
        state[f"{name}.bias"] = np.asarray(layer["bias"])

    for stage in range(3):
        if f"ConvSequence_{stage}" in p:
            sequence = p[f"ConvSequence_{stage}"]
            put(f"trunk.convs.{stage}", sequence["Conv_0"], conv=True)
            for block in range(2):
                # Flax numbers modules as they are made, and the outer one of f()(g()(x)) is made first
                layers = sequence[f"ResidualBlock_{1 - block}"]
                for conv in range(2):
                    name = f"trunk.blocks.{stage}.{block}.conv_{conv}"
                    put(name, layers[f"Conv_{conv}"], conv=True)
        if f"StridedConv_{stage}" in p:
            put(f"trunk.convs.{stage}", p[f"StridedConv_{stage}"], conv=True)
    for i in range(3):
        if f"Dense_{i}" in p:
            put(f"trunk.dense.{i}", p[f"Dense_{i}"])
        for head in ("actor", "critic"):
            if f"{head}_{i}" in p:
                put(f"{head}_layers.{i}", p[f"{head}_{i}"])
    put("actor", p["actor"])
    put("critic", p["critic"])
    tensors = {k: torch.from_numpy(np.array(v, np.float32)) for k, v in state.items()}
    network.load_state_dict(tensors)


def flax_like(gradients, network):
    """Return the gradients of a Flax network under the names and shapes of its torch twin's."""
    copy_from_flax(gradients, network)
    return {name: value.numpy().copy() for name, value in network.state_dict().items()}
