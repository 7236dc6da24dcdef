"""The estimate of the time that a study still takes."""

import io
import re
import time

import pytest
from rich.console import Console
from small_studies import NAMES, STUDY, end_early
from synthetic_runs import write_run

from experiments import display, launch, pool, state
from experiments.state import State, Status
from experiments.study import load_study
from experiments.time_left import Work, seconds_left


def job(total, steps, seconds=0.0, cores=1, start=0, ended=False):
    work = Work(cores, total, start, start)
    work.update(steps, seconds, ended)
    return work


@pytest.mark.parametrize(
    ("work", "cores", "left"),
    [
        # 100 steps took 50 core-seconds; of 300 steps, 200 are left for two cores
        ([job(100, 50, 25.0), job(100, 50, 25.0), job(100, 0)], 2, 50.0),
        # a run of two cores: 100 steps took 100 core-seconds
        ([job(200, 100, 50.0, cores=2)], 2, 50.0),
        # one core is idle at the end
        ([job(100, 100, 100.0, ended=True), job(100, 50, 50.0)], 2, 50.0),
        # resumed: only the 10 steps of this launch count
        ([job(100, 90, 20.0, start=80)], 1, 20.0),
        # started over: it had 80 steps
        ([job(100, 10, 20.0, start=80)], 1, None),
        ([job(100, 20, 20.0, start=80), job(100, 20, 20.0)], 1, 320.0),
        # a failed run has nothing left
        ([job(100, 50, 50.0, ended=True), job(100, 0)], 1, 100.0),
        ([job(100, 0, 3.0)], 1, None),
        ([job(100, 100, 50.0, ended=True)], 1, 0.0),
    ],
)
def test_the_time_left_is_that_of_the_steps_left_at_the_core_seconds_of_those_made(
    work, cores, left
):
    assert seconds_left(work, cores) == left


def test_a_run_that_started_over_counts_from_its_new_steps_on():
    work = Work(1, 100, start=80, steps=80)
    work.update(0, 1.0)
    work.update(50, 10.0)
    assert seconds_left([work], 1) == 10.0


def test_a_run_with_more_steps_than_planned_is_done():
    work = job(100, 128, 64.0)
    assert (work.part_done, seconds_left([work], 1)) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("flags", "expected"), [(["--jobs", "1"], 2), (["--jobs", "2"], 3), ([], 4)]
)
def test_the_time_left_is_for_the_cores_that_jobs_may_occupy_at_once(
    tmp_path, monkeypatch, flags, expected
):
    """Of jobs with one core, two, one and one, on four cores."""
    seen = []

    def run_study(console, study, runs_dir, jobs, ticks, stopped, cores):
        seen.append(cores)
        return launch.inspect_all(study, runs_dir)

    jobs = [
        pool.Job(name, [], tmp_path / name, cores)
        for name, cores in zip(NAMES, (1, 2, 1, 1), strict=True)
    ]
    monkeypatch.setattr(pool, "available_cores", lambda: [0, 1, 2, 3])
    monkeypatch.setattr(launch, "make_jobs", lambda *_: jobs)
    monkeypatch.setattr(launch, "run_study", run_study)
    path = tmp_path / "small.toml"
    path.write_text(STUDY)
    launch.main([str(path), "--runs-dir", str(tmp_path), *flags])
    assert seen == [expected]


def test_the_time_left_is_shown_before_the_first_run_has_ended(tmp_path, monkeypatch):
    """Half of one of four equal runs took 30 seconds; 3.5 are left for one core."""
    monkeypatch.setattr(display, "HEARTBEAT_SECONDS", 0.0)
    path = tmp_path / "small.toml"
    path.write_text(STUDY)
    jobs = [pool.Job(name, [], tmp_path / name, cores=1) for name in NAMES]

    def ticks():
        write_run(tmp_path / "small" / NAMES[0], setting="one", steps=2_048, status="running")
        started = time.monotonic() - 30.0
        yield pool.Tick((pool.Active(jobs[0], None, None, (0,), (), started),), ())

    console = Console(file=io.StringIO(), width=120)
    launch.run_study(console, load_study(path), tmp_path, jobs, ticks(), [], cores=1)
    line = console.file.getvalue().splitlines()[-1]
    assert re.search(rf"about 3:3\d left; running: {NAMES[0]} 50%", line)


def test_the_plan_counts_only_the_remaining_steps_of_a_resumed_run(tmp_path, capsys):
    """Two of four runs ended halfway; the second has no checkpoint, so it starts over."""
    path = tmp_path / "small.toml"
    path.write_text(STUDY.replace("[settings.one]", "minutes = 8\n[settings.one]", 1))
    study = load_study(path)
    end_early(study.runs[0], tmp_path)
    end_early(study.runs[1], tmp_path, checkpoint_every=0)
    assert launch.main([str(path), "--runs-dir", str(tmp_path), "--dry-run"]) == 0
    plan = "small: 4 runs, 8,192 steps; to run now: 4 runs, 7,168 steps, "
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith(plan)
    assert "about 7:00 on two cores" in line

    console = Console(file=io.StringIO(), width=200)
    jobs = launch.make_jobs(study, tmp_path, retry=False)
    launch.run_study(console, study, tmp_path, jobs, (tick for tick in ()), [], cores=1)
    assert console.file.getvalue().startswith(plan)


def test_a_resumed_run_with_more_steps_than_planned_has_none_left(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(STUDY)
    run = load_study(path).runs[0]
    end_early(run, tmp_path)  # at step 1,024
    shorter = run._replace(total_timesteps=1_000)
    assert state.steps_left(shorter, Status(State.INTERRUPTED, resumable=True), tmp_path) == 0
