import re
import tomllib

import pytest

from baselines import cleanrl_ppo, hts_rl
from cleanba import cleanba_impala, cleanba_ppo, placement
from cleanba.command_line import parse
from experiments import pool, systems
from experiments.study import StudyError, find_study, load_study, study_names

STUDY = """
title = "A study"
question = "Is it?"
[settings.one]
num_actor_threads = 1
actor_device_ids = [0]
learner_device_ids = [0, 1]
host_devices = 2
cores = 2
[[runs]]
systems = ["cleanba_ppo-sync", "cleanba_impala"]
settings = ["one"]
env_ids = ["CartPole-v1"]
seeds = [1, 2]
total_timesteps = 1000
[runs.hyperparameters]
num_envs = 8
anneal_lr = false
"""


def load(tmp_path, text):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return load_study(path)


def test_a_study_is_the_product_of_its_axes_and_names_its_folders(tmp_path):
    study = load(tmp_path, STUDY)
    assert [run.name for run in study.runs] == [
        "cleanba_ppo-sync__one__CartPole-v1__s1",
        "cleanba_ppo-sync__one__CartPole-v1__s2",
        "cleanba_impala__one__CartPole-v1__s1",
        "cleanba_impala__one__CartPole-v1__s2",
    ]
    assert study.name == "mine"
    assert study.question == "Is it?"


def test_a_command_says_the_whole_run(tmp_path):
    sync, _, concurrent, _ = load(tmp_path, STUDY).runs
    words = systems.command(sync, tmp_path)
    assert words[1].endswith("cleanba/cleanba_ppo.py")
    text = " ".join(words)
    for part in (
        "--env-id CartPole-v1 --seed 1 --total-timesteps 1000",
        "--num-envs 8 --no-anneal-lr --no-concurrency",
        "--num-actor-threads 1 --actor-device-ids 0 --learner-device-ids 0 1",
        "--xla-host-devices 2 --study mine --setting one",
        f"--runs-dir {tmp_path}",
    ):
        assert part in text
    assert "--overwrite" not in text
    assert "--overwrite" in systems.command(sync, tmp_path, "--overwrite")
    words = systems.command(concurrent, tmp_path)
    assert words[1].endswith("cleanba/cleanba_impala.py")
    assert "--concurrency" in words


def test_the_commands_of_the_newer_baselines_are_what_their_programs_take(tmp_path):
    text = STUDY.replace("anneal_lr = false", "anneal_lr = true")
    text = text.replace(
        '["cleanba_ppo-sync", "cleanba_impala"]', '["cleanrl_ppo", "hts_rl_a2c", "hts_rl_ppo-sync"]'
    )
    runs = load(tmp_path, text).runs[::2]
    programs = (cleanrl_ppo.Args, hts_rl.Args, hts_rl.Args)
    parsed = [
        parse(program, systems.command(run, tmp_path)[2:], "")
        for run, program in zip(runs, programs, strict=True)
    ]
    for args in parsed:
        assert (args.env_id, args.seed, args.total_timesteps) == ("CartPole-v1", 1, 1000)
        assert (args.num_envs, args.anneal_lr, args.study, args.setting) == (8, True, "mine", "one")
        assert not args.progress
    assert [(a.algorithm, a.schedule, a.num_actors) for a in parsed[1:]] == [
        ("a2c", "hts", 1),
        ("ppo", "synchronous", 1),
    ]


def test_a_setting_can_have_flags_that_one_system_alone_has(tmp_path):
    text = STUDY.replace('["cleanba_ppo-sync", "cleanba_impala"]', '["monobeast"]')
    text = text.replace("num_actor_threads = 1", "num_actor_threads = 12")
    text = text.replace("num_envs = 8\nanneal_lr = false", "batch_size = 4")
    text = text.replace("[[runs]]", "[settings.one.flags]\nlearner_delay_seconds = 0.5\n[[runs]]")
    run = load(tmp_path, text).runs[0]
    words = systems.command(run, tmp_path)
    assert words[1].endswith("baselines/monobeast_study.py")
    assert " ".join(words[2:]) == (
        "--env CartPole-v1 --seed 1 --total-steps 1000 --batch-size 4 --num-actors 12 "
        f"--learner-delay-seconds 0.5 --study mine --xpid one --runs-dir {tmp_path} --no-progress"
    )


