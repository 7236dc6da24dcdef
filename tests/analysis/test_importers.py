"""Other tools' logs: synthetic ones in their format, and the published ones if they are available."""

import json
import sqlite3
import struct

import numpy as np
import pytest
from analysis_logs import write_tensorboard

from analysis import importers, lag, quality, summary
from analysis.__main__ import main
from analysis.importers import (
    cleanrl,
    moolib,
    openrlbenchmark,
    rliable,
    score_tables,
    tensorboard,
)
from analysis.references import ATARI
from analysis.scores import final_scores
from analysis.tables import InputError

MOOLIB_HEADER = (
    "local/mean_episode_return\tlocal/mean_episode_step\tlocal/SPS\tlocal/env_act_steps\t"
    "local/env_train_steps\tlocal/steps_done\tlocal/episodes_done\tlocal/model_version"
)


def write_moolib(root, game="Pong", seed=0, rows=20, peer="p"):
    folder = root / f"{game}-{seed}-name" / "peers" / peer
    folder.mkdir(parents=True)
    lines = [MOOLIB_HEADER, "\t\t0.0\t256\t0\t256\t0\t0"]
    for i in range(1, rows):
        # 100 steps a row at 50 steps per second; 10 episodes a row
        lines.append(f"{float(i)}\t25.0\t50.0\t{100 * i}\t{100 * i}\t{100 * i}\t{10 * i}\t{i}")
    (folder / "logs.tsv").write_text("\n".join(lines) + "\n")
    return folder / "logs.tsv"


def write_monobeast(folder, rows=30, meta=None):
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["# _tick,_time,step,total_loss,mean_episode_return,pg_loss,baseline_loss,entropy_loss"]
    for i in range(rows):
        value = "nan" if i % 3 else str(float(i))
        lines.append(f"{i},{1000.0 + 2 * i},{640 * i},1.0,{value},0.1,0.2,-0.3")
    (folder / "logs.csv").write_text("\n".join(lines) + "\n")
    if meta is not None:
        (folder / "meta.json").write_text(json.dumps(meta))
    return folder / "logs.csv"


def wandb_run(run_id="abc", state="finished", rows=20):
    """Return a stand-in for a run of W&B's API."""

    class User:
        username, name = "someone", "Someone"

    class Run:
        id, project, entity, tags, path = run_id, "cleanRL", "openrlbenchmark", ["v1"], ["x"]
        name, url = "Breakout-v5__ppo__1__1", "https://example.org"
        user = User()
        config = {"env_id": "Breakout-v5", "exp_name": "ppo", "seed": 7, "total_timesteps": 100}  # noqa: RUF012

        def scan_history(self):
            for i in range(rows):
                yield {"global_step": 10 * i, "_runtime": 1.5 * i, "losses/value_loss": 0.1}
                yield {"global_step": 10 * i, "_runtime": 1.5 * i, "charts/episodic_return": i}

    run = Run()
    run.state = state
    return run


def write_openrlbenchmark(root, run_id="abc", state="finished"):
    """Write a run as openrlbenchmark does: with its own class."""
    cache = pytest.importorskip("openrlbenchmark.cache")
    cache.CachedRun(wandb_run(run_id, state), cache_dir=str(root))
    return root / "openrlbenchmark" / "cleanRL"


# ---- moolib


def test_moolib_time_is_steps_over_speed_and_episodes_are_counted(tmp_path):
    tables = moolib.read([write_moolib(tmp_path).parents[2]])
    run = tables.runs.iloc[0]
    assert (run["system"], run["setting"], run["env_id"], run["seed"]) == (
        "moolib",
        "name",
        "Pong-v5",
        0,
    )
    assert run["seconds"] == 19 * 100 / 50
    assert run["episodes"] == 190
    # the last 100 episodes are the last ten rows, 10 to 19
    assert final_scores(tables)["score"].item() == np.mean(np.arange(10, 20))


def test_a_line_of_a_resumed_moolib_log_is_named_by_its_number(tmp_path):
    file = write_moolib(tmp_path, rows=4)
    lines = file.read_text().splitlines()
    cells = lines[3].split("\t")
    steps = lines[0].split("\t").index(moolib.STEPS)
    cells[steps] = "1e400"
    file.write_text("\n".join([*lines[:3], lines[0], "\t".join(cells)]) + "\n")
    with pytest.raises(InputError, match=f"line 5: {moolib.STEPS} is too large"):
        moolib.read([tmp_path])


