"""Cleanba's architecture: actor threads, the learner, and the queues between them.

    actor threads --- rollout queue (size 1, one per thread) ---> learner
          ^------------- parameter queue (size 1, one per thread) ----'

The actors fetch parameters before every rollout, except before the second one of the Cleanba
architecture. That one skipped fetch lets rollout i + 1 be collected while the learner learns from
rollout i, and because both queues hold one item, it fixes which policy collects which rollout:

    iteration:              1         2         3
    synchronous, actor:     p1 -> d1  p2 -> d2  p3 -> d3
    Cleanba, actor:         p1 -> d1  p1 -> d2  p2 -> d3
    learner:                d1 -> p2  d2 -> p3  d3 -> p4

(https://arxiv.org/abs/2310.00036, figure 1 and table 1). This module is independent of the algorithm:
the trainers supply a function that acts and a function that learns.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cleanba.environments import Episode, EpisodeStatistics, play
from cleanba.exact.groups import on_device
from cleanba.record.actions import GroupDigest

Act = Callable[[Any, Any, Any, Any], tuple[Any, Any, Any]]


class Entry(NamedTuple):
    """What arrived with the first observation of a rollout, [1, B] each."""

    rewards: Any  # float32, as the agent learns from them; 0 at the start of the run
    firsts: Any  # bool, whether the observation began an episode


class GroupRollout(NamedTuple):
    """T steps of the B environments of one group.

    `dones[t]` says that `obs[t]` ended an episode: action t only resets that environment, and its
    transition is not real.
    """

    obs: Any  # [T + 1, B, ...], the last one is the next rollout's first
    dones: Any  # bool [T + 1, B]
    actions: Any  # int32 [T, B]
    rewards: Any  # float32 [T, B], as the agent learns from them
    behaviour: Any  # what `act` returned beside the actions, stacked to [T, B, ...]
    entry: Entry | None = None  # only for the original's alignment (`--compat`)


class FinishedEpisode(NamedTuple):
    """An episode that ended in a rollout."""

    step: int  # agent steps of the whole run, up to the environment step that ended the episode
    wall_time: float  # seconds since the run started, at the end of the rollout
    env_index: int  # index of the environment in the run
    episode_return: float
    length: int


class GroupTrace(NamedTuple):
    """The recorded part of a group's rollout, from which it can be simulated again."""

    actions: np.ndarray  # int32 [T, B]
    digest: bytes  # of actions, unclipped rewards and ends of episodes since the start of the run


class Rollout(NamedTuple):
    """An item of a rollout queue: one rollout of every group of an actor thread."""

    thread: int
    number: int  # from 1
    version: int  # of the policy that collected all of it
    wall_time: float  # seconds since the run started, when it was complete
    groups: dict[int, GroupRollout]  # on the learner device of each group
    traces: dict[int, GroupTrace]
    episodes: list[FinishedEpisode]
    times: dict[str, float]  # seconds spent on it, by activity


class Parameters(NamedTuple):
    """An item of a parameter queue."""

    version: int
    params: Any


class Stopped(Exception):
    """Raised in a thread that waits on a queue when the run ends."""


class Failure:
    """First exception of any thread; unblocks all queue waits."""

    def __init__(self) -> None:
        self.stopped = threading.Event()
        self.error: BaseException | None = None
        self._lock = threading.Lock()

    def report(self, error: BaseException) -> None:
        """Keep the first error and end the run."""
        with self._lock:
            if self.error is None and not self.stopped.is_set():
                self.error = error
        self.stopped.set()


class OneItemQueue:
    """A queue of size 1 that measures waiting times; its waits end when the run ends."""

    def __init__(self, failure: Failure):
        self._queue: queue.Queue = queue.Queue(maxsize=1)
        self._failure = failure

    def put(self, item: Any) -> float:
        """Put an item when there is room; return the seconds waited."""
        return self._wait(lambda: self._queue.put(item, timeout=0.2), queue.Full)[1]

    def get(self) -> tuple[Any, float]:
        """Get an item when there is one; return it and the seconds waited."""
        return self._wait(lambda: self._queue.get(timeout=0.2), queue.Empty)

    def _wait(self, attempt: Callable[[], Any], not_yet: type[Exception]) -> tuple[Any, float]:
        start = time.perf_counter()
        while not self._failure.stopped.is_set():
            try:
                result = attempt()
            except not_yet:
                continue
            return result, time.perf_counter() - start
        raise Stopped


