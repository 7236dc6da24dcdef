"""Every difference between two records is found, except in fields that may differ."""

import copy

import numpy as np
import pytest

from cleanba.audit.comparison import describe_tensors, first_difference
from cleanba.record import ACTIONS_FILE, Episode, Rollout, Run, RunInfo, Update

ROWS = {
    "updates": [
        Update(
            version=i + 2, step=i, wall_time=0.5 * i, update_seconds=0.5, learning_rate=0.1, loss=1.0,
            fingerprint=f"{i:064x}",
        )
        for i in range(3)
    ],
    "episodes": [Episode(step=40, wall_time=0.1, env_index=1, episode_return=3.0, length=9)],
    "rollouts": [
        Rollout(
            actor=0, group=1, rollout=1, steps=8, wall_time=0.2, version_first=1, version_last=1,
            versions=[(1, 8)], learner_version=1,
        )
    ],
}  # fmt: skip


class MadeUp(Run):
    """A record whose rows are given."""

    def _rows(self, kind):
        return self.rows[kind.__name__.lower() + "s"]


@pytest.fixture
def record(tmp_path):
    def make(name, rows, actions=b"0123"):
        file = tmp_path / name / ACTIONS_FILE
        file.parent.mkdir(parents=True)
        file.write_bytes(actions)
        run = MadeUp(tmp_path / name, RunInfo(system="x", setting="x", env_id="x", seed=1))
        run.rows = rows
        return run

    return make


def test_times_and_actor_threads_may_differ(record):
    other = copy.deepcopy(ROWS)
    for rows in other.values():
        for row in rows:
            row.wall_time += 1
    other["rollouts"][0].actor = 3
    assert first_difference(record("a", ROWS), record("b", other)) is None


@pytest.mark.parametrize(
    ("kind", "field", "value", "text", "update"),
    [
        ("updates", "fingerprint", "f" * 64, "parameters differ from update 2 on", 2),
        ("episodes", "episode_return", 4.0, "episodes differ: ", None),
        ("rollouts", "version_first", 2, "policy lag differ: ", None),
    ],
)
def test_a_changed_row_is_found(record, kind, field, value, text, update):
    other = copy.deepcopy(ROWS)
    setattr(other[kind][1 if kind == "updates" else 0], field, value)
    found = first_difference(record("a", ROWS), record("b", other))
    assert found.text.startswith(text)
    assert found.update == update


@pytest.mark.parametrize("kind", ROWS)
def test_a_missing_row_is_found(record, kind):
    found = first_difference(record("a", ROWS), record("b", ROWS | {kind: ROWS[kind][:-1]}))
    assert found is not None
    assert (found.update == 3) == (kind == "updates")


def test_a_changed_action_is_found(record):
    assert first_difference(record("a", ROWS), record("b", ROWS, b"0124")).text == "actions differ"


def test_the_first_tensor_that_differs_is_named_with_the_size_of_the_difference():
    ours = {"a": np.ones(3, np.float32), "b": np.array([1, -4], np.float32), "c": np.zeros(2)}
    theirs = ours | {"b": np.array([1, -3.5], np.float32), "c": np.ones(2)}
    assert describe_tensors(ours, ours) == ""
    text = describe_tensors(ours, theirs)
    assert text == "b first (2 of 3 tensors), by up to 0.5 where values are up to 4"
