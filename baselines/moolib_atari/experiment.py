"""One peer of moolib's Atari example: it acts, learns and exchanges gradients in one loop.

    while steps are left to learn from:
        receive what came from the other peers
        if there are gradients:  step the optimizer; the model version rises, also in the middle of unrolls
        elif there is a batch:   compute its gradients, and hand them to the accumulator
        else:                    take one step in the next batch of environments

The last step of an unroll is the first of the next. So the first action of an unroll was always chosen
before the learner learned from the unroll before.
"""

import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from baselines.moolib_atari.accumulator import Accumulator
from baselines.moolib_atari.group import Group
from baselines.moolib_atari.moolib_transport import MoolibAccumulator
from baselines.moolib_atari.options import Args
from baselines.moolib_atari.recorder import LOG
from baselines.moolib_atari.sealed_store import SealedStore
from baselines.torch_io import save_arrays
from baselines.torch_losses import impala_loss
from baselines.torch_networks import fixup_, make_network
from cleanba.environments import EnvSpec, EpisodeStatistics, env_seeds, make_envs
from cleanba.record import Episode, Rollout
from cleanba.record.files import read_arrays
from cleanba.run.log import run_lengths

CHECKPOINT = "checkpoints/latest.npz"  # in the folder of the record


class Unroll(NamedTuple):
    """T + 1 steps of B environments; step t is an observation and the action that it led to."""

    obs: np.ndarray  # [T + 1, B, ...]
    rewards: np.ndarray  # float32 [T + 1, B], unclipped, of the step to the observation
    dones: np.ndarray  # bool [T + 1, B], the observation ends an episode and its action only resets
    actions: np.ndarray  # int32 [T + 1, B]
    logits: np.ndarray  # float32 [T + 1, B, num_actions]
    versions: np.ndarray  # int64 [T + 1]


class Piece(NamedTuple):
    """Some environments of an unroll."""

    unroll: Unroll
    actor: int  # environment batch, over all peers
    number: int  # of its unroll, from 1
    columns: slice
    wall_time: float  # seconds since the run started, when the unroll was complete


class EnvBatch:
    """A batch of environments, and the unroll that it is in."""

    def __init__(self, args: Args, spec: EnvSpec, index: int):
        """Make and reset the environments.

        Args:
          args: the command line.
          spec: of the environment.
          index: of the batch, over all peers.
        """
        size = args.actor_batch_size
        seeds = env_seeds(args.seed, index * size, size)
        threads = min(args.hardware.num_actor_cpus, size)
        self._envs = make_envs(spec.env_id, seeds, threads, args.atari_preprocessing)
        self._ids = np.arange(size, dtype=np.int32)
        self._statistics = EpisodeStatistics(size)
        self._length = args.unroll_length
        self._num_actions = spec.num_actions
        self._shape = (size, *spec.obs_shape)
        self._dtype = spec.obs_dtype
        self.index = index
        self._number = 0
        self._t = 0
        self._unroll = self._new_unroll()
        self._envs.async_reset()

    def _new_unroll(self) -> Unroll:
        steps, size = self._length + 1, self._shape[0]
        return Unroll(
            np.empty((steps, *self._shape), self._dtype),
            np.empty((steps, size), np.float32),
            np.empty((steps, size), bool),
            np.empty((steps, size), np.int32),
            np.empty((steps, size, self._num_actions), np.float32),
            np.empty(steps, np.int64),
        )

    def receive(self) -> np.ndarray:
        """Wait for the environments; return their observations [B, ...]."""
        result = self._envs.recv()
        t, unroll = self._t, self._unroll
        unroll.obs[t] = result[0]
        if len(result) == 2:  # the first observations, of a reset
            unroll.rewards[t], unroll.dones[t] = 0.0, False
        else:
            _, reward, terminated, truncated, info = result
            unroll.rewards[t] = info.get("reward", reward)
            np.logical_or(terminated, truncated, out=unroll.dones[t])
        return unroll.obs[t]

    def send(self, actions: np.ndarray, logits: np.ndarray, version: int) -> Piece | None:
        """Send the actions for the observations that were received; return an unroll that is complete."""
        t, unroll = self._t, self._unroll
        unroll.actions[t], unroll.logits[t], unroll.versions[t] = actions, logits, version
        self._envs.send(unroll.actions[t], self._ids)
        self._t += 1
        if self._t <= self._length:
            return None
        self._number += 1
        self._t = 1
        self._unroll = self._new_unroll()
        for new, old in zip(self._unroll, unroll, strict=True):
            new[0] = old[-1]
        return Piece(unroll, self.index, self._number, slice(0, self._shape[0]), 0.0)

    def episodes(self, unroll: Unroll) -> list[Any]:
        """Return the episodes that ended in an unroll; its first step belongs to the unroll before."""
        return self._statistics.count(unroll.rewards[1:], unroll.dones[1:])