def test_a_torn_line_of_moolib_is_left_out_wherever_it_is_torn(tmp_path):
    file = write_moolib(tmp_path, rows=4)
    text = file.read_text()
    *whole, last = text.splitlines(keepends=True)
    for end in range(1, len(last)):  # the last version without its end would be a number too
        file.write_text("".join(whole) + last[:end])
        tables = importers.read([tmp_path])
        assert tables.updates["step"].tolist() == [256, 100, 200], last[:end]
        assert tables.curves["return"].tolist() == [1.0, 2.0]
        assert "logs.tsv: torn last line left out" in tables.quality["problem"].tolist()
    file.write_text(text)
    tables = importers.read([tmp_path])
    assert tables.curves["return"].tolist() == [1.0, 2.0, 3.0]
    assert "torn" not in " ".join(tables.quality["problem"])


def test_moolib_folder_without_logs_is_missing_not_forgotten(tmp_path):
    write_moolib(tmp_path)
    (tmp_path / "Skiing-0-name").mkdir()
    write_moolib(tmp_path, "Alien", peer="a")
    write_moolib(tmp_path, "Alien", 1, peer="a")
    problems = quality.check(importers.read([tmp_path]))["problem"].tolist()
    assert any("no logs of Skiing-v5" in p for p in problems)
    assert any("missing seeds: 1 of Pong-v5, 2 of others" in p for p in problems)


def test_of_several_peers_logs_the_longest_is_read_and_that_is_said(tmp_path):
    for peer, rows in (("a", 5), ("b", 20), ("c", 10)):
        write_moolib(tmp_path, rows=rows, peer=peer)
    tables = moolib.read([tmp_path])
    assert tables.curves["return"].tolist() == [*range(1, 20)]
    assert "3 peers: only the longest log is read" in tables.quality["problem"].tolist()


def test_moolib_published(published):
    tables = importers.read([published / "moolib-data"])
    assert len(tables.runs) == 57
    assert tables.runs["env_id"].nunique() == 19
    assert tables.runs.groupby("env_id", observed=True)["seed"].nunique().eq(3).all()
    assert tables.runs["steps"].between(49e6, 51e6).all()
    missing = tables.quality["problem"].str.contains("Skiing-v5")
    assert missing.sum() == 1
    # plain reading of one file, as an oracle
    import pandas as pd

    file = next((published / "moolib-data").glob("Pong-0-*/peers/*/logs.tsv"))
    oracle = pd.read_csv(file, sep="\t", float_precision="round_trip")
    ours = tables.curves[tables.curves["run"].str.endswith(file.parents[2].name)]
    returns = oracle["local/mean_episode_return"].dropna().to_numpy()
    np.testing.assert_array_equal(ours["return"], returns)


# ---- monobeast


def test_monobeast_with_and_without_meta(tmp_path):
    write_monobeast(tmp_path / "a")
    meta = {"args": {"env": "PongNoFrameskip-v4", "num_actors": 80}, "successful": True}
    write_monobeast(tmp_path / "b", meta=meta)
    tables = importers.read([tmp_path])
    assert set(tables.runs["setting"]) == {"-", "80 actors"}
    assert tables.runs["completed"].sum() == 1
    run = tables.runs[tables.runs["completed"]].iloc[0]
    assert run["seconds"] == 58
    assert run["steps"] == 640 * 29
    assert run["episodes"] == 10
    problems = tables.quality["problem"].tolist()
    assert "no meta.json: environment and actors unknown" in problems
    assert "no episode ended in 20 of 30 batches" in problems


def test_a_torn_line_of_monobeast_is_left_out_wherever_it_is_torn(tmp_path):
    file = write_monobeast(tmp_path / "a", rows=4)
    text = file.read_text()
    *whole, last = text.splitlines(keepends=True)
    for end in range(1, len(last)):  # "-0.3" without its end is a number too
        file.write_text("".join(whole) + last[:end])
        tables = importers.read([tmp_path])
        assert tables.updates["step"].tolist() == [0, 640, 1280], last[:end]
        assert tables.curves["return"].tolist() == [0.0]
        assert "logs.csv: torn last line left out" in tables.quality["problem"].tolist()
    file.write_text(text)
    tables = importers.read([tmp_path])
    assert tables.curves["return"].tolist() == [0.0, 3.0]
    assert "torn" not in " ".join(tables.quality["problem"])


