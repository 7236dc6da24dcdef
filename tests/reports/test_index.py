"""The index of all pages."""

import json

import pytest
from synthetic_runs import study_folder

from experiments.study import find_study
from reports import index

EVIL = "<script>alert(1)</script>"

pytestmark = pytest.mark.usefixtures("undrawn")


@pytest.fixture
def studies(place):
    """A working directory with the records of two studies, one of them with an evil title."""
    for name in ("first", "second"):
        study_folder(place / "runs" / name, ("cleanba_ppo",), env_ids=("Catch-v0",), steps=5_120)
        text = find_study("quickstart").read_text()
        title = EVIL if name == "second" else "The first [study]"
        text = text.replace('title = "Quickstart', f'title = "{title} Quickstart')
        (place / "runs" / name / "study.toml").write_text(text)
    return place


def test_all_pages_are_built_and_listed_with_what_they_found(studies, capsys):
    assert index.main([]) == 0
    assert "first: site/first/index.html" in capsys.readouterr().out
    html = (studies / "site/index.html").read_text()
    for name in ("first", "second"):
        assert f'<a href="{name}/index.html">' in html
    assert "The first [study] Quickstart" in html
    assert html.count("6 of 6 runs are completed") == 2
    assert EVIL not in html
    assert "&lt;script&gt;alert(1)" in html
    assert index.main([]) == 0  # its own pages may be replaced


def test_the_index_is_made_from_the_data_of_the_pages(studies):
    assert index.main([]) == 0
    file = studies / "site/first/result.json"
    page = json.loads(file.read_text()) | {"finding": ["Something else."]}
    file.write_text(json.dumps(page))
    (studies / "site/second/index.html").write_text("not read")
    index.write(studies / "site")
    html = (studies / "site/index.html").read_text()
    assert "<p>Something else.</p>" in html
    assert "second/index.html" in html


def test_a_study_without_a_completed_run_is_named_and_costs_no_other_page(studies, capsys):
    third = studies / "runs" / "third"
    study_folder(third, ("cleanba_ppo",), env_ids=("Catch-v0",), steps=5_120, status="failed")
    (third / "study.toml").write_text(find_study("quickstart").read_text())
    assert index.main([]) == 1
    printed = capsys.readouterr()
    assert "third: no page: " in printed.err
    assert (studies / "site" / "second" / "index.html").is_file()


def test_a_page_of_another_version_is_named_and_costs_no_other_page(studies, capsys):
    assert index.main([]) == 0
    file = studies / "site/first/result.json"
    file.write_text(file.read_text().replace('"caveats"', '"status"'))
    assert index.main(["--no-build"]) == 0
    assert "not listed: site/first/result.json: not a result of a study" in capsys.readouterr().err
    html = (studies / "site/index.html").read_text()
    assert "second/index.html" in html
    assert "first/index.html" not in html


def test_somebody_else_s_page_is_not_overwritten(studies, capsys):
    (studies / "site").mkdir()
    (studies / "site" / "index.html").write_text("mine")
    assert index.main([]) == 2
    assert "was not made by this command" in capsys.readouterr().err
    assert (studies / "site" / "index.html").read_text() == "mine"


@pytest.mark.parametrize("damage", [None, "{}", "[", '{"name": "x"}'])
def test_no_page_or_a_damaged_one_is_one_line_and_exit_code_2(tmp_path, capsys, damage):
    if damage is not None:
        (tmp_path / "study").mkdir()
        (tmp_path / "study/result.json").write_text(damage)
    assert index.main(["--runs", str(tmp_path), "--out", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert err.startswith("error: ")
