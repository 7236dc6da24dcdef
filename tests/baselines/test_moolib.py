"""moolib's architecture: gradients are summed while acting goes on, and peers come and go."""

import contextlib
import json
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
import numpy as np
import psutil
import pytest
import torch
from torch.distributed import TCPStore

from baselines.moolib_atari import experiment, launch, options
from baselines.moolib_atari.accumulator import Accumulator, StateLost
from baselines.moolib_atari.group import Group, Membership
from baselines.moolib_atari.recorder import Recorder
from baselines.torch_networks import make_network
from cleanba import cleanba_impala, networks
from cleanba.actor_learner import GroupRollout
from cleanba.environments import describe_env
from cleanba.record import read_run
from tests.baselines.flax_weights import copy_from_flax, flax_like

SMALL = {
    "env": "CartPole-v1", "actor-batch-size": 8, "batch-size": 8, "virtual-batch-size": 8,
    "torch-threads": 1,
}  # fmt: skip
CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[2]


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


def last_step(runs_dir):
    """Steps that a run has learned from; nearly all if it has ended."""
    paths = list(runs_dir.glob("default/*/updates.jsonl"))
    return max(
        (u["step"] for path in paths for u in read_run(path.parent).lines("updates")), default=0
    )


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
    updates, rollouts = record.lines("updates"), record.lines("rollouts")
    assert [u["version"] for u in updates] == list(range(2, len(updates) + 2))
    steps = {}
    for r in rollouts:
        steps[r["learner_version"]] = steps.get(r["learner_version"], 0) + r["steps"]
    for u in updates:
        assert steps.pop(u["version"] - 1) == 20 * u["virtual_batch_size"]
    assert not steps
    used = [(r["actor"], r["rollout"], r["first_env"]) for r in rollouts]
    assert len(used) == len(set(used))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of two peers and more than 1,000 rollouts, whose batches cut unrolls in two."""
    runs_dir = tmp_path_factory.mktemp("runs")
    run(
        runs_dir, num_peers=2, total_steps=200_000, actor_batch_size=8, batch_size=6,
        virtual_batch_size=12,
    )  # fmt: skip
    return record_in(runs_dir)


def test_nothing_is_lost_or_learned_from_twice_in_1000_rollouts(finished):
    seen = {}
    for r in finished.lines("rollouts"):
        whole = seen.setdefault((r["actor"], r["rollout"]), np.zeros(8, int))
        whole[r["first_env"] : r["first_env"] + r["envs"]] += 1
    assert len(seen) > 1000
    unfinished = [key for key, envs in seen.items() if (envs != 1).any()]
    assert all(seen[key].max() == 1 for key in unfinished)  # nothing twice
    last = {actor: max(n for a, n in seen if a == actor) for actor in range(4)}
    for actor in range(4):
        numbers = sorted(n for a, n in seen if a == actor)
        assert numbers == list(range(1, last[actor] + 1))  # none missing
    # only what was on its way when the run ended is in part not there
    assert all(number >= last[actor] - 1 for actor, number in unfinished)


def test_versions_of_a_rollout_add_up_and_never_fall(finished):
    for r in finished.lines("rollouts"):
        versions = [version for version, _ in r["versions"]]
        assert sum(steps for _, steps in r["versions"]) == r["steps"] == 20 * r["envs"]
        assert versions == sorted(set(versions))
        assert versions[0] == r["version_first"] >= 1
        assert versions[-1] == r["version_last"] <= r["learner_version"]
    updates = finished.lines("updates")
    assert [u["version"] for u in updates] == list(range(2, len(updates) + 2))
    sizes = [u["virtual_batch_size"] for u in updates]
    assert min(sizes) >= 12
    assert all(size == 6 * u["num_gradients"] for size, u in zip(sizes, updates, strict=True))
    assert np.cumsum(sizes).tolist() == [u["step"] // 20 for u in updates]
    assert updates[-1]["step"] >= 200_000 > updates[-2]["step"]
    assert all(u["gradient_version"] == u["version"] - 1 for u in updates)


def test_the_steps_of_the_record_are_those_of_its_rollouts(finished):
    by_update = {u["version"] - 1: u for u in finished.lines("updates")}
    steps = {}
    for r in finished.lines("rollouts"):
        steps[r["learner_version"]] = steps.get(r["learner_version"], 0) + r["steps"]
    # a gradient of version v is in the step from v; the last ones may have come too late
    for version, update in by_update.items():
        assert steps[version] == 20 * update["virtual_batch_size"]


def test_the_record_is_described(finished):
    documented = set(re.findall(r"`(\w+)`", (ROOT / "docs" / "run-record.md").read_text()))
    for kind in ("episodes", "updates", "rollouts"):
        for row in finished.lines(kind):
            assert set(row) <= documented, set(row) - documented
    assert set(finished.info["hardware"]) <= documented
    assert finished.path.name == "moolib__peers2-envs32__CartPole-v1__s1"
    assert finished.completed


@pytest.mark.parametrize(("batch_size", "expected"), [(16, 0.64), (8, 1.85)])
def test_one_peer_lags_as_moolib_does(tmp_path, batch_size, expected):
    """Actor batches of 16, as measured with moolib itself."""
    run(
        tmp_path, actor_batch_size=16, batch_size=batch_size, virtual_batch_size=batch_size,
        total_steps=100_000,
    )  # fmt: skip
    rollouts = record_in(tmp_path).lines("rollouts")[20:]
    lags, differences = [], []
    for r in rollouts:
        lags.append(sum((r["learner_version"] - v) * n for v, n in r["versions"]) / r["steps"])
        differences.append(r["version_last"] - r["version_first"])
        # the policy changes early: the last step of an unroll is the first of the next
        assert r["versions"][-1][1] >= 0.7 * r["steps"]
    assert np.mean(lags) == pytest.approx(expected, rel=0.15)
    assert np.mean(differences) == pytest.approx(2 * 16 / batch_size, rel=0.1)


@pytest.mark.parametrize(
    ("victim", "how"),
    [("leader", signal.SIGKILL), ("follower", signal.SIGKILL), ("follower", signal.SIGTERM)],
)
def test_a_killed_peer_does_not_end_the_others_and_comes_back(tmp_path, victim, how):
    process, peers = start(tmp_path, 3, max_restarts=1)
    try:
        assert len(peers) == 3
        # of peers with one version, the one with the last name leads
        killed = peers[-1] if victim == "leader" else peers[0]
        killed.send_signal(how)
        wait_for(process, lambda: len(peers_of(process)) == 3 and killed not in peers_of(process))
        newcomer = peers_of(process)[-1]
        before = num_updates(tmp_path)
        wait_for(process, lambda: num_updates(tmp_path) > before + 50)
        wait_for(process, lambda: newcomer.cpu_times().user > 0.5)  # it takes part
    finally:
        process.send_signal(signal.SIGINT)
        printed, errors = process.communicate(timeout=60)
    assert re.search(
        rf"peer-\d \(process \d+\) was ended by {how.name}\npeer-\d is started again", printed
    )
    assert process.returncode == 130, errors
    record = record_in(tmp_path)
    assert record.info["status"] == "interrupted"
    assert_accounted(record)
    actors = {r["actor"] for r in record.lines("rollouts")[-200:]}
    assert actors == set(range(6))  # all three peers, the newcomer too
    assert_gone(peers)


def test_an_interrupt_waits_until_what_was_taken_out_of_the_store_is_written_down():
    broker, heard = object.__new__(launch.Broker), []

    class Interrupted:
        def hear(self, said):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)
            heard.append(said["peer"])

    broker._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    broker._recorder, broker._coming = Interrupted(), set()
    for name in ("a", "b"):
        broker._store.queue_push("log", f'{{"peer": "{name}"}}')
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        broker._hear()
    assert heard == ["a", "b"]
    assert signal.getsignal(signal.SIGINT) is before


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
    assert len(record.info["resumed"]) == 1
    updates = record.lines("updates")
    assert [u["version"] for u in updates] == list(range(2, len(updates) + 2))
    times = [u["wall_time"] for u in updates]
    assert times == sorted(times)
    assert updates[-1]["step"] >= 150_000 > updates[-2]["step"]


def test_under_torchrun_a_run_of_the_same_name_is_left_alone(tmp_path):
    """A process that fails at once is started again by torchrun, and is not to take a record for its own."""
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
    assert record.lines("updates")[-1]["step"] >= 4_000
    # two short episodes in one unroll can be alike; a record told twice would have all of them twice
    episodes = [tuple(e.values()) for e in record.lines("episodes")]
    assert len(episodes) > 20  # none is cut off because the peers started at different times
    assert len(set(episodes)) > 0.9 * len(episodes)


def test_what_cannot_be_recorded_ends_the_run(tmp_path):
    """Under torchrun, where a peer records beside learning."""
    planted = "from baselines import run_log; run_log.RunLog.write = lambda *_: 1 / 0;"
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
    assert record_in(tmp_path / "runs").info["status"] == "failed"


def test_a_peer_that_is_killed_as_the_others_finish_does_not_keep_the_run(tmp_path):
    """It is started again, but there is nothing left to do; whichever of the two comes first."""
    for number in range(4):
        runs_dir = tmp_path / str(number)
        words = command(runs_dir, num_peers=3, total_steps=40_000, max_restarts=9)
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        share = (0.5, 0.8, 0.9, 0.97)[number]
        wait_for(process, lambda d=runs_dir, s=share: last_step(d) > s * 40_000)
        with contextlib.suppress(psutil.NoSuchProcess, IndexError):
            peers_of(process)[0].kill()
        _, errors = process.communicate(timeout=90)
        assert process.returncode == 0, errors
        record = record_in(runs_dir)
        assert record.completed
        assert_accounted(record)
        assert record.lines("updates")[-1]["step"] >= 40_000


DIES_BEFORE_IT_TELLS = """
import os, runpy
from baselines.moolib_atari import experiment
tell = experiment.Peer._tell
def tell_or_die(self, store, **what):
    if self.name == "peer-1" and what.get("update", {}).get("version") == 20:
        os.kill(os.getpid(), 9)
    tell(self, store, **what)
