"""Membership of the group of peers, and the collectives of its members.

A peer asks to join. The process that launched the peers (launch.py) publishes a generation of the group:
a number and its members. When a peer leaves, joins or is lost, or the connections of a generation fail,
the next generation replaces it.
"""

import contextlib
import math
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, Work

from baselines.moolib_atari.sealed_store import SealedStore

SECONDS_BETWEEN_LOOKS = 0.05  # for a new generation of the group
SECONDS_FOR_A_DEATH = 1.0  # for a death to be noticed, after peers have complained of a lost one
SECONDS_TO_COME = 60.0  # for a member to join a generation, before it is expelled
SECONDS_TO_GATHER = 2.0  # for all members of a generation to join, before a member complains
CONNECT_TIMEOUT = timedelta(seconds=3)  # once all members have joined
COLLECTIVE_TIMEOUT = timedelta(
    minutes=30
)  # a dead peer is noticed long before, by its closed connection

GENERATION, JOINING = "generation", "joining"  # key and queue of the store
HERE = "here"  # prefix of the keys of members that have joined a generation


class PeerLost(Exception):
    """A collective has failed because a peer is gone."""


@contextlib.contextmanager
def _peer_lost_where_it_fails() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(str(error)) from error


class Generation(NamedTuple):
    """The peers that train together until one leaves or joins."""

    number: int
    members: tuple[str, ...]
    begun: bool  # the group has a state, which new peers need


def _here(number: int, name: str) -> str:
    """Name the value that a member sets when it has joined a generation."""
    return f"{HERE}-{number}-{name}"


class Membership:
    """Decides which peers are in the group; used by the process that launched them."""

    def __init__(self, store: SealedStore):
        """Begin without members and without a generation.

        Args:
          store: that all peers share.
        """
        self._published = math.inf  # when this generation was
        self._store = store
        self._number = 0
        self._members: list[str] = []
        self._changed = False
        self._complaint: float | None = None  # when the first peer complained of this generation

    def look(self) -> list[str]:
        """Process the requests of peers; return the names of those that have joined."""
        joined = []
        for name, number in self._store.pop_all(JOINING):
            if not number:
                self._members.append(name)
                self._changed = True
                joined.append(name)
            elif name in self._members and number == self._number and self._complaint is None:
                self._complaint = time.monotonic()
        return joined

    def remove(self, name: str, regroup: bool) -> None:
        """Remove a peer that has exited from the group.

        Args:
          name: of the peer.
          regroup: whether the others need a new generation; if not, they get one only if they ask.
        """
        if name in self._members:
            self._members.remove(name)
            self._changed |= regroup

    def absent(self) -> list[str]:
        """Return the members that have not joined the generation that was published a while ago.

        Such a member hangs; the others wait for it.
        """
        if time.monotonic() - self._published < SECONDS_TO_COME:
            return []
        return [n for n in self._members if not self._store.check([_here(self._number, n)])]

    def publish(self, begun: bool) -> None:
        """Publish a new generation, if one is needed.

        Args:
          begun: whether the group has a state.
        """
        # A peer notices the loss of another a little before its exit is known here.
        complained = (
            self._complaint is not None and time.monotonic() - self._complaint > SECONDS_FOR_A_DEATH
        )
        if not self._members or not (self._changed or complained):
            return
        self._changed, self._complaint = False, None
        self._number += 1
        self._store.set(GENERATION, [self._number, self._members, begun])
        self._published = time.monotonic()


