"""The packed actions of a run, with a digest of their results.

Environments are deterministic given their seeds and actions, so actions are enough to re-simulate
every episode of a run (replay.py) and to rebuild its environments after a crash (training.py).

The file is a sequence of frames of one fixed size, one per rollout of the whole run:

    actions [T, N], row by row, each in the fewest bits that hold all actions; zero bits up to a byte
    digest, 16 bytes: BLAKE2b of the digests of all groups, in their order

The digest of a group covers its actions, unclipped rewards and ends of episodes since the start of the
run, so a frame also verifies all frames before it. This module imports neither jax nor torch.
"""

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cleanba.record.files import open_regular

LARGEST_ACTIONS = 1 << 40  # bytes; read frame by frame
DIGEST_SIZE = 16  # bytes


class DamagedActions(ValueError):
    """Recorded actions that are out of range."""


class Shape(NamedTuple):
    """The numbers that determine the size of a frame."""

    num_steps: int  # T, steps of each environment in a rollout
    num_envs: int  # N, environments of the whole run
    num_actions: int

    @property
    def bits(self) -> int:
        """Bits of one action."""
        return max(1, (self.num_actions - 1).bit_length())

    @property
    def frame_size(self) -> int:
        """Bytes of one frame."""
        return -(-self.num_steps * self.num_envs * self.bits // 8) + DIGEST_SIZE


class Frame(NamedTuple):
    """One rollout of the whole run."""

    actions: np.ndarray  # int32 [T, N]
    digest: bytes


class GroupDigest:
    """Running digest of one environment group."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=DIGEST_SIZE)

    def update(self, actions: np.ndarray, rewards: np.ndarray, dones: np.ndarray) -> bytes:
        """Add a rollout; return the digest of everything so far.

        Args:
          actions: int32 [T, B].
          rewards: unclipped float32 [T, B].
          dones: bool [T, B].
        """
        self._hash.update(np.ascontiguousarray(actions, "<i4"))
        self._hash.update(np.ascontiguousarray(rewards, "<f4"))
        self._hash.update(np.ascontiguousarray(dones, bool))
        return self._hash.digest()


def combine_digests(groups: Iterable[bytes]) -> bytes:
    """Return the digest of a frame from those of all groups, in their order."""
    return hashlib.blake2b(b"".join(groups), digest_size=DIGEST_SIZE).digest()


def pack(frame: Frame, shape: Shape) -> bytes:
    """Return a frame as bytes.

    Raises:
      ValueError: if the actions are not of that shape and range.
    """
    actions = np.asarray(frame.actions)
    if actions.shape != (shape.num_steps, shape.num_envs):
        raise ValueError(f"actions {actions.shape} do not fit {shape}")
    if actions.min() < 0 or actions.max() >= shape.num_actions:
        raise ValueError(f"actions from {actions.min()} to {actions.max()} do not fit {shape}")
    words = actions.astype(">u4").reshape(-1, 1).view(np.uint8)
    bits = np.unpackbits(words, axis=1)[:, 32 - shape.bits :]
    return np.packbits(bits).tobytes() + frame.digest


def unpack(data: bytes, shape: Shape) -> Frame:
    """Decode a frame from `shape.frame_size` bytes.

    Raises:
      DamagedActions: if an action is out of range; environments do not check this.
    """
    packed = np.frombuffer(data[:-DIGEST_SIZE], np.uint8)
    count = shape.num_steps * shape.num_envs
    bits = np.unpackbits(packed, count=count * shape.bits).reshape(count, shape.bits)
    words = np.packbits(np.pad(bits, ((0, 0), (32 - shape.bits, 0))), axis=1)
    actions = words.view(">u4").astype(np.int32)
    if actions.max() >= shape.num_actions:
        raise DamagedActions(f"action {actions.max()} of {shape.num_actions}")
    return Frame(actions.reshape(shape.num_steps, shape.num_envs), data[-DIGEST_SIZE:])


def read_frames(path: Path, shape: Shape, count: int | None = None) -> Iterator[Frame]:
    """Yield the frames of a file, or its first `count`; stops at a torn frame."""
    with open_regular(path, LARGEST_ACTIONS) as file:
        while count is None or count > 0:
            data = file.read(shape.frame_size)
            if len(data) < shape.frame_size:
                return
            yield unpack(data, shape)
            count = None if count is None else count - 1
