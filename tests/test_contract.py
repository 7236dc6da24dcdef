"""What every system promises: its record, its exit codes, and what it leaves behind.

One short run of each system serves all tests that only read its record.
"""

import importlib
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from cleanba.record import Run, read_run
from cleanba.run.command_line import exit_code
from cleanba.run.flags import flags
from tests.command_lines import refusal

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTED = set(re.findall(r"`(\w+)`", (ROOT / "docs" / "run-record.md").read_text()))


@dataclass(frozen=True)
class System:
    """How a system is run for a few updates on CartPole."""

    module: str
    name: str  # of its records: system and setting
    options: Mapping[str, Any]
    length: str = "total_timesteps"  # name of its number of agent steps
    steps: int = 1024  # a whole number of its updates
    overflow: Mapping[str, Any] = field(default_factory=lambda: {"learning_rate": 1e30})
    prints: str = "completed: .*"  # each line on stdout, without progress

    @property
    def all_options(self) -> dict[str, Any]:
        return {"env_id": "CartPole-v1", "progress": False, self.length: self.steps, **self.options}

    def command(self, runs_dir: Path, **options: Any) -> list[str]:
        words = flags(self.all_options | {"runs_dir": runs_dir} | options)
        return [sys.executable, "-m", self.module, *words]

    @property
    def program(self) -> tuple[type, Callable]:
        """The class of its command line, and its `main`."""
        module = importlib.import_module(self.module)
        if hasattr(module, "__path__"):
            module = importlib.import_module(f"{self.module}.__main__")
        return module.Args, module.main


CLEANBA = {"num_envs": 8, "num_env_groups": 4, "num_steps": 16, "num_minibatches": 2}
# Clipping would keep the gradient, and so the parameters, finite.
JAX_OVERFLOW = {"learning_rate": 1e38, "max_grad_norm": 1e30}
SYSTEMS = {
    "cleanba_ppo": System(
        "cleanba.cleanba_ppo", "cleanba_ppo-sync__a0-l0-d1-t2", CLEANBA, overflow=JAX_OVERFLOW
    ),
    "cleanba_impala": System(
        "cleanba.cleanba_impala", "cleanba_impala__a0-l0-d1-t2", CLEANBA, overflow=JAX_OVERFLOW
    ),
    "cleanrl_ppo": System(
        "baselines.cleanrl_ppo",
        "cleanrl_ppo__one-device",
        {"num_envs": 8, "num_steps": 16},
        overflow=JAX_OVERFLOW,
    ),
    "monobeast": System(
        "baselines.monobeast_study",
        "monobeast__actors4",
        {"num_actors": 4, "batch_size": 4, "unroll_length": 10},
        length="total_steps",
        prints="completed: .*|actor_index .*",  # the lines of the paper's appendix G
    ),
    "moolib": System(
        "baselines.moolib_atari",
        "moolib__peers2-envs32",
        {
            "actor_batch_size": 8, "batch_size": 8, "virtual_batch_size": 8, "torch_threads": 1,
            "num_peers": 2,
        },
        length="total_steps",
        steps=4_000,
    ),
    "hts_rl": System(
        "baselines.hts_rl", "hts_rl_a2c__actors2", {"num_envs": 6, "num_actors": 2}, steps=1200
    ),
    "worker_schemes": System(
        "baselines.worker_schemes",
        "schemes_ppo-appo__g1-c1",
        {
            "num_envs": 4, "num_steps": 16, "num_minibatches": 2, "update_epochs": 2,
            "scheme": "appo", "gradient_workers": 1, "collection_workers": 1,
        },
    ),
}  # fmt: skip
of_every_system = pytest.mark.parametrize("system", SYSTEMS)
# Those whose processes take longest to start are left to `make soak`, where a test runs them twice.
of_every_system_twice = pytest.mark.parametrize(
    "system",
    [
        pytest.param(name, marks=[pytest.mark.soak] if name in ("moolib", "worker_schemes") else [])
        for name in SYSTEMS
    ],
)


@dataclass(frozen=True)
class Ended:
    """A run that has ended: its record, and what it printed."""

    runs_dir: Path
    run: Run
    code: int
    out: str
    err: str


