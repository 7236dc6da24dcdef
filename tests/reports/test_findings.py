"""Findings: each sentence has the numbers of the records."""

import json
import shutil
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pandas as pd
import pytest
from synthetic_runs import monobeast_run, run_study, study_folder, write_run

from analysis import study_tables
from analysis.importers.records import read_records
from experiments.study import Finding, find_study, load_study, study_names
from plots import style
from reports import build, cells, findings
from reports.caveats import caveats
from reports.page import Cell
from reports.sections import comparison, execution
from reports.study import read_study
from tests.sealing import rewrite


def said(place, *kinds):
    """Return the sentences of some kinds of findings about the runs of a folder."""
    study = read_study("small", place / "runs/small", place)
    return [sentence for kind in kinds for sentence in findings.KINDS[kind](study)]


def of_entries(kind, entries):
    """Return the sentences of a kind of findings about verdicts of two systems on two settings."""
    look = style.look_of(["cleanba_ppo", "moolib"], ["x", "y"])
    study = SimpleNamespace(look=look, setting_verdicts=entries, system_verdicts=entries)
    return list(findings.KINDS[kind](study))


def test_every_kind_of_finding_has_its_function():
    assert set(findings.KINDS) == set(get_args(Finding))


@pytest.mark.parametrize("name", sorted(study_names()))
def test_every_study_says_what_answers_its_question(name):
    study = load_study(find_study(name))
    assert study.findings
    assert study.main_figure


def test_bits_are_counted_over_all_pairs_of_settings(place):
    settings = ("a0-l0-t1", "a0-l0-t2", "a0-l0-t4")
    study_folder(
        place / "runs/small", ("cleanba_ppo", "moolib"), settings, leaky=("moolib",), steps=10_240
    )
    assert said(place, "bits") == [
        "Cleanba PPO: the same bits on 3 hardware settings (18 of 18 pairs of runs).",
        "moolib IMPALA: different bits on different hardware settings (18 of 18 pairs of runs).",
    ]  # fmt: skip


def test_systems_that_ran_on_other_settings_are_counted_apart(place):
    for system, settings in (("cleanba_ppo", ("a", "b")), ("moolib", ("c", "d"))):
        study_folder(place / "runs/small", (system,), settings, steps=5_120)
    assert said(place, "bits") == [
        "Cleanba PPO: the same bits on 2 hardware settings (6 of 6 pairs of runs).",
        "moolib IMPALA: the same bits on 2 hardware settings (6 of 6 pairs of runs).",
    ]


def test_pairs_that_could_not_be_compared_are_not_different(place):
    study_folder(place / "runs/small", ("moolib",), ("a", "b"), ("Catch-v0",), steps=10_240)
    folder = place / "runs/small"
    changed = folder / "moolib__b__Catch-v0__s1/updates.jsonl"
    rows = [json.loads(line) for line in changed.read_text().splitlines()]
    rewrite(changed, "".join(json.dumps(row | {"fingerprint": "0" * 64}) + "\n" for row in rows))
    for setting, parity in (("a", 0), ("b", 1)):  # no version has fingerprints in both runs
        file = folder / f"moolib__{setting}__Catch-v0__s2/updates.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        for row in rows[parity::2]:
            del row["fingerprint"]
        rewrite(file, "".join(json.dumps(row) + "\n" for row in rows))
    (sentence,) = said(place, "bits")
    assert sentence.endswith(
        "different bits on different hardware settings (1 of 3 pairs of runs)."
    )


