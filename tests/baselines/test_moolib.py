"""moolib's architecture: gradients are summed while acting goes on, and peers come and go."""

import contextlib
import importlib.util
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import optax
import psutil
import pytest
import torch

from baselines.moolib_atari import __main__ as moolib
from baselines.moolib_atari import experiment, launch, options
from baselines.moolib_atari.accumulator import Accumulator, StateLost
from baselines.moolib_atari.group import GENERATION, JOINING, Group, Membership
from baselines.moolib_atari.recorder import Recorder
from baselines.moolib_atari.sealed_store import SealedStore, connect, open_store
from baselines.torch_networks import make_network
from cleanba import cleanba_impala, networks
from cleanba.actor_learner import GroupRollout
from cleanba.environments import describe_env
from cleanba.record import read_run
from cleanba.run.command_line import BadInput
from tests.baselines.flax_weights import copy_from_flax, flax_like
from tests.command_lines import parsed, refusal

SMALL = {
    "env": "CartPole-v1", "actor-batch-size": 8, "batch-size": 8, "virtual-batch-size": 8,
    "torch-threads": 1,
}  # fmt: skip
CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[2]


KEY = b"key of a run"


def sealed(of=None):
    """A new store, or another process's connection to one."""
    store = open_store() if of is None else connect(of.store.port)
    return SealedStore(store, KEY)


def command(runs_dir, **flags):
    words = [sys.executable, "-m", "baselines.moolib_atari", "--runs-dir", str(runs_dir)]
    for name, value in (SMALL | {k.replace("_", "-"): v for k, v in flags.items()}).items():
        words += [f"--{name}", str(value)]
    return words


def run(runs_dir, code=0, **flags):
    done = subprocess.run(command(runs_dir, **flags), capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def record_in(runs_dir):
    (folder,) = runs_dir.glob("default/*__*")
    return read_run(folder)


def start(runs_dir, num_peers, **flags):
    """Start a run that would last; return its process and its peers, once it has learned."""
    words = command(runs_dir, total_steps=100_000_000, num_peers=num_peers, **flags)
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(process, lambda: num_updates(runs_dir) > 5)
    return process, peers_of(process)


def num_updates(runs_dir):
    paths = list(runs_dir.glob("default/*/updates.jsonl"))
    return sum(path.read_bytes().count(b"\n") for path in paths)


def actors_in(runs_dir, since):
    """The actors of all rollouts but the first `since`."""
    return {r.actor for r in record_in(runs_dir).rollouts()[since:]}


def last_step(runs_dir):
    """Steps that a run has learned from; nearly all if it has ended."""
    paths = list(runs_dir.glob("default/*/updates.jsonl"))
    return max((u.step for path in paths for u in read_run(path.parent).updates()), default=0)


def peers_of(process):
    """The peers of a run, by age: children of the process that forks them."""
    found = []
    for one in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            if not one.children() and one.ppid() != process.pid:
                found.append((*by_age(one), one))
    return [one for *_, one in sorted(found, key=lambda row: row[:2])]


def by_age(process):
    return process.create_time(), process.pid


def wait_for(process, condition):
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)


def assert_gone(processes):
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert not alive, [p.cmdline() for p in alive]


def assert_accounted(record):
    """No update is missing, and every rollout is in the step that it is said to be in, once."""
    updates, rollouts = record.updates(), record.rollouts()
    assert [u.version for u in updates] == list(range(2, len(updates) + 2))
    steps = {}
    for r in rollouts:
        steps[r.learner_version] = steps.get(r.learner_version, 0) + r.steps
    for u in updates:
        assert steps.pop(u.version - 1) == 20 * u.virtual_batch_size
    assert not steps
    used = [(r.actor, r.rollout, r.first_env) for r in rollouts]
    assert len(used) == len(set(used))


