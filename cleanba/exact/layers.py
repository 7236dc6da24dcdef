"""Operations of networks: dense layers, convolutions, pooling, orthogonal initialization.

Functions of products take `portable`. With it, kernels.cc computes the products and their gradients, with the
same bits on every processor; this needs a CPU. Without it, jax computes them.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from cleanba.exact import kernels


def _sum_of_rows(x: jax.Array) -> jax.Array:
    """Return the sum over all axes but the last."""
    rows = x.reshape(-1, x.shape[-1])
    return kernels.matmul(jnp.ones((1, len(rows)), x.dtype), rows)[0]


@jax.custom_vjp
def _portable_dense(x: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
    return kernels.matmul(x, kernel) + bias


def _dense_forward(x: jax.Array, kernel: jax.Array, bias: jax.Array):
    return _portable_dense(x, kernel, bias), (x, kernel)


def _dense_backward(residuals: tuple, gradient: jax.Array):
    x, kernel = residuals
    of_x = kernels.matmul(gradient, kernel, transpose_b=True)
    of_kernel = kernels.matmul(x, gradient, transpose_a=True)
    return of_x, of_kernel, _sum_of_rows(gradient)


_portable_dense.defvjp(_dense_forward, _dense_backward)


def dense(x: jax.Array, kernel: jax.Array, bias: jax.Array, *, portable: bool) -> jax.Array:
    """Apply an affine map.

    Args:
      x: [B, I].
      kernel: [I, O].
      bias: [O].
      portable: see the module.

    Returns:
      [B, O].
    """
    return _portable_dense(x, kernel, bias) if portable else x @ kernel + bias


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _portable_conv(x: jax.Array, kernel: jax.Array, bias: jax.Array, padding: int) -> jax.Array:
    return kernels.convolve(x, kernel, padding, padding) + bias


def _conv_forward(x: jax.Array, kernel: jax.Array, bias: jax.Array, padding: int):
    return _portable_conv(x, kernel, bias, padding), (x, kernel)


def _conv_backward(padding: int, residuals: tuple, gradient: jax.Array):
    x, kernel = residuals
    size = len(kernel)
    rest = size - 1 - padding
    of_x = kernels.convolve(gradient, kernel[::-1, ::-1].transpose(0, 1, 3, 2), rest, rest)
    of_kernel = kernels.convolve_kernel_gradient(x, gradient, size, padding, padding)
    return of_x, of_kernel, _sum_of_rows(gradient)


_portable_conv.defvjp(_conv_forward, _conv_backward)


def space_to_depth(x: jax.Array, block: int) -> jax.Array:
    """Make every block of pixels one pixel with more channels.

    Args:
      x: images [B, H, W, C] of any type; rows and columns beyond a whole block are cut off.
      block: side of a block.

    Returns:
      [B, H // block, W // block, block * block * C], channels in the order row, column, channel.
    """
    batch, height, width, channels = x.shape
    rows, columns = height // block, width // block
    x = x[:, : rows * block, : columns * block]
    x = x.reshape(batch, rows, block, columns, block, channels).transpose(0, 1, 3, 2, 4, 5)
    return x.reshape(batch, rows, columns, block * block * channels)


def conv(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array,
    *,
    stride: int = 1,
    padding: int = 0,
    portable: bool,
) -> jax.Array:
    """Convolve.

    Args:
      x: images [B, H, W, C] of any type.
      kernel: [k, k, C, F], as Flax has it.
      bias: [F].
      stride: at most k.
      padding: zeros added on each side, from 0 to k - 1; 0 if the stride is not 1.
      portable: see the module.

    Returns:
      Images [B, H', W', F], of the kernel's type.

    Raises:
      ValueError: for a stride or padding that is not allowed.
    """
    if not (0 < stride <= len(kernel) and 0 <= padding < len(kernel)) or (stride > 1 and padding):
        raise ValueError(f"kernel {kernel.shape}: stride {stride}, padding {padding}")
    if not portable:
        dimensions = ("NHWC", "HWIO", "NHWC")
        out = jax.lax.conv_general_dilated(
            x.astype(kernel.dtype),
            kernel,
            (stride, stride),
            [(padding, padding)] * 2,
            dimension_numbers=dimensions,
        )
        return out + bias
    if stride > 1:
        # The same products with stride 1, on blocks of pixels.
        extra = (
            -len(kernel) % stride
        )  # rows and columns of zeros, which make the kernel whole blocks
        kernel = jnp.pad(kernel, ((0, extra), (0, extra), (0, 0), (0, 0)))
        x = jnp.pad(x, ((0, 0), (0, extra), (0, extra), (0, 0)))
        size, _, channels, features = kernel.shape
        blocks = size // stride
        x = space_to_depth(x, stride)
        kernel = kernel.reshape(blocks, stride, blocks, stride, channels, features)
        kernel = kernel.transpose(0, 2, 1, 3, 4, 5).reshape(blocks, blocks, -1, features)
    return _portable_conv(x.astype(jnp.float32), kernel, bias, padding)


@jax.custom_vjp
def _portable_max_pool(x: jax.Array) -> jax.Array:
    return kernels.max_pool(x)  # looked up at each call: a test replaces the kernels


_portable_max_pool.defvjp(
    lambda x: (kernels.max_pool(x), x),
    lambda x, gradient: (kernels.max_pool_gradient(x, gradient),),
)


def max_pool_3x3_stride_2(x: jax.Array, *, portable: bool) -> jax.Array:
    """Max-pool with a 3x3 window, stride 2 and padding SAME.

    The gradient of a maximum goes to equal elements in equal parts, first along rows, then along columns.

    Args:
      x: images [B, H, W, C].
      portable: see the module. The results are the same with and without; the kernels are faster.

    Returns:
      Images [B, ceil(H / 2), ceil(W / 2), C].
    """
    if portable:
        return _portable_max_pool(x)

    def pool(x: jax.Array, axis: int) -> jax.Array:
        # maxima of slices, whose gradient XLA computes faster on a CPU than that of its own pooling
        size = x.shape[axis]
        out = (size + 1) // 2
        total = (out - 1) * 2 + 3 - size
        padding = [(0, 0)] * x.ndim
        padding[axis] = (total // 2, total - total // 2)
        x = jnp.pad(x, padding, constant_values=-jnp.inf)
        first, second, third = (
            jax.lax.slice_in_dim(x, k, k + (out - 1) * 2 + 1, stride=2, axis=axis) for k in range(3)
        )
        return jnp.maximum(jnp.maximum(first, second), third)

    return pool(pool(x, axis=1), axis=2)


def orthonormal_columns(x: jax.Array, *, portable: bool) -> jax.Array:
    """Orthogonalize columns in their order, by the Gram-Schmidt process.

    Every column is projected twice, which makes the result orthogonal to rounding (Giraud et al., 2005,
    https://doi.org/10.1007/s00211-005-0615-4). It is Q of the QR decomposition whose R has a positive
    diagonal. LAPACK is not used, because its bits depend on the processor and on its threads.

    Args:
      x: [m, n], m >= n, of full rank.
      portable: see the module.

    Returns:
      [m, n].
    """
    if portable:
        project = functools.partial(kernels.matmul, transpose_b=True)
        combine = kernels.matmul
    else:
        project, combine = (lambda v, rows: v @ rows.T), jnp.matmul

    def orthogonalize(i: jax.Array, rows: jax.Array) -> jax.Array:
        v = jax.lax.dynamic_slice_in_dim(x.T, i, 1)
        for _ in range(2):
            v = v - combine(project(v, rows), rows)
        v = v / jnp.sqrt(project(v, v))
        return jax.lax.dynamic_update_slice_in_dim(rows, v, i, axis=0)

    return jax.lax.fori_loop(0, x.shape[1], orthogonalize, jnp.zeros_like(x.T)).T


def orthogonal(scale: float, *, portable: bool) -> Callable[..., jax.Array]:
    """Return an initializer of orthogonal matrices (https://arxiv.org/abs/1312.6120).

    It draws the numbers of `jax.nn.initializers.orthogonal`, and its values are the same to rounding.

    Args:
      scale: of all elements.
      portable: see the module.
    """

    def initialize(key: jax.Array, shape: tuple[int, ...], dtype: type = jnp.float32) -> jax.Array:
        columns = shape[-1]
        rows = 1
        for size in shape[:-1]:
            rows *= size
        drawn = jax.random.normal(key, (max(rows, columns), min(rows, columns)), dtype)
        matrix = orthonormal_columns(drawn, portable=portable)
        return scale * (matrix if rows >= columns else matrix.T).reshape(shape)

    return initialize
