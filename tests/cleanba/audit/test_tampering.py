"""A changed record whose checksums were computed anew contradicts its actions, or itself."""

import json
import shutil

import pytest

from analysis import importers
from cleanba.audit.segments import Mismatch
from cleanba.audit.simulation import Simulation
from cleanba.audit.verification import verify
from cleanba.record import ACTIONS_FILE, RecordError, read_run
from cleanba.record.actions import DamagedActions
from cleanba.record.consistency import contradictions
from cleanba.run.command_line import BadInput
from tests.cleanba.conftest import Trainer
from tests.sealing import seal


def of_rows(kind, change):
    """A change of one file's rows, in place."""

    def tamper(folder):
        path = folder / f"{kind}.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        rows = change(rows) or rows
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    return tamper


def of_info(change):
    """A change of `run.json`, in place."""

    def tamper(folder):
        path = folder / "run.json"
        info = json.loads(path.read_text())
        change(info)
        path.write_text(json.dumps(info))

    return tamper


def scale(field, factor, which=slice(None)):
    def change(rows):
        for row in rows[which]:
            row[field] = row[field] * factor

    return change


def put(field, value, which=slice(3, 4)):
    def change(rows):
        for row in rows[which]:
            row[field] = value(row) if callable(value) else value

    return change


def swap(rows):
    rows[2], rows[3] = rows[3], rows[2]


def drop(rows):
    return rows[:2] + rows[3:]


def repeat(rows):
    return [*rows[:3], *rows[2:]]


def no_lag(rows):
    for row in rows:
        row["version_first"] = row["version_last"] = row["learner_version"]
        row["versions"] = [[row["learner_version"], row["steps"]]]


def invented_change(rows):
    row = rows[-1]
    row["version_last"] += 1
    row["versions"] = [[row["version_first"], 8], [row["version_last"], row["steps"] - 8]]


def change_actions(folder):
    path = folder / ACTIONS_FILE
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(bytes(data))


def cut_actions(folder):
    path = folder / ACTIONS_FILE
    path.write_bytes(path.read_bytes()[:-40])


def exchange_frames(folder):
    path = folder / ACTIONS_FILE
    data = path.read_bytes()
    size = len(data) // 16
    path.write_bytes(data[size : 2 * size] + data[:size] + data[2 * size :])