experiment.Peer._tell = tell_or_die
if __name__ == "__main__":
    runpy.run_module("baselines.moolib_atari", run_name="__main__")
"""


def test_a_step_that_a_dead_leader_did_not_tell_of_is_recorded_all_the_same(tmp_path):
    script = tmp_path / "planted.py"
    script.write_text(DIES_BEFORE_IT_TELLS)
    words = command(tmp_path, num_peers=2, total_steps=20_000)
    words[1:3] = [str(script)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert "peer-1 (process" in done.stdout  # the one that led
    record = record_in(tmp_path)
    assert_accounted(record)
    assert record.lines("updates")[-1]["step"] >= 20_000


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
    for u in record.lines("updates"):
        busy = u["env_time"] + u["inference_time"] + u["training_time"]
        assert busy <= u["update_seconds"] + 1e-3
    # all of the time between two updates, but for the seconds without a leader
    total = sum(u["update_seconds"] for u in record.lines("updates"))
    assert total <= record.lines("updates")[-1]["wall_time"] + 1e-3


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
    experiment._share_cores(options.Args(num_peers=peers, torch_threads=asked))
    assert chosen == ([] if expected is None else [expected])


def test_a_run_whose_only_peer_is_killed_fails_and_names_it(tmp_path):
    process, peers = start(tmp_path, 1, max_restarts=1)
    peers[0].kill()
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "peer-0 was ended by SIGKILL, and there is no other peer" in errors
    assert record_in(tmp_path).info["status"] == "failed"


def test_an_error_in_one_peer_ends_the_run(tmp_path):
    done = run(tmp_path, code=1, num_peers=2, learning_rate=1e30, total_steps=1_000_000)
    assert re.search(r"FloatingPointError: peer-\d: the loss at version \d+ is nan", done.stderr)
    record = record_in(tmp_path)
    assert record.info["status"] == "failed"
    assert "has failed" in record.info["error"]


def test_peers_end_when_what_launched_them_is_killed(tmp_path):
    process, peers = start(tmp_path, 2)
    process.kill()
    process.communicate(timeout=15)
    assert_gone(peers)


def test_a_run_goes_on_from_a_checkpoint_of_its_leader(tmp_path):
    plan = options.prepare(options.Args(env="CartPole-v1", runs_dir=str(tmp_path)))
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


def test_the_leader_keeps_its_latest_checkpoint_and_a_history(tmp_path):
    run(
        tmp_path, num_peers=2, total_steps=100_000, checkpoint_interval=0.3,
        checkpoint_history_interval=0.8,
    )  # fmt: skip
    record = record_in(tmp_path)
    last = record.lines("updates")[-1]
    with np.load(record.path / experiment.CHECKPOINT, allow_pickle=False) as arrays:
        assert (int(arrays["version"]), int(arrays["steps"])) == (last["version"], last["step"])
    kept = list((record.path / "checkpoints").glob("version-*.npz"))
    assert kept
    for path in kept:
        with np.load(path, allow_pickle=False) as arrays:
            assert path.stem == f"version-{int(arrays['version'])}"


@pytest.mark.parametrize("name", ["resnet", "nature", "mlp"])
def test_gradients_agree_with_the_jax_impala(name):
    """moolib's losses are means over real steps, the JAX ones sums."""
    rng = np.random.default_rng(0)
    steps, envs, actions = 5, 4, 3
    obs_shape = {"resnet": (4, 20, 20), "nature": (4, 84, 84), "mlp": (6,)}[name]
    if name == "mlp":
        obs = rng.normal(size=(steps + 1, envs, *obs_shape)).astype(np.float32)
    else:
        obs = rng.integers(0, 256, (steps + 1, envs, *obs_shape)).astype(np.uint8)
    unroll = experiment.Unroll(
        obs=obs,
        rewards=2 * rng.normal(size=(steps + 1, envs)).astype(np.float32),
        dones=rng.random((steps + 1, envs)) < 0.3,
        actions=rng.integers(0, actions, (steps + 1, envs)).astype(np.int32),
        logits=rng.normal(size=(steps + 1, envs, actions)).astype(np.float32),
        versions=np.ones(steps + 1, np.int64),
    )
    args = options.Args()
    network = networks.make_network(name, actions)
    params = network.init(jax.random.key(0), obs[0])
    torch_network = make_network(name, obs_shape, actions)
    copy_from_flax(params, torch_network)

    def jax_loss(params):
        logits, values = network.apply(params, obs.reshape(-1, *obs_shape))
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

    expected, losses = jax.grad(jax_loss, has_aux=True)(params)
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
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.models = [torch.nn.Linear(2, 1, bias=False) for _ in versions]
        self.peers, self.groups = [], []
        for index, (model, version) in enumerate(zip(self.models, versions, strict=True)):
            client = TCPStore("127.0.0.1", self.store.port, is_master=False)
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


