"""Trials: the command line of each, and how many run at once."""

import shlex
from itertools import pairwise
from pathlib import Path

import pytest

from cleanba.audit import trials
from cleanba.audit.matrix import FULL, QUICK, Setting
from cleanba.audit.trials import Program, batches, run_trial
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
def test_batches_have_every_setting_once_and_as_many_processes_as_jobs_allow(settings, jobs):
    found = batches(settings, jobs)
    assert sorted(x.name for batch in found for x in batch) == sorted(x.name for x in settings)
    sizes = [sum(x.layout.processes for x in batch) for batch in found]
    for size, batch in zip(sizes, found, strict=True):
        assert size <= jobs or len(batch) == 1
    assert all(a + b > jobs for a, b in pairwise(sizes))  # no two of them would fit into one


# The second process fills its pipe before the first, which waits for it, can end.
VERBOSE = """
import os, sys, time
from pathlib import Path
done = Path(sys.argv[sys.argv.index("--runs-dir") + 1]) / "done"
if os.environ["SLURM_PROCID"] == "1":
    sys.stderr.write("x" * 10**6)
    done.touch()
while not done.exists():
    time.sleep(0.01)
sys.exit("the last line")
"""


def test_a_process_may_print_much_while_another_waits_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr(trials, "SECONDS_PER_TRIAL", 30)
    (tmp_path / "verbose.py").write_text(VERBOSE)
    setting = Setting(Layout.parse("a0-l0-d2-t1"))
    trial = run_trial(Program(tmp_path / "verbose.py", {}), setting, tmp_path)
    assert trial.error == "exit code 1: the last line"
