"""A single EnvPool environment, for a process that steps no other."""

from typing import NamedTuple

import numpy as np

from cleanba.environments import EnvSpec, make_envs


def channels_first(image: np.ndarray) -> np.ndarray:
    """Return an image with its channels first, as torch has them; return other observations unchanged."""
    if image.ndim == 3 and image.shape[-1] < image.shape[0]:
        return np.moveaxis(image, -1, 0)
    return image


def as_stepped(spec: EnvSpec) -> EnvSpec:
    """Return the description of an environment as `Environment` presents it, with channels first."""
    return spec._replace(obs_shape=channels_first(np.empty(spec.obs_shape)).shape)


class Step(NamedTuple):
    """The result of an action; images have their channels first."""

    obs: np.ndarray
    reward: float  # unclipped
    done: bool  # the observation begins a new episode
    episode_return: float  # so far, unclipped; of the whole episode where done
    episode_length: int


class Environment:
    """An environment that resets within the step that ends an episode, as in monobeast."""

    def __init__(self, env_id: str, seed: int, preprocessing: str):
        """Make the environment, without resetting it."""
        self._envs = make_envs(env_id, [seed], 1, preprocessing)
        self._return, self._length = 0.0, 0

    def initial(self) -> Step:
        """Reset the environment."""
        obs, _ = self._envs.reset()
        return Step(channels_first(obs[0]), 0.0, True, 0.0, 0)

    def step(self, action: int) -> Step:
        """Take an action."""
        obs, reward, terminated, truncated, info = self._envs.step(np.array([action], np.int32))
        reward = float(info.get("reward", reward)[0])
        self._return += reward
        self._length += 1
        done = bool(terminated[0] or truncated[0])
        result = Step(channels_first(obs[0]), reward, done, self._return, self._length)
        if done:
            # EnvPool resets an environment on the step after its episode ended, and ignores that step's
            # action. It is taken here, so that no rollout holds a step that is not real.
            obs = self._envs.step(np.array([0], np.int32))[0]
            result = result._replace(obs=channels_first(obs[0]))
            self._return, self._length = 0.0, 0
        return result