def test_a_run_of_several_processes_is_started_by_the_program_that_starts_them(tmp_path):
    text = STUDY.replace("cores = 2", "cores = 2\nprocesses = 2")
    run = load(tmp_path, text).runs[0]
    words = systems.command(run, tmp_path)
    assert "--distributed" in words
    several = pool.in_processes(words, run.setting.processes)
    assert several[1:4] == ["-m", "cleanba.local_processes", "2"]
    assert several[4:] == words[1:]
    assert pool.in_processes(words, 1) == words
    with pytest.raises(StudyError, match="'one' has several processes; monobeast runs in one"):
        systems.check_systems(load(tmp_path, text.replace("cleanba_ppo-sync", "monobeast")).runs)


def test_a_setting_may_differ_by_system(tmp_path):
    text = STUDY.replace("[[runs]]", "[settings.one.systems.cleanba_impala]\ncores = 1\n[[runs]]")
    study = load(tmp_path, text)
    assert {(run.system, run.setting.name, run.setting.cores) for run in study.runs} == {
        ("cleanba_ppo-sync", "one", 2),
        ("cleanba_impala", "one", 1),
    }


def test_the_paper_s_lag_study_is_the_command_lines_of_appendix_g(tmp_path):
    study = load_study(find_study("monobeast_lag"), "paper")
    assert len(study.runs) == 3 * 10
    commands = {r.setting.name: " ".join(systems.command(r, tmp_path)[2:]) for r in study.runs}
    for name, actors in (("control", 80), ("delayed", 80), ("half-actors", 40)):
        for part in (
            "--env Pong-v5", f"--num-actors {actors} ", "--total-steps 10000000", "--epsilon 0.01",
            "--learning-rate 0.0006", "--entropy-cost 0.01", "--batch-size 8",
            "--unroll-length 240", "--num-learner-threads 1",
        ):  # fmt: skip
            assert part in commands[name]
        assert ("--learner-delay-seconds 1.0" in commands[name]) == (name == "delayed")


@pytest.mark.parametrize(
    ("name", "system", "hardware"),
    [  # cores, GPUs, actors: section 5, and the thesis's figures 5.3 and C.2
        ("base", "monobeast", (10, 1, 10)),
        ("base", "moolib", (10, 1, 1)),
        ("base", "cleanba_impala", (10, 1, 2)),
        ("workstation", "monobeast", (80, 1, 80)),
        ("workstation", "moolib", (80, 8, 8)),
        ("workstation", "cleanba_impala", (46, 8, 2)),
        ("moolib_sets", "moolib", (10, 1, 1)),
        ("architectures", "cleanrl_ppo", (10, 1, 1)),
        ("architectures", "cleanba_ppo-sync", (46, 8, 2)),
    ],
)
def test_the_paper_s_sizes_ask_for_the_paper_s_hardware(name, system, hardware):
    runs = [one for one in load_study(find_study(name), "paper").runs if one.system == system]
    given = {(r.setting.cores, r.setting.gpus, r.setting.num_actor_threads) for r in runs}
    assert given == {hardware}
    assert {run.total_timesteps for run in runs} == {50_000_000}
    if system == "monobeast":  # figure 2 alone has smaller batches
        assert {(r.hyperparameters["batch_size"], r.hyperparameters["unroll_length"]) for r in runs} == {
            (32, 20)
        }  # fmt: skip


