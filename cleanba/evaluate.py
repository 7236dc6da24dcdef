"""Saved models: save, load, evaluate, record videos, upload.

    python -m cleanba.evaluate runs/<study>/<run>/cleanba_ppo.cleanrl_model --episodes 10

A model is a msgpack file with hyperparameters and parameters; nothing in it is unpickled.
"""

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import flax.serialization
import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import tyro
from msgspec import Meta

from cleanba.environments import (
    MAX_ENVS,
    EnvSpec,
    EpisodeStatistics,
    describe_env,
    env_seeds,
    make_envs,
)
from cleanba.networks import make_network
from cleanba.preparation import Setup
from cleanba.record.encoding import ENCODER
from cleanba.record.files import LARGEST_MODEL, decode_json, read_file
from cleanba.record.schema import Count, Name
from cleanba.run.command_line import BadInput, input_checks, run_command_line
from cleanba.run.options import ModelOptions

EVALUATION_EPISODES = 10  # as CleanRL evaluates a saved model
VIDEO_FPS = 15  # agent steps per second of a video: Atari's 60 frames a second, 4 a step


class Model(NamedTuple):
    """A saved model."""

    env_id: str
    seed: int
    hyperparameters: dict[str, Any]
    params: Any


class _Header(msgspec.Struct):
    """All of a saved model but its parameters."""

    env_id: Name
    seed: Count
    hyperparameters: dict[str, Any]


def save_model(path: Path, model: Model) -> None:
    """Write a model to a file."""
    header = _Header(env_id=model.env_id, seed=model.seed, hyperparameters=model.hyperparameters)
    tree = {"header": ENCODER.encode(header).decode(), "params": model.params}
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(flax.serialization.msgpack_serialize(tree))
    temporary.replace(path)


def load_model(path: Path) -> Model:
    """Read a model from a file.

    Raises:
      BadInput: with one line, if it does not exist or is not a model.
    """
    try:
        tree = flax.serialization.msgpack_restore(read_file(path, LARGEST_MODEL))
        header = decode_json(tree["header"], _Header)
        return Model(header.env_id, header.seed, header.hyperparameters, tree["params"])
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}") from None
    except Exception as error:
        raise BadInput(f"{path}: not a saved model ({type(error).__name__})") from None


def _shape(leaf: Any) -> tuple[Any, ...]:
    return tuple(getattr(leaf, "shape", ())), str(getattr(leaf, "dtype", type(leaf)))


@input_checks()
def describe_model(model: Model) -> tuple[EnvSpec, Any]:
    """Check that the parameters of a model fit its network; return its environment and the network.

    Raises:
      BadInput: with one line, if the environment is unknown, the hyperparameters describe no network, or
        the parameters have other names, shapes or types than the network's.
    """
    options = model.hyperparameters
    try:
        chosen = [options[name] for name in ("network", "channels", "hiddens")]
        preprocessing = options["atari_preprocessing"]
        spec = describe_env(model.env_id, preprocessing)
        network = make_network(chosen[0], spec.num_actions, *chosen[1:], portable=False)
        obs = jax.ShapeDtypeStruct((1, *spec.obs_shape), spec.obs_dtype)
        expected = jax.eval_shape(network.init, jax.random.key(0), obs)  # computes nothing
    except ValueError:
        raise
    except Exception as error:  # raised by flax or jax for invalid widths
        raise BadInput(
            f"the model's hyperparameters describe no network ({type(error).__name__})"
        ) from None
    shapes = [jax.tree.map(_shape, tree) for tree in (expected, model.params)]
    if shapes[0] != shapes[1]:
        raise BadInput("the model's parameters do not fit the network of its hyperparameters")
    return spec, network


def _picture(envs: Any, obs: np.ndarray) -> np.ndarray:
    """Return an RGB picture [H, W, 3] of the first environment."""
    try:
        return np.asarray(envs.render())[0]
    except RuntimeError:  # EnvPool cannot render some environments, such as Catch
        image = obs[0].reshape(obs.shape[1], -1)
        image = (255 * (image - image.min()) / max(np.ptp(image), 1e-8)).astype(np.uint8)
        return np.kron(np.stack([image] * 3, axis=-1), np.ones((32, 32, 1), np.uint8))


