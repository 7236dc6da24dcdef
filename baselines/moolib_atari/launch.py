"""Starts and supervises the peers of a run: moolib's broker, and more.

The broker owns the store that the peers share, decides the members of the group (group.py), and passes the
peers' messages to the recorder (recorder.py). Under torchrun there is no broker: the first peer does the
last two.
"""

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import secrets
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed import PrefixStore, TCPStore

from baselines.moolib_atari.experiment import Peer, ignore_interrupts
from baselines.moolib_atari.group import Membership
from baselines.moolib_atari.moolib_transport import start_broker
from baselines.moolib_atari.options import Args, Plan, Torchrun
from baselines.moolib_atari.recorder import LOG, Recorder
from baselines.moolib_atari.sealed_store import (
    HOST,
    STORE_TIMEOUT,
    SealedStore,
    connect,
    open_store,
)
from cleanba.environments import EnvSpec

SECONDS_BETWEEN_LOOKS = 0.02
# modules that the first environments and the first optimizer import
IMPORTED_LATE = ("envpool", "torch._dynamo")
SECONDS_TO_STOP = 10.0  # for peers to exit after SIGTERM before they are killed
# With torchrun, the environment variable of the run's key: its processes may be on several machines.
KEY_VARIABLE = "CLEANBA_RUN_KEY"
BEGUN = "begun"  # key of torchrun's store: which attempt began the record
STARTED = "started"  # key of an attempt's store: when the run began, as `time.time()`
# exit codes of a peer that has learned from all steps, has failed, or was told to stop (as in shells)
LEFT, FAILED, TERMINATED = 0, 1, 128 + signal.SIGTERM


class PeerFailed(RuntimeError):
    """A peer has failed, or none is left."""


