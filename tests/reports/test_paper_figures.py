"""Figures of the paper: from records, or from what has been published, and nothing else."""

from pathlib import Path

import numpy as np
import pytest
from synthetic_runs import write_run

from cleanba import record
from experiments import systems
from experiments.study import find_study, load_study, study_names
from reports import paper

PUBLISHED = Path(__file__).resolve().parents[3] / "shared" / "published"

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


def run_study(runs, name):
    """Write a record of a formula for every run of the smaller preset of a study."""
    study = load_study(find_study(name))
    for run in study.runs:
        write_run(
            runs / study.name / record.run_name(run.system, run.setting.name, run.env_id, run.seed),
            run.system, run.setting.name, run.env_id, run.seed, steps=10_240, study=study.name,
            command=systems.command(run, runs),
        )  # fmt: skip
    return study


@pytest.mark.parametrize("name", paper.FIGURES)
def test_every_figure_has_a_study_in_both_sizes(name):
    study = paper.FIGURES[name].study
    assert study in study_names()
    assert load_study(find_study(study), "cpu").runs
    assert load_study(find_study(study), "paper").runs
    assert set(paper.FIGURES[name].parts) <= set(paper.PARTS)


@pytest.mark.parametrize("name", ["fig3", "fig4", "fig5", "fig6", "fig7"])
def test_a_figure_is_drawn_whole_from_the_records_of_its_study(name, tmp_path, capsys):
    run_study(tmp_path / "runs", paper.FIGURES[name].study)
    code, files, printed = draw(
        capsys, name, "--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out")
    )
    assert code == 0
    parts = paper.FIGURES[name].parts
    assert [file.name for file in files] == [f"{name}_{part}.png" for part in parts]
    assert all(file.with_suffix(".svg").is_file() for file in files)
    assert "not in these data" not in printed.out


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
    source = paper.read_runs(figure, tmp_path, "cpu")
    assert source.words == f"22 of 24 runs of study {study.name}"
    assert len(source.tables.runs) == 22
    assert source.score == "normalised score"  # no Atari: nothing to do with humans


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
    median = figure.axes[0]  # of two games: the mean of their human-normalised scores
    values = [line.get_xdata()[0] for line in median.lines if line.get_color() == "black"]
    cleanba = np.mean([(480 - 1.7) / (30.5 - 1.7), (18 + 20.7) / (14.6 + 20.7)])
    moolib = np.mean([(300 - 1.7) / (30.5 - 1.7), (20 + 20.7) / (14.6 + 20.7)])
    assert values == pytest.approx([cleanba, moolib])


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="the published data are not beside the project")
@pytest.mark.parametrize("name", [n for n, figure in paper.FIGURES.items() if figure.published])
def test_figures_are_drawn_from_the_published_data(name, tmp_path, capsys):
    words = [name, "--source", "published", "--published", str(PUBLISHED), "--out", str(tmp_path)]
    code, files, _ = draw(capsys, *words)
    assert code == 0
    assert files


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fig6", "--source", "published", "--published", "."], "nothing is published"),
        (["fig3", "--source", "published"], "needs --published FOLDER"),
        (["fig3", "--source", "published", "--published", "/nowhere"], "/nowhere"),
        (["fig3", "--runs", "/nowhere"], "make study STUDY=base PRESET=cpu makes it"),
        (["fig3", "--preset", "huge"], "no preset 'huge'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(words, message, tmp_path, capsys):
    code, _, printed = draw(capsys, *words, "--out", str(tmp_path / "out"))
    assert code == 2
    assert printed.err.startswith("error: ")
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert not (tmp_path / "out").exists()
