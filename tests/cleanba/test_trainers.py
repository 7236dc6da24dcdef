"""Trainers as a user runs them: the same bits, clear refusals, loud failures."""

import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cleanba import cleanba_impala, cleanba_ppo, play
from cleanba.preparation import cut_into_groups
from cleanba.record import read_run
from cleanba.run.command_line import exit_code

from .conftest import SMALL, Trainer, lines, outcome

ARCHITECTURES = [
    ("ppo", "--no-concurrency"),
    ("ppo", "--concurrency"),
    ("impala", "--no-concurrency"),
    ("impala", "--concurrency"),
]
# The other two take as long and differ from these in nothing that is not in one of them.
TWO_ARCHITECTURES = [
    pytest.param(
        *pair, marks=[pytest.mark.soak] if pair in (ARCHITECTURES[1], ARCHITECTURES[2]) else []
    )
    for pair in ARCHITECTURES
]


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "architecture"), TWO_ARCHITECTURES)
@pytest.mark.usefixtures("compiled_anew")
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


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
@pytest.mark.usefixtures("compiled_anew")
def test_same_bits_on_atari_with_one_core_and_two(train):
    # XLA's pool and the kernels have as many threads as cores.
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
            subprocess.run(command, check=True, cwd=train.runs_dir, capture_output=True)
        finally:
            os.sched_setaffinity(0, cores)
        (folder,) = train.runs_dir.glob(f"default/*__{name}__*")
        assert read_run(folder).info.hardware["cpu_affinity"] == mask
        results[name] = outcome(folder)
    assert results["one"] == results["all"]


SECRETS = {"WANDB_API_KEY": "s3cr3t-key", "SECRET_TOKEN": "s3cr3t-token"}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The folder of a run on two actor threads, which knew secrets."""
    train = Trainer(tmp_path_factory.mktemp("recorded"))
    return train("ppo", "--num-actor-threads", 2, env=SECRETS)


@pytest.mark.parametrize(
    ("module", "units_per_env", "accumulation", "size"),
    [
        (cleanba_ppo, 16, 1, 16 * 4 // 2),
        (cleanba_ppo, 16, 4, 16 * 4 // 2 // 4),
        (cleanba_impala, 1, 2, 4 // 2 // 2),
    ],
)
def test_a_minibatch_has_an_equal_part_of_each_group(module, units_per_env, accumulation, size):
    args = module.Args(
        num_env_groups=2, num_minibatches=2, gradient_accumulation_steps=accumulation
    )
    assert cut_into_groups(args, 8, units_per_env) == (2, size)


@pytest.mark.slow
def test_a_run_is_named_by_its_layout(recorded):
    assert recorded.name == "cleanba_ppo-sync__a0-l0-d1-t2__CartPole-v1__s1"


@pytest.mark.slow
def test_tensorboard_has_the_names_that_cleanba_users_know(recorded):
    board = EventAccumulator(str(recorded / "tensorboard"))
    board.Reload()
    assert {
        "charts/avg_episodic_return", "charts/avg_episodic_length", "charts/SPS",
        "charts/SPS_update", "charts/learning_rate", "losses/value_loss", "losses/policy_loss",
        "losses/entropy", "losses/loss", "stats/rollout_queue_get_time",
        "stats/params_queue_get_time", "stats/rollout_queue_put_time", "stats/rollout_time",
        "stats/inference_time", "stats/env_recv_time", "stats/training_time",
        "stats/rollout_params_queue_get_time_diff",
    } <= set(board.Tags()["scalars"])  # fmt: skip
    updates = lines(recorded, "updates")
    assert [e.step for e in board.Scalars("charts/SPS")] == [
        row["step"] for number, row in enumerate(updates, 1) if number in (10, 20, len(updates))
    ]
    assert "hyperparameters/text_summary" in board.Tags()["tensors"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--env-id", "Pendulum-v1"), "discrete actions"),
        (("--num-actor-threads", 5), "5 actor threads"),
        (("--num-env-groups", 3), "--num-env-groups 3: must divide"),
        (("--num-minibatches", 7), "--num-minibatches 7: must divide"),
        (("--total-timesteps", 10), "--total-timesteps 10"),
        (("--num-steps", 0), "--num-steps 0: must be 1 or more"),
        (("--update-epochs", 0), "--update-epochs 0: must be 1 or more"),
        (("--num-actor-threads", 0), "--num-actor-threads 0: must be 1 or more"),
        (("--envpool-threads", 0), "--envpool-threads 0: must be 1 or more"),
        (("--fingerprint-every", 0), "--fingerprint-every 0: must be 1 or more"),
        (("--checkpoint-every", -1), "--checkpoint-every -1: must be 0 or more"),
        (("--resume", "--overwrite"), "give one"),
        (("--seed", -1), "--seed -1"),
        (("--local-num-envs", 3), "give one of them"),
        (("--distributed",), "SLURM_PROCID"),
        (("--learning-rate", "fast"), "fast"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2_and_writes_nothing(tmp_path, capsys, args, message):
    argv = [*SMALL, "--runs-dir", str(tmp_path), *map(str, args)]
    assert exit_code(cleanba_ppo.Args, cleanba_ppo.main, argv) == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith("error: ")
    assert stderr.count("\n") == 1, stderr
    assert message in stderr
    assert not list(tmp_path.iterdir())


def test_a_video_without_imageio_is_refused_before_training(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(play, "find_spec", lambda _: None)
    argv = [*SMALL, "--runs-dir", str(tmp_path), "--capture-video"]
    assert exit_code(cleanba_ppo.Args, cleanba_ppo.main, argv) == 2
    assert "--capture-video: imageio is not installed" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--learner-device-ids", 5, "--xla-host-devices", 2), "device 5 is not there"),
        (("--microbatch-size", 7), "--microbatch-size 7: must divide"),
        pytest.param(
            ("--platform", "gpu"),
            "--platform gpu: jax found only cpu devices",
            marks=pytest.mark.skipif(
                bool(shutil.which("nvidia-smi")), reason="with a GPU it is no error"
            ),
        ),
    ],
)
def test_bad_input_that_shows_once_jax_has_started_writes_nothing_either(train, args, message):
    stderr = train("ppo", *args, code=2)
    assert stderr.startswith("error: ")
    assert stderr.count("\n") == 1, stderr
    assert message in stderr
    assert not list(train.runs_dir.iterdir())


FAILING = """
import sys
from cleanba import actor_learner, cleanba_ppo
from cleanba.exact import groups
from cleanba.run.command_line import run_command_line
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
spread = groups.GroupExchange.spread
def broken(self, tree, calls=[0]):
    calls[0] += 1
    if calls[0] == 40:
        raise ValueError("planted in the learner")
    return spread(self, tree)