def evaluate(model: Model, episodes: int, video: Path | None = None) -> np.ndarray:
    """Play one episode in each of some new environments, with actions drawn from the policy.

    Each environment plays one episode: the first episodes to end among many would be biased towards
    short ones. The seeds are the last of the run's range, which training does not use.

    Args:
      model: the saved model.
      episodes: number of episodes.
      video: MP4 file to write of the first environment's episode, or None.

    Returns:
      Unclipped returns [episodes].

    Raises:
      BadInput: with one line, if the model's parts do not fit each other.
    """
    spec, network = describe_model(model)
    preprocessing = model.hyperparameters["atari_preprocessing"]

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
            # jax warns about the fork that starts ffmpeg, although an exec follows at once
            warnings.filterwarnings("ignore", message="os.fork", category=RuntimeWarning)
            imageio.mimwrite(video, frames, fps=VIDEO_FPS, macro_block_size=2)
    return returns


def upload_obstacle() -> str | None:
    """Return why an upload to the Hugging Face Hub is not possible, or None."""
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
        f"# {setup.run.system} on {setup.spec.env_id}, seed {setup.args.seed}\n\n"
        f"Mean return: {scores}\n\n| hyperparameter | value |\n|-|-|\n{table}\n"
    )


def warn_if_cannot_upload(options: ModelOptions) -> None:
    """Print a note before training if a requested upload will not be possible."""
    obstacle = upload_obstacle() if options.upload_model else None
    if obstacle:
        print(f"note: the model will be saved but not uploaded: {obstacle}")


def _final_model(setup: Setup) -> Path | None:
    """Return the file of a run's final model, or None if it is not to be saved by this process."""
    options = setup.args.model
    wanted = options.save_model or options.upload_model or options.capture_video
    if not wanted or setup.placement.process != 0:
        return None
    return setup.directory / f"{setup.name}.cleanrl_model"


def save_final_model(setup: Setup, params: Any) -> None:
    """Save the final model of a run, if its options request it."""
    path = _final_model(setup)
    if path is not None:
        params = jax.device_get(params)
        save_model(path, Model(setup.spec.env_id, setup.args.seed, setup.hyperparameters, params))


def show_model(setup: Setup) -> None:
    """Evaluate the final model of a run, record a video and upload it, as its options request."""
    path = _final_model(setup)
    if path is None:
        return
    options = setup.args.model
    model = load_model(path)
    video = setup.directory / "videos" / f"{setup.spec.env_id}.mp4"
    returns = evaluate(model, EVALUATION_EPISODES, video if options.capture_video else None)
    print(f"model: {path}, evaluation: {describe_returns(returns)}")
    if options.capture_video:
        print(f"video: {video}")
    if options.upload_model and upload_obstacle() is None:
        name = f"{setup.spec.env_id}-{setup.run.system}-seed{setup.args.seed}"
        repository = f"{options.hf_entity}/{name}" if options.hf_entity else name
        print(f"uploaded: {upload_model(setup.directory, repository, _card(setup, returns))}")


def describe_returns(returns: np.ndarray) -> str:
    """Format mean and standard deviation of returns."""
    return f"mean return {returns.mean():.2f} +/- {returns.std():.2f} over {len(returns)} episodes"


@dataclass(frozen=True)
class Args:
    """What to evaluate."""

    model: Annotated[str, tyro.conf.Positional]
    """A saved model, or the folder of a run that has one."""
    episodes: Annotated[int, Meta(ge=1, le=1000, description="from 1 to 1000")] = (
        EVALUATION_EPISODES
    )
    """Number of episodes, each in a separate environment."""
    video: str | None = None
    """MP4 file for a video of the first episode."""


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
    video = Path(args.video) if args.video else None
    if video and video.exists():
        raise BadInput(f"--video {video}: exists already")
    model = load_model(find_model(Path(args.model)))
    print(f"{model.env_id}: {describe_returns(evaluate(model, args.episodes, video))}")


if __name__ == "__main__":
    run_command_line(Args, main, "Evaluate a saved model.")