def policy_lag(rollout):
    """Versions between acting and learning, the mean over the rollout's steps."""
    return sum((rollout.learner_version - v) * n for v, n in rollout.versions) / rollout.steps


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of two peers and more than 1,000 rollouts, whose batches cut unrolls in two."""
    runs_dir = tmp_path_factory.mktemp("runs")
    run(
        runs_dir, num_peers=2, total_steps=200_000, actor_batch_size=8, batch_size=6,
        virtual_batch_size=12,
    )  # fmt: skip
    return record_in(runs_dir)


@pytest.mark.slow
def test_nothing_is_lost_or_learned_from_twice_in_1000_rollouts(finished):
    seen = {}
    for r in finished.rollouts():
        whole = seen.setdefault((r.actor, r.rollout), np.zeros(8, int))
        whole[r.first_env : r.first_env + r.envs] += 1
    assert len(seen) > 1000
    unfinished = [key for key, envs in seen.items() if (envs != 1).any()]
    assert all(seen[key].max() == 1 for key in unfinished)  # nothing twice
    last = {actor: max(n for a, n in seen if a == actor) for actor in range(4)}
    for actor in range(4):
        numbers = sorted(n for a, n in seen if a == actor)
        assert numbers == list(range(1, last[actor] + 1))  # none missing
    # only what was on its way when the run ended is in part not there
    assert all(number >= last[actor] - 1 for actor, number in unfinished)


@pytest.mark.slow
def test_versions_of_a_rollout_add_up_and_never_fall(finished):
    for r in finished.rollouts():
        versions = [version for version, _ in r.versions]
        assert sum(steps for _, steps in r.versions) == r.steps == 20 * r.envs
        assert versions == sorted(set(versions))
        assert versions[0] == r.version_first >= 1
        assert versions[-1] == r.version_last <= r.learner_version
    updates = finished.updates()
    assert [u.version for u in updates] == list(range(2, len(updates) + 2))
    sizes = [u.virtual_batch_size for u in updates]
    assert min(sizes) >= 12
    assert all(size == 6 * u.num_gradients for size, u in zip(sizes, updates, strict=True))
    assert np.cumsum(sizes).tolist() == [u.step // 20 for u in updates]
    assert updates[-1].step >= 200_000 > updates[-2].step
    assert all(u.gradient_version == u.version - 1 for u in updates)


@pytest.mark.soak
@pytest.mark.parametrize(("batch_size", "expected"), [(16, 0.64), (8, 1.85)])
def test_one_peer_lags_as_moolib_does(tmp_path, batch_size, expected):
    """Actor batches of 16, as measured with moolib itself."""
    run(
        tmp_path, actor_batch_size=16, batch_size=batch_size, virtual_batch_size=batch_size,
        total_steps=100_000,
    )  # fmt: skip
    rollouts = record_in(tmp_path).rollouts()[20:]
    lags, differences = [], []
    for r in rollouts:
        lags.append(policy_lag(r))
        differences.append(r.version_last - r.version_first)
        # the policy changes early: the last step of an unroll is the first of the next
        assert r.versions[-1][1] >= 0.7 * r.steps
    assert np.mean(lags) == pytest.approx(expected, rel=0.15)
    assert np.mean(differences) == pytest.approx(2 * 16 / batch_size, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "how"),
    [
        ("leader", signal.SIGKILL),
        pytest.param("follower", signal.SIGKILL, marks=pytest.mark.soak),
        ("follower", signal.SIGTERM),
    ],
)
def test_a_killed_peer_does_not_end_the_others_and_comes_back(tmp_path, victim, how):
    process, peers = start(tmp_path, 3, max_restarts=1)
    try:
        assert len(peers) == 3
        # of peers with one version, the one with the last name leads
        killed = peers[-1] if victim == "leader" else peers[0]
        killed.send_signal(how)
        wait_for(process, lambda: len(peers_of(process)) == 3 and killed not in peers_of(process))
        before = num_updates(tmp_path)
        wait_for(process, lambda: num_updates(tmp_path) > before + 50)
        seen = len(record_in(tmp_path).rollouts())
        # all three peers learn from their own, the newcomer too
        wait_for(process, lambda: actors_in(tmp_path, since=seen) == set(range(6)))
    finally:
        process.send_signal(signal.SIGINT)
        printed, errors = process.communicate(timeout=60)
    assert re.search(
        rf"peer-\d \(process \d+\) was killed by {how.name}\npeer-\d is restarted", printed
    )
    assert process.returncode == 130, errors
    record = record_in(tmp_path)
    assert record.info.status == "interrupted"
    assert_accounted(record)
    assert_gone(peers)


needs_moolib = pytest.mark.skipif(
    importlib.util.find_spec("moolib") is None,
    reason="moolib is not installed: it is in no package registry",
)


@pytest.mark.soak
@pytest.mark.parametrize("transport", ["torch", pytest.param("moolib", marks=needs_moolib)])
def test_ten_kills_of_either_of_two_peers_leave_the_record_right(tmp_path, transport):
    """Steps recorded are steps learned from, and what a survivor learns from is never old."""
    rng = np.random.default_rng(23)
    process, peers = start(tmp_path, 2, max_restarts=10, transport=transport)
    try:
        for _ in range(10):
            time.sleep(rng.uniform(0, 1.5))
            victim = rng.integers(2)
            seen = len(record_in(tmp_path).rollouts())
            peers[victim].kill()
            wait_for(process, lambda old=peers[victim]: old not in peers_of(process))
            wait_for(process, lambda: len(peers_of(process)) == 2)
            (peers[victim],) = set(peers_of(process)) - {peers[1 - victim]}
            # The survivor alone has the state until the newcomer takes part.
            wait_for(
                process,
                lambda actors={2 * victim, 2 * victim + 1}, before=seen + 20: (
                    actors & actors_in(tmp_path, since=before)
                ),
            )
    finally:
        process.send_signal(signal.SIGINT)
        printed, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert printed.count("is restarted") == 10
    record = record_in(tmp_path)
    assert_accounted(record)
    assert (
        sum(u.num_lost for u in record.updates()) > 0
    )  # some of the kills took gradients with them
    assert max(map(policy_lag, record.rollouts())) <= 10


class Stalled:
    """An accumulator that waits for a lost peer: it wants no gradients, and has none."""

    def __getattr__(self, name):
        return lambda *_: name == "connected"


def test_a_peer_stops_acting_while_the_group_waits_for_a_lost_one(tmp_path, monkeypatch):
    plan = options.prepare(
        parsed(options.Args, env="CartPole-v1", runs_dir=tmp_path, actor_batch_size=8, batch_size=8)
    )
    peer = experiment.Peer(plan.args, plan.spec, "mlp", 0, tmp_path, time.time())
    monkeypatch.setattr(peer, "_make_accumulator", lambda store: Stalled())
    monkeypatch.setattr(experiment, "SECONDS_WHILE_FULL", 0)
    acts, looks = [], itertools.count()
    act = peer._act
    monkeypatch.setattr(peer, "_act", lambda batch: (acts.append(batch.index), act(batch))[1])
    peer.run(sealed(), lambda: next(looks) >= 999)
    # An unroll of both batches of environments and two batches to learn from: four unrolls of 20 steps.
    assert len(acts) == 2 * (2 * 20 + 1)


def test_an_interrupt_waits_until_what_was_taken_out_of_the_store_is_written_down():
    broker, received = object.__new__(launch.Broker), []

    class Interrupted:
        def receive(self, message):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)
            received.append(message["peer"])

    broker._store = sealed()
    broker._recorder, broker._coming = Interrupted(), set()
    for name in ("a", "b"):
        broker._store.push("log", {"peer": name})
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        broker._receive()
    assert received == ["a", "b"]
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.soak
def test_under_torchrun_a_killed_peer_brings_all_back_to_the_checkpoint(tmp_path):
    flags = SMALL | {"checkpoint-interval": 0.5, "total-steps": 150_000, "runs-dir": tmp_path}
    words = [f"--{name}={value}" for name, value in flags.items()]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    process = subprocess.Popen(
        [*launcher, "--max-restarts=1", "-m", "baselines.moolib_atari", *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_for(process, lambda: list(tmp_path.glob("default/*/checkpoints/latest.npz")))
    sorted(psutil.Process(process.pid).children(), key=by_age)[1].kill()
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    record = record_in(tmp_path)
    assert record.completed
    assert record.path.name == "moolib__peers2-envs32__CartPole-v1__s1"
    assert len(record.info.resumed) == 1
    updates = record.updates()
    assert [u.version for u in updates] == list(range(2, len(updates) + 2))
    times = [u.wall_time for u in updates]
    assert times == sorted(times)
    assert updates[-1].step >= 150_000 > updates[-2].step


@pytest.mark.soak
def test_under_torchrun_a_run_of_the_same_name_is_left_alone(tmp_path):
    """A process that fails at once is restarted by torchrun, and is not to take a record for its own."""
    run(tmp_path, num_peers=2, total_steps=2_000)
    record = record_in(tmp_path)
    before = {p: p.read_bytes() for p in record.path.rglob("*") if p.is_file()}
    words = [
        f"--{n}={v}" for n, v in (SMALL | {"total-steps": 4_000, "runs-dir": tmp_path}).items()
    ]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launcher, "--max-restarts=1", "-m", "baselines.moolib_atari", *words],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode != 0
    assert done.stderr.count("already holds a run") == 2
    assert {p: p.read_bytes() for p in record.path.rglob("*") if p.is_file()} == before


def test_under_torchrun_the_key_of_a_run_is_that_of_its_environment(monkeypatch):
    monkeypatch.setenv("CLEANBA_RUN_KEY", "a secret")
    monkeypatch.setattr(launch, "torchrun_store", open_store)

    def seal(_, key):
        raise PermissionError(key)

    monkeypatch.setattr(launch, "SealedStore", seal)
    with pytest.raises(PermissionError, match="b'a secret'"):
        launch.train_under_torchrun(None, options.Torchrun(0, 1, 0, False, True))


FAILS_AT_THE_VERY_END = """
import os, runpy, time
from baselines.moolib_atari import experiment
if os.environ["RANK"] == "1":
    time.sleep(3)  # longer than the run takes
