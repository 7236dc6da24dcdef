"""Starts the peers of a run, says who is in the group, and writes down what they tell.

The broker of moolib, and more: it owns the store that the peers share. A peer that joins or leaves makes a
new generation of the group; the peers of the last one that live on are in the next.
"""

import contextlib
import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import PrefixStore, Store, TCPStore

from baselines.moolib_atari.accumulator import GENERATION, JOINING
from baselines.moolib_atari.experiment import LOG, Peer, ignore_interrupts
from baselines.moolib_atari.moolib_transport import start_broker
from baselines.moolib_atari.options import Args, Plan, Torchrun
from baselines.run_log import RunLog
from cleanba.environments import EnvSpec

HOST = "127.0.0.1"
STORE_TIMEOUT = timedelta(minutes=5)
SECONDS_BETWEEN_LOOKS = 0.02
SECONDS_TO_STOP = 10.0  # for peers to end by themselves before they are killed
FAILED, LEFT = 1, 0  # exit codes of a peer


class PeerFailed(RuntimeError):
    """A peer has ended by an error, or there is none left."""


def peer_process(
    port: int,
    args: Args,
    spec: EnvSpec,
    network: str,
    index: int,
    directory: Path,
    started: float,
) -> None:
    """Run a peer: the whole of its process."""
    ignore_interrupts()
    terminated: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: terminated.append(number))
    code = LEFT
    try:
        store = TCPStore(HOST, port, is_master=False, timeout=STORE_TIMEOUT)
        peer = Peer(args, spec, network, index, directory, started)
        peer.run(store, lambda: bool(terminated))
    except torch.distributed.DistNetworkError:
        code = LEFT  # the broker has gone: so has the run
    except BaseException:
        import traceback

        traceback.print_exc()
        code = FAILED
    os._exit(code)


class Recorder:
    """Turns what the peers tell into a run record."""

    def __init__(self, log: RunLog):
        """Write to a log that has begun."""
        self._log = log
        self._losses: dict[int, list[dict[str, float]]] = {}
        self._rollouts: list[dict[str, Any]] = []
        self._episodes: list[dict[str, Any]] = []
        self.steps = 0
        self.updates = 0

    def hear(self, message: str) -> None:
        """Take in one message of a peer."""
        said = json.loads(message)
        self._episodes += said.get("episodes", [])
        if "rollouts" in said:
            self._rollouts += said["rollouts"]
            self._losses.setdefault(said["version"], []).append(said["losses"])
        if "update" in said:
            self._write(said["update"])

    def _write(self, update: dict[str, Any]) -> None:
        # Of all peers whose gradients were computed at that version; a message may still be under way.
        losses = self._losses.pop(update["gradient_version"], [])
        self._losses = {v: some for v, some in self._losses.items() if v > update["version"] - 3}
        names = losses[0] if losses else ("loss", "policy_loss", "value_loss", "entropy")
        means = {
            name: sum(some[name] for some in losses) / len(losses) if losses else None
            for name in names
            if name != "count"
        }
        # one loop does everything: nobody waits in a queue
        waits = dict.fromkeys(
            ("rollout_queue_get_time", "params_queue_get_time", "rollout_queue_put_time"), 0.0
        )
        self._log.write(
            update | means | waits | {"fingerprint": None}, self._rollouts, self._episodes
        )
        self._rollouts, self._episodes = [], []
        self.steps, self.updates = update["step"], self.updates + 1


