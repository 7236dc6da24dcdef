"""Memory and queues that processes share without names, so that none can leak or be left locked.

Both must be made before the processes are forked. Memory is anonymous: it ends with the last process
that has it, however that one dies.
"""

import math
import mmap
import os
import struct
from collections.abc import Sequence

import torch

STOP = -1  # an index that tells whoever gets it to stop
_ITEM = struct.Struct("=i")
LARGEST_QUEUE = 16_000  # items that a pipe holds (64 KiB), and some room to say stop


def shared_tensor(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of zeros in memory that forked processes share."""
    count = math.prod(shape)
    if not count:
        return torch.zeros(*shape, dtype=dtype)
    memory = mmap.mmap(-1, count * dtype.itemsize)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(*shape)


def share_parameters(module: torch.nn.Module) -> None:
    """Move parameters and buffers into memory that forked processes share."""
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            shared = shared_tensor(tensor.shape, tensor.dtype)
            shared.copy_(tensor)
            tensor.data = shared


class IndexQueue:
    """A queue of integers between processes: a pipe, whose small reads and writes are atomic.

    It has no lock, which a process killed at the wrong moment would keep. When the last process that
    may put has ended, `get` raises EOFError; when the last that may get has, `put` raises
    BrokenPipeError: so processes that live on do not wait for the dead.
    """

    def __init__(self) -> None:
        self._read, self._write = os.pipe()

    def put(self, index: int) -> None:
        """Put an index; it waits where there are LARGEST_QUEUE of them or more."""
        os.write(self._write, _ITEM.pack(index))

    def get(self) -> int:
        """Wait for an index.

        Raises:
          EOFError: if nobody is left who could put one.
        """
        data = os.read(self._read, _ITEM.size)
        if not data:
            raise EOFError
        return _ITEM.unpack(data)[0]

    def get_all(self, limit: int) -> list[int]:
        """Wait for an index, and return it with the others that are there, at most as many as `limit`.

        Raises:
          EOFError: if nobody is left who could put one.
        """
        data = os.read(self._read, _ITEM.size * limit)
        if not data:
            raise EOFError
        return [index for (index,) in _ITEM.iter_unpack(data)]

    def fileno(self) -> int:
        """Return what `multiprocessing.connection.wait` waits for."""
        return self._read

    def only_get(self) -> None:
        """Give up putting, in this process."""
        os.close(self._write)

    def only_put(self) -> None:
        """Give up getting, in this process."""
        os.close(self._read)

    def close(self) -> None:
        """Free the pipe, in this process."""
        for descriptor in (self._read, self._write):
            os.close(descriptor)
