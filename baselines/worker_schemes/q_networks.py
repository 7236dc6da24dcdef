"""Networks of action values, with targets; dueling, noisy, distributional or recurrent."""

import copy
from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from baselines.torch_networks import ImpalaTrunk, NatureTrunk

FIRST_SIGMA = 0.5  # of noisy layers, sigma_0 of Fortunato et al. (2018), section 3.2


class NoisyLinear(nn.Module):
    """A dense layer with factorized Gaussian noise in its parameters (https://arxiv.org/abs/1706.10295)."""

    def __init__(self, inputs: int, outputs: int):
        """Initialize as in section 3.2 of the paper, without noise until `resample` is called."""
        super().__init__()
        bound = inputs**-0.5
        self.weight = nn.Parameter(torch.empty(outputs, inputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(outputs).uniform_(-bound, bound))
        self.weight_sigma = nn.Parameter(torch.full((outputs, inputs), FIRST_SIGMA * bound))
        self.bias_sigma = nn.Parameter(torch.full((outputs,), FIRST_SIGMA * bound))
        self._noise = torch.zeros(inputs), torch.zeros(outputs)

    def resample(self, generator: torch.Generator | None = None) -> None:
        """Draw new noise, by default with torch's own generator."""
        normal = (torch.randn(len(zeros), generator=generator) for zeros in self._noise)
        self._noise = tuple(x.sign() * x.abs().sqrt() for x in normal)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [N, inputs] to [N, outputs]."""
        of_inputs, of_outputs = self._noise
        weight = self.weight + self.weight_sigma * of_outputs[:, None] * of_inputs
        return F.linear(x, weight, self.bias + self.bias_sigma * of_outputs)


class VectorTrunk(nn.Module):
    """Dense layers with ReLU."""

    def __init__(self, obs_shape: Sequence[int], hiddens: Sequence[int]):
        """Make the layers."""
        super().__init__()
        widths = (int(np.prod(obs_shape)), *hiddens)
        self.dense = nn.ModuleList(map(nn.Linear, widths[:-1], widths[1:]))
        self.num_features = widths[-1]

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        """Return features [N, num_features] of observations [N, ...]."""
        x = obs.flatten(1).float()
        for dense in self.dense:
            x = F.relu(dense(x))
        return x


def make_trunk(name: str, obs_shape: Sequence[int], hiddens: Sequence[int]) -> nn.Module:
    """Return a trunk (nature, resnet or mlp) with dense layers of some widths; it has `num_features`."""
    if name == "nature":
        return NatureTrunk(obs_shape, (32, 64, 64), hiddens)
    if name == "resnet":
        return ImpalaTrunk(obs_shape, (16, 32, 32), hiddens)
    return VectorTrunk(obs_shape, hiddens)


class Streams(nn.Module):
    """One stream of dense layers to action values, or two: dueling (https://arxiv.org/abs/1511.06581)."""

    def __init__(
        self, inputs: int, width: int, num_actions: int, atoms: int, *, dueling: bool, noisy: bool
    ):
        """Make the layers; each stream has one of a width, and may have noisy layers."""
        super().__init__()
        linear = NoisyLinear if noisy else nn.Linear
        self._atoms = atoms

        def stream(outputs: int) -> nn.Sequential:
            return nn.Sequential(linear(inputs, width), nn.ReLU(), linear(width, outputs))

        self.advantage = stream(num_actions * atoms)
        self.value = stream(atoms) if dueling else None

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Return [N, num_actions, atoms] of features [N, inputs]."""
        outputs = self.advantage(features).view(len(features), -1, self._atoms)
        if self.value is None:
            return outputs
        return self.value(features)[:, None] + outputs - outputs.mean(dim=1, keepdim=True)


class QNetwork(nn.Module):
    """Action values, or distributions of returns, of single observations."""

    def __init__(
        self,
        name: str,
        obs_shape: Sequence[int],
        num_actions: int,
        hiddens: Sequence[int],
        *,
        dueling: bool,
        noisy: bool,
        support: Sequence[float],
    ):
        """Make the network.

        Args:
          name: nature, resnet or mlp.
          obs_shape: of one observation.
          num_actions: number of discrete actions.
          hiddens: widths of the dense layers; the last one is that of each stream.
          dueling: a stream for the value of the observation, and one for advantages.
          noisy: noisy layers in the streams.
          support: returns of the atoms of a distribution (https://arxiv.org/abs/1707.06887); for expected
            returns a single number, which is not used.
        """
        super().__init__()
        self.trunk = make_trunk(name, obs_shape, hiddens[:-1])
        self.register_buffer("support", torch.tensor(support, dtype=torch.float32))
        self.streams = Streams(
            self.trunk.num_features,
            hiddens[-1],
            num_actions,
            len(support),
            dueling=dueling,
            noisy=noisy,
        )

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        """Return logits of the atoms [N, num_actions, atoms], or action values [N, num_actions, 1]."""
        return self.streams(self.trunk(obs))

    def expected(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return the action values [N, num_actions] of what `forward` returned."""
        if len(self.support) == 1:
            return outputs[..., 0]
        return (outputs.softmax(dim=-1) * self.support).sum(dim=-1)

    def step(self, obs: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the action values [N, num_actions] of observations; the network has no state."""
        return self.expected(self(obs)), None

    def resample(self, generator: torch.Generator | None = None) -> None:
        """Draw new noise for all noisy layers; without any, nothing happens."""
        for module in self.modules():
            if isinstance(module, NoisyLinear):
                module.resample(generator)


class RecurrentQNetwork(nn.Module):
    """Action values of sequences of observations: a trunk, an LSTM, and dueling streams (R2D2)."""

    def __init__(
        self,
        name: str,
        obs_shape: Sequence[int],
        num_actions: int,
        hiddens: Sequence[int],
        width: int,
    ):
        """Make the network.

        Args:
          name: nature, resnet or mlp.
          obs_shape: of one observation.
          num_actions: number of discrete actions.
          hiddens: widths of the dense layers; the last one is that of each stream.
          width: of the LSTM; a state has twice as many numbers.
        """
        super().__init__()
        self.trunk = make_trunk(name, obs_shape, hiddens[:-1])
        self.core = nn.LSTMCell(self.trunk.num_features, width)
        self.streams = Streams(width, hiddens[-1], num_actions, 1, dueling=True, noisy=False)

    def step(self, obs: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return action values [N, num_actions] and the next states [N, 2 width]."""
        states = torch.cat(self.core(self.trunk(obs), states.chunk(2, dim=-1)), dim=-1)
        return self.streams(states.chunk(2, dim=-1)[0])[..., 0], states

    def unroll(
        self, obs: torch.Tensor, states: torch.Tensor, resets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what `step` returns over time.

        Args:
          obs: [T, N, ...].
          states: [N, 2 width], before the first observation.
          resets: bool [T, N], whether the state is zero after an observation, as the next episode starts.

        Returns:
          Action values [T, N, num_actions], and the states after the last observation.
        """
        features = self.trunk(obs.flatten(0, 1)).unflatten(0, obs.shape[:2])
        outputs = []
        state = states.chunk(2, dim=-1)
        for feature, goes_on in zip(features, ~resets[..., None], strict=True):
            hidden, cell = self.core(feature, state)
            outputs.append(hidden)
            state = hidden * goes_on, cell * goes_on
        values = self.streams(torch.stack(outputs).flatten(0, 1))[..., 0]
        return values.unflatten(0, obs.shape[:2]), torch.cat(state, dim=-1)


class DQNNetwork(nn.Module):
    """An online network and its target."""

    def __init__(self, online: QNetwork | RecurrentQNetwork):
        """Make the target, which starts equal to the online network."""
        super().__init__()
        self.register_buffer("num_updates", torch.zeros((), dtype=torch.int64))
        self.online = online
        self.target = copy.deepcopy(online).requires_grad_(False)

    def moving(self) -> Iterator[tuple[nn.Module, nn.Module]]:
        """Yield the target network and the network that it follows."""
        yield self.target, self.online