def test_peers_whose_group_fails_without_a_death_get_another():
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
    cohort.membership.publish(begun=True)
    assert (
        not first.connected()
    )  # not at once: perhaps one of them has died, which comes to light soon
    time.sleep(1.1)
    cohort.membership.publish(begun=True)
    cohort.everywhere(join)
    assert [g.generation.number for g in groups] == [2, 2]
    groups[0].give_up()
    groups[0].generation = groups[0].generation._replace(number=1)
    groups[0].give_up()  # a complaint about an old group is no reason for another
    cohort.membership.look()
    cohort.membership.remove("peer-0", regroup=False)
    assert cohort.membership.look() == []


def test_a_member_that_does_not_come_is_not_waited_for():
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", store.port, is_master=False)
    group, membership = Group(client, "peer-0", CPU), Membership(store)
    Group(client, "peer-1", CPU)  # asks to be let in, and is never heard of again
    membership.look()
    membership.publish(begun=False)
    begin = time.monotonic()
    assert group.look()
    group.follow()
    assert not group.gather()
    assert time.monotonic() - begin < 1
    membership.remove("peer-1", regroup=False)
    while not group.look():
        assert not group.gather()
        membership.look()  # after a while, it asks for another
        membership.publish(begun=False)
        assert time.monotonic() - begin < 10
        time.sleep(0.01)
    group.follow()
    assert group.gather()
    assert group.generation.members == ("peer-0",)
    assert (group.all_gather(torch.tensor([5])) == 5).all()


