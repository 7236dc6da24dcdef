"""IMPALA as monobeast builds it, instrumented: which policy took each step of each rollout.

The architecture of torchbeast's monobeast (https://arxiv.org/abs/1910.03552), in this file but for the loss,
the networks and the queues:

    actor processes, one environment each --- indices of full buffers ---> learner threads
           ^------------------------------- indices of free buffers ----------------'

Rollouts lie in shared memory. Actors act with one model in shared memory, into which the learner
copies its parameters after every update, whatever the actors are doing at that moment. So the policy
changes inside rollouts, as often as the machine and the settings make it. Section 3 and appendix G of the
Cleanba paper (https://arxiv.org/abs/2310.00036) measure this, and it is recorded here. Read from top to
bottom: options, acting, learning, the run.

    python baselines/monobeast_study.py --env Pong-v5 --num_actors 80 --unroll_length 240

docs/differences.md lists what differs from monobeast. `--savedir` and `--xpid`, monobeast's names, are
accepted for `--runs-dir` and `--setting`.
"""

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, ClassVar, Literal, NamedTuple

import numpy as np
import torch
import tyro

from baselines.one_environment import Environment, Step, as_stepped
from baselines.shared_memory import (
    LARGEST_QUEUE,
    STOP,
    IndexQueue,
    share_parameters,
    shared_tensor,
)
from baselines.torch_io import (
    PACKAGES,
    describe_device,
    fingerprint_network,
    load_parameters,
    save_parameters,
)
from baselines.torch_losses import impala_loss
from baselines.torch_networks import Recurrent, choose_network, make_network, orthogonal_
from baselines.worker_processes import Clock, WorkerProcesses
from cleanba.environments import EnvSpec, describe_env, env_seeds
from cleanba.record import Episode, Rollout, Update
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
from cleanba.run.log import RunLog, run_info, run_lengths
from cleanba.run.options import RunId, RunOptions, check_run, run_id

SECONDS_TO_STOP = 5.0  # for a learner thread to finish its update
FINGERPRINT_EVERY = 100  # updates
TEST_EPISODES = 10  # of --mode test, as in monobeast


@dataclass(frozen=True)
class Hardware:
    """Hardware settings, and the delays that imitate slower hardware."""

    learner_delay_seconds: NotNegative = 0.0
    """Seconds that the learner sleeps after every update."""
    learner_delay: Literal["learning", "broadcast"] = "learning"
    """Where it sleeps: inside the learning step, with its lock held, as the original study does; or
    between learning and broadcasting, while other learner threads continue, as the paper describes it."""
    actor_delay_seconds: NotNegative = 0.0
    """Mean seconds that an actor sleeps at every step, as in slower environments. The times are
    exponentially distributed (the model of HTS-RL, claim 1): with equal ones, actors would keep pace."""
    torch_threads: Count | None = None
    """Threads of torch in the learner; by default one per core. Actors have one."""
    disable_cuda: bool = False
    """Learn on the CPU even if there is a GPU."""


