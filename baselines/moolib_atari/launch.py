"""Starts the peers of a run, and sees to them: the broker of moolib, and more.

The broker owns the store that the peers share, decides who is in the group (group.py), and has written
down what the peers tell (recorder.py). Under torchrun there is none: the first peer does the last two.
"""

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import PrefixStore, Store, TCPStore

from baselines.moolib_atari.experiment import Peer, ignore_interrupts
from baselines.moolib_atari.group import Membership, pop_all
from baselines.moolib_atari.moolib_transport import start_broker
from baselines.moolib_atari.options import Args, Plan, Torchrun
from baselines.moolib_atari.recorder import LOG, Recorder
from cleanba.environments import EnvSpec

HOST = "127.0.0.1"
STORE_TIMEOUT = timedelta(minutes=5)
SECONDS_BETWEEN_LOOKS = 0.02
IMPORTED_LATE = (
    "envpool",
    "torch._dynamo",
)  # by the first environments, and by the first optimiser
SECONDS_TO_STOP = 10.0  # for peers to end by themselves before they are killed
BEGUN = "begun"  # key of torchrun's store: which attempt began the record
STARTED = "started"  # key of an attempt's store: when the run began, as `time.time()`
# exit codes of a peer that has learned from all steps, has failed, or was told to stop (as shells say it)
LEFT, FAILED, TERMINATED = 0, 1, 128 + signal.SIGTERM


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
    try:
        store = TCPStore(HOST, port, is_master=False, timeout=STORE_TIMEOUT)
        peer = Peer(args, spec, network, index, directory, started)
        peer.run(store, lambda: bool(terminated))
        code = TERMINATED if terminated else LEFT
    except torch.distributed.DistNetworkError:
        code = TERMINATED  # the broker has gone: so has the run
    except BaseException:
        import traceback

        traceback.print_exc()
        code = FAILED
    os._exit(code)


