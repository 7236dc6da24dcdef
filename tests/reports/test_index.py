"""The index of all reports."""

import pytest
from synthetic_runs import study_folder

from experiments.study import find_study
from reports import index

EVIL = "<script>alert(1)</script>"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working directory with the records of two studies, one of them with an evil title."""
    monkeypatch.chdir(tmp_path)
    for name in ("first", "second"):
        study_folder(tmp_path / "runs" / name, ("cleanba_ppo",), env_ids=("Catch-v0",), steps=5_120)
        text = find_study("quickstart").read_text()
        title = EVIL if name == "second" else "The first [study]"
        text = text.replace('title = "Quickstart', f'title = "{title} Quickstart')
        (tmp_path / "runs" / name / "study.toml").write_text(text)
    return tmp_path


def test_all_reports_are_built_and_listed_with_what_they_found(place, capsys):
    assert index.main([]) == 0
    assert "first: reports/first/index.html" in capsys.readouterr().out
    html, markdown = (
        (place / "reports" / page).read_text() for page in ("index.html", "README.md")
    )
    for name in ("first", "second"):
        assert f'<a href="{name}/index.html">' in html
        assert f"({name}/README.md)" in markdown
    assert "The first [study] Quickstart" in html
    assert (
        html.count("6 of 6 runs are completed.")
        == markdown.count("6 of 6 runs are completed.")
        == 2
    )
    assert EVIL not in html + markdown
    assert "&lt;script&gt;alert(1)" in html
    assert index.main([]) == 0  # its own pages may be replaced


def test_a_study_without_a_completed_run_is_named_and_costs_no_other_report(place, capsys):
    study_folder(
        place / "runs" / "third",
        ("cleanba_ppo",),
        env_ids=("Catch-v0",),
        steps=5_120,
        status="failed",
    )
    (place / "runs" / "third" / "study.toml").write_text(find_study("quickstart").read_text())
    assert index.main([]) == 1
    printed = capsys.readouterr()
    assert "third: no report: " in printed.err
    assert (place / "reports" / "second" / "index.html").is_file()


def test_somebody_else_s_page_is_not_overwritten(place, capsys):
    (place / "reports").mkdir()
    (place / "reports" / "README.md").write_text("mine")
    assert index.main([]) == 2
    assert "was not made by this command" in capsys.readouterr().err
    assert (place / "reports" / "README.md").read_text() == "mine"


def test_no_report_is_one_line_and_exit_code_2(tmp_path, capsys):
    assert index.main(["--runs", str(tmp_path), "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
