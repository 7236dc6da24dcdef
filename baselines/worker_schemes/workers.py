"""The three kinds of workers, each for one task: collect rollouts, compute gradients, update parameters.

An update worker has a pool of gradient workers, and each of those a pool of collection workers. A link
between a worker and its pool is synchronous (wait for all) or asynchronous (use the first that answers).
"""

import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from baselines.worker_schemes.goals import join_goals
from baselines.worker_schemes.parts import Agent, Decision, Moment, Rollout
from baselines.worker_schemes.worker_pool import WorkerPool
from cleanba.environments import MAX_ENVS, EpisodeStatistics, env_seeds, make_envs

Parameters = Sequence[np.ndarray]  # of a network, in the order of its state
# Share of a rollout that is collected even if the worker is preempted (DD-PPO, https://arxiv.org/abs/1911.00357)
SMALLEST_SHARE = 0.25

# Arrays from Ray are read-only, and are only read.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")


def parameters_of(network: nn.Module) -> Parameters:
    """Return parameters and buffers; they share memory with the network."""
    return [tensor.detach().numpy() for tensor in network.state_dict().values()]


def load_parameters(network: nn.Module, parameters: Parameters) -> None:
    """Copy what `parameters_of` returned into a network."""
    with torch.no_grad():
        for tensor, array in zip(network.state_dict().values(), parameters, strict=True):
            tensor.copy_(torch.from_numpy(array))


class EnvOptions(NamedTuple):
    """The environments of a collection worker."""

    env_id: str
    seed: int  # of the run
    num_envs: int  # of each worker
    num_steps: int  # of a rollout
    preprocessing: str
    num_workers: int  # of the whole run, so that a replacement gets seeds that no worker has


class Collected(NamedTuple):
    """A rollout, and what is recorded of it."""

    rollout: Rollout
    worker: int
    version: int  # of the policy that acted, from its first step to its last
    steps: int  # of all its environments
    episodes: list[tuple[int, float, int]]  # environment, return, length
    wall_time: float  # `time.time()` at its end
    rollout_time: float  # seconds
    inference_time: float  # of these
    env_time: float  # of these
    wait_time: float  # seconds before it, since the worker's last rollout ended


class CollectionWorker:
    """Steps environments with the parameters that it is given."""

    def __init__(self, agent: Agent, options: EnvOptions, index: int, incarnation: int):
        """Make environments and network.

        Args:
          agent: whose network acts.
          options: of the environments.
          index: of the worker in the run.
          incarnation: number of workers of this index that have died.
        """
        torch.set_num_threads(1)
        self._agent, self._options, self._index = agent, options, index
        first = (index + incarnation * options.num_workers) * options.num_envs
        self._first = first % (MAX_ENVS - options.num_envs)
        seeds = env_seeds(options.seed, self._first, options.num_envs)
        self._rng = np.random.default_rng(seeds[0])
        self._envs = make_envs(options.env_id, seeds, 1, options.preprocessing)
        self._network = agent.make_network()
        self._statistics = EpisodeStatistics(options.num_envs)
        self._preempted_at = 0  # version of the rollout that is to end early
        self._obs: np.ndarray | None = None
        self._resets = np.zeros(options.num_envs, bool)
        self._states = np.zeros((options.num_envs, agent.state_size), np.float32)
        self._overlap: list[tuple[np.ndarray, ...]] = []  # the last steps of the last rollout
        self._ended: float | None = None  # when the last rollout did
        self._steps = 0  # of all environments so far

    def preempt(self, version: int) -> None:
        """End the rollout of a version early, after SMALLEST_SHARE of it; it may not have begun yet."""
        self._preempted_at = version

    @torch.inference_mode()
    def collect(self, parameters: Parameters, version: int) -> Collected:
        """Collect a rollout."""
        begin = time.perf_counter()
        wait_time = begin - self._ended if self._ended is not None else 0.0
        load_parameters(self._network, parameters)
        if self._obs is None:
            self._obs = self._see(self._envs.reset()[0])
        steps = list(self._overlap)
        inference_time = env_time = 0.0
        length = self._options.num_steps
        for t in range(length):
            if t >= SMALLEST_SHARE * length and self._preempted_at == version:
                break
            before = time.perf_counter()
            decision = self._act(self._rng, version)
            now = time.perf_counter()
            actions = decision.actions
            sent = actions.astype(np.int32) if actions.dtype == np.int64 else actions
            obs, reward, terminated, truncated, info = self._envs.step(sent)
            env_time += time.perf_counter() - now
            inference_time += now - before
            reward = np.asarray(info.get("reward", reward), np.float32)
            dones = terminated | truncated
            step = (self._obs, actions, reward, terminated, dones, self._resets)
            steps.append((*step, decision.logits, decision.values, self._states))
            if decision.state is not None:
                self._states = np.where(self._resets[:, None], np.float32(0), decision.state)
            self._obs, self._resets = self._see(obs), dones
            self._steps += self._options.num_envs
        decision = self._act(np.random.default_rng(0), version)
        fields = [np.stack(field) for field in zip(*steps, strict=True)]
        rollout = Rollout(*fields)
        rollout = rollout._replace(
            obs=np.concatenate([rollout.obs, self._obs[None]]),
            values=np.concatenate([rollout.values, decision.values[None]]),
        )
        new = slice(len(self._overlap), None)
        episodes = self._statistics.count(rollout.rewards[new], rollout.dones[new])
        self._overlap = steps[len(steps) - self._agent.overlap :] if self._agent.overlap else []
        self._preempted_at = 0  # a replay buffer takes several rollouts of the first version
        self._ended = time.perf_counter()
        return Collected(
            rollout, self._index, version, rollout.dones[new].size,
            [(self._first + e.index, e.episode_return, e.length) for e in episodes],
            time.time(), self._ended - begin, inference_time, env_time, wait_time,
        )  # fmt: skip

    def _act(self, rng: np.random.Generator, version: int) -> Decision:
        workers = self._options.num_workers
        moment = Moment(version, self._index, workers, self._steps)
        return self._agent.act(self._network, self._obs, self._states, rng, moment)

    def _see(self, obs: np.ndarray | Mapping[str, np.ndarray]) -> np.ndarray:
        if isinstance(obs, Mapping):
            obs = join_goals(obs)
        return obs.astype(np.float32) if obs.dtype == np.float64 else obs.copy()

    def end(self) -> None:
        """Close the environments."""
        self._envs.close()