def test_other_episodes_of_the_same_parameters_are_named(place):
    study_folder(place / "runs/small", ("moolib",), ("a", "b"), ("Catch-v0",), steps=10_240)
    changed = place / "runs/small/moolib__b__Catch-v0__s1/episodes.jsonl"
    first, *rest = changed.read_text().splitlines()
    other = json.dumps(json.loads(first) | {"return": 0.5})
    rewrite(changed, "\n".join([other, *rest]) + "\n")
    (sentence,) = said(place, "bits")
    assert sentence == (
        "moolib IMPALA: the same bits in 2 of 3 pairs of runs; other episodes in 1."
    )
    study = read_study("small", place / "runs/small", place)
    cell = cells.same_bits(study.pairs, "moolib", "Catch-v0")
    assert cell == Cell("no (1 of 3 pairs)", tone="bad")
    each = comparison.pairs(study).table.rows
    assert [(row[2], row[5], row[7]) for row in each] == [
        (2, comparison.YES, None), (1, comparison.NO, "episodes"),
    ]  # fmt: skip


def test_a_pair_without_a_last_fingerprint_is_not_the_same_bits(place):
    study_folder(place / "runs/small", ("moolib",), ("a", "b"), ("Catch-v0",), steps=10_240)
    file = place / "runs/small/moolib__a__Catch-v0__s1/updates.jsonl"
    *lines, last = file.read_text().splitlines()
    row = json.loads(last)
    del row["fingerprint"]
    rewrite(file, "\n".join([*lines, json.dumps(row)]) + "\n")
    assert said(place, "bits") == [
        "moolib IMPALA: the same bits in 2 of 3 pairs of runs; "
        "1 could not be compared to their end."
    ]


def test_bits_of_runs_in_several_processes_name_the_most(place):
    study = run_study(place / "runs", "layouts")
    folder = place / "runs/layouts"
    shutil.copy(find_study("layouts"), folder / "study.toml")
    most = max(run.setting.processes for run in study.runs)
    (sentence,) = findings.KINDS["bits"](read_study("layouts", folder, place))
    assert f" in up to {most} processes (" in sentence


@pytest.mark.parametrize(
    ("sps", "times"),
    [
        ({"a": 5_000, "b": 500}, "2.52 (a) to 11.74 (b) seconds"),
        ({"a": 10, "b": 50}, "1.73 (b) to 8.56 (a) minutes"),
        ({"a": 500, "b": 500}, "11.74 seconds"),
    ],
)
def test_run_times_are_the_shortest_and_the_longest(place, sps, times):
    for setting, speed in sps.items():  # seconds: 1.5 + 5,120 steps / speed
        folder = place / f"runs/small/moolib__{setting}__Catch-v0__s1"
        write_run(folder, "moolib", setting, "Catch-v0", steps=5_120, sps=speed)
    assert said(place, "run_times") == [f"A run takes {times}."]


def test_run_times_are_of_the_environments_that_all_settings_have(place):
    folder = place / "runs/small"
    for env_id, settings in (("CartPole-v1", "ab"), ("Catch-v0", "a")):
        for setting in settings:
            slow = 1_000.0 if env_id == "Catch-v0" else 5_000.0
            name = f"moolib__{setting}__{env_id}__s1"
            write_run(folder / name, "moolib", setting, env_id, steps=10_240, sps=slow)
    study = read_study("small", folder, place)
    assert study.run_times["seconds"].nunique() == 1
    assert study.run_times["runs"].tolist() == [1, 1]
    caption = execution.run_times(study).figure.caption
    assert "; over the environments that all have: CartPole-v1." in caption


def test_a_run_without_an_episode_has_missed_its_target(place):
    study_folder(place / "runs/small", ("moolib",), ("a",), ("CartPole-v1",), steps=51_200)
    rewrite(place / "runs/small/moolib__a__CartPole-v1__s3/episodes.jsonl", "")
    tables = read_records([place / "runs/small"])
    (row,) = study_tables.target_table(
        tables, {"CartPole-v1": 300, "Catch-v0": 0.9}, 100
    ).itertuples()
    assert (row.env_id, row.runs, row.reached) == ("CartPole-v1", 3, 2)
    assert np.isinf(row.steps[-1])