def test_housekeeping_does_not_make_another_run_but_a_hyperparameter_does():
    planned = ["python", "cleanba/cleanba_ppo.py", "--seed", "1", "--runs-dir", "runs"]
    planned += ["--study", "base"]
    script = "cleanba/cleanba_ppo.py"
    elsewhere = ["/x/cleanba_ppo.py", "--seed", "1", "--runs-dir", "/tmp/x", "--overwrite"]
    elsewhere += ["--study", "base-again"]
    assert systems.same_run(elsewhere, planned, script)
    assert not systems.same_run(["cleanba_ppo.py", "--seed", "2"], planned, script)
    assert systems.same_run(["converted from a log"], planned, script)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("seeds = [1, 2]", "", "lacks 'seeds'"),
        ("seeds = [1, 2]", "seeds = [1, 1]", "more than once"),
        ("seeds = [1, 2]", "seeds = []", "plans no run"),
        ("seeds = [1, 2]", "seeds = 1", "must be of type list"),
        ('settings = ["one"]', 'settings = ["two"]', "'two', not defined"),
        ("cores = 2", "cores = 0", "at least one core"),
        ("cores = 2", "cores = 2\nprocesses = 0", "one process"),
        ("cores = 2", "cores = 2\nprocesses = 3\nnodes = 2", "as many on each of 2 nodes"),
        ("cores = 2", "cores = 2\ncolour = 1", "unknown field 'colour'"),
        ("[runs.hyper", "[targets]\nCartPole-v2 = 4\n[runs.hyper", "a target for 'CartPole-v2'"),
        ("[runs.hyper", "[targets]\nCartPole-v1 = '4'\n[runs.hyper", "must be a number"),
        ('question = "', 'target_episodes = 0\nquestion = "', "target_episodes must be 1 or more"),
        ("cores = 2", "cores = 2\nflags = 1", "flags must be a table"),
        ("title", "titel", "lacks 'title'"),
        (
            "[[runs]]",
            "[settings.one.systems.moolibb]\ncores = 1\n[[runs]]",
            "the setting 'one' is about 'moolibb', which has no run",
        ),
        ("[[runs]]", "[[runs", "mine.toml"),
        ("[[runs]]", "[settings]\ntwo = 3\n[[runs]]", "mine.toml"),  # TOML has one such table
        ("[settings.one]", "[settings]\ntwo = 3\n[settings.one]", "'two' is not a table"),
        ("seeds = [1, 2]", "seeds = ['1']", "seeds must be a list of type int"),
        ("seeds = [1, 2]", "seeds = [true]", "seeds must be a list of type int"),
        ('env_ids = ["CartPole-v1"]', "env_ids = [1]", "env_ids must be a list of type str"),
        ('settings = ["one"]', "settings = [['one']]", "settings must be a list of type str"),
        ('systems = ["cleanba_ppo-sync", "cleanba_impala"]', "systems = 3", "of type list"),
        ('systems = ["cleanba_ppo-sync", "cleanba_impala"]', "systems = [1]", "list of type str"),
        ("learner_device_ids = [0, 1]", "learner_device_ids = ['0']", "list of type int"),
    ],
)
def test_a_study_with_a_mistake_is_refused_in_one_line(tmp_path, old, new, message):
    with pytest.raises(StudyError, match=r"^[^\n]*$") as caught:
        load(tmp_path, STUDY.replace(old, new, 1))
    assert message in str(caught.value)


def test_an_unknown_study_or_system_names_the_nearest(tmp_path):
    with pytest.raises(StudyError, match="did you mean quickstart"):
        find_study("quickstrat")
    study = load(tmp_path, STUDY.replace("cleanba_impala", "cleanba_imapla"))
    with pytest.raises(StudyError, match="did you mean cleanba_impala"):
        systems.check_systems(study.runs)


@pytest.mark.parametrize(
    ("preset", "message"),
    [
        ("[presets.paper]\nminutes = 1\n", "the preset 'paper' lacks 'runs'"),
        ("[[presets.paper.run]]\n", "the preset 'paper' lacks 'runs'"),
        ("[[presets.paper.runs]]\nsystems = 3\n", "a [[runs]] block lacks 'settings'"),
    ],
)
def test_a_mistake_in_a_preset_is_found_whichever_is_asked_for(tmp_path, preset, message):
    text = STUDY.replace("[[runs]]", "[[presets.cpu.runs]]")
    text = text.replace("[runs.hyper", "[presets.cpu.runs.hyper")
    assert load(tmp_path, text).runs
    with pytest.raises(StudyError, match=re.escape(message)):
        load(tmp_path, text + preset)


