"""The content of a page: every section, with the numbers of the records."""

import csv
import itertools
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote

import numpy as np
import pandas as pd
import pytest
from built import SYSTEMS, build_small, pages, rows, section, texts, visible_text
from synthetic_runs import monobeast_run, study_folder, write_run

from analysis.importers.records import read_records
from analysis.references import normalize
from analysis.reproducibility import system_verdicts
from experiments.study import find_study, load_study
from reports import build, cells
from reports.page import Cell, Page, Section, Table, number, read_json, shown, write_json
from reports.sections import execution, learning
from reports.study import read_study
from tests.sealing import rewrite


def test_both_pages_hold_every_part(site):
    html, markdown = pages(site)
    for text in (visible_text(html), markdown):
        for part in (
            "Summary",
            "Do the hardware settings give the same bits?",
            "Every pair of runs",
            "Learning curves",
            "Final scores",
            "Speed",
            "Where the time went",
            "Policy lag",
            "What limits this answer",
            "Runs",
            "Reproduce this page",
            "python -m reports.build quickstart",
            "0123456789" * 4,  # the source revision
            "jax 0.10.2",
            "3 seeds",
        ):
            assert part in text
    names = re.findall(r"!\[.*\]\(figures/(\w+)\.png\)", markdown)
    assert len(names) == len(set(names)) == 9
    pictures = re.findall(
        r'<figure data-name="(\w+)" data-csv="\w+"><img( src="data:image/svg|)', html
    )
    assert [name for name, _ in pictures] == names
    large = re.findall(r'<script type="application/gzip" id="svg-(\w+)">', html)
    assert sorted(name for name, source in pictures if not source) == large
    stored = re.findall(r'<script type="application/gzip" id="data-(\w+)">', html)
    assert stored == sorted({*names} - {"curves_time"})  # whose data are those of curves_steps
    assert set(re.findall(r'data-csv="(\w+)"', html)) == set(stored)


def test_both_pages_say_the_same(site):
    def letters(text):
        return re.sub(r"[\W_]+", "", text)

    html, markdown = map(letters, texts(site))
    page = read_json(site / "site/quickstart/result.json")
    for one in page.sections:
        said = [one.title, *one.text.split("\n\n")]
        said += [one.figure.caption] if one.figure else []
        for row in one.table.rows if one.table else ():
            for value in row[:-1]:  # the last of the runs is a command, which Markdown leaves out
                said.append(shown(value))
        for text in map(letters, said):
            assert text in html
            assert text in markdown


def test_the_data_of_a_page_are_read_back_as_they_were_written(tmp_path, site):
    page = read_json(site / "site/quickstart/result.json")
    write_json(page, tmp_path / "again.json")
    text = (tmp_path / "again.json").read_text()
    assert text == (site / "site/quickstart/result.json").read_text()
    assert read_json(tmp_path / "again.json") == page
    decoded = json.loads(text)
    assert list(decoded) == sorted(decoded)
    # a line for each row, so that a diff names the runs that changed
    lines = [
        line for line in text.splitlines() if '["Catch-v0", "Cleanba PPO", "a0-l0-t1", 1, ' in line
    ]
    assert len(lines) == 1
    (tmp_path / "again.json").write_text(text.replace('"title"', '"tytle"'))
    with pytest.raises(ValueError, match=r"again\.json: not a result of a study"):
        read_json(tmp_path / "again.json")


def test_columns_of_numbers_are_known_by_their_values(tmp_path):
    rows = ((None, 1.0, Cell("2%", 0.02), "1", None), ("a", 2, Cell("3%", 0.03), "2", None))
    table = Table(("a", "b", "c", "d", "e"), rows)
    assert table.numeric() == [False, True, True, False, False]
    page = Page("x", "X", "", (), (), (Section("s", "S", table=table),))
    write_json(page, tmp_path / "x.json")
    assert read_json(tmp_path / "x.json") == page