def test_runs_that_end_below_a_target_that_they_reached_are_named(place):
    study_folder(place / "runs/small", ("moolib",), ("a",), ("CartPole-v1",), steps=51_200)
    path = place / "runs/small/moolib__a__CartPole-v1__s3/episodes.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines[-100:]:
        line["return"] = 250.0
    rewrite(path, "".join(json.dumps(line) + "\n" for line in lines))
    asked = find_study("learning").read_text()
    asked = asked[: asked.index("[targets]")] + "[targets]\nCartPole-v1 = 300\n"
    whole = find_study("learning").read_text()
    (place / "runs/small/study.toml").write_text(asked + whole[whole.index("[settings") :])
    assert said(place, "targets") == [
        "3 of 3 runs reached the target return (300 on CartPole-v1).",
        "Below it again at the end: moolib IMPALA on CartPole-v1 (1 of 3).",
    ]


def test_only_a_difference_names_the_environments_that_show_it():
    entry = {"drivers": ["Catch-v0"], "verdict": "different"}
    assert findings._drivers(entry) == " on Catch-v0"
    assert findings._drivers(entry | {"verdict": "equivalent"}) == ""
    assert comparison._differs_on(entry) == "differs on Catch-v0"
    assert comparison._differs_on(entry | {"verdict": "undecided"}) == ""


def test_counts_of_verdicts_have_one_order():
    entries = [{"verdict": word} for word in ("undecided", "different", "equivalent", "undecided")]
    said = "2 undecided, 1 different, 1 equivalent"
    assert findings._verdict_counts(entries) == findings._verdict_counts(entries[::-1]) == said


def test_both_architectures_of_a_system_are_one_name(place):
    study_folder(place / "runs/small", steps=5_120)
    (sentence,) = said(place, "bits")
    assert sentence.startswith("Cleanba PPO (both architectures): the same bits on 2 ")


def test_nothing_is_said_of_what_was_not_compared(place):
    study_folder(place / "runs/small", ("moolib",), settings=("one",), steps=5_120)
    assert said(place, "bits", "verdicts", "differences", "speedup", "targets", "changes") == []


def test_speeds_are_relative_to_the_synchronous_system_of_the_same_code(place):
    for system, env_id, sps in (
        ("cleanba_ppo", "CartPole-v1", 1_000), ("cleanba_ppo-sync", "CartPole-v1", 2_000),
        ("cleanba_ppo", "Catch-v0", 6_000), ("cleanba_ppo-sync", "Catch-v0", 4_000),
        ("moolib", "Catch-v0", 9_000),
    ):  # fmt: skip
        write_run(place / f"runs/small/{system}{env_id}", system, "x", env_id, steps=5_120, sps=sps)
    assert said(place, "speedup", "speeds") == [
        "Speed relative to the synchronous architecture: Cleanba PPO 0.87 times (0.50 to 1.50).",
        "Steps per second: CartPole-v1 1,000 (Cleanba PPO) to 2,000 (Cleanba PPO (synchronous)); "
        "Catch-v0 4,000 (Cleanba PPO (synchronous)) to 9,000 (moolib IMPALA).",
    ]


def test_a_leaking_setting_is_different_and_an_identical_one_is_not_mentioned(place):
    systems = ("cleanba_ppo", "moolib")
    study_folder(place / "runs/small", systems, ("x", "y"), leaky=("moolib",), steps=10_240)
    assert said(place, "differences") == ["moolib IMPALA, x and y: different learning curves."]
    assert len(said(place, "verdicts")) == 2  # one per setting


@pytest.mark.parametrize(
    ("verdict", "words", "p"),
    [
        ("equivalent", "equivalent learning curves", " (p = 0.012)"),
        ("different", "different learning curves on Catch-v0", " (p = 0.03)"),
        ("undecided", "undecided whether the learning curves differ", ""),
    ],
)
def test_each_verdict_has_its_words(verdict, words, p):
    entry = {
        "verdict": verdict,
        "drivers": ["Catch-v0"],
        "p_equivalent": 0.0123,
        "p_different": 0.03,
    }
    entry |= {"system": "moolib", "setting_a": "x", "setting_b": "y"}
    entry |= {"system_a": "cleanba_ppo", "system_b": "moolib", "setting": "x"}
    assert of_entries("differences", [entry]) == [f"moolib IMPALA, x and y: {words}."]
    assert of_entries("verdicts", [entry]) == [f"Cleanba PPO and moolib IMPALA, x: {words}{p}."]


