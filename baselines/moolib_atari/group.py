"""Who trains together: the peers of a generation and their collectives, and what decides who they are.

A peer asks to be let in. What launched the peers (launch.py) answers with a generation of the group: a
number, and its members. Where a peer leaves, comes, or is lost, or where the connections of a generation
fail, the next one takes its place.
"""

import contextlib
import json
import math
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, Work

SECONDS_BETWEEN_LOOKS = 0.05  # for a new generation of the group
SECONDS_FOR_A_DEATH = 1.0  # to be noticed, where peers say that they have lost one
SECONDS_TO_GATHER = 2.0  # in a generation, before its members say that one of them does not come
CONNECT_TIMEOUT = timedelta(seconds=3)  # of members that have all come
COLLECTIVE_TIMEOUT = timedelta(minutes=30)  # a dead peer is noticed long before, by its connection

GENERATION, JOINING = "generation", "joining"  # key and queue of the store
HERE = "here"  # and who has gone over to a generation: keys


class PeerLost(Exception):
    """A collective has failed, because a peer is gone."""


@contextlib.contextmanager
def _peer_lost_where_it_fails() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(str(error)) from error


class Generation(NamedTuple):
    """The peers that train together, until one leaves or joins."""

    number: int
    members: tuple[str, ...]
    begun: bool  # the group has learned something, which newcomers need


def pop_all(store: Store, queue: str) -> list[Any]:
    """Return the messages in a queue of the store, oldest first."""
    return [json.loads(store.queue_pop(queue, block=False)) for _ in range(store.queue_len(queue))]


class Membership:
    """Decides who is in the group: the side of what launched the peers."""

    def __init__(self, store: Store):
        """Begin without members, and without a generation.

        Args:
          store: that all peers share.
        """
        self._store = store
        self._number = 0
        self._members: list[str] = []
        self._changed = False
        self._complaint: float | None = None  # when the first peer said that this generation fails

    def look(self) -> list[str]:
        """Take in what peers ask; return the names of those that have joined."""
        joined = []
        for name, number in pop_all(self._store, JOINING):
            if not number:
                self._members.append(name)
                self._changed = True
                joined.append(name)
            elif name in self._members and number == self._number and self._complaint is None:
                self._complaint = time.monotonic()
        return joined

    def remove(self, name: str, regroup: bool) -> None:
        """Take a peer that has ended out of the group.

        Args:
          name: of the peer.
          regroup: whether the others need a new generation; if not, they get one where they ask.
        """
        if name in self._members:
            self._members.remove(name)
            self._changed |= regroup

    def publish(self, begun: bool) -> None:
        """Make a new generation, if one is needed.

        Args:
          begun: whether the group has learned something.
        """
        # A peer notices that it has lost another a little before that one's end is known here.
        complained = (
            self._complaint is not None and time.monotonic() - self._complaint > SECONDS_FOR_A_DEATH
        )
        if not self._members or not (self._changed or complained):
            return
        self._changed, self._complaint = False, None
        self._number += 1
        self._store.set(GENERATION, json.dumps([self._number, self._members, begun]))


class Group:
    """A peer's view of the group: who is in it, and its collectives."""

    def __init__(self, store: Store, name: str, device: torch.device):
        """Ask to be let in.

        Args:
          store: that all peers share, and what launched them.
          name: of this peer.
          device: of the gradients that are exchanged: a GPU needs one for each peer (NCCL refuses two
            peers on one). Everything else goes over the CPU.
        """
        self.name = name
        self.device = device
        self.generation = Generation(0, (), False)
        self._store = store
        self._on_cpu: Any = None  # the process groups of this generation
        self._on_gpu: Any = None
        self._next = self.generation
        self._last_look = 0.0
        self._given_up = (
            0  # number of the last generation that failed; there is none before the first
        )
        self._patience_ends = math.inf
        store.queue_push(JOINING, json.dumps([name, 0]))

    def look(self) -> bool:
        """Whether there is a new generation to go over to."""
        now = time.monotonic()
        if self.connected and now - self._last_look < SECONDS_BETWEEN_LOOKS:
            return False
        self._last_look = now
        if not self._store.check([GENERATION]):
            return False
        number, members, begun = json.loads(self._store.get(GENERATION))
        self._next = Generation(number, tuple(members), begun)
        return number != self.generation.number and self.name in members

    def follow(self) -> None:
        """Go over to the generation that `look` has seen, and say so to its other members.

        No work of the last one may be held any more: it would keep its connections open, on which the
        other peers would wait.
        """
        self._disconnect()
        self._store.delete_key(self._here(self.name))
        self.generation = self._next
        self._patience_ends = time.monotonic() + SECONDS_TO_GATHER
        self._store.set(self._here(self.name), "")

    def _here(self, name: str) -> str:
        return f"{HERE}-{self.generation.number}-{name}"

    def gather(self) -> bool:
        """Connect, once all members of this generation are in it; return whether it is now.

        Who does not come may have left or died since, or be in a later generation: so they are not waited
        for here, where nothing else would be seen. To be called before `look`: where all have come, all
        connect, even if there is a later generation already.
        """
        if self.connected or self.generation.number == self._given_up:
            return False
        if not self._store.check([self._here(name) for name in self.generation.members]):
            if time.monotonic() > self._patience_ends:
                self._patience_ends = math.inf
                self._complain()
            return False
        try:
            self._connect(PrefixStore(f"group-{self.generation.number}", self._store))
        except RuntimeError:
            self.give_up()  # somebody has died in this moment, or gone over to the next one
            return False
        return True

    def _connect(self, store: Store) -> None:
        rank, size = self.generation.members.index(self.name), len(self.generation.members)
        # The time that gloo waits for the others is the group's own.
        self._on_cpu = ProcessGroupGloo(PrefixStore("cpu", store), rank, size, CONNECT_TIMEOUT)
        self._on_cpu.set_timeout(COLLECTIVE_TIMEOUT)
        if self.device.type == "cuda":
            from torch.distributed import ProcessGroupNCCL

            gpu_store = PrefixStore("gpu", store)
            self._on_gpu = ProcessGroupNCCL(gpu_store, rank, size, COLLECTIVE_TIMEOUT)

    def _disconnect(self) -> None:
        if self._on_gpu is not None:
            self._on_gpu.abort()  # what waits for a dead peer would wait for ever
        old = [self._on_cpu, self._on_gpu]
        self._on_cpu = self._on_gpu = None
        # The end of a process group waits for collectives under way, and those for peers that have gone
        # on already: so it must not keep this peer from going on.
        threading.Thread(target=old.clear, name="old-group", daemon=True).start()

    @property
    def connected(self) -> bool:
        """Whether this peer is in a group."""
        return self._on_cpu is not None

    def give_up(self) -> None:
        """Leave this generation, whose collectives have failed, and ask for the next."""
        self._disconnect()
        self._patience_ends = math.inf
        self._given_up = self.generation.number
        self._complain()

    def _complain(self) -> None:
        self._store.queue_push(JOINING, json.dumps([self.name, self.generation.number]))

    def all_reduce(self, tensor: torch.Tensor) -> Work:
        """Start to add a tensor up over the peers, in place.

        Raises:
          PeerLost: here, in `is_done`, and in every other collective, if a peer is gone.
        """
        with _peer_lost_where_it_fails():
            return (self._on_gpu if tensor.is_cuda else self._on_cpu).allreduce([tensor])

    def is_done(self, work: Work) -> bool:
        """Whether a collective has ended."""
        alone = len(self.generation.members) == 1  # then there is nothing to wait for but a thread
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
