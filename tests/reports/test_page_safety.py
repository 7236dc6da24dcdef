"""Pages escape the content of records, are self-contained, and do not identify the machine."""

import base64
import hashlib
import json
import os
import re
from pathlib import Path

import pytest
from built import EVIL, SYSTEMS, own, pages, stored_data, visible_text
from markdown_it import MarkdownIt
from synthetic_runs import study_folder, write_run

from experiments.study import find_study
from reports import build, render
from reports.page import Page, Section


def test_the_html_page_needs_nothing_but_itself(site):
    html, _ = pages(site)
    text = own(html)
    assert not re.findall(r'\bsrc="[^"]', text)
    assert "http://" not in text
    assert re.findall('https://[^"]+', text) == ["https://vega.github.io/schema/vega-lite/v6.json"]
    assert "@import" not in text
    assert "<link" not in text


def test_the_policy_of_a_page_allows_its_own_scripts_alone(site):
    for page in ("quickstart/index.html", "index.html"):
        html = (site / "site" / page).read_text()
        policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)[1]
        assert policy.startswith("default-src 'none';")
        assert "script-src 'unsafe" not in policy
        scripts = re.findall(r"<script>(.*?)</script>", html, re.S)
        digests = [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts]
        assert sorted(re.findall("'sha256-([^']+)'", policy)) == sorted(digests)
        others = re.findall("<script [^>]*>", own(html))
        assert all(re.match('<script type="application/(gzip|json)" id=', one) for one in others)


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
    html = own(html)
    assert html.count("<script>") == 2  # the page's own
    assert len(re.findall('<script type="application/(?:gzip|json)" id="', html)) + 2 == html.count(
        "<script"
    )
    for page in (html, markdown):
        assert "<img src=x" not in page
    assert "<script" not in markdown
    text = visible_text(html)
    assert text.count(EVIL) > 10
    assert f"ValueError: {EVIL} | `x`" in text
    svg = (place / "site/small/figures/speed.svg").read_text()
    assert "<script" not in svg


def test_names_in_the_text_of_a_section_stay_text():
    evil = render.escape(f"{EVIL} [x](javascript:alert(1)) *a* <b>")
    page = Page("x", "X", "", (), (), (Section("s", "S", f"Excluded: {evil}."),))
    html = render.html_page(page, {})
    assert html.count("<script") == 1
    assert "<img src=x" not in html
    assert 'href="javascript' not in html
    assert f"Excluded: {EVIL} [x](javascript:alert(1)) *a* <b>." in visible_text(html)
    assert "<script" not in render.markdown_page(page, ())


def test_html_and_addresses_in_markdown_are_not_passed_through():
    page = Page("x", "X", "", (), (), (Section("s", "S", "<b>bold</b> [x](javascript:alert(1))"),))
    html = render.html_page(page, {})
    assert "<b>bold" not in html
    assert 'href="javascript' not in html


@pytest.mark.usefixtures("undrawn")
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


@pytest.mark.usefixtures("undrawn")
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
    for page in ("index.html", "README.md", "result.json"):
        text = (out / page).read_text()
        text = own(text) + "".join(stored_data(text).values())
        for word in (str(place), "alice", "lab7", "hunter2", "/home", os.uname().nodename):
            assert word not in text, word
    assert "FileNotFoundError" in (out / "README.md").read_text()


@pytest.mark.usefixtures("undrawn")
def test_no_link_climbs_out_of_the_working_directory(place):
    outside = place / "outside"
    study_folder(outside, SYSTEMS[:1], env_ids=("Catch-v0",), steps=5_120)
    (place / "inside").mkdir()
    os.chdir(place / "inside")
    assert build.main(["small", "--runs", str(outside)]) == 0
    for page in ("index.html", "README.md", "result.json"):
        assert "outside/" not in re.sub(
            r'src="data:[^"]*"', "", Path("site/small", page).read_text()
        )


@pytest.mark.usefixtures("undrawn")
def test_a_page_of_somebody_else_is_not_overwritten(place, capsys):
    study_folder(place / "runs/small", SYSTEMS[:1], env_ids=("Catch-v0",), steps=5_120)
    (place / "README.md").write_text("# My project")
    assert build.main(["small", "--out", "."]) == 2
    assert "README.md was not made by this command" in capsys.readouterr().err
    assert (place / "README.md").read_text() == "# My project"
    assert not (place / "figures").exists()


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
    assert render.escape(text) == written


def test_pairs_of_backticks_in_a_question_are_code_in_markdown():
    question = r"Does `python -m analysis <x> | *y*` agree, \`literally\`, with one ` alone?"
    page = Page("x", "X", question, (), (), (), remark=question)
    shown = MarkdownIt("commonmark").enable("table").render(render.markdown_page(page, ()))
    expected = (
        "<p>Does <code>python -m analysis &lt;x&gt; | *y*</code> agree, \\`literally\\`, "
        "with one ` alone?</p>"
    )
    assert shown.count(expected) == 2
    row = MarkdownIt("commonmark").enable("table").render(render.markdown_index([page]))
    assert expected.removeprefix("<p>").removesuffix("</p>") in row
    assert "<script" not in render.escape_prose("`<script>`")
