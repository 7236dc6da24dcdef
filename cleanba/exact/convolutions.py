"""Convolutions and pooling whose gradients XLA computes fast on a CPU.

XLA's own gradients of convolutions and of max-pooling are slow there, so these are written as matrix
products and maxima of slices. Tests compare each of them, forward and backward, with Flax's; `make bench`
measures the resulting speed.
"""

import functools

import jax
import jax.numpy as jnp


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


def _shifts(kernel_size: int) -> list[tuple[int, int]]:
    return [(i, j) for i in range(kernel_size) for j in range(kernel_size)]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def project_and_shift(x: jax.Array, matrix: jax.Array, kernel_size: int) -> jax.Array:
    """Convolve without padding and with stride 1, as one matrix product and a sum of shifts.

    For a k x k kernel it projects every pixel to k * k maps, shifts each map by the offset of its
    kernel element, and adds them. This is cheaper than cutting patches if k is small and C is large.

    Args:
      x: images [B, H, W, C].
      matrix: the kernel as [C, k * k * F], columns in the order of the kernel's rows and columns.
      kernel_size: k.

    Returns:
      Images [B, H - k + 1, W - k + 1, F].
    """
    batch, height, width, channels = x.shape
    rows, columns = height - kernel_size + 1, width - kernel_size + 1
    maps = (x.reshape(-1, channels) @ matrix).reshape(batch, height, width, kernel_size**2, -1)
    return sum(
        maps[:, i : i + rows, j : j + columns, k] for k, (i, j) in enumerate(_shifts(kernel_size))
    )


def _project_and_shift_forward(x: jax.Array, matrix: jax.Array, kernel_size: int):
    return project_and_shift(x, matrix, kernel_size), (x, matrix)


def _project_and_shift_backward(kernel_size: int, residuals: tuple, gradient: jax.Array):
    x, matrix = residuals
    last = kernel_size - 1
    # One concatenation; differentiating the forward pass would pad and add k * k times.
    maps = jnp.concatenate(
        [
            jnp.pad(gradient, ((0, 0), (i, last - i), (j, last - j), (0, 0)))
            for i, j in _shifts(kernel_size)
        ],
        axis=-1,
    ).reshape(-1, matrix.shape[1])
    return (maps @ matrix.T).reshape(x.shape), x.reshape(-1, x.shape[-1]).T @ maps


project_and_shift.defvjp(_project_and_shift_forward, _project_and_shift_backward)


def strided_conv(x: jax.Array, kernel: jax.Array, stride: int) -> jax.Array:
    """Convolve without padding, the stride dividing the kernel's size.

    Args:
      x: images [B, H, W, C] of any type.
      kernel: [k, k, C, F], as Flax has it.
      stride: divides k. More than 1: blocks of pixels become channels first. 1: patches are cut.

    Returns:
      Images [B, H', W', F], float32.
    """
    size, _, channels, features = kernel.shape
    blocks = size // stride
    x = space_to_depth(x, stride).astype(jnp.float32)
    if stride > 1:
        matrix = kernel.reshape(blocks, stride, blocks, stride, channels, features)
        matrix = matrix.transpose(1, 3, 4, 0, 2, 5).reshape(stride * stride * channels, -1)
        return project_and_shift(x, matrix, blocks)
    batch, height, width, _ = x.shape
    rows, columns = height - size + 1, width - size + 1
    patches = jnp.concatenate(
        [x[:, i : i + rows, j : j + columns] for i, j in _shifts(size)], axis=-1
    )
    matrix = kernel.reshape(-1, features)
    out = patches.reshape(-1, matrix.shape[0]) @ matrix
    return out.reshape(batch, rows, columns, features)


def _three_shifts(x: jax.Array, axis: int) -> jax.Array:
    """Return x one further along an axis, x, and x one back, with zeros where there is none [..., 3C]."""
    size = x.shape[axis]

    def padded(first: int, last: int, before: int, after: int) -> jax.Array:
        padding = [(0, 0)] * x.ndim
        padding[axis] = (before, after)
        return jnp.pad(jax.lax.slice_in_dim(x, first, last, axis=axis), padding)

    # Not slices of one padded array, because XLA would also write that array.
    shifts = [padded(0, size - 1, 1, 0), x, padded(1, size, 0, 1)]
    return jnp.concatenate(shifts, axis=-1)


def _three_by_three(x: jax.Array, kernel: jax.Array) -> jax.Array:
    dimensions = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=dimensions)


