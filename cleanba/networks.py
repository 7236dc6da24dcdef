"""The networks of the paper: IMPALA ResNet, Nature CNN, and an MLP for vector observations.

Each is a Flax module from a batch of observations to the logits of a categorical policy and a value. Images
are EnvPool's: uint8 [B, stack, height, width], of football [B, height, width, stack]. `portable`: products
that have the same bits on every processor, see exact/layers.py.
"""

from collections.abc import Sequence
from dataclasses import field
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.linen.initializers import constant, lecun_normal

from cleanba.exact.layers import conv, dense, max_pool_3x3_stride_2, orthogonal

NETWORKS = ("resnet", "nature", "mlp")
SMALLEST_SIDE = 36  # of an image, in pixels, that the Nature CNN's convolutions can take


class Dense(nn.Module):
    """A dense layer, see `layers.dense`, with parameters as `flax.linen.Dense` has them."""

    features: int
    gain: float
    portable: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map [B, I] to [B, features]."""
        start = orthogonal(self.gain, portable=self.portable)
        kernel = self.param("kernel", start, (x.shape[-1], self.features))
        bias = self.param("bias", constant(0.0), (self.features,))
        return dense(x, kernel, bias, portable=self.portable)


class StridedConv(nn.Module):
    """A convolution without padding, see `layers.conv`, with parameters as `flax.linen.Conv` has them."""

    features: int
    kernel_size: int
    stride: int
    portable: bool

    @nn.compact
    def __call__(self, x: jax.Array, scale: float = 1.0) -> jax.Array:
        """Convolve x [B, H, W, C] of any type, each pixel multiplied by `scale`."""
        shape = (self.kernel_size, self.kernel_size, x.shape[-1], self.features)
        kernel = self.param("kernel", orthogonal(np.sqrt(2), portable=self.portable), shape)
        bias = self.param("bias", constant(0.0), (self.features,))
        return conv(x, kernel * scale, bias, stride=self.stride, portable=self.portable)


class Conv(nn.Module):
    """A 3x3 convolution with padding, see `layers.conv`.

    Its parameters have the names, shapes and initial values of `flax.linen.Conv`'s.
    """

    features: int
    portable: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map [B, H, W, C] to [B, H, W, features]."""
        shape = (3, 3, x.shape[-1], self.features)
        kernel = self.param("kernel", lecun_normal(), shape)
        bias = self.param("bias", constant(0.0), (self.features,))
        return conv(x, kernel, bias, padding=1, portable=self.portable)


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions and a skip connection (Espeholt et al., 2018, figure 3)."""

    channels: int
    portable: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map [B, H, W, channels] to the same shape."""
        inputs = x
        x = Conv(self.channels, self.portable)(nn.relu(x))
        x = Conv(self.channels, self.portable)(nn.relu(x))
        return x + inputs


class ConvSequence(nn.Module):
    """A convolution, max-pooling, and two residual blocks."""

    channels: int
    portable: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map [B, H, W, C] to [B, ceil(H / 2), ceil(W / 2), channels]."""
        x = Conv(self.channels, self.portable)(x)
        x = max_pool_3x3_stride_2(x, portable=self.portable)
        # Saved models name the block that is constructed first, the outer one, ResidualBlock_0.
        return ResidualBlock(self.channels, self.portable)(
            ResidualBlock(self.channels, self.portable)(x)
        )


def _heads(hidden: jax.Array, num_actions: int, portable: bool) -> tuple[jax.Array, jax.Array]:
    """Policy logits and value from the last hidden layer, initialized as in CleanRL."""
    logits = Dense(num_actions, 0.01, portable, name="actor")(hidden)
    value = Dense(1, 1.0, portable, name="critic")(hidden)
    return logits, value[:, 0]


def _nhwc(x: jax.Array) -> jax.Array:
    """Return images with their channels last; EnvPool's football has them so already."""
    return x if x.shape[3] < x.shape[1] else jnp.transpose(x, (0, 2, 3, 1))