def test_monobeast_published(published):
    tables = importers.read([published / "monobeast-logs"])
    assert len(tables.updates) == 158
    assert len(tables.curves) == 80
    assert tables.curves["return"].between(-21, 21).all()


APPENDIX_G = r"""
$python-m torchbeast.monobeast_study\–num_actors 80\–batch_size 8\–unroll_length 240\–env Pong-v5
actor_index 32 initial policy_version 8 policy_version after rollout 20
%**** Line 1025 **** actor_index 2 initial policy_version 8 policy_version after rollout 21
\par\par$python-m torchbeast.monobeast_study\–num_actors 80\–env Pong-v5\–learner_delay_seconds 1.0
\paractor_index 72 initial policy_version 9 policy_version after rollout 10
"""


def test_the_logs_of_appendix_g_as_they_stand(tmp_path):
    path = tmp_path / "paper.txt"
    path.write_text(APPENDIX_G)
    tables = importers.read([path])
    assert tables.rollouts["changes"].tolist() == [12, 13, 1]
    assert tables.rollouts["actor"].tolist() == [32, 2, 72]
    assert tables.rollouts["steps"].tolist() == [240, 240, 1]
    assert tables.runs["setting"].tolist() == ["80 actors", "80 actors, 1.0 s delay"]
    assert set(tables.runs["env_id"]) == {"Pong-v5"}
    assert lag.predictions(tables)["changes_by_actors"].iloc[0] == 10


# ---- TensorBoard


def test_tensorboard_of_cleanrl_and_of_cleanba(tmp_path):
    write_tensorboard(tmp_path / "Breakout-v5__ppo__1__a")
    write_tensorboard(
        tmp_path / "Pong-v5__impala__2__b", "charts/avg_episodic_return", config=False
    )
    tables = importers.read([tmp_path])
    named, unnamed = tables.runs.iloc[0], tables.runs.iloc[1]
    assert (named["system"], named["setting"], named["seed"]) == ("cleanba_ppo", "a0-l1,2-d1-t2", 3)
    assert named["completed"]
    assert (unnamed["system"], unnamed["env_id"], unnamed["seed"]) == ("impala", "Pong-v5", 2)
    assert not unnamed["completed"]
    assert tables.curves["return"].tolist() == [*range(1, 41)] * 2
    assert len(tables.updates) == 80
    assert tables.updates["value_loss"].iloc[3] == pytest.approx(0.25)


def test_tensorboard_run_that_stopped_early_is_not_completed(tmp_path):
    write_tensorboard(tmp_path / "run", total=10_000)
    tables = tensorboard.read([tmp_path])
    assert not tables.runs["completed"].item()
    assert "ends at step 400 of 10000" in tables.quality["problem"].item()


@pytest.mark.parametrize(("total", "completed"), [(400, True), (409, True), (411, False)])
def test_a_tensorboard_run_is_completed_where_no_whole_batch_is_missing(tmp_path, total, completed):
    """It took 400 steps, in batches of 10."""
    write_tensorboard(tmp_path / "run", total=total)
    assert tensorboard.read([tmp_path]).runs["completed"].item() == completed


def test_the_time_of_a_tensorboard_run_begins_with_its_file(tmp_path):
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    with open(tmp_path / "events.out.tfevents.1", "wb") as file:
        writer = RecordWriter(file)
        writer.write(Event(wall_time=1000.0, file_version="brain.Event:2").SerializeToString())
        for step in (10, 20):
            values = [
                Summary.Value(tag=tag, simple_value=1.0)
                for tag in ("charts/episodic_return", "losses/value_loss")
            ]
            event = Event(wall_time=1030.0 + step, step=step, summary=Summary(value=values))
            writer.write(event.SerializeToString())
    tables = tensorboard.read([tmp_path])
    assert tables.curves["wall_time"].tolist() == [40, 50]
    assert tables.updates["wall_time"].tolist() == [40, 50]
    assert tables.runs["seconds"].item() == 50


