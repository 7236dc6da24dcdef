import functools
import re
import subprocess
import sys
import tomllib

import pytest
from msgspec.structs import replace

from baselines import cleanrl_ppo, hts_rl
from cleanba import cleanba_impala, cleanba_ppo, preparation
from cleanba.exact import placement
from cleanba.run.command_line import parse
from cleanba.run.options import CheckpointOptions, checkpoint_interval
from experiments import launch, pool, systems
from experiments.flag_check import check_flags
from experiments.study import (
    StudyError,
    check_systems,
    explain,
    find_study,
    load_study,
    study_names,
)

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
    assert (study.findings, study.main_figure, study.paper, study.remark) == ((), "", "", "")
    head = """
paper = "A paper"
findings = ["bits", "speedup"]
main_figure = "run_times"
remark = '''
Yes,
always.
'''
"""
    study = load(tmp_path, STUDY.replace("[settings.one]", f"{head}[settings.one]", 1))
    assert study.findings == ("bits", "speedup")
    assert (study.main_figure, study.paper) == ("run_times", "A paper")
    assert study.remark == "Yes, always."


def test_a_command_describes_the_whole_run(tmp_path):
    sync, _, concurrent, _ = load(tmp_path, STUDY).runs
    words = systems.command(sync, tmp_path)
    assert words[1].endswith("cleanba/cleanba_ppo.py")
    text = " ".join(words)
    for part in (
        "--env-id CartPole-v1 --seed 1 --total-timesteps 1000",
        "--num-envs 8 --no-anneal-lr --no-concurrency",
        "--num-actor-threads 1 --actor-device-ids 0 --learner-device-ids 0 1",
        "--xla-host-devices 2 --study mine --setting one",
        f"--runs-dir {tmp_path} --num-checkpoints 10",
    ):
        assert part in text
    assert "--overwrite" not in text
    assert "--keep-checkpoints" not in text
    assert "--overwrite" in systems.command(sync, tmp_path, "--overwrite")
    words = systems.command(concurrent, tmp_path)
    assert words[1].endswith("cleanba/cleanba_impala.py")
    assert "--concurrency" in words


def test_a_study_keeps_the_checkpoints_that_it_asks_for(tmp_path):
    text = STUDY.replace("total_timesteps = 1000", "total_timesteps = 1000\ncheckpoints = 3", 1)
    text = text.replace('"cleanba_impala"', '"monobeast"')
    first, _, other, _ = (
        " ".join(systems.command(run, tmp_path)) for run in load(tmp_path, text).runs
    )
    assert "--num-checkpoints 3 --keep-checkpoints all" in first
    assert "checkpoints" not in other


def test_the_commands_of_baselines_are_accepted_by_their_programs(tmp_path):
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
        assert (args.num_envs, args.anneal_lr) == (8, True)
        assert (args.run.study, args.run.setting, args.run.progress) == ("mine", "one", False)
    assert [(a.algorithm, a.schedule, a.hardware.num_actors) for a in parsed[1:]] == [
        ("a2c", "hts", 1),
        ("ppo", "synchronous", 1),
    ]


@pytest.mark.parametrize(
    ("options", "num_updates", "interval"),
    [
        (CheckpointOptions(), 100, 0),
        (CheckpointOptions(checkpoint_every=7), 100, 7),
        (CheckpointOptions(num_checkpoints=10), 157, 15),
        (CheckpointOptions(num_checkpoints=10), 3, 1),
    ],
)
def test_checkpoints_can_be_asked_for_by_number(options, num_updates, interval):
    assert checkpoint_interval(options, num_updates) == interval


def test_checkpoints_cannot_be_asked_for_in_two_ways():
    options = CheckpointOptions(checkpoint_every=2, num_checkpoints=2)
    with pytest.raises(ValueError, match="give one of them"):
        checkpoint_interval(options, 10)


def test_a_setting_can_have_flags_that_only_one_system_has(tmp_path):
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


