"""The store that the peers of a run share, in which only holders of the run's key can write.

torch's TCPStore authenticates nobody: any process that reaches its port reads and writes it. So the store
listens on the loopback interface alone, and each message carries an HMAC under a random key that the process
that launched the peers hands to each of them. What has no valid HMAC is dropped, and so is a message that
was taken from the store and pushed again. A process of the same machine can still delete messages, which
stops the run but does not change its record.
"""

import hmac
import secrets
import socket
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import msgspec
from torch.distributed import Store, TCPStore

HOST = "127.0.0.1"
STORE_TIMEOUT = timedelta(minutes=5)
_SEAL = 64  # characters of an HMAC-SHA-256


def open_store() -> TCPStore:
    """Return a new store on the loopback interface; its `port` is chosen by the system."""
    listener = socket.socket()
    listener.bind((HOST, 0))
    listener.listen()
    port = listener.getsockname()[1]
    # Given a port alone, torch listens on all interfaces.
    return TCPStore(
        HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def connect(port: int) -> TCPStore:
    """Return a connection to a store that another process of this machine opened."""
    return TCPStore(HOST, port, is_master=False, timeout=STORE_TIMEOUT)


class _Message(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A value with what tells it from a repetition."""

    sender: str
    number: int
    value: msgspec.Raw


class SealedStore:
    """Values and queues of messages in a store, sealed with a key."""

    def __init__(self, store: Store, key: bytes):
        """Use a store.

        Args:
          store: with `set`, `get`, `check`, `delete_key` and queues.
          key: of the run.
        """
        self.store = store
        self.num_refused = 0  # messages without a valid seal
        self._key = key
        self._sender = secrets.token_hex(8)
        self._sent = 0
        self._last: dict[str, int] = {}  # number of the last message in a queue, by sender

    def secret_name(self, name: str) -> str:
        """Return a name that nobody without the key can guess."""
        return f"{name}-{hmac.digest(self._key, name.encode(), 'sha256').hex()[:16]}"

    def set(self, name: str, value: Any) -> None:
        """Set a value that can be written as JSON."""
        self.store.set(name, self._seal(name, value))

    def get(self, name: str) -> Any | None:
        """Return a value, or None where there is none with a valid seal."""
        if not self.store.check([name]):
            return None
        message = self._open(name, self.store.get(name))
        return None if message is None else msgspec.json.decode(message.value)

    def check(self, names: Sequence[str]) -> bool:
        """Return whether all of some values are there; seals are not checked."""
        return self.store.check(list(names))

    def delete(self, name: str) -> None:
        """Delete a value, if it is there."""
        self.store.delete_key(name)

    def push(self, queue: str, value: Any) -> None:
        """Append a message to a queue."""
        self.store.queue_push(queue, self._seal(queue, value))

    def pop_all(self, queue: str) -> list[Any]:
        """Return the messages in a queue, oldest first, without those that are not this run's."""
        values = []
        for _ in range(self.store.queue_len(queue)):
            message = self._open(queue, self.store.queue_pop(queue, block=False))
            if message is not None and message.number > self._last.get(message.sender, 0):
                self._last[message.sender] = message.number
                values.append(msgspec.json.decode(message.value))
        return values

    def _seal(self, place: str, value: Any) -> str:
        self._sent += 1
        body = msgspec.json.encode([self._sender, self._sent, value])
        return self._hmac(place, body) + body.decode()

    def _open(self, place: str, data: bytes) -> _Message | None:
        seal, body = data[:_SEAL], data[_SEAL:]
        if hmac.compare_digest(seal, self._hmac(place, body).encode()):
            return msgspec.json.decode(body, type=_Message)
        self.num_refused += 1
        if self.num_refused == 1:
            print("a message that no peer of this run has sent was dropped", file=sys.stderr)
        return None

    def _hmac(self, place: str, body: bytes) -> str:
        return hmac.digest(self._key, place.encode() + b"\0" + body, "sha256").hex()
