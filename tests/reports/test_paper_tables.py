"""Table 1: from records alone, and only where all runs of an architecture agree."""

import pandas as pd
import pytest
from synthetic_runs import write_run

from analysis import importers
from analysis.tables import InputError
from cleanba import record
from reports import paper_tables


@pytest.fixture
def tables(tmp_path):
    for system in ("cleanba_ppo", "cleanba_ppo-sync"):
        for seed in (1, 2):
            folder = tmp_path / record.run_name(system, "base", "Catch-v0", seed)
            write_run(folder, system, "base", "Catch-v0", seed, steps=5_120)
    return importers.read([tmp_path])


def test_table_1_is_that_of_the_paper(tables):
    lines = paper_tables.table1(tables, iterations=4)
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0] == [
        "iteration", "Synchronous architecture (2 runs): actor", "learner",
        "Cleanba's architecture (2 runs): actor", "learner",
    ]  # fmt: skip
    assert cells[2:] == [
        ["1", "π1 → D(π1)", "D(π1) → π2", "π1 → D(π1)", ""],
        ["2", "π2 → D(π2)", "D(π2) → π3", "π1 → D(π1)", "D(π1) → π2"],
        ["3", "π3 → D(π3)", "D(π3) → π4", "π2 → D(π2)", "D(π1) → π3"],
        ["4", "π4 → D(π4)", "D(π4) → π5", "π3 → D(π3)", "D(π2) → π4"],
    ]


def test_runs_that_differ_or_mix_policies_are_refused(tables):
    rollouts = tables.rollouts.copy()
    at = (rollouts["seed"] == 2) & (rollouts["rollout"] == 3)
    rollouts.loc[at, ["version_first", "version_last"]] = 1
    with pytest.raises(InputError, match="differ in what made their data"):
        paper_tables.table1(tables._replace(rollouts=rollouts))
    rollouts.loc[at, "version_last"] = 2
    with pytest.raises(InputError, match="rollout 3 was made by several policies"):
        paper_tables.table1(tables._replace(rollouts=rollouts))
    only = tables.rollouts[~tables.rollouts["system"].astype(str).str.endswith("-sync")]
    with pytest.raises(InputError, match="no completed run of the synchronous"):
        paper_tables.table1(tables._replace(rollouts=pd.DataFrame(only)))


def test_no_records_are_one_line_and_exit_code_2(tmp_path, capsys):
    assert paper_tables.main(["--runs", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "out").exists()