def test_a_flag_of_a_setting_can_have_several_values(tmp_path):
    text = STUDY.replace('["cleanba_ppo-sync", "cleanba_impala"]', '["cleanba_impala"]')
    flags = '[settings.one.flags]\ncompat = ["alignment", "mask"]\n'
    run = load(tmp_path, text.replace("[[runs]]", flags + "[[runs]]")).runs[0]
    check_flags([run])
    assert "--compat alignment mask" in " ".join(systems.command(run, tmp_path))


def test_a_run_of_several_processes_is_started_by_the_program_that_starts_them(tmp_path):
    text = STUDY.replace("cores = 2", "cores = 2\nprocesses = 2")
    run = load(tmp_path, text).runs[0]
    words = systems.command(run, tmp_path)
    assert "--distributed" in words
    several = pool.in_processes(words, run.setting.processes)
    assert several[1:4] == ["-m", "cleanba.audit.local_processes", "2"]
    assert several[4:] == words[1:]
    assert pool.in_processes(words, 1) == words
    with pytest.raises(StudyError, match="'one' has several processes; monobeast runs in one"):
        check_systems(load(tmp_path, text.replace("cleanba_ppo-sync", "monobeast")).runs)


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


def test_where_and_how_a_run_is_kept_does_not_make_another_run_but_a_hyperparameter_does():
    program = systems.SYSTEMS["cleanba_ppo"]
    planned = ["python", "cleanba/cleanba_ppo.py", "--seed", "1", "--runs-dir", "runs"]
    planned += ["--study", "base", "--num-checkpoints", "10"]
    elsewhere = ["/x/cleanba_ppo.py", "--seed", "1", "--runs-dir", "/tmp/x", "--overwrite"]
    elsewhere += ["--study", "base-again", "--checkpoint-every", "5", "--no-progress"]
    for same in (
        elsewhere,
        [*elsewhere, "--resume"],
        [*elsewhere, "--keep-checkpoints", "all"],
        ["converted from a log"],
    ):
        assert systems.changes(same, planned, program) == []
    for other, said in (
        (["--seed", "2"], ["--seed 2, now 1"]),
        (["--seed", "1", "--track"], ["--track, now not given"]),
        ([], ["no --seed, now 1"]),
        (["x", "--seed", "1"], ["x, now not given"]),
    ):
        assert systems.changes(["cleanba_ppo.py", *other], planned, program) == said
    both = ["cleanba_ppo.py", "--a", "1", "--b", "2"], ["cleanba_ppo.py", "--b", "2", "--a", "1"]
    assert systems.changes(*both, program) == ["the order of its flags"]


OWN = """
[systems.mine]
script = "programs/mine.jl"
interpreter = ["julia", "--project"]
separator = "_"
fixed = {algorithm = "a2c", fast = true}
[systems.mine.flags]
env_id = "-e"
num_actor_threads = "--workers"
no_progress = ""
"""


def test_a_study_can_describe_a_system(tmp_path):
    text = STUDY.replace('["cleanba_ppo-sync", "cleanba_impala"]', '["mine"]')
    runs = load(tmp_path, text.replace("[settings.one]", OWN + "[settings.one]")).runs
    program = tmp_path / "programs" / "mine.jl"
    interpreter, option, script, *words = systems.command(runs[0], tmp_path, "--overwrite")
    assert (interpreter, option) == ("julia", "--project")
    assert (systems.ROOT / script).resolve() == program
    assert " ".join(words) == (
        "-e CartPole-v1 --seed 1 --total-timesteps 1000 --num_envs 8 --no-anneal_lr --algorithm a2c "
        f"--fast --workers 1 --study mine --setting one --runs-dir {tmp_path} --overwrite"
    )
    with pytest.raises(StudyError, match=f"mine: there is no program {program}"):
        check_systems(runs)
    program.parent.mkdir()
    program.write_text("")
    with pytest.raises(StudyError, match="mine: there is no program julia"):
        check_systems(runs)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "env_id",
            "envid",
            "unknown field `envid` - at `$.systems[...].flags`; did you mean env_id?",
        ),
        ("script =", "program =", "unknown field `program`"),
        ('"programs/mine.jl"', "1", "Expected `str`, got `int` - at `$.systems[...].script`"),
        ('separator = "_"', 'separator = "."', "Invalid enum value '.'"),
        ("systems.mine", "systems.moolib", "the system 'moolib' comes with the toolkit"),
    ],
)
def test_a_system_with_a_mistake_is_refused_in_one_line(tmp_path, old, new, message):
    with pytest.raises(StudyError, match=r"^mine.toml: [^\n]*$") as caught:
        load(tmp_path, STUDY.replace("[settings.one]", OWN.replace(old, new) + "[settings.one]"))
    assert message in str(caught.value)


