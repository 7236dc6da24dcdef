"""An archive is the same for the same records, holds nothing private, and standard tools can read it."""

import json
import os
import re
import zipfile
from pathlib import Path
from urllib.parse import unquote

import bagit
import pytest
from rocrate.rocrate import ROCrate
from synthetic_runs import study_folder, write_run

from cleanba.record import redaction
from reports import archive, build
from reports.archive import sha256
from reports.unpack import unpack

SYSTEMS = ("monobeast", "moolib")
MADE = ("--authors", "Ada L.; Kurt G.", "--license", "CC-BY-4.0")


@pytest.fixture
def study(place):
    """A working directory with the records of a study."""
    study_folder(place / "runs/small", SYSTEMS, env_ids=("Catch-v0",), steps=5_120)
    return place


def publish(*options, code=0):
    assert archive.main(["small", *options]) == code
    return Path("dist/small.zip")


def test_the_same_records_give_the_same_bytes(study):
    first = sha256(publish(*MADE))
    for path in study.rglob("runs/**/*"):
        os.utime(path, (10**9, 10**9))
    file = publish(*MADE, "--overwrite")
    assert sha256(file) == first
    file.unlink()
    assert sha256(publish(*MADE)) == first


def test_other_content_replaces_an_archive_only_if_asked(study, capsys):
    first = sha256(publish())
    write_run(study / "runs/small/another", system="moolib", env_id="Catch-v0", steps=5_120, seed=9)
    publish(code=2)
    assert "other content: give --overwrite" in capsys.readouterr().err
    assert sha256(Path("dist/small.zip")) == first
    assert sha256(publish("--overwrite")) != first


@pytest.fixture
def reader_called_moolib(monkeypatch):
    """A user whose name, and whose secret, are words of the page."""

    def become():
        monkeypatch.setenv("LOGNAME", "moolib")
        monkeypatch.setenv("MY_TOKEN", "Catch-v0")
        redaction._names.cache_clear()
        assert redaction.redact_text("moolib on Catch-v0") == "<user> on ***"

    yield become
    redaction._names.cache_clear()


def test_the_page_can_be_rebuilt_from_the_archive_byte_for_byte(
    study, tmp_path, monkeypatch, reader_called_moolib
):
    (tmp_path / "unpacked").mkdir()
    data = unpack(publish(), tmp_path / "unpacked") / "data"
    pages = {name: (data / name).read_bytes() for name in ("index.html", "result.json")}
    for name in pages:
        (data / name).unlink()
    monkeypatch.chdir(data)
    reader_called_moolib()
    assert build.main(["small", "--out", ".", "--published"]) == 0
    assert {name: (data / name).read_bytes() for name in pages} == pages


def test_records_are_staged_without_a_second_copy_where_possible(tmp_path, monkeypatch):
    source = tmp_path / "source"
    source.write_text("content")
    (tmp_path / "symbolic").symlink_to("source")
    archive.copy(source, tmp_path / "staged/a")
    archive.copy(tmp_path / "symbolic", tmp_path / "staged/b")
    monkeypatch.setattr(os, "link", lambda *_: os.stat("/nowhere"))  # as across disks: an OSError
    archive.copy(source, tmp_path / "staged/c")
    staged = [tmp_path / "staged" / name for name in "abc"]
    assert [path.read_text() for path in staged] == ["content"] * 3
    assert [path.samefile(source) for path in staged] == [True, False, False]
    assert not any(path.is_symlink() for path in staged)


def test_it_is_a_bag_and_a_research_object(study, tmp_path):
    file = publish(*MADE)
    (tmp_path / "unpacked").mkdir()
    folder = unpack(file, tmp_path / "unpacked")
    bag = bagit.Bag(str(folder))
    bag.validate()
    assert bag.info["External-Identifier"] == "small"
    assert bag.info["Source-Revision"] == "0123456789" * 4
    assert re.fullmatch("[0-9a-f]{64}", bag.info["Lock-File-SHA256"])
    crate = ROCrate(folder / "data")
    assert crate.license == "CC-BY-4.0"
    assert [person["name"] for person in crate.root_dataset["author"]] == ["Ada L.", "Kurt G."]
    runs = {path.name for path in (folder / "data/runs/small").iterdir() if path.is_dir()}
    actions = crate.get_by_type("CreateAction")
    assert {Path(unquote(action["result"][0].id)).name for action in actions} == runs
    for entity in crate.data_entities:
        assert (folder / "data" / unquote(entity.id)).exists()


