"""A certificate is given if all layouts give the same bits, and only then."""

import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from cleanba.audit import certify, matrix
from cleanba.audit.certificate import Part, Row
from cleanba.exact.placement import cpu_model
from cleanba.record import checkpoints
from cleanba.run.command_line import BadInput, parse
from cleanba.run.log import versions
from tests.cleanba.conftest import ROOT

# A trainer whose action keys depend on the number of actor threads.
PLANTED = """
from cleanba import cleanba_impala, training
from cleanba.run.command_line import run_command_line

def main(args):
    key = training.stream_key
    def planted(seed, stream, group=0):
        if stream == training.ACTION_STREAM:
            group += 100 * (args.hardware.num_actor_threads - 1)
        return key(seed, stream, group)
    training.stream_key = planted
    cleanba_impala.main(args)

run_command_line(cleanba_impala.Args, main, "")
"""


def arguments(out, *args):
    return [
        "--algo", "impala", "--architecture", "cleanba", "--env-id", "CartPole-v1", "--updates", "4",
        "--out", str(out), "--name", "x", *args,
    ]  # fmt: skip


def run(out, *args):
    return subprocess.run(
        [sys.executable, "-m", "cleanba.audit.certify", *arguments(out, *args)],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )


@pytest.mark.soak
@pytest.mark.usefixtures("compiled_anew")
def test_layouts_that_give_the_same_bits_are_certified(tmp_path):
    layouts = ["a0-l0,1,2,3-d1-t4", "a0-l0-d2-t1", "a0-l0-d1-t1-c1", "a0-l0-d1-t2-pool16"]
    done = run(tmp_path, "--layouts", *layouts)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every layout gave the same bits" in done.stdout
    certificate = json.loads((tmp_path / "x.json").read_text())
    (part,) = certificate["configurations"]
    rows = {row["layout"]: row for row in part["layouts"]}
    assert list(rows) == ["a0-l0-d1-t1", *(x.name for x in matrix.FULL if x.name in layouts)]
    assert {row["updates"] for row in rows.values()} == {4}
    assert len({row["fingerprint"] for row in rows.values()}) == 1
    page = (tmp_path / "x.md").read_text()
    assert "5 of 5 runs gave the bits of their reference" in page
    assert "Arithmetic: portable" in page
    assert str(tmp_path) not in page + json.dumps(certificate)


@pytest.mark.soak
@pytest.mark.usefixtures("compiled_anew")
def test_a_collective_mean_over_devices_is_not_certified(tmp_path):
    done = run(tmp_path, "--reduction", "psum", "--layouts", "a0-l1,2-d1-t2", "a0-l1-d1-t1")
    assert done.returncode == 1, done.stdout + done.stderr
    rows = json.loads((tmp_path / "x.json").read_text())["configurations"][0]["layouts"]
    verdicts = {row["layout"]: row["verdict"] for row in rows}
    assert verdicts["a0-l1-d1-t1"] == "same bits"  # one device is one device
    assert "different from update 1 on: ['params']" in verdicts["a0-l1,2-d1-t2"]
    # other bits, but the same mean: a gradient of half of the data would be off by far more
    difference = re.search(r"by up to (\S+) where", verdicts["a0-l1,2-d1-t2"])
    assert 0 < float(difference[1]) < 1e-6


@pytest.mark.soak
def test_a_planted_seed_that_depends_on_the_layout_is_caught(tmp_path):
    (tmp_path / "cleanba_impala.py").write_text(PLANTED)
    done = run(tmp_path, "--trainers", str(tmp_path), "--layouts", "a0-l0-d1-t2")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "different from update 1 on" in done.stdout


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("", "default"),
        ("--quick", "quick"),
        ("--quick --updates 1", "quick-updates-1"),
        ("--algo ppo --num-envs 16 --num-steps 8 --seed 2", "ppo-num-envs-16-num-steps-8-seed-2"),
        ("--layouts a0-l0-d1-t2", "a0-l0-d1-t2"),
        ("--trainers elsewhere", "other-trainers"),
        ("--out elsewhere --jobs 1 --resume", "default"),
    ],
)
def test_a_certificate_is_named_after_its_arguments(words, name):
    assert certify.default_name(parse(certify.Args, words.split())) == name


def test_a_name_that_leads_elsewhere_is_refused():
    with pytest.raises(BadInput, match="--name 'a/b': becomes part of a folder's name"):
        certify.check(certify.Args(name="a/b"))


