"""The trained network of a torch baseline can be played with, and filmed."""

import imageio.v2 as imageio
import msgspec
import numpy as np
import pytest
import torch

from baselines.evaluate import PARAMETERS, Args, main, policy
from baselines.torch_io import arrays_of
from baselines.torch_networks import make_network
from cleanba import play
from cleanba.record.schema import RunInfo
from cleanba.run.command_line import BadInput

OPTIONS = {"network": "mlp", "atari_preprocessing": "machado"}


def balancing_network():
    """Push the cart to where the pole falls, which balances it for all 500 steps."""
    network = make_network("mlp", (4,), 2)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
        first, second = network.actor_layers
        first.weight[0] = torch.tensor([0.0, 0.1, 1.0, 1.0])
        second.weight[0, 0] = 1.0
        network.actor.weight[:, 0] = torch.tensor([-1e4, 1e4])
    return network


@pytest.fixture
def run(tmp_path, request):
    """The folder of a CartPole run of a program, with the network above."""
    program = request.param
    name, prefix = PARAMETERS[program]
    folder = tmp_path / "run"
    (folder / name).parent.mkdir(parents=True)
    arrays = arrays_of(balancing_network()).items()
    np.savez(
        folder / name,
        **{prefix + key: array for key, array in arrays},
        **({"steps": np.array(3)} if prefix else {}),
    )
    info = RunInfo(
        system="s",
        setting="s",
        env_id="CartPole-v1",
        seed=1,
        program=program,
        hyperparameters=OPTIONS,
    )
    (folder / "run.json").write_bytes(msgspec.json.encode(info))
    return folder


@pytest.mark.parametrize("run", PARAMETERS, indirect=True)
def test_a_trained_network_plays_as_it_was_trained_to(run, capsys):
    main(Args(run=str(run)))
    assert capsys.readouterr().out == "CartPole-v1: mean return 500.00 +/- 0.00 over 10 episodes\n"


def test_actions_are_drawn_from_the_policy_by_its_seed():
    """Probabilities of 0.2 and 0.8, 4,000 draws: within four standard deviations."""

    def network(obs):
        assert obs.shape == (4000, 3, 64, 64)  # channels first, as torch has them
        return torch.log(torch.tensor([0.2, 0.8])).expand(len(obs), 2), None

    obs = np.zeros((4000, 64, 64, 3), np.uint8)
    act = policy(network, seed=1)
    first, second = act(obs, 0), act(obs, 1)
    assert abs(first.mean() - 0.8) < 4 * (0.2 * 0.8 / 4000) ** 0.5
    assert (first != second).any()
    assert (policy(network, seed=1)(obs, 0) == first).all()


@pytest.mark.parametrize("run", ["monobeast_study"], indirect=True)
def test_a_video_is_recorded_and_never_overwritten(run):
    video = run / "videos" / "CartPole-v1.mp4"
    main(Args(run=str(run), episodes=1, video=str(video)))
    assert video.read_bytes()[4:8] == b"ftyp"
    with pytest.raises(BadInput, match="exists already"):
        main(Args(run=str(run), episodes=1, video=str(video)))


@pytest.mark.parametrize("run", ["monobeast_study"], indirect=True)
def test_a_video_of_a_long_game_is_cut(run, monkeypatch):
    monkeypatch.setattr(play, "MOST_FRAMES", 20)  # the game has 500
    video = run / "game.mp4"
    main(Args(run=str(run), episodes=1, video=str(video)))
    with imageio.get_reader(video) as reader:
        assert reader.count_frames() == 20


@pytest.mark.parametrize("run", ["monobeast_study"], indirect=True)
def test_without_imageio_a_video_is_refused_before_the_game(run, monkeypatch):
    monkeypatch.setattr(play, "find_spec", lambda _: None)
    with pytest.raises(BadInput, match="imageio is not installed"):
        main(Args(run=str(run), video=str(run / "game.mp4")))


@pytest.mark.parametrize("run", ["moolib_atari"], indirect=True)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"program": "worker_schemes"}, "no run of monobeast_study, moolib_atari, hts_rl"),
        ({"hyperparameters": OPTIONS | {"use_lstm": True}}, "has an LSTM"),
        ({"hyperparameters": {}}, "describe no network"),
        ({"hyperparameters": OPTIONS | {"hiddens": [3]}}, r"latest\.npz: .* size mismatch"),
        ({"env_id": "Acrobot-v1"}, r"latest\.npz: .* size mismatch"),
        ({"env_id": "Nothing-v1"}, "Nothing-v1"),
        ({"program": "monobeast_study"}, "has no model.npz"),
    ],
)
def test_a_run_without_a_network_to_play_with_is_refused_in_one_line(run, changes, message):
    path = run / "run.json"
    info = msgspec.json.decode(path.read_bytes()) | changes
    path.write_bytes(msgspec.json.encode(info))
    with pytest.raises(BadInput, match=message) as caught:
        main(Args(run=str(run)))
    assert "\n" not in str(caught.value)