run = experiment.Peer.run
def run_and_fail(self, *args, **kwargs):
    run(self, *args, **kwargs)
    if self.name == "peer-1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os._exit(1)
experiment.Peer.run = run_and_fail
if __name__ == "__main__":
    runpy.run_module("baselines.moolib_atari", run_name="__main__")
"""


@pytest.mark.soak
def test_under_torchrun_a_run_that_has_learned_everything_is_not_made_a_failed_one(tmp_path):
    script = tmp_path / "planted.py"
    script.write_text(FAILS_AT_THE_VERY_END)
    flags = SMALL | {"total-steps": 4_000, "runs-dir": tmp_path / "runs"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launcher, "--max-restarts=1", str(script), *(f"--{n}={v}" for n, v in flags.items())],
        capture_output=True, text=True, timeout=120, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    record = record_in(tmp_path / "runs")
    assert record.completed
    assert record.updates()[-1].step >= 4_000
    # two short episodes in one unroll can be alike; a record told twice would have all of them twice
    episodes = [msgspec.structs.astuple(e) for e in record.episodes()]
    assert len(episodes) > 20  # none is cut off because the peers started at different times
    assert len(set(episodes)) > 0.9 * len(episodes)


@pytest.mark.slow
def test_what_cannot_be_recorded_ends_the_run(tmp_path):
    """Under torchrun, where a peer records beside learning."""
    planted = "from cleanba.run import log; log.RunLog.write = lambda *_: 1 / 0;"
    main = "import runpy; runpy.run_module('baselines.moolib_atari', run_name='__main__')"
    script = tmp_path / "planted.py"
    script.write_text(f"{planted}\n{main}\n")
    words = [f"--{n}={v}" for n, v in (SMALL | {"runs-dir": tmp_path / "runs"}).items()]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launcher, str(script), *words], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert done.returncode != 0
    assert "ZeroDivisionError" in done.stderr
    assert record_in(tmp_path / "runs").info.status == "failed"


DIES_BEFORE_IT_REPORTS = """
import os, runpy
from baselines.moolib_atari import experiment
report = experiment.Peer._report
def report_or_die(self, store, **what):
    if self.name == "peer-1" and what.get("update", {}).get("version") == 20:
        os.kill(os.getpid(), 9)
    report(self, store, **what)