def test_a_part_without_data_has_no_heading(place, undrawn):
    build_small(place)
    for path in (place / "runs/small").glob("*/updates.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            for name in [n for n in line if n.endswith("_time") and n != "wall_time"]:
                del line[name]
        rewrite(path, "".join(json.dumps(line) + "\n" for line in lines))
    assert build.main(["small"]) == 0
    html, markdown = pages(place, "small")
    assert "Where the time went" not in visible_text(html) + markdown
    assert "#time" not in html
    assert "Every pair of runs" in html
    for path in (place / "runs/small").glob("*__a0-l0,1-t2__*"):
        shutil.rmtree(path)
    assert build.main(["small"]) == 0
    html, markdown = pages(place, "small")
    assert "Do the hardware settings give the same bits?" not in html
    assert "the same bits" not in visible_text(html)
    assert "Every pair of runs" not in html
    assert "## Speed" in markdown


def test_a_page_says_when_runs_reached_what_the_study_asks_for(place, undrawn):
    study_folder(place / "runs/small", SYSTEMS[:1], env_ids=("CartPole-v1",), steps=51_200)
    asked = find_study("quickstart").read_text().replace('"bits", ', '"targets", ', 1)
    asked += "\n[targets]\nCartPole-v1 = 300\n"
    (place / "runs/small/study.toml").write_text(asked)
    rewrite(
        place / "runs/small/cleanba_ppo__a0-l0-t1__CartPole-v1__s3/episodes.jsonl",
        '{"step": 512, "wall_time": 1.0, "env_index": 0, "return": 9.0, "length": 9}\n' * 200,
    )
    assert build.main(["small"]) == 0
    html, markdown = pages(place, "small")
    steps = []
    for seed in (1, 2):
        path = place / f"runs/small/cleanba_ppo__a0-l0-t1__CartPole-v1__s{seed}/episodes.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        means = np.convolve([line["return"] for line in lines], np.full(100, 0.01), "valid")
        steps.append(lines[99 + int(np.argmax(means >= 300))]["step"])
    found = rows(section(markdown, "Steps to the target"))
    (row,) = [row for row in found if row[2] == "a0-l0-t1"]
    assert row[3:8] == ["300.0", "3", "**2**", "0", f"{steps[0]:,}, {steps[1]:,}, –"]
    page = read_json(place / "site/small/result.json")
    assert page.finding[:2] == (
        "5 of 6 runs reached the target return (300 on CartPole-v1).",
        "Missed by a0-l0-t1 on CartPole-v1 (1 of 3).",
    )
    assert "mean return of the last 100 training episodes first reached" in visible_text(html)


def test_scores_and_curves_average_as_many_episodes_as_the_study_asks_for(place, undrawn):
    settings, env_ids = ("a0-l0-t1", "a0-l0,1-t2"), ("CartPole-v1", "Catch-v0")
    study_folder(place / "runs/small", SYSTEMS[:1], settings, env_ids, steps=51_200)
    asked = find_study("quickstart").read_text().replace('"bits", ', '"scores", ', 1)
    (place / "runs/small/study.toml").write_text("score_episodes = 7\n" + asked)
    means = {}
    for setting, env_id, seed in itertools.product(settings, env_ids, (1, 2, 3)):
        path = place / f"runs/small/cleanba_ppo__{setting}__{env_id}__s{seed}/episodes.jsonl"
        returns = [json.loads(line)["return"] for line in path.read_text().splitlines()]
        means.setdefault((setting, env_id), []).append(np.mean(returns[-7:]))
    study = read_study("small", place / "runs/small", place)
    for row in study.scores.itertuples():
        assert row.each == pytest.approx(tuple(means[row.setting, row.env_id]))
    ends = study.curves.means[study.curves.means["step"] == 51_200]
    assert len(ends) == 4
    for row in ends.itertuples():
        assert row.value == pytest.approx(np.mean(means[row.setting, row.env_id]))
    level = {env_id: normalize(np.mean(means[settings[0], env_id]), env_id) for env_id in env_ids}
    for row in study.aggregates.query("metric == 'mean'").itertuples():
        assert row.value == pytest.approx(np.mean(list(level.values())))
    (entry,) = study.setting_verdicts
    for row in entry["by_environment"]:
        if row["outcome"] == "final":
            assert row["first"] == pytest.approx(level[row["env_id"]])
    assert build.main(["small"]) == 0
    for text in texts(place, "small"):
        assert "mean return of the last 7 training episodes, averaged over seeds" in text
        assert "Mean return of the last 7 episodes over seeds" in text
        assert "last 100" not in text


def test_a_remark_stands_below_the_finding(place, undrawn):
    study_folder(place / "runs/small", SYSTEMS[:1], env_ids=("CartPole-v1",), steps=5_120)
    text = Path(find_study("quickstart")).read_text()
    assert text.count("minutes =") == 1
    asked = text.replace("minutes =", 'remark = "It is so `here`, in 3 of 3."\nminutes =')
    (place / "runs/small/study.toml").write_text(asked)
    assert build.main(["small"]) == 0
    html, markdown = pages(place, "small")
    page = read_json(place / "site/small/result.json")
    assert page.remark == "It is so `here`, in 3 of 3."
    for part in (visible_text(html), markdown.replace("**", "")):
        assert part.index(page.finding[0]) < part.index("It is so") < part.index("What limits")
    assert "It is so <code>here</code>, in 3 of 3." in html


def test_late_gradients_are_shown_beside_late_policies(place, undrawn):
    for setting in ("control", "other"):
        folder = place / f"runs/lag/monobeast__{setting}__Catch-v0__s1"
        monobeast_run(folder, setting, 1, 4, 8)
    path = (
        folder / "updates.jsonl"
    )  # of the second: applied 0 and 2 versions late in turn, but the first
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        late = 2 * (line["version"] % 2) if line["version"] > 3 else 0
        line["gradient_version"] = line["version"] - 1 - late
    rewrite(path, "".join(json.dumps(line) + "\n" for line in lines))
    assert build.main(["lag"]) == 0
    head, _, *found = rows(section(pages(place, "lag")[1], "Policy lag"))
    assert head[-3:] == ["mean gradient asynchrony", "largest asynchrony", "seeds"]
    assert {row[2]: row[-3:] for row in found} == {
        "other": ["0.98", "2.00", "1"],
        "control": ["–", "–", "1"],
    }


def test_policy_changes_inside_rollouts_are_shown_beside_what_was_predicted(place):
    for seed in (1, 2, 3):
        for setting, changes, actors in (("control", 4, 8), ("my-setting", 1, 2)):
            folder = place / f"runs/lag/monobeast__{setting}__Catch-v0__s{seed}"
            monobeast_run(folder, setting, seed, changes, actors)
    assert build.main(["lag"]) == 0
    for text in texts(place, "lag"):
        for part in ("Policy changes inside rollouts", "Value loss", "paper: logs", "12 to 13"):
            assert part in text
    found = rows(section(pages(place, "lag")[1], "Policy changes inside rollouts"))[2:]
    # measured (the first rollouts have fewer versions to change between), by actors, by time, paper
    one = ["control", "3.90", "3.90 to 3.90", "4.00", "4.00", "3", "12 to 13", "12.70"]
    two = ["my-setting", "0.99", "0.99 to 0.99", "1.00", "4.00", "3", "–", "–"]
    assert [row[2:] for row in found] == [one, two]
    for name in ("policy_changes", "value_losses"):
        assert (place / f"site/lag/figures/{name}.png").is_file()


def test_predictions_of_policy_changes_are_explained_only_where_there_are_any(place, undrawn):
    folder = place / "runs/lag"
    record = folder / "monobeast__my-setting__Catch-v0__s1"
    monobeast_run(record, "my-setting", 1, 4, 8)
    path = record / "run.json"
    path.write_text(path.read_text().replace('"num_actors"', '"num_others"'))
    changes = execution.changes(read_study("lag", folder, place))
    assert changes.text == ""
    assert "cross" not in changes.figure.caption


def test_hardware_is_named_with_its_settings_where_it_differs():
    one = {"platform": "cpu", "device_kind": "an old one", "cpu_affinity": [0]}
    two = one | {"cpu_affinity": [0, 1]}
    runs = pd.DataFrame({"setting": ["a", "b", "c", "b"], "hardware": [one, two, two, two]})
    assert build.hardware_lines(runs) == [
        "cpu, an old one, 1 CPU core per run (a)",
        "cpu, an old one, 2 CPU cores per run (b, c)",
    ]
    assert build.hardware_lines(runs.iloc[:1]) == ["cpu, an old one, 1 CPU core per run"]
    assert build.hardware_lines(runs.assign(hardware=None)) == []


def test_the_page_says_how_many_runs_shared_the_machine(site):
    def said(*times):
        day = "2026-11-22T10:00:0{}+00:00".format
        rows = [
            (day(a) if a is not None else None, day(b) if b is not None else None) for a, b in times
        ]
        return execution.at_once_text(pd.DataFrame(rows, columns=["started", "ended"]))

    assert said() == said((None, None)) == ""
    assert said((1, 3), (3, 5), (5, 6)) == "Runs were executed one after another."
    assert said((1, 9), (2, 3), (4, 5), (3, 8)) == "Up to 3 runs shared the machine."
    assert said((1, 9), (2, None)) == "Runs were executed one after another."
    for page in texts(site):
        assert re.search(r"Up to \d+ runs shared the machine|one after another", page)


def test_pictures_and_links_of_both_pages_lead_somewhere(site):
    html, markdown = pages(site)
    links = re.findall(r'href="([^#"][^"]*)"', html)
    for found in (links, re.findall(r"\]\(([^)]+)\)", markdown)):
        assert len(found) >= 24
        for target in found:
            assert (site / "site/quickstart" / unquote(target)).is_file(), target
    for target in re.findall(r'href="#([^"]+)"', html):
        assert f'id="{target}"' in html


def test_the_verdict_tells_same_bits_from_different_ones(site):
    for text in texts(site):
        same = "Cleanba PPO (synchronous): the same bits on 2 hardware settings (6 of 6 pairs"
        assert same in text
        assert "Cleanba PPO: different bits on different hardware settings (6 of 6 pairs" in text
        assert "policy version 11 (" in text
    found = rows(section(pages(site)[1], "Do the hardware settings give the same bits?"))
    assert {row[0]: row[2:5] for row in found[2:]} == {
        "Cleanba PPO": ["**different bits**", "6", "0"],
        "Cleanba PPO (synchronous)": ["**same bits**", "6", "6"],
    }


def test_every_two_systems_under_one_setting_are_compared(site):
    entries = system_verdicts(read_records([site / "runs/quickstart"]))
    assert len(entries) == 2  # settings
    found = rows(section(pages(site)[1], "Do the systems learn equally well?"))[2:]
    for row, entry in zip(found, entries, strict=True):
        assert row[:3] == [entry["setting"], "Cleanba PPO", "Cleanba PPO (synchronous)"]
        assert row[3].strip("*") == entry["verdict"]
        shown = float(row[4].split()[0])
        assert shown == pytest.approx(entry["final"]["difference"], abs=0.005)
        assert [row[6], row[7]] == [f"{entry[p]:.3f}" for p in ("p_equivalent", "p_different")]


def test_a_page_of_one_system_compares_no_systems(place, undrawn):
    assert "Do the systems learn" not in "".join(build_small(place))


def test_the_page_says_what_its_scores_over_environments_exclude(place, undrawn):
    study_folder(place / "runs/small", SYSTEMS, steps=5_120)
    for run in (place / "runs/small").glob("*__a0-l0,1-t2__CartPole-v1__*"):
        shutil.rmtree(run)
    assert build.main(["small"]) == 0
    names = "Cleanba PPO under a0-l0,1-t2; Cleanba PPO (synchronous) under a0-l0,1-t2"
    note = f"Excluded (no score on some environment): {names}."
    assert all(text.count(note) == 1 for text in texts(place, "small"))
    found = rows(section(pages(place, "small")[1], "All environments"))[2:]
    assert [(row[1], row[6], row[7]) for row in found] == [("a0-l0-t1", "2", "6")] * 2


def test_a_recorded_video_is_linked_with_its_run(place, undrawn):
    folder = "runs/small/cleanba_ppo__a0-l0-t1__Catch-v0__s2"
    study_folder(place / "runs/small", SYSTEMS[:1], env_ids=("Catch-v0",), steps=5_120)
    assert build.main(["small"]) == 0
    assert "## Videos" not in pages(place, "small")[1]
    (place / folder / "videos").mkdir()
    (place / folder / "videos/Catch-v0.mp4").write_bytes(b"a video")
    assert build.main(["small"]) == 0
    html, markdown = pages(place, "small")
    link = f"../../{folder}/videos/Catch-v0.mp4"
    assert f'<a href="{link}">Catch-v0.mp4</a>' in html
    (row,) = rows(section(markdown, "Videos"))[2:]
    assert row == ["Catch-v0", "Cleanba PPO", "a0-l0-t1", "2", f"[Catch-v0.mp4]({link})"]


def test_a_figure_of_an_earlier_build_does_not_stay_where_the_data_are_gone(place, undrawn):
    study_folder(place / "runs/small", SYSTEMS[:1], steps=5_120)
    assert build.main(["small"]) == 0
    figures = place / "site/small/figures"
    before = {path.name for path in figures.iterdir()}
    (figures / "mine.png").write_bytes(b"kept")
    for run in (place / "runs/small").glob("*__CartPole-v1__*"):
        shutil.rmtree(run)
    assert build.main(["small"]) == 0
    gone = before - {path.name for path in figures.iterdir()}
    assert gone == {
        f"{name}.{end}" for name in ("aggregates", "efficiency") for end in ("csv", "png", "svg")
    }
    assert (figures / "mine.png").read_bytes() == b"kept"


def test_the_summary_score_is_the_mean_of_the_last_100_episodes(site):
    means = []
    for seed in (1, 2, 3):
        run = site / f"runs/quickstart/cleanba_ppo-sync__a0-l0-t1__Catch-v0__s{seed}"
        lines = (run / "episodes.jsonl").read_text().splitlines()
        means.append(np.mean([json.loads(line)["return"] for line in lines][-100:]))
    found = rows(section(pages(site)[1], "Summary"))
    system = "Cleanba PPO (synchronous)"
    (row,) = [row for row in found if row[:3] == ["Catch-v0", system, "a0-l0-t1"]]
    assert row[3] == f"{np.mean(means):.2f}"
    assert row[4] == f"{number(min(means))} to {number(max(means))}"  # of 3 seeds, no interval
    assert row[5] == "3"


@pytest.mark.parametrize(
    ("text", "folder", "command"),
    [
        (None, "cleanrl", "experiments.launch cleanrl --runs-dir runs"),
        ("00", "cleanrl", "experiments.launch runs/cleanrl/study.toml --runs-dir runs"),
        (None, "base-paper", "experiments.launch base --preset paper --runs-dir runs"),
    ],
)
def test_a_page_says_the_command_of_the_study_of_its_records(place, undrawn, text, folder, command):
    name = folder.partition("-")[0]
    file = place / "runs" / folder / "study.toml"
    file.parent.mkdir(parents=True)
    steps = re.compile("(total_timesteps = .*)")
    file.write_text(
        "# a comment\n" + steps.sub(rf"\g<1>{text or ''}", find_study(name).read_text())
    )
    run = load_study(file).runs[0]
    write_run(
        file.parent / run.name, run.system, run.setting.name, run.env_id, run.seed, steps=5_120
    )
    assert build.main([folder]) == 0
    assert f"python -m {command}\n" in pages(place, folder)[1]


def test_a_page_has_no_command_for_scripts_that_its_copy_of_the_study_cannot_find(place, undrawn):
    file = place / "runs/mine/study.toml"
    file.parent.mkdir(parents=True)
    text = find_study("cleanrl").read_text().replace('"cleanrl_ppo"', '"my_ppo"')
    file.write_text(f'{text}\n[systems.my_ppo]\nscript = "my_ppo.py"\n')
    (file.parent / "my_ppo.py").touch()
    run = next(run for run in load_study(file).runs if run.system == "my_ppo")
    write_run(file.parent / run.name, "my_ppo", run.setting.name, run.env_id, run.seed, steps=5_120)
    assert build.main(["mine"]) == 0
    text = pages(place, "mine")[1]
    assert "python -m reports.build mine" in text
    assert "experiments.launch" not in text


def test_seeds_and_steps_are_stored_as_they_are(place, undrawn):
    for seed in (1_234_567, 2):
        folder = place / f"runs/small/{seed}"
        write_run(folder, seed=seed, num_envs=8_000, num_steps=617, steps=12_340_000)
    assert build.main(["small"]) == 0
    with (place / "site/small/figures/curves_steps.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["seed"] for row in rows} == {"", "2", "1234567"}
    assert max(int(row["step"]) for row in rows) == 9_872_000  # both of its two updates


def test_few_seeds_are_named(place, undrawn):
    assert "3 seeds are too few for an interval" in build_small(place)[1]


def test_a_run_without_a_finished_episode_is_shown_without_a_score(place, undrawn):
    study_folder(place / "runs/small", SYSTEMS[:1], env_ids=("Catch-v0",), steps=5_120)
    for file in (place / "runs/small").glob("*/episodes.jsonl"):
        rewrite(file, "")
    assert build.main(["small"]) == 0
    _, markdown = pages(place, "small")
    assert "| Catch-v0 | Cleanba PPO | a0-l0-t1 | 0 |" in markdown
    assert "no episode was finished" in markdown


def test_the_same_records_give_the_same_pages(place):
    first = build_small(place)
    assert build.main(["small"]) == 0
    assert pages(place, "small") == first


def test_the_command_prints_the_summary_and_where_the_pages_are(place, undrawn, capsys):
    build_small(place)
    out = capsys.readouterr().out
    assert "site/small/index.html\nsite/small/README.md" in out
    assert re.search(r"Catch-v0 +Cleanba PPO +a0-l0,1-t2 +0\.\d\d .* yes", out)
    assert "\x1b" not in out


@pytest.mark.parametrize(
    ("learner", "actors", "text"),
    [(0.2, 0.1, "learner 20%"), (0.1, 0.2, "actors 20%"), (0.0, 0.004, "neither")],
)
def test_who_waited_more_is_named_only_where_somebody_waited(learner, actors, text):
    assert cells.waited(SimpleNamespace(learner_waiting=learner, actor_waiting=actors)) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0183, "+0.018"), (-0.0183, "-0.018"), (4414.2, "+4,414"), (-12.345, "-12.35")],
)
def test_differences_have_a_sign(value, text):
    assert cells.signed(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(7312.4, "7,312"), (475.33, "475.3"), (0.953, "0.95"), (-20.5, "-20.50"), (float("nan"), "–")],
)
def test_numbers_are_written_for_reading(value, text):
    assert number(value) == text


@pytest.mark.parametrize(
    ("environments", "systems", "tables", "text"),
    [
        ([], [], True, ""),
        (["Pong-v5"], [], True, "Excluded: Pong-v5, where some system or setting has no score."),
        (
            [],
            [("cleanba_ppo", "b")],
            True,
            "Excluded (no score on some environment): Cleanba PPO under b.",
        ),
        (
            [],
            [("a", "b")],
            None,
            "There are no scores over all environments: no system and setting has",
        ),
    ],
)
def test_what_scores_exclude_is_named(environments, systems, tables, text):
    said = learning.excluded_text(learning.Comparable(tables, environments, systems))
    assert said.startswith(text)
    assert bool(said) == bool(text)