def test_tensorboard_truncated_is_read_to_the_tear_and_named(tmp_path):
    folder = write_tensorboard(tmp_path / "run")
    file = next(folder.glob("events*"))
    file.write_bytes(file.read_bytes()[:-7])
    tables = tensorboard.read([folder])
    assert len(tables.curves) >= 39
    assert "torn last record" in " ".join(tables.quality["problem"])


def test_every_changed_bit_of_a_tensorboard_file_is_noticed(tmp_path):
    """Both checksums are looked at: that of a record's length, and that of its content."""
    file = next(write_tensorboard(tmp_path / "run", steps=3).glob("events*"))
    good = file.read_bytes()
    assert len(tensorboard.read([tmp_path]).curves) == 3
    rng = np.random.default_rng(0)
    starts, position = [], 0
    while position < len(good):
        starts.append(position)
        position += 16 + struct.unpack_from("<Q", good, position)[0]
    for number, (start, end) in enumerate(zip(starts, [*starts[1:], len(good)], strict=True), 1):
        # the length, its checksum, the content, its checksum
        for first, stop in ((0, 8), (8, 12), (12, end - start - 4), (end - start - 4, end - start)):
            damaged = bytearray(good)
            damaged[start + rng.integers(first, stop)] ^= 1 << rng.integers(8)
            file.write_bytes(damaged)
            with pytest.raises(InputError, match=rf"record {number}: .*checksum"):
                tensorboard.read([tmp_path])


def test_tensorboard_reads_what_tensorboard_reads(published):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for folder in sorted((published / "cleanba-tensorboard").iterdir()):
        oracle = EventAccumulator(str(folder), size_guidance={"scalars": 0})
        oracle.Reload()
        tables = tensorboard.read([folder])
        events = oracle.Scalars("charts/avg_episodic_return")
        assert tables.curves["return"].tolist() == [e.value for e in events]
        assert tables.curves["step"].tolist() == [e.step for e in events]
        assert np.diff(tables.curves["wall_time"]) == pytest.approx(
            np.diff([e.wall_time for e in events])
        )
        if len(tables.updates):
            losses = [e.value for e in oracle.Scalars("losses/loss")]
            assert tables.updates["loss"].tolist() == losses


def test_event_files_of_a_record_are_not_read_twice(write_run, tmp_path):
    run = write_run()
    write_tensorboard(run / "tensorboard")
    assert len(importers.read([tmp_path]).runs) == 1


# ---- Weights & Biases through openrlbenchmark


def test_openrlbenchmark_offline_database(tmp_path):
    project = write_openrlbenchmark(tmp_path)
    write_openrlbenchmark(tmp_path, "def", state="crashed")
    tables = importers.read([project])
    assert len(tables.curves) == 40
    run = tables.runs.iloc[0]
    assert (run["system"], run["env_id"], run["seed"]) == ("ppo", "Breakout-v5", 7)
    assert tables.runs["completed"].tolist() == [True, False]
    assert run["seconds"] == 1.5 * 19
    problems = quality.check(tables)["problem"].tolist()
    assert "not completed: its state in W&B is 'crashed'" in problems
    assert any(p.startswith("duplicate run: ppo, -, Breakout-v5, seed 7") for p in problems)


def test_the_rows_of_an_openrlbenchmark_history_are_put_in_the_order_of_steps(tmp_path):
    file = write_openrlbenchmark(tmp_path) / "abc" / "run_df.csv"
    header, *rows = file.read_text().splitlines()
    file.write_text("\n".join([header, *rows[::-1]]) + "\n")
    curves = openrlbenchmark.read([tmp_path]).curves
    assert curves["step"].tolist() == [10 * i for i in range(20)]
    assert curves["return"].tolist() == [*range(20)]
    assert curves["wall_time"].tolist() == [1.5 * i for i in range(20)]


def test_a_download_skips_runs_that_still_run(tmp_path, monkeypatch):
    pytest.importorskip("openrlbenchmark.cache")
    import wandb

    class Api:
        def runs(self, path):
            assert path == "openrlbenchmark/cleanRL"
            return [wandb_run("abc"), wandb_run("def", "running")]

    monkeypatch.setattr(wandb, "Api", Api)
    openrlbenchmark.download("openrlbenchmark", "cleanRL", tmp_path)
    assert [folder.name for folder in openrlbenchmark.find(tmp_path)] == ["abc"]
    assert len(openrlbenchmark.read([tmp_path]).curves) == 20


