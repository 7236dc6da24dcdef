"""The real moolib in place of accumulator.py, where it is installed (github.com/facebookresearch/moolib).

It is in no package registry, so nothing installs it. Comments note where the library, at 06e7a3e, deviates
from its documentation. docs/baselines.md states how the adapter was tested.
"""

import io
import socket
import threading
import uuid
from typing import Any

import numpy as np
import torch
from torch.distributed import Store

from baselines.moolib_atari.accumulator import State
from cleanba.record.files import read_arrays

ADDRESS = "moolib-broker"  # key of the store


def start_broker(store: Store) -> None:
    """Run moolib's broker in a thread of this process, and tell the peers where it is."""
    import moolib

    with socket.socket() as probe:  # a port that is free now
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    broker = moolib.Broker()
    broker.set_name("broker")
    broker.listen(address)
    stopped = threading.Event()

    def serve() -> None:
        while not stopped.wait(0.1):
            broker.update()

    threading.Thread(target=serve, name="moolib-broker", daemon=True).start()
    store.set(ADDRESS, address)


class MoolibAccumulator:
    """`moolib.Accumulator` with its group, which is updated with it."""

    def __init__(self, store: Store, name: str, model: torch.nn.Module, timeout: float):
        """Connect to the broker.

        Args:
          store: where the broker's address is.
          name: of this peer.
          model: whose gradients are summed.
          timeout: seconds without a ping after which the others continue without a peer.
        """
        import moolib

        self._rpc = moolib.Rpc()
        # A restarted peer needs a new name: with the old one the broker never lets it into the group.
        self._rpc.set_name(f"{name}-{uuid.uuid4().hex[:8]}")
        self._rpc.connect(store.get(ADDRESS).decode())
        self._group = moolib.Group(self._rpc, name="moolib_atari")
        self._group.set_timeout(timeout)
        self._accumulator = moolib.Accumulator(
            name="model", parameters=model.parameters(), buffers=model.buffers(), group=self._group
        )

    def update(self) -> None:
        """Process what has arrived from the other peers."""
        self._group.update()
        self._accumulator.update()

    def generation(self) -> int:
        """Return the id of the group as it is now; gradients in transit are lost when it changes."""
        return self._group.sync_id()

    def set_state(self, state: State) -> None:
        """Send the state to the peers that need it, as bytes: moolib sends arrays, but receives none."""
        buffer = io.BytesIO()
        np.savez(buffer, **state)
        self._accumulator.set_state(buffer.getvalue())

    def state(self) -> State:
        """Return the state that has arrived."""
        return read_arrays(bytes(self._accumulator.state()))

    def leave(self) -> None:
        """Nothing to wait for: moolib's peers leave as they like."""

    def __getattr__(self, name: str) -> Any:
        """Everything else is moolib's own."""
        return getattr(self._accumulator, name)