def test_the_launcher_imports_neither_torch_nor_jax():
    code = "import sys, experiments.launch; assert not {'torch', 'jax'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=systems.ROOT).returncode == 0


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("seeds = [1, 2]", "", "missing required field `seeds` - at `$.runs[0]`"),
        ("seeds = [1, 2]", "seeds = [1, 1]", "more than once"),
        ("seeds = [1, 2]", "seeds = []", "plans no run"),
        ("seeds = [1, 2]", "seeds = 1", "Expected `array`, got `int` - at `$.runs[0].seeds`"),
        ("seeds = [1, 2]", "seeds = ['1']", "Expected `int`, got `str` - at `$.runs[0].seeds[0]`"),
        ("seeds = [1, 2]", "seeds = [true]", "Expected `int`, got `bool`"),
        (
            "seeds = [1, 2]",
            "seed = [1]",
            "unknown field `seed` - at `$.runs[0]`; did you mean seeds?",
        ),
        ('env_ids = ["CartPole-v1"]', "env_ids = [1]", "Expected `str`, got `int`"),
        ('settings = ["one"]', 'settings = ["two"]', "'two', not defined"),
        ('settings = ["one"]', "settings = [['one']]", "Expected `str`, got `array`"),
        (
            'systems = ["cleanba_ppo-sync", "cleanba_impala"]',
            "systems = 3",
            "at `$.runs[0].systems`",
        ),
        ('systems = ["cleanba_ppo-sync", "cleanba_impala"]', "systems = [1]", "Expected `str`"),
        ("cores = 2", "", "the setting 'one': Object missing required field `cores`"),
        (
            "title = ",
            "findings = ['bit']\ntitle = ",
            "Invalid enum value 'bit' - at `$.findings[0]`",
        ),
        ("title = ", "main_figure = 'x'\ntitle = ", "Invalid enum value 'x' - at `$.main_figure`"),
        ("cores = 2", "cores = 0", "the setting 'one': Expected `int` >= 1 - at `$.cores`"),
        ("cores = 2", "cores = 2\nprocesses = 0", "Expected `int` >= 1 - at `$.processes`"),
        ("cores = 2", "cores = 2\ngpus = -1", "Expected `int` >= 0 - at `$.gpus`"),
        ("cores = 2", "cores = 2\nprocesses = 3\nnodes = 2", "multiples of its 2 nodes"),
        (
            "cores = 2",
            "cores = 2\ncolour = 1",
            "the setting 'one': Object contains unknown field `colour`",
        ),
        ("cores = 2", "core = 2", "did you mean cores?"),
        (
            "cores = 2",
            "cores = 2\nname = 'two'",
            "the setting 'one': its name is the name of its table",
        ),
        ("cores = 2", "cores = 2\nflags = 1", "the setting 'one': flags: Expected `object`"),
        ("cores = 2", "cores = 2\nsystems = 1", "the setting 'one': systems: Expected `object`"),
        (
            "learner_device_ids = [0, 1]",
            "learner_device_ids = ['0']",
            "at `$.learner_device_ids[0]`",
        ),
        (
            "[settings.one]",
            "[settings]\ntwo = 3\n[settings.one]",
            "the setting 'two': Expected `object`",
        ),
        ("[runs.hyper", "[targets]\nCartPole-v2 = 4\n[runs.hyper", "a target for 'CartPole-v2'"),
        ("[runs.hyper", "[targets]\nCartPole-v1 = '4'\n[runs.hyper", "Expected `float`, got `str`"),
        ('question = "', 'score_episodes = 0\nquestion = "', "at `$.score_episodes`"),
        ("title", "titel", "unknown field `titel`; did you mean title?"),
        ("[[runs]]", "[presets.cpu]\nruns = []\n[[runs]]", "either [[runs]] or [presets]"),
        (
            "[[runs]]",
            "[settings.one.systems.moolibb]\ncores = 1\n[[runs]]",
            "the setting 'one' is about 'moolibb', which has no run",
        ),
        ("[[runs]]", "[[runs", "Expected ']]'"),
    ],
)
def test_a_study_with_a_mistake_is_refused_in_one_line(tmp_path, old, new, message):
    with pytest.raises(StudyError, match=r"^mine.toml: [^\n]*$") as caught:
        load(tmp_path, STUDY.replace(old, new, 1))
    assert message in str(caught.value)