def test_openrlbenchmark_index_names_what_was_not_downloaded(tmp_path):
    pw = pytest.importorskip("peewee")
    offline = pytest.importorskip("openrlbenchmark.offline_db")
    project = write_openrlbenchmark(tmp_path)
    (project / "abc" / "run.json").unlink()  # then the index has to do
    database = pw.SqliteDatabase(str(project / "offline.sqlite"))
    offline.database_proxy.initialize(database)
    with database:
        database.create_tables([offline.OfflineRun, offline.Tag, offline.OfflineRunTag])
        for run_id in ("abc", "gone"):
            offline.OfflineRun.create(
                id=run_id,
                name="n",
                state="finished",
                url="u",
                path=["p"],
                username="x",
                project="cleanRL",
                entity="e",
                config={"env_id": "Pong-v5", "exp_name": "dqn", "seed": 1},
            )
    for path in (project, project / "offline.sqlite"):
        tables = importers.read([path])
        assert tables.runs["system"].tolist() == ["dqn"]
        assert (
            "in the index, but its history was not downloaded" in tables.quality["problem"].tolist()
        )
    elsewhere = project.rename(tmp_path / "a#b")  # a fragment, were it an address
    assert importers.read([elsewhere]).runs["system"].tolist() == ["dqn"]
    assert not (tmp_path / "a").exists()
    with sqlite3.connect(elsewhere / "offline.sqlite") as found:  # reading changed nothing
        assert found.execute("select count(*) from offlinerun").fetchone() == (2,)


def test_setting_names():
    config = {"actor_device_ids": "[0]", "learner_device_ids": "[0, 1]", "world_size": "2"}
    assert cleanrl.setting_name(config) == "a0-l0,1-d2-t1"
    config |= {"world_size": "None", "num_actor_threads": 2}
    assert cleanrl.setting_name(config) == "a0-l0,1-d1-t2"
    assert cleanrl.setting_name({}) == "-"


# ---- score tables


def test_score_table(tmp_path):
    path = tmp_path / "scores.csv"
    path.write_text(
        ',"Monobeast IMPALA, 1 A100, 10 CPU","Moolib (Resnet CNN) 8 A100, 80 CPU"\n'
        "Pong-v5,14.6 ± 0.10,-20.70 ± 1.00\n"
        "Boxing-v5,12.1 ± 0.00,\n"
    )
    tables = importers.read([path])
    assert tables.scores["score"].tolist() == [14.6, -20.7, 12.1]
    assert tables.scores["std"].tolist() == [0.1, 1.0, 0.0]
    one, eight = "1 A100, 10 CPU", "8 A100, 80 CPU"
    assert tables.scores["setting"].tolist() == [one, eight, one]
    assert set(tables.scores["system"]) == {"Monobeast IMPALA", "Moolib (Resnet CNN)"}
    assert "no score of Moolib" in tables.quality["problem"].item()
    assert final_scores(tables)["normalized"].tolist() == [1.0, 0.0, 1.0]


def test_run_times_are_minutes(tmp_path):
    path = tmp_path / "main_runtimes.csv"
    path.write_text(',"A, 1 GPU"\nPong-v5,2.5\n')
    assert score_tables.read([path]).runs["seconds"].item() == 150


def test_the_papers_headline_from_its_tables(published):
    from analysis import aggregates
    from analysis.scores import by_environment
    from analysis.summary import run_times

    tables = importers.read(
        [
            published / "cleanba-static" / "main_10CPU.csv",
            published / "cleanba-static" / "main_10CPU_runtimes.csv",
        ]
    )
    scores = final_scores(tables)
    assert len(scores) == 4 * 57
    medians = {
        system: float(aggregates.median(by_environment(group)[1]))
        for system, group in scores.groupby("system")
    }
    # seeds/000: Cleanba IMPALA about 165% median HNS, monobeast 165%, moolib 140%
    assert medians["Cleanba IMPALA"] == pytest.approx(1.65, abs=0.02)
    assert medians["Monobeast IMPALA"] == pytest.approx(1.60, abs=0.02)
    assert 1.2 < medians["Moolib IMPALA"] < 1.4
    times = {entry["system"]: entry["times_the_fastest"] for entry in run_times(tables)}
    assert times["Monobeast IMPALA"] == pytest.approx(6.8, abs=0.05)
    assert times["Moolib IMPALA"] == pytest.approx(1.2, abs=0.05)


