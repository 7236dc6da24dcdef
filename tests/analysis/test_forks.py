"""Calls in forks return the same values, in the same order, as in this process."""

import os
import subprocess
import sys
from functools import partial

import pandas as pd
import pytest

from analysis.forks import call_all
from analysis.importers.records import read_records
from analysis.tables import InputError


def _fail() -> None:
    raise InputError("one clear line")


@pytest.mark.parametrize("cores", [1, 2, 7])
def test_results_come_in_the_order_of_the_calls(cores):
    squares = call_all([partial(pow, i, 2) for i in range(100)], cores)
    assert squares == [i**2 for i in range(100)]
    assert call_all([], cores) == []


def test_calls_are_in_forks_where_there_is_more_than_one_core():
    assert set(call_all([os.getpid] * 4, cores=1)) == {os.getpid()}
    assert os.getpid() not in call_all([os.getpid] * 4, cores=2)


def test_a_fork_has_what_cannot_be_sent_to_it():
    """Closures, which cannot be pickled; they may hold large tables that should not be copied."""
    held = [object(), lambda: 3]
    assert call_all([lambda: held[1](), lambda: len(held)], cores=2) == [3, 2]


@pytest.mark.parametrize("cores", [1, 2])
def test_the_first_failure_is_raised(cores):
    with pytest.raises(InputError, match="one clear line"):
        call_all([os.getpid, _fail, os.getpid], cores)


def test_records_are_the_same_however_many_cores_read_them(write_run, tmp_path):
    for seed in range(1, 8):
        write_run(seed=seed, episodes=10 * seed, returns=[float("nan")] * (seed == 3) or None)
    write_run(seed=9, status="failed")
    one, two = (read_records([tmp_path], cores) for cores in (1, 2))
    for here, there in zip(one, two, strict=True):
        pd.testing.assert_frame_equal(here, there)
    assert len(two.quality) >= 2  # the NaN, and the run that failed


@pytest.mark.parametrize("cores", [1, 2])
def test_damage_is_named_however_many_cores_read_it(write_run, tmp_path, cores):
    write_run(seed=1)
    run = write_run(seed=2)
    (run / "updates.jsonl").write_text("{}}\n")
    with pytest.raises(InputError, match=r"updates\.jsonl, line 1"):
        read_records([tmp_path], cores)


def test_forks_end_when_their_parent_is_killed():
    """Otherwise they would wait forever, and so would a reader of their inherited stdout."""
    code = (
        # one write, since print writes text and newline separately with PYTHONUNBUFFERED
        "import os, time; from analysis.forks import call_all\n"
        "call_all([lambda: os.write(1, b'at work\\n') and time.sleep(600)] * 4, cores=2)"
    )
    words = [sys.executable, "-c", code]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as parent:
        for _ in range(2):
            assert parent.stdout.readline() == "at work\n"
        parent.kill()
        assert parent.communicate(timeout=60)[0] == ""
