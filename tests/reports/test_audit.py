"""An audit verifies an honest archive, refutes a forged one, and names what it could not check."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import bagit
import msgspec
import numpy as np
import pytest
from synthetic_runs import study_folder

from cleanba.audit.replay import Outcome
from reports import archive, audit, render
from reports.archive import sha256, toolkit, write_zip
from reports.audit import Audit, same_value
from reports.page import read_json
from reports.unpack import unpack
from tests.cleanba.conftest import Trainer
from tests.sealing import seal

ROOT = Path(__file__).resolve().parents[2]


def run_audit(file, *options, code=0):
    """Audit an archive into the folder `audits` beside it; return its `audit.json`."""
    out = Path(file).parent / "audits"
    command = [
        sys.executable,
        "-m",
        "reports.audit",
        str(file),
        "--out",
        str(out),
        "--no-progress",
        *options,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    (path,) = out.glob("*/audit.json")
    return msgspec.json.decode(path.read_bytes(), type=Audit)


def forge(file, target, change, agent=None):
    """Change the content of an archive, and recompute every checksum."""
    folder = target.parent / f"{target.stem}-forged"
    folder.mkdir(parents=True)
    bag = unpack(file, folder)
    data = folder / "data"
    shutil.move(bag / "data", data)
    shutil.rmtree(bag)
    change(data)
    for info in data.glob("runs/*/*/run.json"):
        seal(info.parent)
    bag.mkdir()
    for path in data.iterdir():
        shutil.move(path, bag / path.name)
    bagit.make_bag(str(bag), {"Bag-Software-Agent": agent or toolkit()}, checksums=["sha256"])
    write_zip(bag, target)
    return target


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory):
    """An archive of runs of a formula, which record no actions."""
    folder = tmp_path_factory.mktemp("synthetic")
    study_folder(folder / "runs/small", ("monobeast", "moolib"), env_ids=("Catch-v0",), steps=5_120)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert archive.main(["small"]) == 0
    return folder / "dist/small.zip"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """An archive of two trained runs with checkpoints."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "runs").mkdir()
    for algorithm in ("ppo", "impala"):
        Trainer(folder / "runs")(
            algorithm, "--checkpoint-every", "4", "--keep-checkpoints", "all", "--study", "small"
        )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert archive.main(["small", "--checkpoints", "all"]) == 0
    return folder / "dist/small.zip"


@pytest.mark.slow
def test_runs_of_systems_that_are_not_deterministic_are_consistent_only(synthetic):
    found = run_audit(synthetic, "--segments", "1")
    assert found.tables == ""
    assert {outcome.verdict for outcome in found.runs.values()} == {"consistent only"}
    assert found.sha256 == sha256(synthetic)
    for page in ("index.html", "README.md"):
        text = (synthetic.parent / "audits/small" / page).read_text()
        assert "12 of 12 runs consistent only" in text
        assert found.sha256 in text


@pytest.mark.slow
def test_an_archive_of_trained_runs_is_verified(trained):
    found = run_audit(trained, "--segments", "2", "--seed", "3")
    assert found.tables == ""
    assert len(found.runs) == 2
    for outcome in found.runs.values():
        assert outcome.verdict == "verified", outcome.reason
        assert outcome.episodes == outcome.recorded > 0
        assert (len(outcome.segments), outcome.all_segments) == (2, 4)
        assert outcome.updates == 8
        assert outcome.missed["50%"] == pytest.approx(1 / 6)  # both draws miss two of four


def raise_a_return(data):
    path = min(data.glob("runs/small/*/episodes.jsonl"))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[3]["return"] += 1
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.slow
def test_a_forged_run_is_refuted_and_the_others_are_not(trained, tmp_path):
    file = forge(trained, tmp_path / "forged.zip", raise_a_return)
    found = run_audit(file, "--segments", "0", code=1)
    outcomes = [found.runs[name] for name in sorted(found.runs)]
    assert [outcome.verdict for outcome in outcomes] == ["refuted", "not checkable"]
    assert outcomes[0].reason.startswith("episode 4: environment")
    assert outcomes[1].episodes == outcomes[1].recorded > 0


