"""Selection of the runs for scores over several environments."""

import ast
from pathlib import Path

import pytest
from synthetic_runs import study_folder

from analysis import selection, study_tables
from analysis.importers.records import read_records

BREAKOUT, CARTPOLE, CATCH = "Breakout-v5", "CartPole-v1", "Catch-v0"
SYSTEMS = ("cleanba_ppo", "cleanba_ppo-sync")
ONE, TWO, THREE, FOUR = ((s, h) for s in SYSTEMS for h in ("a0-l0-t1", "a0-l0,1-t2"))


@pytest.fixture(scope="module")
def four_times_three(tmp_path_factory):
    """The tables of two systems under two settings on three environments."""
    root = tmp_path_factory.mktemp("four_times_three")
    return read_records(
        [study_folder(root, SYSTEMS, env_ids=(BREAKOUT, CARTPOLE, CATCH), seeds=(1,), steps=5_120)]
    )


@pytest.mark.parametrize("what", ["run", "episode"])
@pytest.mark.parametrize(
    ("missing", "environments", "systems"),
    [
        ((), [], []),
        # 3 x 3 scores are left without the system, 2 x 4 without the environment
        (((ONE, BREAKOUT),), [], [ONE]),
        (((ONE, BREAKOUT), (TWO, BREAKOUT)), [BREAKOUT], []),
        (
            ((ONE, BREAKOUT), (TWO, CATCH), (THREE, CARTPOLE), (FOUR, CATCH)),
            [],
            sorted((ONE, TWO, THREE, FOUR)),
        ),
    ],
)
def test_systems_are_compared_over_environments_that_they_share(
    four_times_three, what, missing, environments, systems
):
    runs = four_times_three.runs
    keys = zip(zip(runs["system"], runs["setting"], strict=True), runs["env_id"], strict=True)
    gone = runs["run"][[key in missing for key in keys]]
    if what == "run":
        tables = selection.of_runs(four_times_three, set(runs["run"]) - set(gone))
    else:
        curves = four_times_three.curves
        tables = four_times_three._replace(curves=curves[~curves["run"].isin(gone)])
    found = selection.comparable(tables)
    assert found.environments == environments
    assert found.systems == systems
    if len(systems) == 4:
        assert found.tables is None
        return
    kept = study_tables.aggregate_table(found.tables)
    assert set(kept["environments"]) == {3 - len(environments)}
    assert len(kept.groupby(["system", "setting"])) == 4 - len(systems)


def test_the_analysis_imports_neither_trainers_nor_what_is_drawn_from_it():
    root = Path(selection.__file__).parent
    for file in root.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [one.name for one in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                first, *rest = name.split(".")
                assert first not in ("plots", "reports", "experiments", "baselines"), (file, name)
                assert first != "cleanba" or rest[:1] == ["record"], (file, name)