def test_an_unknown_study_or_system_names_the_nearest(tmp_path):
    with pytest.raises(StudyError, match="did you mean quickstart"):
        find_study("quickstrat")
    study = load(tmp_path, STUDY.replace("cleanba_impala", "cleanba_imapla"))
    with pytest.raises(StudyError, match="did you mean cleanba_impala"):
        check_systems(study.runs)


@pytest.mark.parametrize(
    ("preset", "message"),
    [
        ("[presets.paper]\nminutes = 1\n", "missing required field `runs` - at `$.presets[...]`"),
        (
            "[[presets.paper.run]]\n",
            "unknown field `run` - at `$.presets[...]`; did you mean runs?",
        ),
        (
            "[[presets.paper.runs]]\nsystems = []\n",
            "field `settings` - at `$.presets[...].runs[0]`",
        ),
    ],
)
def test_a_mistake_in_a_preset_is_found_whichever_is_asked_for(tmp_path, preset, message):
    text = STUDY.replace("[[runs]]", "[[presets.cpu.runs]]")
    text = text.replace("[runs.hyper", "[presets.cpu.runs.hyper")
    assert load(tmp_path, text).runs
    with pytest.raises(StudyError, match=re.escape(message)):
        load(tmp_path, text + preset)


def test_a_preset_has_the_targets_of_its_own_environments(tmp_path):
    text = STUDY.replace("[[runs]]", "[[presets.cpu.runs]]")
    text = text.replace("[runs.hyper", "[presets.cpu.runs.hyper")
    other = text[text.index("[[presets.cpu") :].replace("presets.cpu", "presets.other")
    text += other.replace("CartPole-v1", "Catch-v0")
    text = text.replace("[settings", "[targets]\nCartPole-v1 = 4\nCatch-v0 = 1\n[settings", 1)
    (tmp_path / "mine.toml").write_text(text)
    for preset, targets in (("cpu", {"CartPole-v1": 4}), ("other", {"Catch-v0": 1})):
        assert load_study(tmp_path / "mine.toml", preset).targets == targets


def test_programs_that_cannot_be_imported_are_one_line(tmp_path, monkeypatch):
    run = load(tmp_path, STUDY).runs[0]
    program = replace(run.program, script="baselines/nowhere.py")
    with pytest.raises(StudyError, match=r"cannot be checked: ModuleNotFoundError.*nowhere"):
        check_flags([run._replace(program=program)])