def _runs_of_pixels(x: jax.Array, length: int) -> jax.Array:
    """Return the inputs of a 3x3 kernel along runs of pixels in a row.

    Args:
      x: images [B, H, W, C].
      length: of a run, divides W.

    Returns:
      [B, H, W / length, (length + 2) * 3 * C], in the order column, row, channel.
    """
    batch, height, width, channels = x.shape
    rows = _three_shifts(x, axis=1).reshape(batch, height, width // length, length, 3 * channels)
    before = jnp.pad(rows[:, :, :-1, -1:], ((0, 0), (0, 0), (1, 0), (0, 0), (0, 0)))
    after = jnp.pad(rows[:, :, 1:, :1], ((0, 0), (0, 0), (0, 1), (0, 0), (0, 0)))
    return jnp.concatenate([before, rows, after], axis=3).reshape(*rows.shape[:3], -1)


def _run_length(width: int) -> int:
    return max(length for length in range(1, 7) if width % length == 0)


def _few_channels(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Convolve along runs of pixels. Half of the products are with zeros; it is faster nevertheless."""
    *_, channels, features = kernel.shape
    length = _run_length(x.shape[2])
    columns = kernel.transpose(1, 0, 2, 3)
    matrix = jnp.stack(
        [jnp.pad(columns, ((k, length - 1 - k), (0, 0), (0, 0), (0, 0))) for k in range(length)],
        axis=3,
    ).reshape((length + 2) * 3 * channels, length * features)
    return (_runs_of_pixels(x, length) @ matrix).reshape(*x.shape[:3], features)


def _gradient_of_few_channels(x: jax.Array, gradient: jax.Array) -> jax.Array:
    channels, features = x.shape[-1], gradient.shape[-1]
    length = _run_length(x.shape[2])
    seen = _runs_of_pixels(x, length).reshape(-1, (length + 2) * 3 * channels)
    product = seen.T @ gradient.reshape(-1, length * features)
    product = product.reshape(length + 2, 3, channels, length, features)
    columns = [sum(product[j + k, :, :, k] for k in range(length)) for j in range(3)]
    return jnp.stack(columns, axis=1)


def _gradient_of_kernel(x: jax.Array, gradient: jax.Array) -> jax.Array:
    """One matrix product: x shifted along the columns, with the gradient shifted along the rows."""
    channels, features = x.shape[-1], gradient.shape[-1]
    seen = _three_shifts(x, axis=1).reshape(-1, 3 * channels)
    product = seen.T @ _three_shifts(gradient, axis=2).reshape(-1, 3 * features)
    return product.reshape(3, channels, 3, features).transpose(0, 2, 1, 3)[:, ::-1]


FEW_CHANNELS = 8  # with fewer, XLA's own convolution leaves most of a CPU's vector lanes empty


@jax.custom_vjp
def conv_3x3(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Convolve with a 3x3 kernel, stride 1 and padding SAME.

    Args:
      x: images [B, H, W, C].
      kernel: [3, 3, C, F], as Flax has it.

    Returns:
      Images [B, H, W, F].
    """
    few = x.shape[-1] < FEW_CHANNELS
    return jax.lax.platform_dependent(
        x, kernel, cpu=_few_channels if few else _three_by_three, default=_three_by_three
    )


def _conv_3x3_forward(x: jax.Array, kernel: jax.Array):
    return conv_3x3(x, kernel), (x, kernel)


def _conv_3x3_backward(residuals: tuple, gradient: jax.Array):
    x, kernel = residuals
    few = x.shape[-1] < FEW_CHANNELS
    _, pull_back = jax.vjp(_three_by_three, x, kernel)
    of_kernel = jax.lax.platform_dependent(
        x,
        gradient,
        cpu=_gradient_of_few_channels if few else _gradient_of_kernel,
        default=lambda x, gradient: pull_back(gradient)[1],
    )
    return pull_back(gradient)[0], of_kernel


conv_3x3.defvjp(_conv_3x3_forward, _conv_3x3_backward)


def max_pool_3x3_stride_2(x: jax.Array) -> jax.Array:
    """Max-pool with a 3x3 window, stride 2 and padding SAME.

    Args:
      x: images [B, H, W, C].

    Returns:
      Images [B, ceil(H / 2), ceil(W / 2), C].
    """

    def pool(x: jax.Array, axis: int) -> jax.Array:
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
