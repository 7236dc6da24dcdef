"""Pages that several modules of tests read: each is built, and its figures drawn, once per session."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "experiments"))  # synthetic_runs

from built import EVIL, SYSTEMS
from synthetic_runs import study_folder, write_run

from reports import build, index
from reports.sections import parts


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working directory, in which runs and pages lie side by side."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def undrawn(monkeypatch):
    """Empty files in the place of figures, for tests that look at tables and texts."""

    def save(draw, folder, name):
        folder.mkdir(parents=True, exist_ok=True)
        for ending in ("png", "svg"):
            (folder / f"{name}.{ending}").write_bytes(b"")

    monkeypatch.setattr(parts, "save", save)


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """A working directory with two pages and their index, to be read only.

    `quickstart`: two systems, one of which leaks its hardware setting into the results. `evil`: names
    that are HTML.
    """
    root = tmp_path_factory.mktemp("place")
    study_folder(root / "runs/quickstart", SYSTEMS, leaky=SYSTEMS[:1], steps=10_240)
    write_run(root / "runs/evil/a", system=EVIL, steps=5_120)
    write_run(root / "runs/evil/b", system=EVIL, status="failed", error=EVIL, steps=5_120)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        assert build.main(["quickstart"]) == 0
        assert build.main(["evil"]) == 0
        index.write(root / "site")
    return root