@jax.jit
def _complete(rollout: GroupRollout) -> GroupRollout:
    """Stack the outputs of `act` over steps, and move the other arrays to their device.

    One compiled call, because `jax.device_put` of each array takes longer than a step of CartPole.
    """
    return rollout._replace(behaviour=jax.tree.map(lambda *x: jnp.stack(x), *rollout.behaviour))


class EnvGroup:
    """One environment group: its environments, its random key, its fixed-shape inference call."""

    def __init__(
        self,
        index: int,
        envs: Any,
        num_envs: int,
        key: jax.Array,
        act: Act,
        with_entry: bool = False,
    ):
        """Reset the environments.

        Args:
          index: index of the group in the run.
          envs: an EnvPool instance in synchronous mode with the gymnasium interface.
          num_envs: number of its environments, B.
          key: the group's random key, on the device that acts.
          act: (params, obs [B, ...], key, step) -> (actions [B], behaviour, step + 1), compiled; its
            randomness depends only on the key and the step, so that a run can be resumed.
          with_entry: whether rollouts have an `entry`.
        """
        self.index = index
        self._envs = envs
        self.num_envs = num_envs
        self._key = key
        self._step: Any = np.int32(0)
        self._act = act
        self._env_ids = np.arange(num_envs, dtype=np.int32)
        self._statistics = EpisodeStatistics(num_envs)
        self._digest = GroupDigest()
        self._with_entry = with_entry
        self._envs.async_reset()
        self._obs = self._envs.recv()[0]
        self._done = np.zeros(num_envs, bool)
        self._entry = Entry(np.zeros((1, num_envs), np.float32), np.ones((1, num_envs), bool))

    def replay(self, actions: np.ndarray) -> tuple[bytes, list[Episode]]:
        """Replay the actions of a recorded rollout, without a policy.

        Args:
          actions: int32 [T, B].

        Returns:
          The digest of the trajectory so far, and the episodes that ended in the rollout.
        """
        self._obs, rewards, dones, last_reward = play(self._envs, actions)
        firsts = np.concatenate([self._done[None], dones])[-2:-1]
        self._entry = Entry(last_reward[None], firsts)
        self._done = dones[-1]
        self._step += np.int32(len(actions))
        episodes = self._statistics.count(rewards, dones)
        return self._digest.update(actions, rewards, dones), episodes

    def start_rollout(self, num_steps: int) -> None:
        """Allocate a rollout; its first observation is the last one of the previous rollout."""
        shape = (num_steps, self.num_envs)
        # New memory for every rollout: the learner may still be reading that of the previous one,
        # which on a CPU it uses without a copy.
        self._obs_buffer = np.empty((num_steps + 1, *self._obs.shape), self._obs.dtype)
        self._dones = np.empty((num_steps + 1, self.num_envs), bool)
        self._actions = np.empty(shape, np.int32)
        self._rewards = np.empty(shape, np.float32)  # as the agent learns from them
        self._unclipped = np.empty(shape, np.float32)
        self._behaviour: list[Any] = []
        self._obs_buffer[0], self._dones[0] = self._obs, self._done

    def act(self, params: Any, t: int) -> None:
        """Compute the actions of step t and send them to the environments, which start to step."""
        actions, behaviour, self._step = self._act(params, self._obs, self._key, self._step)
        self._behaviour.append(behaviour)
        self._actions[t] = actions
        self._envs.send(self._actions[t], self._env_ids)

    def receive(self, t: int) -> None:
        """Wait for the environments to finish step t."""
        self._obs, reward, terminated, truncated, info = self._envs.recv()
        self._done = np.logical_or(terminated, truncated, out=self._dones[t + 1])
        self._rewards[t] = reward
        self._unclipped[t] = info.get("reward", reward)
        self._obs_buffer[t + 1] = self._obs

    def finish_rollout(self, device: jax.Device) -> tuple[GroupRollout, GroupTrace, list[Episode]]:
        """Return the rollout, on the device of the group's learner, and its recorded parts."""
        rollout = _complete(
            GroupRollout(
                self._obs_buffer,
                self._dones,
                self._actions,
                self._rewards,
                self._behaviour,
                self._entry if self._with_entry else None,
            )
        )
        self._entry = Entry(self._rewards[-1:], self._dones[-2:-1])
        dones = self._dones[1:]
        digest = self._digest.update(self._actions, self._unclipped, dones)
        episodes = self._statistics.count(self._unclipped, dones)
        return on_device(rollout, device), GroupTrace(self._actions, digest), episodes

    def close(self) -> None:
        """Free the environments."""
        self._envs.close()


