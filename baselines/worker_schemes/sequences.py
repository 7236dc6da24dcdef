"""Sequences of a rollout for recurrent networks, each with the state that the actor had at its start.

Of R2D2 (https://openreview.net/forum?id=r1lyTjAqYX), whose network predicts `rescale(return)`.
"""

from typing import NamedTuple

import numpy as np
import torch

from baselines.worker_schemes.parts import Rollout
from baselines.worker_schemes.replay import n_step_returns

RESCALING_EPS = 1e-3  # section 2.3 of R2D2
LARGEST_SHARE = 0.9  # of the largest error of a sequence in its priority (eta, section 2.3)


class Sequences(NamedTuple):
    """A batch of N sequences of L steps; the first of them only bring the state up to date."""

    obs: torch.Tensor  # [N, L + 1, ...]
    actions: torch.Tensor  # int64 [N, L]
    rewards: torch.Tensor  # [N, L], discounted sums
    discounts: torch.Tensor  # [N, L], of the value at `ends`
    ends: torch.Tensor  # int64 [N, L], index of the observation after the last step of each return
    resets: torch.Tensor  # bool [N, L], the step only resets and is not learned from
    states: torch.Tensor  # [N, S], of the actor before the first step
    noise: torch.Tensor  # not used
    weights: torch.Tensor  # [N], importance weights


def rescale(x: torch.Tensor) -> torch.Tensor:
    """Return h(x) = sign(x) (sqrt(|x| + 1) - 1) + eps x."""
    return x.sign() * ((x.abs() + 1).sqrt() - 1) + RESCALING_EPS * x


def unscale(x: torch.Tensor) -> torch.Tensor:
    """Return the inverse of `rescale`."""
    root = (1 + 4 * RESCALING_EPS * (x.abs() + 1 + RESCALING_EPS)).sqrt()
    return x.sign() * (((root - 1) / (2 * RESCALING_EPS)).square() - 1)


def mix_errors(errors: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Return the errors [N] of sequences: a mixture of the largest and the mean error of their real steps.

    Args:
      errors: [U, N], absolute.
      real: bool [U, N], the steps that do not only reset.
    """
    errors = errors * real
    mean = errors.sum(dim=0) / real.sum(dim=0).clamp(min=1)
    return LARGEST_SHARE * errors.amax(dim=0) + (1 - LARGEST_SHARE) * mean


def cut_sequences(
    rollout: Rollout, rng: np.random.Generator, *, burn_in: int, unroll: int, n: int, gamma: float
) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """Cut a rollout into sequences, each of which starts `unroll` steps after the one before.

    A sequence may hold the end of an episode and the start of the next; returns and states do not cross it.
    Steps at the end of the rollout that are too few for a sequence are left out.

    Args:
      rollout: [T, B].
      rng: not used.
      burn_in: first steps of a sequence, which are not learned from.
      unroll: steps that are learned from.
      n: most steps of a return; fewer where the sequence ends before.
      gamma: discount of one step.

    Returns:
      The fields [M, ...] of `Sequences` up to the states, and the errors [M] of the acting network's values.
    """
    length = burn_in + unroll
    starts = np.arange(0, len(rollout.dones) - length + 1, unroll)
    columns = len(starts) * rollout.dones.shape[1]

    def cut(field: np.ndarray, size: int) -> np.ndarray:
        """Return [size, M, ...] of a field over time."""
        pieces = field[starts + np.arange(size)[:, None]]
        return pieces.reshape(size, columns, *field.shape[2:])

    whole = {"obs", "values"}  # have one more than there are steps
    fields = rollout._asdict().items()
    cuts = Rollout(**{name: cut(field, length + (name in whole)) for name, field in fields})
    returns = n_step_returns(cuts, n, gamma)
    over_time = (cuts.obs, cuts.actions, *returns, cuts.resets)
    sequences = (*(field.swapaxes(0, 1) for field in over_time), cuts.states[0])
    values = torch.from_numpy(cuts.values[returns.ends, np.arange(columns)])
    targets = torch.from_numpy(returns.rewards) + torch.from_numpy(returns.discounts) * unscale(
        values
    )
    chosen = np.take_along_axis(cuts.logits, cuts.actions[..., None], -1)[..., 0]
    errors = (rescale(targets) - torch.from_numpy(chosen)).abs()
    real = torch.from_numpy(~cuts.resets)
    return sequences, mix_errors(errors[burn_in:], real[burn_in:]).numpy()
