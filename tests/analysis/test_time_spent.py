"""Time spent by actors and learners, for systems with different kinds of parallelism."""

import json

import numpy as np
import pytest
from synthetic_runs import monobeast_run, write_run

from analysis import problems, selection
from analysis.actors import ActorsAndLearners, actors_and_learners
from analysis.importers.records import SKIPPED_UPDATES, read_records
from analysis.time_spent import time_table
from tests.sealing import rewrite


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "monobeast__control__Catch-v0__s1"


def test_shares_add_up_and_are_those_of_the_record(tmp_path):
    run = tmp_path / "run"
    write_run(run, steps=10_240)
    table = time_table(read_records([run]))
    actors = ["environment", "inference", "actor_waiting", "actor_other"]
    learner = ["training", "learner_waiting", "learner_other"]
    assert table[actors].sum(axis=1).to_numpy() == pytest.approx(1.0)
    assert table[learner].sum(axis=1).to_numpy() == pytest.approx(1.0)
    lines = [json.loads(line) for line in (run / "updates.jsonl").read_text().splitlines()]
    share = sum(line["training_time"] for line in lines[3:]) / (
        lines[-1]["wall_time"] - lines[2]["wall_time"]
    )
    assert table["training"].iloc[0] == pytest.approx(share)


def test_the_time_of_actors_that_an_update_takes_some_of_adds_up(folder):
    monobeast_run(folder, "control", 1, 4, 8)
    row = time_table(selection.completed(read_records([folder]))).iloc[0]
    # an update takes 0.1 s and 2 of 8 rollouts: each actor gives one in 4 updates, 0.4 s
    assert row["environment"] == pytest.approx(0.5)
    assert row["inference"] == pytest.approx(0.25)
    assert row["training"] == pytest.approx(0.6)


def test_the_time_of_two_learner_threads_is_shared_out_among_them(folder):
    monobeast_run(folder, "control", 1, 4, 8, num_learner_threads=2)
    row = time_table(selection.completed(read_records([folder]))).iloc[0]
    # of the 0.2 s that two threads have in 0.1 s, 0.06 s train and 0.03 s wait
    assert row["training"] == pytest.approx(0.3)
    assert row["learner_waiting"] == pytest.approx(0.15)
    assert row["learner_other"] == pytest.approx(0.55)


@pytest.mark.parametrize(
    ("gradients", "collection", "acting", "training"),
    [
        # an update of 0.1 s takes 0.3 s of one of four collection workers, and 0.06 s of one of two
        # gradient workers
        ("asynchronous", "asynchronous", (0.5, 0.25), 0.3),
        # both gradient workers compute at once, each from a rollout of one of its two collection workers
        ("synchronous", "asynchronous", (2 / 3, 1 / 3), 0.6),
    ],
)
def test_the_time_of_worker_schemes_is_shared_out_among_workers(
    folder, gradients, collection, acting, training
):
    links = {"gradients": gradients, "collection": collection}
    monobeast_run(folder, "control", 1, 4, 8, gradient_workers=2, collection_workers=2, **links)
    row = time_table(selection.completed(read_records([folder]))).iloc[0]
    assert (row["environment"], row["inference"]) == pytest.approx(acting)  # never more than all
    assert row["training"] == pytest.approx(training)


@pytest.mark.parametrize(
    ("hyperparameters", "expected"),
    [
        (None, (1.0, 1.0)),
        ({"num_envs": 8}, (1.0, 1.0)),
        ({"num_actors": 8, "batch_size": 2, "num_learner_threads": 3}, (0.25, 3.0)),
        ({"num_actors": 8, "batch_size": 2}, (0.25, 1.0)),
        ({"num_actors": 8}, (1.0, 1.0)),
        ({"num_actors": "all", "batch_size": 2}, (1.0, 1.0)),
        (
            {"collection_workers": 0, "collection": "synchronous", "gradients": "synchronous"}
            | {"gradient_workers": 4},
            (1.0, 1.0),
        ),
        (
            {"collection_workers": 3, "collection": "asynchronous", "gradients": "asynchronous"}
            | {"gradient_workers": 2},
            (1 / 6, 2.0),
        ),
    ],
)
def test_the_parallelism_of_each_kind_of_system(hyperparameters, expected):
    assert actors_and_learners(hyperparameters) == pytest.approx(ActorsAndLearners(*expected))


@pytest.mark.parametrize(("collectors", "named"), [(4, False), (2, True)])
def test_a_record_that_counts_time_twice_is_a_problem_with_the_data(folder, collectors, named):
    # a rollout of 0.3 s in every update of 0.1 s: too much for two collection workers
    links = {"gradients": "synchronous", "collection": "asynchronous", "gradient_workers": 1}
    monobeast_run(folder, "control", 1, 4, 8, collection_workers=collectors, **links)
    found = problems.problems(read_records([folder]))
    what = "times of the actors add up to 150% of the wall time: some of it is counted twice"
    assert ((folder.name, what) in found) == named


def test_a_wait_before_the_first_counted_update_does_not_count(folder):
    """Actors of monobeast fill all buffers, and then wait until the learner has started."""
    monobeast_run(folder, "control", 1, 4, 8)
    usual = time_table(read_records([folder])).iloc[0]
    updates = [json.loads(line) for line in (folder / "updates.jsonl").read_text().splitlines()]
    for update in updates[6:10]:
        update["rollout_queue_put_time"] = 5.0
    rewrite(folder / "updates.jsonl", "".join(f"{json.dumps(one)}\n" for one in updates))
    tables = read_records([folder])
    assert not any("counted twice" in problem for _, problem in problems.problems(tables))
    row = time_table(tables).iloc[0]
    since = 0.1 * (np.arange(7, 11) - SKIPPED_UPDATES)
    seconds = 0.1 * (100 - SKIPPED_UPDATES)
    more = 0.25 * since.sum() / seconds  # an update takes 2 of 8 actors' rollouts
    assert row["actor_waiting"] - usual["actor_waiting"] == pytest.approx(more)
