"""Settings of all tests."""

import os
import signal
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import submitit  # noqa: F401  Its import closes absl's log handler, and so the stderr that pytest captures, if absl came first.

# Shells start background jobs with SIGINT ignored; tests that interrupt would wait for ever there.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Under nohup it is ignored, and runs that tests start would go on after it, as they should.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# On two cores, BLAS threads of several tests that wait for each other cost more than they bring.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# pytest-xdist sets it in its workers, and tables would be wrapped to it.
os.environ.pop("COLUMNS", None)


@pytest.fixture(scope="session", autouse=True)
def compilation_cache(tmp_path_factory):
    """Let all processes that tests start share what XLA has compiled: a run takes half the CPU time."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # one folder for all workers
        folder = folder.parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(folder / "compiled"))
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        yield


@pytest.fixture(scope="module")
def auditor():
    """A process that repeats training. Other tests configure jax in other ways in this one."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        yield pool


@pytest.fixture
def compiled_anew(monkeypatch):
    """Without the cache: for tests of whether two runs give the same bits, to which compiling belongs."""
    monkeypatch.setenv("JAX_ENABLE_COMPILATION_CACHE", "false")


@pytest.fixture(scope="session")
def published():
    """The published data, which the repository does not carry."""
    default = Path(__file__).resolve().parents[1] / "../shared/published"
    path = Path(os.environ.get("PUBLISHED_DATA", default)).resolve()
    if not path.is_dir():
        pytest.skip(f"no published data at {path}: set PUBLISHED_DATA")
    return path
