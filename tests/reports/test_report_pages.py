import json
import os
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote

import numpy as np
import pandas as pd
import pytest
from synthetic_runs import monobeast_run, run_study, study_folder, write_run

from analysis.importers.records import read_records
from analysis.reproducibility import system_verdicts
from experiments.study import find_study, load_study
from reports import build, content, render, summaries

EVIL = "<script>alert(1)</script>"
SYSTEMS = ("cleanba_ppo", "cleanba_ppo-sync")


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working directory, in which runs and reports lie side by side."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    """The pages of a study of two systems, one of which leaks its setting into the results."""
    root = tmp_path_factory.mktemp("place")
    study_folder(root / "runs/quickstart", SYSTEMS, leaky=SYSTEMS[:1], steps=10_240)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        assert build.main(["quickstart"]) == 0
    return root


def pages(place, name="quickstart"):
    folder = place / "reports" / name
    return [(folder / page).read_text() for page in ("index.html", "README.md")]


def visible_text(html):
    """The text that a browser shows, white space joined."""

    class Reader(HTMLParser):
        def __init__(self):
            super().__init__()
            self.parts, self.hidden = [], 0

        def handle_starttag(self, tag, attrs):
            self.hidden += tag in ("script", "style")

        def handle_endtag(self, tag):
            self.hidden -= tag in ("script", "style")

        def handle_data(self, data):
            if not self.hidden:
                self.parts.append(data)

    reader = Reader()
    reader.feed(html)
    return " ".join(" ".join(reader.parts).split())


def build_small(place, *options, **kwargs):
    study_folder(place / "runs/small", SYSTEMS[:1], env_ids=("Catch-v0",), steps=5_120, **kwargs)
    assert build.main(["small", *options]) == 0
    return pages(place, "small")


def test_both_pages_hold_every_part(quickstart):
    html, markdown = pages(quickstart)
    for text in (visible_text(html), markdown):
        for part in (
            "In short",
            "Do the hardware settings give the same bits?",
            "Learning curves",
            "Final scores",
            "Speed",
            "Where the time went",
            "Policy lag",
            "Data quality",
            "Runs",
            "How to reproduce",
            "python -m reports.build quickstart",
            "0123456789" * 4,  # the source revision
            "jax 0.10.2",
            "3 seeds",
        ):
            assert part in text
    assert len(re.findall(r"!\[.*\]\(figures/\w+\.png\)", markdown)) == 8
    assert html.count('src="data:image/svg+xml;base64,') == 8


def test_a_part_without_data_has_no_heading(place):
    build_small(place)
    for path in (place / "runs/small").glob("*/updates.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for row in rows:
            for name in [n for n in row if n.endswith("_time") and n != "wall_time"]:
                del row[name]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert build.main(["small"]) == 0
    html, markdown = pages(place, "small")
    assert "Where the time went" not in visible_text(html) + markdown
    assert "#time" not in html
    assert "Every pair of runs" in html
    for path in (place / "runs/small").glob("*__a0-l0,1-t2__*"):
        shutil.rmtree(path)
    assert build.main(["small"]) == 0
    html, _ = pages(place, "small")
    assert "No system has completed runs under two hardware settings." in html
    assert "Every pair of runs" not in html
    assert "## Speed" in markdown


def test_a_page_says_when_runs_reached_what_the_study_asks_for(place):
    study_folder(place / "runs/small", SYSTEMS[:1], env_ids=("CartPole-v1",), steps=51_200)
    asked = Path(find_study("quickstart")).read_text() + "\n[targets]\nCartPole-v1 = 300\n"
    (place / "runs/small/study.toml").write_text(asked)
    (place / "runs/small/cleanba_ppo__a0-l0-t1__CartPole-v1__s3/episodes.jsonl").write_text(
        '{"step": 512, "wall_time": 1.0, "env_index": 0, "return": 9.0, "length": 9}\n' * 200
    )
    assert build.main(["small"]) == 0
    html, markdown = pages(place, "small")
    steps = []
    for seed in (1, 2):
        path = place / f"runs/small/cleanba_ppo__a0-l0-t1__CartPole-v1__s{seed}/episodes.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        means = np.convolve([row["return"] for row in rows], np.full(100, 0.01), "valid")
        steps.append(rows[99 + int(np.argmax(means >= 300))]["step"])
    section = markdown.split("## Steps to the target")[1].split("\n## ")[0]
    row = next(line for line in section.splitlines() if "| a0-l0-t1 |" in line)
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    assert cells[3:6] == ["300.0", "**2 of 3**", f"{steps[0]:,}, {steps[1]:,}, –"]
    assert "5 of 6 runs reached the return that the study asks for." in markdown
    assert "mean return of the last 100 training episodes first reached" in visible_text(html)


def test_late_gradients_are_shown_beside_late_policies(place):
    for setting in ("control", "other"):
        folder = place / f"runs/lag/monobeast__{setting}__Catch-v0__s1"
        monobeast_run(folder, setting, 1, 4, 8)
    path = folder / "updates.jsonl"  # of the second: applied 0 and 2 versions late in turn
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        row["gradient_version"] = row["version"] - 1 - 2 * (row["version"] % 2)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert build.main(["lag"]) == 0
    _, markdown = pages(place, "lag")
    section = markdown.split("## Policy lag")[1].split("\n## ")[0]
    assert "mean gradient asynchrony" in section
    lines = {
        name: next(x for x in section.splitlines() if f"| {name} |" in x)
        for name in ("control", "other")
    }
    assert lines["other"].split("|")[-4:-1] == [" 1.00 ", " 2.00 ", " 1 "]
    assert lines["control"].split("|")[-4:-1] == [" – ", " – ", " 1 "]


def test_policy_changes_inside_rollouts_are_shown_beside_what_was_predicted(place):
    for seed in (1, 2, 3):
        for setting, changes, actors in (("control", 4, 8), ("my-setting", 1, 2)):
            folder = place / f"runs/lag/monobeast__{setting}__Catch-v0__s{seed}"
            monobeast_run(folder, setting, seed, changes, actors)
    assert build.main(["lag"]) == 0
    html, markdown = pages(place, "lag")
    for text in (visible_text(html), markdown):
        for part in ("Policy changes inside rollouts", "Value loss", "paper: logs", "12 to 13"):
            assert part in text
    section = markdown.split("## Policy changes inside rollouts")[1].split("\n## ")[0]
    rows = [line.split("|")[1:-1] for line in section.splitlines() if line.startswith("| Catch")]
    rows = [[cell.strip() for cell in row] for row in rows]
    # measured (the first rollouts have fewer versions to change between), by actors, by time, paper
    assert rows[0][2:] == [
        "control",
        "3.90",
        "3.90 to 3.90",
        "4.00",
        "4.00",
        "3",
        "12 to 13",
        "12.70",
    ]
    assert rows[1][2:] == ["my-setting", "0.99", "0.99 to 0.99", "1.00", "4.00", "3", "–", "–"]
    for name in ("policy_changes", "value_losses"):
        assert (place / f"reports/lag/figures/{name}.png").is_file()


def test_the_time_of_actors_that_an_update_takes_some_of_adds_up(place):
    folder = place / "runs/lag/monobeast__control__Catch-v0__s1"
    monobeast_run(folder, "control", 1, 4, 8)
    table = summaries.time_table(summaries.completed(read_records([folder])))
    row = table.iloc[0]
    # an update takes 0.1 s and 2 of 8 rollouts: each actor gives one in 4 updates, 0.4 s
    assert row["environment"] == pytest.approx(0.5)
    assert row["inference"] == pytest.approx(0.25)
    assert row["training"] == pytest.approx(0.6)


def test_the_time_of_two_learner_threads_is_shared_out_among_them(place):
    folder = place / "runs/lag/monobeast__control__Catch-v0__s1"
    monobeast_run(folder, "control", 1, 4, 8, num_learner_threads=2)
    row = summaries.time_table(summaries.completed(read_records([folder]))).iloc[0]
    # of the 0.2 s that two threads have in 0.1 s, 0.06 s train and 0.03 s wait
    assert row["training"] == pytest.approx(0.3)
    assert row["learner_waiting"] == pytest.approx(0.15)
    assert row["learner_other"] == pytest.approx(0.55)


@pytest.mark.parametrize(
    ("gradients", "collection", "acting", "training"),
    [
        # an update of 0.1 s takes 0.3 s of one of four collection workers, and 0.06 s of one of two
        # gradient workers
        ("asynchronous", "asynchronous", (0.5, 0.25), 0.3),
        # both gradient workers compute at once, each from a rollout of one of its two collection workers
        ("synchronous", "asynchronous", (2 / 3, 1 / 3), 0.6),
    ],
)
def test_the_time_of_worker_schemes_is_shared_out_among_workers(
    place, gradients, collection, acting, training
):
    folder = place / "runs/schemes/one__control__Catch-v0__s1"
    links = {"gradients": gradients, "collection": collection}
    monobeast_run(folder, "control", 1, 4, 8, gradient_workers=2, collection_workers=2, **links)
    row = summaries.time_table(summaries.completed(read_records([folder]))).iloc[0]
    assert (row["environment"], row["inference"]) == pytest.approx(acting)  # never more than all
    assert row["training"] == pytest.approx(training)


@pytest.mark.parametrize(("collectors", "named"), [(4, False), (2, True)])
def test_a_record_that_counts_time_twice_is_a_problem_with_the_data(place, collectors, named):
    folder = place / "runs/schemes/one__control__Catch-v0__s1"
    # a rollout of 0.3 s in every update of 0.1 s: too much for two collection workers
    links = {"gradients": "synchronous", "collection": "asynchronous", "gradient_workers": 1}
    monobeast_run(folder, "control", 1, 4, 8, collection_workers=collectors, **links)
    found = summaries.problems(read_records([folder]))
    what = "times of the actors add up to 150% of the wall time: some of it is counted twice"
    assert ((folder.name, what) in found) == named


def test_a_wait_before_the_first_update_that_counts_is_not_of_the_time_after_it(place):
    """Actors of monobeast fill all buffers, and then wait until the learner has started."""
    folder = place / "runs/schemes/one__control__Catch-v0__s1"
    monobeast_run(folder, "control", 1, 4, 8)
    usual = summaries.time_table(read_records([folder])).iloc[0]
    updates = [json.loads(line) for line in (folder / "updates.jsonl").read_text().splitlines()]
    for update in updates[6:10]:
        update["rollout_queue_put_time"] = 5.0
    (folder / "updates.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in updates))
    tables = read_records([folder])
    assert not any("counted twice" in problem for _, problem in summaries.problems(tables))
    row = summaries.time_table(tables).iloc[0]
    since = 0.1 * (np.arange(7, 11) - summaries.SKIPPED_UPDATES)
    seconds = 0.1 * (100 - summaries.SKIPPED_UPDATES)
    more = 0.25 * since.sum() / seconds  # an update takes 2 of 8 actors' rollouts
    assert row["actor_waiting"] - usual["actor_waiting"] == pytest.approx(more)


def test_hardware_is_said_by_setting_where_it_differs():
    one = {"platform": "cpu", "device_kind": "an old one", "cpu_affinity": [0]}
    two = one | {"cpu_affinity": [0, 1]}
    runs = pd.DataFrame({"setting": ["a", "b", "c", "b"], "hardware": [one, two, two, two]})
    assert content.hardware_lines(runs) == [
        "cpu, an old one, 1 CPU core for a run (a)",
        "cpu, an old one, 2 CPU cores for a run (b, c)",
    ]
    assert content.hardware_lines(runs.iloc[:1]) == ["cpu, an old one, 1 CPU core for a run"]
    assert content.hardware_lines(runs.assign(hardware=None)) == []


def test_the_page_says_how_many_runs_were_at_work_at_once(quickstart):
    def said(*times):
        day = "2026-11-22T10:00:0{}+00:00".format
        rows = [
            (day(a) if a is not None else None, day(b) if b is not None else None) for a, b in times
        ]
        return content.at_once_text(pd.DataFrame(rows, columns=["started", "ended"]))

    assert said() == said((None, None)) == ""
    assert said((1, 3), (3, 5), (5, 6)) == "Runs were made one after another."
    assert said((1, 9), (2, 3), (4, 5), (3, 8)) == "Up to 3 runs were at work at once."
    assert said((1, 9), (2, None)) == "Runs were made one after another."
    for page in pages(quickstart):
        assert re.search(r"Up to \d+ runs were at work at once|one after another", page)


def test_the_html_page_needs_nothing_but_itself(quickstart):
    html, _ = pages(quickstart)
    without_images = re.sub(r'src="data:[^"]*"', "", html)
    assert not re.findall(r'\bsrc="[^"]', without_images)
    assert "http://" not in without_images
    assert "https://" not in without_images
    assert "@import" not in html
    assert "<link" not in html


def test_pictures_and_links_of_both_pages_lead_somewhere(quickstart):
    html, markdown = pages(quickstart)
    targets = re.findall(r'href="([^#"][^"]*)"', html) + re.findall(r"\]\(([^)]+)\)", markdown)
    assert len(targets) > 24
    for target in targets:
        assert (quickstart / "reports/quickstart" / unquote(target)).is_file(), target


def test_the_verdict_tells_same_bits_from_different_ones(quickstart):
    for text in (visible_text(pages(quickstart)[0]), pages(quickstart)[1]):
        assert "1 of 2 systems gave the same bits" in text
        assert "policy version 11 (" in text
        assert "different bits" in text
        assert "6 of 6" in text
        assert "0 of 6" in text


def test_every_two_systems_under_one_setting_are_compared(quickstart):
    entries = system_verdicts(read_records([quickstart / "runs/quickstart"]))
    assert len(entries) == 2  # settings
    for text in (visible_text(pages(quickstart)[0]), pages(quickstart)[1]):
        assert "Do the systems learn the same?" in text
    section = pages(quickstart)[1].split("## Do the systems learn the same?")[1].split("\n## ")[0]
    rows = [line.split(" | ") for line in section.splitlines() if "cleanba_ppo-sync" in line]
    for row, entry in zip(rows, entries, strict=True):
        assert row[0] == f"| {entry['setting']}"
        assert row[1:3] == ["cleanba_ppo", "cleanba_ppo-sync"]
        assert row[3].strip("*") == entry["verdict"]
        shown = float(row[4].split()[0])
        assert shown == pytest.approx(entry["final"]["difference"], abs=0.005)
        assert row[6] == f"{entry['p']:.3f}"


def test_a_page_of_one_system_compares_no_systems(place):
    html, markdown = build_small(place)
    assert "Do the systems learn" not in html + markdown


BREAKOUT, CARTPOLE, CATCH = "Breakout-v5", "CartPole-v1", "Catch-v0"
ONE, TWO, THREE, FOUR = ((s, h) for s in SYSTEMS for h in ("a0-l0-t1", "a0-l0,1-t2"))


@pytest.fixture(scope="module")
def four_times_three(tmp_path_factory):
    """The tables of two systems under two settings on three environments."""
    root = tmp_path_factory.mktemp("four_times_three")
    return read_records(
        [study_folder(root, SYSTEMS, env_ids=(BREAKOUT, CARTPOLE, CATCH), seeds=(1,), steps=5_120)]
    )


@pytest.mark.parametrize("what", ["run", "episode"])
@pytest.mark.parametrize(
    ("missing", "environments", "systems", "note"),
    [
        ((), [], [], ""),
        # 3 x 3 scores are left without the system, 2 x 4 without the environment
        (((ONE, BREAKOUT),), [], [", ".join(ONE)], "Without cleanba_ppo, a0-l0-t1: no scores on"),
        (((ONE, BREAKOUT), (TWO, BREAKOUT)), [BREAKOUT], [], "Without Breakout-v5: not every"),
        (
            ((ONE, BREAKOUT), (TWO, CATCH), (THREE, CARTPOLE), (FOUR, CATCH)),
            [],
            sorted(", ".join(who) for who in (ONE, TWO, THREE, FOUR)),
            "Nothing is compared over environments",
        ),
    ],
)
def test_systems_are_compared_over_environments_that_they_share(
    four_times_three, what, missing, environments, systems, note
):
    runs = four_times_three.runs
    keys = zip(zip(runs["system"], runs["setting"], strict=True), runs["env_id"], strict=True)
    gone = runs["run"][[key in missing for key in keys]]
    if what == "run":
        tables = summaries.of_runs(four_times_three, set(runs["run"]) - set(gone))
    else:
        curves = four_times_three.curves
        tables = four_times_three._replace(curves=curves[~curves["run"].isin(gone)])
    found = summaries.comparable(tables)
    assert found.environments == environments
    assert found.systems == systems
    assert content.aggregates_note(found).startswith(note)
    assert bool(note) == bool(content.aggregates_note(found))
    if len(systems) == 4:
        assert found.tables is None
        return
    kept = summaries.aggregate_table(found.tables)
    assert set(kept["environments"]) == {3 - len(environments)}
    assert len(kept.groupby(["system", "setting"])) == 4 - len(systems)


def test_the_page_says_what_is_not_in_its_scores_over_environments(place):
    study_folder(place / "runs/small", SYSTEMS, steps=5_120)
    for run in (place / "runs/small").glob("*__a0-l0,1-t2__CartPole-v1__*"):
        shutil.rmtree(run)
    assert build.main(["small"]) == 0
    html, markdown = pages(place, "small")
    note = "Without cleanba_ppo, a0-l0,1-t2; cleanba_ppo-sync, a0-l0,1-t2: no scores on some environments."
    assert all(text.count(note) == 1 for text in (visible_text(html), markdown))
    section = markdown.split("## Over all environments")[1].split("\n## ")[0]
    rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| cleanba")]
    assert [(row[1], row[6], row[7].strip(" |")) for row in rows] == [("a0-l0-t1", "2", "6")] * 2


def test_a_figure_of_an_earlier_build_does_not_stay_where_the_data_are_gone(place):
    study_folder(place / "runs/small", SYSTEMS[:1], steps=5_120)
    assert build.main(["small"]) == 0
    figures = place / "reports/small/figures"
    before = {path.name for path in figures.iterdir()}
    for run in (place / "runs/small").glob("*__CartPole-v1__*"):
        shutil.rmtree(run)
    assert build.main(["small"]) == 0
    gone = before - {path.name for path in figures.iterdir()}
    assert gone == {
        f"{name}.{end}" for name in ("aggregates", "efficiency") for end in ("png", "svg")
    }


@pytest.mark.parametrize(
    ("learner", "actors", "text"),
    [(0.2, 0.1, "learner 20%"), (0.1, 0.2, "actors 20%"), (0.0, 0.004, "neither")],
)
def test_who_waited_more_is_said_only_where_somebody_waited(learner, actors, text):
    row = SimpleNamespace(learner_waiting=learner, actor_waiting=actors)
    assert content.waiting_cell(row).text == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0183, "+0.018"), (-0.0183, "-0.018"), (4414.2, "+4,414"), (-12.345, "-12.35")],
)
def test_differences_have_a_sign(value, text):
    assert content.signed(value) == text


def test_the_headline_score_is_the_mean_of_the_last_100_episodes(quickstart):
    means = []
    for seed in (1, 2, 3):
        run = quickstart / f"runs/quickstart/cleanba_ppo-sync__a0-l0-t1__Catch-v0__s{seed}"
        lines = (run / "episodes.jsonl").read_text().splitlines()
        means.append(np.mean([json.loads(line)["return"] for line in lines][-100:]))
    rows = [line.split(" | ") for line in pages(quickstart)[1].splitlines()]
    row = next(r for r in rows if r[:3] == ["| Catch-v0", "cleanba_ppo-sync", "a0-l0-t1"])
    assert row[3] == f"{np.mean(means):.2f}"
    assert row[5] == "3"


def test_the_time_table_is_that_of_the_records(quickstart):
    tables = read_records([quickstart / "runs/quickstart"])
    times = summaries.time_table(tables)
    parts = ["environment", "inference", "actor_waiting", "actor_other"]
    assert times[parts].sum(axis=1).to_numpy() == pytest.approx(1.0)
    assert times[["training", "learner_waiting", "learner_other"]].sum(axis=1).to_numpy() == (
        pytest.approx(1.0)
    )
    run = quickstart / "runs/quickstart/cleanba_ppo__a0-l0-t1__Catch-v0__s1"
    lines = [json.loads(line) for line in (run / "updates.jsonl").read_text().splitlines()]
    share = sum(line["training_time"] for line in lines[3:]) / (
        lines[-1]["wall_time"] - lines[2]["wall_time"]
    )
    one = summaries.time_table(read_records([run]))
    assert one["training"].iloc[0] == pytest.approx(share)


def test_a_script_in_a_name_stays_text_on_both_pages(place):
    runs = place / "runs/small"
    for seed in (1, 2):
        for setting in (EVIL, "a0-l0-t1"):
            write_run(
                runs / f"run{seed}{len(setting)}",
                system=EVIL,
                setting=setting,
                env_id=EVIL,
                seed=seed,
                steps=5_120,
                command=["python", EVIL, f"a`b|c{EVIL}"],
            )
    failed = runs / "failed"
    write_run(failed, system=EVIL, status="failed", error=f"ValueError: {EVIL} | `x`", steps=5_120)
    info = json.loads((failed / "run.json").read_text())
    for path in runs.glob("*/run.json"):
        info = json.loads(path.read_text())
        info["versions"] = {EVIL: EVIL}
        info["revision"] = EVIL
        info["hardware"]["device_kind"] = EVIL
        path.write_text(json.dumps(info))
    (runs / "study.toml").write_text(
        find_study("quickstart").read_text().replace('title = "Quickstart', f'title = "{EVIL}')
    )
    assert build.main(["small"]) == 0
    html, markdown = pages(place, "small")
    assert html.count("<script") == 1  # the page's own
    assert "<script" not in markdown
    text = visible_text(html)
    assert text.count(EVIL) > 10
    assert f"ValueError: {EVIL} | `x`" in text
    svg = (place / "reports/small/figures/speed.svg").read_text()
    assert "<script" not in svg


def test_what_a_record_says_does_not_break_the_markdown_tables(place):
    runs = place / "runs/small"
    for setting in ("a|b", "[x](javascript:alert(1))"):
        write_run(runs / f"run{len(setting)}", "sys|*tem*", setting, "En_v_`-1`", steps=5_120)
    write_run(
        runs / "failed", "sys|*tem*", status="failed", error="one\n| two\n# three", steps=5_120
    )
    assert build.main(["small"]) == 0
    _, markdown = pages(place, "small")
    width = None
    for line in markdown.splitlines():
        cells = len(re.findall(r"(?<!\\)\|", line))
        if not line.startswith("|"):
            width = None
            continue
        width = width or cells
        assert cells == width, line
    assert "](javascript" not in re.sub(r"\\.", "", markdown)


def test_runs_that_did_not_complete_are_in_no_number_and_are_named(place):
    html, markdown = build_small(place)
    failed = place / "runs/small/cleanba_ppo__a0-l0-t1__Catch-v0__s4"
    write_run(
        failed, seed=4, env_id="CartPole-v1", status="failed", error="Boom: it broke", steps=5_120
    )
    killed = place / "runs/small/cleanba_ppo__a0-l0-t1__Catch-v0__s5"
    write_run(killed, seed=5, env_id="Catch-v0", status="running", steps=5_120)
    assert build.main(["small"]) == 0
    new_html, new_markdown = pages(place, "small")
    for old, new in ((visible_text(html), visible_text(new_html)), (markdown, new_markdown)):
        numbers = [re.search(r"In short(.*?)Data quality", text, re.S) for text in (old, new)]
        assert numbers[0].group(1) == numbers[1].group(1)
        assert "6 of 8 runs are completed" in new
        for problem in ("left out of every figure and number: Boom: it broke", "torn last line"):
            assert problem in new
        assert "interrupted" in new or "running" in new
        assert "No problem with the data was found" in old


def test_planned_runs_without_a_record_are_named(place):
    (place / "runs/quickstart").mkdir(parents=True)
    shutil.copy(find_study("quickstart"), place / "runs/quickstart/study.toml")
    study_folder(place / "runs/quickstart", SYSTEMS, steps=5_120)
    assert build.main(["quickstart"]) == 0
    html, markdown = pages(place)
    for text in (visible_text(html), markdown):
        assert "cleanba_impala-sync__a0-l0,1-t2__Catch-v0__s2" in text
        assert "planned, but there is no record" in text
        assert "24 of 24 runs are completed. 50 are planned." in text
        assert "python -m experiments.launch quickstart --runs-dir runs" in text


def test_runs_that_are_not_the_study_s_are_named_and_those_of_other_commands_left_out(place):
    study = run_study(place / "runs", "cleanrl")
    shutil.copy(find_study("cleanrl"), place / "runs/cleanrl/study.toml")
    assert build.main(["cleanrl"]) == 0
    _, before = pages(place, "cleanrl")
    assert "No problem with the data was found." in before
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
    html, markdown = pages(place, "cleanrl")
    planned = len(study.runs)
    for text in (visible_text(html), markdown):
        said = f"{planned} of {planned + 1} runs are completed by a command of the study."
        assert f"{said} {planned} are planned." in text
        for name, what in (
            (changed.name, "made by another command than the study's: left out of every figure"),
            (mine.name, "not planned by the study"),
        ):
            assert re.search(rf"{name}( \|)? {what}", text.replace("\\", ""))
    for run in study.runs[1:]:
        info = place / "runs/cleanrl" / run.name / "run.json"
        info.write_text(info.read_text().replace('"--seed"', '"--sed"'))
    shutil.rmtree(mine)
    with pytest.raises(build.ReportError, match="is completed, by a command of its study"):
        build.build("cleanrl", place / "runs/cleanrl", place / "reports/cleanrl")


def test_runs_of_other_commands_are_left_out_wherever_the_page_is_made(place, monkeypatch):
    run, *_ = run_study(place / "runs", "cleanrl").runs
    text = find_study("cleanrl").read_text().replace("cleanrl_ppo", "gone_ppo")
    (place / "runs/cleanrl/study.toml").write_text(text)  # of a system that is no more, too
    header = place / "runs/cleanrl" / run.name / "run.json"
    info = json.loads(header.read_text())
    header.write_text(json.dumps(info | {"command": [*info["command"], "--learning-rate", "1"]}))
    monkeypatch.chdir(place / "runs/cleanrl")
    assert build.main(["cleanrl", "--runs", ".", "--out", str(place / "reports/cleanrl")]) == 0
    _, markdown = pages(place, "cleanrl")
    assert markdown.count("made by another command than the study's") == 1


@pytest.mark.parametrize(
    ("text", "folder", "command"),
    [
        (None, "cleanrl", "experiments.launch cleanrl --runs-dir runs"),
        ("00", "cleanrl", "experiments.launch runs/cleanrl/study.toml --runs-dir runs"),
        (None, "base-paper", "experiments.launch base --preset paper --runs-dir runs"),
    ],
)
def test_a_page_says_the_command_of_the_study_that_its_records_are_of(place, text, folder, command):
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


def test_a_damaged_record_costs_one_run_not_the_report(place):
    study_folder(place / "runs/small", SYSTEMS[:1], env_ids=("Catch-v0",), steps=5_120)
    damaged = place / "runs/small/cleanba_ppo__a0-l0-t1__Catch-v0__s2/updates.jsonl"
    damaged.write_text("{}}\n" + damaged.read_text())
    assert build.main(["small"]) == 0
    for text in (visible_text(pages(place, "small")[0]), pages(place, "small")[1]):
        assert "damaged, left out: updates.jsonl, line 1" in text
        assert "5 of 5 runs are completed" in text


def test_runs_that_differ_in_more_than_the_setting_are_named(place):
    study_folder(place / "runs/small", SYSTEMS[:1], env_ids=("Catch-v0",), steps=5_120)
    header = place / "runs/small/cleanba_ppo__a0-l0-t1__Catch-v0__s2/run.json"
    info = json.loads(header.read_text())
    info["hyperparameters"]["num_envs"] = 16
    info["revision"] = "f" * 40
    header.write_text(json.dumps(info))
    assert build.main(["small"]) == 0
    for text in (visible_text(pages(place, "small")[0]), pages(place, "small")[1]):
        assert "num_envs differs between runs on Catch-v0: 8, 16" in text
        assert "2 different values of revision" in text


def test_hyperparameters_that_a_study_varies_with_its_settings_are_no_problem(place):
    study_folder(place / "runs/small", SYSTEMS[:1], env_ids=("Catch-v0",), steps=5_120)
    for header in (place / "runs/small").glob("*__a0-l0-t1__*/run.json"):
        info = json.loads(header.read_text())
        info["hyperparameters"]["num_envs"] = 16 if info["seed"] == 1 else 32
        header.write_text(json.dumps(info))
    tables = read_records([place / "runs/small"])
    system, other = SYSTEMS
    for vary in ((), (other,)):
        told = dict(summaries.problems(tables, settings_vary=vary))
        assert told[system] == "num_envs differs between runs on Catch-v0: 8, 16, 32"
    told = dict(summaries.problems(tables, settings_vary={system}))
    assert told[system] == "num_envs differs between runs on Catch-v0: 16, 32"


def test_a_package_of_two_versions_is_named_and_one_that_others_do_not_have_is_not(place):
    study_folder(place / "runs/small", SYSTEMS, env_ids=("Catch-v0",), steps=5_120)
    others = {"cleanba_ppo-sync": {"torch": "2.9.0"}, "cleanba_ppo": {"jax": "0.11.0"}}
    for system, versions in others.items():
        (path, *_) = sorted((place / "runs/small").glob(f"{system}__*/run.json"))
        info = json.loads(path.read_text())
        info["versions"] |= versions
        path.write_text(json.dumps(info))
    path = sorted((place / "runs/small").glob("*/run.json"))[-1]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"versions": None}))
    found = summaries.problems(read_records([place / "runs/small"]))
    assert [(run, what) for run, what in found if "version" in what] == [
        ("all runs", "made with different versions of jax: 0.10.2, 0.11.0"),
        (path.parent.name, "does not say with which versions it was made"),
    ]


def test_runs_of_a_system_on_several_kinds_of_device_are_named(place):
    study_folder(place / "runs/small", SYSTEMS, env_ids=("Catch-v0",), steps=5_120)
    for path in (place / "runs/small").glob("*/run.json"):
        info = json.loads(path.read_text())
        other = info["system"] == SYSTEMS[1] and info["seed"] == 2
        info["hardware"]["device_kind"] = "AMD EPYC" if other else "Intel Xeon"
        path.write_text(json.dumps(info))
    found = summaries.problems(read_records([place / "runs/small"]))
    assert found == [(SYSTEMS[1], "made on several kinds of device: AMD EPYC, Intel Xeon")]


def test_few_seeds_are_said(place):
    assert "With 3 seeds per result the intervals are too narrow" in build_small(place)[1]


def test_one_setting_alone_gets_no_verdict(place):
    html, _ = build_small(place, settings=("a0-l0-t1",))
    assert "No system has completed runs under two hardware settings" in visible_text(html)
    assert "same bits under" not in visible_text(html)


def test_a_run_without_a_finished_episode_is_shown_without_a_score(place):
    study_folder(place / "runs/small", SYSTEMS[:1], env_ids=("Catch-v0",), steps=5_120)
    for run in (place / "runs/small").iterdir():
        (run / "episodes.jsonl").write_text("")
    assert build.main(["small"]) == 0
    _, markdown = pages(place, "small")
    assert "| Catch-v0 | cleanba_ppo | a0-l0-t1 | – | – | 0 |" in markdown
    assert "no episode was finished" in markdown


def test_pages_name_no_folder_user_or_host_of_the_machine(place):
    study_folder(place / "runs/small", SYSTEMS[:1], env_ids=("Catch-v0",), steps=5_120)
    out, secret = place / "somewhere", "/home/alice/private/data.txt"
    write_run(
        place / "runs/small/x",
        status="failed",
        error=f"FileNotFoundError: {secret} and '/srv/lab7/file.py', line 3",
        command=["/opt/lab7/bin/python", "/srv/lab7/cleanba_ppo.py", "--api-key", "hunter2"],
        steps=5_120,
    )
    assert build.main(["small", "--runs", str(place / "runs/small"), "--out", str(out)]) == 0
    for page in (out / "index.html", out / "README.md"):
        text = re.sub(r'src="data:[^"]*"', "", page.read_text())
        for word in (str(place), "alice", "lab7", "hunter2", "/home", os.uname().nodename):
            assert word not in text, word
    assert "FileNotFoundError" in (out / "README.md").read_text()


def test_no_link_climbs_out_of_the_working_directory(place):
    outside = place / "outside"
    study_folder(outside, SYSTEMS[:1], env_ids=("Catch-v0",), steps=5_120)
    (place / "inside").mkdir()
    os.chdir(place / "inside")
    assert build.main(["small", "--runs", str(outside)]) == 0
    for page in ("index.html", "README.md"):
        text = Path("reports/small", page).read_text()
        assert "outside/" not in re.sub(r'src="data:[^"]*"', "", text)


def test_the_same_records_give_the_same_pages(place):
    first = build_small(place)
    assert build.main(["small"]) == 0
    assert pages(place, "small") == first


def test_a_page_of_somebody_else_is_not_overwritten(place, capsys):
    study_folder(place / "runs/small", SYSTEMS[:1], env_ids=("Catch-v0",), steps=5_120)
    (place / "README.md").write_text("# My project")
    assert build.main(["small", "--out", "."]) == 2
    assert "README.md was not made by this command" in capsys.readouterr().err
    assert (place / "README.md").read_text() == "# My project"
    assert not (place / "figures").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["nothing"], "runs/nothing: no such file"),
        (["empty", "--runs", "empty"], "no run record here"),
        (["failed", "--runs", "failed"], "none of the 1 runs there is completed"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(place, capsys, options, message):
    (place / "empty").mkdir()
    write_run(place / "failed/run", status="failed", error="x", steps=5_120)
    assert build.main(options) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert not (place / "reports").exists()


def test_the_command_prints_the_headline_and_where_the_pages_are(place, capsys):
    build_small(place)
    out = capsys.readouterr().out
    assert "reports/small/index.html\nreports/small/README.md" in out
    assert re.search(r"Catch-v0 +cleanba_ppo +a0-l0,1-t2 +0\.\d\d .* yes", out)
    assert "\x1b" not in out


@pytest.mark.parametrize(
    ("value", "text"),
    [(7312.4, "7,312"), (475.33, "475.3"), (0.953, "0.95"), (-20.5, "-20.50"), (float("nan"), "–")],
)
def test_numbers_are_written_for_reading(value, text):
    assert content.number(value) == text


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("the learner's", "the learner's"),
        ('said "no" &#39;', 'said "no" &amp;\\#39;'),
        ("<b>&#35;", "&lt;b&gt;&amp;\\#35;"),
        ("a_b *c* |", r"a_b \*c\* \|"),
    ],
)
def test_markdown_shows_a_text_as_it_is(text, written):
    assert str(render.markdown_text(text)) == written
