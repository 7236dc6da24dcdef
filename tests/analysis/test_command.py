"""The command as a user runs it: output, exit codes, and no traceback for any input."""

import csv
import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import analysis
from analysis import output, references
from analysis.__main__ import main

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def study(write_run, tmp_path):
    """Two systems, two settings with the same bits, two games, three seeds."""
    rng = np.random.default_rng(0)
    for system in ("cleanba_ppo", "cleanba_impala"):
        for env_id in ("Breakout-v5", "Pong-v5"):
            for seed in (1, 2, 3):
                returns = rng.normal(10, 3, 120)
                for setting in ("a0-l0-t1", "a0-l0-t2"):
                    write_run(system, setting, env_id, seed, returns=returns)
    return tmp_path


def run(capsys, *args):
    code = main([str(a) for a in args])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_aggregate_as_json(study, capsys):
    code, out, _ = run(capsys, "aggregate", study, "--format", "json", "--profiles")
    assert code == 0
    results = json.loads(out)
    assert len(results["aggregate"]) == 4
    for entry in results["aggregate"]:
        for metric in ("median", "iqm", "mean", "optimality_gap"):
            value = entry[metric]
            assert value["low"] <= value["value"] <= value["high"]
            assert value["runs"] == 6
            assert value["environments"] == 2
        assert entry["runs"] == 6
        assert entry["environments"] == 2
        assert entry["note"].startswith("3 runs per environment: the interval is too narrow")
    assert results["quality"] == []
    assert len(results["probability_of_improvement"]) == 6
    assert len(results["profiles"]) == 4 * 81
    assert len(results["run_times"]) == 4


def test_a_note_states_the_range_of_runs_per_environment(write_run, tmp_path, capsys):
    for env_id, seeds in (("Breakout-v5", (1, 2, 3)), ("Pong-v5", (1,))):
        for seed in seeds:
            write_run("cleanba_ppo", "a0-l0-t1", env_id, seed, returns=np.arange(120.0))
    (entry,) = json.loads(run(capsys, "aggregate", tmp_path, "--format", "json")[1])["aggregate"]
    assert entry["note"].startswith("1 to 3 runs per environment: the interval is too narrow")


def test_the_seed_decides_the_bits(study, capsys):
    outs = [
        run(capsys, "aggregate", study, "--format", "json", "--seed", seed)[1] for seed in (1, 1, 2)
    ]
    assert outs[0] == outs[1]
    assert outs[0] != outs[2]


def test_aggregate_at_a_step_a_time_and_the_best(study, capsys):
    def iqm(*options):
        out = run(capsys, "aggregate", study, "--format", "json", *options)[1]
        return json.loads(out)["aggregate"][0]["iqm"]["value"]

    values = [
        iqm(),
        iqm("--at-step", 300),
        iqm("--at-time", 2),
        iqm("--episodes", 10),
        iqm("--episodes", 10, "--best"),
        iqm("--normalization", "record"),
    ]
    assert len(set(values)) == 6


def test_level_method_and_points_change_intervals_and_curves(study, capsys):
    def table(command, *options):
        out = run(capsys, command, study, "--format", "json", *options)[1]
        rows = json.loads(out)["aggregate" if command == "aggregate" else "curves"]
        frame = pd.DataFrame([row["iqm"] for row in rows] if command == "aggregate" else rows)
        return frame["value"].tolist(), (frame["high"] - frame["low"]).to_numpy()

    for command in ("aggregate", "curves"):
        values, widths = table(command)
        narrow = table(command, "--level", 0.5)
        assert narrow[0] == values
        assert (narrow[1] < widths).all()
    values, widths = table("aggregate")
    bca = table("aggregate", "--method", "bca")
    assert bca[0] == values
    assert (bca[1] != widths).any()
    assert len(table("curves", "--points", 7)[0]) == 4 * 2 * 7


