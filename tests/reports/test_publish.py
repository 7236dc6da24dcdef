"""What is published: small, from the same page as the site's, and never edited by hand."""

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from built import SYSTEMS, build_small
from PIL import Image
from synthetic_runs import study_folder, write_run

from reports import archive, index, publish, render, site
from reports.page import Cell, read_json

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results"
PUBLISHED = sorted(file.parent.name for file in RESULTS.glob("*/result.json"))


def tracked():
    """The files that git tracks, or None outside of a checkout."""
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    return None if done.returncode else [ROOT / line for line in done.stdout.splitlines()]


def publish_small(*flags):
    """Publish the records of a small study, and its page."""
    assert archive.main(["small", "--overwrite"]) == 0
    return publish.main(["small", *flags])


def test_a_published_page_is_that_of_the_site_without_links(place, capsys):
    study_folder(place / "runs/small", SYSTEMS, steps=5_120)
    assert publish_small() == 0
    folder = place / "results/small"
    built, published = (
        read_json(at / "small/result.json") for at in (place / "site", folder.parent)
    )
    assert publish.without_links(built) == published
    cells = [v for one in published.sections if one.table for row in one.table.rows for v in row]
    assert not any(cell.link for cell in cells if isinstance(cell, Cell))
    images = sorted(file.name for file in folder.glob("*.png"))
    assert images == ["aggregates.png", "curves_steps.png", "speed.png"]
    markdown = (folder / "README.md").read_text()
    assert all(f"]({name})" in markdown for name in images)
    assert markdown.count("![") == 3
    printed = capsys.readouterr().out.splitlines()
    assert {"results/small/result.json", "results/README.md"} <= set(printed)
    entry = (place / "results/README.md").read_text()
    assert "[small](small/README.md)" in entry
    assert render.escape(published.finding[0]) in entry
    digest = archive.sha256(place / "dist/small.zip")
    assert published.archive.sha256 == digest
    for page in (markdown, (place / "site/small/index.html").read_text()):
        assert f"SHA-256 {digest}" in page
        assert "make audit ARCHIVE=small.zip" in page


def test_a_page_is_published_only_with_its_records(place, undrawn, capsys):
    study_folder(place / "runs/small", SYSTEMS[:1], env_ids=("Catch-v0",), steps=5_120)
    assert publish.main(["small"]) == 2
    assert "dist/small.zip is missing: make publish" in capsys.readouterr().err
    assert archive.main(["small"]) == 0
    shutil.rmtree(min((place / "runs/small").glob("*__s1")))
    assert publish.main(["small"]) == 2
    assert "dist/small.zip holds other records than runs/small" in capsys.readouterr().err
    (place / "dist/small.zip").write_bytes(b"PK")
    assert publish.main(["small"]) == 2
    assert "dist/small.zip: File is not a zip file" in capsys.readouterr().err
    assert not (place / "results").exists()


def test_records_from_an_archive_are_published_without_problems(place, undrawn, monkeypatch):
    monkeypatch.setattr(publish, "small_png", lambda file: b"an image")
    run = place / "runs/small/cleanba_ppo__a0-l0-t1__Catch-v0__s1"
    write_run(
        run, env_id="Catch-v0", steps=5_120,
        before_end=lambda _: (run / "model.cleanrl_model").write_bytes(b"weights"),
    )  # fmt: skip
    (run / "model.cleanrl_model").unlink()  # archives have no models
    problems = []
    for flags in ((), ("--published",)):
        assert publish_small(*flags) == 0
        page = (place / "results/small/README.md").read_text()
        problems.append("model.cleanrl_model is missing" in page)
    assert problems == [True, False]


def test_publishing_again_replaces_what_was_published(place, undrawn, monkeypatch):
    monkeypatch.setattr(publish, "small_png", lambda file: b"an image")
    study_folder(place / "runs/small", SYSTEMS[:1], steps=5_120)
    assert publish_small() == 0
    (place / "results/small/mine.png").write_bytes(b"kept")
    for run in (place / "runs/small").glob("*__CartPole-v1__*"):
        shutil.rmtree(run)
    assert publish_small() == 0
    names = {file.name for file in (place / "results/small").glob("*.png")}
    assert names == {"curves_steps.png", "policy_lag.png", "speed.png", "mine.png"}


