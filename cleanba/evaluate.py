"""Saved models: keep one, evaluate one, film it, upload it.

    python -m cleanba.evaluate runs/<study>/<run>/cleanba_ppo.cleanrl_model --episodes 10

A model is a msgpack file with hyperparameters and parameters; nothing in it is unpickled.
"""

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import tyro

from cleanba.command_line import BadInput, run_command_line
from cleanba.environments import (
    MAX_ENVS,
    EpisodeStatistics,
    check_env_id,
    describe_env,
    env_seeds,
    make_envs,
)
from cleanba.networks import make_network
from cleanba.preparation import Setup

EVALUATION_EPISODES = 10  # as CleanRL evaluates a saved model
VIDEO_FPS = 15  # agent steps per second of a video: Atari's 60 frames a second, 4 a step


class Model(NamedTuple):
    """A saved model."""

    env_id: str
    seed: int
    hyperparameters: dict[str, Any]
    params: Any


def save_model(path: Path, model: Model) -> None:
    """Write a model to a file."""
    header = {
        "env_id": model.env_id,
        "seed": model.seed,
        "hyperparameters": model.hyperparameters,
    }
    tree = {"header": json.dumps(header), "params": model.params}
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(flax.serialization.msgpack_serialize(tree))
    temporary.replace(path)


def load_model(path: Path) -> Model:
    """Read a model from a file.

    Raises:
      BadInput: with one line, if it is not there or not a model.
    """
    try:
        tree = flax.serialization.msgpack_restore(path.read_bytes())
        header = json.loads(tree["header"])
        return Model(header["env_id"], header["seed"], header["hyperparameters"], tree["params"])
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}") from None
    except Exception as error:
        raise BadInput(f"{path}: not a saved model ({type(error).__name__})") from None


def _picture(envs: Any, obs: np.ndarray) -> np.ndarray:
    """Return an RGB picture [H, W, 3] of the first environment."""
    try:
        return np.asarray(envs.render())[0]
    except RuntimeError:  # EnvPool cannot draw some environments, such as Catch
        image = obs[0].reshape(obs.shape[1], -1)
        image = (255 * (image - image.min()) / max(np.ptp(image), 1e-8)).astype(np.uint8)
        return np.kron(np.stack([image] * 3, axis=-1), np.ones((32, 32, 1), np.uint8))


def evaluate(model: Model, episodes: int, video: Path | None = None) -> np.ndarray:
    """Play one episode in each of some new environments, with actions drawn from the policy.

    One episode per environment, because the first episodes to end among many would be the short
    ones. Their seeds are the last of the run's range, which training does not reach.

    Args:
      model: what plays.
      episodes: number of episodes.
      video: where to write an MP4 file of the first environment's episode, if at all.

    Returns:
      Unclipped returns [episodes].
    """
    preprocessing = model.hyperparameters["atari_preprocessing"]
    spec = describe_env(model.env_id, preprocessing)
    options = model.hyperparameters
    network = make_network(
        options["network"], spec.num_actions, options["channels"], options["hiddens"]
    )

    @jax.jit
    def act(obs: jax.Array, key: jax.Array) -> jax.Array:
        return jax.random.categorical(key, network.apply(model.params, obs)[0]).astype(jnp.int32)

    seeds = env_seeds(model.seed, MAX_ENVS - episodes, episodes)
    drawing = {"render_mode": "rgb_array"} if video else {}
    envs = make_envs(model.env_id, seeds, preprocessing=preprocessing, **drawing)
    statistics = EpisodeStatistics(episodes)
    returns = np.full(episodes, np.nan)
    frames = []
    obs, _ = envs.reset()
    for t in range(spec.max_steps):
        if video and np.isnan(returns[0]):
            frames.append(_picture(envs, obs))
        key = jax.random.fold_in(jax.random.key(model.seed), t)
        obs, reward, terminated, truncated, info = envs.step(np.asarray(act(obs, key)))
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
        with warnings.catch_warnings():
            # jax warns of the fork that starts ffmpeg, which is followed by an exec at once
            warnings.filterwarnings("ignore", message="os.fork", category=RuntimeWarning)
            imageio.mimwrite(video, frames, fps=VIDEO_FPS, macro_block_size=2)
    return returns


def upload_obstacle() -> str | None:
    """Return what stands in the way of an upload to the Hugging Face Hub, or None."""
    try:
        from huggingface_hub import get_token
    except ImportError:
        return "huggingface_hub is not installed (pip install huggingface_hub)"
    return None if get_token() else "no Hugging Face token (huggingface-cli login)"