class Gradient(NamedTuple):
    """A gradient, and what is recorded of it."""

    gradients: list[np.ndarray | None]  # of the parameters that are learned; None: not in the loss
    version: int  # of the parameters that it was computed at
    losses: dict[str, float]
    collected: list[Collected]  # learned from for the first time; without the rollouts themselves
    wait_time: float  # seconds for rollouts
    training_time: float  # seconds to compute
    exhausted: bool  # the next one needs new rollouts
    replaced: list[str]  # a message for each worker that died


class GradientWorker:
    """Computes gradients from what its collection workers send."""

    def __init__(
        self,
        agent: Agent,
        collectors: WorkerPool,
        asynchronous: bool,
        preemption_threshold: float,
        seed: int,
    ):
        """Make network and storage.

        Args:
          agent: whose loss is computed.
          collectors: its collection workers.
          asynchronous: use the first rollout that is ready, while the others are collected.
          preemption_threshold: if synchronous, share of workers after which the others end their rollouts
            early.
          seed: of the storage's random draws.
        """
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self._agent, self._collectors = agent, collectors
        self._asynchronous = asynchronous and not collectors.is_local
        self._threshold = preemption_threshold
        self._network = agent.make_network()
        self._storage = agent.make_storage(seed)
        self._batch: Any | None = None
        self._collected: list[Collected] = []  # since the last gradient
        self._collecting = False
        self._wait_time = 0.0

    def preempt(self, version: int) -> None:
        """Tell the collection workers to end their rollouts of a version early."""
        for index in range(self._collectors.size):
            self._collectors.tell(index, "preempt", version)

    def collect(self, parameters: Parameters, version: int) -> None:
        """Collect what the next batch needs, with given parameters."""
        shared = None
        before = time.perf_counter()
        while self._batch is None:
            shared = shared or self._collectors.share(parameters)
            if self._asynchronous:
                collected = [self._take_one(shared, version)]
            else:
                for index in range(self._collectors.size):
                    self._collectors.ask(index, "collect", shared, version)
                collected = self._collectors.take_all(self._threshold, ("preempt", version))
            self._storage.put([c.rollout for c in collected])
            self._collected += collected
            self._batch = self._storage.next()
        self._wait_time += time.perf_counter() - before

    def _take_one(self, parameters: Any, version: int) -> Collected:
        """Return the first rollout that is ready; its worker begins the next one."""
        if not self._collecting:
            for index in range(self._collectors.size):
                self._collectors.ask(index, "collect", parameters, version)
            self._collecting = True
        index, collected = self._collectors.take()
        self._collectors.ask(index, "collect", parameters, version)
        return collected

    def gradient(self, parameters: Parameters, version: int, progress: float) -> Gradient:
        """Compute the gradient of the next batch, at given parameters.

        Raises:
          FloatingPointError: if the loss is not finite.
        """
        self.collect(parameters, version)
        before = time.perf_counter()
        load_parameters(self._network, parameters)
        losses = self._agent.algorithm.loss(self._network, self._batch, progress)
        learned = [p for p in self._network.parameters() if p.requires_grad]
        gradients = torch.autograd.grad(losses["loss"], learned, allow_unused=True)
        if "errors" in losses:
            self._storage.reprioritize(losses.pop("errors"))
        numbers = {name: value.item() for name, value in losses.items()}
        if not np.isfinite(numbers["loss"]):
            raise FloatingPointError(f"the loss at version {version} is {numbers['loss']}")
        self._batch = self._storage.next()
        collected, self._collected = self._collected, []
        replaced, self._collectors.replaced = self._collectors.replaced, []
        wait_time, self._wait_time = self._wait_time, 0.0
        return Gradient(
            [None if gradient is None else gradient.numpy() for gradient in gradients],
            version,
            numbers,
            [c._replace(rollout=None) for c in collected],
            wait_time,
            time.perf_counter() - before,
            self._batch is None,
            replaced,
        )

    def end(self) -> None:
        """Stop the collection workers."""
        self._collectors.end()