def test_videos_are_published_and_on_the_site(
    place, undrawn, monkeypatch, capsys, tmp_path_factory
):
    monkeypatch.setattr(publish, "small_png", lambda file: b"an image")
    monkeypatch.setattr(site, "PAGES", ())
    study_folder(place / "runs/small", SYSTEMS[:1], env_ids=("Catch-v0",), steps=5_120)
    first, second = (place / f"runs/small/cleanba_ppo__a0-l0-t1__Catch-v0__s{n}" for n in (1, 2))
    for run, content in ((first, b"a game"), (second, b"another game")):
        (run / "videos").mkdir()
        (run / "videos/Catch-v0.mp4").write_bytes(content)
    assert publish_small() == 0
    names = [f"{run.name}__Catch-v0.mp4" for run in (first, second)]
    folder = place / "results/small"
    assert [(folder / name).read_bytes() for name in names] == [b"a game", b"another game"]
    assert all(f"]({name})" in (folder / "README.md").read_text() for name in names)
    (place / "empty").mkdir()
    assert site.main(["--runs", "empty", "--out", "public"]) == 0
    assert (place / "public/small" / names[1]).read_bytes() == b"another game"
    assert f'href="{names[1]}"' in (place / "public/small/index.html").read_text()
    elsewhere = shutil.copytree(place / "runs", tmp_path_factory.mktemp("elsewhere") / "runs")
    assert publish.main(["small", "--runs", str(elsewhere / "small")]) == 2
    assert "only of records below the working directory" in capsys.readouterr().err
    shutil.rmtree(second / "videos")
    assert publish_small() == 0
    assert [file.name for file in folder.glob("*.mp4")] == names[:1]


def test_building_a_page_touches_no_published_one(place, undrawn):
    build_small(place)
    assert sorted(path.name for path in place.iterdir()) == ["runs", "site"]


def test_a_page_of_somebody_else_is_not_overwritten(place, undrawn, capsys):
    (place / "results").mkdir()
    (place / "results/README.md").write_text("mine")
    study_folder(place / "runs/small", SYSTEMS[:1], env_ids=("Catch-v0",), steps=5_120)
    assert publish.main(["small"]) == 2
    assert "was not made by this command" in capsys.readouterr().err
    assert (place / "results/README.md").read_text() == "mine"
    assert not (place / "site").exists()


def test_a_figure_is_made_smaller_until_it_fits(tmp_path, monkeypatch):
    monkeypatch.setattr(publish, "MOST_BYTES", 10_000)
    noise = np.random.default_rng(0).integers(0, 256, (90, 160, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "noise.png")
    small = publish.small_png(tmp_path / "noise.png")
    assert len(small) <= publish.MOST_BYTES
    (tmp_path / "small.png").write_bytes(small)
    with Image.open(tmp_path / "small.png") as image:
        assert image.width / image.height == pytest.approx(16 / 9, rel=0.05)
        assert image.width < 160


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_page_in_the_repository_is_written_from_its_result(name):
    folder = RESULTS / name
    page = read_json(folder / "result.json")
    assert page.name == name
    images = sorted(folder.glob("*.png"))
    assert len(images) <= 3
    assert all(image.stat().st_size <= 150_000 for image in images)
    names = publish.chosen(page)
    assert {image.stem for image in images} == set(names)
    assert (folder / "README.md").read_text() == render.markdown_page(page, names)
    assert page.finding
    assert page.revisions
    assert page.hardware
    assert page.commands


def test_the_index_in_the_repository_is_written_from_the_results():
    assert len(PUBLISHED) >= 26
    assert (RESULTS / "README.md").read_text() == render.markdown_index(index.entries(RESULTS))


def test_the_readme_says_what_the_study_of_its_figure_found():
    readme = (ROOT / "README.md").read_text()
    (name,) = re.findall(r"!\[.*\]\(results/(\w+)/\w+\.png\)", readme)
    page = read_json(RESULTS / name / "result.json")
    assert re.findall(r"^> (.*)$", readme, re.MULTILINE) == list(map(render.escape, page.finding))


def test_the_repository_holds_code_and_little_else():
    files = tracked()
    if files is None:
        pytest.skip("not a checkout")
    files = [file for file in files if file.exists()]
    apart = (".lock", ".zip", ".xz", ".mp4")
    assert sum(file.stat().st_size for file in files if file.suffix not in apart) <= 10_000_000
    (published,) = (file for file in files if file.suffix == ".zip")
    assert published.stat().st_size <= 3_000_000
    assert sum(file.stat().st_size for file in files if file.suffix == ".mp4") <= 1_000_000
    records = [file for file in files if file.suffix == ".xz"]
    assert {file.parent for file in records} <= {RESULTS / "atari_small/records"}
    assert sum(file.stat().st_size for file in records) <= 50_000_000
    for file in (file for file in files if file.is_relative_to(ROOT / "reports")):
        assert file.suffix == ".py" or file.parent.name == "templates", file
