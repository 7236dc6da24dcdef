"""How the commands of this package are run."""

import gc
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

import matplotlib as mpl


def run_command(main: Callable[[], int]) -> NoReturn:
    """Run a command, and end the process with its exit code."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # exit silently on a closed pipe (`| head`)
    mpl.use("agg")
    gc.disable()  # it would free little memory and take a tenth of the time
    sys.exit(main())
