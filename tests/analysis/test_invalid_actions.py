"""The metrics of invalid action masking, and its paper's table."""

import math

import pytest

from analysis import importers
from analysis.invalid_actions import masking_metrics
from analysis.tables import InputError
from cleanba import record
from experiments.study import find_study, load_study
from reports import paper_tables

RETURNS = [0, 0, 3, 20, 40, 40, 40, 40, 40, 40, 40, 40, 40, 40, 40, 40]


def write(root, system, returns, seed=1, invalid=True, at_once=1):
    """A run of episodes of 200 steps, of which `at_once` end at the same step."""
    env_id = "MicrortsMining4x4F9-v0"
    info = record.RunInfo(system=system, setting="one-device", env_id=env_id, seed=seed)
    counts = {"invalid_null": 5, "invalid_busy": 1} if invalid else {}
    with record.RunWriter(root / record.run_name(system, "one-device", env_id, seed), info) as run:
        for i, value in enumerate(returns):
            step = 200 * at_once * (i // at_once + 1)
            owner = {"invalid_owner": i} if invalid else {}
            run.write(
                record.Episode(
                    step=step, wall_time=float(i), env_index=i % at_once,
                    episode_return=float(value), length=200, **counts, **owner,
                )
            )  # fmt: skip
            run.write(
                record.Rollout(
                    actor=0, group=None, rollout=i + 1, steps=200, wall_time=float(i), version_first=i + 1,
                    version_last=i + 1, versions=[(i + 1, 200)], learner_version=i + 1,
                ),
                record.Update(
                    version=i + 2, step=step, wall_time=float(i), update_seconds=1.0, learning_rate=1e-3,
                    loss=0.0,
                ),
            )  # fmt: skip


def test_metrics_are_the_paper_s(tmp_path):
    write(tmp_path, "ppo_microrts_masking", RETURNS)
    write(tmp_path, "ppo_microrts_penalty-1", [0] * 16)
    metrics = masking_metrics(importers.read([tmp_path])).set_index("system")
    solved = metrics.loc["ppo_microrts_masking"]
    assert (solved["return"], solved["null"], solved["busy"]) == (40, 5, 1)
    assert solved["owner"] == sum(range(6, 16)) / 10
    assert (
        solved["solve"] == 14 / 16
    )  # the first ten episodes in a row with 40 end with the fourteenth
    assert solved["first"] == 3 / 16
    failed = metrics.loc["ppo_microrts_penalty-1"]
    assert failed["return"] == 0
    assert math.isinf(failed["solve"])
    assert math.isinf(failed["first"])


def test_the_first_reward_counts_the_episodes_before_it_one_after_another(tmp_path):
    write(tmp_path, "ppo_microrts_masking", RETURNS, at_once=8)
    (first,) = masking_metrics(importers.read([tmp_path]))["first"]
    assert first == 3 / 16


def test_without_the_mask_ten_evaluations_have_to_solve_the_task(tmp_path):
    once = [0, 40] + [40] * 10 + [40, 0]
    write(tmp_path, "ppo_microrts_removed", once * 2, at_once=2)
    write(tmp_path, "ppo_microrts_removed", [0, 40] + [40] * 22, seed=2, at_once=2)
    metrics = masking_metrics(importers.read([tmp_path])).set_index("seed")
    assert math.isinf(metrics.loc[1, "solve"])
    assert metrics.loc[2, "solve"] == 11 / 12


def test_the_table_has_means_over_seeds_and_the_paper_s_values(tmp_path):
    write(tmp_path, "ppo_microrts_masking", RETURNS)
    write(tmp_path, "ppo_microrts_masking", [0] * 16, seed=2)
    lines = paper_tables.masking_table2(importers.read([tmp_path]))
    assert lines[2:] == [
        "| masking | 4x4 | 2 | 20.00 | 5.00 / 1.00 / 10.50 | 93.75% (1 of 2) | 18.75% (1 of 2) |",
        "| – the paper | 4x4 | 4 | 40.00 | – | 8.67% | 0.07% |",
    ]


def test_records_without_counts_are_refused(tmp_path):
    write(tmp_path, "ppo_microrts_masking", RETURNS, invalid=False)
    with pytest.raises(InputError, match="no run has counted its invalid actions"):
        masking_metrics(importers.read([tmp_path]))


def test_every_run_of_the_study_has_a_row_with_the_paper_s_values():
    for preset in ("cpu", "10x10", "paper"):
        for run in load_study(find_study("masking"), preset).runs:
            size = run.env_id.removeprefix("MicrortsMining").removesuffix("F9-v0")
            assert (run.system.removeprefix("ppo_microrts_"), size) in paper_tables.MASKING_PAPER
