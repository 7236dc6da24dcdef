"""A saved model is judged by the first episode of each of some environments that training never saw."""

import sys
from fnmatch import fnmatch
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from cleanba import evaluate, play
from cleanba.environments import MAX_ENVS, describe_env, env_seeds
from cleanba.networks import make_network
from cleanba.run.command_line import BadInput
from cleanba.run.options import ModelOptions

EPISODES = 4
OPTIONS = {"network": "mlp", "channels": None, "hiddens": None, "atari_preprocessing": "gym"}


class Envs:
    """Environment i: a first episode of 10 (i + 1) steps, then episodes of 3; each step is worth 10.

    Learning would see a clipped reward of 1. Every observation is the same.
    """

    def __init__(self, env_id, seeds, **options):
        self.seeds, self.actions = list(seeds), []
        self._left = np.array([10 * (i + 1) for i in range(len(seeds))])

    def reset(self):
        return np.ones((len(self.seeds), 4), np.float32), {}

    def step(self, actions):
        self.actions.append(actions)
        done = self._left == 1
        self._left = np.where(self._left == 0, 3, self._left - 1)  # 0: the step that resets
        clipped = np.ones(len(done), np.float32)
        return self.reset()[0], clipped, done, np.zeros_like(done), {"reward": 10 * clipped}

    def close(self):
        pass


@pytest.fixture
def played(monkeypatch):
    """Returns, and the environments, of an evaluation with those above."""
    made = []

    def make_envs(*args, **options):
        made.append(Envs(*args, **options))
        return made[-1]

    monkeypatch.setattr(play, "make_envs", make_envs)
    params = make_network("mlp", 2, portable=True).init(
        jax.random.key(0), np.ones((1, 4), np.float32)
    )
    returns = evaluate.evaluate(evaluate.Model("CartPole-v1", 7, OPTIONS, params), EPISODES)
    return returns, made[-1]


def test_the_first_episode_of_each_environment_counts_with_its_whole_rewards(played):
    returns, _ = played
    assert returns.tolist() == [100.0, 200.0, 300.0, 400.0]


def test_environments_are_not_those_of_the_training(played):
    _, envs = played
    largest_run = env_seeds(7, 0, MAX_ENVS - EPISODES)
    assert len(set(envs.seeds)) == EPISODES
    assert not set(envs.seeds) & set(largest_run)
    assert not set(envs.seeds) & set(env_seeds(8, 0, MAX_ENVS))


@pytest.mark.parametrize("name", ["game", "game.txt", "game.gif"])
def test_a_video_of_another_format_is_refused_before_a_game_is_played(name):
    with pytest.raises(BadInput, match=r"must end in \.mp4"):
        play.new_video(name)


def test_actions_are_drawn_anew_in_every_step(played):
    """A new policy is close to uniform: a fair coin, for each of 40 steps of 4 environments."""
    actions = np.stack(played[1].actions)
    assert actions.shape == (40, EPISODES)
    assert set(actions.ravel()) == {0, 1}
    heads = actions.mean(axis=0)
    assert (np.abs(heads - 0.5) < 4 * 0.5 / 40**0.5).all()
    assert len({tuple(column) for column in actions.T}) == EPISODES


def balancing_network():
    """Push the cart to where the pole falls, which balances it for all 500 steps."""
    network = make_network("mlp", 2, portable=True)
    params = network.init(jax.random.key(0), np.ones((1, 4), np.float32))
    params = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), params)
    layers = params["params"]
    layers["actor_0"]["kernel"][:, 0] = 0.0, 0.1, 1.0, 1.0
    layers["actor_1"]["kernel"][0, 0] = 1.0
    layers["actor"]["kernel"][0] = -1e4, 1e4
    return params


