"""The architecture gives table 1 of the paper, and any error ends the run at once."""

import itertools
import threading
import time

import jax
import numpy as np
import pytest

from cleanba.actor_learner import ActorLearner, ActorThread, EnvGroup, Failure, Stopped, collect

STEPS, ENVS, UPDATES = 3, 2, 6


class CountingEnvs:
    """Environments that end an episode every 4 steps and reset on the step after.

    Every step is worth 10, clipped to 1 for learning, as a pellet of Ms. Pac-Man is.
    """

    def __init__(self, fail_at=None):
        self.t = 0
        self.fail_at = fail_at

    def async_reset(self):
        pass

    def recv(self):
        if self.t == self.fail_at:
            raise ValueError("the environment broke")
        done = np.full(ENVS, self.t % 5 == 4)
        obs = np.full((ENVS, 1), self.t, np.float32)
        clipped, whole = np.ones(ENVS, np.float32), np.full(ENVS, 10, np.float32)
        return obs, clipped, done, np.zeros(ENVS, bool), {"reward": whole}

    def send(self, actions, env_ids):
        assert list(env_ids) == list(range(ENVS))
        self.t += 1

    def close(self):
        pass


def act(params, obs, key, step):
    # the behaviour remembers which parameters acted, so that a rollout betrays its policy
    return np.full(ENVS, step, np.int32), np.full(ENVS, params), step + 1


def run(concurrency, threads=2, fail_at=None, slow_learner=0.0, tamper=None, done=0, **options):
    failure = Failure()
    device = jax.devices()[0]

    def make_groups(thread):
        groups = [
            EnvGroup(
                2 * thread + i,
                CountingEnvs(fail_at if thread else None),
                ENVS,
                None,
                act,
                **options,
            )
            for i in range(2)
        ]
        for group in groups:
            for number in range(done):
                steps = np.arange(number * STEPS, (number + 1) * STEPS, dtype=np.int32)
                group.replay(np.repeat(steps[:, None], ENVS, axis=1))
        return groups

    actors = [
        ActorThread(
            thread,
            lambda thread=thread: make_groups(thread),
            lambda group: device,
            num_steps=STEPS,
            steps_per_env_step=ENVS * 2 * threads,
            num_rollouts=UPDATES,
            rollouts_done=done,
            concurrency=concurrency,
            clock=time.perf_counter,
            failure=failure,
        )
        for thread in range(threads)
    ]
    history = []
    runner = ActorLearner(
        actors,
        [device] * threads,
        num_updates=UPDATES,
        updates_done=done,
        concurrency=concurrency,
        failure=failure,
    )
    with runner:
        if done:
            runner.resume_params(np.float32(done), np.float32(done + 1))
        else:
            runner.put_params(np.float32(1))
        for number in range(done + 1, UPDATES + 1):
            rollouts, _ = runner.get_rollouts()
            if tamper:
                tamper(runner, number)
            time.sleep(slow_learner)
            history.append(rollouts)
            runner.version += 1
            runner.put_params(np.float32(runner.version))
    assert not any(actor.is_alive() for actor in actors)
    return history


@pytest.mark.parametrize("slow_learner", [0.0, 0.05])
@pytest.mark.parametrize("concurrency", [False, True])
def test_rollouts_come_from_the_policies_of_table_1(concurrency, slow_learner):
    expected = [1, 1, 2, 3, 4, 5] if concurrency else [1, 2, 3, 4, 5, 6]
    history = run(concurrency, slow_learner=slow_learner)
    for number, rollouts in enumerate(history, start=1):
        assert [r.number for r in rollouts] == [number, number]
        for rollout in rollouts:
            assert rollout.version == expected[number - 1]
            for group in rollout.groups.values():
                # every single step was taken by that policy: no change inside a rollout
                assert np.all(np.asarray(group.behaviour) == rollout.version)