class Update(NamedTuple):
    """An update, and what is recorded of it."""

    version: int  # of the parameters after it
    steps: int  # agent steps that were learned from so far
    gradients: list[Gradient]  # whose mean was applied
    grad_norm: float  # of that mean, before clipping
    learning_rate: float
    replaced: list[str]  # a message for each worker that died


class UpdateWorker:
    """Applies the gradients of its gradient workers."""

    def __init__(
        self,
        agent: Agent,
        workers: WorkerPool,
        *,
        asynchronous: bool,
        preemption_threshold: float,
        total_steps: int,
        max_grad_norm: float,
        anneal: bool,
    ):
        """Make network and optimizer.

        Args:
          agent: that learns.
          workers: its gradient workers.
          asynchronous: apply each gradient as it arrives, not the mean of all.
          preemption_threshold: if synchronous, share of gradient workers after which the others end their
            rollouts early (DD-PPO).
          total_steps: agent steps of the run.
          max_grad_norm: largest global norm of an applied gradient.
          anneal: anneal the learning rates linearly to 0.
        """
        self.network = agent.make_network()
        self.version, self.steps = 1, 0
        self._agent, self._workers = agent, workers
        self._asynchronous, self._threshold = asynchronous, preemption_threshold
        self._total_steps, self._max_norm, self._anneal = total_steps, max_grad_norm, anneal
        self._optimizer = agent.algorithm.make_optimizer(self.network)
        self._rates = [group["lr"] for group in self._optimizer.param_groups]
        self._exhausted = set(range(workers.size))  # workers without a batch to learn from
        self._learned = 0  # steps whose batches have all been learned from
        self._begun = [0] * workers.size  # steps of each worker whose batches have partly been
        self._asked = False
        self._ended: set[int] = set()  # asynchronous: workers that get no further request
        self.done = False  # all steps of the run have been collected and learned from

    def _ask(self, index: int, shared: Any) -> None:
        self._workers.ask(index, "gradient", shared, self.version, self._progress())

    def _progress(self) -> float:
        # constant while a rollout is learned from, so that all its batches have one learning rate
        return min(self._learned / self._total_steps, 1.0) if self._anneal else 0.0

    def step(self) -> Update:
        """Make one update."""
        workers = range(self._workers.size)
        if self._asynchronous:
            if not self._asked:
                shared = self._workers.share(parameters_of(self.network))
                for index in workers:
                    self._ask(index, shared)
                self._asked = True
            answers = [self._workers.take()]
        else:
            shared = self._workers.share(parameters_of(self.network))
            if self._exhausted and self._threshold < 1:
                # A replaced worker is out of step; it must not preempt, or be preempted by, the others.
                for index in sorted(self._exhausted):
                    self._workers.ask(index, "collect", shared, self.version)
                self._workers.take_all(self._threshold, ("preempt", self.version))
            for index in workers:
                self._ask(index, shared)
            answers = list(zip(workers, self._workers.take_all(), strict=True))
        gradients = [gradient for _, gradient in answers]
        norm, rate = self._apply(gradients)
        self.version += 1
        for index, gradient in answers:
            steps = sum(c.steps for c in gradient.collected)
            self.steps += steps
            self._begun[index] += steps
            if gradient.exhausted:
                self._learned += self._begun[index]
                self._begun[index] = 0
        self._exhausted = {index for index, gradient in answers if gradient.exhausted}
        ends = bool(self._exhausted) and self.steps >= self._total_steps
        if not self._asynchronous:
            self.done = ends
        elif ends:  # the others finish their rollouts
            self._ended.add(answers[0][0])
            self.done = len(self._ended) == self._workers.size
        else:
            self._ask(answers[0][0], self._workers.share(parameters_of(self.network)))
        replaced = [message for gradient in gradients for message in gradient.replaced]
        replaced += self._workers.replaced
        self._workers.replaced = []
        return Update(self.version, self.steps, gradients, norm, rate, replaced)

    def _apply(self, gradients: list[Gradient]) -> tuple[float, float]:
        learned = [p for p in self.network.parameters() if p.requires_grad]
        for parameter, *parts in zip(learned, *(g.gradients for g in gradients), strict=True):
            parts = [part for part in parts if part is not None]
            if not parts:  # the optimizer leaves this parameter alone
                parameter.grad = None
                continue
            # always a copy: it is clipped in place, and arrays from Ray are read-only
            mean = np.mean(parts, axis=0) if len(parts) > 1 else np.array(parts[0])
            parameter.grad = torch.from_numpy(np.asarray(mean))
        norm = torch.nn.utils.clip_grad_norm_(learned, self._max_norm)
        remaining = 1 - self._progress()
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * remaining
        self._optimizer.step()
        self._agent.algorithm.after_step(self.network)
        return float(norm), self._rates[0] * remaining

    def end(self) -> None:
        """Stop all workers."""
        self._workers.end()