def change_a_cell(data):
    page = json.loads((data / "result.json").read_text())
    table = next(one["table"] for one in page["sections"] if one["name"] == "scores")
    cell = next(cell for cell in table["rows"][0] if isinstance(cell, float | dict))
    row = table["rows"][0]
    at = row.index(cell)
    row[at] = cell * 1.01 if isinstance(cell, float) else {**cell, "value": 123.0}
    (data / "result.json").write_text(json.dumps(page))
    show(data)


def change_the_finding(data):
    page = json.loads((data / "result.json").read_text())
    page["finding"][0] += " It is better."
    (data / "result.json").write_text(json.dumps(page))
    show(data)


def change_what_is_shown(data):
    path = data / "index.html"
    path.write_text(path.read_text().replace("Catch-v0", "Breakout-v5"))


def show(data):
    """Make `index.html` of an edited `result.json`."""
    page = read_json(data / "result.json")
    images = dict.fromkeys((one.name for one in page.figures()), audit.NO_FIGURE)
    (data / "index.html").write_text(render.html_page(page, images))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "where"),
    [
        (change_a_cell, "result.json, sections"),
        (change_the_finding, "result.json, finding"),
        (change_what_is_shown, "index.html does not show"),
    ],
)
def test_an_edited_page_is_refuted(synthetic, tmp_path, change, where):
    file = forge(synthetic, tmp_path / "forged.zip", change)
    found = run_audit(file, "--runs-matching", "moolib.*s1$", code=1)
    assert found.tables.startswith(where)
    assert len(found.runs) == 2


def test_a_page_of_another_version_of_the_toolkit_is_not_refuted(synthetic, tmp_path):
    """Its words may differ; only that version can tell."""
    agent = "cleanba 0.2.0 0123abc"
    file = forge(synthetic, tmp_path / "older.zip", change_the_finding, agent)
    found = run_audit(file, "--runs-matching", "moolib.*s1$")
    assert found.other_toolkit == agent
    text = (tmp_path / "audits/small/README.md").read_text()
    assert f"Not comparable: the page was made by {agent}, and this is {toolkit()}." in text
    same = forge(synthetic, tmp_path / "same.zip", lambda data: None, agent)
    assert run_audit(same, "--runs-matching", "moolib.*s1$").other_toolkit == ""


def numbers_of(page):
    """Return the places of all numbers in the tables of a page: rows and columns."""
    return [
        (row, column)
        for section in page["sections"]
        for row in section.get("table", {"rows": []})["rows"]
        for column, cell in enumerate(row)
        if isinstance(cell, float) and cell != 0
    ]


@pytest.mark.slow
def test_ten_edited_numbers_are_refuted(synthetic, tmp_path):
    data = unpack(synthetic, tmp_path) / "data"
    published = (data / "result.json").read_text()
    assert audit.compare_page(read_json(data / "result.json"), data) == ""
    rng = np.random.default_rng(0)
    for _ in range(10):
        page = json.loads(published)
        row, column = (places := numbers_of(page))[rng.integers(len(places))]
        row[column] *= 1 + rng.choice([-1, 1]) * 10.0 ** -rng.integers(1, 5)
        (data / "result.json").write_text(json.dumps(page))
        show(data)
        found = audit.compare_page(read_json(data / "result.json"), data)
        assert found.startswith("result.json, sections")


@pytest.mark.parametrize(
    ("then", "now", "same"),
    [
        (1.0, 1.0 + 1e-9, True),
        (1.0, 1.001, False),
        (3, 3, True),
        (None, 0.0, False),
        (True, 1, False),
        ("484.2 [470.1, 490.0]", "484.3 [470.1, 490.0]", False),
        ("a", "a", True),
        ("1", 1, False),
    ],
)
def test_numbers_may_differ_in_their_last_digit_only(then, now, same):
    assert same_value(then, now) is same


