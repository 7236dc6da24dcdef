"""What the torch baselines save and record of their networks and devices."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cleanba.exact.placement import cpu_model
from cleanba.record import fingerprint
from cleanba.record.files import LARGEST_MODEL, read_arrays

PACKAGES = ("torch", "envpool", "numpy")  # whose versions a result may depend on


def describe_device(device: torch.device) -> dict[str, Any]:
    """Return the part of a record's `hardware` that every torch program can determine."""
    kind = cpu_model() if device.type == "cpu" else torch.cuda.get_device_name(device)
    return {
        "platform": device.type,
        "device_kind": kind,
        "cpu_affinity": sorted(os.sched_getaffinity(0)),
    }


def arrays_of(network: torch.nn.Module) -> dict[str, np.ndarray]:
    """Return parameters and buffers by name."""
    return {name: value.detach().cpu().numpy() for name, value in network.state_dict().items()}


def fingerprint_network(network: torch.nn.Module) -> str:
    """Return the fingerprint of a network's parameters and buffers."""
    return fingerprint(arrays_of(network))


def training_arrays(
    network: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, np.ndarray]:
    """Return parameters, buffers, and what an optimizer keeps of each parameter, by name."""
    arrays = {f"parameters/{name}": array for name, array in arrays_of(network).items()}
    for name, parameter in network.named_parameters():
        for key, value in optimizer.state[parameter].items():
            arrays[f"optimizer/{name}/{key}"] = value.detach().cpu().numpy()
    return arrays


# What torch's optimizers keep of each parameter, beside the number of steps.
_KEPT = {torch.optim.RMSprop: ("square_avg",), torch.optim.Adam: ("exp_avg", "exp_avg_sq")}


def initialize_optimizer(network: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Make what an optimizer keeps of each parameter, which torch does at its first step."""
    for parameter in network.parameters():
        kept = {key: torch.zeros_like(parameter) for key in _KEPT[type(optimizer)]}
        optimizer.state[parameter] = {"step": torch.tensor(0.0)} | kept


def load_training_arrays(
    network: torch.nn.Module, optimizer: torch.optim.Optimizer, arrays: Mapping[str, np.ndarray]
) -> None:
    """Load what `training_arrays` returned, into an optimizer that has been initialized."""
    state = network.state_dict()
    network.load_state_dict(
        {name: torch.from_numpy(arrays[f"parameters/{name}"]) for name in state}
    )
    for name, parameter in network.named_parameters():
        for key, value in optimizer.state[parameter].items():
            value.copy_(torch.from_numpy(arrays[f"optimizer/{name}/{key}"]))


def save_parameters(network: torch.nn.Module, path: Path) -> None:
    """Save parameters as .npz, which is loaded without unpickling."""
    save_arrays(arrays_of(network), path)


def save_arrays(arrays: Mapping[str, np.ndarray], path: Path) -> None:
    """Replace an .npz file atomically."""
    temporary = path.with_suffix(".tmp.npz")
    np.savez(temporary, **arrays)
    os.replace(temporary, path)


def load_parameters(network: torch.nn.Module, path: Path, prefix: str = "") -> None:
    """Load what `save_parameters` wrote, or the arrays of a larger file whose names begin with `prefix`.

    Raises:
      ValueError: with one line, if the file cannot be read or does not fit the network.
    """
    try:
        arrays = read_arrays(path, LARGEST_MODEL)
        network.load_state_dict(
            {
                name.removeprefix(prefix): torch.from_numpy(array)
                for name, array in arrays.items()
                if name.startswith(prefix)
            }
        )
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from None
