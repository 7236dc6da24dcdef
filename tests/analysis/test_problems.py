"""Problems with the data of a study: what differs between runs that are compared."""

import json

import pytest
from synthetic_runs import study_folder

from analysis.importers.records import read_records
from analysis.problems import problems

SYSTEMS = ("cleanba_ppo", "cleanba_ppo-sync")


@pytest.fixture
def edited(tmp_path):
    """Writes a study, changes the head of each of its runs, and reads it."""

    def make(systems, change):
        folder = study_folder(tmp_path, systems, env_ids=("Catch-v0",), steps=5_120)
        for path in sorted(folder.glob("*/run.json")):
            info = json.loads(path.read_text())
            change(path, info)
            path.write_text(json.dumps(info))
        return read_records([folder])

    return make


def test_hyperparameters_that_a_study_varies_with_its_settings_are_no_problem(edited):
    def change(path, info):
        if info["setting"] == "a0-l0-t1":
            info["hyperparameters"]["num_envs"] = 16 if info["seed"] == 1 else 32

    tables = edited(SYSTEMS[:1], change)
    system, other = SYSTEMS
    for vary in ((), (other,)):
        told = dict(problems(tables, settings_vary=vary))
        assert told[system] == "num_envs differs between runs on Catch-v0: 8, 16, 32"
    told = dict(problems(tables, settings_vary={system}))
    assert told[system] == "num_envs differs between runs on Catch-v0: 16, 32"


def test_a_package_of_two_versions_is_named_and_one_that_others_do_not_have_is_not(edited):
    firsts = {"cleanba_ppo-sync": {"torch": "2.9.0"}, "cleanba_ppo": {"jax": "0.11.0"}}
    without = "cleanba_ppo__a0-l0-t1__Catch-v0__s3"

    def change(path, info):
        info["versions"] |= firsts.pop(info["system"], {})
        if path.parent.name == without:
            info["versions"] = {}

    found = problems(edited(SYSTEMS, change))
    assert [(run, what) for run, what in found if "version" in what] == [
        ("all runs", "made with different versions of jax: 0.10.2, 0.11.0"),
        (without, "does not list the versions of its packages"),
    ]


@pytest.mark.parametrize(
    ("portable", "name"), [(False, "device_kind"), (None, "device_kind"), (True, "machine")]
)
def test_runs_of_a_system_on_several_kinds_of_device_are_named(edited, portable, name):
    def change(path, info):
        other = info["system"] == SYSTEMS[1] and info["seed"] == 2
        info["hardware"][name] = "another" if other else "one"
        if portable is not None:
            info["hyperparameters"]["portable"] = portable

    found = problems(edited(SYSTEMS, change))
    assert found == [(SYSTEMS[1], "ran on several kinds of device: another, one")]


def test_processors_do_not_matter_to_portable_arithmetic(edited):
    def change(path, info):
        info["hyperparameters"]["portable"] = True
        info["hardware"] |= {"device_kind": f"processor {info['seed']}", "machine": "x86_64"}

    assert problems(edited(SYSTEMS, change)) == []