@dataclass(frozen=True)
class Args:
    """Options of monobeast, by their names there, and what the study adds."""

    FLAG_ALIASES: ClassVar[Mapping[str, str]] = {"--xpid": "--setting", "--savedir": "--runs-dir"}

    env: Annotated[NotHyper[str], tyro.conf.arg(aliases=["--env-id"])] = "Pong-v5"
    """EnvPool environment."""
    mode: NotHyper[Literal["train", "test"]] = "train"
    """Train, or play with the model of a run that was trained before."""
    num_actors: Hyper[Count] = 4
    """Actor processes, with one environment each."""
    total_steps: Hyper[Count] = 100_000
    """Agent steps to learn from."""
    batch_size: Hyper[Count] = 8
    """Rollouts in a learner batch."""
    unroll_length: Hyper[Count] = 80
    """Steps in a rollout."""
    num_buffers: Hyper[Count | None] = None
    """Rollout buffers in shared memory; by default two per actor, and at least a batch."""
    num_learner_threads: Annotated[Hyper[Count], tyro.conf.arg(aliases=["--num-threads"])] = 2
    """Threads that make batches; one at a time learns."""
    use_lstm: Hyper[bool] = False
    """Put monobeast's LSTM between trunk and heads."""
    entropy_cost: Hyper[NotNegative] = 0.0006
    """Coefficient of the entropy."""
    baseline_cost: Hyper[NotNegative] = 0.5
    """Coefficient of the value loss."""
    discounting: Hyper[Share] = 0.99
    """Discount factor."""
    reward_clipping: Hyper[Literal["abs_one", "none"]] = "abs_one"
    """Clip rewards to [-1, 1] for learning, or not."""
    learning_rate: Hyper[Positive] = 0.00048
    """Learning rate of RMSProp, annealed linearly to 0."""
    alpha: Hyper[Share] = 0.99
    """Decay of RMSProp."""
    momentum: Hyper[NotNegative] = 0.0
    """Momentum of RMSProp."""
    epsilon: Hyper[NotNegative] = 0.01
    """Epsilon of RMSProp, outside the root."""
    grad_norm_clipping: Hyper[Positive] = 40.0
    """Largest global norm of a gradient."""
    network: Hyper[Literal["auto", "resnet", "nature", "mlp"]] = "auto"
    """Network: IMPALA ResNet, Nature CNN or MLP; auto takes the ResNet for images, else the MLP."""
    initialization: Hyper[Literal["torch", "orthogonal"]] = "torch"
    """Initial weights of the Nature CNN: torch's defaults, as in monobeast, or orthogonal, as in Cleanba.
    From torch's defaults, the gradients of small batches lie below `epsilon`, and learning is slow."""
    atari_preprocessing: Hyper[Literal["machado", "gym"]] = "machado"
    """Atari wrappers: those of the Cleanba paper (after Machado et al., 2018), or gym's (appendix D)."""
    seed: NotHyper[int] = 1
    """Seed of the environments, the initial parameters and the actions. It does not make a run
    reproducible: the machine decides which policy acts when."""
    hardware: Nested[Hardware] = Hardware()
    run: Nested[RunOptions] = RunOptions()


class Buffers(NamedTuple):
    """Shared memory of N rollouts of T steps. Observation t leads to action t, and that to reward t + 1."""

    obs: torch.Tensor  # [N, T + 1, ...]
    rewards: torch.Tensor  # float32 [N, T + 1], unclipped
    dones: torch.Tensor  # bool [N, T + 1], observation t begins an episode
    last_actions: torch.Tensor  # int64 [N, T + 1], that led to observation t
    logits: torch.Tensor  # float32 [N, T, num_actions], of the policy that acted
    versions: torch.Tensor  # int64 [N, T], of that policy
    episode_returns: torch.Tensor  # float64 [N, T], where dones[t + 1]
    episode_lengths: torch.Tensor  # int64 [N, T], where dones[t + 1]
    core_states: (
        torch.Tensor
    )  # float32 [N, 2, layers, width] before the first step; empty without LSTM
    origin: torch.Tensor  # int64 [N, 3]: actor, number of its rollout (from 1), mixed steps
    times: torch.Tensor  # float64 [N, 5], see `Times`


class Times(NamedTuple):
    """Seconds, as an actor measures them."""

    wall_time: float  # seconds since the run started, when the rollout was complete
    rollout_time: float  # to collect it
    inference_time: float  # of that, choosing actions
    env_time: float  # of that, in the environment
    put_time: float  # waiting for a free buffer before it


def make_buffers(count: int, length: int, spec: EnvSpec, core_shape: Sequence[int]) -> Buffers:
    """Allocate the shared memory of `count` rollouts."""
    dtype = torch.from_numpy(np.zeros(0, spec.obs_dtype)).dtype
    return Buffers(
        obs=shared_tensor((count, length + 1, *spec.obs_shape), dtype),
        rewards=shared_tensor((count, length + 1), torch.float32),
        dones=shared_tensor((count, length + 1), torch.bool),
        last_actions=shared_tensor((count, length + 1), torch.int64),
        logits=shared_tensor((count, length, spec.num_actions), torch.float32),
        versions=shared_tensor((count, length), torch.int64),
        episode_returns=shared_tensor((count, length), torch.float64),
        episode_lengths=shared_tensor((count, length), torch.int64),
        core_states=shared_tensor((count, *core_shape), torch.float32),
        origin=shared_tensor((count, 3), torch.int64),
        times=shared_tensor((count, len(Times._fields)), torch.float64),
    )


