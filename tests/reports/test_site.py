"""The site: all pages and the documentation, whose links lead somewhere wherever it is hosted."""

import re
from pathlib import Path
from urllib.parse import unquote

import pytest
from synthetic_runs import study_folder

from experiments.study import find_study
from reports import site
from reports.study import ReportError

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = {file.parent.name for file in (ROOT / "results").glob("*/result.json")}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The site of the repository, without records."""
    out = tmp_path_factory.mktemp("site")
    results = str(ROOT / "results")
    assert site.main(["--runs", str(out / "none"), "--results", results, "--out", str(out)]) == 0
    return out


def dead_links(folder):
    """Return the links and images below a folder that lead nowhere, anchors included."""
    pages = {file: file.read_text() for file in folder.rglob("*.html")}
    found = []
    for file, html in pages.items():
        for target in re.findall(r'(?:href|src)="([^"]*)"', html):
            path, _, anchor = target.partition("#")
            there = (file.parent / unquote(path)).resolve() if path else file
            if re.match("(https?|data|mailto):", target):
                continue
            if not there.is_file() or (anchor and f'id="{anchor}"' not in pages[there]):
                found.append((file.relative_to(folder).as_posix(), target))
    return found


def test_every_link_of_the_site_leads_somewhere(built):
    assert dead_links(built) == []
    (built / "docs/broken.html").write_text('<a href="audit.html#no-such-part">x</a>')
    assert dead_links(built) == [("docs/broken.html", "audit.html#no-such-part")]
    (built / "docs/broken.html").unlink()


def test_the_site_has_all_published_studies_and_all_documentation(built):
    index = (built / "index.html").read_text()
    for name in PUBLISHED:
        assert f'<a href="{name}/index.html">' in index
        assert "<img src=" in (built / name / "index.html").read_text()
    assert 'href="docs/index.html"' in index
    for file in (ROOT / "docs").glob("*.md"):
        assert (built / f"docs/{file.stem}.html").is_file()
    assert index.count('loading="lazy"') == len(PUBLISHED)  # each has its picture


def test_published_pages_have_no_empty_section(built):
    for name in PUBLISHED:
        html = (built / name / "index.html").read_text()
        assert not re.findall(r'<section id="\w+">\s*<h2>[^<]*</h2>\s*</section>', html), name


def test_every_heading_that_github_links_to_has_an_anchor(built):
    html = (built / "docs/ppo-details.html").read_text()
    assert 'id="the-ppo-of-hts-rl-and-of-the-worker-schemes"' in html


def test_links_to_source_files_need_the_address_of_the_repository(tmp_path):
    source = ROOT / "docs/studies.md"
    there = (source, "docs/studies.html", ROOT, tmp_path)
    assert site.address("../experiments/studies/", *there, "") == ""
    found = site.address("../experiments/studies/", *there, "https://host/x/blob/1/")
    assert found == "https://host/x/blob/1/experiments/studies"
    assert site.address("audit.md#a-b", *there, "") == "audit.html#a-b"
    with pytest.raises(ReportError, match=r"docs/studies\.md: gone\.md: no such file"):
        site.address("gone.md", *there, "")


def test_text_of_a_link_without_a_target_stays():
    title, html = site.html_of(
        "# A *title*\n\n[see `x`](gone) and [y](there)", lambda t: "" if t == "gone" else t
    )
    assert title == "A *title*"
    assert '<p>see <code>x</code> and <a href="there">y</a></p>' in html


def test_a_study_with_records_has_the_page_of_its_records(place, undrawn):
    study_folder(place / "runs/pong", ("cleanba_ppo",), env_ids=("Catch-v0",), steps=5_120)
    (place / "runs/pong/study.toml").write_text(find_study("quickstart").read_text())
    assert site.main(["--results", str(ROOT / "results")]) == 0
    assert "Catch-v0" in (place / "site/pong/index.html").read_text()
    assert (place / "site/pong/figures/curves_steps.svg").is_file()  # which published pages lack


def test_somebody_else_s_page_is_not_overwritten(place, capsys):
    (place / "site/pong").mkdir(parents=True)
    (place / "site/pong/index.html").write_text("mine")
    assert site.main(["--results", str(ROOT / "results")]) == 2
    assert "was not made by this command" in capsys.readouterr().err
    assert (place / "site/pong/index.html").read_text() == "mine"