def setup_of(folder, **options):
    """What is needed of a run to save, evaluate and upload its model."""
    return SimpleNamespace(
        name="cleanba_ppo", directory=folder, hyperparameters=OPTIONS, spec=describe_env("CartPole-v1"),
        args=SimpleNamespace(seed=7, model=ModelOptions(**options)),
        placement=SimpleNamespace(process=0), run=SimpleNamespace(system="mine"),
    )  # fmt: skip


def test_a_trained_network_plays_as_it_was_trained_to(tmp_path, capsys):
    evaluate.save_final_model(setup_of(tmp_path, save_model=True), balancing_network())
    evaluate.main(evaluate.Args(model=str(tmp_path)))
    assert capsys.readouterr().out == "CartPole-v1: mean return 500.00 +/- 0.00 over 10 episodes\n"


class Address(str):
    repo_id = "me/repository"


class Hub:
    """A fake `huggingface_hub.HfApi` that records uploads."""

    def __init__(self):
        self.repositories, self.files, self.texts = [], [], {}

    def create_repo(self, repo_id, *, exist_ok):
        self.repositories.append((repo_id, exist_ok))
        return Address("https://hub/me/repository")

    def upload_folder(self, *, repo_id, folder_path, allow_patterns):
        assert repo_id == Address.repo_id
        names = [p.relative_to(folder_path).as_posix() for p in folder_path.rglob("*.*")]
        self.files += [n for n in names if any(fnmatch(n, p) for p in allow_patterns)]

    def upload_file(self, *, repo_id, path_or_fileobj, path_in_repo):
        assert repo_id == Address.repo_id
        self.texts[path_in_repo] = path_or_fileobj.decode()


@pytest.fixture
def hub(monkeypatch):
    """The Hub, with a user's token, and a model whose returns are 1 and 3."""
    found = Hub()
    module = SimpleNamespace(HfApi=lambda: found, get_token=lambda: "token")
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    monkeypatch.setattr(evaluate, "evaluate", lambda *_: np.array([1.0, 3.0]))
    return found


@pytest.mark.parametrize(("entity", "prefix"), [("", ""), ("team", "team/")])
def test_a_model_is_uploaded_with_its_header_its_videos_and_a_card_of_its_returns(
    tmp_path, capsys, hub, entity, prefix
):
    setup = setup_of(tmp_path, upload_model=True, hf_entity=entity)
    for name in ("run.json", "updates.jsonl", "videos/CartPole-v1.mp4", "tensorboard/events.1"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    evaluate.warn_if_cannot_upload(setup.args.model)
    evaluate.save_final_model(setup, {})
    evaluate.show_model(setup)
    assert hub.repositories == [(f"{prefix}CartPole-v1-mine-seed7", True)]
    expected = ["cleanba_ppo.cleanrl_model", "run.json", "videos/CartPole-v1.mp4"]
    assert sorted(hub.files) == expected
    assert "# mine on CartPole-v1, seed 7" in hub.texts["README.md"]
    assert "Mean return: 2.00 +/- 1.00 over 2 episodes" in hub.texts["README.md"]
    model, uploaded = capsys.readouterr().out.splitlines()
    assert model.startswith("model: ")
    assert uploaded == "uploaded: https://hub/me/repository"


@pytest.mark.parametrize("obstacle", ["huggingface_hub is not installed", "no Hugging Face token"])
def test_an_obstacle_to_an_upload_is_printed_before_training(
    tmp_path, capsys, monkeypatch, hub, obstacle
):
    if "installed" in obstacle:
        monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    else:
        monkeypatch.setattr(sys.modules["huggingface_hub"], "get_token", lambda: None)
    setup = setup_of(tmp_path, upload_model=True)
    evaluate.warn_if_cannot_upload(setup.args.model)
    note = capsys.readouterr().out
    assert note.startswith(f"note: the model will be saved but not uploaded: {obstacle}")
    evaluate.save_final_model(setup, {})
    evaluate.show_model(setup)
    assert "uploaded" not in capsys.readouterr().out
    assert hub.repositories == []
