"""moolib's Accumulator over torch.distributed: sums the gradients of all peers while they act.

Its methods are those of `moolib.Accumulator` (https://facebookresearch.github.io/moolib), with the same
meaning. A peer sums its own gradients since the last step in place. A step takes two collectives: the peers
count their gradients, repeatedly, until there are as many as the virtual batch size; then they add them up.
Both run in the background, and `update` checks one of them per call. So a step takes at least two calls:
with one peer, an action is taken in between, as in moolib, unless acting waits for learning.
"""

import contextlib
import io
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch.distributed import Work

from baselines.moolib_atari.group import Group, PeerLost
from cleanba.record.files import read_arrays

State = Mapping[str, np.ndarray]  # what a new peer receives from the leader


class StateLost(RuntimeError):
    """No peer is left that has the group's state."""


class GradientStats(NamedTuple):
    """Counts of the gradients of a step."""

    num_gradients: int
    num_skipped: int
    batch_size: int


class Accumulator:
    """Sums the gradients of all peers, and sends the leader's state to new peers."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], group: Group):
        """Accumulate the gradients of a model.

        Args:
          parameters: of the model; all have gradients whenever `reduce_gradients` is called.
          group: the peers.
        """
        self._parameters = list(parameters)
        self._group = group
        # of this peer since the last step: the sum of gradients, and `GradientStats`
        self._own = torch.zeros(sum(p.numel() for p in self._parameters), device=group.device)
        self._own_counts = torch.zeros(3, dtype=torch.int64)
        self._version = 1
        self._virtual_batch_size = 1
        self._leader = ""
        self._has_state = False  # received from a leader, or its own as a leader
        self._wants_state = False
        self._new_state: State | None = None
        self._has_gradients = False
        self._stats = GradientStats(0, 0, 0)
        self._counting: tuple[Work, torch.Tensor] | None = None
        self._more_to_count = False
        self._reducing: tuple[list[Work], torch.Tensor, torch.Tensor] | None = None

    def set_virtual_batch_size(self, size: int) -> None:
        """Set the batch size, over all peers, at which a step is made."""
        self._virtual_batch_size = size

    def set_model_version(self, version: int) -> None:
        """Set the version of this peer's model, for example after loading a checkpoint."""
        self._version = version

    def model_version(self) -> int:
        """Return the version of the model, which every step raises."""
        return self._version

    def generation(self) -> int:
        """Return the number of the group's generation; gradients in transit are lost when it changes."""
        return self._group.generation.number

    def connected(self) -> bool:
        """Whether this peer takes part: it is in a group, and has the group's state."""
        return self._group.connected and self._has_state and not self._wants_state

    def get_leader(self) -> str:
        """Return the name of the leader, whose state the others take."""
        return self._leader

    def is_leader(self) -> bool:
        """Whether this peer is the leader."""
        return self._leader == self._group.name

    def wants_state(self) -> bool:
        """Whether this peer is the leader and has to send its state."""
        return self._wants_state

    def set_state(self, state: State) -> None:
        """Send the state to the peers that need it."""
        buffer = io.BytesIO()
        np.savez(buffer, **state)
        data = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
        with self._a_lost_peer_ends_the_generation():
            self._group.broadcast(torch.tensor([len(data), self._version]), self._leader)
            self._group.broadcast(data, self._leader)
            self._wants_state = False

    def has_new_state(self) -> bool:
        """Whether a state has arrived from the leader."""
        return self._new_state is not None

    def state(self) -> State | None:
        """Return the state that has arrived, once."""
        state, self._new_state = self._new_state, None
        return state

    def wants_gradients(self) -> bool:
        """Whether `reduce_gradients` or `skip_gradients` is to be called."""
        return self.connected() and self._reducing is None and not self._has_gradients

    def reduce_gradients(self, batch_size: int) -> None:
        """Contribute the parameters' gradients of a batch; they are set to zero."""
        flat = torch.cat([parameter.grad.reshape(-1) for parameter in self._parameters])
        self._own += flat.to(self._own.device)
        self._zero()
        self._give(GradientStats(1, 0, batch_size))

    def skip_gradients(self) -> None:
        """Take part without a gradient."""
        self._give(GradientStats(0, 1, 0))

    def has_gradients(self) -> bool:
        """Whether the parameters hold the gradients of a step, the mean of all contributions."""
        return self._has_gradients

    def get_gradient_stats(self) -> dict[str, int]:
        """Return `num_gradients`, `num_skipped` and `batch_size` of the step, over all peers."""
        return self._stats._asdict()

    def zero_gradients(self) -> None:
        """Reset the gradients after a step."""
        self._zero()
        self._has_gradients = False

    def update(self) -> None:
        """Process what has arrived from the other peers. Call it often."""
        if self._group.gather():
            self._begin_generation()
        elif self._group.look():
            self._drop()
            self._group.follow()
        if not self._group.connected:
            return
        with self._a_lost_peer_ends_the_generation():
            if self._reducing is not None:
                if all(map(self._group.is_done, self._reducing[0])):
                    self._finish_reducing()
            elif self._counting is not None and self._group.is_done(self._counting[0]):
                self._finish_counting()

    def leave(self) -> None:
        """Wait until all peers have made the last step, so that none loses it when this one exits."""
        if self._group.connected:
            with contextlib.suppress(PeerLost):  # then the others make it without this peer
                self._group.all_gather(torch.tensor([self._version]))

    def _give(self, given: GradientStats) -> None:
        if not self.wants_gradients():
            raise RuntimeError("gradients can be contributed only if wants_gradients()")
        self._own_counts += torch.tensor(given)
        if self._counting is None:
            with self._a_lost_peer_ends_the_generation():
                self._count()
        else:
            self._more_to_count = True

    def _count(self) -> None:
        size = self._own_counts[2:].clone()
        self._counting = (self._group.all_reduce(size), size)
        self._more_to_count = False

    def _finish_counting(self) -> None:
        _, size = self._counting
        self._counting = None
        if int(size) >= self._virtual_batch_size:
            # what was contributed since the count takes part as well
            gradients, counts = self._own.clone(), self._own_counts.clone()
            self._own.zero_()
            self._own_counts.zero_()
            # checked in this order: a lost peer is noticed on the CPU, while a GPU's collective hangs
            works = [self._group.all_reduce(counts), self._group.all_reduce(gradients)]
            self._reducing = (works, gradients, counts)
        elif self._more_to_count:
            self._count()

    def _finish_reducing(self) -> None:
        _, gradients, counts = self._reducing
        self._reducing = None
        self._stats = GradientStats(*counts.tolist())
        gradients = gradients.to(self._parameters[0].device)
        offset = 0
        for parameter in self._parameters:
            flat = gradients[offset : offset + parameter.numel()]
            parameter.grad = (flat / self._stats.num_gradients).view_as(parameter)
            offset += parameter.numel()
        self._version += 1
        self._has_gradients = True

    def _begin_generation(self) -> None:
        """Find the leader, and give all peers its state; gradients in transit are lost.

        Raises:
          StateLost: if the group has learned something and no member has its state.
        """
        with self._a_lost_peer_ends_the_generation():
            mine = torch.tensor([self._version, int(self._has_state)])
            all_of_them = self._group.all_gather(mine).tolist()
            members = self._group.generation.members
            rows = [(*row, name) for row, name in zip(all_of_them, members, strict=True)]
            # a peer with a state before one without, then the newest version
            version, has_state, self._leader = max(rows, key=lambda row: (row[1], row[0], row[2]))
            if self._group.generation.begun and not has_state:
                raise StateLost("no peer is left that has what the group has learned")
            someone_behind = any(row[:2] != (version, 1) for row in rows if row[2] != self._leader)
            if self.is_leader():
                self._has_state = True
                self._wants_state = someone_behind
            elif someone_behind:
                header = torch.zeros(2, dtype=torch.int64)
                self._group.broadcast(header, self._leader)
                size, version = header.tolist()
                data = torch.zeros(size, dtype=torch.uint8)
                self._group.broadcast(data, self._leader)
                self._new_state = read_arrays(data.numpy().tobytes())
                self._version = version
                self._has_state = True

    def _drop(self) -> None:
        self._counting = self._reducing = None
        self._more_to_count = self._has_gradients = self._wants_state = False
        self._own.zero_()
        self._own_counts.zero_()
        self._zero()

    def _zero(self) -> None:
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.zero_()

    @contextlib.contextmanager
    def _a_lost_peer_ends_the_generation(self) -> Iterator[None]:
        try:
            yield
        except PeerLost:
            self._drop()
            self._group.give_up()