class LearnBatcher:
    """Cuts unrolls, environment by environment, into batches of one size."""

    def __init__(self, size: int, largest: int):
        """Begin empty.

        Args:
          size: number of environments in a batch.
          largest: number of environments in all waiting unrolls at which the batcher is full.
        """
        self._size = size
        self._largest = largest
        self._pieces: deque[Piece] = deque()

    def put(self, piece: Piece) -> None:
        """Add an unroll."""
        self._pieces.append(piece)

    def empty(self) -> bool:
        """Whether there is no whole batch."""
        return self._waiting() < self._size

    def full(self) -> bool:
        """Whether acting has to wait for learning, such as while the group waits for a lost peer."""
        return self._waiting() >= self._largest

    def _waiting(self) -> int:
        return sum(p.columns.stop - p.columns.start for p in self._pieces)

    def get(self) -> list[Piece]:
        """Take a batch, in the order in which unrolls were complete."""
        taken, missing = [], self._size
        while missing:
            piece = self._pieces.popleft()
            start, stop = piece.columns.start, piece.columns.stop
            end = min(stop, start + missing)
            taken.append(piece._replace(columns=slice(start, end)))
            missing -= end - start
            if end < stop:
                self._pieces.appendleft(piece._replace(columns=slice(end, stop)))
        return taken


SECONDS_WHILE_FULL = 0.002  # between two looks at the group
NUMBERS = ("version", "steps", "train_time", "wall_time")


