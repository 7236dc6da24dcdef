"""Damaged, missing and unplanned runs are listed, and do not affect other runs."""

import json
import re
import shutil

import pytest
from built import SYSTEMS, build_small, pages, texts
from synthetic_runs import monobeast_run, run_study, study_folder, write_run

from experiments import systems
from experiments.study import find_study, load_study
from reports import build
from reports.page import read_json
from reports.study import ReportError, read_study
from tests.sealing import rewrite

pytestmark = pytest.mark.usefixtures("undrawn")


def sections(place):
    """Return the sections that show numbers, which are all but the two about single runs."""
    page = read_json(place / "site/small/result.json")
    return [one for one in page.sections if one.name not in ("quality", "runs")]


def test_runs_that_did_not_complete_are_in_no_number_and_are_named(place):
    build_small(place)
    before = texts(place, "small")
    measured = sections(place)
    failed = place / "runs/small/cleanba_ppo__a0-l0-t1__Catch-v0__s4"
    write_run(
        failed, seed=4, env_id="CartPole-v1", status="failed", error="Boom: it broke", steps=5_120
    )
    killed = place / "runs/small/cleanba_ppo__a0-l0-t1__Catch-v0__s5"
    write_run(killed, seed=5, env_id="Catch-v0", status="running", steps=5_120)
    assert build.main(["small"]) == 0
    assert sections(place) == measured
    for old, new in zip(before, texts(place, "small"), strict=True):
        assert "6 of 8 runs are completed" in new
        for problem in ("excluded from every figure and number: Boom: it broke", "torn last line"):
            assert problem in new
        assert "interrupted" in new or "running" in new
        assert "with the data" not in old


def test_planned_runs_without_a_record_are_named(place):
    (place / "runs/quickstart").mkdir(parents=True)
    shutil.copy(find_study("quickstart"), place / "runs/quickstart/study.toml")
    study_folder(place / "runs/quickstart", SYSTEMS, steps=5_120)
    assert build.main(["quickstart"]) == 0
    for text in texts(place):
        assert "cleanba_impala-sync__a0-l0,1-t2__Catch-v0__s2" in text
        assert "planned, but there is no record" in text
        assert "24 of 24 runs are completed; 50 are planned." in text
        assert "python -m experiments.launch quickstart --runs-dir runs" in text


def test_runs_that_are_not_the_study_s_are_named_and_those_of_other_commands_excluded(place):
    study = run_study(place / "runs", "cleanrl")
    shutil.copy(find_study("cleanrl"), place / "runs/cleanrl/study.toml")
    assert build.main(["cleanrl"]) == 0
    _, before = pages(place, "cleanrl")
    assert "with the data" not in before
    assert "python -m experiments.launch cleanrl --runs-dir runs" in before
    changed, copied = (place / "runs/cleanrl" / run.name for run in study.runs[:2])
    info = json.loads((changed / "run.json").read_text())
    info["command"] += ["--learning-rate", "1"]
    (changed / "run.json").write_text(json.dumps(info))
    mine = copied.with_name(copied.name.replace("__s", "__s9"))
    shutil.copytree(copied, mine)
    info = json.loads((mine / "run.json").read_text())
    (mine / "run.json").write_text(json.dumps(info | {"seed": 92}))
    assert build.main(["cleanrl"]) == 0
    planned = len(study.runs)
    for text in texts(place, "cleanrl"):
        said = f"{planned} of {planned + 1} runs are completed by a command of the study"
        assert f"{said}; {planned} are planned." in text
        for name, what in (
            (changed.name, "made by a different command than the study's: excluded from every"),
            (mine.name, "not planned by the study"),
        ):
            assert re.search(rf"{name}( \|)? {what}", text.replace("\\", ""))
    for run in study.runs[1:]:
        info = place / "runs/cleanrl" / run.name / "run.json"
        info.write_text(info.read_text().replace('"--seed"', '"--sed"'))
    shutil.rmtree(mine)
    with pytest.raises(ReportError, match="is completed by a command of its study"):
        build.build("cleanrl", place / "runs/cleanrl", place / "site/cleanrl")


def test_runs_of_other_commands_are_excluded_wherever_the_page_is_made(place, monkeypatch):
    run, *_ = run_study(place / "runs", "cleanrl").runs
    text = find_study("cleanrl").read_text().replace("cleanrl_ppo", "gone_ppo")
    (place / "runs/cleanrl/study.toml").write_text(text)  # of a system that is no more, too
    header = place / "runs/cleanrl" / run.name / "run.json"
    info = json.loads(header.read_text())
    header.write_text(json.dumps(info | {"command": [*info["command"], "--learning-rate", "1"]}))
    monkeypatch.chdir(place / "runs/cleanrl")
    assert build.main(["cleanrl", "--runs", ".", "--out", str(place / "site/cleanrl")]) == 0
    _, markdown = pages(place, "cleanrl")
    assert markdown.count("made by a different command than the study's") == 1


def test_a_damaged_record_costs_one_run_not_the_page(place):
    study_folder(place / "runs/small", SYSTEMS[:1], env_ids=("Catch-v0",), steps=5_120)
    damaged = place / "runs/small/cleanba_ppo__a0-l0-t1__Catch-v0__s2/updates.jsonl"
    rewrite(damaged, "{}}\n" + damaged.read_text())
    assert build.main(["small"]) == 0
    for text in texts(place, "small"):
        assert "damaged and excluded: updates.jsonl, line 1" in text
        assert "5 of 5 runs are completed" in text


def test_runs_that_differ_in_more_than_the_setting_are_named(place):
    study_folder(place / "runs/small", SYSTEMS[:1], env_ids=("Catch-v0",), steps=5_120)
    header = place / "runs/small/cleanba_ppo__a0-l0-t1__Catch-v0__s2/run.json"
    info = json.loads(header.read_text())
    info["hyperparameters"]["num_envs"] = 16
    info["revision"] = "f" * 40
    header.write_text(json.dumps(info))
    assert build.main(["small"]) == 0
    for text in texts(place, "small"):
        assert "num_envs differs between runs on Catch-v0: 8, 16" in text
        assert "2 different source revisions" in text


def test_a_number_of_actors_that_the_settings_set_is_no_problem(place):
    study = load_study(find_study("atari_small"))
    records = place / "runs/atari_small"
    for run in study.runs:
        folder, actors = records / run.name, run.setting.num_actor_threads
        command = systems.command(run, place / "runs")
        if run.seed == 1 and run.system == "monobeast":
            monobeast_run(folder, run.setting.name, 1, 4, actors, run.env_id, command)
        elif run.seed == 1 and run.system == "cleanba_impala":  # whose layout must not change these
            write_run(
                folder, run.system, run.setting.name, run.env_id, num_envs=8 * actors,
                steps=5_120, command=command,
            )  # fmt: skip
    shutil.copy(find_study(study.name), records / "study.toml")
    found = dict(read_study(study.name, records, place).problems)
    assert "monobeast" not in found
    assert found["cleanba_impala"] == "num_envs differs between runs on Breakout-v5: 8, 16"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["nothing"], "runs/nothing: no such file"),
        (["empty", "--runs", "empty"], "no run record here"),
        (["failed", "--runs", "failed"], "none of the 1 runs there is completed"),
        (["failed", "--run", "failed"], "--run"),
        ([], "name"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(place, capsys, options, message):
    (place / "empty").mkdir()
    write_run(place / "failed/run", status="failed", error="x", steps=5_120)
    assert build.main(options) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert message in err.lower()
    assert err.count("\n") == 1
    assert not (place / "site").exists()