class Spent(NamedTuple):
    """Seconds that collecting a rollout has taken."""

    env_time: float  # waiting for the environments
    inference_time: float  # computing actions


def collect(
    groups: Sequence[EnvGroup], num_steps: int, params: Any, failure: Failure | None = None
) -> Spent:
    """Collect one rollout of every group; `EnvGroup.finish_rollout` returns it.

    Args:
      groups: environment groups that act on one device.
      num_steps: length of the rollout.
      params: parameters of the network, on that device.
      failure: ends the rollout before its next step once it is set.

    Returns:
      Seconds spent on all groups, by activity.

    Raises:
      Stopped: if the run ends.
    """
    env_time = inference_time = 0.0
    for group in groups:
        group.start_rollout(num_steps)
    for t in range(num_steps + 1):
        if failure is not None and failure.stopped.is_set():
            raise Stopped
        for group in groups:
            # While this group's actions are computed, the other groups' environments step.
            if t > 0:
                before = time.perf_counter()
                group.receive(t - 1)
                env_time += time.perf_counter() - before
            if t < num_steps:
                before = time.perf_counter()
                group.act(params, t)
                inference_time += time.perf_counter() - before
    return Spent(env_time, inference_time)


class ActorThread(threading.Thread):
    """Collects the rollouts of some groups, with parameters from its parameter queue."""

    def __init__(
        self,
        thread: int,
        make_groups: Callable[[], Sequence[EnvGroup]],
        learner_device: Callable[[int], jax.Device],
        *,
        num_steps: int,
        steps_per_env_step: int,
        num_rollouts: int,
        rollouts_done: int = 0,
        concurrency: bool,
        clock: Callable[[], float],
        failure: Failure,
    ):
        """Prepare the thread.

        Args:
          thread: number of the actor thread in the run.
          make_groups: creates its environment groups; called in the thread itself.
          learner_device: device of a group's learner, by group index.
          num_steps: length of a rollout, T.
          steps_per_env_step: agent steps of the whole run per environment step: its number of environments.
          num_rollouts: number of rollouts of the run.
          rollouts_done: number of rollouts that the groups have replayed when they are created (a
            resumed run).
          concurrency: Cleanba architecture (skip the second fetch of parameters), else synchronous.
          clock: seconds since the run started.
          failure: where errors are reported.
        """
        super().__init__(name=f"actor-{thread}", daemon=True)
        self.params_queue = OneItemQueue(failure)
        self.rollout_queue = OneItemQueue(failure)
        self._thread = thread
        self._make_groups = make_groups
        self._learner_device = learner_device
        self._num_steps = num_steps
        self._steps_per_env_step = steps_per_env_step
        self._num_rollouts = num_rollouts
        self._rollouts_done = rollouts_done
        self._concurrency = concurrency
        self._clock = clock
        self._failure = failure

    def run(self) -> None:
        """Collect all rollouts, or end with the run."""
        groups: Sequence[EnvGroup] = ()
        try:
            groups = self._make_groups()
            put_time = 0.0
            first = self._rollouts_done + 1
            for number in range(first, self._num_rollouts + 1):
                get_time = 0.0
                # The one skipped fetch of the Cleanba architecture: rollout 2 is collected with
                # policy 1 while the learner computes policy 2, and from then on the actor is
                # exactly one version behind. Without the skip the two would take turns. A resumed
                # run receives that older policy again, so its first rollout fetches.
                if not (self._concurrency and number == 2 and number > first):
                    (version, params), get_time = self.params_queue.get()
                rollout = self._collect(groups, number, version, params)
                rollout.times["params_queue_get_time"] = get_time
                rollout.times["rollout_queue_put_time"] = put_time  # of the previous rollout
                put_time = self.rollout_queue.put(rollout)
        except Stopped:
            pass
        except BaseException as error:
            self._failure.report(error)
        finally:
            for group in groups:
                group.close()

    def _collect(
        self, groups: Sequence[EnvGroup], number: int, version: int, params: Any
    ) -> Rollout:
        """Collect one rollout of every group, all with the same parameters."""
        start = time.perf_counter()
        spent = collect(groups, self._num_steps, params, self._failure)
        data, traces, episodes = {}, {}, []
        first_step = (number - 1) * self._num_steps
        now = self._clock()
        for group in groups:
            device = self._learner_device(group.index)
            data[group.index], traces[group.index], ended = group.finish_rollout(device)
            for t, index, episode_return, length in ended:
                step = (first_step + t + 1) * self._steps_per_env_step
                env_index = group.index * group.num_envs + index
                episodes.append(FinishedEpisode(step, now, env_index, episode_return, length))
        times = {
            "rollout_time": time.perf_counter() - start,
            "env_time": spent.env_time,
            "inference_time": spent.inference_time,
        }
        return Rollout(self._thread, number, version, now, data, traces, episodes, times)