class Policy(NamedTuple):
    """The shared-memory model that all actors act with, and its version beside it.

    The learner sets `begun` before it copies parameters in, and `version` after it. An actor that reads
    `version` before a step and the same number from `begun` after it has acted with that version alone.
    """

    network: torch.nn.Module
    version: torch.Tensor  # int64 [1], of the newest parameters that have been copied completely
    begun: torch.Tensor  # int64 [1], of the newest parameters whose copying has begun


class Shared(NamedTuple):
    """What actors and learner share."""

    policy: Policy
    buffers: Buffers
    free: IndexQueue  # of buffers that may be written
    full: IndexQueue  # of buffers that may be learned from


@torch.inference_mode()
def act(actor: int, args: Args, spec: EnvSpec, shared: Shared, clock: Clock) -> None:
    """Collect rollouts in one environment: the whole of an actor process."""
    torch.set_num_threads(1)
    policy, buffers = shared.policy, shared.buffers
    recurrent = isinstance(policy.network, Recurrent)
    (seed,) = env_seeds(args.seed, actor, 1)
    generator, rng = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    env = Environment(spec.env_id, seed, args.atari_preprocessing)
    version, begun = policy.version.numpy(), policy.begun.numpy()
    views = Buffers(*(buffer.numpy() for buffer in buffers))
    state = policy.network.initial_state(1) if recurrent else None
    last, last_action = env.initial(), 0
    for number in itertools.count(1):
        before = clock()
        index = shared.free.get()
        start = clock()
        inference_time = env_time = 0.0
        mixed = 0
        if recurrent:
            buffers.core_states[index] = torch.stack(state)[:, :, 0]
        _write_step(views, index, 0, last, last_action)
        for t in range(args.unroll_length):
            then = clock()
            # Read at every step: the learner may have copied a newer policy into place meanwhile.
            views.versions[index, t] = version[0]
            obs = torch.from_numpy(last.obs)[None]
            if recurrent:
                inputs = torch.tensor([[last.reward]]), torch.tensor([[last.done]])
                action_tm1 = torch.tensor([[last_action]])
                logits, _, state = policy.network(obs[None], *inputs, action_tm1, state)
                logits = logits[0]
            else:
                logits, _ = policy.network(obs)
            probabilities = torch.softmax(logits[0], dim=-1)
            last_action = int(torch.multinomial(probabilities, 1, generator=generator))
            buffers.logits[index, t] = logits[0]
            mixed += int(begun[0] != views.versions[index, t])
            now = clock()
            inference_time += now - then
            if args.hardware.actor_delay_seconds:
                time.sleep(rng.exponential(args.hardware.actor_delay_seconds))
            last = env.step(last_action)
            env_time += clock() - now
            _write_step(views, index, t + 1, last, last_action)
        first, final = views.versions[index, 0], version[0]
        views.origin[index] = actor, number, mixed
        end = clock()
        views.times[index] = Times(end, end - start, inference_time, env_time, start - before)
        if args.run.progress:
            line = (
                f"actor_index {actor} initial policy_version {first} "
                f"policy_version after rollout {final}\n"
            )
            with contextlib.suppress(BrokenPipeError):  # a closed reader ends no run
                os.write(1, line.encode())  # one call: lines of other actors stay whole
        shared.full.put(index)


def _write_step(views: Buffers, index: int, t: int, step: Step, last_action: int) -> None:
    views.obs[index, t] = step.obs
    views.rewards[index, t] = step.reward
    views.dones[index, t] = step.done
    views.last_actions[index, t] = last_action
    if step.done and t > 0:
        views.episode_returns[index, t - 1] = step.episode_return
        views.episode_lengths[index, t - 1] = step.episode_length


