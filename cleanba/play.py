"""Play with a policy in environments that training did not use, and record a video."""

import os
import tempfile
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from msgspec import Meta

from cleanba.environments import MAX_ENVS, EnvSpec, EpisodeStatistics, env_seeds, make_envs
from cleanba.run.command_line import BadInput

NumEpisodes = Annotated[int, Meta(ge=1, le=1000, description="from 1 to 1000")]

EVALUATION_EPISODES = 10  # as CleanRL evaluates a saved model
VIDEO_FPS = 15  # agent steps per second of a video: Atari's 60 frames a second, 4 a step
MOST_FRAMES = (
    120 * VIDEO_FPS
)  # of a video, which is held in memory; a game of Atari may have 27,000


def _picture(envs: Any, obs: np.ndarray) -> np.ndarray:
    """Return an RGB picture [H, W, 3] of the first environment."""
    try:
        return np.asarray(envs.render())[0]
    except RuntimeError:  # EnvPool cannot render some environments, such as Catch
        image = obs[0].reshape(obs.shape[1], -1)
        image = (255 * (image - image.min()) / max(np.ptp(image), 1e-8)).astype(np.uint8)
        return np.kron(np.stack([image] * 3, axis=-1), np.ones((32, 32, 1), np.uint8))


def play(
    act: Callable[[np.ndarray, int], np.ndarray],
    spec: EnvSpec,
    seed: int,
    preprocessing: str,
    episodes: int,
    video: Path | None = None,
) -> np.ndarray:
    """Play one episode in each of some new environments.

    Each environment plays one episode: the first episodes to end among many would be biased towards
    short ones. The seeds are the last of the run's range, which training does not use.

    Args:
      act: chooses actions, int32 [N], for observations [N, ...] at a step, counted from 0.
      spec: the environment.
      seed: seed of the run that trained the policy.
      preprocessing: name of the Atari wrappers.
      episodes: number N of episodes and environments.
      video: MP4 file to write of the first environment's episode, of at most two minutes, or None.

    Returns:
      Unclipped returns [N].
    """
    seeds = env_seeds(seed, MAX_ENVS - episodes, episodes)
    drawing = {"render_mode": "rgb_array"} if video else {}
    envs = make_envs(spec.env_id, seeds, preprocessing=preprocessing, **drawing)
    statistics = EpisodeStatistics(episodes)
    returns = np.full(episodes, np.nan)
    frames = []
    obs, _ = envs.reset()
    for t in range(spec.max_steps):
        if video and np.isnan(returns[0]) and len(frames) < MOST_FRAMES:
            frames.append(_picture(envs, obs))
        obs, reward, terminated, truncated, info = envs.step(act(obs, t))
        rewards = np.asarray(info.get("reward", reward))
        for episode in statistics.count(rewards[None], (terminated | truncated)[None]):
            if np.isnan(returns[episode.index]):
                returns[episode.index] = episode.episode_return
        if not np.isnan(returns).any():
            break
    envs.close()
    if video:
        import imageio.v2 as imageio

        video.parent.mkdir(parents=True, exist_ok=True)
        with warnings.catch_warnings(), tempfile.TemporaryDirectory(dir=video.parent) as folder:
            # jax warns about the fork that starts ffmpeg, although an exec follows at once
            warnings.filterwarnings("ignore", message="os.fork", category=RuntimeWarning)
            whole = Path(folder) / video.name
            imageio.mimwrite(whole, frames, fps=VIDEO_FPS, macro_block_size=2)
            os.replace(whole, video)
    return returns


def new_video(name: str | None) -> Path | None:
    """Return the path of a video that was requested by name.

    Raises:
      BadInput: with one line, if it is no .mp4, exists already, or cannot be written without imageio.
    """
    video = Path(name) if name else None
    if video:
        check_imageio("--video")
        if video.suffix != ".mp4":
            raise BadInput(f"--video {video}: must end in .mp4")
    if video and video.exists():
        raise BadInput(f"--video {video}: exists already")
    return video


def check_imageio(flag: str) -> None:
    """Refuse a flag that asks for a video where imageio is not installed.

    Raises:
      BadInput: with one line.
    """
    if find_spec("imageio") is None:
        raise BadInput(f"{flag}: imageio is not installed (pip install .[video])")


def describe_returns(returns: np.ndarray) -> str:
    """Format mean and standard deviation of returns."""
    return f"mean return {returns.mean():.2f} +/- {returns.std():.2f} over {len(returns)} episodes"