@pytest.mark.parametrize("between", ["settings", "systems"])
@pytest.mark.parametrize(
    ("option", "value", "table", "changes"),
    [
        ("axis", "time", "by_environment", "first"),
        ("margin", 0.3, "by_environment", "margin"),
        ("alpha", 1e-4, "reproducibility", "verdict"),
    ],
)
def test_an_option_of_verdicts_does_the_same_in_the_command_and_in_a_notebook(
    write_run, tmp_path, capsys, between, option, value, table, changes
):
    rng = np.random.default_rng(0)
    for system, level in (("cleanba_ppo", 10.0), ("cleanba_impala", 20.0)):
        for setting, more in (("a", 0.0), ("b", 5.0)):
            for seed in range(8):
                returns = rng.normal(level + more, 1, 120)
                write_run(system, setting, seed=seed, returns=returns, fingerprint=setting)
    words = ("reproducibility", tmp_path, "--format", "json", "--between", between)
    plain, printed = (
        [row[changes] for row in json.loads(run(capsys, *words, *more)[1])[table]]
        for more in ((), (f"--{option}", value))
    )
    assert plain != printed
    found = analysis.compare(analysis.load(tmp_path), between, **{option: value})
    assert all(column in found for column in (f"{between[:-1]}_a", f"{between[:-1]}_b"))
    rows = analysis.by_environment(found) if table == "by_environment" else found
    assert rows[changes].tolist() == printed


@pytest.mark.parametrize("command", ["aggregate", "curves", "lag", "reproducibility", "quality"])
@pytest.mark.parametrize("form", ["table", "json", "csv", "markdown", "latex"])
def test_every_command_in_every_form(study, capsys, command, form):
    code, out, err = run(capsys, command, study, "--format", form)
    assert code == 0
    assert err == ""
    if form == "json":
        assert "quality" in json.loads(out)
    elif form == "csv" and command != "quality":
        header, *rows = csv.reader(out.splitlines())
        assert rows
        assert {len(row) for row in rows} == {len(header)}
    elif form == "table":
        assert "quality: none" in out
    elif form == "markdown":
        rows = [line.split(" | ") for line in out.splitlines()]
        assert {len(row) for row in rows} == {len(rows[0])}
        assert out.startswith("| ")
    elif form == "latex":
        header, *rows = [line for line in out.splitlines() if line.endswith(r" \\")]
        assert {row.count(" & ") for row in rows} <= {header.count(" & ")}
        assert out.startswith(r"\begin{tabular}{l")


def test_latex_escapes_what_is_special_there():
    frame = pd.DataFrame({"a_b": [r"50% & {x} \ #1"]})
    text = output.render({"x": frame}, "latex")
    assert r"a\_b \\" in text
    assert r"50\% \& \{x\} \textbackslash{} \#1 \\" in text


def test_the_short_table_of_verdicts_fits_a_terminal_and_the_long_one_has_every_environment(
    study, capsys
):
    _, short, _ = run(capsys, "reproducibility", study)
    table = short.split("\n\n")[0]
    assert max(map(len, table.splitlines())) <= 120
    assert "6 of 6" in table
    _, whole, _ = run(capsys, "reproducibility", study, "--long")
    assert "by environment" in whole
    assert "by environment" not in short


def test_tables_are_wrapped_to_the_width_of_the_terminal(study, capsys, monkeypatch):
    whole = run(capsys, "aggregate", study)[1]
    monkeypatch.setenv("COLUMNS", "78")
    narrow = run(capsys, "aggregate", study)[1]
    assert max(map(len, narrow.splitlines())) <= 78 < max(map(len, whole.splitlines()))
    words = [sorted("".join(text.split())) for text in (whole, narrow)]
    assert words[0] == words[1]  # nothing is lost


def test_reproducibility_of_identical_runs(study, capsys):
    _, out, _ = run(capsys, "reproducibility", study, "--format", "json")
    entries = json.loads(out)["reproducibility"]
    assert [e["system"] for e in entries] == ["cleanba_impala", "cleanba_ppo"]
    for entry in entries:
        assert entry["verdict"] == "identical"  # the fixture writes the same fingerprints
        assert entry["fingerprints"]["pairs"] == 6


def test_hts_metrics(study, capsys):
    _, out, _ = run(
        capsys, "aggregate", study, "--format", "json", "--targets", "5", "100", "--episodes", "20"
    )
    rows = json.loads(out)["hts_metrics"]
    assert len(rows) == 24
    assert all(row["required_time_5"] is not None for row in rows)
    assert all(row["required_time_100"] is None for row in rows)


def test_what_is_never_reached_is_infinite_in_a_table(study, capsys):
    code, out, _ = run(capsys, "aggregate", study, "--targets", "100")
    assert code == 0
    assert " inf" in out