class Group:
    """A peer's view of the group: its members and its collectives."""

    def __init__(
        self, store: SealedStore, name: str, device: torch.device, host: str | None = None
    ):
        """Ask to join.

        Args:
          store: that all peers and their launcher share.
          name: of this peer.
          device: of the gradients that are exchanged; each peer needs a GPU of its own (NCCL refuses two
            peers on one). Everything else is exchanged on the CPU.
          host: address of this peer for the others; by default that of the machine's name.
        """
        self._host = host
        self.name = name
        self.device = device
        self.generation = Generation(0, (), False)
        self._store = store
        self._on_cpu: Any = None  # the process groups of this generation
        self._on_gpu: Any = None
        self._next = self.generation
        self._last_look = 0.0
        self._given_up = 0  # number of the last generation that failed, 0 for none
        self._patience_ends = math.inf
        store.push(JOINING, [name, 0])

    def look(self) -> bool:
        """Return whether there is a new generation to join."""
        now = time.monotonic()
        if self.connected and now - self._last_look < SECONDS_BETWEEN_LOOKS:
            return False
        self._last_look = now
        published = self._store.get(GENERATION)
        if published is None:
            return False
        number, members, begun = published
        self._next = Generation(number, tuple(members), begun)
        return number > self.generation.number and self.name in members

    def follow(self) -> None:
        """Join the generation that `look` has found, and announce it to the other members.

        The caller must have dropped all collectives of the last generation: they keep connections open,
        on which the other peers would wait.
        """
        self._disconnect()
        self._store.delete(_here(self.generation.number, self.name))
        self.generation = self._next
        self._patience_ends = time.monotonic() + SECONDS_TO_GATHER
        self._store.set(_here(self.generation.number, self.name), "")

    def gather(self) -> bool:
        """Connect once all members have joined this generation; return whether this call connected.

        A missing member may have left, died or joined a later generation, so this does not block. Call it
        before `look`: if all have joined, all connect, even if there is a later generation already.
        """
        if self.connected or self.generation.number == self._given_up:
            return False
        number = self.generation.number
        if not self._store.check([_here(number, name) for name in self.generation.members]):
            if time.monotonic() > self._patience_ends:
                self._patience_ends = math.inf
                self._complain()
            return False
        try:
            self._connect(
                PrefixStore(self._store.secret_name(f"group-{number}"), self._store.store)
            )
        except RuntimeError:
            self.give_up()  # a member has just died, or joined the next generation
            return False
        return True

    def _connect(self, store: Store) -> None:
        rank, size = self.generation.members.index(self.name), len(self.generation.members)
        # gloo's timeout for the others is that of the group.
        options = ProcessGroupGloo._Options()
        options._timeout = CONNECT_TIMEOUT
        options._devices = [
            ProcessGroupGloo.create_device(hostname=self._host)
            if self._host
            else ProcessGroupGloo.create_default_device()
        ]
        self._on_cpu = ProcessGroupGloo(PrefixStore("cpu", store), rank, size, options)
        self._on_cpu.set_timeout(COLLECTIVE_TIMEOUT)
        if self.device.type == "cuda":
            from torch.distributed import ProcessGroupNCCL

            gpu_store = PrefixStore("gpu", store)
            self._on_gpu = ProcessGroupNCCL(gpu_store, rank, size, COLLECTIVE_TIMEOUT)

    def _disconnect(self) -> None:
        if self._on_gpu is not None:
            self._on_gpu.abort()  # a collective that waits for a dead peer would never end
        old = [self._on_cpu, self._on_gpu]
        self._on_cpu = self._on_gpu = None
        # Destroying a process group waits for its collectives, and those for peers that may have left
        # already. So it happens in another thread.
        threading.Thread(target=old.clear, name="old-group", daemon=True).start()

    @property
    def connected(self) -> bool:
        """Whether this peer is in a group."""
        return self._on_cpu is not None

    def give_up(self) -> None:
        """Leave this generation, whose collectives have failed, and ask for the next one."""
        self._disconnect()
        self._patience_ends = math.inf
        self._given_up = self.generation.number
        self._complain()

    def _complain(self) -> None:
        self._store.push(JOINING, [self.name, self.generation.number])

    def all_reduce(self, tensor: torch.Tensor) -> Work:
        """Start to sum a tensor over the peers, in place.

        Raises:
          PeerLost: here, in `is_done`, and in every other collective, if a peer is gone.
        """
        with _peer_lost_where_it_fails():
            return (self._on_gpu if tensor.is_cuda else self._on_cpu).allreduce([tensor])

    def is_done(self, work: Work) -> bool:
        """Return whether a collective has finished."""
        alone = (
            len(self.generation.members) == 1
        )  # then only a thread of this process is waited for
        if not (alone or work.is_completed()):
            return False
        with _peer_lost_where_it_fails():
            work.wait()
        return True

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a small tensor of every peer, in the order of the members [peers, ...]."""
        outputs = [torch.empty_like(tensor) for _ in self.generation.members]
        with _peer_lost_where_it_fails():
            self._on_cpu.allgather([outputs], [tensor]).wait()
        return torch.stack(outputs)

    def broadcast(self, tensor: torch.Tensor, source: str) -> None:
        """Copy a tensor from one peer to all, in place."""
        root = self.generation.members.index(source)
        with _peer_lost_where_it_fails():
            self._on_cpu.broadcast(tensor, root).wait()