class LearnerState:
    """The state that a new peer receives and a checkpoint holds."""

    def __init__(self, args: Args, spec: EnvSpec, network: str, device: torch.device):
        """Make a new model and its optimizer."""
        torch.manual_seed(args.seed)
        self.model = make_network(network, spec.obs_shape, spec.num_actions)
        if network == "resnet":
            fixup_(self.model.trunk)
        self.model.to(device)
        self.optimizer = torch.optim.Adam(
            self.model.parameters(), lr=args.learning_rate, eps=args.adam_epsilon
        )
        self._args = args
        self.version = 1
        self.steps = 0  # learned from, over all peers
        self.train_time = 0.0  # seconds in a group
        self.wall_time = 0.0  # seconds since the run started, when it was saved

    def step(self, batch_size: int) -> tuple[float, float]:
        """Step the optimizer; return the learning rate and the norm of the gradients."""
        args = self._args
        done = (self.version - 1) * args.unroll_length * args.virtual_batch_size
        rate = args.learning_rate * max(1 - done / args.total_steps, 0.0)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), args.grad_norm_clipping)
        self.optimizer.step()
        self.version += 1
        self.steps += batch_size * args.unroll_length
        return rate, float(norm)

    def save(self) -> dict[str, np.ndarray]:
        """Return everything as arrays."""
        arrays = {
            f"model/{name}": value.detach().cpu().numpy()
            for name, value in self.model.state_dict().items()
        }
        for index, moments in self.optimizer.state_dict()["state"].items():
            for name, value in moments.items():
                arrays[f"optimizer/{index}/{name}"] = value.detach().cpu().numpy()
        return arrays | {name: np.array(getattr(self, name)) for name in NUMBERS}

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Load what `save` returned."""
        self.model.load_state_dict(
            {
                name.removeprefix("model/"): torch.from_numpy(np.array(value))
                for name, value in arrays.items()
                if name.startswith("model/")
            }
        )
        moments: dict[int, dict[str, torch.Tensor]] = {}
        for name, value in arrays.items():
            if name.startswith("optimizer/"):
                _, index, what = name.split("/")
                moments.setdefault(int(index), {})[what] = torch.from_numpy(np.array(value))
        state = self.optimizer.state_dict()
        self.optimizer.load_state_dict(state | {"state": moments})
        for name in NUMBERS:
            setattr(self, name, arrays[name].item())


def compute_gradients(
    model: torch.nn.Module, pieces: list[Piece], args: Args, device: torch.device
) -> dict[str, float]:
    """Leave the gradients of a batch's mean loss in the model; return the losses."""

    def batch_of(name: str) -> torch.Tensor:
        parts = [getattr(p.unroll, name)[:, p.columns] for p in pieces]
        return torch.from_numpy(np.concatenate(parts, axis=1)).to(device)

    obs, rewards, dones = batch_of("obs"), batch_of("rewards"), batch_of("dones")
    length, size = dones.shape
    logits, values = model(obs.flatten(0, 1))
    if args.reward_clip:
        rewards = rewards.clamp(-args.reward_clip, args.reward_clip)
    losses = impala_loss(
        logits.view(length, size, -1)[:-1],
        values.view(length, size),
        batch_of("logits")[:-1],
        batch_of("actions")[:-1],
        rewards[1:],
        dones[1:],
        1.0 - dones[:-1].float(),  # the step from the end of an episode only resets
        discounting=args.discounting,
        baseline_cost=args.baseline_cost,
        entropy_cost=args.entropy_cost,
    )
    count = losses.count.clamp(min=1)
    (losses.loss / count).backward()  # means, as in moolib
    return {name: (value / count).item() for name, value in losses._asdict().items()}


def describe_pieces(pieces: list[Piece], length: int, version: int) -> list[Rollout]:
    """Return the rows of the rollouts of a batch that is learned from at a version."""
    rows = []
    for piece in pieces:
        # the last step is only there to bootstrap from: its action is the next unroll's first
        versions, size = piece.unroll.versions[:length], piece.columns.stop - piece.columns.start
        rows.append(
            Rollout(
                actor=piece.actor,
                group=None,
                rollout=piece.number,
                first_env=piece.columns.start,
                envs=size,
                steps=length * size,
                wall_time=round(piece.wall_time, 4),
                version_first=int(versions[0]),
                version_last=int(versions[-1]),
                versions=[(v, count * size) for v, count in run_lengths(versions)],
                learner_version=version,
            )
        )
    return rows