# ---- score dictionaries


def test_rliable_dictionaries(tmp_path):
    matrix = np.arange(6.0).reshape(3, 2)
    (tmp_path / "a.json").write_text(json.dumps({"A": matrix.tolist()}))
    np.savez(tmp_path / "b.npz", A=matrix)
    (tmp_path / "c.json").write_text('{"A": {"Pong": [14.6, -20.7], "Boxing": [0.1, NaN]}}')
    for name in ("a.json", "b.npz"):
        scores = final_scores(importers.read([tmp_path / name]))
        assert scores["normalized"].tolist() == [0, 2, 4, 1, 3, 5]
        assert scores["env_id"].nunique() == 2
    tables = rliable.read([tmp_path / "c.json"])
    assert final_scores(tables)["normalized"].tolist() == [1, 0, 0]
    assert "1 scores of A are NaN, and left out" in tables.quality["problem"].tolist()


def test_pickles_are_not_read(tmp_path):
    np.savez(tmp_path / "x.npz", A=np.array([{"a": 1}], dtype=object))
    with pytest.raises(InputError, match=r"not a \.npz file"):
        rliable.read([tmp_path / "x.npz"])


# ---- quality


@pytest.mark.parametrize(("steps", "short"), [(900, False), (890, True)])
def test_runs_that_end_an_update_apart_have_the_same_length(write_run, tmp_path, steps, short):
    write_run(seed=1, total_steps=1_000, updates=10)
    write_run(seed=2, total_steps=steps, updates=10)
    problems = quality.check(importers.read([tmp_path]))["problem"]
    assert any("unequal length" in problem for problem in problems) == short


def test_every_kind_of_problem_is_named(write_run, tmp_path):
    write_run(seed=1)
    write_run(seed=2, total_steps=500)
    write_run(seed=1, folder=tmp_path / "again")
    write_run(seed=1, env_id="Pong-v5")
    write_run(seed=1, system="other", status="interrupted")
    write_run(seed=1, system="other", env_id="Unheard-v0", returns=[1.0, np.nan])
    problems = "\n".join(quality.check(importers.read([tmp_path]))["problem"])
    for what in (
        "duplicate run: cleanba_ppo, a0-l0-t1, Breakout-v5, seed 1",
        "missing environment: no run of Pong-v5",
        "missing seeds: 1 of Pong-v5, 2 of others",
        "unequal length: ends at step 500, others at 1000",
        "status is 'interrupted'",
        "1 episodes have no return (NaN)",
        "unknown environment: no human reference",
    ):
        assert what in problems, what


def test_environments_may_have_lengths_of_their_own(write_run, tmp_path):
    for seed in (1, 2):
        write_run(seed=seed, env_id="Pong-v5", total_steps=1000)
        write_run(seed=seed, env_id="Breakout-v5", total_steps=500)
    assert quality.check(importers.read([tmp_path])).empty


def test_run_times_are_those_of_runs_that_completed(write_run, tmp_path):
    write_run(seed=1, total_steps=1000)
    write_run(seed=2, total_steps=3000)
    write_run(seed=3, total_steps=500, status="interrupted")
    write_run(seed=1, system="slow", total_steps=8000)
    tables = importers.read([tmp_path])
    seconds = tables.runs.set_index(["system", "seed"])["seconds"]
    fast = (seconds["cleanba_ppo", 1] + seconds["cleanba_ppo", 2]) / 2
    entries = {entry["system"]: entry for entry in summary.run_times(tables)}
    assert entries["cleanba_ppo"]["runs"] == 2
    assert entries["cleanba_ppo"]["seconds"] == pytest.approx(fast)
    assert entries["cleanba_ppo"]["times_the_fastest"] == 1
    ratio = seconds["slow", 1] / fast
    assert entries["slow"]["times_the_fastest"] == pytest.approx(ratio)
    none = tables._replace(runs=tables.runs.assign(completed=False))
    assert summary.run_times(none) == []