groups.GroupExchange.spread = broken
"""


@pytest.mark.slow
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
    assert run.info.status == "failed"
    assert run.info.error == f"ValueError: planted in {where}"
    assert len(run.updates()) < 16


TRAINERS = {"ppo": cleanba_ppo, "impala": cleanba_impala}


PREPARE = """
import sys
from cleanba import cleanba_{name} as trainer
from cleanba.run.command_line import parse
setup = trainer.prepare(parse(trainer.Args, sys.argv[1:]))
print(setup.num_envs, setup.placement.num_groups, len(setup.placement.actors))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINERS)
def test_the_largest_layout_of_the_cleanba_readme_is_laid_out(tmp_path, name):
    """In a process of its own, which starts jax with seven devices."""
    largest = "--actor-device-ids 0 --learner-device-ids 1 2 3 4 5 6 --local-num-envs 60"
    done = subprocess.run(
        [sys.executable, "-c", PREPARE.format(name=name), *largest.split()],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["120", "8" if name == "ppo" else "6", "2"]


@pytest.mark.parametrize("name", TRAINERS)
def test_help_has_a_sentence_for_every_flag(monkeypatch, capsys, name):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")
    assert exit_code(TRAINERS[name].Args, TRAINERS[name].main, ["--help"]) == 0
    text = re.sub("[│╭╮╰╯─]", "", capsys.readouterr().out)
    entries = re.split(r"^ (?=-)", text, flags=re.MULTILINE)[1:]
    sentences = dict(re.split(r"\s{2,}", entry, maxsplit=1) for entry in entries)
    assert len(sentences) > 40
    for flag, sentence in sentences.items():
        own = sentence.partition("(default:")[0].strip()
        assert own.endswith(".") or flag == "-h, --help", flag


# As printed in the README of Cleanba, but for CUDA_VISIBLE_DEVICES and the job's id.
SLURM_README = shlex.split(
    "--distributed --actor-device-ids 0 --learner-device-ids 1 2 3 --local-num-envs 60"
)


@pytest.mark.soak
@pytest.mark.usefixtures("compiled_anew")
def test_the_two_process_command_lines_of_the_readme_give_the_bits_of_one_process(train, slurm):
    # two updates, of a network and a rollout that a CPU can compute
    small = (
        "--num-steps", "16", "--total-timesteps", "7680", "--network", "nature", "--channels", "4",
        "4", "4", "--hiddens", "16", "--fingerprint-every", "1", "--no-progress",
    )  # fmt: skip
    single = outcome(train("ppo", "--num-envs", "240", *small, small=False))
    processes = [
        train.start(
            "ppo", *SLURM_README, *small, small=False,
            env=os.environ | slurm | {"SLURM_PROCID": str(rank)},
        )
        for rank in range(2)
    ]  # fmt: skip
    for process in processes:
        _, stderr = process.communicate(timeout=300)
        assert process.returncode == 0, stderr
    (folder,) = [p.parent for p in train.runs_dir.glob("*/*-d2-*/run.json")]
    assert outcome(folder) == single
    assert len(set(single["fingerprints"])) == 2


@pytest.mark.soak
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


@pytest.mark.slow
def test_a_record_names_no_user_host_or_secret(recorded):
    host = os.uname().nodename
    for path in recorded.rglob("*"):
        assert host not in path.name
        if path.is_file():
            content = path.read_bytes()
            assert b"s3cr3t" not in content
            assert os.path.expanduser("~").encode() + b"/" not in content
            assert host == "localhost" or len(host) < 4 or host.encode() not in content
