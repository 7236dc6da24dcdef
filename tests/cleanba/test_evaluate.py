"""A saved model is judged by the first episode of each of some environments that training never saw."""

import jax
import numpy as np
import pytest

from cleanba import evaluate, play
from cleanba.environments import MAX_ENVS, env_seeds
from cleanba.networks import make_network
from cleanba.run.command_line import BadInput

EPISODES = 4


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
    options = {"network": "mlp", "channels": None, "hiddens": None, "atari_preprocessing": "gym"}
    returns = evaluate.evaluate(evaluate.Model("CartPole-v1", 7, options, params), EPISODES)
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
