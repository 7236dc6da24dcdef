"""Figures of the paper: from records, or from what has been published, and nothing else."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from matplotlib.text import Text
from synthetic_runs import monobeast_run, run_study, write_run

from analysis import importers, speed
from experiments import systems
from experiments.study import find_study, load_study, study_names
from plots import speed_curves, style
from reports import paper

SCORES = ""","Moolib IMPALA, 8 A100, 80 CPU","Cleanba IMPALA, 8 A100, 46 CPU"
Breakout-v5,300.0 ± 20.0,480.0 ± 10.0
Pong-v5,20.0 ± 1.0,18.0 ± 2.0
"""
MINUTES = ""","Moolib IMPALA, 8 A100, 80 CPU","Cleanba IMPALA, 8 A100, 46 CPU"
Breakout-v5,40.0,20.0
Pong-v5,44.0,22.0
"""


def draw(capsys, *words):
    code = paper.main(list(words))
    printed = capsys.readouterr()
    return code, [Path(line) for line in printed.out.splitlines() if line.endswith(".png")], printed


@pytest.mark.parametrize("name", [n for n, figure in paper.FIGURES.items() if figure.study])
def test_every_figure_has_a_study_in_both_sizes(name):
    study = paper.FIGURES[name].study
    assert study in study_names()
    assert load_study(find_study(study), "cpu").runs
    assert load_study(find_study(study), "paper").runs
    assert set(paper.FIGURES[name].parts) <= set(paper.PARTS)


@pytest.mark.slow
@pytest.mark.parametrize("name", paper.FIGURES)
def test_a_figure_is_drawn_whole_from_the_records_of_its_study(name, tmp_path, capsys):
    study = paper.FIGURES[name].study
    if study == "monobeast_lag":
        for run in load_study(find_study(study)).runs:
            command = systems.command(run, tmp_path / "runs")
            monobeast_run(
                tmp_path / "runs" / study / run.name, run.setting.name, run.seed, 4, 8, env_id=run.env_id,
                command=command,
            )  # fmt: skip
    elif study:
        run_study(tmp_path / "runs", study)
    code, files, printed = draw(
        capsys, name, "--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out")
    )
    assert code == 0
    parts = paper.FIGURES[name].parts
    assert [file.name for file in files] == [f"{name}_{part}.png" for part in parts]
    assert all(file.with_suffix(".svg").is_file() for file in files)
    assert "not in these data" not in printed.out


def test_a_figure_is_drawn_from_any_study_that_has_what_it_shows(tmp_path, capsys):
    text = find_study("large_batches").read_text().replace("seeds = [1, 2, 3]", "seeds = [7]")
    mine = tmp_path / "mine.toml"
    mine.write_text(text)
    runs, out = tmp_path / "runs", tmp_path / "out"
    for run in load_study(mine, "cpu").runs:
        command = systems.command(run, runs)
        write_run(runs / "mine" / run.name, run.system, run.setting.name, run.env_id, run.seed, steps=5_120,
                  study="mine", command=command)  # fmt: skip
    words = ("--study", str(mine), "--runs", str(runs), "--out", str(out))
    code, files, _ = draw(capsys, "fig10", *words)
    assert code == 0
    assert [file.name for file in files] == [
        "fig10_returns_mine.png",
        "fig10_returns_by_time_mine.png",
    ]
    code, files, printed = draw(capsys, "hts_fig4_left", *words)
    assert (code, files) == (2, [])
    missing = "these data have none of speedup_by_variance, speed_by_step_time"
    assert printed.err == f"error: hts_fig4_left: {missing}\n"


def test_the_study_s_file_beside_the_records_is_what_counts(tmp_path, capsys):
    """Also if it is a shortened copy of a study of the toolkit, with its name."""
    text = find_study("large_batches").read_text()
    short = tmp_path / "runs/large_batches/study.toml"
    short.parent.mkdir(parents=True)
    text = re.sub("(?s)\\[presets.paper\\].*", "", text).replace("[1, 2, 3]", "[1]")
    short.write_text(f"score_episodes = 7\n{text}")
    study = load_study(short)
    for run in study.runs:
        command = systems.command(run, tmp_path / "runs")
        write_run(short.parent / run.name, run.system, run.setting.name, run.env_id, run.seed, steps=5_120,
                  study=study.name, command=command)  # fmt: skip
    source = paper.read_runs("large_batches", tmp_path / "runs", "cpu")
    assert source.words == f"{len(study.runs)} of {len(study.runs)} runs of study large_batches"
    assert source.window == 7


def test_a_figure_counts_completed_runs_of_the_study_only_and_says_how_many(tmp_path):
    figure = paper.FIGURES["fig6"]
    study = run_study(tmp_path, figure.study)
    other = [*systems.command(study.runs[1], tmp_path), "--learning-rate", "1"]
    for run, status, command in (
        (study.runs[0], "failed", systems.command(study.runs[0], tmp_path)),
        (study.runs[1], "completed", other),  # before the study's file was edited, say
    ):
        folder = tmp_path / study.name / run.name
        write_run(
            folder, run.system, run.setting.name, run.env_id, run.seed, steps=10_240, status=status,
            overwrite=True, study=study.name, command=command,
        )  # fmt: skip
    source = paper.read_runs(figure.study, tmp_path, "cpu")
    planned = len(study.runs)
    assert source.words == f"{planned - 2} of {planned} runs of study {study.name}"
    assert len(source.tables.runs) == planned - 2
    assert source.score == "normalized score"  # no Atari: nothing to do with humans


def test_scores_over_environments_are_of_the_same_environments_for_everybody(tmp_path):
    figure = paper.FIGURES["fig3"]
    study = run_study(tmp_path, figure.study)
    games = {run.env_id for run in study.runs}
    assert games == {"CartPole-v1", "Catch-v0"}

    def read():
        source = paper.read_runs(figure.study, tmp_path, "cpu")
        return source, paper._comparable(source)

    whole, compared = read()
    assert compared == whole
    without = [run for run in study.runs if (run.system, run.env_id) == ("moolib", "Catch-v0")]
    assert without
    for run in without:
        shutil.rmtree(tmp_path / study.name / run.name)
    source, compared = read()
    assert set(source.tables.runs["system"]) - set(compared.tables.runs["system"]) == {"moolib"}
    assert (
        compared.words == f"{source.words} · without moolib IMPALA under {without[0].setting.name}"
    )
    for part in paper.FIGURES["fig3"].parts:
        figure = paper.PARTS[part](source)
        texts = [" ".join(text.get_text().split()) for text in figure.findobj(Text)]
        assert not any(text == "moolib IMPALA" for text in texts), part
        assert any("without moolib IMPALA under" in text for text in texts), part


def test_speed_is_by_the_devices_of_all_processes(tmp_path):
    for number, (actors, learners, processes) in enumerate([([0], [0], 1), ([0], [1, 2], 2)]):
        for seed in (1, 2):
            write_run(
                tmp_path / f"{number}-{seed}", "cleanba_ppo", f"b{number}", "CartPole-v1", seed,
                sps=(1_000.0 + 100 * seed) * (number + 1), steps=10_240,
                hardware={
                    "actor_device_ids": actors, "learner_device_ids": learners,
                    "num_processes": processes,
                },
            )  # fmt: skip
    write_run(tmp_path / "old", "cleanba_ppo", "unknown", "CartPole-v1", 1, steps=10_240)
    frame = speed.speed_by_devices(importers.read([tmp_path]))
    assert frame["x"].tolist() == [1, 6]
    assert frame["runs"].tolist() == [2, 2]
    np.testing.assert_allclose(frame["sps"], [1_150, 2_300], rtol=0.01)
    look = style.look_of(frame["system"], ["b0", "b1"])
    panel = speed_curves.draw(frame, look, "here", "devices", "ideal").axes[0]
    texts = [text.get_text() for text in panel.texts]
    assert texts == ["1.15k\n100%", "2.3k\n33%"]  # twice as fast on six times as many


def test_speed_is_by_an_option_and_beside_the_baseline(tmp_path):
    for system, speeds in (
        ("hts_rl_ppo", (3_000.0, 2_000.0)),
        ("hts_rl_ppo-sync", (2_000.0, 500.0)),
    ):
        for delay, sps in zip((0.01, 0.02), speeds, strict=True):
            write_run(
                tmp_path / f"{system}-{delay}", system, f"d{delay}", "CartPole-v1", sps=sps,
                steps=10_240, hardware={"step_delay_seconds": delay},
            )  # fmt: skip
    for name, options in (
        ("plain", {}),
        ("word", {"step_delay_seconds": "auto"}),
        ("list", {"step_delay_seconds": [1]}),
    ):
        write_run(
            tmp_path / name, "hts_rl_ppo", name, "CartPole-v1", steps=10_240, hardware=options
        )
    frame = speed.speed_by_option(importers.read([tmp_path]), "step_delay_seconds")
    assert frame["x"].tolist() == [0.01, 0.02, 0.01, 0.02]
    np.testing.assert_allclose(frame["speedup"], [1.5, 4.0, np.nan, np.nan])
    ratios = speed.speedups(frame)
    assert ratios["system"].tolist() == ["hts_rl_ppo"] * 2
    np.testing.assert_allclose(ratios["sps"], [1.5, 4.0])
    np.testing.assert_allclose(ratios["each"].tolist(), [[1.5], [4.0]])
    tables = importers.read([tmp_path])
    look = style.look_of(tables.runs["system"], tables.runs["setting"])
    source = paper.Source(tables, "here", look, "")
    panel = paper.PARTS["speed_by_step_time"](source).axes[0]
    assert [text.get_text() for text in panel.texts] == ["1.50×", "4.00×", "2k", "500"]
    panel = paper.PARTS["speedup_by_variance"](source).axes[0]
    np.testing.assert_allclose(panel.lines[0].get_xydata(), [[100, 1.5], [400, 4.0]])  # ms²


def test_a_figure_says_of_how_many_seeds_it_is_and_what_its_bands_are(tmp_path):
    """Those that are drawn of scores over environments, too."""
    figure = paper.FIGURES["fig7"]
    study = run_study(tmp_path, figure.study)
    source = paper.read_runs(figure.study, tmp_path, "cpu")
    for part in (*figure.parts, "returns"):
        text = paper.PARTS[part](source).get_supxlabel()
        assert "3 seeds" in text, part
        assert f"study {study.name}" in text, part
        intervals = part not in ("run_times", "returns")  # 3 seeds have none on one environment
        assert ("95%" in text) == intervals, part


@pytest.mark.parametrize(("env_id", "end"), [("CartPole-v1", 1.1), ("Breakout-v5", 8.0)])
def test_profiles_end_where_the_scores_do(tmp_path, env_id, end):
    """The made-up runs end below 500: about 1 on CartPole, and 17 on Breakout."""
    write_run(tmp_path / "a", "cleanba_ppo", "one", env_id, 1, steps=51_200)
    tables = importers.read([tmp_path])
    look = style.look_of(tables.runs["system"], tables.runs["setting"])
    source = paper.Source(tables, "here", look, "normalized score")
    low, high = paper.PARTS["profiles"](source).axes[0].get_xlim()
    assert (low, high) == pytest.approx((0, end), rel=0.1)


def test_published_tables_give_what_they_have_and_the_rest_is_named(tmp_path, capsys):
    folder = tmp_path / "published" / "cleanba-static"
    folder.mkdir(parents=True)
    (folder / "spec_out.csv").write_text(SCORES)
    (folder / "spec_out_runtimes.csv").write_text(MINUTES)
    words = ["fig4", "--source", "published", "--published", str(tmp_path / "published")]
    code, files, printed = draw(capsys, *words, "--out", str(tmp_path / "out"))
    assert code == 0
    assert [file.stem for file in files] == [
        "fig4_aggregates_published",
        "fig4_run_times_published",
    ]
    assert "not in these data: efficiency" in printed.out
    source = paper.read_published("fig4", paper.FIGURES["fig4"], tmp_path / "published")
    figure = paper.PARTS["run_times"](source)
    (panel,) = figure.axes
    assert [round(bar.get_width(), 6) for bar in panel.patches] == [21.0, 42.0]
    figure = paper.PARTS["aggregates"](source)
    median = figure.axes[0]  # of two games: the mean of their human-normalized scores
    values = [line.get_xdata()[0] for line in median.lines if line.get_color() == style.INK]
    cleanba = np.mean([(480 - 1.7) / (30.5 - 1.7), (18 + 20.7) / (14.6 + 20.7)])
    moolib = np.mean([(300 - 1.7) / (30.5 - 1.7), (20 + 20.7) / (14.6 + 20.7)])
    assert values == pytest.approx([cleanba, moolib])


def test_published_deviations_are_drawn_to_both_sides_of_their_mean(tmp_path):
    folder = tmp_path / "cleanba-static"
    folder.mkdir()
    (folder / "smootheness.csv").write_text(SCORES)
    (folder / "smootheness_runtimes.csv").write_text(MINUTES)
    source = paper.read_published("fig5", paper.FIGURES["fig5"], tmp_path)
    breakout = paper.PARTS["scores"](source).axes[0]
    assert breakout.get_title() == "Breakout-v5"
    lines = [tuple(line.get_xdata()) for line in breakout.lines if len(line.get_xdata()) == 2]
    assert sorted(lines) == [(280.0, 320.0), (470.0, 490.0)]  # 300 ± 20, 480 ± 10


@pytest.mark.parametrize("name", [n for n, figure in paper.FIGURES.items() if figure.published])
def test_figures_are_drawn_from_the_published_data(name, published, tmp_path, capsys):
    words = [name, "--source", "published", "--published", str(published), "--out", str(tmp_path)]
    code, files, _ = draw(capsys, *words)
    assert code == 0
    assert files


def test_a_figure_that_cannot_be_written_is_one_line_and_exit_code_2(tmp_path, capsys):
    (tmp_path / "file").touch()
    code, _, printed = draw(capsys, "hts_fig4", "--out", str(tmp_path / "file"))
    assert code == 2
    assert printed.err.startswith(f"error: {tmp_path / 'file'}")
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fig6", "--source", "published", "--published", "."], "there are no published data"),
        (["fig3", "--source", "published"], "needs --published FOLDER"),
        (["fig3", "--source", "published", "--published", "/nowhere"], "/nowhere"),
        (["fig3", "--runs", "/nowhere"], "make study STUDY=base PRESET=cpu makes it"),
        (["fig3", "--preset", "huge"], "no preset 'huge'"),
        (["fig1"], "fig1"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(words, message, tmp_path, capsys):
    code, _, printed = draw(capsys, *words, "--out", str(tmp_path / "out"))
    assert code == 2
    assert printed.err.startswith("error: ")
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert not (tmp_path / "out").exists()