def test_many_comparisons_are_counted():
    sides = [("x", "y", "different"), ("x", "z", "equivalent"), ("y", "z", "undecided")]
    entries = [
        {
            "system": "moolib",
            "setting_a": a,
            "setting_b": b,
            "verdict": word,
            "drivers": ["Pong-v5"],
        }
        for a, b, word in sides
    ]
    counts = "1 different, 1 equivalent, 1 undecided"
    assert of_entries("differences", entries) == [
        f"moolib IMPALA, 3 comparisons of settings: {counts} (x and y on Pong-v5)."
    ]
    assert of_entries("verdicts", entries) == [f"3 comparisons of learning curves: {counts}."]


def test_lags_are_named_by_what_distinguishes_them(place):
    study_folder(place / "runs/small", steps=51_200, settings=("x",))
    (sentence,) = said(place, "lag")
    # the first update of 100 uses its own data, the others those of the version before
    assert sentence == (
        "Mean policy lag in versions: 0.00 (Cleanba PPO (synchronous)), 0.99 (Cleanba PPO)."
    )


def test_gradient_asynchrony_is_named_where_it_is_recorded(place):
    for setting in ("control", "other"):
        monobeast_run(place / f"runs/small/monobeast__{setting}__Catch-v0__s1", setting, 1, 4, 8)
    path = place / "runs/small/monobeast__other__Catch-v0__s1/updates.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line["gradient_version"] = line["version"] - 1 - (2 if line["version"] > 3 else 0)
    late = 2 * sum(line["version"] > 3 for line in lines) / len(lines)
    rewrite(path, "".join(json.dumps(line) + "\n" for line in lines))
    policy, gradients = said(place, "lag")
    assert policy.startswith("Mean policy lag in versions: ")
    assert gradients == f"Mean gradient asynchrony in versions: {late:.2f} (other)."


def test_names_with_a_comma_are_separated_by_semicolons():
    who = {"0.00": ["PPO, DD-PPO", "PPO, Rapid"], "1.96": ["PPO, asynchronous Rapid"]}
    assert findings._with_names(who) == (
        "0.00 (PPO, DD-PPO; PPO, Rapid), 1.96 (PPO, asynchronous Rapid)"
    )
    assert findings._with_names({"0.00": ["a", "b"]}) == "0.00 (a, b)"


def test_measured_changes_are_named_with_what_was_predicted(place):
    for seed in (1, 2, 3):
        for setting, changes, actors in (("control", 4, 8), ("other", 1, 2)):
            folder = place / f"runs/small/monobeast__{setting}__Catch-v0__s{seed}"
            monobeast_run(folder, setting, seed, changes, actors)
    assert said(place, "changes") == [
        "Policy changes per rollout, measured (and predicted): control 3.90 (4.00), other 0.99 (4.00)."
    ]


def test_final_scores_are_the_mean_returns_of_the_last_episodes(place):
    means = {}
    for env_id in ("CartPole-v1", "Catch-v0"):
        for system in ("cleanba_ppo", "moolib"):
            folder = place / f"runs/small/{system}__x__{env_id}__s1"
            write_run(folder, system, "x", env_id)
            lines = (folder / "episodes.jsonl").read_text().splitlines()
            means[env_id, system] = np.mean([json.loads(line)["return"] for line in lines[-100:]])
    names = {"cleanba_ppo": "Cleanba PPO", "moolib": "moolib IMPALA"}
    parts = []
    for env_id, digits in (("CartPole-v1", 1), ("Catch-v0", 2)):
        ends = sorted((means[env_id, system], name) for system, name in names.items())
        low, high = (f"{mean:.{digits}f} ({name})" for mean, name in ends)
        parts.append(f"{env_id} {low} to {high}")
    assert said(place, "scores") == [f"Final score: {'; '.join(parts)}."]