class ActorLearner:
    """Runs actor threads beside a learner, which is the thread that iterates over `batches`.

    An exception in a thread is raised in the learner at its next wait. Leaving the context ends all
    threads.
    """

    def __init__(
        self,
        actors: Sequence[ActorThread],
        devices: Sequence[jax.Device],
        *,
        num_updates: int,
        updates_done: int = 0,
        concurrency: bool,
        failure: Failure,
    ):
        """Prepare the learner's side.

        Args:
          actors: actor threads, not started.
          devices: the device that each of them acts on.
          num_updates: updates of the learner; every actor collects one rollout for each.
          updates_done: updates before the checkpoint of a resumed run.
          concurrency: Cleanba architecture or synchronous.
          failure: where the actors report errors.
        """
        self._actors = actors
        self._devices = devices
        self._num_updates = num_updates
        self._concurrency = concurrency
        self._failure = failure
        self.version = updates_done + 1

    def __enter__(self) -> "ActorLearner":
        """Start the actors."""
        for actor in self._actors:
            actor.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End all threads, and wait for each to finish the step that it is in."""
        self._failure.stopped.set()
        for actor in self._actors:
            actor.join(timeout=60)

    def get_rollouts(self) -> tuple[list[Rollout], float]:
        """Wait for the next rollout of every actor.

        Returns:
          One rollout per actor thread, and the seconds waited.

        Raises:
          Exception: the exception of an actor thread.
          AssertionError: if a rollout does not have the policy lag that the architecture promises.
        """
        try:
            waits = [actor.rollout_queue.get() for actor in self._actors]
        except Stopped:
            assert self._failure.error is not None
            raise self._failure.error from None
        rollouts = [rollout for rollout, _ in waits]
        for rollout in rollouts:
            lag = self.version - rollout.version
            # Table 1 of the paper: synchronous data come from the latest policy, Cleanba's from the
            # second latest, except the first batch.
            promised = 1 if self._concurrency and rollout.number > 1 else 0
            if lag != promised or rollout.number != self.version:
                raise AssertionError(
                    f"actor {rollout.thread}, rollout {rollout.number}: policy {rollout.version} "
                    f"at learner version {self.version}, but the architecture promises lag {promised}"
                )
        return rollouts, sum(wait for _, wait in waits)

    def put_params(self, params: Any) -> None:
        """Send the parameters of the current version to the actors, unless no rollout will fetch them."""
        # The rollout that would fetch version v is v when synchronous, v + 1 in the Cleanba
        # architecture (its second rollout does not fetch).
        lead = 1 if self._concurrency and self.version > 1 else 0
        if self.version + lead <= self._num_updates:
            self._send(self.version, params)

    def resume_params(self, previous: Any, params: Any) -> None:
        """Send the actors of a resumed run the parameters that they had at the checkpoint.

        Args:
          previous: parameters of the previous version, with which the Cleanba architecture collects
            its next rollout; not used when synchronous.
          params: parameters of the current version.
        """
        if self._concurrency and self.version <= self._num_updates:
            self._send(self.version - 1, previous)
        self.put_params(params)

    def _send(self, version: int, params: Any) -> None:
        copies = {device: on_device(params, device) for device in set(self._devices)}
        try:
            for actor, device in zip(self._actors, self._devices, strict=True):
                actor.params_queue.put(Parameters(version, copies[device]))
        except Stopped:
            assert self._failure.error is not None
            raise self._failure.error from None
