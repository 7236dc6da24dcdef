"""The networks of cleanba/networks.py in torch: the same layers, with parameters in torch's layout.

Each takes observations as EnvPool gives them, uint8 [N, stack, height, width] or vectors [N, ...], to
logits [N, num_actions] and values [N]. With the optional LSTM of monobeast, `Recurrent` puts a core
between a convolutional trunk and the heads.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from cleanba.environments import EnvSpec

CORE_LAYERS = 2  # of monobeast's LSTM
SMALLEST_SIDE = 36  # of an image, in pixels, that the Nature CNN's convolutions can take


def max_pool_3x3_stride_2(x: torch.Tensor) -> torch.Tensor:
    """Pool x [N, C, H, W] to [N, C, ceil(H / 2), ceil(W / 2)], padded as XLA's 'SAME' is.

    An even side is padded at its end alone, an odd one at both ends. In torch the first is `ceil_mode`. Only
    W is tested, so H and W must both be even or both be odd.
    """
    if x.shape[-1] % 2 == 0:
        return F.max_pool2d(x, 3, stride=2, ceil_mode=True)
    return F.max_pool2d(x, 3, stride=2, padding=1)


def _nhwc_features(x: torch.Tensor) -> torch.Tensor:
    # flattened as the JAX networks are, whose images are [N, H, W, C]
    return x.permute(0, 2, 3, 1).flatten(1)


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions and a skip connection (Espeholt et al., 2018, figure 3)."""

    def __init__(self, channels: int):
        """Make the convolutions of as many channels."""
        super().__init__()
        self.conv_0 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv_1 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [N, channels, H, W] to the same shape."""
        return x + self.conv_1(F.relu(self.conv_0(F.relu(x))))


class ImpalaTrunk(nn.Module):
    """The large network of IMPALA below its heads (https://arxiv.org/abs/1802.01561, figure 3)."""

    def __init__(self, obs_shape: Sequence[int], channels: Sequence[int], hiddens: Sequence[int]):
        """Make three stages of a convolution, max-pooling and two residual blocks, and dense layers."""
        super().__init__()
        stack, *sides = obs_shape
        self.convs, self.blocks = nn.ModuleList(), nn.ModuleList()
        for inputs, outputs in zip((stack, *channels[:-1]), channels, strict=True):
            self.convs.append(nn.Conv2d(inputs, outputs, 3, padding=1))
            self.blocks.append(nn.Sequential(ResidualBlock(outputs), ResidualBlock(outputs)))
            sides = [-(-side // 2) for side in sides]
        widths = (channels[-1] * math.prod(sides), *hiddens)
        self.dense = nn.ModuleList(map(nn.Linear, widths[:-1], widths[1:]))
        self.num_features = widths[-1]

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        """Return features [N, num_features] of images [N, stack, H, W] (uint8)."""
        x = obs.float() / 255.0
        for conv, blocks in zip(self.convs, self.blocks, strict=True):
            x = blocks(max_pool_3x3_stride_2(conv(x)))
        x = _nhwc_features(F.relu(x))
        for dense in self.dense:
            x = F.relu(dense(x))
        return x


class NatureTrunk(nn.Module):
    """The convolutional network of Mnih et al. (2015) below its heads."""

    def __init__(self, obs_shape: Sequence[int], channels: Sequence[int], hiddens: Sequence[int]):
        """Make three strided convolutions and dense layers."""
        super().__init__()
        stack, *sides = obs_shape
        self.convs = nn.ModuleList()
        for inputs, outputs, size, stride in zip(
            (stack, *channels[:-1]), channels, (8, 4, 3), (4, 2, 1), strict=True
        ):
            self.convs.append(nn.Conv2d(inputs, outputs, size, stride=stride))
            sides = [(side - size) // stride + 1 for side in sides]
        widths = (channels[-1] * math.prod(sides), *hiddens)
        self.dense = nn.ModuleList(map(nn.Linear, widths[:-1], widths[1:]))
        self.num_features = widths[-1]

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        """Return features [N, num_features] of images [N, stack, H, W] (uint8)."""
        x = obs.float() / 255.0
        for conv in self.convs:
            x = F.relu(conv(x))
        x = _nhwc_features(x)
        for dense in self.dense:
            x = F.relu(dense(x))
        return x


class ConvNet(nn.Module):
    """A convolutional trunk with a policy head and a value head."""

    def __init__(self, trunk: nn.Module, num_actions: int):
        """Put heads on a trunk."""
        super().__init__()
        self.trunk = trunk
        self.actor = nn.Linear(trunk.num_features, num_actions)
        self.critic = nn.Linear(trunk.num_features, 1)

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits [N, num_actions] and values [N]."""
        features = self.trunk(obs)
        return self.actor(features), self.critic(features)[:, 0]


class MLP(nn.Module):
    """Separate tanh networks for policy and value, as in CleanRL's ppo.py."""

    def __init__(self, obs_shape: Sequence[int], num_actions: int, hiddens: Sequence[int]):
        """Make both networks, orthogonal as in CleanRL."""
        super().__init__()
        size = 1
        for length in obs_shape:
            size *= length
        widths = (size, *hiddens)
        self.actor_layers = nn.ModuleList(map(nn.Linear, widths[:-1], widths[1:]))
        self.critic_layers = nn.ModuleList(map(nn.Linear, widths[:-1], widths[1:]))
        self.actor = nn.Linear(widths[-1], num_actions)
        self.critic = nn.Linear(widths[-1], 1)
        orthogonal_(self)

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits [N, num_actions] and values [N] for observations [N, ...]."""
        policy = value = obs.flatten(1).float()
        for layer in self.actor_layers:
            policy = torch.tanh(layer(policy))
        for layer in self.critic_layers:
            value = torch.tanh(layer(value))
        return self.actor(policy), self.critic(value)[:, 0]


class Recurrent(nn.Module):
    """A convolutional trunk, monobeast's LSTM core, and heads.

    The core's input is the features, the clipped last reward and the one-hot last action; its state is
    reset at the start of every episode.
    """

    def __init__(self, trunk: nn.Module, num_actions: int):
        """Put a core and heads on a trunk."""
        super().__init__()
        self.trunk = trunk
        self.num_actions = num_actions
        width = trunk.num_features + 1 + num_actions
        self.core = nn.LSTM(width, width, CORE_LAYERS)
        self.actor = nn.Linear(width, num_actions)
        self.critic = nn.Linear(width, 1)

    def forward(
        self,
        obs: torch.Tensor,
        reward: torch.Tensor,
        done: torch.Tensor,
        last_action: torch.Tensor,
        state: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Apply the network to T steps of B environments.

        Args:
          obs: [T, B, stack, H, W] (uint8).
          reward: of the step that led to the observation [T, B].
          done: whether that step ended an episode, so that the observation begins one [T, B].
          last_action: of that step [T, B].
          state: hidden and cell state before the first step, [layers, B, width] each.

        Returns:
          Logits [T, B, num_actions], values [T, B], and the state after the last step.
        """
        length, batch = done.shape
        features = self.trunk(obs.flatten(0, 1)).view(length, batch, -1)
        action = F.one_hot(last_action.long(), self.num_actions).float()
        inputs = torch.cat([features, reward.clamp(-1, 1)[..., None], action], dim=-1)
        outputs = []
        for x, begins in zip(inputs, done, strict=True):
            keep = (~begins).float()[None, :, None]
            state = (state[0] * keep, state[1] * keep)
            output, state = self.core(x[None], state)
            outputs.append(output)
        core = torch.cat(outputs)
        return self.actor(core), self.critic(core)[..., 0], state

    def initial_state(self, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the state at the start of a run, [layers, batch, width] each."""
        width = self.core.hidden_size
        return torch.zeros(CORE_LAYERS, batch, width), torch.zeros(CORE_LAYERS, batch, width)


def orthogonal_(network: nn.Module) -> None:
    """Initialize an MLP or a Nature CNN as CleanRL and cleanba/networks.py do.

    Weights become orthogonal, with gain 0.01 in the policy head, 1 in the value head and sqrt(2) elsewhere;
    biases become zero.
    """
    gains = {"actor.weight": 0.01, "critic.weight": 1.0}
    for name, parameter in network.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        else:
            nn.init.orthogonal_(parameter, gains.get(name, 2**0.5))


def fixup_(trunk: ImpalaTrunk) -> None:
    """Initialize residual branches so that the output does not grow with their number.

    Every branch begins as zero, and its first convolution is scaled by L^(-1 / (2 m - 2)), for L
    branches of m = 2 convolutions (https://arxiv.org/abs/1901.09321, section 3).
    """
    blocks = [block for stage in trunk.blocks for block in stage]
    with torch.no_grad():
        for block in blocks:
            nn.init.kaiming_normal_(block.conv_0.weight, nonlinearity="relu")
            block.conv_0.weight.mul_(len(blocks) ** -0.5)
            nn.init.zeros_(block.conv_1.weight)
            nn.init.zeros_(block.conv_0.bias)
            nn.init.zeros_(block.conv_1.bias)


def choose_network(name: str, spec: EnvSpec, images: str = "resnet") -> str:
    """Return the name of a network that fits an environment.

    Args:
      name: resnet, nature, mlp, or auto to choose by the observations.
      spec: the environment.
      images: what auto chooses for images; for vectors it chooses mlp.

    Raises:
      ValueError: with one line, if no network or not this one fits.
    """
    if not spec.obs_shape:
        raise ValueError(f"--env-id {spec.env_id}: its observations are single numbers")
    has_images = len(spec.obs_shape) == 3
    if has_images and min(spec.obs_shape[1:]) < SMALLEST_SIDE:
        raise ValueError(
            f"{spec.env_id}: its images are {spec.obs_shape}; no network here takes those"
        )
    if name == "auto":
        return images if has_images else "mlp"
    if has_images == (name == "mlp"):
        fits = "resnet or nature" if has_images else "mlp"
        raise ValueError(f"--network {name}: observations are {spec.obs_shape}; choose {fits}")
    return name


def make_network(
    name: str,
    obs_shape: Sequence[int],
    num_actions: int,
    *,
    use_lstm: bool = False,
    channels: Sequence[int] | None = None,
    hiddens: Sequence[int] | None = None,
) -> nn.Module:
    """Build a network by its name, initialized as torch does (the MLP orthogonally, as CleanRL's).

    Args:
      name: resnet, nature or mlp.
      obs_shape: of one observation.
      num_actions: number of discrete actions.
      use_lstm: with monobeast's LSTM core.
      channels: of the convolutional stages; None for those of the paper.
      hiddens: widths of the dense layers; None for those of the paper.

    Raises:
      ValueError: for an unknown name, or an LSTM on an MLP.
    """
    if name == "mlp":
        if use_lstm:
            raise ValueError("--use-lstm: needs a resnet or nature network")
        return MLP(obs_shape, num_actions, hiddens or (64, 64))
    if name == "resnet":
        trunk = ImpalaTrunk(obs_shape, channels or (16, 32, 32), hiddens or (256,))
    elif name == "nature":
        trunk = NatureTrunk(obs_shape, channels or (32, 64, 64), hiddens or (512,))
    else:
        raise ValueError(f"--network {name}: choose one of resnet, nature, mlp")
    return Recurrent(trunk, num_actions) if use_lstm else ConvNet(trunk, num_actions)