def test_links_of_the_page_lead_to_records_inside_the_archive(study, tmp_path):
    video = next((study / "runs/small").glob("moolib__*")) / "videos/Catch-v0.mp4"
    video.parent.mkdir()
    video.write_bytes(b"a video")
    (tmp_path / "unpacked").mkdir()
    data = unpack(publish(), tmp_path / "unpacked") / "data"
    links = re.findall(r'href="(runs/[^"]+)"', (data / "index.html").read_text())
    assert len(set(links)) >= 5
    assert any(link.endswith("/videos/Catch-v0.mp4") for link in links)
    assert all((data / unquote(link)).is_file() for link in links)


@pytest.mark.parametrize(
    "private",
    ["/home/someone/cleanba", "WANDB_API_KEY=0123456789abcdef", "hf_0123456789abcdefghij"],
)
def test_private_words_stop_it_before_anything_is_written(study, capsys, private):
    folder = study / "runs/small/private"
    write_run(folder, system="moolib", env_id="Catch-v0", steps=5_120, command=("x",))
    info = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(info | {"command": [private]}, indent=1))
    publish(code=2)
    error = capsys.readouterr().err
    assert re.search(r"runs/small/private/run\.json, line \d+: a secret, or the name of", error)
    assert private not in error
    assert not (study / "dist").exists()


@pytest.mark.parametrize(("which", "count"), [("none", 0), ("some", 2), ("all", 12)])
def test_checkpoints_are_published_as_asked(study, which, count):
    for run in (study / "runs/small").glob("*/run.json"):
        for update in (1, 10):  # no segment begins after the last update
            folder = run.parent / f"checkpoints/{update:08d}"
            folder.mkdir(parents=True)
            (folder / "arrays.npz").write_bytes(b"x")
            (folder / "checkpoint.json").write_text("{}")
    with zipfile.ZipFile(publish("--checkpoints", which)) as made:
        names = made.namelist()
    assert sum(name.endswith("arrays.npz") for name in names) == count
    assert sum(name.endswith("checkpoint.json") for name in names) == count
    assert not any("tensorboard" in name or name.endswith("log.txt") for name in names)


def test_some_checkpoints_are_those_of_a_run_that_can_be_repeated(place):
    folder = place / "runs/small"
    for seed, status in ((1, "failed"), (2, "completed"), (3, "completed")):
        run = folder / f"moolib__a__Catch-v0__s{seed}"
        write_run(run, "moolib", "a", "Catch-v0", seed, steps=5_120, status=status)
        saved = run / "checkpoints/00000001"
        saved.mkdir(parents=True)
        (saved / "arrays.npz").write_bytes(b"x")
        (saved / "checkpoint.json").write_text("{}")
    with zipfile.ZipFile(publish("--checkpoints", "some")) as made:
        names = [name for name in made.namelist() if name.endswith("arrays.npz")]
    assert [name.split("/")[4] for name in names] == ["moolib__a__Catch-v0__s2"]


@pytest.mark.parametrize("name", ["my study", "größe", "a+b", "../a", ".hidden"])
def test_a_name_that_no_audit_accepts_is_not_published(place, capsys, name):
    assert archive.main([name]) == 2
    assert "cannot be the name of an archive" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda run: (run / "episodes.jsonl").unlink(), "episodes.jsonl"),
        (lambda run: (run / "episodes.jsonl").write_text(""), "episodes.jsonl"),
        (lambda run: (run / "run.json").write_text('{"schema'), "run.json"),
    ],
)
def test_damaged_records_are_not_published(study, capsys, spoil, message):
    spoil(min((study / "runs/small").glob("*/run.json")).parent)
    publish(code=2)
    assert message in capsys.readouterr().err
    assert not (study / "dist").exists()


def test_a_run_that_goes_on_is_not_published(study, capsys):
    folder = study / "runs/small/on"
    write_run(folder, system="moolib", env_id="Catch-v0", steps=5_120, status="running")
    publish(code=2)
    assert "is running, or was killed" in capsys.readouterr().err
