"""An untouched record is verified by replaying its actions, and tampering is caught."""

import json
import random
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest

from cleanba.audit import replay as audit_replay
from cleanba.audit.replay import Args, Outcome, main
from cleanba.audit.segments import Mismatch
from cleanba.audit.simulation import Simulation, shape_of
from cleanba.audit.verification import verify
from cleanba.record import ACTIONS_FILE, RecordError, read_run
from cleanba.record.actions import DamagedActions, Frame, Shape, pack, read_frames, unpack
from cleanba.run.command_line import BadInput
from reports import audit
from tests.cleanba.conftest import Trainer, lines
from tests.sealing import rewrite, seal


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """One completed record of CartPole, one of Atari."""
    train = Trainer(tmp_path_factory.mktemp("runs"))
    atari = (
        "--env-id", "Breakout-v5", "--total-timesteps", "4096", "--num-steps", "64", "--network", "nature",
        "--channels", "4", "4", "4", "--hiddens", "16",
    )  # fmt: skip
    return {
        "CartPole-v1": train("impala", "--total-timesteps", "4096"),
        "Breakout-v5": train("ppo", *atari),
    }


def check(folder):
    run = read_run(folder)
    return verify(run, Simulation(run, 1))


def replay(folder):
    return subprocess.run(
        [sys.executable, "-m", "cleanba.audit.replay", str(folder), "--no-progress"],
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Breakout-v5"])
@pytest.mark.slow
def test_an_untouched_record_is_verified_on_any_number_of_threads(records, env_id):
    run = read_run(records[env_id])
    episodes = len(lines(records[env_id], "episodes"))
    assert episodes > (100 if env_id == "CartPole-v1" else 4)
    for threads in (1, 2):
        assert verify(run, Simulation(run, threads))[:2] == (episodes, 4096)
    done = replay(records[env_id])
    assert done.returncode == 0
    assert done.stdout.startswith(f"verified: {episodes:,} of {episodes:,} episodes")


def change_return(folder, rng):
    path = folder / "episodes.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    row = rng.choice(rows)
    field = rng.choice(["return", "length"])
    row[field] += rng.choice([-1, 1]) * (1 if field == "length" else rng.choice([0.5, 1.0, 10.0]))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def change_action(folder, rng):
    """Change one action to another that exists, and leave the digest."""
    path, shape = folder / ACTIONS_FILE, shape_of(read_run(folder))
    frames = list(read_frames(path, shape))
    number = rng.randrange(len(frames))
    actions = frames[number].actions
    t, i = rng.randrange(shape.num_steps), rng.randrange(shape.num_envs)
    actions[t, i] = (actions[t, i] + rng.randrange(1, shape.num_actions)) % shape.num_actions
    path.write_bytes(b"".join(pack(frame, shape) for frame in frames))


def remove_file(folder, rng):
    names = ["run.json", *json.loads((folder / "run.json").read_text())["files"]]
    (folder / rng.choice(names)).unlink()


def cut_off_the_end(folder, rng):
    """Leave out the last episode: it is in the actions."""
    path = folder / "episodes.jsonl"
    rows = path.read_text().splitlines(keepends=True)
    path.write_text("".join(rows[: -rng.randrange(1, 4)]))


def cut_off_whole_rollouts(folder, rng):
    """Leave out the end of the run, in every file."""
    updates = len(lines(folder, "updates"))
    keep = updates - rng.randrange(1, updates)
    size = keep * shape_of(read_run(folder)).frame_size
    (folder / ACTIONS_FILE).write_bytes((folder / ACTIONS_FILE).read_bytes()[:size])
    cut_off_rows(folder, keep)


def cut_off_rows(folder, keep):
    """Leave out the rows after some updates."""
    run = read_run(folder)
    shape, groups = shape_of(run), run.info.hyperparameters["num_env_groups"]
    steps = keep * shape.num_steps * shape.num_envs
    for kind, test in (
        ("updates", lambda row: row["version"] <= keep + 1),
        ("rollouts", lambda row: row["rollout"] <= keep),
        ("episodes", lambda row: row["step"] <= steps),
    ):
        rows = [json.dumps(row) + "\n" for row in lines(folder, kind) if test(row)]
        (folder / f"{kind}.jsonl").write_text("".join(rows))
    assert len(lines(folder, "rollouts")) == groups * keep


def flip_a_bit_of_the_actions(folder, rng):
    path = folder / ACTIONS_FILE
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(bytes(data))


def claim_more_of_a_run_that_did_not_end(folder, rng):
    info = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(info | {"status": "interrupted"}))
    (folder / ACTIONS_FILE).write_bytes(b"")


