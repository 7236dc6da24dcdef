"""Ninety forged runs, ten of each kind: each is refuted once the part that it falsifies is drawn.

Ten forged tables are in tests/reports/test_audit.py.
"""

import math
import shutil

import numpy as np
import pytest

from cleanba.audit.replay import random_numbers
from cleanba.audit.segments import Mismatch, draw
from cleanba.audit.verification import repetition, verify
from cleanba.record import checkpoints, read_run
from tests import forging
from tests.cleanba.conftest import Trainer

pytestmark = pytest.mark.soak

EVERY = ["--checkpoint-every", "2", "--keep-checkpoints", "all"]
UPDATES, SEGMENTS = 16, 8
TRIALS = 10
DRAWS, DRAWN = 1000, 3  # segments of eight
WHOLE = 3  # of the trials of falsified training: every segment is repeated, in the others a few


def change_return(folder, rng):
    """Simulation notices it: no segment is needed."""
    rows = forging.rows_of(folder / "episodes.jsonl")
    rows[rng.integers(len(rows))]["return"] += int(rng.choice([-1, 1]))
    forging.write_rows(folder / "episodes.jsonl", rows)
    return None


def remove_episode(folder, rng):
    rows = forging.rows_of(folder / "episodes.jsonl")
    del rows[rng.integers(len(rows))]
    forging.write_rows(folder / "episodes.jsonl", rows)
    return None


def change_actions(folder, rng):
    """The episodes are those of the other actions; its learner would not have taken them."""
    first = forging.change_actions(folder, rng)
    forging.simulate_again(folder)
    return {first // 2}


def swap_checkpoint(folder, rng):
    """The digest in `updates.jsonl` is that of the other checkpoint."""
    here, other = (2 * x for x in rng.choice(range(1, SEGMENTS), 2, replace=False).tolist())
    arrays = checkpoints.load(checkpoints.read(folder / "checkpoints" / f"{other:08d}"))
    forging.change_checkpoint(folder, here, lambda _: arrays)
    return {here // 2 - 1, here // 2}


def perturb_checkpoint(folder, rng):
    """Rounding may hide it from the segment that begins there, but not from the one that ends there."""
    update = 2 * int(rng.integers(1, SEGMENTS))
    forging.change_checkpoint(folder, update, forging.flip_a_bit)
    return {update // 2 - 1}


def take_the_curve_of_another_seed(folder, rng, others):
    """The parameters are those of another seed, and its actions are played in these environments."""
    for path in others[rng.integers(len(others))].iterdir():
        if path.name in ("updates.jsonl", "rollouts.jsonl", "actions", "checkpoints"):
            shutil.copytree(path, folder / path.name, dirs_exist_ok=True) if path.is_dir() else (
                shutil.copy(path, folder / path.name)
            )
    forging.simulate_again(folder)
    return set(range(SEGMENTS))


def change_hyperparameter(folder, rng):
    name, value = [
        ("learning_rate", 3e-4), ("gamma", 0.98), ("gae_lambda", 0.9), ("clip_coef", 0.01),
        ("adam_eps", 1e-4), ("update_epochs", 3), ("num_minibatches", 1), ("norm_adv", False),
        ("anneal_lr", False), ("max_grad_norm", 0.25),
    ][rng.integers(10)]  # fmt: skip
    forging.change_info(folder, "hyperparameters", **{name: value})
    return set(range(SEGMENTS))


COPIES = [
    change_return,
    remove_episode,
    change_actions,
    swap_checkpoint,
    perturb_checkpoint,
    take_the_curve_of_another_seed,
    change_hyperparameter,
]


def repeat_segment(folder, number):
    """Repeat one segment of a record, or none; return what was found, or ""."""
    run = read_run(folder)
    try:
        chosen = [] if number is None else [forging.segments(folder)[number]]
        verify(run, repetition(run), chosen)
    except Mismatch as error:
        return str(error)
    return ""


@pytest.fixture
def repeat(auditor):
    """Call `repeat_segment` in the auditor's process."""
    return lambda folder, number: auditor.submit(repeat_segment, folder, number).result()


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    """Records of four seeds."""
    train = Trainer(tmp_path_factory.mktemp("honest"))
    folders = [train("ppo", *EVERY, "--seed", seed) for seed in range(1, 5)]
    assert len(forging.segments(folders[0])) == SEGMENTS
    return folders


def test_honest_segments_are_verified(honest, repeat):
    assert [repeat(honest[0], number) for number in range(SEGMENTS)] == [""] * SEGMENTS


@pytest.mark.parametrize("kind", COPIES)
def test_forged_records_are_refuted_by_the_parts_that_they_falsify(honest, repeat, tmp_path, kind):
    more = (honest[1:],) if kind is take_the_curve_of_another_seed else ()
    for trial in range(TRIALS):
        rng = np.random.default_rng([COPIES.index(kind), trial])
        folder = tmp_path / str(trial)
        bad = forging.forged_copy(honest[0], folder, kind, rng, *more)
        for number in rng.permutation(sorted(bad))[:2] if bad else [None]:
            assert repeat(folder, number), f"trial {trial}, segment {number}"
        if bad is not None:
            assert not repeat(folder, None), "simulation alone finds it"
        shutil.rmtree(folder)


def share_missed(folder, found):
    """Return the share of draws in which none of the segments is in which a falsification is found."""
    every = forging.segments(folder)
    misses = 0
    for seed in range(DRAWS):
        drawn = draw(every, DRAWN, random_numbers(seed, folder.name))
        misses += found.isdisjoint(every.index(one) for one in drawn)
    return misses / DRAWS


@pytest.mark.parametrize("kind", ["tuned", "untrained"])
def test_falsified_training_is_missed_as_often_as_the_formula_says(repeat, tmp_path, kind):
    rng = np.random.default_rng(len(kind))
    for trial in range(TRIALS):
        # Not the run's last update: nothing acts with its parameters.
        first = int(rng.integers(1, UPDATES))
        folder = forging.train_falsely(kind, first, tmp_path / str(trial), *EVERY)
        begins = (first - 1) // 2
        falsified = {begins} if kind == "tuned" else set(range(begins, SEGMENTS))
        tried = range(SEGMENTS) if trial < WHOLE else {max(begins - 1, 0), begins, SEGMENTS - 1}
        assert {number for number in tried if repeat(folder, number)} == falsified & set(tried)
        expected = math.comb(SEGMENTS - len(falsified), DRAWN) / math.comb(SEGMENTS, DRAWN)
        deviation = math.sqrt(expected * (1 - expected) / DRAWS)
        assert abs(share_missed(folder, falsified) - expected) <= 4 * deviation
        shutil.rmtree(folder)