@pytest.mark.slow
def test_a_run_that_fails_is_no_certificate(tmp_path):
    (tmp_path / "cleanba_impala.py").write_text("raise SystemExit('planted')")
    done = run(tmp_path, "--trainers", str(tmp_path), "--layouts", "a0-l0-d1-t2")
    assert done.returncode == 1
    assert "failed: exit code 1: planted" in done.stdout


def test_a_damaged_checkpoint_leaves_a_difference_unlocated_and_ends_no_certificate(
    tmp_path, monkeypatch
):
    checkpoints.save(
        tmp_path, {"params": np.ones(2)}, update=3, wall_time=1.0, sizes={}, digests=[], pinned={}, keep="all"
    )  # fmt: skip
    (arrays,) = tmp_path.glob("checkpoints/*/arrays.npz")
    arrays.write_bytes(arrays.read_bytes()[:-1])
    trials = [certify.Trial(setting, 1.0, SimpleNamespace(path=tmp_path), None) for setting in "ab"]
    monkeypatch.setattr(certify, "run_trials", lambda *_: trials)
    program = certify.Program(tmp_path / "trainer.py", {})
    verdict = certify.locate(program, ("a", "b"), 3, tmp_path, 1)
    assert verdict.startswith("parameters differ from update 3 on; not located: ")
    assert "arrays.npz has changed" in verdict


REVISION = "0123456789abcdef"


@pytest.fixture
def interrupted(tmp_path, monkeypatch):
    """Interrupt a certificate of PPO and IMPALA in its second configuration.

    Returns:
      What was trained, on which machine.
    """
    machine = SimpleNamespace(trained=[], processor=cpu_model(), versions=versions(["jax"]))

    def train(args, configuration, settings):
        machine.trained.append(configuration.algo)
        if machine.trained == ["ppo", "impala"]:
            raise KeyboardInterrupt
        row = Row(layout="a0-l0-d1-t1", updates=4, seconds=1.0, fingerprint="ab", episodes=1,
                  verdict="reference", same=True)  # fmt: skip
        return Part(configuration=configuration.name, command=[], hyperparameters={},
                    versions=machine.versions, device_kind=machine.processor, revision=REVISION,
                    layouts=[row], same=True)  # fmt: skip

    monkeypatch.setattr(certify, "certify", train)
    monkeypatch.setattr(certify, "source_revision", lambda folder: REVISION)
    with pytest.raises(KeyboardInterrupt):
        certify.main(parse(certify.Args, both_algorithms(tmp_path), ""))
    return machine


def both_algorithms(out, *args):
    return arguments(out, "--algo", "ppo", "impala", "--architecture", "sync", *args)


def test_an_interrupted_certificate_continues_after_its_last_completed_configuration(
    tmp_path, interrupted
):
    assert not (tmp_path / "x.json").exists()
    certify.main(parse(certify.Args, both_algorithms(tmp_path, "--resume"), ""))
    assert interrupted.trained == ["ppo", "impala", "impala"]
    made = json.loads((tmp_path / "x.json").read_text())
    names = [part["configuration"] for part in made["configurations"]]
    assert names == ["ppo sync CartPole-v1 mlp", "impala sync CartPole-v1 mlp"]
    assert {path.name for path in tmp_path.iterdir()} == {"x.json", "x.md"}


