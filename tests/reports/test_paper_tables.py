"""Table 1: from records alone, and only where all runs of an architecture agree."""

import shutil
import statistics
from pathlib import Path

import pandas as pd
import pytest
from synthetic_runs import run_study, write_run

from analysis import importers, scaling
from analysis.tables import InputError, concat
from cleanba import record
from cleanba.record.layout import Layout
from experiments.study import find_study, load_study
from reports import paper_tables


@pytest.fixture
def tables(tmp_path):
    for system in ("cleanba_ppo", "cleanba_ppo-sync"):
        for seed in (1, 2):
            folder = tmp_path / record.run_name(system, "base", "Catch-v0", seed)
            write_run(folder, system, "base", "Catch-v0", seed, steps=5_120)
    return importers.read([tmp_path])


def test_table_1_is_that_of_the_paper(tables):
    lines = paper_tables.table1(tables, iterations=4)
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0] == [
        "iteration", "Synchronous architecture (2 runs): actor", "learner",
        "Cleanba's architecture (2 runs): actor", "learner",
    ]  # fmt: skip
    assert cells[2:] == [
        ["1", "π1 → D(π1)", "D(π1) → π2", "π1 → D(π1)", ""],
        ["2", "π2 → D(π2)", "D(π2) → π3", "π1 → D(π1)", "D(π1) → π2"],
        ["3", "π3 → D(π3)", "D(π3) → π4", "π2 → D(π2)", "D(π1) → π3"],
        ["4", "π4 → D(π4)", "D(π4) → π5", "π3 → D(π3)", "D(π2) → π4"],
    ]


def test_trainers_of_others_are_not_in_table_1(tables, tmp_path):
    """CleanRL's PPO is synchronous, but its name does not say so."""
    info = record.RunInfo(system="cleanrl_ppo", setting="base", env_id="Catch-v0", seed=1)
    with record.RunWriter(tmp_path / "other", info) as writer:
        for number in range(1, 6):
            writer.write(
                record.Rollout(
                    actor=0,
                    group=None,
                    rollout=number,
                    steps=10,
                    wall_time=float(number),
                    version_first=number,
                    version_last=number,
                    versions=[(number, 10)],
                    learner_version=number,
                )
            )
    both = concat([tables, importers.read([tmp_path])])
    assert set(both.rollouts["system"].astype(str)) > set(tables.rollouts["system"].astype(str))
    assert paper_tables.table1(both) == paper_tables.table1(tables)


def test_runs_that_differ_or_mix_policies_are_refused(tables):
    rollouts = tables.rollouts.copy()
    at = (rollouts["seed"] == 2) & (rollouts["rollout"] == 3)
    rollouts.loc[at, ["version_first", "version_last"]] = 1
    with pytest.raises(InputError, match="differ in the policies of their rollouts"):
        paper_tables.table1(tables._replace(rollouts=rollouts))
    rollouts.loc[at, "version_last"] = 2
    with pytest.raises(InputError, match="rollout 3 was collected by several policies"):
        paper_tables.table1(tables._replace(rollouts=rollouts))
    with pytest.raises(InputError, match="a run has only 2 rollouts"):
        paper_tables.table1(tables._replace(rollouts=rollouts[rollouts["rollout"] <= 2]))
    only = tables.rollouts[~tables.rollouts["system"].astype(str).str.endswith("-sync")]
    with pytest.raises(InputError, match="no completed run of the synchronous"):
        paper_tables.table1(tables._replace(rollouts=pd.DataFrame(only)))


def test_run_times_stand_beside_those_of_the_readme(tmp_path):
    for setting, sps in (("a0-l0-d1", 1_000.0), ("a0-l1,2-d1", 2_000.0), ("mine", 500.0)):
        folder = tmp_path / record.run_name("cleanba_ppo-sync", setting, "Breakout-v5", 1)
        write_run(folder, "cleanba_ppo-sync", setting, "Breakout-v5", 1, steps=5_120, sps=sps)
    tables = importers.read([tmp_path])
    lines = paper_tables.runtimes(tables)
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    assert len(cells) == 14 + 1
    by_layout = {(row[0], row[1]): row[2:] for row in cells}
    seconds = tables.runs.set_index("setting")["seconds"]
    share = f"{seconds['a0-l1,2-d1'] / seconds['a0-l0-d1']:.0%}"
    here = f"{seconds['a0-l1,2-d1'] / 60:.2f}"
    assert by_layout["a0-l1,2-d1", "3 A100"][:4] == ["70.3", "46%", here, share]
    assert by_layout["a0-l1,2-d1", "6 TPUv4 cores"][:2] == ["44.4", ""]  # another kind of device
    assert by_layout["not named", "8 A100 (baseline)"] == ["30.5", "20%", "", "", ""]
    assert by_layout["mine", ""][:2] == ["", ""]
    # a formula: no setting leaks into it
    assert len({row[-1] for row in by_layout.values() if row[-1]}) == 1
    with pytest.raises(InputError, match="no completed run has a layout"):
        paper_tables.runtimes(tables._replace(runs=tables.runs[tables.runs["setting"] == "mine"]))