def test_the_preset_of_a_copy_is_told_by_its_folder(tmp_path):
    text = STUDY.replace("[[runs]]", "[[presets.cpu.runs]]")
    text = text.replace("[runs.hyper", "[presets.cpu.runs.hyper")
    other = text[text.index("[[presets.cpu") :]
    text += other.replace("presets.cpu", "presets.small")
    text += other.replace("presets.cpu", "presets.very-small").replace("CartPole-v1", "Catch-v0")
    for folder, env_id in (
        ("mine", "CartPole-v1"),
        ("mine-small", "CartPole-v1"),
        ("mine-very-small", "Catch-v0"),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "study.toml").write_text(text)
        study = load_study(tmp_path / folder / "study.toml")
        assert study.name == folder
        assert {run.env_id for run in study.runs} == {env_id}
    (tmp_path / "too-small.toml").write_text(text)
    with pytest.raises(StudyError, match="a study with a preset 'small' cannot end in -small"):
        load_study(tmp_path / "too-small.toml")


@pytest.mark.parametrize("name", study_names())
def test_every_study_that_comes_with_the_toolkit_can_be_planned(name):
    path = find_study(name)
    for preset in tomllib.loads(path.read_text()).get("presets", {"cpu": {}}):
        study = load_study(path, preset)
        check_systems(study.runs)
        assert study.runs
        assert study.minutes is not None, "how long do two cores take?"


@pytest.mark.slow
def test_every_baseline_s_run_of_every_preset_is_one_that_its_program_takes():
    """As the launcher finds out before the first run; the trainers' runs are checked further below."""
    runs = [
        run
        for name in study_names()
        for preset in tomllib.loads(find_study(name).read_text()).get("presets", {"cpu": {}})
        for run in load_study(find_study(name), preset).runs
        if not run.system.startswith("cleanba")
    ]
    assert {run.program.script for run in runs} == {
        systems.SYSTEMS[name].script for name in systems.SYSTEMS if not name.startswith("cleanba")
    }
    check_flags(runs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("system", "old", "new", "message"),
    [
        ("cleanba_ppo", "num_envs = 8", "num_envs = '8x'", "invalid literal"),
        ("cleanba_impala", "num_envs = 8", "num_envz = 8", "--num-envz"),
        ("monobeast", "num_envs = 8", "learning_rate = -1.0", "--learning-rate"),
        ("moolib", "num_envs = 8", "discounting = nan", "--discounting"),
        ("hts_rl_ppo", "num_envs = 8", "learning_rate = inf", "--learning-rate"),
    ],
)
def test_a_study_whose_flags_a_program_refuses_starts_nothing(
    tmp_path, capsys, system, old, new, message
):
    path = tmp_path / "mine.toml"
    text = STUDY.replace('["cleanba_ppo-sync", "cleanba_impala"]', f'["{system}"]')
    path.write_text(text.replace(old, new).replace("anneal_lr = false", ""))
    assert launch.main([str(path), "--runs-dir", str(tmp_path / "runs")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {system}__one__CartPole-v1__s1: ")
    assert message in line
    assert not (tmp_path / "runs").exists()


described = functools.cache(preparation.describe_env)  # it makes the environment


class Checked(Exception):
    """A trainer has found nothing wrong with a run, and would now start jax."""


@pytest.mark.parametrize("name", study_names())
def test_every_cleanba_run_of_every_preset_is_one_that_its_trainer_takes(
    name, tmp_path, monkeypatch
):
    def stop(*_):
        raise Checked

    monkeypatch.setattr(placement, "start_jax", stop)
    monkeypatch.setattr(preparation, "describe_env", described)
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
    # Runs that are compared across settings differ only in the setting.
    for run in small:
        twin = [other for other in small if other._replace(setting=run.setting) == run]
        assert len(twin) == 2


def test_threads_are_explained_for_each_of_several_actor_devices():
    one = load_study(find_study("quickstart")).runs[0].setting
    two = replace(one, actor_device_ids=(0, 1), num_actor_threads=2)
    assert "2 actor threads, " in explain(replace(two, actor_device_ids=(0,)))
    assert "2 actor threads per actor device, " in explain(two)