def upload_model(folder: Path, repository: str, card: str) -> str:
    """Upload a run's model and videos to the Hugging Face Hub.

    Args:
      folder: folder of the run.
      repository: `<entity>/<name>`.
      card: text of the model card, in Markdown.

    Returns:
      The address of the model.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    address = api.create_repo(repository, exist_ok=True)
    api.upload_folder(
        repo_id=address.repo_id,
        folder_path=folder,
        allow_patterns=["*.cleanrl_model", "videos/*", "run.json"],
    )
    api.upload_file(
        repo_id=address.repo_id, path_or_fileobj=card.encode(), path_in_repo="README.md"
    )
    return str(address)


def _card(setup: Setup, returns: np.ndarray) -> str:
    scores = f"{returns.mean():.2f} +/- {returns.std():.2f} over {len(returns)} episodes"
    table = "\n".join(f"| {k} | {v} |" for k, v in setup.hyperparameters.items())
    return (
        "---\ntags:\n- reinforcement-learning\n- cleanba\n---\n"
        f"# {setup.system} on {setup.spec.env_id}, seed {setup.args.seed}\n\n"
        f"Mean return: {scores}\n\n| hyperparameter | value |\n|-|-|\n{table}\n"
    )


def announce_upload(upload: bool) -> None:
    """Say before the training, not after it, that an upload will not be possible."""
    obstacle = upload_obstacle() if upload else None
    if obstacle:
        print(f"note: the model will be saved but not uploaded: {obstacle}")


def _final_model(setup: Setup) -> Path | None:
    """Return where the final model of a run belongs, or None if nobody asked for it."""
    options = setup.args.run
    wanted = options.save_model or options.upload_model or options.capture_video
    if not wanted or setup.layout.process != 0:
        return None
    return setup.directory / f"{setup.name}.cleanrl_model"


def save_final_model(setup: Setup, params: Any) -> None:
    """Save the final model of a run, if that was asked for."""
    path = _final_model(setup)
    if path is not None:
        params = jax.device_get(params)
        save_model(path, Model(setup.spec.env_id, setup.args.seed, setup.hyperparameters, params))


def show_model(setup: Setup) -> None:
    """Evaluate, film and upload the final model of a run, as far as was asked for."""
    path = _final_model(setup)
    if path is None:
        return
    options = setup.args.run
    model = load_model(path)
    video = setup.directory / "videos" / f"{setup.spec.env_id}.mp4"
    returns = evaluate(model, EVALUATION_EPISODES, video if options.capture_video else None)
    print(f"model: {path}, evaluation: {describe_returns(returns)}")
    if options.capture_video:
        print(f"video: {video}")
    if options.upload_model and upload_obstacle() is None:
        name = f"{setup.spec.env_id}-{setup.system}-seed{setup.args.seed}"
        repository = f"{options.hf_entity}/{name}" if options.hf_entity else name
        print(f"uploaded: {upload_model(setup.directory, repository, _card(setup, returns))}")


def describe_returns(returns: np.ndarray) -> str:
    """Say returns in a few words."""
    return f"mean return {returns.mean():.2f} +/- {returns.std():.2f} over {len(returns)} episodes"


@dataclass(frozen=True)
class Args:
    """What to evaluate."""

    model: Annotated[str, tyro.conf.Positional]
    """A saved model, or the folder of a run that has one."""
    episodes: int = EVALUATION_EPISODES
    """Episodes, each in an environment of its own."""
    video: str | None = None
    """Write a video (MP4) of the first one to this file."""


def find_model(path: Path) -> Path:
    """Return the model file at a path, or in the folder of a run.

    Raises:
      BadInput: with one line, if there is none.
    """
    if not path.is_dir():
        return path
    models = sorted(path.glob("*.cleanrl_model"))
    if not models:
        raise BadInput(f"{path}: no saved model in this folder (train with --save-model)")
    return models[0]


def main(args: Args) -> None:
    """Evaluate a saved model."""
    if not 1 <= args.episodes <= 1000:
        raise BadInput(f"--episodes {args.episodes}: must be from 1 to 1000")
    video = Path(args.video) if args.video else None
    if video and video.exists():
        raise BadInput(f"--video {video}: exists already")
    model = load_model(find_model(Path(args.model)))
    try:
        check_env_id(model.env_id)
    except ValueError as error:
        raise BadInput(str(error)) from None
    print(f"{model.env_id}: {describe_returns(evaluate(model, args.episodes, video))}")


if __name__ == "__main__":
    run_command_line(Args, main, "Evaluate a saved model.")
