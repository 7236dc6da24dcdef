"""Programs refuse wrong flags, and end when they are told to, with the right exit code."""

import subprocess
import sys
import time
from dataclasses import dataclass

import pytest

from cleanba.run.command_line import BadInput, parse

IN_A_CALLBACK = """
import gc, os, signal, time
from dataclasses import dataclass
from cleanba.run.command_line import run_command_line

@dataclass
class Args:
    pass

def main(args):
    def callback(phase, info):
        gc.callbacks.remove(callback)
        os.kill(os.getpid(), {number})
        time.sleep(0.2)
    gc.callbacks.append(callback)
    gc.collect()
    time.sleep(30)

run_command_line(Args, main, "")
"""


@pytest.mark.parametrize(("number", "code"), [(15, 143), (2, 130)])
def test_a_signal_that_arrives_in_a_callback_of_the_garbage_collector_is_not_lost(number, code):
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", IN_A_CALLBACK.format(number=number)], capture_output=True, timeout=60
    )
    assert done.returncode == code
    assert b"ignored" in done.stderr  # it did arrive there
    assert time.monotonic() - begin < 20


def test_an_unknown_flag_is_named_once():
    @dataclass
    class Args:
        number: int = 1

    with pytest.raises(BadInput) as caught:
        parse(Args, ["--nonsense"])
    assert str(caught.value) == "Unrecognized options: --nonsense"
