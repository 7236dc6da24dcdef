"""What importing a module loads: neither framework where the other, or none, is used."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

TORCH_BASELINES = sorted(
    path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
    for path in (ROOT / "baselines").rglob("*.py")
    if path.name not in ("cleanrl_ppo.py", "ppo_microrts.py", "action_guidance.py", "__init__.py")
)
JAX_TRAINERS = (
    "cleanba.cleanba_ppo", "cleanba.cleanba_impala", "cleanba.evaluate", "baselines.cleanrl_ppo",
    "baselines.ppo_microrts", "baselines.action_guidance",
)  # fmt: skip
NEITHER = (
    "cleanba.record", "cleanba.environments", "cleanba.exact.placement", "cleanba.run.arguments",
    "cleanba.run.command_line", "cleanba.run.log", "cleanba.run.options",
)  # fmt: skip

# Prints each framework with the first of the modules that loads it.
FIND = """
import importlib, sys
seen = set()
for module in sys.argv[1:]:
    importlib.import_module(module)
    new = sys.modules.keys() & {"jax", "torch"} - seen
    seen |= new
    for framework in new:
        print(framework, "loaded by", module)
"""


@pytest.mark.parametrize(
    ("modules", "allowed"),
    [(TORCH_BASELINES, "torch"), (JAX_TRAINERS, "jax"), (NEITHER, "neither")],
    ids=["torch-baselines", "jax-trainers", "record-and-scaffold"],
)
def test_importing_loads_no_framework_that_is_not_used(modules, allowed):
    done = subprocess.run(
        [sys.executable, "-c", FIND, *modules], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if not line.startswith(allowed)] == []
    assert len(modules) >= 4
