"""Actors: how a network's outputs become actions.

Each takes (network, observations, states, generator, moment), as an `Agent` describes.
"""

import numpy as np
import torch
from torch import nn

from baselines.worker_schemes.control import DeterministicNetwork, GaussianNetwork, SACNetwork
from baselines.worker_schemes.dynamics import DynamicsEnsemble, plan_by_cem
from baselines.worker_schemes.parts import Decision, Moment
from baselines.worker_schemes.q_networks import DQNNetwork

# of Ape-X, section 4.1: the largest epsilon, and the power of the smallest
APE_X_EPSILON, APE_X_ALPHA = 0.4, 7.0


def act_by_logits(
    network: nn.Module,
    obs: np.ndarray,
    states: np.ndarray,
    rng: np.random.Generator,
    moment: Moment,
) -> Decision:
    """Sample discrete actions from an actor-critic network (the Gumbel-max trick)."""
    logits, values = network(torch.from_numpy(obs))
    logits = logits.numpy()
    actions = (logits + rng.gumbel(size=logits.shape)).argmax(axis=-1)
    return Decision(actions, logits, values.numpy())


def _epsilon_greedy(
    network: DQNNetwork,
    obs: np.ndarray,
    states: np.ndarray,
    rng: np.random.Generator,
    epsilons: np.ndarray,
) -> Decision:
    """Take random actions with probabilities epsilons [B], else greedy ones."""
    values, new_states = network.online.step(torch.from_numpy(obs), torch.from_numpy(states))
    values = values.numpy()
    drawn = rng.integers(values.shape[-1], size=len(obs))
    actions = np.where(rng.random(len(obs)) < epsilons, drawn, values.argmax(axis=-1))
    new_states = None if new_states is None else new_states.numpy()
    return Decision(actions, values, values.max(axis=-1), new_states)


def act_with_annealed_epsilon(
    network: DQNNetwork,
    obs: np.ndarray,
    states: np.ndarray,
    rng: np.random.Generator,
    moment: Moment,
    *,
    last_epsilon: float,
    anneal_steps: float,
) -> Decision:
    """Act epsilon-greedily; epsilon falls linearly from 1 to `last_epsilon` in `anneal_steps` of the run.

    The steps of the run are estimated as those of this worker times the number of workers.
    """
    done = min(1.0, moment.steps * moment.num_workers / anneal_steps)
    epsilon = 1 + (last_epsilon - 1) * done
    return _epsilon_greedy(network, obs, states, rng, np.full(len(obs), epsilon))


def ape_x_epsilons(moment: Moment, num_envs: int) -> np.ndarray:
    """Return 0.4^(1 + 7 i / (N - 1)) for environments i of a worker, of all N of the run (Ape-X, 4.1)."""
    count = moment.num_workers * num_envs
    index = moment.worker * num_envs + np.arange(num_envs)
    return APE_X_EPSILON ** (1 + APE_X_ALPHA * index / max(count - 1, 1))


def act_with_own_epsilons(
    network: DQNNetwork,
    obs: np.ndarray,
    states: np.ndarray,
    rng: np.random.Generator,
    moment: Moment,
) -> Decision:
    """Act epsilon-greedily, each environment of the run with its own constant epsilon, as Ape-X's actors."""
    return _epsilon_greedy(network, obs, states, rng, ape_x_epsilons(moment, len(obs)))


def act_with_noisy_layers(
    network: DQNNetwork,
    obs: np.ndarray,
    states: np.ndarray,
    rng: np.random.Generator,
    moment: Moment,
) -> Decision:
    """Act greedily, with new noise in the network's noisy layers."""
    network.online.resample(torch.Generator().manual_seed(int(rng.integers(2**62))))
    return _epsilon_greedy(network, obs, states, rng, np.zeros(len(obs)))


def _continuous(network: nn.Module, actions: np.ndarray) -> Decision:
    """Scale actions [B, size] in [-1, 1] to the environment's bounds."""
    actions = (network.middle.numpy() + network.scale.numpy() * actions).astype(np.float32)
    count = len(actions)
    return Decision(actions, np.empty((count, 0), np.float32), np.zeros(count, np.float32))


def act_by_sampling(
    network: SACNetwork | GaussianNetwork,
    obs: np.ndarray,
    states: np.ndarray,
    rng: np.random.Generator,
    moment: Moment,
) -> Decision:
    """Sample actions from a stochastic policy; uniformly before its first update (version 1)."""
    shape = (len(obs), len(network.scale))
    if moment.version == 1:
        return _continuous(network, rng.uniform(-1, 1, shape))
    noise = torch.from_numpy(rng.standard_normal(shape, np.float32))
    return _continuous(network, network.sample(torch.from_numpy(obs), noise)[0].numpy())


def act_with_gaussian_noise(
    network: DeterministicNetwork,
    obs: np.ndarray,
    states: np.ndarray,
    rng: np.random.Generator,
    moment: Moment,
    *,
    action_noise: float,
) -> Decision:
    """Add Gaussian noise to the policy's actions; act uniformly before its first update (version 1).

    Args:
      network: the policy and its critics.
      obs: [B, ...].
      states: not used.
      rng: for the noise.
      moment: when and where the actor acts.
      action_noise: standard deviation, in units of half the range of an action.
    """
    shape = (len(obs), len(network.scale))
    if moment.version == 1:
        return _continuous(network, rng.uniform(-1, 1, shape))
    actions = network.act(network.policy, torch.from_numpy(obs)).numpy()
    noise = action_noise * rng.standard_normal(shape, np.float32)
    return _continuous(network, (actions + noise).clip(-1, 1))


def act_by_planning(
    network: DynamicsEnsemble,
    obs: np.ndarray,
    states: np.ndarray,
    rng: np.random.Generator,
    moment: Moment,
    *,
    plans: int,
    elites: int,
    iterations: int,
) -> Decision:
    """Take the first action of a plan, which starts from the rest of the last one (its state).

    Before the first update (version 1), act uniformly.
    """
    size = len(network.scale)
    if moment.version == 1:
        return _continuous(network, rng.uniform(-1, 1, (len(obs), size)))
    mean = torch.from_numpy(states).view(len(obs), -1, size)
    plan = plan_by_cem(
        network,
        torch.from_numpy(obs).flatten(1),
        mean,
        rng,
        plans=plans,
        elites=elites,
        iterations=iterations,
    ).numpy()
    rest = np.concatenate([plan[:, 1:], np.zeros_like(plan[:, :1])], axis=1)
    return _continuous(network, plan[:, 0])._replace(state=rest.reshape(len(obs), -1))