def test_all_published_data_at_once(published):
    tables = importers.read([published])
    assert set(tables.runs["system"]) >= {"moolib", "monobeast", "cleanba_ppo", "cleanba_impala"}
    assert len(tables.scores) == 480  # 48 of 528 are in two tables


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "Pong-v5,14.6 ± 0.1\nBoxing-v5,12 ± 1\n", "line 1: no header"),
        ("a.csv", ',"A, 1 GPU",\nPong-v5,14.6 ± 0.1,1 ± 1\n', "line 1: a column has no name"),
        ("a.csv", ",A,A\nPong-v5,14.6 ± 0.1,1 ± 1\n", "line 1: two columns have the same name"),
        ("a.csv", ",A\nPong-v5,14.6 ± -0.1\n", "line 2: A: a negative spread"),
        ("a.csv", ",A\nPong-v5,1e308 ± 0.1\n", "line 2: A is implausibly large"),
        ("a.csv", ",A\nPong-v5,1 ± 1\nPong-v5,2 ± 1\n", "line 3: Pong-v5 appears twice"),
        ("a_runtimes.csv", ",A\nPong-v5,14.6 ± 0.1\n", "line 2: A: a time with a spread"),
        ("a_runtimes.csv", ",A\nPong-v5,-3\n", "line 2: A: a negative time"),
        ("long.csv", "system,env_id,score\n,Pong-v5,1\n", "line 2: no system"),
        ("long.csv", "system,env_id,score\nppo,,1\n", "line 2: no env_id"),
        ("long.csv", "system,env_id,seed,score\nppo,Pong-v5,-1,1\n", "line 2: a negative seed"),
        ("long.csv", "system,env_id,score\nppo,Pong-v5,x\n", "line 2: score is not a number"),
    ],
)
def test_a_score_table_that_would_be_misread_is_refused(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=message):
        importers.read([tmp_path / name])


def test_a_column_is_split_into_system_and_setting_at_its_comma(tmp_path):
    path = tmp_path / "scores.csv"
    path.write_text(',"cleanba_ppo, a0-l1,2-d1-t2",ppo\nPong-v5,1 ± 1,2 ± 1\n')
    scores = importers.read([path]).scores
    assert list(zip(scores["system"], scores["setting"], strict=True)) == [
        ("cleanba_ppo", "a0-l1,2-d1-t2"),
        ("ppo", "-"),
    ]


def test_a_score_in_two_tables_is_read_once_and_named(tmp_path):
    """Doubled means would be taken for two runs, and get an interval."""
    (tmp_path / "one.csv").write_text(",A,B\nPong-v5,1 ± 1,2 ± 1\n")
    (tmp_path / "two.csv").write_text(",A,C\nPong-v5,1 ± 1,3 ± 1\n")
    tables = importers.read([tmp_path])
    assert sorted(tables.scores["system"]) == ["A", "B", "C"]
    assert "1 scores are in" in tables.quality["problem"].item()


def test_a_long_table_holds_runs(tmp_path):
    path = tmp_path / "runs.csv"
    rows = [f"ppo,{setting},Pong-v5,{seed},{seed / 2}" for setting in "ab" for seed in (1, 2, 3)]
    path.write_text("\n".join(["Algorithm,setting,game,seed,score", *rows]) + "\n")
    scores = importers.read([tmp_path]).scores
    assert scores["seed"].tolist() == [1, 2, 3] * 2
    assert scores["score"].tolist() == [0.5, 1.0, 1.5] * 2
    assert scores["setting"].tolist() == ["a"] * 3 + ["b"] * 3
    without_seeds = tmp_path / "more.csv"
    without_seeds.write_text("system,env_id,score,normalized\nx,e,0.5,1\nx,e,0.25,1\nx,f,,1\n")
    tables = importers.read([without_seeds])
    assert tables.scores["seed"].tolist() == [1, 2]
    assert tables.scores["normalized"].all()
    assert "no score of x on f" in tables.quality["problem"].item()
    without_seeds.write_text(
        "system,env_id,score,normalized\nx,e,0.5,1.0\nx,e,0.25,\nx,e,1,TRUE\nx,e,1,False\n"
    )
    scores = importers.read([without_seeds]).scores
    assert scores["normalized"].tolist() == [1, 0, 1, 0]
    without_seeds.write_text("system,env_id,score,normalized\nx,e,0.5,human\n")
    with pytest.raises(InputError, match="line 2: normalized is 'human', neither true nor false"):
        importers.read([without_seeds])