experiment.Peer._report = report_or_die
if __name__ == "__main__":
    runpy.run_module("baselines.moolib_atari", run_name="__main__")
"""


@pytest.mark.slow
def test_a_step_that_a_dead_leader_did_not_tell_of_is_recorded_all_the_same(tmp_path):
    script = tmp_path / "planted.py"
    script.write_text(DIES_BEFORE_IT_REPORTS)
    words = command(tmp_path, num_peers=2, total_steps=20_000)
    words[1:3] = [str(script)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert "peer-1 (process" in done.stdout  # the one that led
    record = record_in(tmp_path)
    assert_accounted(record)
    assert record.updates()[-1].step >= 20_000


@pytest.mark.slow
def test_a_new_leader_s_first_update_is_about_itself_alone(tmp_path):
    process, peers = start(tmp_path, 3)
    try:
        peers[-1].kill()
        before = num_updates(tmp_path)
        wait_for(process, lambda: num_updates(tmp_path) > before + 50)
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    record = record_in(tmp_path)
    assert_accounted(record)
    for u in record.updates():
        busy = u.env_time + u.inference_time + u.training_time
        assert busy <= u.update_seconds + 1e-3
    # all of the time between two updates, but for the seconds without a leader
    total = sum(u.update_seconds for u in record.updates())
    assert total <= record.updates()[-1].wall_time + 1e-3


@pytest.mark.parametrize(
    ("peers", "cores", "asked", "variables", "expected"),
    [
        (1, 2, None, {}, None),  # torch's own choice
        (2, 2, None, {}, 1),
        (2, 8, None, {}, 4),
        (4, 2, None, {}, 1),
        (8, 8, None, {"LOCAL_WORLD_SIZE": "2"}, 4),  # the others are on other machines
        (2, 8, None, {"OMP_NUM_THREADS": "3"}, None),
        (2, 8, 3, {}, 3),
        (1, 8, 3, {}, 3),
    ],
)
def test_peers_share_the_cores_of_their_machine(
    monkeypatch, peers, cores, asked, variables, expected
):
    for name in ("LOCAL_WORLD_SIZE", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    chosen = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    hardware = options.Hardware(num_peers=peers, torch_threads=asked)
    experiment._share_cores(options.Args(hardware=hardware))
    assert chosen == ([] if expected is None else [expected])


def test_steps_are_those_of_optax_s_adam_with_clipped_gradients_and_a_rate_that_falls_to_zero():
    args = options.Args(
        total_steps=3 * 20 * 8, virtual_batch_size=8, learning_rate=0.1, grad_norm_clipping=1.0
    )
    state = experiment.LearnerState(args, describe_env("CartPole-v1"), "mlp", CPU)
    reference = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adam(lambda count: 0.1 * jnp.maximum(1 - count / 3, 0), eps=args.adam_epsilon),
    )
    params = [p.detach().numpy().copy() for p in state.model.parameters()]
    moments = reference.init(params)
    rng = np.random.default_rng(1)
    for scale in (1.0, 0.001, 1.0, 1.0):  # clipped or not; the last one is past the end
        gradients = [scale * rng.normal(size=p.shape).astype(np.float32) for p in params]
        for parameter, gradient in zip(state.model.parameters(), gradients, strict=True):
            parameter.grad = torch.from_numpy(gradient.copy())
        state.step(8)
        updates, moments = reference.update(gradients, moments, params)
        params = optax.apply_updates(params, updates)
        for parameter, expected in zip(state.model.parameters(), params, strict=True):
            np.testing.assert_allclose(parameter.detach(), expected, atol=1e-5)


def test_a_run_goes_on_from_a_checkpoint_of_its_leader(tmp_path):
    plan = options.prepare(parsed(options.Args, env="CartPole-v1", runs_dir=tmp_path))
    old = experiment.LearnerState(plan.args, plan.spec, "mlp", CPU)
    for parameter in old.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    old.step(32)
    new = experiment.LearnerState(plan.args, plan.spec, "mlp", CPU)
    new.load(old.save())
    assert (new.version, new.steps) == (2, 640)
    for state in (old, new):
        for parameter in state.model.parameters():
            parameter.grad = torch.full_like(parameter, 0.5)
        state.step(32)
    for name, array in old.save().items():
        np.testing.assert_array_equal(array, new.save()[name])


@pytest.mark.soak
def test_the_leader_keeps_its_latest_checkpoint_and_a_history(tmp_path):
    run(
        tmp_path, num_peers=2, total_steps=100_000, checkpoint_interval=0.3,
        checkpoint_history_interval=0.8,
    )  # fmt: skip
    record = record_in(tmp_path)
    last = record.updates()[-1]
    with np.load(record.path / experiment.CHECKPOINT, allow_pickle=False) as arrays:
        assert (int(arrays["version"]), int(arrays["steps"])) == (last.version, last.step)
    kept = list((record.path / "checkpoints").glob("version-*.npz"))
    assert kept
    for path in kept:
        with np.load(path, allow_pickle=False) as arrays:
            assert path.stem == f"version-{int(arrays['version'])}"


def test_gradients_agree_with_the_jax_impala():
    """moolib's losses are means over real steps, the JAX ones sums."""
    rng = np.random.default_rng(0)
    steps, envs, actions = 5, 4, 3
    obs = rng.normal(size=(steps + 1, envs, 6)).astype(np.float32)
    unroll = experiment.Unroll(
        obs=obs,
        rewards=2 * rng.normal(size=(steps + 1, envs)).astype(np.float32),
        dones=rng.random((steps + 1, envs)) < 0.3,
        actions=rng.integers(0, actions, (steps + 1, envs)).astype(np.int32),
        logits=rng.normal(size=(steps + 1, envs, actions)).astype(np.float32),
        versions=np.ones(steps + 1, np.int64),
    )
    args = options.Args()
    network = networks.make_network("mlp", actions, portable=True)
    params = jax.jit(network.init)(jax.random.key(0), obs[0])
    torch_network = make_network("mlp", (6,), actions)
    copy_from_flax(params, torch_network)

    def jax_loss(params):
        logits, values = network.apply(params, obs.reshape(-1, 6))
        rollout = GroupRollout(
            obs, unroll.dones, unroll.actions[:-1], np.clip(unroll.rewards[1:], -1, 1), unroll.logits[:-1]
        )  # fmt: skip
        losses = cleanba_impala.impala_loss(
            logits.reshape(steps + 1, envs, -1)[:-1],
            values.reshape(steps + 1, envs),
            jax.tree.map(jnp.asarray, rollout),
            cleanba_impala.Args(ent_coef=args.entropy_cost, vf_coef=args.baseline_cost),
        )
        return losses.loss / losses.count, losses

    expected, losses = jax.jit(jax.grad(jax_loss, has_aux=True))(params)
    # the batch is cut out of the unroll in two pieces, in another order
    pieces = [
        experiment.Piece(unroll, 0, 1, slice(3, 4), 0.0),
        experiment.Piece(unroll, 0, 1, slice(0, 3), 0.0),
    ]
    actual = experiment.compute_gradients(torch_network, pieces, args, CPU)
    assert actual["loss"] == pytest.approx(float(losses.loss / losses.count), rel=1e-5)
    gradients = {n: p.grad.numpy().copy() for n, p in torch_network.named_parameters()}
    for parameter, gradient in flax_like(expected, torch_network).items():
        np.testing.assert_allclose(gradients[parameter], gradient, atol=1e-5, err_msg=parameter)