@pytest.mark.parametrize("name", study_names())
def test_every_study_that_comes_with_the_toolkit_can_be_planned(name):
    path = find_study(name)
    for preset in tomllib.loads(path.read_text()).get("presets", {"cpu": {}}):
        study = load_study(path, preset)
        systems.check_systems(study.runs)
        assert study.runs
        assert study.minutes is not None, "how long do two cores take?"


class Checked(Exception):
    """A trainer has found nothing wrong with a run, and would now start jax."""


@pytest.mark.parametrize("name", study_names())
def test_every_cleanba_run_of_every_preset_is_one_that_its_trainer_takes(
    name, tmp_path, monkeypatch
):
    def stop(*_):
        raise Checked

    monkeypatch.setattr(placement, "start_jax", stop)
    monkeypatch.setenv("SLURM_PROCID", "0")
    programs = {"cleanba_ppo": cleanba_ppo, "cleanba_impala": cleanba_impala}
    path = find_study(name)
    for preset in tomllib.loads(path.read_text()).get("presets", {"cpu": {}}):
        runs = {  # games and seeds make no difference
            (run.system, run.setting.name, str(run.hyperparameters)): run
            for run in load_study(path, preset).runs
        }
        for run in runs.values():
            if run.system.removesuffix("-sync") not in programs:
                continue
            program = programs[run.system.removesuffix("-sync")]
            monkeypatch.setenv("SLURM_NTASKS", str(run.setting.processes))
            args = parse(program.Args, systems.command(run, tmp_path)[2:], "")
            with pytest.raises(Checked):
                program.main(args)


def test_presets_are_sizes_of_one_study_kept_in_folders_of_their_own(tmp_path):
    runs = STUDY[STUDY.index("[[runs]]") :]
    text = STUDY[: STUDY.index("[[runs]]")]
    text += "[presets.cpu]\nminutes = 3\n" + runs.replace("runs", "presets.cpu.runs", 1).replace(
        "[runs.", "[presets.cpu.runs."
    )
    text += """
[presets.paper.settings.one]
num_actor_threads = 9
actor_device_ids = [0]
learner_device_ids = [0, 1]
host_devices = 0
cores = 2
"""
    text += runs.replace("runs", "presets.paper.runs", 1).replace("[runs.", "[presets.paper.runs.")
    small = load(tmp_path, text)
    assert (small.name, small.preset, small.minutes) == ("mine", "cpu", 3)
    paper = load_study(tmp_path / "mine.toml", "paper")
    assert (paper.name, paper.preset, paper.minutes) == ("mine-paper", "paper", None)
    assert {run.study for run in paper.runs} == {"mine-paper"}
    assert [one.runs[0].setting.num_actor_threads for one in (small, paper)] == [1, 9]
    with pytest.raises(StudyError, match="no preset 'huge'; it has cpu, paper"):
        load_study(tmp_path / "mine.toml", "huge")
    for name, preset in (("mine", "cpu"), ("mine-paper", "paper")):
        (tmp_path / name).mkdir()
        copy = tmp_path / name / "study.toml"
        copy.write_text(text)
        assert load_study(copy).preset == preset
        with pytest.raises(StudyError, match=f"holds the records of preset '{preset}'"):
            load_study(copy, "paper" if preset == "cpu" else "cpu")
        assert load_study(copy).name == name


def test_the_quickstart_study_compares_what_it_says():
    study = load_study(find_study("quickstart"))
    small = [run for run in study.runs if run.env_id != "Pong-v5"]
    axes = [{getattr(run, axis) for run in small} for axis in ("system", "env_id", "seed")]
    assert [len(values) for values in axes] == [4, 2, 3]
    assert len(small) == 48
    settings = {run.setting for run in small}
    assert {(s.num_actor_threads, s.host_devices) for s in settings} == {(1, 1), (2, 2)}
    pong = [run for run in study.runs if run.env_id == "Pong-v5"]
    assert {"ppo" in run.system for run in pong} == {True, False}
    # What is compared across settings must not differ in anything but the setting.
    for run in small:
        twin = [other for other in small if other._replace(setting=run.setting) == run]
        assert len(twin) == 2
