"""HTS-RL: high-throughput synchronous deep RL, with A2C and PPO, in one file.

The architecture of Liu et al. (2020), https://arxiv.org/abs/2012.09849:

    executors --- state buffer (observation, random number) ---> actors
        ^------------------- action buffer ------------------------'
        |
    storage being written  <-- swapped every `sync_interval` steps -->  storage being read ---> learner

Executors are processes with one environment each. Actors are processes that choose actions for whichever
observations are waiting. The randomness of an action comes from the executor with its observation, so the
result depends neither on the number of actors nor on their timing. The learner learns from one storage
while the other is filled; then the two are swapped, and the actors get the new parameters. So the policy
that acts is always one update behind. The gradient is computed at the parameters that collected the data,
and applied to the newest ones (the one-step delayed gradient, equation 6).

Read from top to bottom: options, executing, acting, learning, the run.

    python baselines/hts_rl.py --env-id Breakout-v5 --num-actors 4
"""

import copy
import functools
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from msgspec import UNSET

from baselines.one_environment import Environment, as_stepped
from baselines.shared_memory import IndexQueue, share_parameters, shared_tensor
from baselines.torch_io import (
    PACKAGES,
    describe_device,
    fingerprint_network,
    initialize_optimizer,
    load_training_arrays,
    save_parameters,
    training_arrays,
)
from baselines.torch_losses import clipped_surrogate, generalized_returns
from baselines.torch_networks import choose_network, make_network
from baselines.worker_processes import Clock, WorkerProcesses
from cleanba import environments
from cleanba.audit.preparation import prepare_again
from cleanba.audit.segments import Repeated, Replayed
from cleanba.environments import EnvSpec, describe_env, env_seeds
from cleanba.record import Episode, RecordError, Rollout, Run, Update, checkpoints, fingerprint
from cleanba.record.actions import Frame, GroupDigest, Shape, combine_digests, pack
from cleanba.record.checkpoints import check_arrays
from cleanba.run.arguments import (
    Count,
    Hyper,
    Nested,
    NotHyper,
    NotNegative,
    Positive,
    Share,
    check_args,
    hyperparameters,
)
from cleanba.run.command_line import BadInput, input_checks, run_command_line
from cleanba.run.log import RunLog, run_info, run_lengths, versions
from cleanba.run.options import (
    CheckpointOptions,
    RunId,
    RunOptions,
    check_run,
    checkpoint_interval,
    run_id,
)

FINGERPRINT_EVERY = 10  # updates


@dataclass(frozen=True)
class Hardware:
    """Hardware settings; the result does not depend on them."""

    num_actors: Count = 4
    """Actor processes."""
    disable_cuda: bool = False
    """Compute on the CPU even if there is a GPU."""
    step_delay_seconds: NotNegative = 0.0
    """Mean seconds that an executor sleeps at every step, as in slower environments. The times are
    exponentially distributed (claim 1, figure 4)."""


@dataclass(frozen=True)
class Args:
    """Hyperparameters (A2C's are those of the paper's table A4) and, after them, hardware settings."""

    env_id: NotHyper[str] = "Breakout-v5"
    """EnvPool environment."""
    seed: NotHyper[int] = 1
    """Seed of the run: environments, initial parameters, actions, minibatches."""
    algorithm: Hyper[Literal["a2c", "ppo"]] = "a2c"
    """Learning algorithm."""
    schedule: Hyper[Literal["hts", "synchronous"]] = "hts"
    """HTS-RL, or the synchronous baseline: all environments step together, and wait for the learner. The
    baseline uses neither --correction nor --num-actors."""
    correction: Hyper[Literal["delayed-gradient", "truncated-is", "none"]] = "delayed-gradient"
    """Correction for data that are one update old (table A1): compute the gradient at the parameters that
    collected them, weight them by importance ratios of at most 1, or nothing."""
    total_timesteps: Hyper[Count] = 20_000_000
    """Agent steps over all environments."""
    num_envs: Hyper[Count] = 16
    """Environments, one per executor."""
    num_steps: Hyper[Count | None] = None
    """Steps of each environment in an unroll, from which one gradient (or PPO's epochs) is computed; by
    default 5 (A2C) or 128 (PPO)."""
    sync_interval: Hyper[Count | None] = None
    """Steps of each environment between two synchronizations (alpha), a multiple of `num_steps`; by
    default one unroll."""
    learning_rate: Hyper[Positive | None] = None
    """Learning rate; by default 7e-4 (A2C) or 3.43e-4 (PPO)."""
    anneal_lr: Hyper[bool] = False
    """Anneal the learning rate linearly to 0."""
    optimizer: Hyper[Literal["rmsprop", "adam"]] = "rmsprop"
    """RMSProp (decay 0.99) for both, as in the paper, or Adam."""
    optimizer_eps: Hyper[NotNegative] = 1e-5
    """Epsilon of the optimizer."""
    gamma: Hyper[Share] = 0.99
    """Discount factor (0.993 in the paper's football)."""
    gae_lambda: Hyper[Share | None] = None
    """Lambda of generalized advantage estimation; by default 1 (A2C: n-step returns) or 0.95 (PPO)."""
    ent_coef: Hyper[NotNegative] = 0.01
    """Coefficient of the entropy (0.003 in the paper's football)."""
    vf_coef: Hyper[NotNegative] = 0.5
    """Coefficient of the value loss."""
    max_grad_norm: Hyper[Positive] = 0.5
    """Largest global norm of a gradient."""
    clip_coef: Hyper[Positive] = 0.1
    """PPO: clipping of the probability ratio, and of the value's change."""
    update_epochs: Hyper[Count] = 4
    """PPO: epochs over each unroll."""
    num_minibatches: Hyper[Count] = 4
    """PPO: minibatches of an epoch."""
    reward_clipping: Hyper[Literal["abs_one", "none"]] = "abs_one"
    """Clip rewards to [-1, 1] for learning, or not."""
    network: Hyper[Literal["auto", "resnet", "nature", "mlp"]] = "auto"
    """Network; auto takes the Nature CNN for images (tables A4 and A6), else the MLP."""
    hiddens: Hyper[tuple[Count, ...] | None] = None
    """Widths of the dense layers; by default the network's own."""
    atari_preprocessing: Hyper[Literal["machado", "gym"]] = "machado"
    """Atari wrappers: those of the Cleanba paper (after Machado et al., 2018), or gym's."""
    torch_threads: Hyper[Count] = 1
    """Threads of torch in the learner. Sums are split by them, so they are part of the arithmetic."""
    hardware: Nested[Hardware] = Hardware()
    run: Nested[RunOptions] = RunOptions()
    checkpoints: Nested[CheckpointOptions] = CheckpointOptions()