def folder_in(runs_dir: Path) -> Path:
    (path,) = runs_dir.glob("default/*/run.json")
    return path.parent


def run(system: str, runs_dir: Path, **options: Any) -> Ended:
    words = SYSTEMS[system].command(runs_dir, **options)
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, cwd=ROOT)
    record = read_run(folder_in(runs_dir))
    return Ended(runs_dir, record, done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Returns the completed run of a system."""
    made = {}

    def get(system):
        if system not in made:
            made[system] = run(system, tmp_path_factory.mktemp(system))
        ended = made[system]
        assert ended.code == 0, ended.err
        return ended

    return get


@pytest.mark.slow
@of_every_system
def test_a_record_decodes_and_is_described(finished, system):
    record = finished(system).run
    assert record.completed
    assert record.info.error is None
    assert record.check_files() == []
    assert record.problems == []
    assert record.info.schema_version == 2
    assert f"{record.info.system}__{record.info.setting}" == SYSTEMS[system].name
    assert record.path.name == f"{SYSTEMS[system].name}__CartPole-v1__s1"
    assert set(record.info.hardware) <= DOCUMENTED


@pytest.mark.slow
@of_every_system
def test_a_record_adds_up(finished, system):
    record = finished(system).run
    updates, rollouts, episodes = record.updates(), record.rollouts(), record.episodes()
    assert len(updates) > 4
    assert [u.version for u in updates] == list(range(2, len(updates) + 2))
    steps, times = [u.step for u in updates], [u.wall_time for u in updates]
    assert steps == sorted(steps)
    assert times == sorted(times)
    assert SYSTEMS[system].steps <= steps[-1] < 1.5 * SYSTEMS[system].steps
    for r in rollouts:
        versions = [version for version, _ in r.versions]
        assert versions == sorted(set(versions))
        assert (r.version_first, r.version_last) == (versions[0], versions[-1])
        assert 1 <= r.version_first <= r.version_last <= r.learner_version
        assert sum(steps for _, steps in r.versions) == r.steps
    # moolib writes down gradients that came too late for the last update
    learned = [r for r in rollouts if r.learner_version < updates[-1].version]
    assert sum(r.steps for r in learned) == steps[-1]
    used = [(r.actor, r.group, r.rollout, r.first_env) for r in rollouts]
    assert len(used) == len(set(used))  # none is learned from twice
    assert len(episodes) > 5
    assert all(e.episode_return == e.length for e in episodes)  # CartPole gives 1 a step
    assert sum(e.length for e in episodes) <= sum(r.steps for r in rollouts)


@pytest.mark.slow
@of_every_system
def test_a_run_without_progress_prints_its_end_alone(finished, system):
    ended = finished(system)
    assert ended.err == ""
    assert ended.out.splitlines()[-1].startswith("completed: ")
    for line in ended.out.splitlines():
        assert re.fullmatch(SYSTEMS[system].prints, line)


def content(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
@of_every_system
def test_an_existing_record_is_refused_and_kept(finished, system, capsys):
    ended = finished(system)
    before = content(ended.runs_dir)
    program = SYSTEMS[system].program
    argv = flags(SYSTEMS[system].all_options | {"runs_dir": ended.runs_dir})
    assert exit_code(*program, argv) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "already holds a run" in error
    assert "--overwrite" in error
    assert content(ended.runs_dir) == before


@pytest.mark.slow
@of_every_system_twice
def test_an_exception_ends_the_record_as_failed_and_overwrite_replaces_one(
    finished, system, tmp_path
):
    """A loss that is not finite, in whatever thread or process it is computed."""
    shutil.copytree(finished(system).runs_dir, tmp_path / "runs")
    options = SYSTEMS[system].overflow | {"overwrite": True, SYSTEMS[system].length: 1_000_000}
    ended = run(system, tmp_path / "runs", **options)
    assert ended.code == 1
    assert re.search(r"FloatingPointError: .*the loss (of update|at version) \d+ is", ended.err)
    info = ended.run.info
    assert info.status == "failed"
    assert re.search(r"the loss (of update|at version) \d+ is|peer-[01] .*failed", info.error)
    assert info.started > finished(system).run.info.started
    assert len(ended.run.updates()) < len(finished(system).run.updates())


def wait_until(condition: Callable, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def endless(tmp_path):
    """Starts a run that would last; returns it, once it learns, with its processes by age."""
    started = []

    def start(system, **options):
        options |= {SYSTEMS[system].length: 100_000_000}
        words = SYSTEMS[system].command(tmp_path, **options)
        process = subprocess.Popen(
            words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=ROOT
        )
        started.append(process)
        files = lambda: list(tmp_path.glob("default/*/updates.jsonl"))  # noqa: E731
        wait_until(lambda: any(f.read_bytes().count(b"\n") > 3 for f in files()), process)
        tree = psutil.Process(process.pid).children(recursive=True)
        return process, sorted(tree, key=lambda p: (p.create_time(), p.pid))

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stderr.close()


def assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert not alive, [p.cmdline() for p in alive]


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, marks=pytest.mark.soak),
        signal.SIGTERM,
        pytest.param(signal.SIGHUP, marks=pytest.mark.soak),
    ],
    ids=["SIGINT", "SIGTERM", "SIGHUP"],
)
@of_every_system
def test_a_signal_ends_the_record_as_interrupted_and_leaves_no_process(
    endless, tmp_path, system, number
):
    process, tree = endless(system)
    process.send_signal(number)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 128 + number, error
    record = read_run(folder_in(tmp_path))
    assert record.info.status == "interrupted"
    assert record.info.error == f"interrupted by {number.name}"
    assert record.check_files() == []
    assert all((record.updates(), record.rollouts()))
    assert_gone(tree)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("system", "options", "index", "name"),
    [
        ("monobeast", {}, 2, "actor 2"),
        ("hts_rl", {}, 2, "executor 2"),
        ("hts_rl", {}, 7, "actor 1"),
        ("moolib", {"num_peers": 1}, -1, "peer-0"),  # another peer would continue without it
    ],
)
def test_a_killed_worker_ends_the_record_as_failed_and_is_named(
    endless, tmp_path, system, options, index, name
):
    process, tree = endless(system, **options)
    tree[index].kill()
    _, error = process.communicate(timeout=30)
    assert process.returncode == 1
    killed = rf"{name}( \(process {tree[index].pid}\))? was killed by SIGKILL"
    assert re.search(killed, error)
    info = read_run(folder_in(tmp_path)).info
    assert info.status == "failed"
    assert re.search(killed, info.error)
    assert_gone(tree)


@pytest.mark.slow
@pytest.mark.parametrize("system", ["monobeast", "moolib", "hts_rl"])
def test_workers_end_with_a_killed_run(endless, system):
    process, tree = endless(system)
    process.kill()
    assert_gone(tree)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"env_id": "CartPole-v9"}, r"no such environment; did you mean .*CartPole-v"),
        ({"learning_rate": float("nan")}, "--learning-rate nan: must be more than 0"),
        ({"network": "nature"}, "--network nature: observations are"),
        ({"setting": "a/b"}, "--setting 'a/b': becomes part of a folder's name"),
        ({"study": "../escape"}, "--study '../escape': becomes part of a folder's name"),
        ({"setting": "x" * 300}, "--setting"),
        ({"setting": "a\nb"}, "none that controls, breaks or reorders"),
        ({"setting": "a\u202eb"}, "none that controls, breaks or reorders"),
        ({"runs_dir": "/dev/null"}, "--runs-dir /dev/null: /dev/null is not a folder"),
        ({"learning_rate": -1.0}, "--learning-rate -1.0: must be more than 0"),
        ({"no_such_flag": 1}, "--no-such-flag"),
        ({"network": "huge"}, "huge"),
    ],
)
@of_every_system
def test_bad_input_is_one_line_and_exit_code_2_and_writes_nothing(
    tmp_path, capsys, system, options, message
):
    values = SYSTEMS[system].all_options | {"runs_dir": tmp_path} | options
    line = refusal(*SYSTEMS[system].program, capsys, **values)
    assert re.search(message, line), line
    assert list(tmp_path.iterdir()) == []
