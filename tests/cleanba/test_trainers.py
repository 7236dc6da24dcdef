"""Trainers as a user runs them: the same bits, clear refusals, loud failures."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cleanba.record import read_run

from .conftest import ROOT, SLURM, lines, outcome

ARCHITECTURES = [
    ("ppo", "--no-concurrency"),
    ("ppo", "--concurrency"),
    ("impala", "--no-concurrency"),
    ("impala", "--concurrency"),
]


@pytest.mark.parametrize(("algorithm", "architecture"), ARCHITECTURES)
def test_same_seed_same_bits_on_the_same_and_on_another_layout(train, algorithm, architecture):
    layouts = {
        "first": ("--num-actor-threads", 1),
        "again": ("--num-actor-threads", 1),
        "other": ("--num-actor-threads", 3, "--learner-device-ids", 1, 2),
    }
    results = {
        name: outcome(train(algorithm, architecture, *args, "--setting", name))
        for name, args in layouts.items()
    }
    assert results["first"] == results["again"]
    assert results["first"] == results["other"]
    assert len(set(results["first"]["fingerprints"])) == 2048 // (8 * 16)
    other_seed = outcome(train(algorithm, architecture, "--num-actor-threads", 1, "--seed", 2))
    assert not set(results["first"]["fingerprints"]) & set(other_seed["fingerprints"])
    lag = 1 if architecture == "--concurrency" else 0
    for rollout in results["first"]["rollouts"]:
        assert rollout["versions"] == [[rollout["version_first"], rollout["steps"]]]
        promised = lag if rollout["rollout"] > 1 else 0
        assert rollout["learner_version"] - rollout["version_first"] == promised


def test_same_bits_on_atari_with_one_core_and_two(train):
    # The ResNet's orthogonal initialisation differs between one and two BLAS threads unless they
    # are pinned, so BLAS must be free to take them here.
    env = {k: v for k, v in os.environ.items() if k != "OPENBLAS_NUM_THREADS"}
    args = (
        "--env-id", "Breakout-v5", "--total-timesteps", "128", "--num-envs", "4",
        "--num-env-groups", "2",
    )  # fmt: skip
    cores = sorted(os.sched_getaffinity(0))
    results = {}
    for name, mask in (("one", cores[:1]), ("all", cores)):
        command = train.command("impala", *args, "--num-minibatches", 2, "--setting", name)
        os.sched_setaffinity(0, mask)
        try:
            subprocess.run(command, check=True, cwd=train.runs_dir, capture_output=True, env=env)
        finally:
            os.sched_setaffinity(0, cores)
        (folder,) = train.runs_dir.glob(f"default/*__{name}__*")
        assert read_run(folder).info["hardware"]["cpu_affinity"] == mask
        results[name] = outcome(folder)
    assert results["one"] == results["all"]


def test_a_record_holds_what_its_description_says(train):
    folder = train("ppo", "--num-actor-threads", 2)
    run = read_run(folder)
    assert run.completed
    assert run.problems == []
    assert folder.name == "cleanba_ppo-sync__a0-l0-d1-t2__CartPole-v1__s1"
    description = (ROOT / "docs" / "run-record.md").read_text()
    documented = set(re.findall(r"`(\w+)`", description))
    for kind in ("episodes", "updates", "rollouts"):
        for row in run.lines(kind):
            assert set(row) <= documented, set(row) - documented
    assert set(run.info) <= documented, set(run.info) - documented
    assert set(run.info["hardware"]) <= documented
    steps = [row["step"] for row in run.lines("updates")]
    assert steps == list(range(128, 2049, 128))
    assert [row["version"] for row in run.lines("updates")] == list(range(2, 18))
    rollouts = run.lines("rollouts")
    assert sum(row["steps"] for row in rollouts) == 2048
    returns = [row["return"] for row in run.lines("episodes")]
    assert returns == [row["length"] for row in run.lines("episodes")]  # so it is in CartPole


def test_tensorboard_has_the_names_that_cleanba_users_know(train):
    folder = train("impala")
    board = EventAccumulator(str(folder / "tensorboard"))
    board.Reload()
    assert {
        "charts/avg_episodic_return", "charts/avg_episodic_length", "charts/SPS",
        "charts/SPS_update", "charts/learning_rate", "losses/value_loss", "losses/policy_loss",
        "losses/entropy", "losses/loss", "stats/rollout_queue_get_time",
        "stats/params_queue_get_time", "stats/rollout_queue_put_time", "stats/rollout_time",
        "stats/inference_time", "stats/env_recv_time", "stats/training_time",
        "stats/rollout_params_queue_get_time_diff",
    } <= set(board.Tags()["scalars"])  # fmt: skip
    assert [e.step for e in board.Scalars("charts/SPS")] == [
        row["step"] for row in lines(folder, "updates")
    ]
    assert "hyperparameters/text_summary" in board.Tags()["tensors"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--env-id", "CartPol-v1"), "CartPole-v1"),
        (("--env-id", "Pendulum-v1"), "discrete actions"),
        (("--learner-device-ids", 5, "--xla-host-devices", 2), "device 5 is not there"),
        (("--num-actor-threads", 5), "5 actor threads"),
        (("--num-env-groups", 3), "--num-env-groups 3: must divide"),
        (("--num-minibatches", 7), "--num-minibatches 7: must divide"),
        (("--microbatch-size", 7), "--microbatch-size 7: must divide"),
        (("--total-timesteps", 10), "--total-timesteps 10"),
        (("--num-steps", 0), "--num-steps 0"),
        (("--seed", -1), "--seed -1"),
        (("--local-num-envs", 3), "give one of them"),
        (("--network", "resnet"), "choose mlp"),
        (("--distributed",), "SLURM_PROCID"),
        (("--no-such-flag",), "--no-such-flag"),
        (("--learning-rate", "fast"), "fast"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2_and_writes_nothing(train, args, message):
    stderr = train("ppo", *args, code=2)
    assert stderr.startswith("error: ")
    assert stderr.count("\n") == 1, stderr
    assert message in stderr
    assert not list(train.runs_dir.iterdir())


def test_an_existing_run_is_refused_and_kept_unless_told_otherwise(train):
    folder = train("ppo")
    before = (folder / "run.json").read_bytes()
    assert "--overwrite" in train("ppo", code=2)
    assert (folder / "run.json").read_bytes() == before
    assert train("ppo", "--overwrite") == folder
    assert (folder / "run.json").read_bytes() != before


FAILING = """
import sys
from cleanba import actor_learner, cleanba_ppo, groupwise
from cleanba.command_line import run_command_line
{patch}
run_command_line(cleanba_ppo.Args, cleanba_ppo.main, "")
"""

ACTOR_FAILS = """
receive = actor_learner.EnvGroup.receive
def broken(self, t, calls=[0]):
    calls[0] += 1
    if calls[0] == 300:
        raise ValueError("planted in an actor")
    return receive(self, t)