@pytest.mark.parametrize(("env_id", "trials"), [("CartPole-v1", 50), ("Breakout-v5", 5)])
@pytest.mark.slow
def test_tampering_is_caught_in_every_trial(records, env_id, trials, tmp_path):
    rng = random.Random(env_id)
    ways = [
        change_return,
        change_action,
        remove_file,
        cut_off_the_end,
        cut_off_whole_rollouts,
        flip_a_bit_of_the_actions,
        claim_more_of_a_run_that_did_not_end,
    ]
    for trial in range(trials):
        folder = tmp_path / str(trial)
        shutil.copytree(records[env_id], folder)
        way = rng.choice(ways)
        way(folder, rng)
        if way is not remove_file:  # the checksums fit: the simulation has to notice
            seal(folder)
        with pytest.raises((Mismatch, RecordError, DamagedActions)):
            check(folder)
        shutil.rmtree(folder)


@pytest.mark.parametrize("status", ["interrupted", "running"])
@pytest.mark.slow
def test_a_run_killed_between_its_actions_and_its_rows_is_verified(records, status, tmp_path):
    folder = tmp_path / "killed"
    shutil.copytree(records["CartPole-v1"], folder)
    updates = len(lines(folder, "updates"))
    cut_off_rows(folder, updates - 1)
    info = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(info | {"status": status}))
    seal(folder)
    assert check(folder).rollouts == updates - 1
    cut_off_rows(folder, updates - 2)
    seal(folder)
    with pytest.raises(Mismatch, match="rollouts and 0 bytes"):
        check(folder)


@pytest.mark.slow
def test_an_action_that_changes_an_episode_is_caught_by_the_episode_too(records, tmp_path):
    """With digests recomputed for changed actions, the episodes differ."""
    from cleanba.environments import env_seeds, make_envs, play
    from cleanba.record.actions import GroupDigest, combine_digests

    folder = tmp_path / "forged"
    shutil.copytree(records["CartPole-v1"], folder)
    run = read_run(folder)
    shape = shape_of(run)
    frames = list(read_frames(folder / ACTIONS_FILE, shape))
    frames[0].actions[:] = 1 - frames[0].actions
    envs = make_envs("CartPole-v1", env_seeds(run.info.seed, 0, shape.num_envs))
    envs.async_reset()
    envs.recv()
    groups = run.info.hyperparameters["num_env_groups"]
    digests, forged = [GroupDigest() for _ in range(groups)], b""
    for frame in frames:
        _, rewards, dones, _ = play(envs, frame.actions)
        parts = [np.split(x, groups, axis=1) for x in (frame.actions, rewards, dones)]
        new = [d.update(*part) for d, *part in zip(digests, *parts, strict=True)]
        forged += pack(Frame(frame.actions, combine_digests(new)), shape)
    (folder / ACTIONS_FILE).write_bytes(forged)
    seal(folder)
    with pytest.raises(Mismatch, match="episode 1: environment"):
        check(folder)


