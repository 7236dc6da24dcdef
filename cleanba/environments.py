"""EnvPool environments for all systems: seeds, pre-processing, episode statistics.

Shared with baselines/, because systems can only be compared on the same environments.
"""

import difflib
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

# EnvPool's bounds of observations are float64, its observations float32; gymnasium warns about it each time.
warnings.filterwarnings("ignore", message=".*precision lowered by casting")

# Environment seeds are seed * MAX_ENVS + env_index, below 2**31, the range that EnvPool takes:
# no two runs of different seeds, and no two environments of a run, can share one.
MAX_ENVS = 2**14
MAX_SEED = 2**17 - 1

# Machado et al. (2018), https://arxiv.org/abs/1709.06009, table 5, as in section 5 of the Cleanba
# paper: 84x84 grey, 4 stacked frames, action repeat 4, sticky actions 0.25, the full action space,
# no loss-of-life signal, 108,000 frames (27,000 agent steps) at most. No-ops: as EnvPool's default.
_MACHADO = dict(
    img_height=84,
    img_width=84,
    gray_scale=True,
    stack_num=4,
    frame_skip=4,
    repeat_action_probability=0.25,
    full_action_space=True,
    episodic_life=False,
    zero_discount_on_life_loss=False,
    max_episode_steps=27_000,
    noop_max=30,
    reward_clip=True,  # for learning; episode returns are counted from the unclipped reward
)

ATARI_PREPROCESSING = {
    "machado": _MACHADO,
    # The alternative in appendix D of the paper: gym.wrappers.AtariPreprocessing. It does not press FIRE
    # after a reset, which EnvPool does where the action set has it.
    "gym": _MACHADO | dict(use_fire_reset=False),
}


class EnvSpec(NamedTuple):
    """The properties of an environment that networks and buffers need."""

    env_id: str
    obs_shape: tuple[int, ...]
    obs_dtype: np.dtype
    num_actions: int
    is_atari: bool
    max_steps: int  # agent steps of the longest episode


class Episode(NamedTuple):
    """A finished episode: the step (in its rollout) and the environment (in its group) at its end."""

    t: int
    index: int
    episode_return: float
    length: int


def env_seeds(seed: int, first: int, count: int) -> list[int]:
    """Return the seeds of environments `first` to `first + count - 1` of a run.

    Args:
      seed: seed of the run, 0 to MAX_SEED.
      first: index in the run of the first environment.
      count: number of environments.

    Returns:
      One seed per environment, below 2**31; different (seed, index) give different seeds.

    Raises:
      ValueError: if seed or indices are out of range.
    """
    if not 0 <= seed <= MAX_SEED:
        raise ValueError(f"--seed {seed}: must be from 0 to {MAX_SEED}")
    if first < 0 or first + count > MAX_ENVS:
        raise ValueError(f"--num-envs: at most {MAX_ENVS} environments")
    return [seed * MAX_ENVS + index for index in range(first, first + count)]


def check_env_id(env_id: str) -> None:
    """Refuse an environment that EnvPool does not have, and suggest similar names.

    Raises:
      ValueError: with one line.
    """
    import envpool

    known = envpool.list_all_envs()
    if env_id not in known:
        near = difflib.get_close_matches(env_id, known, n=3, cutoff=0.5)
        hint = f"; did you mean {', '.join(near)}?" if near else ""
        raise ValueError(f"--env-id {env_id}: EnvPool has no such environment{hint}")


def is_atari(env_id: str) -> bool:
    """Whether an EnvPool id is an Atari game."""
    from envpool.atari.registration import atari_game_list

    def squash(name: str) -> str:
        return name.replace("_", "").lower()

    return env_id.endswith("-v5") and squash(env_id[: -len("-v5")]) in map(squash, atari_game_list)


def make_envs(
    env_id: str,
    seeds: Sequence[int],
    num_threads: int = 1,
    preprocessing: str = "machado",
    **overrides: Any,
) -> Any:
    """Make one EnvPool instance in synchronous mode, one environment per seed, in that order.

    With `env_seed` given, an environment's trajectory depends on its seed and its actions alone.

    Args:
      env_id: EnvPool id.
      seeds: one per environment.
      num_threads: threads that step the environments (a hardware setting).
      preprocessing: for Atari, a name in ATARI_PREPROCESSING.
      **overrides: further options of EnvPool.

    Returns:
      An EnvPool instance with the gymnasium interface.
    """
    import envpool

    options = dict(ATARI_PREPROCESSING[preprocessing]) if is_atari(env_id) else {}
    return envpool.make(
        env_id,
        env_type="gymnasium",
        num_envs=len(seeds),
        env_seed=list(seeds),
        num_threads=num_threads,
        **(options | overrides),
    )