DEFAULTS = {
    "a2c": {"num_steps": 5, "learning_rate": 7e-4, "gae_lambda": 1.0},
    "ppo": {"num_steps": 128, "learning_rate": 3.43e-4, "gae_lambda": 0.95},
}


class Storages(NamedTuple):
    """Shared memory of both data storages, S steps of N environments each."""

    obs: torch.Tensor  # [2, S + 1, N, ...]
    uniforms: torch.Tensor  # float64 [2, S, N], the randomness of the actions
    actions: torch.Tensor  # int64 [2, S, N]
    versions: torch.Tensor  # int64 [2, S, N], of the policy that chose them, as the actor saw it
    rewards: torch.Tensor  # float32 [2, S, N], unclipped
    dones: torch.Tensor  # bool [2, S, N], the episode ended with that step
    episode_returns: torch.Tensor  # float64 [2, S, N], where dones
    episode_lengths: torch.Tensor  # int64 [2, S, N], where dones
    times: torch.Tensor  # float64 [2, N, 3], see `Times`


class Times(NamedTuple):
    """Seconds, as an executor measures them."""

    wall_time: float  # seconds since the run started, when its part of the storage was full
    inference_time: float  # waiting for actions
    env_time: float  # in the environment


class Shared(NamedTuple):
    """What executors, actors and learner share."""

    network: torch.nn.Module  # of the policy that acts; changes only while no actor is at work
    version: torch.Tensor  # int64 [1], of it
    storages: Storages
    position: (
        torch.Tensor
    )  # int64 [N, 2]: storage and step that an environment waits for an action in
    states: IndexQueue  # environments that wait for an action
    ready: tuple[IndexQueue, ...]  # by environment: it has an action
    begin: tuple[IndexQueue, ...]  # by environment: the storage to fill next
    full: IndexQueue  # environments that have filled their part of the storage


def make_storages(args: Args, spec: EnvSpec) -> Storages:
    """Allocate both storages."""
    dtype = torch.from_numpy(np.zeros(0, spec.obs_dtype)).dtype
    shape = (2, args.sync_interval, args.num_envs)
    return Storages(
        obs=shared_tensor((2, args.sync_interval + 1, args.num_envs, *spec.obs_shape), dtype),
        uniforms=shared_tensor(shape, torch.float64),
        actions=shared_tensor(shape, torch.int64),
        versions=shared_tensor(shape, torch.int64),
        rewards=shared_tensor(shape, torch.float32),
        dones=shared_tensor(shape, torch.bool),
        episode_returns=shared_tensor(shape, torch.float64),
        episode_lengths=shared_tensor(shape, torch.int64),
        times=shared_tensor((2, args.num_envs, len(Times._fields)), torch.float64),
    )


def make_shared(args: Args, spec: EnvSpec, network: torch.nn.Module) -> Shared:
    """Allocate what the processes share, before they are forked."""
    share_parameters(network)
    return Shared(
        network=network,
        version=shared_tensor((1,), torch.int64),
        storages=make_storages(args, spec),
        position=shared_tensor((args.num_envs, 2), torch.int64),
        states=IndexQueue(),
        ready=tuple(IndexQueue() for _ in range(args.num_envs)),
        begin=tuple(IndexQueue() for _ in range(args.num_envs)),
        full=IndexQueue(),
    )