@pytest.mark.parametrize("done", range(1, UPDATES))
@pytest.mark.parametrize("concurrency", [False, True])
def test_a_resumed_run_goes_on_with_the_same_rollouts(concurrency, done):
    def seen(history):
        return [
            (r.number, r.version, r.episodes and [e[:1] + e[2:] for e in r.episodes],
             {g: (t.digest, t.actions.tolist()) for g, t in r.traces.items()},
             {g: [np.asarray(x).tolist() for x in data] for g, data in r.groups.items()})
            for rollouts in history for r in rollouts
        ]  # fmt: skip

    straight = seen(run(concurrency))
    assert seen(run(concurrency, done=done)) == straight[2 * done :]


def test_a_rollout_begins_with_the_observation_that_the_last_one_ended_with():
    history = run(concurrency=True, threads=1)
    times = [np.asarray(rollouts[0].groups[0].obs)[:, 0, 0] for rollouts in history]
    np.testing.assert_array_equal(times[0], [0, 1, 2, 3])
    for before, after in itertools.pairwise(times):
        assert before[-1] == after[0]
        assert len(after) == STEPS + 1


def test_episodes_are_counted_once_with_the_step_of_the_whole_run():
    history = run(concurrency=False, threads=2)
    episodes = [e for rollouts in history for r in rollouts for e in r.episodes]
    # 18 steps of each of 8 environments; episodes end at their steps 4, 9 and 14
    assert len(episodes) == 3 * 8
    assert {e.step for e in episodes} == {4 * 8, 9 * 8, 14 * 8}
    assert {e.length for e in episodes} == {4}
    assert sorted({e.env_index for e in episodes}) == list(range(8))


def test_clipped_rewards_are_learned_from_and_whole_ones_are_recorded():
    rollouts = [r for rollouts in run(concurrency=True) for r in rollouts]
    for rollout in rollouts:
        for index, group in rollout.groups.items():
            assert np.all(np.asarray(group.rewards) == 1)
            assert rollout.traces[index].actions.shape == (STEPS, ENVS)
    returns = {e.episode_return for rollout in rollouts for e in rollout.episodes}
    assert returns == {40.0}  # of 4 steps


@pytest.mark.parametrize("concurrency", [False, True])
def test_an_actors_error_is_raised_in_the_learner_and_ends_all_threads(concurrency):
    before = threading.active_count()
    start = time.perf_counter()
    with pytest.raises(ValueError, match="the environment broke"):
        run(concurrency, fail_at=7)
    assert time.perf_counter() - start < 10
    assert threading.active_count() == before


def test_a_learners_error_ends_all_threads():
    before = threading.active_count()

    def tamper(runner, number):
        if number == 3:
            raise RuntimeError("the learner broke")

    with pytest.raises(RuntimeError, match="the learner broke"):
        run(True, tamper=tamper)
    assert threading.active_count() == before


def test_a_rollout_ends_at_its_next_step_once_the_run_does():
    failure, steps = Failure(), []

    class Group:
        def start_rollout(self, num_steps):
            pass

        def receive(self, t):
            pass

        def act(self, params, t):
            steps.append(t)
            if t == 3:
                failure.stopped.set()

    with pytest.raises(Stopped):
        collect([Group()], 1_000, None, failure)
    assert steps == [0, 1, 2, 3]


def test_a_broken_promise_of_policy_lag_ends_the_run():
    def tamper(runner, number):
        if number == 2:
            runner.version += 1  # as if an update had been made of half a batch

    with pytest.raises(AssertionError, match="the architecture promises lag 1"):
        run(True, tamper=tamper)


@pytest.mark.parametrize("done", [0, 1, 3])
def test_a_rollout_s_entry_is_what_came_with_its_first_observation(done):
    """Of a resumed run, too, which replays the steps before it."""
    history = run(concurrency=False, with_entry=True, done=done)
    for rollouts in history:
        for rollout in rollouts:
            for group in rollout.groups.values():
                first = (rollout.number - 1) * STEPS  # observation t is the t-th of the environment
                entry = jax.tree.map(np.asarray, group.entry)
                assert entry.rewards.tolist() == [[float(first > 0)] * ENVS]
                assert entry.firsts.tolist() == [[first % 5 == 0] * ENVS]
    assert all(group.entry is None for group in run(False)[0][0].groups.values())