def hts_runs(root, env_id, speeds, **more):
    for system, sps in speeds.items():
        for seed in (1, 2):
            name = record.run_name(system, "four-actors", env_id, seed)
            write_run(
                root / name, system, "four-actors", env_id, seed, steps=25_600, sps=sps, **more
            )
    return importers.read([root])


def test_scores_are_those_in_the_time_of_the_fastest(tmp_path):
    speeds = {"hts_rl_a2c": 4_000.0, "hts_rl_a2c-sync": 2_000.0}
    lines = paper_tables.hts_table1(hts_runs(tmp_path, "Breakout-v5", speeds))
    assert lines[0] == "| game | hts_rl_a2c | hts_rl_a2c-sync | seeds |"
    game, fast, slow, seeds = (cell.strip() for cell in lines[2].strip("|").split("|"))
    assert (game, seeds) == ("Breakout-v5", "2")
    assert float(fast.split(" ± ")[0]) > 1.5 * float(slow.split(" ± ")[0])  # it had half the steps


def test_deviations_are_those_of_a_sample(tmp_path):
    """Of the seeds that were run: with n - 1, as in the statistics module."""
    speeds = {"hts_rl_a2c": 4_000.0}
    tables = hts_runs(tmp_path, "Breakout-v5", speeds)
    curves = tables.curves.assign(**{"return": 10.0 * tables.curves["seed"].to_numpy()})
    (row,) = paper_tables.hts_table1(tables._replace(curves=curves))[2:]
    assert row.split("|")[2].strip() == f"15 ± {statistics.stdev([10, 20]):.4g}"


def test_times_to_a_score_are_minutes_and_a_dash_where_a_seed_never_got_there(tmp_path):
    tables = hts_runs(tmp_path, "Catch-v0", {"hts_rl_ppo": 400.0, "hts_rl_ppo-sync": 100.0})
    cells = paper_tables.hts_table2(tables)[2].split("|")
    fast, slow = (float(cell.split("/")[0]) for cell in cells[2:4])
    assert slow == pytest.approx(4 * fast, rel=0.1)
    assert 0.3 < fast < 25_600 / 400 / 60 + 0.1  # before the end of the run
    late = tables.curves["step"] > 12_800
    few = tables._replace(curves=tables.curves[~late | (tables.curves["seed"] == 1)])
    assert paper_tables.hts_table2(few)[2].count("–") == 4


def test_speeds_and_scores_by_setting_are_in_the_order_of_their_numbers(tmp_path):
    for actors in (16, 1, 4):
        folder = tmp_path / f"a{actors}"
        write_run(folder, "hts_rl_ppo", f"actors-{actors}", "Catch-v0", 1, sps=100.0 * actors)
    rows = [
        line.split("|") for line in paper_tables.speeds_and_scores(importers.read([tmp_path]))[2:]
    ]
    assert [row[1].strip() for row in rows] == ["actors-1", "actors-4", "actors-16"]
    assert [row[2].strip() for row in rows] == ["100", "400", "1,600"]
    assert len({row[3] for row in rows}) == 1
    assert len({row[5] for row in rows}) == 1  # a formula: no setting leaks into it


def test_a_run_of_too_few_updates_has_no_speed_in_the_table(tmp_path):
    write_run(tmp_path / "a", "hts_rl_ppo", "interval-512", "Catch-v0", 1, steps=1_536)  # 3 updates
    (row,) = paper_tables.speeds_and_scores(importers.read([tmp_path]))[2:]
    assert row.split("|")[2].strip() == "–"


