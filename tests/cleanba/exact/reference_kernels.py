"""The chains of kernels.cc in NumPy.

The program trains with them instead of the compiled kernels:

    python tests/cleanba/exact/reference_kernels.py cleanba/cleanba_ppo.py --env-id CartPole-v1 ...
"""

import functools
import runpy
import sys

import jax
import numpy as np

from cleanba.exact import kernels, layers

PIECE = 512  # as in kernels.cc


def chain(a, b):
    """Fused multiply-adds along k: a [M, K], b [K, N]. With 64 bits of mantissa, products are exact."""
    total = np.zeros((len(a), b.shape[1]), np.float32)
    for k in range(a.shape[1]):
        product = a[:, k, None].astype(np.longdouble) * b[k].astype(np.longdouble)
        total = (total + product).astype(np.float32)
    return total


def matmul(a, b, length=PIECE):
    """Multiply in pieces of `length` along k: a [M, K], b [K, N]."""
    pieces = [chain(a[:, k : k + length], b[k : k + length]) for k in range(0, len(b), length)]
    return functools.reduce(np.add, pieces)


def patches(x, size, before, after):
    """Return the inputs of each output pixel [B, H', W', k * k * C], in the order row, column, channel."""
    around = (before, after)
    x = np.pad(x, ((0, 0), around, around, (0, 0)))
    rows, columns = x.shape[1] - size + 1, x.shape[2] - size + 1
    shifted = [x[:, i : i + rows, j : j + columns] for i in range(size) for j in range(size)]
    return np.concatenate(shifted, axis=-1)


def convolve(x, kernel, before, after):
    """Convolve as `kernels.convolve`."""
    size, _, _, features = kernel.shape
    seen = patches(x, size, before, after)
    out = chain(seen.reshape(-1, seen.shape[-1]), kernel.reshape(-1, features))
    return out.reshape(*seen.shape[:-1], features)


def convolve_kernel_gradient(x, gradient, size, before, after):
    """Pull a gradient back as `kernels.convolve_kernel_gradient`: image by image, in pieces of whole rows."""
    seen = patches(x, size, before, after)
    batch, rows, columns, features = gradient.shape
    length = max(1, PIECE // columns) * columns
    images = [
        matmul(seen[i].reshape(rows * columns, -1).T, gradient[i].reshape(-1, features), length)
        for i in range(batch)
    ]
    return functools.reduce(np.add, images).reshape(size, size, -1, features)


def replace_kernels():
    """Let the layers call NumPy, and jax's own pooling. A call of a compiled kernel is an error."""

    def call(function, shape, *inputs):
        result = jax.ShapeDtypeStruct(shape, np.float32)
        return jax.pure_callback(lambda *x: function(*map(np.asarray, x)), result, *inputs)

    def callback_matmul(a, b, *, transpose_a=False, transpose_b=False):
        a, b = (a.T if transpose_a else a), (b.T if transpose_b else b)
        return call(matmul, (a.shape[0], b.shape[1]), a, b)

    def callback_convolve(x, kernel, before, after):
        (batch, height, width, _), (size, _, _, features) = x.shape, kernel.shape
        more = before + after - size + 1
        shape = (batch, height + more, width + more, features)
        return call(functools.partial(convolve, before=before, after=after), shape, x, kernel)

    def callback_gradient(x, gradient, size, before, after):
        shape = (size, size, x.shape[-1], gradient.shape[-1])
        of_kernel = functools.partial(
            convolve_kernel_gradient, size=size, before=before, after=after
        )
        return call(of_kernel, shape, x, gradient)

    def max_pool(x):
        return layers.max_pool_3x3_stride_2(x, portable=False)

    kernels.load = lambda: None
    kernels._call = None
    kernels.matmul = callback_matmul
    kernels.convolve = callback_convolve
    kernels.convolve_kernel_gradient = callback_gradient
    kernels.max_pool = max_pool
    kernels.max_pool_gradient = lambda x, gradient: jax.vjp(max_pool, x)[1](gradient)[0]


if __name__ == "__main__":
    replace_kernels()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