class Executor:
    """One environment, and the randomness of its actions; it writes into the storages."""

    def __init__(self, env_index: int, args: Args, spec: EnvSpec, storages: Storages):
        """Reset the environment."""
        (seed,) = env_seeds(args.seed, env_index, 1)
        self._env_index = env_index
        self._rng = np.random.default_rng([seed, 0])
        self._env = Environment(spec.env_id, seed, args.atari_preprocessing)
        self._views = Storages(*(tensor.numpy() for tensor in storages))
        self._last = self._env.initial()

    def observe(self, storage: int, t: int) -> None:
        """Write the observation of a step, and the random number of its action."""
        self._views.obs[storage, t, self._env_index] = self._last.obs
        self._views.uniforms[storage, t, self._env_index] = self._rng.random()

    def step(self, storage: int, t: int) -> None:
        """Take the action of a step; write its reward, and whether the episode ended."""
        at = (storage, t, self._env_index)
        self._last = self._env.step(int(self._views.actions[at]))
        self._views.rewards[at], self._views.dones[at] = self._last.reward, self._last.done
        self._views.episode_returns[at] = self._last.episode_return
        self._views.episode_lengths[at] = self._last.episode_length

    def finish(self, storage: int, num_steps: int) -> None:
        """Write the observation after the last step."""
        self._views.obs[storage, num_steps, self._env_index] = self._last.obs


def execute(env_index: int, args: Args, spec: EnvSpec, shared: Shared, clock: Clock) -> None:
    """Step one environment, and exchange its observations and actions: an executor process."""
    delays = np.random.default_rng([*env_seeds(args.seed, env_index, 1), 1])
    executor = Executor(env_index, args, spec, shared.storages)
    position, times = shared.position.numpy(), shared.storages.times.numpy()
    while True:
        storage = shared.begin[env_index].get()
        inference_time = env_time = 0.0
        for t in range(args.sync_interval):
            executor.observe(storage, t)
            position[env_index] = storage, t
            then = clock()
            shared.states.put(env_index)
            shared.ready[env_index].get()
            now = clock()
            inference_time += now - then
            if args.hardware.step_delay_seconds:
                time.sleep(delays.exponential(args.hardware.step_delay_seconds))
            executor.step(storage, t)
            env_time += clock() - now
        executor.finish(storage, args.sync_interval)
        times[storage, env_index] = Times(clock(), inference_time, env_time)
        shared.full.put(env_index)