def test_a_generation_that_a_member_has_left_for_the_next_is_not_waited_for():
    """Though all its members have been in it, and one of them comes last and late."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    clients = [TCPStore("127.0.0.1", store.port, is_master=False) for _ in range(2)]
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
    begin = time.monotonic()
    assert not late.gather()
    assert time.monotonic() - begin < 1
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
    rows = [{"actor": actor, "rollout": number} for number in rollouts]
    return {"version": version, "group": group, "losses": {"loss": loss}, "rollouts": rows}


def step(version, group):
    update = {"version": version, "gradient_version": version - 1, "step": 10 * version}
    return {"group": group, "update": update}


def test_rollouts_are_recorded_with_the_step_that_learned_from_them_or_counted_as_lost():
    log = Log()
    recorder = Recorder(log)
    recorder.hear(gradient(1, 1, 1, loss=1.0))
    recorder.hear(gradient(1, 1, 1, 2, actor=2, loss=3.0))
    recorder.hear(step(2, 1))
    recorder.hear(gradient(2, 1, 2))  # a peer is lost, and this with it
    recorder.hear(step(2, 1))  # a new leader says again what the last one may not have said
    recorder.hear(gradient(2, 2, 3))
    recorder.hear(step(3, 2))
    recorder.hear(gradient(2, 2, 4))  # overtaken by the step
    recorder.hear(gradient(2, 1, 5))  # and one more that was lost
    recorder.restarted([0])
    recorder.hear(gradient(3, 2, 1))
    recorder.hear(step(4, 2))
    numbers = [[(r["actor"], r["rollout"]) for r in rows] for _, rows, _ in log.written]
    assert numbers == [[(0, 1), (2, 1), (2, 2)], [(0, 3)], [(0, 4), (0, 6)]]
    assert [update["num_lost"] for update, *_ in log.written] == [0, 1, 1]
    assert [update["loss"] for update, *_ in log.written] == [2.0, 1.0, 1.0]
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
    batcher = experiment.LearnBatcher(6)
    assert batcher.empty()
    for number in (1, 2):
        batcher.put(experiment.Piece(None, 0, number, slice(0, 8), 0.0))
    taken = [[(p.number, p.columns.start, p.columns.stop) for p in batcher.get()] for _ in range(2)]
    assert taken == [[(1, 0, 6)], [(1, 6, 8), (2, 0, 4)]]
    assert batcher.empty()


def test_the_last_step_of_an_unroll_is_the_first_of_the_next():
    args = options.Args(env="CartPole-v1", actor_batch_size=3, unroll_length=4, num_actor_cpus=1)
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
    assert row["versions"] == [[5, 3], [6, 3], [7, 3], [8, 3]]
    assert (row["steps"], row["envs"], row["learner_version"]) == (12, 3, 9)


def test_presets_are_the_settings_of_the_paper(tmp_path):
    total = {}
    for preset in options.PRESETS:
        args = options.Args(env="CartPole-v1", preset=preset, runs_dir=str(tmp_path))
        args = options.prepare(args).args
        total[preset] = args.num_peers * args.num_actor_batches * args.actor_batch_size
        assert (args.batch_size, args.virtual_batch_size, args.unroll_length) == (32, 32, 20)
        assert (args.learning_rate, args.entropy_cost, args.grad_norm_clipping) == (6e-4, 6e-4, 40)
    assert total == {"base": 256, "workstation": 256, "mistake": 2048}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"env": "Brekout-v5"}, "did you mean .*Breakout-v5"),
        ({"num_peers": 0}, "--num-peers 0: must be 1 or more"),
        ({"network": "resnet"}, "--network resnet: observations are"),
        ({"max_restarts": -1}, "--max-restarts -1: must be 0 or more"),
        (
            {"checkpoint_history_interval": 0},
            "--checkpoint-history-interval 0.0: must be more than 0",
        ),
        ({"reward_clip": -1}, "--reward-clip -1.0: must be 0 or more"),
        ({"setting": "a/b"}, "--setting a/b: is part of a folder's name"),
        ({"transport": "moolib"}, "the moolib library is not installed"),
        ({"preset": "none", "colour": "red"}, "colour"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, flags, message):
    done = run(tmp_path, code=2, **flags)
    (line,) = done.stderr.strip().splitlines()
    assert re.search(message, line), line
    assert list(tmp_path.iterdir()) == []


TWENTY_RUNS = """
import contextlib, os, pathlib, signal, sys, threading, time
import psutil
from baselines.moolib_atari import __main__ as moolib
from baselines.moolib_atari.launch import PeerFailed
from cleanba.command_line import parse