def _peers_here(args: Args) -> int:
    """Return how many of the peers run on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", args.hardware.num_peers))


def _share_cores(args: Args) -> None:
    """Set the number of torch's threads in this peer.

    By default torch takes a thread for every core in each of several peers, which then compete for the
    cores: two peers on two cores were ten times slower than one.
    """
    if args.hardware.torch_threads:
        torch.set_num_threads(args.hardware.torch_threads)
    elif _peers_here(args) > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(len(os.sched_getaffinity(0)) // _peers_here(args), 1))


class Peer:
    """One peer, from its first step to its last."""

    def __init__(
        self,
        args: Args,
        spec: EnvSpec,
        network: str,
        index: int,
        directory: Path,
        started: float,
        host: str | None = None,
    ):
        """Make environments and model.

        Args:
          args: the command line.
          spec: of the environment.
          network: name of the network.
          index: of the peer.
          directory: of the run record; checkpoints go into it.
          started: `time.time()` of the start of the run, the same for all peers.
          host: address of this peer for the others; see `Group`.
        """
        self._host = host
        self.name = f"peer-{index}"
        self._args = args
        self._spec = spec
        self._directory = directory
        self._started = started
        use_cuda = not args.hardware.disable_cuda and torch.cuda.is_available()
        self._device = (
            torch.device("cuda", index % torch.cuda.device_count())
            if use_cuda
            else torch.device("cpu")
        )
        _share_cores(args)
        self.state = LearnerState(args, spec, network, self._device)
        self._generator = torch.Generator(self._device).manual_seed(
            env_seeds(args.seed, index, 1)[0] + 1
        )
        first = index * args.num_actor_batches
        self._batches = [EnvBatch(args, spec, first + i) for i in range(args.num_actor_batches)]
        # an unroll of each batch of environments, and two batches to learn from
        whole = args.num_actor_batches * args.actor_batch_size
        self._batcher = LearnBatcher(args.batch_size, whole + 2 * args.batch_size)
        self._times = dict.fromkeys(("env_time", "inference_time", "training_time"), 0.0)

    def clock(self) -> float:
        """Seconds since the run started."""
        return time.time() - self._started

    def _make_accumulator(self, store: SealedStore) -> Any:
        if self._args.hardware.transport == "moolib":
            timeout = self._args.recovery.peer_timeout
            return MoolibAccumulator(store.store, self.name, self.state.model, timeout)
        # nccl cannot connect two peers on one GPU
        own_gpu = self._device.type == "cuda" and torch.cuda.device_count() >= _peers_here(
            self._args
        )
        device = self._device if own_gpu else torch.device("cpu")
        group = Group(store, self.name, device, self._host)
        return Accumulator(self.state.model.parameters(), group)

    def run(self, store: SealedStore, stop: Callable[[], bool], resume: bool = False) -> None:
        """Train until the group has learned from all steps.

        Args:
          store: that all peers share.
          stop: returns whether to stop early.
          resume: resume from the run's latest checkpoint, if there is one.
        """
        args = self._args
        latest = self._directory / CHECKPOINT
        accumulator = self._make_accumulator(store)
        accumulator.set_virtual_batch_size(args.virtual_batch_size)
        if resume and latest.is_file():
            self.state.load(read_arrays(latest))
            accumulator.set_model_version(self.state.version)
        turns = self._turns()
        last_update = then = self.clock()
        last_row: tuple[int | None, dict[str, Any]] | None = None
        reported_group: int | None = 0
        while self.state.steps < args.total_steps and not stop():
            accumulator.update()
            if accumulator.wants_state():
                accumulator.set_state(self.state.save())
            if accumulator.has_new_state():
                self.state.load(accumulator.state())
            now = self.clock()
            seconds, then = now - then, now
            if not accumulator.connected():
                time.sleep(0.02)
                continue
            before, self.state.train_time = self.state.train_time, self.state.train_time + seconds
            group = accumulator.generation()
            if accumulator.is_leader():
                if _interval_elapsed(
                    args.recovery.checkpoint_interval, before, self.state.train_time
                ):
                    self._save(latest)
                if _interval_elapsed(
                    args.recovery.checkpoint_history_interval, before, self.state.train_time
                ):
                    self._save(latest.with_name(f"version-{self.state.version}.npz"))
            if group != reported_group and last_row is not None:
                # The last leader may have been lost before it reported its last step, and the next one
                # may have that step from another peer's state: so all peers report their last step.
                self._report(store, group=last_row[0], update=last_row[1])
            reported_group = group
            if accumulator.has_gradients():
                stats = accumulator.get_gradient_stats()
                computed_at = self.state.version
                rate, norm = self._timed("training_time", self.state.step, stats["batch_size"])
                accumulator.zero_gradients()
                now = max(last_update, self.clock())  # the clock may be set back
                row = {
                    "version": self.state.version,
                    "step": self.state.steps,
                    "wall_time": round(now, 4),
                    "update_seconds": round(now - last_update, 6),
                    "learning_rate": rate,
                    "grad_norm": norm,
                    "gradient_version": computed_at,
                    "virtual_batch_size": stats["batch_size"],
                    "num_gradients": stats["num_gradients"],
                    "num_skipped": stats["num_skipped"],
                    **{name: round(value, 6) for name, value in self._times.items()},
                }
                self._times = dict.fromkeys(self._times, 0.0)
                last_update, last_row = now, (group, row)
                if accumulator.is_leader():
                    self._report(store, group=group, update=row)
            elif not self._batcher.empty() and accumulator.wants_gradients():
                pieces = self._batcher.get()
                losses = self._timed(
                    "training_time", compute_gradients, self.state.model, pieces, args, self._device
                )
                if not np.isfinite(losses["loss"]):
                    raise FloatingPointError(
                        f"{self.name}: the loss at version {self.state.version} is {losses['loss']}"
                    )
                rows = describe_pieces(pieces, args.unroll_length, self.state.version)
                self._report(
                    store, group=group, version=self.state.version, losses=losses, rollouts=rows
                )
                accumulator.reduce_gradients(args.batch_size)
            else:
                if accumulator.wants_gradients():
                    accumulator.skip_gradients()
                if self._batcher.full():
                    time.sleep(SECONDS_WHILE_FULL)
                    continue
                batch = next(turns)
                complete = self._act(batch)
                if complete is not None:
                    self._batcher.put(complete._replace(wall_time=self.clock()))
                    self._report(store, episodes=self._describe_episodes(batch, complete))
        if accumulator.is_leader():
            self._save(latest)
        if not stop():
            accumulator.leave()

    def _turns(self) -> Iterator[EnvBatch]:
        while True:
            yield from self._batches

    def _act(self, batch: EnvBatch) -> Piece | None:
        """Take one step in a batch of environments, while the others' step."""
        obs = self._timed("env_time", batch.receive)
        before = time.perf_counter()
        with torch.inference_mode():
            logits, _ = self.state.model(torch.from_numpy(obs).to(self._device))
            probabilities = torch.softmax(logits, dim=-1)
            actions = torch.multinomial(probabilities, 1, generator=self._generator)[:, 0]
            actions, logits = actions.cpu().numpy(), logits.cpu().numpy()
        self._times["inference_time"] += time.perf_counter() - before
        return batch.send(actions, logits, self.state.version)

    def _describe_episodes(self, batch: EnvBatch, complete: Piece) -> list[Episode]:
        first = batch.index * self._args.actor_batch_size
        return [
            Episode(
                step=self.state.steps,
                wall_time=round(self.clock(), 4),
                env_index=first + e.index,
                episode_return=e.episode_return,
                length=e.length,
            )
            for e in batch.episodes(complete.unroll)
        ]

    def _timed(self, name: str, function: Any, *args: Any) -> Any:
        before = time.perf_counter()
        result = function(*args)
        self._times[name] += time.perf_counter() - before
        return result

    def _report(self, store: SealedStore, **what: Any) -> None:
        """Send a message to the recorder."""
        store.push(LOG, {"peer": self.name, **what})

    def _save(self, path: Path) -> None:
        path.parent.mkdir(exist_ok=True)
        self.state.wall_time = self.clock()
        save_arrays(self.state.save(), path)


def _interval_elapsed(interval: float, before: float, after: float) -> bool:
    """Whether a multiple of an interval lies between two times; the same multiples for every peer."""
    return before // interval < after // interval


def ignore_interrupts() -> None:
    """Ignore Ctrl-C and a lost terminal, which the process that launched the peers handles."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