def describe_env(env_id: str, preprocessing: str = "machado") -> EnvSpec:
    """Return shapes and number of actions of an environment.

    Raises:
      ValueError: if it is unknown, or its actions are not discrete.
    """
    check_env_id(env_id)
    envs = make_envs(env_id, [0], preprocessing=preprocessing)
    actions, observations = envs.action_space, envs.observation_space
    if not hasattr(actions, "n") or observations.shape is None:  # of a dictionary, None
        raise ValueError(f"--env-id {env_id}: needs discrete actions and an array as observation")
    return EnvSpec(
        env_id,
        tuple(observations.shape),
        np.dtype(observations.dtype),
        int(actions.n),
        is_atari(env_id),
        int(envs.spec.config.max_episode_steps),
    )


class EpisodeStatistics:
    """Counts returns and lengths of the episodes of some environments, rollout by rollout.

    EnvPool resets an environment on the step after its episode ended. That step's action is
    ignored and its reward is not part of any episode, so it is not counted.
    """

    def __init__(self, num_envs: int, same_step: bool = False):
        """Start counting at a reset of all environments.

        Args:
          num_envs: the environments.
          same_step: they were reset within the step that ended an episode: every step is counted.
        """
        self._same_step = same_step
        self._returns = np.zeros(num_envs, np.float64)
        self._lengths = np.zeros(num_envs, np.int64)
        self._resets = np.zeros(num_envs, bool)

    def count(self, rewards: np.ndarray, dones: np.ndarray) -> list[Episode]:
        """Count some steps of all environments.

        Args:
          rewards: unclipped rewards [T, B].
          dones: whether the episode ended with that step [T, B].

        Returns:
          The episodes that ended, in the order of steps and, within one, of environments.
        """
        resets = np.concatenate([self._resets[None], dones[:-1]])
        real = np.ones_like(dones) if self._same_step else ~resets
        # Summed step by step (accumulate), not pairwise, so that a return does not depend on the
        # boundaries of rollouts.
        counted = np.where(real, rewards, 0.0)
        returns = np.add.accumulate(np.concatenate([self._returns[None], counted]))
        lengths = np.add.accumulate(np.concatenate([self._lengths[None], real]))
        episodes = []
        for t, i in np.argwhere(dones).tolist():
            episodes.append(Episode(t, i, float(returns[t + 1, i]), int(lengths[t + 1, i])))
            returns[t + 1 :, i] = np.add.accumulate(np.append(0.0, counted[t + 1 :, i]))
            lengths[t + 1 :, i] = np.add.accumulate(np.append(0, real[t + 1 :, i]))
        self._returns, self._lengths, self._resets = returns[-1], lengths[-1], dones[-1]
        return episodes


class Played(NamedTuple):
    """The result of playing given actions."""

    obs: np.ndarray  # [B, ...], after the last step
    rewards: np.ndarray  # float32 [T, B], unclipped
    dones: np.ndarray  # bool [T, B]
    last_reward: np.ndarray  # float32 [B], of the last step, as the agent learns from it


def play(envs: Any, actions: np.ndarray, same_step: bool = False) -> Played:
    """Step an EnvPool instance through given actions.

    Args:
      envs: in synchronous mode, with nothing sent that has not been received.
      actions: int32 [T, B].
      same_step: whether environments are reset within the step that ends their episode. Otherwise
        EnvPool resets them on their next step, and ignores its action.

    Returns:
      Rewards, ends of episodes, and the observations of the last step, before any reset within it.
    """
    env_ids = np.arange(actions.shape[1], dtype=np.int32)
    rewards = np.empty(actions.shape, np.float32)
    dones = np.empty(actions.shape, bool)
    obs = last_reward = None
    for t in range(len(actions)):
        envs.send(actions[t], env_ids)
        obs, reward, terminated, truncated, info = envs.recv()
        rewards[t] = info.get("reward", reward)
        np.logical_or(terminated, truncated, out=dones[t])
        last_reward = np.array(reward, np.float32)
        if same_step and dones[t].any():
            ended = env_ids[dones[t]]
            envs.send(np.zeros(len(ended), np.int32), ended)
            envs.recv()
    return Played(obs, rewards, dones, last_reward)