def test_bad_input_is_one_line(tmp_path, capsys, synthetic):
    assert audit.main([str(synthetic), "--runs-matching", "("]) == 2
    assert audit.main([str(synthetic), "--runs-matching", "nothing", "--out", str(tmp_path)]) == 2
    (tmp_path / "small").mkdir()
    (tmp_path / "small/index.html").write_text("mine")
    assert audit.main([str(synthetic), "--out", str(tmp_path)]) == 2
    assert (tmp_path / "small/index.html").read_text() == "mine"
    errors = capsys.readouterr().err.strip().splitlines()
    assert len(errors) == 3
    for error, message in zip(
        errors, ("--runs-matching (", "no run matches", "was not made by"), strict=True
    ):
        assert message in error


def test_an_interrupted_audit_continues_where_it_stopped(synthetic, tmp_path, monkeypatch, capsys):
    checked, write = [], audit.write

    def check_run(path, args, seed, compiled):
        verdict = "consistent only" if checked else "failed"
        checked.append((path.name, seed))
        return Outcome(verdict=verdict)

    def write_and_stop(found, *where):
        report = write(found, *where)
        if len(found.runs) == 3:
            raise KeyboardInterrupt
        return report

    monkeypatch.setattr(audit, "check_run", check_run)
    monkeypatch.setattr(audit, "write", write_and_stop)
    command = [str(synthetic), "--out", str(tmp_path), "--no-progress"]
    assert audit.main([*command, "--resume", "--seed", "7"]) == 130
    assert "RESUME=1" in capsys.readouterr().err
    first = audit.read_audit(tmp_path / "small/audit.json").runs
    assert len(first) == 3
    assert "9 of 12 runs were not checked" in (tmp_path / "small/README.md").read_text()
    kept = {name for name, outcome in first.items() if outcome.verdict != "failed"}
    before = len(checked)
    monkeypatch.setattr(audit, "write", write)
    assert audit.main(command) == 2  # the part is not lost
    assert "is an audit of a part of this archive" in capsys.readouterr().err
    assert audit.read_audit(tmp_path / "small/audit.json").runs == first
    assert audit.main([*command, "--resume"]) == 0
    found = audit.read_audit(tmp_path / "small/audit.json")
    assert len(found.runs) == 12
    assert {outcome.verdict for outcome in found.runs.values()} == {"consistent only"}
    assert sorted(name for name, _ in checked[before:]) == sorted(set(found.runs) - kept)
    assert {seed for _, seed in checked} == {7}
    assert "not checked" not in (tmp_path / "small/README.md").read_text()
    for other in (["--seed", "8"], ["--segments", "1"], ["--module", "baselines.ppo_microrts"]):
        assert audit.main([*command, "--resume", *other]) == 2
        assert "segments 5, seed 7" in capsys.readouterr().err
    other = forge(synthetic, tmp_path / "other.zip", lambda data: None, "cleanba 0.2.0 0123abc")
    assert audit.main([str(other), *command[1:], "--resume"]) == 2
    assert f"archive {sha256(synthetic)[:12]}" in capsys.readouterr().err
    assert audit.read_audit(tmp_path / "small/audit.json") == found
    (tmp_path / "small/audit.json").write_text("{}")
    assert audit.main([*command, "--resume"]) == 2
    assert "not an audit" in capsys.readouterr().err


