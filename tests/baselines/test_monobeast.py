"""monobeast's architecture: what it records adds up, and however it ends, nothing is left behind."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import optax
import psutil
import pytest
import torch

from baselines import monobeast_study
from baselines.one_environment import Environment
from baselines.shared_memory import IndexQueue, shared_tensor
from baselines.torch_io import fingerprint_network, load_parameters, save_parameters
from baselines.torch_losses import impala_loss
from baselines.torch_networks import make_network
from baselines.worker_processes import Clock
from cleanba.environments import describe_env
from cleanba.record import read_run
from cleanba.run.command_line import BadInput, parse
from tests.baselines.test_evaluate import balancing_network
from tests.command_lines import parsed, refusal

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "baselines" / "monobeast_study.py"
LINE = re.compile(
    r"^actor_index (\d+) initial policy_version (\d+) policy_version after rollout (\d+)$"
)

# Appendix G of the paper, with `python -m torchbeast.monobeast_study` left out.
APPENDIX_G = (
    "--num_actors 80 --total_steps 10000000 --learning_rate 0.0006 --epsilon 0.01 --entropy_cost 0.01 "
    "--batch_size 8 --unroll_length 240 --num_threads 1 --env Pong-v5",
    "--num_actors 80 --total_steps 10000000 --learning_rate 0.0006 --epsilon 0.01 --entropy_cost 0.01 "
    "--batch_size 8 --unroll_length 240 --num_threads 1 --env Pong-v5 --learner_delay_seconds 1.0",
    "--num_actors 40 --total_steps 10000000 --learning_rate 0.0006 --epsilon 0.01 --entropy_cost 0.01 "
    "--batch_size 8 --unroll_length 240 --num_threads 1 --env Pong-v5",
)

SMALL = {
    "env": "CartPole-v1", "num_actors": 4, "batch_size": 4, "unroll_length": 10,
    "total_steps": 10_000,
}  # fmt: skip


def command(runs_dir, **options):
    words = [sys.executable, str(SCRIPT), "--savedir", str(runs_dir)]
    for name, value in (SMALL | options).items():
        words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return words


def run(runs_dir, code=0, **options):
    done = subprocess.run(command(runs_dir, **options), capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def record_in(runs_dir):
    (folder,) = runs_dir.glob("default/*")
    return read_run(folder)


def wait_for_update(runs_dir, process):
    """Wait until a run has recorded an update; return its folder."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        for path in runs_dir.glob("default/*/updates.jsonl"):
            if path.stat().st_size:
                return path.parent
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    raise AssertionError("no update within two minutes")


def start(runs_dir, **options):
    """Start a run that would last; return the process and its actors, once it has learned."""
    words = command(runs_dir, total_steps=10_000_000, **options)
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    wait_for_update(runs_dir, process)
    return process, psutil.Process(process.pid).children(recursive=True)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run of 1,000 rollouts, and what it printed."""
    runs_dir = tmp_path_factory.mktemp("runs")
    done = run(runs_dir)
    return record_in(runs_dir), done.stdout


@pytest.mark.slow
def test_nothing_is_lost_or_learned_from_twice_in_1000_rollouts(finished):
    record, printed = finished
    rollouts = record.rollouts()
    assert len(rollouts) == 1000
    for actor in range(4):
        numbers = sorted(r.rollout for r in rollouts if r.actor == actor)
        # none missing, none twice; two learner threads may take turns out of their order
        assert numbers == list(range(1, len(numbers) + 1))
    # and what was never learned from is at most what was in the buffers at the end
    made = sum(1 for line in printed.splitlines() if LINE.match(line))
    assert 0 <= made - len(rollouts) <= record.info.hyperparameters["num_buffers"] + 4
    updates = record.updates()
    assert [u.version for u in updates] == list(range(2, 252))
    assert [u.step for u in updates] == list(range(40, 10_001, 40))[: len(updates)]


@pytest.mark.slow
def test_versions_of_a_rollout_add_up_and_never_fall(finished):
    record, _ = finished
    learner_versions = []
    for r in record.rollouts():
        versions = [version for version, _ in r.versions]
        assert sum(steps for _, steps in r.versions) == r.steps == 10
        assert versions == sorted(set(versions))
        assert versions[0] == r.version_first >= 1
        assert versions[-1] == r.version_last <= r.learner_version
        learner_versions.append(r.learner_version)
    assert learner_versions == sorted(learner_versions)
    assert [learner_versions.count(v) for v in range(1, 251)] == [4] * 250


@pytest.mark.slow
def test_lines_are_those_of_the_paper_s_appendix_and_agree_with_the_record(finished):
    record, printed = finished
    lines = [tuple(map(int, m.groups())) for m in map(LINE.match, printed.splitlines()) if m]
    by_actor = {actor: [line[1:] for line in lines if line[0] == actor] for actor in range(4)}
    for r in record.rollouts():
        first, after = by_actor[r.actor][r.rollout - 1]
        assert first == r.version_first
        assert after >= r.version_last


@pytest.mark.slow
def test_episodes_are_whole(finished):
    record, _ = finished
    episodes = record.episodes()
    assert len(episodes) > 100
    for e in episodes:
        assert e.episode_return == e.length  # CartPole gives 1 a step
        assert 8 <= e.length <= 500
    by_env = {}
    for e in episodes:
        by_env[e.env_index] = by_env.get(e.env_index, 0) + e.length
    for steps in by_env.values():
        assert steps <= 10 * 1000
    # steps of finished episodes are nearly all steps: none is counted twice, few are unfinished
    assert 10_000 - 4 * 500 <= sum(by_env.values()) <= 10_000


def test_an_env_resets_within_the_step_that_ends_an_episode():
    env = Environment("CartPole-v1", 5, "machado")
    first = env.initial()
    total, step = 0, first
    for _ in range(200):
        total += 1
        step = env.step(1)  # always to the right: it falls soon
        assert step.episode_length == total == step.episode_return
        if step.done:
            assert np.abs(step.obs).max() < 0.06  # CartPole begins within 0.05 of upright
            total = 0


@pytest.mark.parametrize("line", APPENDIX_G)
def test_the_command_lines_of_appendix_g_are_taken_verbatim(line, tmp_path):
    args = parse(monobeast_study.Args, [*shlex.split(line), "--savedir", str(tmp_path)], "")
    assert (args.env, args.batch_size, args.unroll_length) == ("Pong-v5", 8, 240)
    assert args.num_learner_threads == 1
    assert args.num_actors == (40 if "40" in line.split()[:2] else 80)
    assert args.hardware.learner_delay_seconds == (1.0 if "delay" in line else 0.0)
    plan = monobeast_study.prepare(args)
    assert plan.network_name == "resnet"
    assert plan.num_buffers == 2 * args.num_actors


def test_a_record_starts_when_its_clock_does(tmp_path):
    plan = monobeast_study.prepare(
        parsed(monobeast_study.Args, env="CartPole-v1", savedir=tmp_path)
    )
    clock = Clock()
    clock.started = "2026-01-02T03:04:05+00:00"
    with monobeast_study.begin_log(plan, torch.device("cpu"), 1, clock):
        pass
    assert record_in(tmp_path).info.started == clock.started


@pytest.mark.slow
def test_a_slow_actor_sees_policies_change_inside_its_rollouts(tmp_path):
    """Where acting is the slow side, about actors / batch changes in a rollout; never more."""
    run(tmp_path, actor_delay_seconds=0.005, unroll_length=40, batch_size=1, total_steps=6400)
    record = record_in(tmp_path)
    assert record.path.name.startswith("monobeast__actors4-acting0.005__")
    changes = [len(r.versions) - 1 for r in record.rollouts()]
    assert 1 < np.mean(changes) <= 4  # each of four actors sees an update once


@pytest.mark.slow
def test_an_lstm_and_the_nature_network_learn_from_atari(tmp_path):
    run(
        tmp_path, env="Pong-v5", network="nature", use_lstm=True, num_actors=2, batch_size=2,
        unroll_length=5, total_steps=40, disable_cuda=True,
    )  # fmt: skip
    record = record_in(tmp_path)
    assert record.completed
    assert len(record.updates()) == 4
    assert record.info.hyperparameters["use_lstm"]


@pytest.mark.soak
def test_football_s_images_are_learned_from(tmp_path):
    run(
        tmp_path, env="gfootball/academy_empty_goal_close-v1", network="nature", num_actors=2,
        batch_size=2, unroll_length=5, total_steps=40, disable_cuda=True,
    )  # fmt: skip
    record = record_in(tmp_path)
    assert record.completed
    assert len(record.updates()) == 4


@pytest.mark.slow
def test_the_model_of_a_run_is_what_it_learned(tmp_path):
    run(tmp_path, total_steps=400)
    record = record_in(tmp_path)
    network = make_network("mlp", (4,), 2)
    load_parameters(network, record.path / "model.npz")
    assert fingerprint_network(network) == record.updates()[-1].fingerprint


def test_a_trained_model_is_tested_by_its_most_probable_actions(tmp_path, capsys):
    args = parsed(monobeast_study.Args, env="CartPole-v1", savedir=tmp_path, mode="test")
    network = balancing_network()
    with torch.no_grad():
        network.actor.weight *= 1e-6  # actions that are drawn are any
    folder = monobeast_study.prepare(args).run.directory
    folder.mkdir(parents=True)
    save_parameters(network, folder / "model.npz")
    monobeast_study.main(args)
    *episodes, average = capsys.readouterr().out.splitlines()
    assert episodes == ["Episode ended after 500 steps. Return: 500.0"] * 10
    assert average == "Average returns over 10 episodes: 500.0"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"env": "Pogn-v5"}, "did you mean .*Pong-v5"),
        ({"num_actors": 0}, "--num-actors 0: must be 1 or more"),
        ({"num_buffers": 3}, "--num-buffers 3: needs at least one per actor"),
        ({"use_lstm": True}, "--use-lstm: needs a resnet or nature network"),
        ({"initialization": "orthogonal"}, "--initialization orthogonal: needs --network nature"),
        (
            {
                "env": "Pong-v5",
                "network": "nature",
                "use_lstm": True,
                "initialization": "orthogonal",
            },
            "--initialization orthogonal: needs .*without an LSTM",
        ),
        ({"mode": "test"}, "--mode test: there is no .*model.npz"),
        ({"learner_delay_seconds": -1}, "--learner-delay-seconds -1.0: must be 0 or more"),
        ({"learner_delay_seconds": "nan"}, "--learner-delay-seconds nan: must be 0 or more"),
        ({"discounting": 5}, "--discounting 5.0: must be from 0 to 1"),
        ({"num_buffers": 20_000}, "--num-buffers 20000: at most 16000"),
        ({"xpid": "../x"}, "--setting '../x': becomes part of a folder's name"),
        ({"setting": ""}, "--setting '': becomes part of a folder's name"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, capsys, options, message):
    values = SMALL | {"savedir": tmp_path} | options
    line = refusal(monobeast_study.Args, monobeast_study.main, capsys, **values)
    assert re.search(message, line), line
    assert list(tmp_path.iterdir()) == []


def assert_gone(processes):
    _, alive = psutil.wait_procs(processes, timeout=15)
    assert not alive, [p.cmdline() for p in alive]


SLOW_UPDATE = """
import json, pathlib, sys, threading, time
from baselines import monobeast_study as study
from baselines.worker_processes import ProcessDied
from cleanba.run.command_line import parse
import psutil

study.SECONDS_TO_STOP = 0.2
compute_gradient, entered, left = study.compute_gradient, threading.Event(), threading.Event()
def slowly(*args):
    entered.set()
    left.wait(30)
    return compute_gradient(*args)
study.compute_gradient = slowly
study.RunLog.write = lambda *_: print("written")
def kill():
    entered.wait(30)
    psutil.Process().children()[1].kill()
threading.Timer(0, kill).start()
flags = ["--savedir", sys.argv[1], "--env", "CartPole-v1", "--num_actors", "3", "--no-progress"]
try:
    study.train(study.prepare(parse(study.Args, flags, "")))
except ProcessDied:
    learners = [t for t in threading.enumerate() if t.name.startswith("learner-")]
    assert learners, "no update was under way"
    left.set()
    for thread in learners:
        thread.join(30)
        assert not thread.is_alive()
"""


@pytest.mark.slow
def test_an_update_that_outlives_its_run_touches_nothing_any_more(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SLOW_UPDATE, str(tmp_path)],
        capture_output=True, text=True, timeout=120, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == done.stderr == ""
    record = record_in(tmp_path)
    assert record.info.status == "failed"
    assert record.updates() == []


@pytest.mark.slow
def test_a_delayed_learner_ends_with_its_actors(tmp_path):
    process, actors = start(tmp_path, learner_delay_seconds=60, learner_delay="broadcast")
    os.kill(actors[0].pid, signal.SIGKILL)
    begin = time.monotonic()
    process.communicate(timeout=30)
    assert time.monotonic() - begin < 20  # of 60: the threads are woken, not waited for
    assert record_in(tmp_path).info.status == "failed"
    assert_gone(actors)


LINES_AT_EVERY_UPDATE = """
import runpy, sys
from cleanba.run import log
log.SECONDS_BETWEEN_LINES = 0.0
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
def test_nobody_needs_to_read_the_lines(tmp_path):
    """Neither those of the actors nor those on progress."""
    python, *words = command(tmp_path)
    words = [python, "-c", LINES_AT_EVERY_UPDATE, *words]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.readline()
    process.stdout.close()
    process.wait(timeout=120)
    assert record_in(tmp_path).completed


def test_shared_memory_is_seen_by_a_forked_process():
    tensor, queue = shared_tensor((2, 3), torch.float32), IndexQueue()
    child = os.fork()
    if not child:
        tensor[1, 2] = 7
        queue.put(5)
        os._exit(0)
    assert queue.get() == 5
    assert tensor[1, 2] == 7
    os.waitpid(child, 0)
    queue.close()


def test_whoever_waits_for_the_dead_is_told():
    queue = IndexQueue()
    queue.put(3)
    queue.only_get()
    assert queue.get() == 3
    with pytest.raises(EOFError):
        queue.get()
    queue = IndexQueue()
    queue.only_put()
    with pytest.raises(BrokenPipeError):
        queue.put(3)


def test_steps_and_rewards_of_a_batch_are_where_they_belong():
    args = monobeast_study.Args(unroll_length=3, batch_size=2)
    spec = monobeast_study.EnvSpec("x", (2,), np.dtype(np.float32), 3, False, 10)
    buffers = monobeast_study.make_buffers(4, 3, spec, (0,))
    for n in (1, 3):
        buffers.obs[n] = n * 10 + torch.arange(4)[:, None]
        buffers.rewards[n] = torch.arange(4) - 0.5 + n
        buffers.origin[n] = torch.tensor([n, 7, 0])
    batch, origin = monobeast_study.take_batch(buffers, [3, 1], args, torch.device("cpu"))
    assert batch.obs[:, 0, 0].tolist() == [30, 31, 32, 33]
    assert batch.obs[:, 1, 1].tolist() == [10, 11, 12, 13]
    assert batch.rewards[:, 1].tolist() == [0.5, 1, 1, 1]  # clipped
    assert origin.actors.tolist() == [3, 1]
    buffers.obs[3] = 0  # the batch is a copy: its buffers are free
    assert batch.obs[:, 0, 0].tolist() == [30, 31, 32, 33]


def silent_learner(monkeypatch, args, network, of_actors):
    """Return a learner that records nothing, and what it shares with actors, whose versions are 1."""
    versions = (torch.ones(1, dtype=torch.int64) for _ in range(2))
    policy = monobeast_study.Policy(of_actors, *versions)
    shared = monobeast_study.Shared(policy, None, None, None)
    monkeypatch.setattr(monobeast_study.Learner, "_record", lambda *_: None)
    return monobeast_study.Learner(args, network, shared, None, Clock()), policy


def test_actors_get_parameters_learned_from_the_clipped_gradient_of_impala_s_loss(monkeypatch):
    """Observation t leads to action t, and that to reward t + 1."""
    torch.manual_seed(0)
    args = monobeast_study.Args(
        unroll_length=3, batch_size=2, learning_rate=0.1, grad_norm_clipping=0.1
    )
    network, of_actors = (make_network("mlp", (4,), 2) for _ in range(2))
    obs, behaviour = torch.randn(4, 2, 4), torch.randn(3, 2, 2)
    actions, rewards, dones = torch.randint(2, (3, 2)), torch.randn(3, 2), torch.rand(3, 2) < 0.3
    rows = [
        torch.cat([torch.zeros(1, 2, dtype=later.dtype), later])
        for later in (rewards, dones, actions)
    ]
    logits, values = network(obs.flatten(0, 1))
    loss = impala_loss(
        logits.view(4, 2, 2)[:-1], values.view(4, 2), behaviour, actions, rewards, dones, torch.ones(3, 2),
        discounting=0.99, baseline_cost=0.5, entropy_cost=0.0006,
    ).loss  # fmt: skip
    reference = optax.chain(
        optax.clip_by_global_norm(0.1),
        optax.rmsprop(0.1, decay=0.99, eps=0.01, eps_in_sqrt=False),
    )
    params = [p.detach().numpy().copy() for p in network.parameters()]
    gradients = [g.numpy() for g in torch.autograd.grad(loss, list(network.parameters()))]
    updates, _ = reference.update(gradients, reference.init(params))

    learner, _ = silent_learner(monkeypatch, args, network, of_actors)
    learner._learn(monobeast_study.Batch(obs, *rows, behaviour, None), None, 0.0)
    for found, old, update in zip(of_actors.parameters(), params, updates, strict=True):
        np.testing.assert_allclose(found.detach(), old + update, atol=1e-6)


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("learning", (0.2, True, 1, 1)),  # the other threads wait as well
        ("broadcast", (0.2, False, 2, 1)),  # they learn meanwhile, and actors stay behind
    ],
)
def test_a_delayed_learner_waits_where_it_is_told_to(monkeypatch, where, expected):
    flags = {"env": "CartPole-v1", "learner_delay_seconds": 0.2, "learner_delay": where}
    args = parsed(monobeast_study.Args, **flags)
    assert monobeast_study.setting_name(args) == f"actors4-{where}0.2"
    networks = (make_network("mlp", (4,), 2) for _ in range(2))
    learner, policy = silent_learner(monkeypatch, args, *networks)
    waits = []

    def wait(seconds):
        waits.append(
            (seconds, learner._learn_lock.locked(), learner.version, policy.version.item())
        )

    monkeypatch.setattr(learner._stopping, "wait", wait)
    rows = torch.zeros(3, 1), torch.zeros(3, 1, dtype=torch.bool), torch.zeros(3, 1)
    batch = monobeast_study.Batch(torch.zeros(3, 1, 4), *rows, torch.zeros(2, 1, 2), None)
    learner._learn(batch, None, 0.0)
    assert waits == [expected]
    assert policy.version == policy.begun == 2


class CopiedInto(torch.nn.Module):
    """A network into which the learner copies parameters during some of its steps."""

    def __init__(self):
        super().__init__()
        self.version, self.begun = (torch.ones(1, dtype=torch.int64) for _ in range(2))
        self.steps = 0

    def forward(self, obs):
        self.steps += 1
        if self.steps in (2, 5):
            self.begun += 1
        if self.steps in (3, 5):
            self.version += 1
        return torch.zeros(1, 2), torch.zeros(1)


class OneRollout:
    """A queue of free buffers that is empty after the first one."""

    def __init__(self):
        self.left = [0]

    def get(self):
        return self.left.pop()


def test_steps_that_may_have_used_a_mixture_of_two_versions_are_counted():
    args = parsed(monobeast_study.Args, env="CartPole-v1", unroll_length=6, no_progress=True)
    network, spec = CopiedInto(), describe_env("CartPole-v1")
    shared = monobeast_study.Shared(
        monobeast_study.Policy(network, network.version, network.begun),
        monobeast_study.make_buffers(1, 6, spec, (0,)),
        OneRollout(),
        IndexQueue(),
    )
    with pytest.raises(IndexError):
        monobeast_study.act(0, args, spec, shared, Clock())
    # one copy from the second step to the third, and one within the fifth
    assert shared.buffers.versions[0].tolist() == [1, 1, 1, 2, 2, 3]
    assert shared.buffers.origin[0].tolist() == [0, 1, 3]


def test_a_plan_refuses_more_actors_than_seeds():
    with pytest.raises(BadInput, match="at most"):
        monobeast_study.prepare(parsed(monobeast_study.Args, env="CartPole-v1", num_actors=20_000))
