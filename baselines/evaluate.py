"""Trained networks of the torch baselines: evaluate, and record videos.

    python -m baselines.evaluate runs/<study>/<run> --episodes 10 --video game.mp4

Actions are drawn from the policy, as `cleanba.evaluate` does with the models of the JAX trainers, so their
returns can be compared.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
import tyro

from baselines.one_environment import as_stepped, channels_first
from baselines.torch_io import load_parameters
from baselines.torch_networks import make_network
from cleanba.environments import EnvSpec, describe_env
from cleanba.play import EVALUATION_EPISODES, NumEpisodes, describe_returns, new_video, play
from cleanba.record import Run, read_run
from cleanba.run.command_line import BadInput, input_checks, run_command_line

# Program -> the file of its parameters in the folder of a run, and what precedes their names there.
PARAMETERS = {
    "monobeast_study": ("model.npz", ""),
    "moolib_atari": ("checkpoints/latest.npz", "model/"),
    "hts_rl": ("model.npz", ""),
}


@input_checks()
def load_policy(run: Run) -> tuple[EnvSpec, torch.nn.Module]:
    """Return the environment of a run, and its trained network.

    Raises:
      BadInput: with one line, if it is of another program, has no parameters, or they do not fit its network.
    """
    program, options = run.info.program, run.info.hyperparameters
    if program not in PARAMETERS:
        raise BadInput(f"{run.path}: no run of {', '.join(PARAMETERS)}")
    if options.get("use_lstm"):
        raise BadInput(f"{run.path}: has an LSTM; play with `monobeast_study.py --mode test`")
    name, prefix = PARAMETERS[program]
    if not (run.path / name).is_file():
        raise BadInput(f"{run.path}: has no {name}, which is written at the end of a run")
    try:
        spec = describe_env(run.info.env_id, options["atari_preprocessing"])
        shape = as_stepped(spec).obs_shape
        hiddens = options.get("hiddens")
        network = make_network(options["network"], shape, spec.num_actions, hiddens=hiddens)
    except (KeyError, TypeError, RuntimeError) as error:
        raise BadInput(
            f"{run.path}: its hyperparameters describe no network ({type(error).__name__})"
        ) from None
    load_parameters(network, run.path / name, prefix)
    return spec, network


def policy(network: torch.nn.Module, seed: int) -> Callable[[np.ndarray, int], np.ndarray]:
    """Return a function of observations [N, ...] and the step that draws actions, int32 [N]."""
    generator = torch.Generator().manual_seed(seed)

    @torch.inference_mode()
    def act(obs: np.ndarray, _: int) -> np.ndarray:
        stacked = np.stack([channels_first(image) for image in obs])
        probabilities = torch.softmax(network(torch.from_numpy(stacked))[0], dim=-1)
        return torch.multinomial(probabilities, 1, generator=generator)[:, 0].int().numpy()

    return act


@dataclass(frozen=True)
class Args:
    """What to evaluate."""

    run: Annotated[str, tyro.conf.Positional]
    """Folder of a run of monobeast, moolib or HTS-RL."""
    episodes: NumEpisodes = EVALUATION_EPISODES
    """Number of episodes, each in a separate environment."""
    video: str | None = None
    """MP4 file for a video of the first episode, of at most two minutes."""


def main(args: Args) -> None:
    """Evaluate the trained network of a run."""
    video = new_video(args.video)
    run = read_run(args.run)
    spec, network = load_policy(run)
    seed, preprocessing = run.info.seed, run.info.hyperparameters["atari_preprocessing"]
    returns = play(policy(network, seed), spec, seed, preprocessing, args.episodes, video)
    print(f"{spec.env_id}: {describe_returns(returns)}")


if __name__ == "__main__":
    run_command_line(Args, main, "Evaluate the trained network of a torch baseline.")