TAMPERINGS = {
    # episodes
    "a return raised": of_rows("episodes", put("return", lambda r: r["return"] + 1)),
    "all returns doubled": of_rows("episodes", scale("return", 2)),
    "a length raised": of_rows("episodes", put("length", lambda r: r["length"] + 1)),
    "an episode's step moved": of_rows("episodes", put("step", lambda r: r["step"] + 8)),
    "an episode in another environment": of_rows("episodes", put("env_index", lambda r: r["env_index"] ^ 1)),
    "an episode in no environment": of_rows("episodes", put("env_index", 99)),
    "an episode's time moved": of_rows("episodes", put("wall_time", lambda r: r["wall_time"] + 1)),
    "all episodes' times halved": of_rows("episodes", scale("wall_time", 0.5)),
    "an episode removed": of_rows("episodes", drop),
    "an episode twice": of_rows("episodes", repeat),
    "two episodes swapped": of_rows("episodes", swap),
    "all episodes removed": of_rows("episodes", lambda rows: rows[:0] or rows.clear()),
    # updates
    "two updates swapped": of_rows("updates", swap),
    "an update removed": of_rows("updates", drop),
    "an update twice": of_rows("updates", repeat),
    "a version raised": of_rows("updates", put("version", lambda r: r["version"] + 1)),
    "a step raised": of_rows("updates", put("step", lambda r: r["step"] + 128)),
    "an update's time moved": of_rows("updates", put("wall_time", lambda r: r["wall_time"] + 0.5)),
    "all updates' times halved": of_rows("updates", scale("wall_time", 0.5)),
    "all update_seconds halved": of_rows("updates", scale("update_seconds", 0.5)),
    "losses scaled": of_rows("updates", scale("loss", 0.5)),
    "policy losses scaled": of_rows("updates", scale("policy_loss", 1.5)),
    "value losses scaled": of_rows("updates", scale("value_loss", 0.5)),
    "entropies scaled": of_rows("updates", scale("entropy", 0.5)),
    # rollouts
    "no lag anywhere": of_rows("rollouts", no_lag),
    "an invented change inside a rollout": of_rows("rollouts", invented_change),
    "a first version lowered": of_rows("rollouts", put("version_first", 1, slice(-1, None))),
    "a last version raised": of_rows("rollouts", put("version_last", lambda r: r["version_last"] + 1)),
    "a learner raised": of_rows("rollouts", put("learner_version", lambda r: r["learner_version"] + 1)),
    "other versions": of_rows("rollouts", put("versions", lambda r: [[r["version_first"], 1]])),
    "a rollout's steps halved": of_rows("rollouts", scale("steps", 1 / 2)),
    "a rollout renumbered": of_rows("rollouts", put("rollout", lambda r: r["rollout"] + 1)),
    "a rollout of another group": of_rows("rollouts", put("group", lambda r: r["group"] ^ 1)),
    "a rollout's time after its update": of_rows("rollouts", put("wall_time", lambda r: r["wall_time"] + 60)),
    "all rollouts' times halved": of_rows("rollouts", scale("wall_time", 0.5)),
    "a rollout removed": of_rows("rollouts", drop),
    # actions and run.json
    "an action changed": change_actions,
    "the last actions cut off": cut_actions,
    "two rollouts' actions exchanged": exchange_frames,
    "another seed": of_info(lambda info: info.update(seed=2)),
    "another seed for the learner": of_info(lambda info: info["hyperparameters"].update(seed=2)),
    "fewer timesteps": of_info(lambda info: info["hyperparameters"].update(total_timesteps=1024)),
    "other actions": of_info(lambda info: info.update(num_actions=3)),
}  # fmt: skip

UNSEALED = {
    "checksums emptied": of_info(lambda info: info.update(files={})),
    "a checksum removed": of_info(lambda info: info["files"].pop("updates.jsonl")),
}


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    """The record of a CartPole run of 16 updates."""
    train = Trainer(tmp_path_factory.mktemp("honest"))
    return train("ppo", "--concurrency", "--setting", "honest")


def is_caught(folder):
    """Whether replay or `analysis quality --strict` refuses a record."""
    try:
        run = read_run(folder)
        verify(run, Simulation(run, 1))
    except (Mismatch, RecordError, DamagedActions, BadInput):
        return True
    return bool(len(importers.read([str(folder)]).quality))


@pytest.mark.slow
def test_every_tampering_is_caught_and_an_honest_record_is_not(honest, tmp_path):
    assert not is_caught(honest)
    missed = []
    for number, (name, tamper) in enumerate((TAMPERINGS | UNSEALED).items()):
        folder = tmp_path / str(number)
        shutil.copytree(honest, folder)
        tamper(folder)
        if name not in UNSEALED:
            seal(folder)
        if not is_caught(folder):
            missed.append(name)
    assert not missed
    assert len(TAMPERINGS) == 43


@pytest.mark.slow
def test_a_run_that_was_killed_while_it_wrote_contradicts_nothing(honest):
    """An update writes its episodes, its rollouts and its own row, in this order."""
    run = read_run(honest)
    updates, rollouts, episodes = run.updates(), run.rollouts(), run.episodes()
    groups = run.info.hyperparameters["num_env_groups"]
    run.info.status = "interrupted"
    assert contradictions(run, updates[:-1], rollouts, episodes) == []
    assert contradictions(run, updates[:-1], rollouts[:-groups], episodes) == []
    assert contradictions(run, updates[:-1], rollouts[: -groups + 1], episodes) == []
