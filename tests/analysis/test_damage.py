"""A record that changed after its run ended is named by every tool and contributes to no score."""

import pytest

from analysis.__main__ import main
from analysis.importers.records import read_readable_records
from cleanba.record import read_run
from cleanba.record.consistency import contradictions

FILES = ("episodes.jsonl", "updates.jsonl", "rollouts.jsonl")


def remove_a_line(path):
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:4] + lines[5:]))


def change_a_byte(path):
    """Change a digit, so that the line stays a row of the right types."""
    text = path.read_text()
    at = text.index('"wall_time":') + len('"wall_time":')
    path.write_text(text[:at] + str((int(text[at]) + 1) % 10) + text[at + 1 :])


@pytest.fixture(params=[(f, d) for f in FILES for d in (remove_a_line, change_a_byte)])
def damaged(request, write_run, tmp_path):
    """A folder with a good and a damaged record; the damaged file."""
    write_run(seed=1)
    name, damage = request.param
    path = write_run(seed=2) / name
    damage(path)
    return tmp_path, path


def test_the_analysis_refuses_it(damaged, capsys):
    folder, path = damaged
    assert main(["aggregate", str(folder)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"{path} is damaged" in printed.err
    assert len(printed.err.splitlines()) == 1


def test_quality_names_it_and_reads_the_rest(damaged, capsys):
    folder, path = damaged
    assert main(["quality", str(folder), "--format", "json"]) == 0
    printed = capsys.readouterr().out
    assert f"damaged and excluded: {path} is damaged" in printed
    assert main(["quality", str(folder), "--strict"]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_report_names_it_and_leaves_it_out(damaged):
    folder, path = damaged
    tables = read_readable_records(folder)
    (named,) = [p for run, p in tables.quality.itertuples(index=False) if run == str(path.parent)]
    assert named.startswith(f"damaged and excluded: {path.name} is damaged")
    for frame in (tables.curves, tables.rollouts, tables.updates, tables.runs):
        assert set(frame["seed"]) == {1}


def test_undamaged_records_pass(write_run, tmp_path, capsys):
    write_run(seed=1)
    assert main(["quality", str(tmp_path), "--strict"]) == 0
    assert "damaged" not in capsys.readouterr().out


def test_other_files_of_another_size_fail_a_strict_check(write_run, tmp_path, capsys):
    run = write_run(seed=1)
    (run / "actions" / "rollouts.bin").write_bytes(b"x")
    assert main(["quality", str(tmp_path)]) == 0
    assert "actions/rollouts.bin is damaged: 1 bytes, 0 when the run ended" in " ".join(
        capsys.readouterr().out.split()
    )
    assert main(["quality", str(tmp_path), "--strict"]) == 1


@pytest.mark.parametrize(
    ("field", "value", "what"),
    [("length", 0, "it has no steps"), ("step", 10**6, "it ends after the run")],
)
def test_an_episode_that_cannot_be_is_named_with_its_line(write_run, field, value, what):
    run = read_run(write_run())
    rows = run.episodes()
    found = contradictions(run, run.updates(), run.rollouts(), rows)
    assert not any(what in line for line in found)
    setattr(rows[3], field, value)
    found = contradictions(run, run.updates(), run.rollouts(), rows)
    assert f"episodes.jsonl, line 4: {what}" in found


def test_a_rollout_precedes_the_update_that_applied_its_gradient(write_run):
    """Gradients of asynchronous workers are applied to later versions than they were computed for."""
    run = read_run(write_run())
    updates, rollouts = run.updates(), run.rollouts()
    what = "it was complete after the update that learned from it"

    def found():
        return any(what in line for line in contradictions(run, updates, rollouts, run.episodes()))

    assert not found()
    last = max(rollouts, key=lambda rollout: rollout.learner_version)
    last.learner_version = last.version_last = last.version_first = 1
    last.versions = [(1, last.steps)]
    assert last.wall_time > updates[0].wall_time + 1
    assert found()
    updates[-1].gradient_version = 1
    assert updates[-1].wall_time >= last.wall_time
    assert not found()
    last.wall_time = updates[-1].wall_time + 1
    assert found()