def test_settings_that_leak_have_other_fingerprints_in_the_table(tmp_path):
    for setting, leaks_after in (("a0-l0-d1", None), ("a0-l1-d1", 5), ("a0-l0-d2", None)):
        for seed in (1, 2):
            write_run(
                tmp_path / f"{setting}-{seed}", "cleanba_ppo-sync", setting, "Catch-v0", seed,
                steps=5_120, leaks_after=leaks_after,
            )  # fmt: skip
    cells = [line.split("|") for line in paper_tables.runtimes(importers.read([tmp_path]))[2:]]
    prints = {row[1].strip(): row[-2].strip() for row in cells if row[-2].strip()}
    assert prints["a0-l0-d1"] == prints["a0-l0-d2"] != prints["a0-l1-d1"]


def test_a_setting_with_fewer_seeds_has_the_fingerprint_of_the_others(tmp_path):
    for setting, seeds in (("actors-1", (1, 2, 3)), ("actors-4", (1, 3)), ("actors-8", (1, 2))):
        for seed in seeds:
            leaks = (
                5 if (setting, seed) == ("actors-8", 2) else None
            )  # which actors-4 does not have
            name = f"{setting}-{seed}"
            write_run(
                tmp_path / name,
                "hts_rl_ppo",
                setting,
                "Catch-v0",
                seed,
                steps=5_120,
                leaks_after=leaks,
            )

    def prints():
        lines = paper_tables.speeds_and_scores(importers.read([tmp_path]))[2:]
        return [line.split("|")[-2].strip() for line in lines]

    assert len(set(prints())) == 1
    for name in ("actors-4-1", "actors-4-3"):
        shutil.rmtree(tmp_path / name)
    same, leaking = prints()
    assert same != leaking
    shutil.rmtree(tmp_path / "actors-8-1")
    shutil.rmtree(tmp_path / "actors-1-2")
    assert prints() == ["", ""]  # no seed in common: nothing to compare


def test_the_readme_s_run_times_need_no_runs_and_other_tables_do(tmp_path, capsys):
    for name in paper_tables.TABLES:
        words = [name, "--source", "published", "--out", str(tmp_path)]
        assert paper_tables.main(words) == (0 if name == "runtimes" else 2)
        printed = capsys.readouterr()
        if name != "runtimes":
            assert printed.err == f"error: {name}: there are no published data to make it from\n"
    lines = (tmp_path / "runtimes_published.md").read_text().splitlines()
    assert "| a0-l1,2-d1 | 3 A100 | 70.3 | 46% |" in lines
    assert lines[-1] == "From the README of Cleanba."
    assert len([line for line in lines if line.startswith("|")]) == 2 + 14


def test_a_table_that_cannot_be_written_is_one_line_and_exit_code_2(tmp_path, capsys):
    (tmp_path / "file").touch()
    words = ["runtimes", "--source", "published", "--out", str(tmp_path / "file")]
    assert paper_tables.main(words) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {tmp_path / 'file'}")
    assert err.count("\n") == 1


@pytest.mark.parametrize("name", paper_tables.TABLES)
def test_a_table_is_written_from_the_records_of_its_study(name, tmp_path, capsys):
    run_study(tmp_path / "runs", paper_tables.TABLES[name].study)
    words = [name, "--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]
    assert paper_tables.main(words) == 0
    *lines, page = capsys.readouterr().out.splitlines()
    assert page == str(tmp_path / "out" / f"{name}.md")
    assert len(lines) > 2
    assert all(line.startswith("|") for line in lines)
    text = Path(page).read_text()
    assert "\n".join(lines) in text
    assert f"runs of study {paper_tables.TABLES[name].study}" in text


@pytest.mark.parametrize("name", paper_tables.TABLES)
def test_every_table_has_a_study_in_both_sizes(name):
    study = paper_tables.TABLES[name].study
    assert load_study(find_study(study), "cpu").runs
    assert load_study(find_study(study), "paper").runs


def test_the_layouts_of_the_study_are_those_of_the_readme():
    named = {row.layout for row in scaling.README_RUN_TIMES if row.layout}
    for preset in ("cpu", "paper"):
        runs = load_study(find_study("layouts"), preset).runs
        baseline = {"a0-l1,2,3-d2"}  # eight GPUs in two processes, as the README shows them
        assert {run.setting.name for run in runs} == named | baseline
        for run in runs:
            setting = run.setting
            assert Layout.parse(setting.name) == Layout(
                tuple(setting.actor_device_ids),
                tuple(setting.learner_device_ids),
                setting.processes,
            )


def test_no_records_are_one_line_and_exit_code_2(tmp_path, capsys):
    for name in paper_tables.TABLES:
        words = [name, "--runs", str(tmp_path), "--out", str(tmp_path / "out")]
        assert paper_tables.main(words) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "out").exists()