class Batch(NamedTuple):
    """B rollouts, side by side, on the learner's device."""

    obs: torch.Tensor  # [T + 1, B, ...]
    rewards: torch.Tensor  # [T + 1, B], as the agent learns from them
    dones: torch.Tensor  # [T + 1, B]
    last_actions: torch.Tensor  # [T + 1, B]
    logits: torch.Tensor  # [T, B, num_actions]
    core_state: tuple[torch.Tensor, torch.Tensor] | None  # [layers, B, width] each


class Origin(NamedTuple):
    """What is recorded of the rollouts of a batch."""

    actors: np.ndarray  # [B]
    numbers: np.ndarray  # [B]
    mixed_steps: np.ndarray  # [B]
    versions: np.ndarray  # [B, T]
    times: np.ndarray  # [B, 5]
    dones: np.ndarray  # [B, T]
    episode_returns: np.ndarray  # [B, T]
    episode_lengths: np.ndarray  # [B, T]


def take_batch(
    buffers: Buffers, indices: Sequence[int], args: Args, device: torch.device
) -> tuple[Batch, Origin]:
    """Copy rollouts out of their buffers."""
    index = torch.tensor(indices)

    def time_major(buffer: torch.Tensor) -> torch.Tensor:
        return torch.stack([buffer[i] for i in indices], dim=1).to(device, non_blocking=True)

    rewards = time_major(buffers.rewards)
    core_state = None
    if buffers.core_states.shape[-1]:
        hidden, cell = buffers.core_states[index].permute(1, 2, 0, 3).to(device)
        core_state = (hidden.contiguous(), cell.contiguous())
    batch = Batch(
        obs=time_major(buffers.obs),
        rewards=rewards.clamp(-1, 1) if args.reward_clipping == "abs_one" else rewards,
        dones=time_major(buffers.dones),
        last_actions=time_major(buffers.last_actions),
        logits=time_major(buffers.logits),
        core_state=core_state,
    )
    actors, numbers, mixed_steps = buffers.origin[index].numpy().T
    origin = Origin(
        actors=actors,
        numbers=numbers,
        mixed_steps=mixed_steps,
        versions=buffers.versions[index].numpy(),
        times=buffers.times[index].numpy(),
        dones=buffers.dones[index, 1:].numpy(),
        episode_returns=buffers.episode_returns[index].numpy(),
        episode_lengths=buffers.episode_lengths[index].numpy(),
    )
    return batch, origin


