"""Anonymous memory and queues between forked processes, which can neither leak nor stay locked.

Both must be made before the processes are forked. The memory is freed with the last process that maps it,
however that process dies.
"""

import math
import mmap
import os
import struct
from collections.abc import Sequence

import torch

STOP = -1  # an index that tells its receiver to stop
_ITEM = struct.Struct("=i")
LARGEST_QUEUE = 16_000  # items that a pipe holds (64 KiB), with room for STOP


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

    It has no lock that a killed process could leave locked. When the last process that can put has exited,
    `get` raises EOFError; when the last that can get has, `put` raises BrokenPipeError. So no process waits
    for one that is dead.
    """

    def __init__(self) -> None:
        self._read, self._write = os.pipe()

    def put(self, index: int) -> None:
        """Put an index; wait while the pipe is full, which it is never below LARGEST_QUEUE items."""
        os.write(self._write, _ITEM.pack(index))

    def get(self) -> int:
        """Wait for an index.

        Raises:
          EOFError: if no process is left that could put one.
        """
        data = os.read(self._read, _ITEM.size)
        if not data:
            raise EOFError
        return _ITEM.unpack(data)[0]

    def get_all(self, limit: int) -> list[int]:
        """Wait for an index; return it and the others that are there, at most `limit` in all.

        Raises:
          EOFError: if no process is left that could put one.
        """
        data = os.read(self._read, _ITEM.size * limit)
        if not data:
            raise EOFError
        return [index for (index,) in _ITEM.iter_unpack(data)]

    def fileno(self) -> int:
        """Return the descriptor that `multiprocessing.connection.wait` waits for."""
        return self._read

    def only_get(self) -> None:
        """Close the writing end in this process."""
        os.close(self._write)

    def only_put(self) -> None:
        """Close the reading end in this process."""
        os.close(self._read)

    def close(self) -> None:
        """Close both ends in this process."""
        for descriptor in (self._read, self._write):
            os.close(descriptor)