runs_dir = pathlib.Path(sys.argv[1])
small = sys.argv[2:]
me = psutil.Process()
def descriptors():
    return len(os.listdir("/proc/self/fd"))
def peers():  # children of multiprocessing's fork server, which stays
    return sorted((p for child in me.children() for p in child.children()), key=lambda p: p.pid)
def once_it_learns(folder, act):
    path = folder / "updates.jsonl"
    while not (path.is_file() and path.stat().st_size):
        time.sleep(0.01)
    act()
acts = {"peer is killed": lambda: peers()[0].kill(),
        "all are killed": lambda: [peer.kill() for peer in peers()],
        "is interrupted": lambda: os.kill(me.pid, signal.SIGINT)}
kinds = ("completes", "fails", "peer is killed", "all are killed", "is interrupted")
for n in range(20):
    kind = kinds[n % 5]
    total = {"completes": 10_000, "peer is killed": 100_000}.get(kind, 10_000_000)
    flags = [*small, f"--runs-dir={runs_dir}", "--num-peers=2", f"--seed={n}", f"--total-steps={total}"]
    flags += ["--learning-rate=1e30"] if kind == "fails" else []
    folder = runs_dir / "default" / f"moolib__peers2-envs32__CartPole-v1__s{n}"
    if kind in acts:
        threading.Thread(target=once_it_learns, args=(folder, acts[kind]), daemon=True).start()
    try:
        moolib.main(parse(moolib.Args, flags, ""))
        outcome = ("completes", "peer is killed")
    except PeerFailed as error:
        outcome = ("fails",) if "has failed" in str(error) else ("all are killed",)
    except KeyboardInterrupt:
        outcome = ("is interrupted",)
    assert kind in outcome, (n, kind, outcome)
    _, alive = psutil.wait_procs(peers(), timeout=10)
    assert not alive, alive
    assert len(me.children()) <= 2  # the fork server, and multiprocessing's resource tracker
    if n == 4:
        first = descriptors()
    if n == 19:
        assert descriptors() <= first + 2, (first, descriptors())
print("twenty")
"""


def test_after_20_runs_no_process_is_left_and_no_shared_memory(tmp_path):
    before = sorted(os.listdir("/dev/shm"))
    words = [f"--{name}={value}" for name, value in SMALL.items()]
    done = subprocess.run(
        [sys.executable, "-c", TWENTY_RUNS, str(tmp_path), *words],
        capture_output=True, text=True, timeout=300, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("twenty\n")
    assert done.stdout.count("was ended by SIGKILL") >= 8
    assert sorted(os.listdir("/dev/shm")) == before
    statuses = [
        json.loads(path.read_text())["status"] for path in tmp_path.glob("default/*/run.json")
    ]
    assert sorted(statuses) == ["completed"] * 8 + ["failed"] * 8 + ["interrupted"] * 4
