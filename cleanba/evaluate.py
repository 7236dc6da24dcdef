"""Saved models of the JAX trainers: save, load, evaluate, record videos, upload.

    python -m cleanba.evaluate runs/<study>/<run>/cleanba_ppo.cleanrl_model --episodes 10

A model is a msgpack file with hyperparameters and parameters; nothing in it is unpickled.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import flax.serialization
import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import tyro

from cleanba.environments import EnvSpec, describe_env
from cleanba.networks import make_network
from cleanba.play import EVALUATION_EPISODES, NumEpisodes, describe_returns, new_video, play
from cleanba.preparation import Setup
from cleanba.record import replace_file
from cleanba.record.encoding import ENCODER
from cleanba.record.files import LARGEST_MODEL, decode_json, read_file
from cleanba.record.schema import Count, Name
from cleanba.run.command_line import BadInput, input_checks, run_command_line
from cleanba.run.options import ModelOptions


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
    replace_file(path, flax.serialization.msgpack_serialize(tree))


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


def evaluate(model: Model, episodes: int, video: Path | None = None) -> np.ndarray:
    """Play episodes with actions drawn from the policy of a model, as `play.play` does.

    Args:
      model: the saved model.
      episodes: number of episodes.
      video: MP4 file to write of the first environment's episode, of at most two minutes, or None.

    Returns:
      Unclipped returns [episodes].

    Raises:
      BadInput: with one line, if the model's parts do not fit each other.
    """
    spec, network = describe_model(model)

    @jax.jit
    def draw(obs: jax.Array, t: int) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(model.seed), t)
        return jax.random.categorical(key, network.apply(model.params, obs)[0]).astype(jnp.int32)

    def act(obs: np.ndarray, t: int) -> np.ndarray:
        return np.asarray(draw(obs, t))

    preprocessing = model.hyperparameters["atari_preprocessing"]
    return play(act, spec, model.seed, preprocessing, episodes, video)


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


@dataclass(frozen=True)
class Args:
    """What to evaluate."""

    model: Annotated[str, tyro.conf.Positional]
    """A saved model, or the folder of a run that has one."""
    episodes: NumEpisodes = EVALUATION_EPISODES
    """Number of episodes, each in a separate environment."""
    video: str | None = None
    """MP4 file for a video of the first episode, of at most two minutes."""


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
    video = new_video(args.video)
    model = load_model(find_model(Path(args.model)))
    print(f"{model.env_id}: {describe_returns(evaluate(model, args.episodes, video))}")


if __name__ == "__main__":
    run_command_line(Args, main, "Evaluate a saved model.")
