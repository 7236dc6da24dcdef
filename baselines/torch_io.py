"""What the torch baselines save and record of their networks and devices."""

import os
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


def save_parameters(network: torch.nn.Module, path: Path) -> None:
    """Save parameters as .npz, which is loaded without unpickling."""
    temporary = path.with_suffix(".tmp.npz")
    np.savez(temporary, **arrays_of(network))
    os.replace(temporary, path)


def load_parameters(network: torch.nn.Module, path: Path) -> None:
    """Load what `save_parameters` wrote.

    Raises:
      ValueError: with one line, if the file cannot be read or does not fit the network.
    """
    try:
        arrays = read_arrays(path, LARGEST_MODEL)
        network.load_state_dict({name: torch.from_numpy(array) for name, array in arrays.items()})
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from None