def peer_process(
    port: int,
    key: bytes,
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
        store = SealedStore(connect(port), key)
        peer = Peer(args, spec, network, index, directory, started, host=HOST)
        peer.run(store, lambda: bool(terminated))
        code = TERMINATED if terminated else LEFT
    except torch.distributed.DistNetworkError:
        code = TERMINATED  # the broker, and with it the run, has ended
    except BaseException:
        import traceback

        traceback.print_exc()
        code = FAILED
    os._exit(code)


@contextlib.contextmanager
def _signals_deferred() -> Iterator[None]:
    """Defer signals, so that no message is taken out of the store and then not recorded."""
    arrived: list[int] = []
    handlers = {
        number: signal.signal(number, lambda number, _: arrived.append(number))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if arrived:
            signal.raise_signal(arrived[0])


class Broker:
    """Owns the store, the peers and the group; leaving the context stops the peers."""

    def __init__(
        self, args: Args, spec: EnvSpec, network: str, directory: Path, recorder: Recorder
    ):
        """Open the store.

        Args:
          args: the command line.
          spec: of the environment.
          network: name of the network.
          directory: of the run record.
          recorder: of the peers' messages.
        """
        self._server, self._key = open_store(), secrets.token_bytes(32)
        self._store = SealedStore(self._server, self._key)
        self._membership = Membership(self._store)
        self._args = args
        self._make = (args, spec, network)
        self._directory = directory
        self._recorder = recorder
        self._started = time.time()
        # Peers are forked from a clean process that has imported everything, so that one can be started
        # quickly at any time.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__, *IMPORTED_LATE])
        self._peers: dict[str, Any] = {}
        self._restarts_left = args.recovery.max_restarts
        self._coming: set[str] = set()  # restarted peers that have not sent a rollout yet
        self._finishing = False  # a peer has learned from all steps

    def _start(self, index: int) -> None:
        args, spec, network = self._make
        name = f"peer-{index}"
        process = self._context.Process(
            target=peer_process,
            args=(
                self._server.port,
                self._key,
                args,
                spec,
                network,
                index,
                self._directory,
                self._started,
            ),
            name=name,
            daemon=True,
        )
        process.start()
        self._peers[name] = process

    def __enter__(self) -> "Broker":
        """Return the broker itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop all peers that are left."""
        self.end()

    def run(self) -> None:
        """Start the peers, and supervise them until all have left.

        Raises:
          PeerFailed: if a peer fails with an error of its own, or none is left that has the group's state.
        """
        if self._args.hardware.transport == "moolib":
            start_broker(self._server)
        for index in range(self._args.hardware.num_peers):
            self._start(index)
        awaited = set(self._peers)  # the first generation is all of them
        while self._peers:
            self._receive()
            awaited.difference_update(self._membership.look())
            for name in self._membership.absent():
                print(f"{name} does not connect to the others and is killed", flush=True)
                self._membership.remove(name, regroup=True)
                if name in self._peers:
                    self._peers[name].kill()
            for name in self._ended():
                process = self._peers.pop(name)
                awaited.discard(name)
                self._receive()  # its last messages, before its replacement sends any
                self._handle_peer_exit(name, process)
            if not awaited:
                self._membership.publish(begun=self._recorder.begun)
            time.sleep(SECONDS_BETWEEN_LOOKS)
        self._receive()

    def _handle_peer_exit(self, name: str, process: Any) -> None:
        """Restart a peer that has exited, let the run continue without it, or fail the run."""
        code = process.exitcode
        # A peer that has finished causes no new generation: the others are about to finish as well.
        self._membership.remove(name, regroup=code != LEFT)
        if code == LEFT:
            self._finishing = True
            for late in self._coming & set(self._peers):
                self._peers[late].terminate()
            return
        if code != TERMINATED and code > 0:
            raise PeerFailed(f"{name} has failed (exit code {code}); its own output says why")
        if self._finishing and name in self._coming:
            return  # restarted too late to take part
        how = signal.Signals(-code if code < 0 else signal.SIGTERM).name
        print(f"{name} (process {process.pid}) was killed by {how}", flush=True)
        if self._finishing:
            return
        # Restarted peers have no state yet: with them alone, what the group has learned is lost.
        lost = self._recorder.begun and not set(self._peers) - self._coming
        if self._restarts_left and not lost:
            self._restarts_left -= 1
            print(f"{name} is restarted", flush=True)
            index, size = int(name.rpartition("-")[2]), self._args.num_actor_batches
            self._recorder.restarted(range(index * size, (index + 1) * size))
            self._start(index)
            self._coming.add(name)
        elif lost or not self._peers:
            raise PeerFailed(f"{name} was killed by {how}, and there is no other peer")

    def _receive(self) -> None:
        with _signals_deferred():
            for message in self._store.pop_all(LOG):
                self._recorder.receive(message)
                if "rollouts" in message:
                    self._coming.discard(message["peer"])

    def _ended(self) -> list[str]:
        sentinels = {process.sentinel: name for name, process in self._peers.items()}
        ended = multiprocessing.connection.wait(list(sentinels), timeout=0)
        names = [sentinels[sentinel] for sentinel in ended]
        for name in names:
            self._peers[name].join()
        return names

    def end(self) -> None:
        """Terminate all peers that are left, and kill those that do not exit in time."""
        for process in self._peers.values():
            process.terminate()
        deadline = time.monotonic() + SECONDS_TO_STOP
        for process in self._peers.values():
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        with contextlib.suppress(RuntimeError):
            self._receive()


def torchrun_store() -> TCPStore:
    """Return the store of torchrun, which outlives its restarts."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(address, port, is_master=False, timeout=STORE_TIMEOUT)


def find_torchrun() -> Torchrun | None:
    """Return what torchrun told this process, or None if it did not start it."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    names = ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
    rank, world_size, attempt = (int(os.environ[name]) for name in names)
    resumes = False
    if attempt:
        store = torchrun_store()
        resumes = store.check([BEGUN]) and int(store.get(BEGUN)) < attempt
    one_machine = os.environ.get("LOCAL_WORLD_SIZE") == str(world_size)
    return Torchrun(rank, world_size, attempt, resumes, one_machine)


def announce_begun(torchrun: Torchrun) -> None:
    """Tell later attempts, just before the record begins, that it belongs to this run."""
    torchrun_store().set(BEGUN, str(torchrun.attempt))


def train_under_torchrun(
    plan: Plan, torchrun: Torchrun, recorder: Recorder | None = None, seconds_before: float = 0.0
) -> None:
    """Be one peer of a run whose processes torchrun starts, and restarts together if one is lost.

    Args:
      plan: the run.
      torchrun: which of its processes this is.
      recorder: of the peers' messages, in the first process; None in the others.
      seconds_before: seconds of the run at the checkpoint that it resumes from; given by the first process.
    """
    key = os.environ.get(KEY_VARIABLE, "").encode()
    store = SealedStore(PrefixStore(f"attempt-{torchrun.attempt}", torchrun_store()), key)
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
        store.set(STARTED, time.time() - seconds_before)
    # All peers have one clock, because a record is cut at a checkpoint's time, whichever peer made that.
    # Polled, because a wait inside the store cannot be interrupted by a signal.
    while (started := store.get(STARTED)) is None:
        time.sleep(SECONDS_BETWEEN_LOOKS)
    if plan.args.hardware.transport == "moolib" and torchrun.rank == 0:
        start_broker(store.store)
    host = HOST if torchrun.one_machine else None
    try:
        peer = Peer(
            plan.args,
            plan.spec,
            plan.network,
            torchrun.rank,
            plan.run.directory,
            started,
            host=host,
        )
        peer.run(store, lambda: bool(failures), resume=torchrun.resumes)
    finally:
        ended.set()
        if recorder is not None:
            thread.join()
    if failures:
        raise failures[0]


def _serve(store: SealedStore, num_peers: int, recorder: Recorder, ended: threading.Event) -> None:
    """Form the group once all peers have joined, and record their messages until the own peer has ended."""
    membership = Membership(store)
    while not ended.wait(SECONDS_BETWEEN_LOOKS):
        num_peers -= len(membership.look())
        if not num_peers:
            membership.publish(begun=recorder.begun)
        if absent := membership.absent():
            raise PeerFailed(f"{', '.join(absent)} does not connect to the others")
        for message in store.pop_all(LOG):
            recorder.receive(message)
    for message in store.pop_all(LOG):
        recorder.receive(message)