def test_the_command_of_a_page_repeats_its_audit(synthetic, tmp_path, monkeypatch):
    """Also of an audit of a part of the runs that was continued with another part."""
    monkeypatch.setattr(audit, "check_run", lambda *_: Outcome(verdict="consistent only"))
    module = "baselines.ppo_microrts"
    command = [str(synthetic), "--out", str(tmp_path), "--no-progress", "--module", module]
    command += ["--seed", "7", "--segments", "2", "--resume"]
    for matching in ("moolib.*s1$", "moolib.*s1$", "^mono.*s(1|2)$"):
        assert audit.main([*command, "--runs-matching", matching]) == 0
    readme = (tmp_path / "small/README.md").read_text()
    (line,) = re.findall("^make audit .*", readme, re.MULTILINE)
    done = subprocess.run(
        f"{line} -n -o .venv/installed --no-print-directory",
        shell=True,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    _, _, _, *words = shlex.split(done.stdout.splitlines()[-1].lstrip("@"))
    args = audit.parse(audit.Args, words, "")
    assert (args.archive, args.module) == (synthetic.name, module)
    assert (args.seed, args.segments) == (7, 2)
    assert args.runs_matching == "moolib.*s1$|^mono.*s(1|2)$"
    for others in ("", "moolib"):  # all runs, of which a part is named again
        assert audit.main([*command, "--runs-matching", others]) == 0
        assert "MATCHING" not in (tmp_path / "small/README.md").read_text()


def test_the_seed_that_draws_the_segments_is_secret_by_default(synthetic, tmp_path, monkeypatch):
    secret, seeds = {32: 1_234_567_890}, set()

    def check_run(path, args, seed, compiled):
        seeds.add(seed)
        return Outcome(verdict="consistent only")

    monkeypatch.setattr(audit.secrets, "randbits", secret.pop)  # drawn once
    monkeypatch.setattr(audit, "check_run", check_run)
    monkeypatch.setattr(audit, "compare_page", lambda *_: "")
    assert audit.main([str(synthetic), "--out", str(tmp_path), "--no-progress"]) == 0
    assert seeds == {1_234_567_890}
    assert audit.read_audit(tmp_path / "small/audit.json").seed == 1_234_567_890


def test_a_check_that_ends_abnormally_fails_the_audit(synthetic, tmp_path, monkeypatch):
    monkeypatch.setattr(audit.sys, "executable", "/bin/false")
    command = [str(synthetic), "--out", str(tmp_path), "--no-progress"]
    assert audit.main([*command, "--runs-matching", "moolib.*s1$"]) == 1
    found = audit.read_audit(tmp_path / "small/audit.json")
    assert found.tables == ""
    assert [(run.verdict, run.reason) for run in found.runs.values()] == [
        ("failed", "exit code 1: ")
    ] * 2


def test_a_failure_while_runs_are_checked_is_not_bad_input(synthetic, tmp_path, monkeypatch):
    def check_run(*_):
        raise OSError("no space left")

    monkeypatch.setattr(audit, "check_run", check_run)
    with pytest.raises(OSError, match="no space"):
        audit.main([str(synthetic), "--out", str(tmp_path), "--no-progress"])


def rename(data, name):
    page = json.loads((data / "result.json").read_text())
    (data / "result.json").write_text(json.dumps(page | {"name": name}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: (data / "result.json").unlink(), "result.json"),
        (lambda data: rename(data, "/tmp/escaped"), "belongs to another study"),
        (lambda data: rename(data, ".."), "belongs to another study"),
        (lambda data: (data / "runs/run.json").write_text("{}"), "lie in other folders"),
        (lambda data: (data / "runs/small").rename(data / "runs/other"), "lie in other folders"),
    ],
)
def test_an_archive_of_another_form_is_refused(synthetic, tmp_path, capsys, change, message):
    file = forge(synthetic, tmp_path / "forged.zip", change)
    assert audit.main([str(file), "--out", str(tmp_path / "audits")]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1
    assert not (tmp_path / "audits").exists()
    assert not Path("/tmp/escaped").exists()


@pytest.mark.slow
def test_the_archive_in_the_repository_is_verified(tmp_path):
    file = tmp_path / "quickstart.zip"
    file.symlink_to(ROOT / "results/quickstart/quickstart.zip")
    found = run_audit(file, "--segments", "1", "--runs-matching", "a0-l0,1-t2__CartPole-v1__s1$")
    assert found.tables == ""
    assert found.sha256 == read_json(ROOT / "results/quickstart/result.json").archive.sha256
    assert len(found.runs) == 4  # PPO and IMPALA in both architectures
    for outcome in found.runs.values():
        assert outcome.verdict == "verified", outcome.reason
        assert (len(outcome.segments), outcome.all_segments) == (1, 2)
