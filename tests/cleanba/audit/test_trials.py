"""Trials: the command line of each, and how many run at once."""

import shlex
from pathlib import Path

import pytest

from cleanba.audit.matrix import FULL, QUICK, Setting
from cleanba.audit.trials import Program, batches
from cleanba.record.layout import Layout


def test_a_command_is_the_options_of_the_program_then_those_of_the_setting():
    setting = Setting(Layout.parse("a0-l1,2-d2-t3"), cores=1, envpool_threads=1)
    words = Program(Path("cleanba_ppo.py"), {"seed": 4}).command(setting, Path("runs"))
    expected = (
        "cleanba_ppo.py --seed 4 --distributed --num-actor-threads 3 --actor-device-ids 0 "
        "--learner-device-ids 1 2 --envpool-threads 1 --setting a0-l1,2-d2-t3-c1-e1 "
        "--runs-dir runs --study certify"
    )
    assert words[1:] == shlex.split(expected)


@pytest.mark.parametrize("jobs", [1, 2, 3, 8])
@pytest.mark.parametrize("settings", [QUICK, FULL], ids=["quick", "full"])
def test_batches_have_every_setting_once_and_at_most_as_many_processes_as_jobs(settings, jobs):
    found = batches(settings, jobs)
    assert sorted(x.name for batch in found for x in batch) == sorted(x.name for x in settings)
    for batch in found:
        assert sum(x.layout.processes for x in batch) <= jobs or len(batch) == 1