def make_optimizer(
    args: Args, network: torch.nn.Module
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Return RMSProp and its schedule: linear to 0 over the steps of the run."""
    optimizer = torch.optim.RMSprop(
        network.parameters(),
        lr=args.learning_rate,
        momentum=args.momentum,
        eps=args.epsilon,
        alpha=args.alpha,
    )
    batch = args.unroll_length * args.batch_size

    def factor(update: int) -> float:
        return 1 - min(update * batch, args.total_steps) / args.total_steps

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def compute_gradient(network: torch.nn.Module, batch: Batch, args: Args) -> dict[str, torch.Tensor]:
    """Leave the gradient of the loss of a batch in the network; return the losses."""
    length, size = batch.dones.shape
    if batch.core_state is None:
        logits, values = network(batch.obs.flatten(0, 1))
        logits, values = logits.view(length, size, -1), values.view(length, size)
    else:
        logits, values, _ = network(
            batch.obs, batch.rewards, batch.dones, batch.last_actions, batch.core_state
        )
    losses = impala_loss(
        logits[:-1],
        values,
        batch.logits,
        batch.last_actions[1:],
        batch.rewards[1:],
        batch.dones[1:],
        torch.ones_like(batch.rewards[1:]),
        discounting=args.discounting,
        baseline_cost=args.baseline_cost,
        entropy_cost=args.entropy_cost,
    )
    network.zero_grad(set_to_none=True)
    losses.loss.backward()
    return losses._asdict()


class Learner:
    """Learner threads: each takes a batch of full buffers, frees them, and waits for its turn to learn.

    They run while its context is entered; `done` is set when all have finished or one has failed.
    """

    def __init__(
        self, args: Args, network: torch.nn.Module, shared: Shared, log: RunLog, clock: Clock
    ):
        """Prepare to train a network, on the device that it lies on."""
        self.version = 1
        self.error: BaseException | None = None
        self.done = threading.Event()
        self._stopping = threading.Event()
        self._args = args
        self._network = network
        self._shared = shared
        self._log = log
        self._clock = clock
        self._device = next(network.parameters()).device
        self._optimizer, self._schedule = make_optimizer(args, network)
        self._batch_lock, self._learn_lock = threading.Lock(), threading.Lock()
        batch_steps = args.unroll_length * args.batch_size
        self._num_updates = self._batches_left = -(-args.total_steps // batch_steps)
        self._last_update = 0.0
        self._threads = [
            threading.Thread(target=self._run, name=f"learner-{i}", daemon=True)
            for i in range(args.num_learner_threads)
        ]

    def __enter__(self) -> "Learner":
        """Start the threads."""
        self._running = len(self._threads)
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the threads, also those that wait for a full buffer.

        A thread that does not stop in time, because its update takes long, touches neither buffers nor
        record afterwards.
        """
        self._stopping.set()
        self._shared.full.put(STOP)
        for thread in self._threads:
            thread.join(SECONDS_TO_STOP)
        if not any(thread.is_alive() for thread in self._threads):
            self._shared.free.close()
            self._shared.full.close()

    def _next_batch(self) -> list[int] | None:
        """Wait for as many full buffers as a batch has; None when there is nothing left to learn."""
        if not self._batches_left:
            return None
        self._batches_left -= 1
        indices: list[int] = []
        while len(indices) < self._args.batch_size:
            index = self._shared.full.get()
            if index == STOP:
                self._batches_left = 0  # for the other threads
                return None
            indices.append(index)
        return indices

    def _run(self) -> None:
        try:
            while True:
                with self._batch_lock:
                    before = self._clock()
                    indices = self._next_batch()
                    get_time = self._clock() - before
                if indices is None:
                    break
                batch, origin = take_batch(self._shared.buffers, indices, self._args, self._device)
                if self._stopping.is_set():
                    break
                for index in indices:
                    self._shared.free.put(index)
                self._learn(batch, origin, get_time)
        except BaseException as error:
            with self._learn_lock:
                self.error = self.error or error
            self.done.set()
        with self._batch_lock:
            self._running -= 1
            if not self._running:
                self.done.set()

    def _learn(self, batch: Batch, origin: Origin, get_time: float) -> None:
        args = self._args
        with self._learn_lock:
            before = self._clock()
            rate = self._optimizer.param_groups[0]["lr"]
            losses = compute_gradient(self._network, batch, args)
            norm = torch.nn.utils.clip_grad_norm_(
                self._network.parameters(), args.grad_norm_clipping
            )
            self._optimizer.step()
            self._schedule.step()
            losses = {name: value.item() for name, value in losses.items()}
            if not np.isfinite(losses["loss"]):
                raise FloatingPointError(f"the loss of update {self.version} is {losses['loss']}")
            if args.hardware.learner_delay == "learning":
                self._stopping.wait(args.hardware.learner_delay_seconds)
            if self._stopping.is_set():
                return
            used = self.version
            self.version += 1
            if args.hardware.learner_delay == "learning" or not args.hardware.learner_delay_seconds:
                self._broadcast()
            now = self._clock()
            entropy = losses["entropy"] / losses.pop("count")
            metrics = losses | {"entropy": entropy, "grad_norm": float(norm), "learning_rate": rate}
            self._record(origin, used, now, get_time, now - before, metrics)
        if args.hardware.learner_delay == "broadcast" and args.hardware.learner_delay_seconds:
            self._stopping.wait(args.hardware.learner_delay_seconds)
            with self._learn_lock:
                self._broadcast()

    def _broadcast(self) -> None:
        """Copy the parameters into the actors' model, in place, while they act with it."""
        self._shared.policy.begun[0] = self.version
        self._shared.policy.network.load_state_dict(self._network.state_dict())
        self._shared.policy.version[0] = self.version

    def _record(
        self,
        origin: Origin,
        used: int,
        now: float,
        get_time: float,
        training_time: float,
        metrics: dict[str, float],
    ) -> None:
        args = self._args
        updates = self.version - 1
        step = updates * args.unroll_length * args.batch_size
        times = Times(*origin.times.mean(axis=0).tolist())
        marked = updates == self._num_updates or updates % FINGERPRINT_EVERY == 0
        update = Update(
            version=self.version,
            step=step,
            wall_time=round(now, 4),
            update_seconds=round(now - self._last_update, 6),
            **metrics,
            rollout_queue_get_time=round(get_time, 6),
            params_queue_get_time=0.0,  # actors never wait for parameters
            rollout_queue_put_time=round(times.put_time, 6),
            rollout_time=round(times.rollout_time, 6),
            inference_time=round(times.inference_time, 6),
            env_time=round(times.env_time, 6),
            training_time=round(training_time, 6),
            fingerprint=fingerprint_network(self._network) if marked else None,
        )
        rollouts = []
        for b, (actor, number) in enumerate(zip(origin.actors, origin.numbers, strict=True)):
            versions = run_lengths(origin.versions[b])
            rollouts.append(
                Rollout(
                    actor=int(actor),
                    group=None,
                    rollout=int(number),
                    steps=args.unroll_length,
                    wall_time=round(float(origin.times[b, 0]), 4),
                    version_first=versions[0][0],
                    version_last=versions[-1][0],
                    versions=versions,
                    learner_version=used,
                    mixed_steps=int(origin.mixed_steps[b]),
                )
            )
        episodes = [
            Episode(
                step=step,
                wall_time=round(float(origin.times[b, 0]), 4),
                env_index=int(origin.actors[b]),
                episode_return=float(origin.episode_returns[b, t]),
                length=int(origin.episode_lengths[b, t]),
            )
            for b, t in np.argwhere(origin.dones).tolist()
        ]
        self._last_update = now
        self._log.write(update, rollouts, episodes)


def setting_name(args: Args) -> str:
    """Name the hardware setting of a run by what the paper varies."""
    name = f"actors{args.num_actors}"
    if args.hardware.learner_delay_seconds:
        name += f"-{args.hardware.learner_delay}{args.hardware.learner_delay_seconds:g}"
    if args.hardware.actor_delay_seconds:
        name += f"-acting{args.hardware.actor_delay_seconds:g}"
    return name


class Plan(NamedTuple):
    """A run that has been checked and may begin."""

    args: Args
    run: RunId
    spec: EnvSpec
    network: torch.nn.Module
    network_name: str
    num_buffers: int


@input_checks()
def prepare(args: Args) -> Plan:
    """Check everything that can be wrong with a run; nothing is written yet.

    Raises:
      BadInput: with one line.
      RecordError: if there is a record already and it may not be overwritten.
    """
    check_args(args)
    num_buffers = args.num_buffers or max(2 * args.num_actors, args.batch_size)
    if num_buffers < args.num_actors or num_buffers < args.batch_size:
        raise BadInput(
            f"--num-buffers {num_buffers}: needs at least one per actor ({args.num_actors}) and as "
            f"many as are in a batch ({args.batch_size})"
        )
    if num_buffers > LARGEST_QUEUE:
        raise BadInput(f"--num-buffers {num_buffers}: at most {LARGEST_QUEUE}")
    run = run_id("monobeast", args.env, args.seed, args.run, setting_name(args))
    check_run(run, args.num_actors, overwrite=args.run.overwrite, new=args.mode == "train")
    spec = as_stepped(describe_env(args.env, args.atari_preprocessing))
    name = choose_network(args.network, spec)
    orthogonal = args.initialization == "orthogonal"
    if orthogonal and (name != "nature" or args.use_lstm):
        raise BadInput("--initialization orthogonal: needs --network nature, without an LSTM")
    torch.manual_seed(args.seed)
    network = make_network(name, spec.obs_shape, spec.num_actions, use_lstm=args.use_lstm)
    if orthogonal:
        orthogonal_(network)
    return Plan(args, run, spec, network, name, num_buffers)


def begin_log(plan: Plan, device: torch.device, torch_threads: int, clock: Clock) -> RunLog:
    """Begin the record of a run."""
    args = plan.args
    chosen = {"network": plan.network_name, "num_buffers": plan.num_buffers}
    hardware = asdict(args.hardware) | describe_device(device)
    hardware |= {"torch_threads": torch_threads, "num_processes": args.num_actors + 1}
    info = run_info(
        plan.run,
        program="monobeast_study",
        hyperparameters=hyperparameters(args) | chosen,
        hardware=hardware,
        packages=PACKAGES,
    )
    info.started = clock.started
    return RunLog(
        plan.run,
        info,
        total_steps=args.total_steps,
        overwrite=args.run.overwrite,
        progress="lines" if args.run.progress else None,
    )


def train(plan: Plan) -> None:
    """Start actors and learner, train until all steps are learned from, and stop them."""
    args = plan.args
    core_shape = (0,)
    if isinstance(plan.network, Recurrent):
        core_shape = (2, *plan.network.initial_state(1)[0][:, 0].shape)
    share_parameters(plan.network)
    shared = Shared(
        Policy(plan.network, *(shared_tensor((1,), torch.int64) for _ in range(2))),
        make_buffers(plan.num_buffers, args.unroll_length, plan.spec, core_shape),
        IndexQueue(),
        IndexQueue(),
    )
    shared.policy.version[0] = shared.policy.begun[0] = 1
    for index in range(plan.num_buffers):
        shared.free.put(index)
    clock = Clock()
    with WorkerProcesses() as processes:
        # Forked before any other thread exists or a GPU is initialized. They share what is imported, so
        # 80 of them start in seconds and fit into memory.
        torch.set_num_threads(1)
        for actor in range(args.num_actors):
            processes.fork(f"actor {actor}", act, actor, args, plan.spec, shared, clock)
        use_cuda = not args.hardware.disable_cuda and torch.cuda.is_available()
        device = torch.device("cuda" if use_cuda else "cpu")
        torch_threads = args.hardware.torch_threads or len(os.sched_getaffinity(0))
        torch.set_num_threads(torch_threads)
        network = make_network(
            plan.network_name, plan.spec.obs_shape, plan.spec.num_actions, use_lstm=args.use_lstm
        )
        network.load_state_dict(plan.network.state_dict())
        network.to(device)
        with begin_log(plan, device, torch_threads, clock) as log:
            with Learner(args, network, shared, log, clock) as learner:
                while not learner.done.wait(timeout=0.1):
                    processes.check()
            if learner.error is not None:
                raise learner.error
            save_parameters(network, plan.run.directory / "model.npz")


def test(plan: Plan) -> None:
    """Play episodes with a trained model, taking its most probable actions, and print their returns."""
    path = plan.run.directory / "model.npz"
    if not path.is_file():
        raise BadInput(f"--mode test: there is no {path}; --mode train makes it")
    with input_checks():
        load_parameters(plan.network, path)
    network, args = plan.network, plan.args
    env = Environment(
        plan.spec.env_id, env_seeds(args.seed, args.num_actors, 1)[0], args.atari_preprocessing
    )
    recurrent = isinstance(network, Recurrent)
    state = network.initial_state(1) if recurrent else None
    last, action = env.initial(), 0
    returns: list[float] = []
    with torch.inference_mode():
        while len(returns) < TEST_EPISODES:
            obs = torch.from_numpy(last.obs)[None]
            if recurrent:
                inputs = torch.tensor([[last.reward]]), torch.tensor([[last.done]])
                logits, _, state = network(obs[None], *inputs, torch.tensor([[action]]), state)
                logits = logits[0]
            else:
                logits, _ = network(obs)
            action = int(logits[0].argmax())
            last = env.step(action)
            if last.done:
                returns.append(last.episode_return)
                print(
                    f"Episode ended after {last.episode_length} steps. "
                    f"Return: {last.episode_return:.1f}"
                )
    print(f"Average returns over {len(returns)} episodes: {np.mean(returns):.1f}")


def main(args: Args) -> None:
    """Train or test."""
    plan = prepare(args)
    if args.mode == "test":
        test(plan)
    else:
        train(plan)


if __name__ == "__main__":
    run_command_line(Args, main, "IMPALA as monobeast builds it, instrumented.")