def train_under_torchrun(plan: Plan, torchrun: Torchrun, recorder: Recorder | None) -> None:
    """Be one peer of a run whose processes torchrun starts, all of them again if one is lost.

    Args:
      plan: the run.
      torchrun: which of its processes this is.
      recorder: of what the peers tell, in the first of them.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    shared = TCPStore(address, port, is_master=False, timeout=STORE_TIMEOUT)
    store = PrefixStore(f"attempt-{torchrun.attempt}", shared)
    ended = threading.Event()
    lines = []
    if recorder is not None:
        thread = threading.Thread(
            target=_serve, args=(store, torchrun.world_size, recorder, ended), daemon=True
        )
        thread.start()
        lines.append(thread)
    if plan.args.transport == "moolib" and torchrun.rank == 0:
        start_broker(store)
    try:
        peer = Peer(
            plan.args, plan.spec, plan.network, torchrun.rank, plan.run.directory, time.time()
        )
        peer.run(store, lambda: False)
    finally:
        ended.set()
        for thread in lines:
            thread.join(SECONDS_TO_STOP)


def _serve(store: Store, num_peers: int, recorder: Recorder, ended: threading.Event) -> None:
    """Let all peers in at once, and write down what they tell until the own one has ended."""
    names: list[str] = []
    while len(names) < num_peers and not ended.wait(SECONDS_BETWEEN_LOOKS):
        names += _pop_all(store, JOINING)
    store.set(GENERATION, json.dumps([1, sorted(names)]))
    while not ended.wait(SECONDS_BETWEEN_LOOKS):
        for message in _pop_all(store, LOG):
            recorder.hear(message)
    for message in _pop_all(store, LOG):
        recorder.hear(message)


def _pop_all(store: Store, queue: str) -> list[str]:
    return [store.queue_pop(queue, block=False).decode() for _ in range(store.queue_len(queue))]


class Broker:
    """Owns the store, the peers and the group."""

    def __init__(
        self, args: Args, spec: EnvSpec, network: str, directory: Path, recorder: Recorder
    ):
        """Open the store.

        Args:
          args: the command line.
          spec: of the environment.
          network: name of the network.
          directory: of the run record.
          recorder: of what the peers tell.
        """
        self._store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        self._make = (args, spec, network)
        self._directory = directory
        self._recorder = recorder
        self._started = time.time()
        # Peers are forked from a clean process that has imported everything, so that one can be started
        # at any time, and starts fast.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__])
        self._peers: dict[str, Any] = {}
        self._generation = 0
        self._members: list[str] = []

    def start(self, index: int) -> None:
        """Start a peer."""
        args, spec, network = self._make
        name = f"peer-{index}"
        process = self._context.Process(
            target=peer_process,
            args=(self._store.port, args, spec, network, index, self._directory, self._started),
            name=name,
            daemon=True,
        )
        process.start()
        self._peers[name] = process

    def run(self, num_peers: int, max_restarts: int) -> None:
        """Start the peers, and see to them until all have left.

        Args:
          num_peers: how many to start.
          max_restarts: how often a killed peer is started again, in all.

        Raises:
          PeerFailed: if a peer fails by an error of its own, or all have been killed.
        """
        if self._make[0].transport == "moolib":
            start_broker(self._store)
        for index in range(num_peers):
            self.start(index)
        changed = False
        awaited = set(self._peers)  # the first generation is all of them
        while self._peers:
            self._hear()
            for name in _pop_all(self._store, JOINING):
                self._members.append(name)
                awaited.discard(name)
                changed = True
            for name in self._ended():
                process = self._peers.pop(name)
                awaited.discard(name)
                if process.exitcode == LEFT:
                    continue  # it has learned from all steps, and the others are about to
                if name in self._members:
                    self._members.remove(name)
                    changed = True
                if process.exitcode == FAILED:
                    raise PeerFailed(f"{name} has failed; its own output says why")
                how = signal.Signals(-process.exitcode).name
                print(f"{name} (process {process.pid}) was ended by {how}", flush=True)
                if max_restarts:
                    max_restarts -= 1
                    print(f"{name} is started again", flush=True)
                    self.start(int(name.rpartition("-")[2]))
                elif not self._peers:
                    raise PeerFailed(f"{name} was ended by {how}, and there is no other peer")
            if changed and self._members and not awaited:
                changed = False
                self._generation += 1
                self._store.set(GENERATION, json.dumps([self._generation, self._members]))
            time.sleep(SECONDS_BETWEEN_LOOKS)
        self._hear()

    def _hear(self) -> None:
        for message in _pop_all(self._store, LOG):
            self._recorder.hear(message)

    def _ended(self) -> list[str]:
        sentinels = {process.sentinel: name for name, process in self._peers.items()}
        ended = multiprocessing.connection.wait(list(sentinels), timeout=0)
        names = [sentinels[sentinel] for sentinel in ended]
        for name in names:
            self._peers[name].join()
        return names

    def end(self) -> None:
        """End all peers that are left."""
        for process in self._peers.values():
            process.terminate()
        deadline = time.monotonic() + SECONDS_TO_STOP
        for process in self._peers.values():
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        with contextlib.suppress(RuntimeError):
            self._hear()