class ImpalaResNet(nn.Module):
    """The large network of IMPALA, without its LSTM (https://arxiv.org/abs/1802.01561, figure 3).

    Convolutions start from Flax's default (LeCun normal), dense layers orthogonal, as in Cleanba.
    """

    num_actions: int
    channels: Sequence[int] = (16, 32, 32)
    hiddens: Sequence[int] = (256,)
    portable: bool = field(kw_only=True)

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return logits [B, num_actions] and values [B] for uint8 images, see the module."""
        x = _nhwc(x).astype(jnp.float32) / 255.0
        for channels in self.channels:
            x = ConvSequence(channels, self.portable)(x)
        x = nn.relu(x).reshape(x.shape[0], -1)
        for width in self.hiddens:
            x = nn.relu(Dense(width, np.sqrt(2), self.portable)(x))
        return _heads(x, self.num_actions, self.portable)


class NatureCNN(nn.Module):
    """The network of Mnih et al. (2015), with a shared trunk and orthogonal weights as in CleanRL."""

    num_actions: int
    channels: Sequence[int] = (32, 64, 64)
    hiddens: Sequence[int] = (512,)
    portable: bool = field(kw_only=True)

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return logits [B, num_actions] and values [B] for uint8 images, see the module."""
        first, second, third = self.channels
        x = nn.relu(StridedConv(first, 8, 4, self.portable)(_nhwc(x), scale=1 / 255))
        x = nn.relu(StridedConv(second, 4, 2, self.portable)(x))
        x = nn.relu(StridedConv(third, 3, 1, self.portable)(x))
        x = x.reshape(x.shape[0], -1)
        for width in self.hiddens:
            x = nn.relu(Dense(width, np.sqrt(2), self.portable)(x))
        return _heads(x, self.num_actions, self.portable)


class MLP(nn.Module):
    """Separate tanh networks for policy and value, as in CleanRL's ppo.py."""

    num_actions: int
    hiddens: Sequence[int] = (64, 64)
    portable: bool = field(kw_only=True)

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return logits [B, num_actions] and values [B] for observations [B, ...]."""
        x = x.reshape(x.shape[0], -1).astype(jnp.float32)
        policy = value = x
        for i, width in enumerate(self.hiddens):
            policy = nn.tanh(Dense(width, np.sqrt(2), self.portable, name=f"actor_{i}")(policy))
            value = nn.tanh(Dense(width, np.sqrt(2), self.portable, name=f"critic_{i}")(value))
        logits = Dense(self.num_actions, 0.01, self.portable, name="actor")(policy)
        return logits, Dense(1, 1.0, self.portable, name="critic")(value)[:, 0]


def default_network(obs_shape: Sequence[int]) -> str:
    """Return the network that fits an observation: the ResNet for images, else the MLP."""
    return "resnet" if len(obs_shape) == 3 else "mlp"


def check_fits(name: str, obs_shape: Sequence[int]) -> None:
    """Refuse a network that does not fit the observations.

    Raises:
      ValueError: with one line.
    """
    images = len(obs_shape) == 3
    if name in NETWORKS and images != (name != "mlp"):
        fits = "resnet or nature" if images else "mlp"
        raise ValueError(f"--network {name}: observations are {tuple(obs_shape)}; choose {fits}")
    if name == "nature" and sorted(obs_shape)[1] < SMALLEST_SIDE:
        raise ValueError(
            f"--network nature: images of {tuple(obs_shape)} are too small; choose resnet"
        )


def make_network(
    name: str,
    num_actions: int,
    channels: Sequence[int] | None = None,
    hiddens: Sequence[int] | None = None,
    *,
    portable: bool,
) -> nn.Module:
    """Build a network by its name.

    Args:
      name: one of NETWORKS.
      num_actions: number of discrete actions.
      channels: channels of the convolutional stages; None for those of the paper.
      hiddens: widths of the dense layers; None for those of the paper.
      portable: compute products with the same bits on every processor; needs a CPU.

    Returns:
      A Flax module: observations [B, ...] to (logits [B, num_actions], values [B]).

    Raises:
      ValueError: for an unknown name, or channels that the network does not have.
    """
    options: dict[str, Any] = {"portable": portable}
    if channels is not None and name == "mlp":
        raise ValueError("--channels: the mlp has no convolutions")
    if channels is not None and name == "nature" and len(channels) != 3:
        raise ValueError(f"--channels: nature takes 3 numbers, not {len(channels)}")
    if channels is not None:
        options["channels"] = tuple(channels)
    if hiddens is not None:
        options["hiddens"] = tuple(hiddens)
    modules = {"resnet": ImpalaResNet, "nature": NatureCNN, "mlp": MLP}
    if name not in modules:
        raise ValueError(f"--network {name}: choose one of {', '.join(NETWORKS)}")
    return modules[name](num_actions, **options)
