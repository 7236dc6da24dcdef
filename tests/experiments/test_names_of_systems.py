"""Names of systems that belong to a program."""

from pathlib import Path

import pytest
from msgspec import UNSET
from synthetic_runs import write_run

from cleanba.record import read_run
from cleanba.record.consistency import contradictions, own_name
from experiments.systems import SYSTEMS


@pytest.mark.parametrize("name", SYSTEMS)
def test_each_name_of_the_toolkit_belongs_to_its_program(name):
    program, fixed = own_name(name)
    script = Path(SYSTEMS[name].script)
    assert program == (script.parent.name if script.stem == "__main__" else script.stem)
    assert fixed.items() <= SYSTEMS[name].fixed.items()


def test_the_original_s_arithmetic_is_a_system_of_its_own_name():
    """Its program takes the name from the architecture unless another is given."""
    assert SYSTEMS["cleanba_impala-original"].fixed["exp_name"] == "cleanba_impala-original"


def said_of(run):
    return contradictions(run, run.updates(), run.rollouts(), run.episodes())


@pytest.mark.parametrize("name", ["moolib", "cleanba_impala-original", "schemes_ppo-rapid"])
@pytest.mark.parametrize("program", [UNSET, "cleanba_impala"])
def test_no_other_program_takes_a_name_of_the_toolkit(tmp_path, name, program):
    write_run(tmp_path / "run", "my_system", env_id="Catch-v0", steps=5_120)
    run = read_run(tmp_path / "run")
    run.info.program = program
    assert said_of(run) == []
    run.info.system = name
    assert said_of(run) == ["run.json: its system contradicts its program or its hyperparameters"]