def test_what_is_not_read_in_a_folder_is_named(tmp_path, write_run):
    write_run(folder=tmp_path / "logs" / "a")
    elsewhere = write_run(folder=tmp_path / "elsewhere" / "b")
    (tmp_path / "logs" / "b").symlink_to(elsewhere)
    (tmp_path / "logs" / "table2.csv").write_text("x,y\n1,2\n")
    tables = importers.read([tmp_path / "logs"])
    assert len(tables.runs) == 1
    problems = tables.quality["problem"].tolist()
    assert "1 tables of a form that is not read: table2.csv" in problems
    assert "1 links to folders, not followed: b" in problems


def test_a_game_without_logs_is_named_from_the_root_of_a_checkout(tmp_path):
    write_moolib(tmp_path / "data")
    (tmp_path / "data" / "Skiing-1-name").mkdir()
    problems = " ".join(importers.read([tmp_path]).quality["problem"])
    assert "no logs of Skiing-v5" in problems


def test_two_names_of_one_game_are_named(write_run, tmp_path):
    write_run(env_id="Alien-v5")
    write_run(folder=tmp_path / "other", env_id="ALE/Alien-v5")
    problems = quality.check(importers.read([tmp_path]))
    assert "names of one game, Alien: counted as 2 environments" in set(problems["problem"])


def test_the_games_that_a_published_table_lacks_are_one_line(tmp_path):
    games = sorted(ATARI)[4:]
    (tmp_path / "a.csv").write_text(",A\n" + "".join(f"{game}-v5,1 ± 1\n" for game in games))
    problems = quality.check(importers.read([tmp_path]))
    missing = ", ".join(sorted(ATARI)[:4])
    assert problems["problem"].tolist() == [f"53 of the 57 Atari games: without {missing}"]


def write_of(source, root, write_run):
    """Write a log for one source, and return the system that it is of."""
    if source == "records":
        write_run("cleanba_ppo", folder=root / "record")
        return "cleanba_ppo"
    if source == "tensorboard":
        write_tensorboard(root / "events", system="cleanba_impala")
        return "cleanba_impala"
    if source == "scores":
        (root / "scores.csv").write_text(",A\nPong-v5,1 ± 1\n")
        return "A"
    if source == "rliable":
        np.savez(root / "arrays.npz", DQN=np.ones((2, 3)))
        return "DQN"
    if source == "monobeast":
        write_monobeast(root / "mono", meta={"args": {"env": "Pong-v5"}})
    elif source == "moolib":
        write_moolib(root)
    else:
        write_openrlbenchmark(root)
        return "ppo"
    return source


@pytest.mark.parametrize("source", importers.SOURCES[1:])
def test_of_two_kinds_of_logs_the_source_chooses_one(write_run, tmp_path, capsys, source):
    system = write_of(source, tmp_path, write_run)
    write_of("tensorboard" if source == "moolib" else "moolib", tmp_path, write_run)
    capsys.readouterr()  # what openrlbenchmark printed
    printed = []
    for words in ([], ["--source", source]):
        assert main(["aggregate", str(tmp_path), "--format", "json", *words]) == 0
        printed.append(json.loads(capsys.readouterr().out))
    assert [entry["system"] for entry in printed[1]["aggregate"]] == [system]
    assert printed[0]["aggregate"] != printed[1]["aggregate"]


def test_quality_reads_what_can_be_read_of_any_source(tmp_path):
    write_moolib(tmp_path, "Pong")
    (tmp_path / "Boxing-1-name/peers/p").mkdir(parents=True)
    (tmp_path / "Boxing-1-name/peers/p/logs.tsv").write_text("a\tb\nx\n")
    (tmp_path / "good.csv").write_text(",A\nPong-v5,1 ± 1\n")
    (tmp_path / "bad.csv").write_text(",A\nPong-v5,1 ± x\n")
    with pytest.raises(InputError):
        importers.read([tmp_path])
    tables = importers.read_readable([tmp_path])
    assert list(tables.runs["env_id"]) == ["Pong-v5"]
    assert list(tables.scores["env_id"]) == ["Pong-v5"]
    named = [p for p in tables.quality["problem"] if p.startswith("damaged and excluded: ")]
    assert len(named) == 2
    assert "line 2" in " ".join(named)
    alone = importers.read_readable([tmp_path / "bad.csv", tmp_path / "good.csv"])
    assert len(alone.scores) == 1
    assert "bad.csv, line 2" in alone.quality["problem"].item()