@contextlib.contextmanager
def _signals_wait() -> Iterator[None]:
    """Let no signal come between taking a message out of the store and having written it down."""
    arrived: list[int] = []
    handlers = {
        number: signal.signal(number, lambda number, _: arrived.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if arrived:
            signal.raise_signal(arrived[0])


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
        self._membership = Membership(self._store)
        self._args = args
        self._make = (args, spec, network)
        self._directory = directory
        self._recorder = recorder
        self._started = time.time()
        # Peers are forked from a clean process that has imported everything, so that one can be started
        # at any time, and starts fast.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__, *IMPORTED_LATE])
        self._peers: dict[str, Any] = {}
        self._restarts_left = args.max_restarts
        self._coming: set[str] = set()  # started again, and not heard of since
        self._finishing = False  # a peer has learned from all steps

    def _start(self, index: int) -> None:
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

    def run(self) -> None:
        """Start the peers, and see to them until all have left.

        Raises:
          PeerFailed: if a peer fails by an error of its own, or none is left that has what the group has
            learned.
        """
        if self._args.transport == "moolib":
            start_broker(self._store)
        for index in range(self._args.num_peers):
            self._start(index)
        awaited = set(self._peers)  # the first generation is all of them
        while self._peers:
            self._hear()
            awaited.difference_update(self._membership.look())
            for name in self._ended():
                process = self._peers.pop(name)
                awaited.discard(name)
                self._hear()  # its last words, before another of its name speaks
                self._see_off(name, process)
            if not awaited:
                self._membership.publish(begun=self._recorder.begun)
            time.sleep(SECONDS_BETWEEN_LOOKS)
        self._hear()

    def _see_off(self, name: str, process: Any) -> None:
        """Say what the end of a peer means for the others."""
        code = process.exitcode
        # Who has left makes no new generation: the others are about to leave as well.
        self._membership.remove(name, regroup=code != LEFT)
        if code == LEFT:
            self._finishing = True
            for late in self._coming & set(self._peers):
                self._peers[late].terminate()
            return
        if code != TERMINATED and code > 0:
            raise PeerFailed(f"{name} has failed (exit code {code}); its own output says why")
        if self._finishing and name in self._coming:
            return  # it came too late
        how = signal.Signals(-code if code < 0 else signal.SIGTERM).name
        print(f"{name} (process {process.pid}) was ended by {how}", flush=True)
        if self._finishing:
            return
        # What the group has learned is with those that were there.
        lost = self._recorder.begun and not set(self._peers) - self._coming
        if self._restarts_left and not lost:
            self._restarts_left -= 1
            print(f"{name} is started again", flush=True)
            index, size = int(name.rpartition("-")[2]), self._args.num_actor_batches
            self._recorder.restarted(range(index * size, (index + 1) * size))
            self._start(index)
            self._coming.add(name)
        elif lost or not self._peers:
            raise PeerFailed(f"{name} was ended by {how}, and there is no other peer")

    def _hear(self) -> None:
        with _signals_wait():
            for said in pop_all(self._store, LOG):
                self._recorder.hear(said)
                if "rollouts" in said:
                    self._coming.discard(said["peer"])

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


def torchrun_store() -> TCPStore:
    """Return the store of torchrun, which lives through its restarts."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(address, port, is_master=False, timeout=STORE_TIMEOUT)


def find_torchrun() -> Torchrun | None:
    """Return what torchrun says to this process, where it has started it."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    names = ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
    rank, world_size, attempt = (int(os.environ[name]) for name in names)
    resumes = False
    if attempt:
        store = torchrun_store()
        resumes = store.check([BEGUN]) and int(store.get(BEGUN)) < attempt
    return Torchrun(rank, world_size, attempt, resumes)


def say_begun(torchrun: Torchrun) -> None:
    """Say to later attempts that the record is this run's, just before it begins."""
    torchrun_store().set(BEGUN, str(torchrun.attempt))


def train_under_torchrun(
    plan: Plan, torchrun: Torchrun, recorder: Recorder | None = None, seconds_before: float = 0.0
) -> None:
    """Be one peer of a run whose processes torchrun starts, all of them again if one is lost.

    Args:
      plan: the run.
      torchrun: which of its processes this is.
      recorder: of what the peers tell, in the first of them, whose record has begun.
      seconds_before: that the run had taken when the checkpoint was made, from which it goes on; said by
        the first.
    """
    shared = torchrun_store()
    store = PrefixStore(f"attempt-{torchrun.attempt}", shared)
    ended = threading.Event()
    failures: list[BaseException] = []

    def serve() -> None:
        try:
            _serve(store, torchrun.world_size, recorder, ended)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=serve, daemon=True)
    if recorder is not None:
        thread.start()
        store.set(STARTED, repr(time.time() - seconds_before))
    # One clock for all: a record is cut at the time of a checkpoint, whoever made that. Looked for, not
    # waited for: no signal ends a wait inside the store.
    while not store.check([STARTED]):
        time.sleep(SECONDS_BETWEEN_LOOKS)
    started = float(store.get(STARTED))
    if plan.args.transport == "moolib" and torchrun.rank == 0:
        start_broker(store)
    try:
        peer = Peer(plan.args, plan.spec, plan.network, torchrun.rank, plan.run.directory, started)
        peer.run(store, lambda: bool(failures), resume=torchrun.resumes)
    finally:
        ended.set()
        if recorder is not None:
            thread.join()
    if failures:
        raise failures[0]


def _serve(store: Store, num_peers: int, recorder: Recorder, ended: threading.Event) -> None:
    """Let all peers in at once, and write down what they tell until the own one has ended."""
    membership = Membership(store)
    while not ended.wait(SECONDS_BETWEEN_LOOKS):
        num_peers -= len(membership.look())
        if not num_peers:
            membership.publish(begun=recorder.begun)
        for said in pop_all(store, LOG):
            recorder.hear(said)
    for said in pop_all(store, LOG):
        recorder.hear(said)