@pytest.mark.parametrize(
    ("args", "revision", "message"),
    [
        ((), REVISION, "an interrupted certificate; continue it with --resume, or delete it"),
        (("--resume", "--seed", "2"), REVISION, "has other arguments"),
        (("--resume",), "fedcba", f"is of revision {REVISION}, the source of fedcba"),
        (("--resume",), REVISION + "+changes", "the same commit without changes"),
        (("--resume",), "", "the source of unknown"),
    ],
)
def test_an_interrupted_certificate_is_neither_lost_nor_mixed_with_another(
    tmp_path, monkeypatch, interrupted, args, revision, message
):
    monkeypatch.setattr(certify, "source_revision", lambda folder: revision)
    before = (tmp_path / "x.partial.json").read_bytes()
    with pytest.raises(BadInput, match=re.escape(message)):
        certify.main(parse(certify.Args, both_algorithms(tmp_path, *args), ""))
    assert interrupted.trained == ["ppo", "impala"]
    assert (tmp_path / "x.partial.json").read_bytes() == before


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("cpu_model", lambda: "Another", "ran on another processor"),
        ("versions", lambda packages: {"jax": "0"}, "used other versions of packages"),
    ],
)
def test_a_certificate_is_not_continued_on_another_machine(
    tmp_path, monkeypatch, interrupted, name, value, message
):
    monkeypatch.setattr(certify, name, value)
    with pytest.raises(BadInput, match=message):
        certify.main(parse(certify.Args, both_algorithms(tmp_path, "--resume"), ""))
    assert interrupted.trained == ["ppo", "impala"]
    assert not (tmp_path / "x.json").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--env-id", "CartPol-v1"), "CartPole-v1"),
        (("--updates", "0"), "--updates"),
        (("--num-envs", "6"), "multiple of 8"),
        (("--layouts", "a9"), "choose from a0-l0-d1-t1"),
        (("--trainers", "nowhere"), "no cleanba_impala.py there"),
        (("--quick", "--architecture", "sync"), "usual architecture"),
        (("--out", "/dev/null/x"), "--out /dev/null/x: Not a directory"),
        (("--network", "resnet"), "--network resnet: does not fit CartPole-v1"),
        (("--processors", "--platform", "gpu"), "not on --platform gpu"),
    ],
)
def test_bad_input_is_one_line_before_anything_is_trained(tmp_path, monkeypatch, args, message):
    monkeypatch.setattr(certify, "certify", lambda *x: pytest.fail("trained"))
    words = arguments(tmp_path / "out", *args)
    with pytest.raises(BadInput, match=message) as caught:
        certify.main(parse(certify.Args, words, ""))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_trials_on_one_accelerator_do_not_reserve_its_memory(tmp_path, monkeypatch, interrupted):
    variable = "XLA_PYTHON_CLIENT_PREALLOCATE"
    monkeypatch.setenv(variable, "")  # so that it is restored
    monkeypatch.delenv(variable)
    monkeypatch.setattr(certify, "choose_settings", lambda *_: matrix.QUICK)
    certify.main(parse(certify.Args, both_algorithms(tmp_path / "cpu"), ""))
    assert variable not in os.environ
    certify.main(parse(certify.Args, both_algorithms(tmp_path / "gpu", "--platform", "gpu"), ""))
    assert os.environ[variable] == "false"


def test_without_an_emulator_processors_are_refused_with_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(certify.shutil, "which", lambda name: None)
    with pytest.raises(BadInput, match="apt install qemu-user"):
        certify.main(certify.Args(processors=True, out=str(tmp_path)))


def test_processors_are_compared_on_all_networks_as_the_papers_have_them():
    args = certify.Args(processors=True)
    todo = matrix.configurations(args.algo, args.architecture, certify.tasks(args), quick=False)
    assert {x.name for x in todo} == {
        f"{algo} {architecture} {task}"
        for algo in ("ppo", "impala")
        for architecture in ("sync", "cleanba")
        for task in ("CartPole-v1 mlp", "Breakout-v5 nature", "Breakout-v5 resnet")
    }
    assert not any({"channels", "hiddens"} & {*certify.training_options(args, x)} for x in todo)
    assert [x.processor for x in matrix.PROCESSORS] == [
        None, "Haswell", "Broadwell", "EPYC", "EPYC-Rome", "EPYC-Milan",
    ]  # fmt: skip


def test_an_emulated_processor_is_named_in_the_command_and_in_the_setting():
    setting = matrix.PROCESSORS[1]
    command = certify.Program(ROOT / "x.py", {}).command(setting, ROOT)
    assert command[:4] == ["qemu-x86_64", "-cpu", "Haswell", sys.executable]
    assert setting.name == "a0-l0-d1-t1-Haswell"


def test_the_full_matrix_is_what_the_documentation_promises():
    settings = matrix.FULL
    layouts = [x.layout for x in settings]
    one_process = [x for x in layouts if x.processes == 1]
    assert {x.threads for x in one_process} == {1, 2, 3, 4}
    assert {len(x.learners) for x in one_process} == {1, 2, 3, 4}
    assert {bool({*x.actors} & {*x.learners}) for x in layouts} == {True, False}
    assert {len(x.learners) for x in layouts if x.processes == 2} == {1, 2}
    assert {x.cores for x in settings} == {None, 1}
    assert {x.envpool_threads for x in settings} == {None, 1, 2}
    assert {x.xla_cpu_pool_size for x in settings} == {None, 1, 16}
    assert len({x.name for x in matrix.FULL}) == len(matrix.FULL)
    assert {x.name for x in matrix.QUICK} >= {matrix.FULL[0].name}