class Cohort:
    """Accumulators of several peers in threads, as a broker would see them."""

    def __init__(self, versions, virtual_batch_size, begun=False):
        self.store = sealed()
        self.models = [torch.nn.Linear(2, 1, bias=False) for _ in versions]
        self.peers, self.groups = [], []
        for index, (model, version) in enumerate(zip(self.models, versions, strict=True)):
            client = sealed(self.store)
            group = Group(client, f"peer-{index}", CPU)
            peer = Accumulator(model.parameters(), group)
            peer.set_virtual_batch_size(virtual_batch_size)
            peer.set_model_version(version)
            self.peers.append(peer)
            self.groups.append(group)
        self.membership = Membership(self.store)
        assert sorted(self.membership.look()) == [peer.name for peer in self.groups]
        self.membership.publish(begun=begun)

    def everywhere(self, function, peers=None):
        """Call a function of (index, peer) in a thread of each peer; return what it gave."""
        peers = self.peers if peers is None else peers
        results = [None] * len(peers)

        def call(index):
            results[index] = function(index, peers[index])

        threads = [threading.Thread(target=call, args=(i,)) for i in range(len(peers))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
        return results


def until(peer, condition):
    deadline = time.monotonic() + 20
    while not condition():
        peer.update()
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_newcomers_get_the_state_of_the_peer_that_is_furthest():
    cohort = Cohort(versions=(3, 7, 5), virtual_batch_size=1)

    def join(index, peer):
        while not peer.connected():
            peer.update()
            if peer.wants_state():
                peer.set_state({"who": np.array(index)})
        return peer.state() if peer.has_new_state() else None

    states = cohort.everywhere(join)
    assert [peer.get_leader() for peer in cohort.peers] == ["peer-1"] * 3
    assert [peer.is_leader() for peer in cohort.peers] == [False, True, False]
    assert [peer.model_version() for peer in cohort.peers] == [7, 7, 7]
    assert states[1] is None
    assert [int(states[i]["who"]) for i in (0, 2)] == [1, 1]


@pytest.mark.parametrize("version_of_the_newcomer", [1, 9])
def test_a_newcomer_without_the_groups_state_never_leads(version_of_the_newcomer):
    """Though its name comes last, and though it says that it is further (an old checkpoint of its own)."""
    cohort = Cohort(versions=(1, 1, version_of_the_newcomer), virtual_batch_size=1)
    *members, newcomer = cohort.peers

    def join(number):
        def follow(index, peer):
            deadline = time.monotonic() + 20
            while not (peer.connected() and peer.generation() == number):
                peer.update()
                if peer.wants_state():
                    peer.set_state({"who": np.array(index)})
                assert time.monotonic() < deadline
                time.sleep(0.001)
            return peer.state() if peer.has_new_state() else None

        return follow

    cohort.membership.remove("peer-2", regroup=True)  # it comes later
    cohort.membership.publish(begun=False)
    cohort.everywhere(join(2), members)
    cohort.store.push(JOINING, ["peer-2", 0])
    assert cohort.membership.look() == ["peer-2"]
    cohort.membership.publish(begun=False)
    states = cohort.everywhere(join(3))
    assert [peer.get_leader() for peer in cohort.peers] == ["peer-1"] * 3
    assert not newcomer.is_leader()
    assert int(states[2]["who"]) == 1
    assert newcomer.model_version() == 1


def test_peers_whose_group_fails_without_a_death_get_another(monkeypatch):
    cohort = Cohort(versions=(1, 1), virtual_batch_size=1)
    (first, second), groups = cohort.peers, cohort.groups

    def join(_, peer):
        deadline = time.monotonic() + 20
        while not peer.connected():
            peer.update()
            if peer.wants_state():
                peer.set_state({"x": np.zeros(1)})
            peer.state()
            assert time.monotonic() < deadline
            time.sleep(0.001)

    cohort.everywhere(join)
    for group in groups:
        group.give_up()  # as if a connection had failed
    assert not first.connected()
    assert not second.connected()
    assert cohort.membership.look() == []
    # not at once: perhaps one of them has died, which comes to light soon
    for seconds, number in ((60.0, 1), (0.0, 2)):
        monkeypatch.setattr("baselines.moolib_atari.group.SECONDS_FOR_A_DEATH", seconds)
        cohort.membership.publish(begun=True)
        assert generation_in(cohort.store)[0] == number
    cohort.everywhere(join)
    assert [g.generation.number for g in groups] == [2, 2]
    groups[0].give_up()
    groups[0].generation = groups[0].generation._replace(number=1)
    groups[0].give_up()  # a complaint about an old group is no reason for another
    cohort.membership.look()
    cohort.membership.remove("peer-0", regroup=False)
    assert cohort.membership.look() == []


def members_of(store, names):
    """What decides who is in the group, with peers that have joined."""
    membership = Membership(store)
    for name in names:
        store.push(JOINING, [name, 0])
    assert membership.look() == list(names)
    membership.publish(begun=False)
    return membership


def generation_in(store):
    number, members, _ = store.get(GENERATION)
    return number, members


def test_a_new_group_that_is_needed_is_made_whatever_ends_after_that():
    store = sealed()
    membership = members_of(store, ("a", "b", "c", "d"))
    assert generation_in(store) == (1, ["a", "b", "c", "d"])
    membership.remove("a", regroup=False)
    membership.publish(begun=True)
    assert generation_in(store)[0] == 1  # the others need none, unless they ask
    membership.remove("b", regroup=True)
    membership.remove("c", regroup=False)
    membership.publish(begun=True)
    assert generation_in(store) == (2, ["d"])


def test_only_a_complaint_about_the_group_that_there_is_brings_another(monkeypatch):
    monkeypatch.setattr("baselines.moolib_atari.group.SECONDS_FOR_A_DEATH", 0.0)
    store = sealed()
    membership = members_of(store, ("a", "b"))

    def complain(name, number):
        store.push(JOINING, [name, number])
        assert membership.look() == []
        membership.publish(begun=True)
        return generation_in(store)[0]

    assert complain("a", 1) == 2
    assert complain("b", 1) == 2  # about the same group, a little later
    assert complain("stranger", 2) == 2
    assert complain("b", 2) == 3


def gather_without_connecting(group, monkeypatch):
    """Call `gather`, which must not connect: gloo would wait for the missing member."""
    with monkeypatch.context() as patched:
        patched.setattr(group, "_connect", lambda _: pytest.fail("it connects"))
        return group.gather()


def test_a_member_that_does_not_come_is_not_waited_for(monkeypatch):
    store = sealed()
    client = sealed(store)
    group, membership = Group(client, "peer-0", CPU), Membership(store)
    Group(client, "peer-1", CPU)  # asks to be let in, and is never heard of again
    membership.look()
    membership.publish(begun=False)
    assert group.look()
    group.follow()
    assert not gather_without_connecting(group, monkeypatch)
    membership.remove("peer-1", regroup=False)
    deadline = time.monotonic() + 60
    while not group.look():
        assert not group.gather()
        membership.look()  # after a while, it asks for another
        membership.publish(begun=False)
        assert time.monotonic() < deadline
        time.sleep(0.01)
    group.follow()
    assert group.gather()
    assert group.generation.members == ("peer-0",)
    assert (group.all_gather(torch.tensor([5])) == 5).all()


def test_a_generation_that_a_member_has_left_for_the_next_is_not_waited_for(monkeypatch):
    """Though all its members have been in it, and one of them comes last and late."""
    store = sealed()
    clients = [sealed(store) for _ in range(2)]
    groups = [Group(client, f"peer-{index}", CPU) for index, client in enumerate(clients)]
    membership = Membership(store)
    membership.look()
    membership.publish(begun=False)
    early, late = groups
    assert early.look()
    assert late.look()
    early.follow()
    assert not early.gather()
    Group(clients[0], "peer-2", CPU)  # asks to be let in
    membership.look()
    membership.remove("peer-2", regroup=True)
    membership.publish(begun=False)
    assert early.look()
    early.follow()
    late.follow()  # to the generation that it has seen
    assert not gather_without_connecting(late, monkeypatch)
    assert late.look()
    late.follow()
    threads = [threading.Thread(target=group.gather) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert [group.connected for group in groups] == [True, True]
    assert [group.generation.number for group in groups] == [2, 2]


def test_peers_in_the_middle_of_a_collective_go_over_to_a_new_group():
    """They wait for the part of one that is not in the new group, and that may never give it."""
    cohort = Cohort(versions=(1, 1, 1), virtual_batch_size=1)

    def join(number):
        def follow(_, peer):
            deadline = time.monotonic() + 15
            while not (peer.connected() and peer.generation() == number):
                peer.update()
                if peer.wants_state():
                    peer.set_state({"x": np.zeros(1)})
                peer.state()
                assert time.monotonic() < deadline
                time.sleep(0.001)

        return follow

    cohort.everywhere(join(1))
    *staying, _silent = cohort.peers
    for peer in staying:
        peer.skip_gradients()  # begins to count; the silent one does not
    cohort.membership.remove("peer-2", regroup=True)
    cohort.membership.publish(begun=True)
    cohort.everywhere(join(2), staying)

    def step(index, peer):
        for parameter in cohort.models[index].parameters():
            parameter.grad = torch.ones_like(parameter)
        peer.reduce_gradients(1)
        until(peer, peer.has_gradients)
        assert peer.generation() == 2
        return peer.get_gradient_stats()

    for stats in cohort.everywhere(step, staying):
        assert stats["num_skipped"] == 0  # what was given before is not counted in the new group


def test_without_the_state_of_the_group_nobody_can_go_on():
    cohort = Cohort(versions=(1, 1), virtual_batch_size=1, begun=True)

    def join(_, peer):
        with pytest.raises(StateLost, match="no peer is left"):
            until(peer, peer.connected)

    cohort.everywhere(join)


class Log:
    """What a `RunLog` is told."""

    def __init__(self):
        self.written = []

    def write(self, update, rollouts, episodes):
        self.written.append((update, rollouts, episodes))


def gradient(version, group, *rollouts, actor=0, loss=1.0):
    same = {"group": None, "steps": 5, "wall_time": 0.0, "learner_version": version}
    same |= {"version_first": 1, "version_last": 1, "versions": [[1, 5]]}
    rows = [{"actor": actor, "rollout": number, **same} for number in rollouts]
    return {"version": version, "group": group, "losses": {"loss": loss}, "rollouts": rows}


def step(version, group):
    update = {"version": version, "gradient_version": version - 1, "step": 10 * version}
    update |= {"wall_time": 0.0, "update_seconds": 0.0, "learning_rate": 0.1}
    return {"group": group, "update": update}


def test_rollouts_are_recorded_with_the_step_that_learned_from_them_or_counted_as_lost():
    log = Log()
    recorder = Recorder(log)
    recorder.receive(gradient(1, 1, 1, loss=1.0))
    recorder.receive(gradient(1, 1, 1, 2, actor=2, loss=3.0))
    recorder.receive(step(2, 1))
    recorder.receive(gradient(2, 1, 2))  # a peer is lost, and this with it
    recorder.receive(step(2, 1))  # a new leader says again what the last one may not have said
    recorder.receive(gradient(2, 2, 3))
    recorder.receive(step(3, 2))
    recorder.receive(gradient(2, 2, 4))  # overtaken by the step
    recorder.receive(gradient(2, 1, 5))  # and one more that was lost
    recorder.restarted([0])
    recorder.receive(gradient(3, 2, 1))
    recorder.receive(step(4, 2))
    numbers = [[(r.actor, r.rollout) for r in rows] for _, rows, _ in log.written]
    assert numbers == [[(0, 1), (2, 1), (2, 2)], [(0, 3)], [(0, 4), (0, 6)]]
    assert [update.num_lost for update, *_ in log.written] == [0, 1, 1]
    assert [update.loss for update, *_ in log.written] == [2.0, 1.0, 1.0]
    assert recorder.steps == 40


def test_a_step_is_the_mean_of_what_was_given_once_the_virtual_batch_is_reached():
    cohort = Cohort(versions=(1, 1), virtual_batch_size=12)

    def train(index, peer):
        model = cohort.models[index]
        while not peer.connected():
            peer.update()
            if peer.wants_state():
                peer.set_state({"x": np.zeros(1)})
        if index == 0:
            # 4 is not enough: what it gives next is added to it
            for gradient, size in ((1.0, 4), (2.0, 4)):
                until(peer, peer.wants_gradients)
                model.weight.grad = torch.full_like(model.weight, gradient)
                peer.reduce_gradients(size)
                assert (model.weight.grad == 0).all()
        else:
            for _ in range(3):  # peers without gradients take part by skipping
                until(peer, peer.wants_gradients)
                peer.skip_gradients()
            until(peer, peer.wants_gradients)
            model.weight.grad = torch.full_like(model.weight, 6.0)
            peer.reduce_gradients(4)
        deadline = time.monotonic() + 20
        while not peer.has_gradients():
            peer.update()
            if peer.wants_gradients():
                peer.skip_gradients()
            assert time.monotonic() < deadline
        assert not peer.wants_gradients()
        with pytest.raises(RuntimeError, match="wants_gradients"):
            peer.skip_gradients()
        gradient, stats = model.weight.grad.clone(), peer.get_gradient_stats()
        peer.zero_gradients()
        assert not peer.has_gradients()
        return gradient, stats, peer.model_version()

    for gradient, stats, version in cohort.everywhere(train):
        torch.testing.assert_close(gradient, torch.full((1, 2), 3.0))  # (1 + 2 + 6) / 3
        assert (stats["num_gradients"], stats["batch_size"]) == (3, 12)
        assert stats["num_skipped"] >= 3
        assert version == 2


def test_a_step_of_one_peer_takes_two_updates_so_that_an_action_lies_between():
    cohort = Cohort(versions=(1,), virtual_batch_size=1)
    (peer,), (model,) = cohort.peers, cohort.models
    until(peer, peer.connected)
    model.weight.grad = torch.ones_like(model.weight)
    peer.reduce_gradients(1)
    time.sleep(0.2)  # however long the collective has been done
    peer.update()
    assert not peer.has_gradients()
    assert not peer.wants_gradients()
    time.sleep(0.2)
    peer.update()
    assert peer.has_gradients()


def test_batches_are_cut_environment_by_environment_in_the_order_of_unrolls():
    batcher = experiment.LearnBatcher(6, largest=16)
    assert batcher.empty()
    for number in (1, 2):
        assert not batcher.full()
        batcher.put(experiment.Piece(None, 0, number, slice(0, 8), 0.0))
    assert batcher.full()
    taken = [[(p.number, p.columns.start, p.columns.stop) for p in batcher.get()] for _ in range(2)]
    assert taken == [[(1, 0, 6)], [(1, 6, 8), (2, 0, 4)]]
    assert batcher.empty()


def test_the_last_step_of_an_unroll_is_the_first_of_the_next():
    args = parsed(
        options.Args, env="CartPole-v1", actor_batch_size=3, unroll_length=4, num_actor_cpus=1
    )
    batch = experiment.EnvBatch(args, describe_env("CartPole-v1"), 0)
    unrolls = []
    for version in range(1, 13):
        batch.receive()
        logits = np.full((3, 2), version, np.float32)
        complete = batch.send(np.full(3, version % 2, np.int32), logits, version)
        if complete is not None:
            unrolls.append(complete)
    assert [u.number for u in unrolls] == [1, 2]
    first, second = (u.unroll for u in unrolls)
    assert first.versions.tolist() == [1, 2, 3, 4, 5]
    assert second.versions.tolist() == [5, 6, 7, 8, 9]
    for old, new in zip(first, second, strict=True):
        np.testing.assert_array_equal(old[-1], new[0])
    # what the record says of it: the steps that are learned from
    (row,) = experiment.describe_pieces([unrolls[1]], 4, 9)
    assert row.versions == [(5, 3), (6, 3), (7, 3), (8, 3)]
    assert (row.steps, row.envs, row.learner_version) == (12, 3, 9)


def test_presets_are_the_settings_of_the_paper(tmp_path):
    total = {}
    for preset in options.PRESETS:
        args = parsed(options.Args, env="CartPole-v1", preset=preset, runs_dir=tmp_path)
        args = options.prepare(args).args
        total[preset] = args.hardware.num_peers * args.num_actor_batches * args.actor_batch_size
        assert (args.batch_size, args.virtual_batch_size, args.unroll_length) == (32, 32, 20)
        assert (args.learning_rate, args.entropy_cost, args.grad_norm_clipping) == (6e-4, 6e-4, 40)
    assert total == {"base": 256, "workstation": 256, "mistake": 2048}


def test_moolibs_own_transport_is_refused_on_several_machines(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "moolib", object())  # as if it were installed
    args = parsed(options.Args, **SMALL, runs_dir=tmp_path, transport="moolib")
    torchrun = options.Torchrun(0, 2, attempt=0, resumes=False, one_machine=True)
    assert options.prepare(args, torchrun).args.hardware.num_peers == 2
    with pytest.raises(BadInput, match="the peers of one machine only"):
        options.prepare(args, torchrun._replace(one_machine=False))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"num_peers": 0}, "--num-peers 0: must be 1 or more"),
        ({"max_restarts": -1}, "--max-restarts -1: must be 0 or more"),
        (
            {"checkpoint_history_interval": 0},
            "--checkpoint-history-interval 0.0: must be more than 0",
        ),
        ({"reward_clip": -1}, "--reward-clip -1.0: must be 0 or more"),
        ({"transport": "moolib"}, "the moolib library is not installed"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, capsys, flags, message):
    values = {name.replace("-", "_"): value for name, value in SMALL.items()}
    values |= {"runs_dir": tmp_path} | flags
    line = refusal(options.Args, moolib.main, capsys, **values)
    assert re.search(message, line), line
    assert list(tmp_path.iterdir()) == []