def sample(logits: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Return actions [B] drawn from policies [B, num_actions] with uniform numbers from [0, 1) [B]."""
    cumulative = torch.softmax(logits.double(), dim=-1).cumsum(dim=-1)
    drawn = (uniforms[:, None] * cumulative[:, -1:] >= cumulative).sum(dim=-1)
    return drawn.clamp(max=logits.shape[-1] - 1)


def choose(network: torch.nn.Module, storages: Storages, at: tuple[Any, ...]) -> None:
    """Choose actions for the observations at some places of the storages.

    Args:
      network: on the CPU or a GPU.
      storages: both.
      at: storage, step and environment, or slices of them.
    """
    device = next(network.parameters()).device
    logits, _ = network(storages.obs[at].to(device))
    storages.actions[at] = sample(logits.cpu(), storages.uniforms[at])


def act(args: Args, shared: Shared, device: torch.device) -> None:
    """Choose actions for whichever observations are waiting: an actor process.

    An action's bits must not depend on what else is in the batch. On a CPU each observation is therefore
    a batch of its own; on a GPU every environment has a row of its own in a batch of all.
    """
    network, version = shared.network, -1
    if device.type == "cuda":
        network = copy.deepcopy(network).to(device)
        rows = torch.zeros_like(shared.storages.obs[0, 0], device=device)
    storages = shared.storages
    while True:
        env_indices = shared.states.get_all(args.num_envs if device.type == "cuda" else 1)
        at = (*shared.position[env_indices].unbind(1), torch.tensor(env_indices))
        if device.type == "cuda":
            if version != int(shared.version):
                network.load_state_dict(shared.network.state_dict())
                version = int(shared.version)
            rows[env_indices] = storages.obs[at].to(device)
            logits = network(rows)[0][env_indices].cpu()
            storages.actions[at] = sample(logits, storages.uniforms[at])
        else:
            version = int(shared.version)
            choose(network, storages, at)
        storages.versions[at] = version
        for env_index in env_indices:
            shared.ready[env_index].put(0)


def act_together(
    args: Args, shared: Shared, network: torch.nn.Module, storage: int, processes: WorkerProcesses
) -> None:
    """Choose the actions of a whole storage as a synchronous system does: at each step for all at once."""
    storages = shared.storages
    for t in range(args.sync_interval):
        processes.wait_for(shared.states, args.num_envs)
        with torch.inference_mode():
            choose(network, storages, (storage, t))
        storages.versions[storage, t] = shared.version
        for queue in shared.ready:
            queue.put(0)


def without_gradients(role: Any, *arguments: Any) -> None:
    """Run `execute` or `act` in a process of its own, with one thread of torch."""
    torch.set_num_threads(1)
    with torch.inference_mode():
        role(*arguments)


class Data(NamedTuple):
    """An unroll of T steps of N environments, evaluated by the policy that collected it."""

    obs: torch.Tensor  # [T * N, ...]
    actions: torch.Tensor  # [T * N]
    logprobs: torch.Tensor  # [T * N], under that policy
    values: torch.Tensor  # [T * N], under it
    returns: torch.Tensor  # [T * N]
    weights: torch.Tensor  # [T * N], of the policy loss


class Losses(NamedTuple):
    """Means over the steps of a batch."""

    loss: torch.Tensor
    policy_loss: torch.Tensor
    value_loss: torch.Tensor
    entropy: torch.Tensor
    approx_kl: torch.Tensor


def _policy(
    network: torch.nn.Module, data: Data
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits, values = network(data.obs)
    log_policy = torch.log_softmax(logits, dim=-1)
    logprobs = log_policy.gather(-1, data.actions[:, None])[:, 0]
    return logprobs, -(log_policy.exp() * log_policy).sum(dim=-1).mean(), values


def a2c_loss(network: torch.nn.Module, data: Data, args: Args) -> Losses:
    """Advantage actor-critic (https://arxiv.org/abs/1602.01783), as in Kostrikov's implementation."""
    logprobs, entropy, values = _policy(network, data)
    errors = data.returns - values
    policy_loss = -(data.weights * errors.detach() * logprobs).mean()
    value_loss = errors.square().mean()
    loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy
    return Losses(loss, policy_loss, value_loss, entropy, (data.logprobs - logprobs).mean())


def ppo_loss(network: torch.nn.Module, data: Data, advantages: torch.Tensor, args: Args) -> Losses:
    """The clipped surrogate loss with a clipped value loss, as in Kostrikov's implementation."""
    logprobs, entropy, values = _policy(network, data)
    ratio = torch.exp(logprobs - data.logprobs)
    surrogate = clipped_surrogate(ratio, advantages, args.clip_coef)
    policy_loss = -(data.weights * surrogate).mean()
    change = (values - data.values).clamp(-args.clip_coef, args.clip_coef)
    errors = (values - data.returns).square()
    clipped_errors = (data.values + change - data.returns).square()
    value_loss = 0.5 * torch.maximum(errors, clipped_errors).mean()
    loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy
    approx_kl = ((ratio - 1) - (logprobs - data.logprobs)).mean()
    return Losses(loss, policy_loss, value_loss, entropy, approx_kl)


class Learner:
    """The newest parameters, and how they learn from a storage."""

    def __init__(self, args: Args, network: torch.nn.Module, num_updates: int):
        """Prepare to train a network, on the device that it lies on."""
        self.network = network
        self.version = 1
        self._args = args
        self._device = next(network.parameters()).device
        # Gradients are computed at the parameters that collected the data, moved by every step that the
        # newest ones take, so that each of PPO's epochs continues from the last.
        self._behaviour = copy.deepcopy(network)
        optimizers = {
            "rmsprop": lambda p: torch.optim.RMSprop(
                p, lr=args.learning_rate, eps=args.optimizer_eps, alpha=0.99
            ),
            "adam": lambda p: torch.optim.Adam(p, lr=args.learning_rate, eps=args.optimizer_eps),
        }
        self.optimizer = optimizers[args.optimizer](list(network.parameters()))
        self._num_updates = num_updates
        self._generator = torch.Generator().manual_seed(args.seed)

    def learn(self, storages: Storages, storage: int, behaviour: Any) -> dict[str, float]:
        """Make one update: learn from all unrolls of a storage.

        Args:
          storages: both storages.
          storage: the full one.
          behaviour: state of the network that collected it.

        Returns:
          Losses of the last gradient, `grad_norm` and `learning_rate`.
        """
        args = self._args
        rate = args.learning_rate
        if args.anneal_lr:
            rate *= 1 - (self.version - 1) / self._num_updates
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self._behaviour.load_state_dict(behaviour)
        metrics: dict[str, float] = {}
        with torch.no_grad():  # before anything moves
            unrolls = [
                self._read(storages, storage, first)
                for first in range(0, args.sync_interval, args.num_steps)
            ]
        for data in unrolls:
            if args.correction == "truncated-is":
                data = self._weigh(data)
            metrics = self._a2c(data) if args.algorithm == "a2c" else self._ppo(data)
        self.version += 1
        return metrics | {"learning_rate": rate}

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the state: parameters, what the optimizer keeps of each, and the random generator."""
        state = training_arrays(self.network, self.optimizer)
        return state | {"generator": self._generator.get_state().numpy()}

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Take the state from what `arrays` returned after as many updates.

        Raises:
          RecordError: with one line, if the array `generator` is not the state of a random generator.
        """
        load_training_arrays(self.network, self.optimizer, arrays)
        try:
            self._generator.set_state(torch.from_numpy(arrays["generator"]))
        except RuntimeError as error:
            raise RecordError(f"generator: {error}") from None

    def _a2c(self, data: Data) -> dict[str, float]:
        return self._step(lambda network: a2c_loss(network, data, self._args))

    def _ppo(self, data: Data) -> dict[str, float]:
        args = self._args
        advantages = data.returns - data.values
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-5)
        metrics: dict[str, float] = {}
        for _ in range(args.update_epochs):
            order = torch.randperm(len(data.actions), generator=self._generator)
            for indices in order.to(self._device).chunk(args.num_minibatches):
                part, advantage = Data(*(x[indices] for x in data)), advantages[indices]
                loss = functools.partial(ppo_loss, data=part, advantages=advantage, args=args)
                metrics = self._step(loss)
        return metrics

    def _read(self, storages: Storages, storage: int, first: int) -> Data:
        args = self._args
        steps = slice(first, first + args.num_steps)
        obs = storages.obs[storage, first : first + args.num_steps + 1].to(self._device)
        actions = storages.actions[storage, steps].to(self._device)
        rewards = storages.rewards[storage, steps].to(self._device)
        dones = storages.dones[storage, steps].to(self._device)
        if args.reward_clipping == "abs_one":
            rewards = rewards.clamp(-1, 1)
        logits, values = self._behaviour(obs.flatten(0, 1))
        values = values.view(args.num_steps + 1, args.num_envs)
        logits = logits.view(args.num_steps + 1, args.num_envs, -1)[:-1].flatten(0, 1)
        returns = generalized_returns(rewards, dones, values, args.gamma, args.gae_lambda)
        flat = actions.flatten()
        obs = obs[:-1].flatten(0, 1)
        logprobs = torch.log_softmax(logits, dim=-1).gather(-1, flat[:, None])[:, 0]
        weights = torch.ones_like(logprobs)
        return Data(obs, flat, logprobs, values[:-1].flatten(), returns.flatten(), weights)

    @torch.no_grad()
    def _weigh(self, data: Data) -> Data:
        """Weight an unroll by the importance ratios of the newest policy, truncated at 1."""
        newest, _ = self.network(data.obs)
        newest = torch.log_softmax(newest, dim=-1).gather(-1, data.actions[:, None])[:, 0]
        weights = torch.exp(newest - data.logprobs).clamp(max=1.0)
        return data._replace(logprobs=newest, weights=weights)  # what PPO's ratio begins with

    def _step(self, loss: Callable[[torch.nn.Module], Losses]) -> dict[str, float]:
        """Compute a gradient at the parameters of the `correction`; apply it to the newest parameters."""
        newest = list(self.network.parameters())
        delayed = self._args.correction == "delayed-gradient"
        at = self._behaviour if delayed else self.network
        losses = loss(at)
        gradients = torch.autograd.grad(losses.loss, list(at.parameters()))
        for parameter, gradient in zip(newest, gradients, strict=True):
            parameter.grad = gradient
        norm = torch.nn.utils.clip_grad_norm_(newest, self._args.max_grad_norm)
        before = [parameter.detach().clone() for parameter in newest] if delayed else []
        self.optimizer.step()
        if delayed:
            with torch.no_grad():
                for parameter, new, old in zip(
                    self._behaviour.parameters(), newest, before, strict=True
                ):
                    parameter += new - old
        metrics = {name: value.item() for name, value in losses._asdict().items()}
        if not np.isfinite(metrics["loss"]):
            raise FloatingPointError(f"the loss of update {self.version} is {metrics['loss']}")
        return metrics | {"grad_norm": float(norm)}


class Plan(NamedTuple):
    """A run that has been checked and may begin."""

    args: Args  # with the values chosen for those that were None
    run: RunId
    spec: EnvSpec
    network: torch.nn.Module
    network_name: str
    num_updates: int
    checkpoint_every: int  # updates; 0 for no checkpoints


@input_checks()
def prepare(args: Args) -> Plan:
    """Check everything that can be wrong with a run; nothing is written yet.

    Raises:
      BadInput: with one line.
      RecordError: if there is a record already and it may not be overwritten.
    """
    check_args(args)
    chosen = {k: v for k, v in DEFAULTS[args.algorithm].items() if getattr(args, k) is None}
    args = replace(args, **chosen)
    args = replace(args, sync_interval=args.sync_interval or args.num_steps)
    system, setting = f"hts_rl_{args.algorithm}", f"actors{args.hardware.num_actors}"
    if args.schedule == "synchronous":  # the learner acts itself
        system, setting = f"{system}-sync", "one-thread"
        args = replace(args, correction="none", hardware=replace(args.hardware, num_actors=0))
    if args.sync_interval % args.num_steps:
        raise BadInput(
            f"--sync-interval {args.sync_interval}: must be a multiple of --num-steps {args.num_steps}"
        )
    batch = args.num_steps * args.num_envs
    if args.algorithm == "ppo" and batch % args.num_minibatches:
        raise BadInput(
            f"--num-minibatches {args.num_minibatches}: must divide the {batch} steps of an unroll"
        )
    storage = args.sync_interval * args.num_envs
    if args.total_timesteps < storage:
        raise BadInput(f"--total-timesteps {args.total_timesteps}: a storage holds {storage} steps")
    num_updates = args.total_timesteps // storage
    checkpoint_every = checkpoint_interval(args.checkpoints, num_updates)
    run = run_id(system, args.env_id, args.seed, args.run, setting)
    check_run(run, args.num_envs, overwrite=args.run.overwrite)
    spec = as_stepped(describe_env(args.env_id, args.atari_preprocessing))
    name = choose_network(args.network, spec, images="nature")
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # the bits of an orthogonal initialization depend on them
    network = make_network(name, spec.obs_shape, spec.num_actions, hiddens=args.hiddens)
    return Plan(args, run, spec, network, name, num_updates, checkpoint_every)


def pinned(plan: Plan, device: torch.device) -> dict[str, dict[str, Any]]:
    """Return what must be equal in a run and its repetition for the bits to be the same."""
    hardware = describe_device(device)
    return {
        "hyperparameters": hyperparameters(plan.args) | {"network": plan.network_name},
        "versions": versions(PACKAGES),
        "hardware": {name: hardware[name] for name in ("platform", "device_kind")},
    }


def begin_log(plan: Plan, device: torch.device, clock: Clock) -> RunLog:
    """Begin the record of a run."""
    args = plan.args
    hardware = asdict(args.hardware) | describe_device(device)
    hardware["num_processes"] = 1 + args.num_envs + args.hardware.num_actors
    info = run_info(
        plan.run,
        program="hts_rl",
        hyperparameters=pinned(plan, device)["hyperparameters"],
        hardware=hardware,
        packages=PACKAGES,
    )
    info.started = clock.started
    info.num_actions = plan.spec.num_actions
    info.checkpoint_every = plan.checkpoint_every
    info.autoreset = "same_step"
    return RunLog(
        plan.run,
        info,
        total_steps=plan.num_updates * args.sync_interval * args.num_envs,
        overwrite=args.run.overwrite,
        progress="lines" if args.run.progress else None,
    )


class Collected(NamedTuple):
    """What is recorded of a full storage, apart from its data."""

    version: int  # of the policy that acted
    behaviour: Any  # its state
    begun: float  # seconds since the run started, when the executors began to fill it
    put_time: float  # seconds that the executors waited for it


def train(plan: Plan) -> None:
    """Start executors, actors and learner, train until all steps are learned from, and stop them."""
    args = plan.args
    shared = make_shared(args, plan.spec, plan.network)
    clock = Clock()
    use_cuda = not args.hardware.disable_cuda and torch.cuda.device_count() > 0
    device = torch.device("cuda" if use_cuda else "cpu")
    if use_cuda:  # one order of additions there, too; inherited by the actors
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    with WorkerProcesses() as processes:
        # Forked before any other thread exists or a GPU is initialized.
        for index in range(args.num_envs):
            arguments = (execute, index, args, plan.spec, shared, clock)
            processes.fork(f"executor {index}", without_gradients, *arguments)
        for index in range(args.hardware.num_actors):
            processes.fork(f"actor {index}", without_gradients, act, args, shared, device)
        torch.set_num_threads(args.torch_threads)
        with begin_log(plan, device, clock) as log:
            learner = Learner(args, copy.deepcopy(plan.network).to(device), plan.num_updates)
            loop = synchronous_loop if args.schedule == "synchronous" else hts_loop
            loop(plan, shared, processes, learner, log, clock)
            save_parameters(learner.network, plan.run.directory / "model.npz")


def _state_of(network: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in network.state_dict().items()}


def hts_loop(
    plan: Plan,
    shared: Shared,
    processes: WorkerProcesses,
    learner: Learner,
    log: RunLog,
    clock: Clock,
) -> None:
    """Fill one storage while the learner learns from the other, and swap them."""
    args = plan.args
    recorder = Recorder(plan, shared.storages, log)
    waited, put_time = 0.0, 0.0
    filled: Collected | None = None
    for number in range(1, plan.num_updates + 2):
        storage = number % 2
        filling = None
        if number <= plan.num_updates:
            # The actors' parameters change here, while no actor is at work.
            shared.network.load_state_dict(learner.network.state_dict())
            shared.version[0] = learner.version
            filling = Collected(learner.version, _state_of(learner.network), clock(), put_time)
            for queue in shared.begin:
                queue.put(storage)
        if filled is not None:
            # Parameters that collect the storage after this one.
            acting = filling.behaviour if filling else _state_of(learner.network)
            before = clock()
            metrics = learner.learn(shared.storages, 1 - storage, filled.behaviour)
            # An update ends here and not with the swap, because nothing is collected beside the last one.
            now = clock()
            recorder.write(
                1 - storage, filled, learner, Learned(metrics, acting, waited, now - before, now)
            )
        waiting = clock()
        if filling is not None:
            processes.wait_for(shared.full, args.num_envs)
        filled, waited = filling, clock() - waiting
        put_time = clock() - float(shared.storages.times[storage, :, 0].mean())


def synchronous_loop(
    plan: Plan,
    shared: Shared,
    processes: WorkerProcesses,
    learner: Learner,
    log: RunLog,
    clock: Clock,
) -> None:
    """Fill a storage and learn from it, in turn."""
    recorder = Recorder(plan, shared.storages, log)
    put_time = 0.0
    for _ in range(plan.num_updates):
        filled = Collected(learner.version, _state_of(learner.network), clock(), put_time)
        shared.version[0] = learner.version
        for queue in shared.begin:
            queue.put(0)
        act_together(plan.args, shared, learner.network, 0, processes)
        processes.wait_for(shared.full, plan.args.num_envs)
        collected = clock()
        metrics = learner.learn(shared.storages, 0, filled.behaviour)
        now = clock()
        get_time, training_time = collected - filled.begun, now - collected
        recorder.write(0, filled, learner, Learned(metrics, None, get_time, training_time, now))
        put_time = now - float(shared.storages.times[0, :, 0].mean())


def played(storages: Storages, storage: int, digest: GroupDigest) -> Replayed:
    """Return what is recorded of a full storage.

    Args:
      storages: both.
      storage: the full one.
      digest: running digest of all storages before this one, which is added to it.
    """
    actions = storages.actions[storage].numpy().astype(np.int32)
    rewards, dones = storages.rewards[storage].numpy(), storages.dones[storage].numpy()
    episodes = [
        environments.Episode(
            t,
            env_index,
            float(storages.episode_returns[storage, t, env_index]),
            int(storages.episode_lengths[storage, t, env_index]),
        )
        for t, env_index in np.argwhere(dones).tolist()
    ]
    return Replayed(actions, combine_digests([digest.update(actions, rewards, dones)]), episodes)


def checkpoint_arrays(learner: Learner, acting: Any | None) -> dict[str, np.ndarray]:
    """Return what a checkpoint holds.

    Args:
      learner: its state.
      acting: parameters that collect the next storage, or None if they are the learner's.
    """
    collects = {f"acting/{name}": value.cpu().numpy() for name, value in (acting or {}).items()}
    return learner.arrays() | collects


class Learned(NamedTuple):
    """What is recorded of an update, apart from the state of the learner after it."""

    metrics: dict[str, float]
    acting: Any | None  # see `checkpoint_arrays`
    get_time: float  # seconds that the learner waited for the storage
    training_time: float  # seconds
    now: float  # clock time at its end


class Recorder:
    """Records each update, and the storage that it learned from."""

    def __init__(self, plan: Plan, storages: Storages, log: RunLog):
        """Record a run from its beginning."""
        self._plan, self._storages, self._log, self._last = plan, storages, log, 0.0
        args = plan.args
        self._shape = Shape(args.sync_interval, args.num_envs, plan.spec.num_actions)
        self._digest = GroupDigest()

    def write(self, storage: int, filled: Collected, learner: Learner, learned: Learned) -> None:
        """Record the learner's last update."""
        args, storages = self._plan.args, self._storages
        steps = args.sync_interval * args.num_envs
        number = learner.version - 1
        measured = storages.times[storage].numpy()
        means = Times(*measured.mean(axis=0).tolist())
        marked = number == self._plan.num_updates or number % FINGERPRINT_EVERY == 0
        every = self._plan.checkpoint_every
        saves = every and number % every == 0
        saved = checkpoint_arrays(learner, learned.acting) if saves else None
        delayed = args.correction == "delayed-gradient"
        update = Update(
            version=learner.version,
            step=number * steps,
            wall_time=round(learned.now, 4),
            update_seconds=round(learned.now - self._last, 6),
            **learned.metrics,
            rollout_queue_get_time=round(learned.get_time, 6),
            params_queue_get_time=0.0,
            rollout_queue_put_time=round(filled.put_time, 6),
            rollout_time=round(float(measured[:, 0].max()) - filled.begun, 6),
            inference_time=round(means.inference_time, 6),
            env_time=round(means.env_time, 6),
            training_time=round(learned.training_time, 6),
            gradient_version=filled.version if delayed else UNSET,
            fingerprint=fingerprint_network(learner.network) if marked else None,
            checkpoint=UNSET if saved is None else fingerprint(saved),
        )
        rollouts = []
        for env_index in range(args.num_envs):
            lengths = run_lengths(storages.versions[storage, :, env_index].numpy())
            rollouts.append(
                Rollout(
                    actor=env_index,
                    group=None,
                    rollout=number,
                    steps=args.sync_interval,
                    wall_time=round(float(measured[env_index, 0]), 4),
                    version_first=lengths[0][0],
                    version_last=lengths[-1][0],
                    versions=lengths,
                    learner_version=number,
                )
            )
        found = played(storages, storage, self._digest)
        episodes = [
            Episode(
                step=(number - 1) * steps + (e.t + 1) * args.num_envs,
                wall_time=round(float(measured[e.index, 0]), 4),
                env_index=e.index,
                episode_return=e.episode_return,
                length=e.length,
            )
            for e in found.episodes
        ]
        self._log.record.write_actions(pack(Frame(found.actions, found.digest), self._shape))
        self._log.write(update, rollouts, episodes)
        if saved is not None:
            checkpoints.save(
                self._plan.run.directory,
                saved,
                update=number,
                wall_time=learned.now,
                sizes=self._log.sizes(),
                digests=[found.digest.hex()],
                pinned=pinned(self._plan, next(learner.network.parameters()).device),
                keep=args.checkpoints.keep_checkpoints,
            )
        self._last = learned.now


class Repetition:
    """The training of a recorded run, from its beginning; see `cleanba.audit.segments.Repetition`.

    In one process, which computes the same bits as any number of actors.
    """

    def __init__(self, plan: Plan):
        """Make the environments and the initial parameters."""
        args = plan.args
        self._args = args
        self._storages = make_storages(args, plan.spec)
        self._executors = [
            Executor(index, args, plan.spec, self._storages) for index in range(args.num_envs)
        ]
        self._acting = plan.network
        self._learner = Learner(args, copy.deepcopy(plan.network), plan.num_updates)
        self._digest = GroupDigest()
        self._alternates = args.schedule == "synchronous"  # acting and learning

    def replay(self, actions: np.ndarray) -> Replayed:
        """Step the environments through recorded actions [S, N]."""
        self._learner.version += 1
        self._storages.actions[0] = torch.from_numpy(actions)
        return self._play(lambda t: None)

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Take the learner's state from a checkpoint after the updates so far."""
        acting = self._acting.state_dict()
        initialize_optimizer(self._learner.network, self._learner.optimizer)
        check_arrays(arrays, checkpoint_arrays(self._learner, None if self._alternates else acting))
        self._learner.restore(arrays)
        prefix = "parameters" if self._alternates else "acting"
        self._acting.load_state_dict(
            {name: torch.from_numpy(arrays[f"{prefix}/{name}"]) for name in acting}
        )

    def update(self) -> Repeated:
        """Fill a storage, and learn from it."""
        version = self._learner.version
        newest, behaviour = _state_of(self._learner.network), _state_of(self._acting)
        torch.set_num_threads(self._args.torch_threads if self._alternates else 1)
        with torch.inference_mode():
            found = self._play(self._act)
        torch.set_num_threads(self._args.torch_threads)
        metrics: dict[str, Any] = self._learner.learn(self._storages, 0, behaviour)
        self._acting.load_state_dict(
            self._learner.network.state_dict() if self._alternates else newest
        )
        if self._args.correction == "delayed-gradient":
            metrics["gradient_version"] = max(1, version - 1)
        return Repeated(found, metrics)

    def fingerprint(self) -> str:
        """Return the fingerprint of the parameters."""
        return fingerprint_network(self._learner.network)

    def arrays(self) -> dict[str, np.ndarray]:
        """Return what a checkpoint after the last update holds."""
        acting = None if self._alternates else self._acting.state_dict()
        return checkpoint_arrays(self._learner, acting)

    def close(self) -> None:
        """Free the environments."""
        self._executors.clear()

    def _act(self, t: int) -> None:
        if self._alternates:
            choose(self._acting, self._storages, (0, t))
            return
        for env_index in range(self._args.num_envs):  # batches of one, see `act`
            at = tuple(torch.tensor([x]) for x in (0, t, env_index))
            choose(self._acting, self._storages, at)

    def _play(self, act: Callable[[int], None]) -> Replayed:
        for t in range(self._args.sync_interval):
            for executor in self._executors:
                executor.observe(0, t)
            act(t)
            for executor in self._executors:
                executor.step(0, t)
        for executor in self._executors:
            executor.finish(0, self._args.sync_interval)
        return played(self._storages, 0, self._digest)


def repeat(run: Run) -> Repetition:
    """Prepare to make the updates of a record again, on the CPU.

    Raises:
      NotRepeatable: with one line, if this machine or version cannot compute its bits.
      Mismatch: if the environment has another number of actions than the record.
    """
    on_cpu = functools.partial(pinned, device=torch.device("cpu"))
    return Repetition(prepare_again(run, Args, prepare, on_cpu, hardware=Hardware()))


def main(args: Args) -> None:
    """Check the arguments, and train."""
    train(prepare(args))


if __name__ == "__main__":
    run_command_line(Args, main, "HTS-RL, with A2C and PPO, on EnvPool.")
