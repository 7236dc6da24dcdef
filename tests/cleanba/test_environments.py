"""Seeds are never shared, episodes are counted right, rewards are clipped only for learning."""

import numpy as np
import pytest

from cleanba import training
from cleanba.environments import (
    MAX_ENVS,
    MAX_SEED,
    EpisodeStatistics,
    check_env_id,
    describe_env,
    env_seeds,
    is_atari,
    make_envs,
    play,
)
from cleanba.exact import placement


def test_no_two_runs_processes_or_threads_share_an_environment_seed_or_an_action_key():
    hardware = placement.Hardware(num_actor_threads=4)
    group_size, seeds, keys = 15, [], []
    for seed in (0, 1, 2):
        for process in (0, 1):
            for actor in placement.plan(hardware, 8, process, 2).actors:
                for group in actor.groups:
                    seeds += env_seeds(seed, group * group_size, group_size)
                    for stream in (training.ACTION_STREAM, training.LEARNER_STREAM):
                        key = training.stream_key(seed, stream, group)
                        keys.append(bytes(np.asarray(training.jax.random.key_data(key))))
    assert len(seeds) == len(set(seeds)) == 3 * 8 * group_size
    assert len(keys) == len(set(keys)) == 3 * 8 * 2


def test_seeds_stay_in_the_range_of_envpool_and_beyond_are_refused():
    assert max(env_seeds(MAX_SEED, MAX_ENVS - 2, 2)) < 2**31
    for seed, first, count in ((MAX_SEED + 1, 0, 1), (-1, 0, 1), (0, MAX_ENVS - 1, 2)):
        with pytest.raises(ValueError, match="--"):
            env_seeds(seed, first, count)


def test_an_unknown_environment_is_refused_with_the_nearest_names():
    with pytest.raises(ValueError, match="Breakout-v5"):
        check_env_id("Breakot-v5")
    assert is_atari("Breakout-v5")
    assert is_atari("MsPacman-v5")
    assert not is_atari("CartPole-v1")
    assert not is_atari("Ant-v5")


def test_environments_with_continuous_actions_are_refused():
    with pytest.raises(ValueError, match="discrete actions"):
        describe_env("Pendulum-v1")


def test_observations_that_are_dictionaries_are_refused():
    with pytest.raises(ValueError, match="needs discrete actions and an array as observation"):
        describe_env("MiniGrid-Empty-5x5-v0")


def test_episode_statistics_leave_out_the_step_that_resets():
    done = np.array([[0, 0], [1, 0], [0, 0], [0, 1], [1, 0]], bool)
    rewards = np.array([[1, 1], [1, 1], [9, 1], [1, 1], [1, 9]], float)
    # environment 0: two steps, a reset (reward 9 ignored), two steps
    expected = [(1, 0, 2.0, 2), (3, 1, 4.0, 4), (4, 0, 2.0, 2)]
    for cuts in ([5], [1, 1, 1, 1, 1], [2, 3], [4, 1]):  # in one rollout, or in several
        statistics, found, start = EpisodeStatistics(2), [], 0
        for steps in cuts:
            part = slice(start, start + steps)
            for t, *episode in statistics.count(rewards[part], done[part]):
                found.append((start + t, *episode))
            start += steps
        assert found == expected


def test_a_return_does_not_depend_on_where_rollouts_are_cut():
    rng = np.random.default_rng(0)
    rewards = rng.normal(size=(600, 3)).astype(np.float32)
    dones = rng.random((600, 3)) < 0.01
    results = []
    for length in (600, 20, 1):
        statistics = EpisodeStatistics(3)
        results.append(
            [
                (start + e.t, *e[1:])
                for start in range(0, 600, length)
                for e in statistics.count(
                    rewards[start : start + length], dones[start : start + length]
                )
            ]
        )
    assert results[0] == results[1] == results[2]
    assert len(results[0]) > 5


