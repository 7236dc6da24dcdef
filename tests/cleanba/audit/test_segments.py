"""Segments of an honest run are verified on any layout; falsified ones are refuted once they are drawn."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest

from cleanba.audit.replay import judge
from cleanba.audit.segments import (
    Mismatch,
    NotRepeatable,
    Segment,
    chance_of_missing,
    draw,
    segments_of,
)
from cleanba.audit.simulation import Simulation
from cleanba.audit.verification import Verified, repetition, verify
from cleanba.record import read_run
from tests import forging
from tests.cleanba.conftest import Trainer
from tests.sealing import seal

EVERY = ["--checkpoint-every", "4", "--keep-checkpoints", "all"]
ATARI = [
    "--env-id", "Breakout-v5", "--total-timesteps", "256", "--network", "nature", "--channels", "4", "4", "4",
    "--hiddens", "16", "--num-steps", "4",
]  # fmt: skip


@pytest.fixture
def repeat(auditor):
    """Repeat segments of a record."""
    return lambda folder, *segments: auditor.submit(repeat_segments, folder, segments).result()


def repeat_segments(folder: str, segments: list[tuple[int, int]]) -> Verified:
    run = read_run(folder)
    return verify(run, repetition(run), [Segment(*pair) for pair in segments])


def prepare_repetition(folder: str) -> None:
    repetition(read_run(folder))


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    """The record of a run of 16 updates, in four segments."""
    return Trainer(tmp_path_factory.mktemp("honest"))("ppo", *EVERY)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        ("ppo", ["--concurrency", "--num-actor-threads", "2", "--learner-device-ids", "0", "1"]),
        ("ppo", ["--no-concurrency", *ATARI]),
        ("impala", ["--concurrency", *ATARI, "--num-actor-threads", "4"]),
        ("impala", ["--no-concurrency", "--num-env-groups", "1", "--num-actor-threads", "1"]),
        ("impala", ["--compat", "alignment", "mask"]),
    ],
)
def test_every_segment_of_an_honest_run_is_repeated_to_the_bit(train, repeat, algorithm, options):
    folder = train(algorithm, *options, *EVERY)
    run = read_run(folder)
    segments = segments_of(run, run.updates())
    assert [s.start for s in segments] == list(range(0, len(run.updates()), 4))
    done = repeat(folder, *segments[1::2])
    assert done.updates == sum(end - start for start, end in segments[1::2])
    assert done.episodes == len(run.episodes())
    assert repeat(folder, *segments).updates == len(run.updates())


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "bad"), [("tuned", [1]), ("untrained", [1, 2, 3])])
def test_falsified_training_is_refuted_where_it_was_falsified_and_only_there(
    tmp_path, repeat, kind, bad
):
    folder = forging.train_falsely(kind, 6, tmp_path, *EVERY)
    run = read_run(folder)
    verify(run, Simulation(run, 1))  # its episodes are real
    for number, segment in enumerate(forging.segments(folder)):
        if number in bad:
            with pytest.raises(Mismatch, match=r"^update \d+: "):
                repeat(folder, segment)
        else:
            repeat(folder, segment)


def change_metric(folder):
    forging.change_row(folder, 6, approx_kl=0.25)
    return "update 6: approx_kl"


def change_fingerprint(folder):
    forging.change_row(folder, 6, fingerprint="0" * 64)
    return "update 6: the parameters differ"


def take_checkpoint_of_another_update(folder):
    there = folder / "checkpoints"
    for name in ("arrays.npz", "checkpoint.json"):
        shutil.copy(there / "00000008" / name, there / "00000004" / name)
    return "checkpoint of update 4: its arrays differ"


def perturb_checkpoint(folder):
    forging.change_checkpoint(folder, 4, forging.flip_a_bit)
    return "update 4: parameters or optimizer state differ"


def claim_another_hyperparameter(folder):
    forging.change_info(folder, "hyperparameters", gae_lambda=0.9)
    return "update 1: "


@pytest.mark.slow
@pytest.mark.parametrize(
    "forge",
    [
        change_metric,
        change_fingerprint,
        take_checkpoint_of_another_update,
        perturb_checkpoint,
        claim_another_hyperparameter,
    ],
)
def test_forged_segments_are_refuted_once_they_are_drawn(honest, repeat, tmp_path, forge):
    folder = tmp_path / "forged"
    message = forging.forged_copy(honest, folder, forge)
    # A checkpoint belongs to the segment that ends with it: rounding may hide where the next one began.
    with pytest.raises(Mismatch, match=message):
        repeat(folder, (0, 4), (4, 8))


def cut_arrays(folder):
    def cut(arrays):
        return {name: np.atleast_1d(array)[..., :1] for name, array in arrays.items()}

    forging.change_checkpoint(folder, 4, cut)


@pytest.mark.slow
def test_a_checkpoint_of_another_network_is_refuted(honest, repeat, tmp_path):
    folder = tmp_path / "forged"
    forging.forged_copy(honest, folder, cut_arrays)
    with pytest.raises(Mismatch, match=r"checkpoint of update 4: .* that of another run"):
        repeat(folder, (4, 8))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "fields", "message"),
    [
        ("versions", {"jax": "0.0.1"}, "its training cannot be repeated: jax '0.0.1'"),
        ("hardware", {"machine": "aarch64"}, "cannot be repeated: machine 'aarch64'"),
        ("hyperparameters", {"hiddens": [10**9]}, "hyperparameters: .*hiddens"),
        ("hyperparameters", {"num_envs": 4096, "num_steps": 65536}, "batches of"),
        ("hyperparameters", {"network": ["mlp"]}, "hyperparameters: "),
        ("hyperparameters", {"num_minibatches": 3}, "--num-minibatches 3"),
        ("hyperparameters", {"xla_cpu_pool_size": 10**6}, "hyperparameters: .*xla_cpu_pool_size"),
        (None, {"program": "os"}, "no module is known that repeats its training"),
    ],
)
def test_training_that_cannot_be_repeated_here_is_named(
    honest, auditor, tmp_path, part, fields, message
):
    info = json.loads((honest / "run.json").read_text())
    (info[part] if part else info).update(fields)
    (tmp_path / "run.json").write_text(json.dumps(info))
    with pytest.raises(NotRepeatable, match=message) as caught:
        auditor.submit(prepare_repetition, tmp_path).result()
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_record_of_other_actions_is_refuted_before_they_reach_an_environment(
    honest, auditor, tmp_path
):
    info = json.loads((honest / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps(info | {"num_actions": 2**16}))
    with pytest.raises(Mismatch, match="CartPole-v1 has 2 actions"):
        auditor.submit(prepare_repetition, tmp_path).result()


@pytest.mark.slow
def test_a_cleanba_run_without_its_actions_is_refuted(honest, tmp_path):
    folder = tmp_path / "stripped"
    shutil.copytree(honest, folder)
    shutil.rmtree(folder / "actions")
    info = json.loads((folder / "run.json").read_text())
    del info["num_actions"]
    (folder / "run.json").write_text(json.dumps(info))
    seal(folder)
    outcome = judge(read_run(folder), segments=1, seed=1)
    assert (outcome.verdict, "records actions" in outcome.reason) == ("refuted", True)


@pytest.mark.slow
def test_the_command_prints_what_was_repeated_and_the_chance_of_missing_falsified_segments(honest):
    command = [sys.executable, "-m", "cleanba.audit.replay", str(honest), "--no-progress"]
    done = subprocess.run(
        [*command, "--segments", "2", "--seed", "7"], capture_output=True, text=True, check=True
    )
    assert "repeated: 8 updates, in 2 of 4 segments: " in done.stdout
    assert "(drawn with --seed 7)" in done.stdout
    # A tenth of the updates fits into one of four segments: 3 of the 6 pairs miss it.
    assert (
        "if 10% of the updates were falsified, this would have missed it with up to 50.0%"
        in done.stdout
    )


@pytest.mark.slow
def test_a_run_is_cut_at_the_checkpoints_that_are_in_its_record(honest, repeat, tmp_path):
    folder = tmp_path / "fewer"
    shutil.copytree(honest, folder)
    shutil.rmtree(folder / "checkpoints" / "00000008")
    (folder / "checkpoints" / "00000012" / "checkpoint.json").unlink()
    assert forging.segments(folder) == [(0, 4), (4, 16)]
    assert repeat(folder, (4, 16)).updates == 12


@pytest.mark.parametrize(
    ("share", "lengths", "drawn"),
    [
        (0.1, [10] * 50, 5),
        (0.5, [3] * 12, 3),
        (0.01, [7] * 20, 5),
        (0.3, [10] * 9 + [4], 4),
        (0.5, [1] * 20 + [500], 5),
        (0.9, [1] * 10 + [5] * 4, 2),
    ],
)
def test_the_chance_of_missing_is_the_share_of_draws_that_miss(share, lengths, drawn):
    rng = np.random.default_rng(0)
    ends = np.cumsum(lengths).tolist()
    segments = [Segment(*pair) for pair in zip([0, *ends], ends, strict=False)]
    # A forger puts the falsified updates into as few segments as possible.
    bad, held = set(), 0
    for segment in sorted(segments, key=lambda s: s.start - s.end):
        if held < share * sum(lengths):
            bad.add(segment)
            held += segment.end - segment.start
    misses = [bad.isdisjoint(draw(segments, drawn, rng)) for _ in range(1000)]
    expected = chance_of_missing(share, segments, drawn)
    deviation = np.sqrt(expected * (1 - expected) / 1000)
    assert abs(np.mean(misses) - expected) <= 3.5 * deviation + 1e-12
    if len(set(lengths)) == 1:
        assert expected <= (1 - share) ** drawn