@pytest.mark.slow
def test_the_command_names_the_first_difference_and_fails(records, tmp_path):
    folder = tmp_path / "x"
    shutil.copytree(records["CartPole-v1"], folder)
    rows = (folder / "episodes.jsonl").read_text().splitlines()
    row = json.loads(rows[6])
    rows[6] = json.dumps(row | {"return": row["return"] + 3})
    rewrite(folder / "episodes.jsonl", "\n".join(rows) + "\n")
    done = replay(folder)
    assert done.returncode == 1
    assert f"episode 7: environment {row['env_index']}, step {row['step']}: return" in done.stdout
    assert done.stderr == ""
    assert replay(tmp_path).returncode == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"env_id": "NoSuchGame-v5"}, "NoSuchGame-v5"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**40}, "seed"),
    ],
)
def test_a_record_whose_environments_cannot_be_made_is_one_line(records, tmp_path, fields, message):
    folder = tmp_path / "x"
    shutil.copytree(records["CartPole-v1"], folder)
    info = json.loads((folder / "run.json").read_text())
    info["hyperparameters"] |= fields
    (folder / "run.json").write_text(json.dumps(info | fields))
    seal(folder)
    done = replay(folder)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_what_needs_no_environments_is_checked_without_them(records, tmp_path):
    folder = tmp_path / "x"
    shutil.copytree(records["CartPole-v1"], folder)
    info = json.loads((folder / "run.json").read_text())
    info["hyperparameters"]["num_steps"] = 1 << 21
    (folder / "run.json").write_text(json.dumps(info))
    actions = folder / ACTIONS_FILE
    actions.write_bytes(actions.read_bytes()[:-100])
    done = replay(folder)
    assert done.returncode == 1
    assert ACTIONS_FILE in done.stdout


@pytest.mark.slow
def test_an_interrupted_run_is_verified_as_far_as_its_actions_go(train):
    process = train.start("impala", "--total-timesteps", 10_000_000)
    deadline, found = time.monotonic() + 120, []
    try:
        while not found or len(found[0].read_bytes()) < 5000:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
            found = list(train.runs_dir.glob("*/*/episodes.jsonl"))
        folder = found[0].parent
        assert replay(folder).returncode == 0  # while it is being written
    finally:
        process.kill()
        process.wait()
    with open(folder / ACTIONS_FILE, "ab") as file:
        file.write(b"torn")
    done = replay(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "verified up to its last action" in done.stdout


@pytest.mark.parametrize("num_actions", [1, 2, 3, 18, 19, 256, 1000, 107_520_000, 2**31])
def test_actions_are_unpacked_as_they_were_packed(num_actions):
    rng = np.random.default_rng(num_actions)
    shape = Shape(num_steps=7, num_envs=5, num_actions=num_actions)
    actions = rng.integers(0, num_actions, (7, 5)).astype(np.int32)
    data = pack(Frame(actions, b"d" * 16), shape)
    assert len(data) == shape.frame_size
    frame = unpack(data, shape)
    np.testing.assert_array_equal(frame.actions, actions)
    assert frame.digest == b"d" * 16
    with pytest.raises(ValueError, match="do not fit"):
        pack(Frame(actions.astype(np.int64) + num_actions, b"d" * 16), shape)
    with pytest.raises(ValueError, match="do not fit"):
        pack(Frame(actions[1:], b"d" * 16), shape)


@pytest.mark.slow
def test_actions_of_atari_cost_at_most_1_1_bytes_a_step(records):
    folder = records["Breakout-v5"]
    assert (folder / ACTIONS_FILE).stat().st_size <= 1.1 * 4096
    # the smallest batch of the paper's settings: 16 environments x 20 steps
    assert Shape(20, 16, 18).frame_size <= 1.1 * 20 * 16


def test_segments_are_drawn_with_a_random_seed_unless_one_is_given(monkeypatch):
    seeds = []
    monkeypatch.setattr(audit_replay, "read_run", lambda _: None)
    monkeypatch.setattr(
        audit_replay,
        "judge",
        lambda _, *, seed, **options: seeds.append(seed) or Outcome(verdict="verified"),
    )
    for seed in (0, None, None, None):
        main(Args(run="x", seed=seed, json=True))
    assert seeds[0] == 0
    assert len(set(seeds)) == 4


@pytest.mark.parametrize("name", ["no_such_module", "json"])
def test_a_module_that_cannot_repeat_a_run_is_bad_input(name, tmp_path, capsys):
    with pytest.raises(BadInput, match=f"--module {name}: "):
        main(Args(run=str(tmp_path), module=name))
    assert audit.main(["x.zip", "--module", name]) == 2
    assert f"error: --module {name}: " in capsys.readouterr().err