def test_cartpole_returns_are_lengths_and_catch_episodes_have_nine_steps():
    for env_id, actions in (("CartPole-v1", 2), ("Catch-v0", 3)):
        envs = make_envs(env_id, env_seeds(1, 0, 4))
        statistics, rng, episodes = EpisodeStatistics(4), np.random.default_rng(0), []
        envs.reset()
        for _ in range(300):
            _, reward, terminated, truncated, _ = envs.step(
                rng.integers(0, actions, 4).astype(np.int32)
            )
            episodes += statistics.count(reward[None], (terminated | truncated)[None])
        assert len(episodes) > 20
        for episode in episodes:
            if env_id == "CartPole-v1":
                assert episode.episode_return == episode.length
            else:
                assert episode.length == 9
                assert episode.episode_return in (-1.0, 1.0)


def test_trajectories_depend_on_seed_and_actions_alone():
    def play(seeds, threads, rows):
        envs = make_envs("Breakout-v5", seeds, threads)
        envs.reset()
        actions = np.random.default_rng(0).integers(0, 18, (60, 4)).astype(np.int32)
        return [envs.step(actions[t, rows])[0] for t in range(60)]

    seeds = env_seeds(3, 0, 4)
    together = play(seeds, 2, slice(0, 4))
    alone = play(seeds[2:], 1, slice(2, 4))
    for a, b in zip(together, alone, strict=True):
        np.testing.assert_array_equal(a[2:], b)
    other = play(env_seeds(4, 0, 4), 2, slice(0, 4))
    assert any((a != b).any() for a, b in zip(together, other, strict=True))


def test_options_of_a_caller_replace_those_of_the_preset():
    config = make_envs("Breakout-v5", [0, 1], noop_max=1, stack_num=2).spec.config
    assert (config.noop_max, config.stack_num, config.frame_skip) == (1, 2, 4)


def test_an_episode_that_is_cut_off_ends_where_actions_are_replayed():
    """A pole that is balanced in turns does not fall within 8 steps; there the episode is cut off."""
    envs = make_envs("CartPole-v1", env_seeds(1, 0, 2), max_episode_steps=8)
    envs.async_reset()
    envs.recv()
    actions = np.tile(np.arange(20, dtype=np.int32)[:, None] % 2, (1, 2))
    _, rewards, dones, _ = play(envs, actions)
    assert np.flatnonzero(dones[:, 0]).tolist() == [7, 16]  # a step resets in between
    assert np.array_equal(dones[:, 0], dones[:, 1])
    episodes = EpisodeStatistics(2).count(rewards, dones)
    assert [(e.length, e.episode_return) for e in episodes] == [(8, 8.0)] * 4


def test_atari_is_set_up_after_machado_and_keeps_unclipped_rewards():
    spec = describe_env("Breakout-v5")
    assert spec.obs_shape == (4, 84, 84)
    assert spec.num_actions == 18
    assert spec.max_steps * 4 == 108_000
    envs = make_envs("Breakout-v5", env_seeds(1, 0, 1))
    config = envs.spec.config
    assert config.repeat_action_probability == 0.25
    assert not config.episodic_life
    assert config.use_fire_reset
    assert (config.noop_max, config.frame_skip, config.stack_num) == (30, 4, 4)
    assert not make_envs("Breakout-v5", [0], preprocessing="gym").spec.config.use_fire_reset
    # A pellet of Ms. Pac-Man is worth 10: clipped to 1 for learning, whole in `info`.
    envs = make_envs("MsPacman-v5", env_seeds(1, 0, 4))
    envs.reset()
    rng, clipped, whole = np.random.default_rng(0), set(), set()
    for _ in range(200):
        _, reward, _, _, info = envs.step(rng.integers(0, 18, 4).astype(np.int32))
        clipped |= set(reward.tolist())
        whole |= set(info["reward"].tolist())
    assert clipped == {0.0, 1.0}
    assert max(whole) >= 10
