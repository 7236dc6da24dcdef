"""Settings of all tests."""

import os
import signal

import pytest

# Shells start background jobs with SIGINT ignored; tests that interrupt would wait for ever there.
signal.signal(signal.SIGINT, signal.default_int_handler)

# On two cores, BLAS threads of several tests that wait for each other cost more than they bring.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


@pytest.fixture(scope="module")
def compiled_once(tmp_path_factory):
    """Let the trainers that a module's tests start share what XLA has compiled.

    Not for tests of whether two programs give the same bits: compiling is part of that.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
        yield