actor_learner.EnvGroup.receive = broken
"""

LEARNER_FAILS = """
spread = groupwise.GroupExchange.spread
def broken(self, tree, calls=[0]):
    calls[0] += 1
    if calls[0] == 40:
        raise ValueError("planted in the learner")
    return spread(self, tree)
groupwise.GroupExchange.spread = broken
"""


@pytest.mark.parametrize("concurrency", ["--concurrency", "--no-concurrency"])
@pytest.mark.parametrize(
    ("where", "patch"), [("an actor", ACTOR_FAILS), ("the learner", LEARNER_FAILS)]
)
def test_a_failure_in_any_thread_ends_the_run_with_that_error(train, where, patch, concurrency):
    command = train.command("ppo", concurrency)
    command[1:2] = ["-c", FAILING.format(patch=patch)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert f"ValueError: planted in {where}" in done.stderr
    (folder,) = [p.parent for p in train.runs_dir.glob("*/*/run.json")]
    run = read_run(folder)
    assert run.info["status"] == "failed"
    assert run.info["error"] == f"ValueError: planted in {where}"
    assert len(run.lines("updates")) < 16


def test_a_loss_that_is_not_finite_ends_the_run(train):
    assert "FloatingPointError: the loss of update" in train(
        "ppo", "--learning-rate", "1e38", "--max-grad-norm", "1e30", code=1
    )
    (folder,) = [p.parent for p in train.runs_dir.glob("*/*/run.json")]
    assert read_run(folder).info["status"] == "failed"


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["SIGINT", "SIGTERM"]
)
def test_an_interrupted_run_leaves_a_readable_record(train, number, code):
    process = train.start("ppo", "--total-timesteps", 10_000_000)
    deadline = time.time() + 120
    while not any(p.stat().st_size for p in train.runs_dir.glob("*/*/updates.jsonl")):
        assert time.time() < deadline
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == code
    (folder,) = [p.parent for p in train.runs_dir.glob("*/*/run.json")]
    run = read_run(folder)
    assert run.info["status"] == "interrupted"
    for kind in ("episodes", "updates", "rollouts"):
        assert run.lines(kind)


# Of the README of the original Cleanba; the Slurm lines have a test of their own.
README_COMMANDS = """
python cleanba/cleanba_ppo.py --actor-device-ids 0 --learner-device-ids 0 --local-num-envs 60 --track
python cleanba/cleanba_ppo.py --actor-device-ids 0 --learner-device-ids 0 1 --local-num-envs 60
python cleanba/cleanba_ppo.py --actor-device-ids 0 --learner-device-ids 1 2 --local-num-envs 60
python cleanba/cleanba_ppo.py --actor-device-ids 0 --learner-device-ids 1 2 3
python cleanba/cleanba_ppo.py --actor-device-ids 0 --learner-device-ids 1 2 3 4 --local-num-envs 60
python cleanba/cleanba_ppo.py --actor-device-ids 0 --learner-device-ids 1 2 3 4 5 6 --local-num-envs 60
python cleanba/cleanba_ppo.py --distributed --learner-device-ids 1 2 3 --local-num-envs 60 --track --save-model --upload-model
""".strip().splitlines()  # noqa: E501

PREPARE = """
import sys, dataclasses
from cleanba import cleanba_{name} as trainer, preparation
from cleanba.command_line import parse
args = parse(trainer.Args, sys.argv[1:], "")
units = args.num_steps if "{name}" == "ppo" else 1
setup = preparation.prepare_run(args, name="x", default_num_envs=1, units_per_env=units, images_per_unit=1)
print(setup.num_envs, setup.layout.num_groups, len(setup.layout.actors))
"""


@pytest.mark.parametrize("name", ["ppo", "impala"])
def test_the_command_lines_of_the_cleanba_readme_are_taken_verbatim(tmp_path, name):
    largest = README_COMMANDS[5]  # a0-l1,2,3,4,5,6-d1
    done = subprocess.run(
        [sys.executable, "-c", PREPARE.format(name=name), *shlex.split(largest)[2:]],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["120", "8" if name == "ppo" else "6", "2"]
    check = (
        f"import sys\nfrom cleanba import cleanba_{name} as t\n"
        "from cleanba.command_line import parse\n"
        "[parse(t.Args, line.split()[2:], '') for line in sys.stdin]"
    )
    done = subprocess.run(
        [sys.executable, "-c", check],
        input="\n".join(README_COMMANDS),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("algorithm", ["ppo", "impala"])
def test_help_has_a_sentence_for_every_flag(train, algorithm):
    command = [*train.command(algorithm, small=False)[:2], "--help"]
    env = os.environ | {"COLUMNS": "200", "NO_COLOR": "1"}
    text = subprocess.run(command, capture_output=True, text=True, env=env, check=True).stdout
    flags = re.findall(r"^│\s+(--[a-z-]+)(.*?)\s*│$((?:\n│\s{6,}.*│$)*)", text, re.MULTILINE)
    assert len(flags) > 40
    for flag in ("--actor-device-ids", "--local-num-envs", "--concurrency", "--distributed"):
        assert flag in text


# As printed in the README of Cleanba, but for CUDA_VISIBLE_DEVICES and the job's id.
SLURM_README = shlex.split(
    "--distributed --actor-device-ids 0 --learner-device-ids 1 2 3 --local-num-envs 60"
)


def test_the_two_process_command_lines_of_the_readme_give_the_bits_of_one_process(train):
    # two updates, of a network and a rollout that a CPU can compute
    small = (
        "--num-steps", "16", "--total-timesteps", "7680", "--network", "nature", "--channels", "4",
        "4", "4", "--hiddens", "16", "--fingerprint-every", "1", "--no-progress",
    )  # fmt: skip
    single = outcome(train("ppo", "--num-envs", "240", *small, small=False))
    processes = [
        train.start(
            "ppo", *SLURM_README, *small, small=False,
            env=os.environ | SLURM | {"SLURM_PROCID": str(rank)},
        )
        for rank in range(2)
    ]  # fmt: skip
    for process in processes:
        _, stderr = process.communicate(timeout=300)
        assert process.returncode == 0, stderr
    (folder,) = [p.parent for p in train.runs_dir.glob("*/*-d2-*/run.json")]
    assert outcome(folder) == single
    assert len(set(single["fingerprints"])) == 2


def test_memory_does_not_grow_with_steps(train):
    process = train.start(
        "impala", "--total-timesteps", 310_000, "--num-envs", 32, "--num-env-groups", 1,
        "--num-actor-threads", 1, "--num-steps", 20, "--fingerprint-every", 100,
    )  # fmt: skip
    sizes = {}
    watched = psutil.Process(process.pid)
    while process.poll() is None:
        for path in train.runs_dir.glob("*/*/updates.jsonl"):
            tail = path.read_bytes()[-2000:].splitlines()
            step = json.loads(tail[-2])["step"] if len(tail) > 2 else 0
            for mark in (100_000, 300_000):
                if step >= mark and mark not in sizes:
                    sizes[mark] = watched.memory_info().rss
        time.sleep(0.02)
    assert process.returncode == 0, process.communicate()[1]
    assert sizes[300_000] <= 1.05 * sizes[100_000], sizes


def test_a_saved_model_is_evaluated_and_filmed(train):
    folder = train(
        "impala",
        "--save-model",
        "--capture-video",
        "--track",
        env={"WANDB_MODE": "offline", "WANDB_SILENT": "true"},
    )
    assert (folder / "videos" / "CartPole-v1.mp4").stat().st_size > 1000
    assert list(train.runs_dir.glob("wandb/offline-run-*"))
    evaluate = [sys.executable, "-m", "cleanba.evaluate"]
    done = subprocess.run([*evaluate, str(folder)], capture_output=True, text=True)
    assert re.match(r"CartPole-v1: mean return [\d.]+ \+/- [\d.]+ over 10 episodes", done.stdout)
    bad = train.runs_dir / "bad.cleanrl_model"
    bad.write_bytes(b"\x80\x04garbage")
    for path in (bad, train.runs_dir / "none"):
        done = subprocess.run([*evaluate, str(path)], capture_output=True, text=True)
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1
        assert str(path) in done.stderr


def test_a_record_names_no_user_host_or_secret(train):
    folder = train("ppo", env={"WANDB_API_KEY": "s3cr3t-key", "SECRET_TOKEN": "s3cr3t-token"})
    host = os.uname().nodename
    for path in Path(folder).rglob("*"):
        assert host not in path.name
        if path.is_file():
            content = path.read_bytes()
            assert b"s3cr3t" not in content
            assert os.path.expanduser("~").encode() + b"/" not in content
            assert host == "localhost" or len(host) < 4 or host.encode() not in content