def test_strict_refuses(write_run, tmp_path, capsys):
    write_run()
    write_run(seed=2, status="failed")
    assert run(capsys, "aggregate", tmp_path)[0] == 0
    code, out, err = run(capsys, "aggregate", tmp_path, "--strict")
    assert code == 1
    assert out == ""
    assert "status is 'failed'" in err


def test_as_a_module(write_run, tmp_path):
    write_run()
    done = subprocess.run(
        [sys.executable, "-m", "analysis", "lag", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "changes_by_time" in done.stdout
    done = subprocess.run(
        [sys.executable, "-m", "analysis", "quality", "/nowhere"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == "error: /nowhere: no such file or folder\n"


# ---- damage

HUGE = ["1" + "0" * 400, "1e308", "-1e999", "9" * 30, "NaN", "Infinity", "\x00", "é" * 50, ""]


def damage(data: bytes, rng: random.Random) -> bytes:
    """Damage a file in one of the ways that files get damaged."""
    kind = rng.randrange(9)
    lines = data.split(b"\n")
    at = rng.randrange(len(lines))
    if kind == 0:
        return data[: rng.randrange(len(data) + 1)]
    if kind == 1:
        return b""
    if kind == 2:
        return rng.randbytes(rng.randrange(1, 2000))
    if kind == 3:
        flipped = bytearray(data)
        for _ in range(rng.randrange(1, 20)):
            flipped[rng.randrange(len(flipped))] = rng.randrange(256)
        return bytes(flipped)
    if kind == 4:
        cells = lines[at].replace(b"\t", b",").split(b",")
        cells[rng.randrange(len(cells))] = rng.choice(HUGE).encode()
        lines[at] = (b"\t" if b"\t" in lines[at] else b",").join(cells)
    elif kind == 5:
        lines[at] = lines[at][: len(lines[at]) // 2]
    elif kind == 6:
        del lines[at]
    elif kind == 7:
        rng.shuffle(lines)
    else:
        digits = [i for i, byte in enumerate(data) if chr(byte).isdigit()]
        where = rng.choice(digits) if digits else 0
        return data[:where] + rng.choice(HUGE).encode() + data[where:]
    return b"\n".join(lines)


def test_300_damaged_inputs_give_no_traceback(write_run, tmp_path, capsys):
    from tests.analysis import test_importers as written

    sources = tmp_path / "sources"
    # as if killed: without checksums, so that the analysis meets what still looks like rows
    record = write_run(folder=sources / "record", episodes=20, status=None)
    score_table = sources / "scores.csv"
    score_table.write_text(',"A, 1 GPU"\nPong-v5,14.6 ± 0.10\nBoxing-v5,1.0 ± 0.2\n')
    dictionary = sources / "dictionary.json"
    dictionary.write_text(json.dumps({"A": [[1.0, 2.0], [3.0, 4.0]], "B": [[1.0, 2.0]]}))
    arrays = sources / "arrays.npz"
    np.savez(arrays, A=np.ones((2, 3)))
    printed = sources / "printed.txt"
    printed.write_text(written.APPENDIX_G)
    monobeast = written.write_monobeast(sources / "mono", meta={"args": {"env": "Pong-v5"}})
    wandb = written.write_openrlbenchmark(sources / "wandb") / "abc"
    events = next(written.write_tensorboard(sources / "tb", steps=10).glob("events*"))
    targets = [  # what is damaged, what is read
        (record / "run.json", record),
        (record / "episodes.jsonl", record),
        (record / "updates.jsonl", record),
        (record / "rollouts.jsonl", record),
        (score_table, score_table),
        (dictionary, dictionary),
        (arrays, arrays),
        (printed, printed),
        (monobeast, monobeast),
        (monobeast.parent / "meta.json", monobeast),
        (wandb / "run_df.csv", wandb),
        (wandb / "run.json", wandb),
        (events, events),
        (written.write_moolib(sources / "moolib"), sources / "moolib"),
    ]
    capsys.readouterr()  # what openrlbenchmark printed
    rng = random.Random(0)
    refused = 0
    for number in range(300):
        file, read = targets[number % len(targets)]
        command = rng.choice(["aggregate", "curves", "lag", "reproducibility", "quality"])
        good = file.read_bytes()
        file.write_bytes(damage(good, rng))
        code, _, err = run(capsys, command, read, *(["--repetitions", 50] * (command == "curves")))
        assert code in (0, 2), (number, file)
        if code == 2:
            refused += 1
            assert err.count("\n") == 1, err
            assert str(sources) in err, err
        file.write_bytes(good)
    assert refused > 100


@pytest.mark.parametrize(
    ("name", "text", "what"),
    [
        ("logs.tsv", "local/mean_episode_return\tlocal/steps_done\n1.0\n", "line 2: 1 cells for 2"),
        ("logs.tsv", "a\tb\n", "line 1: no column"),
        ("logs.csv", "# _tick,_time,step\n", "line 1: no column 'mean_episode_return'"),
        (
            "logs.csv",
            "# _tick,_time,step,mean_episode_return\n0,1,2,3\n1,x,3,4\n",
            "line 3: _time is not a number: 'x'",
        ),
        ("scores.csv", ",A\nPong-v5,three\n", "line 2: A is not a number: 'three'"),
        ("scores.csv", ",A\nPong-v5,1e999\n", "line 2: A is implausibly large"),
        ("scores.csv", "", "empty"),
        ("scores.json", "{\n1", "line 2: not JSON"),
        ("scores.json", '{"A": [[1, 2], [3]]}', "not an array of numbers"),
        ("other.xyz", "x", "no importer can read this file"),
    ],
)
def test_damage_names_file_and_line(tmp_path, capsys, name, text, what):
    (tmp_path / name).write_text(text)
    code, out, err = run(capsys, "aggregate", tmp_path / name)
    assert code == 2
    assert out == ""
    assert str(tmp_path / name) in err
    assert what in err
    assert err.count("\n") == 1


def test_a_run_that_did_not_complete_is_left_out_and_named(write_run, tmp_path, capsys):
    """In scores, curves, verdicts and HTS-RL's time limit, which is when the first run ended."""
    for setting in ("a", "b"):
        for seed in (1, 2, 3):
            write_run(setting=setting, seed=seed, returns=np.full(100, 20.0 + seed))
    write_run(setting="b", seed=4, returns=np.zeros(5), status="failed", total_steps=50)
    without = {}
    for flags in ((), ("--include-incomplete",)):
        words = ("--format", "json", "--targets", "10", *flags)
        code, out, _ = run(capsys, "aggregate", tmp_path, *words)
        assert code == 0
        found = json.loads(out)
        without[flags] = found
        named = [row["run"] for row in found["quality"] if "left out" in row["problem"]]
        assert [name.rsplit("__", 1)[1] for name in named] == ([] if flags else ["s4"])
        limits = {row["time_limit"] for row in found["hts_metrics"]}
        assert (min(limits) < 15) == bool(flags)
        values = [entry["iqm"]["value"] for entry in found["aggregate"]]
        assert (values[0] == values[1]) == (not flags)
    assert without[()]["aggregate"][1]["runs"] == 3
    for command, rows in (("curves", "curves"), ("reproducibility", "reproducibility")):
        _, out, _ = run(capsys, command, tmp_path, "--format", "json")
        runs = {row.get("runs", row.get("runs_b")) for row in json.loads(out)[rows]}
        assert runs == {3}


def test_nothing_but_incomplete_runs_is_one_line(write_run, tmp_path, capsys):
    write_run(status="failed")
    code, out, err = run(capsys, "aggregate", tmp_path)
    assert (code, out) == (2, "")
    assert "no run is completed (--include-incomplete" in err


def test_a_table_is_over_the_environments_that_all_its_rows_have(write_run, tmp_path, capsys):
    for setting in ("a", "b"):
        for seed in (1, 2):
            write_run(setting=setting, seed=seed, returns=np.full(100, 20.0))
            write_run(setting=setting, env_id="Pong-v5", seed=seed, returns=np.full(100, 1.0))
    write_run(setting="b", env_id="Freeway-v5", returns=np.full(100, 29.0))
    _, out, _ = run(capsys, "aggregate", tmp_path)
    first = out.splitlines()[0]
    assert first == (
        "environments: over the 2 environments that all rows have (Breakout-v5, Pong-v5). "
        "cleanba_ppo, a lacks Freeway-v5"
    )
    _, out, _ = run(capsys, "aggregate", tmp_path, "--format", "json", "--profiles")
    found = json.loads(out)
    assert found["environments"]["lacking"] == {"cleanba_ppo, a": ["Freeway-v5"]}
    a, b = found["aggregate"]
    assert a["median"] == b["median"]
    assert a["environments"] == 2
    assert {row["runs"] for row in found["profiles"]} == {4}
    assert {row["runs"] for row in found["run_times"]} == {4}
    _, out, _ = run(capsys, "curves", tmp_path, "--format", "json")
    found = json.loads(out)
    assert {row["environments"] for row in found["aggregate_curves"]} == {2}
    assert "Freeway-v5" in {row["env_id"] for row in found["curves"]}


def test_rows_without_a_common_environment_have_no_common_curve(write_run, tmp_path, capsys):
    write_run(setting="a", returns=np.full(100, 20.0))
    write_run(setting="b", env_id="Pong-v5", returns=np.full(100, 1.0))
    found = json.loads(run(capsys, "curves", tmp_path, "--format", "json")[1])
    assert found["aggregate_curves"] == found["environments"]["environments"] == []
    assert len(found["curves"]) == 200
    found = json.loads(run(capsys, "aggregate", tmp_path, "--format", "json")[1])
    assert found["aggregate"] == []
    assert len(found["run_times"]) == 2


@pytest.mark.parametrize("command", ["lag", "quality"])
@pytest.mark.parametrize("option", [["--seed", "1"], ["--include-incomplete"]])
def test_an_option_without_effect_is_refused(study, capsys, command, option):
    with pytest.raises(SystemExit, match="2"):
        run(capsys, command, study, *option)
    assert option[0] in capsys.readouterr().err


def test_runs_without_a_score_are_counted_in_the_note(write_run, tmp_path, capsys):
    write_run(seed=1, returns=np.full(120, 20.0))
    write_run(seed=2, returns=np.r_[np.full(119, 20.0), np.nan])
    found = json.loads(run(capsys, "aggregate", tmp_path, "--format", "json")[1])
    (entry,) = found["aggregate"]
    assert entry["runs"] == 1
    assert "1 of 2 runs has no score" in entry["note"]


def test_runs_without_an_episode_have_no_aggregates(write_run, tmp_path, capsys):
    write_run(returns=[])
    code, out, _ = run(capsys, "aggregate", tmp_path)
    assert code == 0
    assert "no episode was finished" in out


def test_verdicts_are_of_scores_in_the_chosen_normalization(study, capsys):
    levels = {}
    for normalization in ("human", "record"):
        words = ("reproducibility", study, "--format", "json", "--normalization", normalization)
        found = json.loads(run(capsys, *words)[1])
        levels[normalization] = found["by_environment"][0]["first"]
    human, record = (
        references.normalize(10.0, "Breakout-v5", name) / levels[name] for name in levels
    )
    assert human == pytest.approx(record, rel=1e-6)


def test_score_tables_name_the_options_that_do_not_apply(tmp_path, capsys):
    (tmp_path / "scores.csv").write_text("env_id,ppo\nPong-v5,20 ± 1\n")
    assert "do not apply" in run(capsys, "aggregate", tmp_path, "--best")[2]
    assert "do not apply" not in run(capsys, "aggregate", tmp_path)[2]


def test_a_table_may_begin_with_a_byte_order_mark(tmp_path, capsys):
    text = "env_id,system,seed,score\nPong-v5,a,1,20\nPong-v5,a,2,19\n"
    (tmp_path / "scores.csv").write_text(text, encoding="utf-8-sig")
    code, out, err = run(capsys, "aggregate", tmp_path, "--format", "json")
    assert code == 0, err
    assert json.loads(out)["aggregate"][0]["runs"] == 2


def test_curves_of_scores_alone_are_refused(tmp_path, capsys):
    (tmp_path / "scores.csv").write_text("env_id,ppo\nPong-v5,20 ± 1\n")
    code, _, err = run(capsys, "curves", tmp_path)
    assert code == 2
    assert "no learning curves, only scores" in err


def test_scores_of_few_episodes_are_noted(write_run, tmp_path, capsys):
    for seed, episodes in ((1, 100), (2, 7)):
        write_run(seed=seed, episodes=episodes)
    _, out, _ = run(capsys, "aggregate", tmp_path, "--format", "json")
    (entry,) = json.loads(out)["aggregate"]
    assert "1 of 2 scores are of fewer than 100 episodes (the fewest 7)" in entry["note"]
    _, out, _ = run(capsys, "aggregate", tmp_path, "--format", "json", "--episodes", "7")
    assert "fewer" not in json.loads(out)["aggregate"][0]["note"]
