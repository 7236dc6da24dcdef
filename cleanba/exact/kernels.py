"""Compiles kernels.cc, and calls its functions from jax on a CPU.

It is compiled once, when it is first needed, because XLA's headers come with jax.
"""

import ctypes
import errno
import functools
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

SOURCE = Path(__file__).with_name("kernels.cc")
FLAGS = ("-std=c++17", "-O3", "-fopenmp-simd", "-fPIC", "-shared")
# Contracted or reordered expressions would be other arithmetic (kernels.cc).
ARITHMETIC = ("-fno-fast-math", "-ffp-contract=off")
TARGETS = (
    "cleanba_matmul",
    "cleanba_convolve",
    "cleanba_convolve_kernel_gradient",
    "cleanba_max_pool",
    "cleanba_max_pool_gradient",
)


def cache_folder() -> Path:
    """Return the folder of compiled kernels, `~/.cache/cleanba` unless `XDG_CACHE_HOME` is set."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cleanba"


@functools.cache
def load() -> None:
    """Compile the kernels, unless that was done before, and register them with jax.

    Raises:
      ValueError: with one line, if they cannot be compiled.
    """
    compiler = compiler_command()
    machine = (os.uname().machine, *platform.libc_ver(), jaxlib.__version__)
    words = (*machine, *compiler, *FLAGS, *ARITHMETIC)
    name = hashlib.sha256(SOURCE.read_bytes() + "\0".join(words).encode()).hexdigest()[:16]
    library = cache_folder() / f"kernels-{name}.so"
    try:
        make_cache_folder(library.parent)
        if not library.exists():
            compile_library(library, compiler)
        _check_owner(library)
        functions = ctypes.CDLL(str(library))
    except OSError as error:
        problem = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or [f"{shlex.join(compiler)} failed"]
        problem = next((line for line in lines if "error" in line), lines[0])
    else:
        for target in TARGETS:
            capsule = jax.ffi.pycapsule(getattr(functions, target))
            jax.ffi.register_ffi_target(target, capsule, platform="cpu")
        return
    raise ValueError(
        f"--portable: its kernels cannot be compiled and loaded ({problem}); install a C++17 compiler "
        "(Debian: g++; PyPI: ziglang), set CXX, or give --no-portable"
    )


def compiler_command() -> list[str]:
    """Return the command of the C++ compiler: `CXX`, else `c++`, else that of the package `ziglang`."""
    if "CXX" in os.environ:
        return shlex.split(os.environ["CXX"])
    if not shutil.which("c++") and importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "c++"]
    return ["c++"]


def compile_library(library: Path, compiler: Sequence[str]) -> None:
    """Compile kernels.cc.

    Args:
      library: file to make. It appears when it is complete, because several runs may begin at the same time.
      compiler: its command, with flags that are put before those of this module.

    Raises:
      OSError: if the compiler or the folder is missing.
      CalledProcessError: if the compiler fails.
    """
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        command = [*compiler, *FLAGS, *ARITHMETIC, "-isystem", jax.ffi.include_dir()]
        command += [str(SOURCE), "-o", str(made)]
        subprocess.run(command, check=True, capture_output=True, text=True)
        made.replace(library)


def make_cache_folder(folder: Path) -> None:
    """Make a folder for compiled code, and refuse one in which another user could put code.

    Raises:
      OSError: if it cannot be made, or belongs to another user.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    _check_owner(folder)


def _check_owner(path: Path) -> None:
    """Refuse a file that another user could have made: it would be executed."""
    if path.stat().st_uid not in (os.getuid(), 0):
        raise PermissionError(errno.EPERM, "belongs to another user", str(path))


def _call(target: str, shape: tuple[int, ...], *inputs: jax.Array, **attributes: Any) -> jax.Array:
    if any(x.size == 0 for x in inputs):
        raise ValueError(f"{target}: inputs of shapes {', '.join(str(x.shape) for x in inputs)}")
    load()
    call = jax.ffi.ffi_call(target, jax.ShapeDtypeStruct(shape, jnp.float32))
    return call(*inputs, **attributes)


def matmul(
    a: jax.Array, b: jax.Array, *, transpose_a: bool = False, transpose_b: bool = False
) -> jax.Array:
    """Multiply matrices.

    Args:
      a: [M, K], or [K, M] if `transpose_a`.
      b: [K, N], or [N, K] if `transpose_b`.
      transpose_a: multiply by `a.T`.
      transpose_b: multiply by `b.T`.

    Returns:
      [M, N].
    """
    shape = (a.shape[transpose_a], b.shape[1 - transpose_b])
    return _call("cleanba_matmul", shape, a, b, transpose_a=transpose_a, transpose_b=transpose_b)


def convolve(x: jax.Array, kernel: jax.Array, before: int, after: int) -> jax.Array:
    """Convolve with stride 1.

    Args:
      x: images [B, H, W, C].
      kernel: [k, k, C, F].
      before: zeros added before the first row and column.
      after: zeros added after the last row and column.

    Returns:
      [B, H + before + after - k + 1, W + before + after - k + 1, F].
    """
    batch, height, width, _ = x.shape
    size, _, _, features = kernel.shape
    more = before + after - size + 1
    shape = (batch, height + more, width + more, features)
    return _call(
        "cleanba_convolve", shape, x, kernel, before=np.int64(before), after=np.int64(after)
    )


def convolve_kernel_gradient(
    x: jax.Array, gradient: jax.Array, size: int, before: int, after: int
) -> jax.Array:
    """Pull the gradient of `convolve`'s result back to its kernel.

    Args:
      x: images [B, H, W, C].
      gradient: of the result [B, H', W', F].
      size: k.
      before: as for `convolve`.
      after: as for `convolve`.

    Returns:
      [k, k, C, F].
    """
    shape = (size, size, x.shape[-1], gradient.shape[-1])
    padding = {"before": np.int64(before), "after": np.int64(after)}
    return _call("cleanba_convolve_kernel_gradient", shape, x, gradient, **padding)


def max_pool(x: jax.Array) -> jax.Array:
    """Max-pool with a 3x3 window, stride 2 and padding SAME.

    Args:
      x: images [B, H, W, C].

    Returns:
      [B, ceil(H / 2), ceil(W / 2), C].
    """
    batch, height, width, channels = x.shape
    return _call("cleanba_max_pool", (batch, -(-height // 2), -(-width // 2), channels), x)


def max_pool_gradient(x: jax.Array, gradient: jax.Array) -> jax.Array:
    """Pull the gradient of `max_pool`'s result back to its images; equal elements receive equal parts.

    Args:
      x: images [B, H, W, C].
      gradient: of the result [B, ceil(H / 2), ceil(W / 2), C].

    Returns:
      [B, H, W, C].
    """
    return _call("cleanba_max_pool_gradient", x.shape, x, gradient)