def test_final_scores_of_five_runs_have_an_interval(place):
    study_folder(place / "runs/small", ("moolib",), ("x",), ("Catch-v0",), range(1, 6))
    (row,) = read_study("small", place / "runs/small", place).scores.itertuples()
    assert row.low < row.value < row.high
    interval = f"[{row.low:.2f}, {row.high:.2f}]"
    assert said(place, "scores") == [f"Final score: Catch-v0 {row.value:.2f} {interval}."]


def test_scores_over_many_environments_are_one_number(place):
    environments = ("CartPole-v1", "Catch-v0", "Pong-v5", "Breakout-v5")
    systems = {"cleanba_ppo": "Cleanba PPO", "moolib": "moolib IMPALA"}
    study_folder(place / "runs/small", systems, ("x",), environments, steps=5_120)
    frame = read_study("small", place / "runs/small", place).aggregates
    iqm = frame[frame["metric"] == "iqm"].sort_values("value")
    low, high = (
        f"{row.value:.2f} [{row.low:.2f}, {row.high:.2f}] ({systems[row.system]})"
        for row in iqm.itertuples()
    )
    (sentence,) = said(place, "scores")
    assert sentence.startswith("IQM ")
    assert f" over 4 environments: {low} to {high}; 3 runs per environment: " in sentence


def test_a_study_whose_findings_have_no_data_says_what_it_has(place):
    study = run_study(place / "runs", "monobeast_lag")
    (place / "runs/monobeast_lag/study.toml").write_text(find_study("monobeast_lag").read_text())
    assert study.findings == ("changes", "differences")  # and these runs change no policy
    found = findings.findings(read_study("x", place / "runs/monobeast_lag", place))
    assert found[0].startswith("monobeast IMPALA: the same bits")


@pytest.mark.parametrize(
    ("seeds", "sentence"),
    [
        ([1, 1], "One seed per result: the spread over seeds is unknown."),
        ([1, 3], "1 to 3 seeds are too few for an interval on one environment: "),
        ([3], "3 seeds are too few for an interval on one environment: "),
        ([3, 10], "3 seeds are too few for an interval on one environment (1 of 2 results): "),
        ([5, 10], None),
        ([], None),
    ],
)
def test_a_page_says_how_much_its_seeds_can_show(seeds, sentence):
    _, *said = caveats(4, 4, 4, False, seeds, [])
    assert [one.startswith(sentence) for one in said] == ([True] if sentence else [])


def test_a_page_says_how_complete_its_data_are():
    assert caveats(3, 4, 5, False, [5], []) == ("3 of 4 runs are completed; 5 are planned.",)
    assert caveats(3, 4, 4, True, [5], [("all runs", "it differs"), ("a", "ended early")]) == (
        "3 of 4 runs are completed by a command of the study.",
        "2 problems with the data were found.",
    )
    assert caveats(4, 4, 0, False, [5], [("a", "ended early")])[1] == (
        "1 problem with the data was found: a: ended early."
    )


def test_a_page_states_what_the_compilation_cache_saved():
    assert caveats(4, 4, 4, False, [5], [], saved=[2.04, 3.16])[1] == (
        "2 of 4 runs used the compilation cache, which saved at least 2.0 to 3.2 s per run."
    )
    assert caveats(4, 4, 4, False, [5], [], saved=[4.81, 4.84])[1].endswith(
        "at least 4.8 s per run."
    )
    values = (2.0, -0.0, -0.1, "many")
    hardware = [{"compile_seconds_saved": value} for value in values] + [{}, None]
    assert str(build._compile_seconds_saved(pd.DataFrame({"hardware": hardware}))) == "[2.0, 0.0]"
