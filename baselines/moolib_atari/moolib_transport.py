"""The real moolib in place of accumulator.py, where it is installed (github.com/facebookresearch/moolib).

Written after moolib's documentation and not run here: the library is in no package registry.
"""

import socket
import threading
from typing import Any

import torch
from torch.distributed import Store

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

    def __init__(self, store: Store, name: str, model: torch.nn.Module):
        """Connect to the broker.

        Args:
          store: where the broker's address is.
          name: of this peer.
          model: whose gradients are summed.
        """
        import moolib

        self._rpc = moolib.Rpc()
        self._rpc.set_name(name)
        self._rpc.connect(store.get(ADDRESS).decode())
        self._group = moolib.Group(self._rpc, name="moolib_atari")
        self._accumulator = moolib.Accumulator(
            name="model", parameters=model.parameters(), buffers=model.buffers(), group=self._group
        )

    def update(self) -> None:
        """See what has come from the other peers."""
        self._group.update()
        self._accumulator.update()

    def generation(self) -> None:
        """Return nothing: moolib does not say which gradients a lost peer takes with it."""

    def leave(self) -> None:
        """Nothing to wait for: moolib's peers leave as they like."""

    def __getattr__(self, name: str) -> Any:
        """Everything else is moolib's own."""
        return getattr(self._accumulator, name)
