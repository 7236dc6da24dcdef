"""Verdicts on records and on simulated curves whose truth is known."""

import json

import numpy as np
import pandas as pd
import pytest

from analysis import fingerprints, reproducibility, variation
from analysis.importers.records import read_records
from analysis.quality import check
from analysis.references import ATARI
from analysis.reproducibility import Side, compare_sides
from analysis.scores import final_scores
from analysis.tables import RunKey, tables

GRID = np.arange(1.0, 21.0)


def sides(*environments):
    """Sides of curves by environment, with seeds 0, 1, ..."""
    return {
        f"env{i}": Side(np.asarray(curves), np.arange(len(curves)))
        for i, curves in enumerate(environments)
    }


def compare(first, second, **options):
    """Compare sides on one grid, unpaired."""
    grids = dict.fromkeys(first, GRID)
    return compare_sides(grids, first, second, paired=False, **options)


def flat(levels):
    """Curves at a level each."""
    return np.tile(np.asarray(levels, float)[:, None], (1, len(GRID)))


def test_where_the_difference_starts():
    rng = np.random.default_rng(2)

    def curves(shift_after_10):
        both = rng.normal(1, 0.02, (6, 20))
        both[:, 10:] += shift_after_10
        return sides(both)

    found, starts = compare(curves(0.0), curves(0.5))
    assert found.p_different < 0.05
    assert starts == 11
    final = found.rows[0]
    assert final.difference == pytest.approx(0.5, abs=0.05)
    assert final.low < 0.5 < final.high
    found, starts = compare(curves(0.0), curves(0.0))
    assert np.isnan(starts)


def test_opposite_differences_in_two_environments_have_a_start():
    """Their sum over environments is 0."""
    rng = np.random.default_rng(2)
    shift = np.where(GRID > 10, 0.5, 0.0)
    noise = lambda: rng.normal(1, 0.02, (6, 20))  # noqa: E731
    found, starts = compare(sides(noise() + shift, noise()), sides(noise(), noise() + shift))
    assert found.p_different < 0.05
    assert starts == 11


@pytest.mark.parametrize("start", [0, 12])
def test_every_environment_is_compared_over_its_own_stretch(start):
    """One environment has 20 points of curve, the other 10; they differ from a point of the first on."""
    long, short = np.tile(GRID, (8, 1)), np.tile(GRID, (8, 1))
    short[:, 10:] = np.nan
    short[0, 0] = np.nan
    shifted = long + np.where(np.arange(20) >= start, 4.0, 0.0)
    noise = np.random.default_rng(6).normal(0, 0.01, (8, 1))
    found, starts = compare(
        sides(long + noise, short + noise), sides(shifted - noise, short - noise)
    )
    by = {(row.env_id, row.outcome): row for row in found.rows}
    # the ends are 20 and 10, the mean heights those of 1 to 20 and of 2 to 10; one of two is shifted
    assert by["env0", 0].first == pytest.approx(20, abs=0.02)
    assert by["env1", 0].first == pytest.approx(10, abs=0.02)
    assert by["env0", 1].first == pytest.approx(10.5, abs=0.02)
    assert by["env1", 1].first == pytest.approx(6, abs=0.02)
    assert by["env0", 0].difference == pytest.approx(4, abs=0.02)
    assert by["env1", 0].difference == pytest.approx(0, abs=0.02)
    assert starts == start + 1


def test_two_sides_at_zero_are_equivalent_and_not_undecided_for_ever():
    zero = sides(flat(np.zeros(30)))
    found, _ = compare(zero, zero)
    assert found.p_equivalent < 0.05
    few = sides(flat(np.zeros(10)))
    assert compare(few, few)[0].p_equivalent > 0.05


def test_the_margin_near_zero_is_a_share_of_the_largest_return_of_the_curves():
    rng = np.random.default_rng(0)
    curves = lambda level: sides(  # noqa: E731
        np.linspace(10, 0, 20) + level + rng.normal(0, 0.001, (30, 1))
    )
    found, _ = compare(curves(0.0), curves(0.05))
    assert found.rows[0].margin == pytest.approx(0.1 * 0.1 * 10, rel=0.02)
    assert found.rows[0].p_equivalent < 0.05


def entries_of(write_run, tmp_path, first, second, **options):
    """The verdict on two settings, each given as seed -> (returns, fingerprint)."""
    for setting, runs in (("a", first), ("b", second)):
        for seed, (returns, fingerprint) in runs.items():
            write_run(setting=setting, seed=seed, returns=returns, fingerprint=fingerprint)
    data = read_records([tmp_path])
    (entry,) = reproducibility.verdicts(data, **options)
    return entry, data


GOOD, BAD = np.full(200, 200.0), np.full(200, 10.0)


def test_identical_needs_every_seed_of_one_setting(write_run, tmp_path):
    first = {seed: (GOOD, f"{seed}-") for seed in (1, 2, 3)}
    second = {1: (GOOD, "1-"), 7: (BAD, "7-"), 8: (BAD, "8-")}
    entry, _ = entries_of(write_run, tmp_path, first, second)
    assert entry["verdict"] == "undecided"
    assert entry["fingerprints"]["identical"] == 1
    assert entry["fingerprints"]["expected"] == 3
    assert entry["fingerprints"]["without_partner"] == 4


def test_runs_without_a_partner_are_counted(write_run, tmp_path):
    first = {seed: (GOOD, f"{seed}-") for seed in (1, 2)}
    entry, _ = entries_of(write_run, tmp_path, first, first | {3: (BAD, "3-"), 4: (BAD, "4-")})
    assert entry["verdict"] == "identical"
    assert entry["note"] == "runs without a partner: 2"


def test_identical_needs_fingerprints_of_every_pair_to_its_end(write_run, tmp_path):
    first = {seed: (GOOD, f"{seed}-") for seed in range(20)}
    for setting, level in (("a", GOOD), ("b", GOOD / 2)):
        for seed in range(20):
            folder = write_run(setting=setting, seed=seed, returns=level, fingerprint=f"{seed}-")
            path = folder / "updates.jsonl"
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            kept = rows if setting == "a" else rows[:1] if seed == 0 else []
            for row in rows:
                if row not in kept:
                    row.pop("fingerprint", None)
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
            (folder / "run.json").write_text(without_hashes(folder / "run.json"))
    (entry,) = reproducibility.verdicts(read_records([tmp_path]))
    assert len(first) == entry["fingerprints"]["expected"] == 20
    assert entry["fingerprints"]["pairs"] == 1
    assert entry["fingerprints"]["identical"] == 0  # it ends before the runs do
    assert entry["verdict"] == "different"


def without_hashes(path):
    return json.dumps(json.loads(path.read_text()) | {"files": {}})


def test_the_same_fingerprints_with_other_episodes_are_a_problem_with_the_data(write_run, tmp_path):
    entry, data = entries_of(write_run, tmp_path, {1: (GOOD, "x")}, {1: (BAD, "x")})
    assert entry["verdict"] != "identical"
    assert entry["fingerprints"]["other_episodes"] == 1
    assert "but other episodes" in " ".join(check(data)["problem"])


def without_fingerprints(runs):
    """Tables of runs given as (setting, environment, seed) -> returns."""
    pieces = []
    for (setting, env_id, seed), returns in runs.items():
        key = RunKey(f"{setting}-{env_id}-{seed}", "s", setting, env_id, seed)
        steps = np.arange(1.0, len(returns) + 1)
        pieces.append((key, {"step": steps, "wall_time": steps, "return": returns}))
    done = {"status": ["completed"], "completed": [True], "steps": [float(len(steps))]}
    return tables(pieces, runs=[(key, done) for key, _ in pieces])


def test_runs_with_returns_that_are_no_numbers_are_never_equivalent(write_run, tmp_path):
    for setting in "ab":
        for seed in range(40):
            write_run(setting=setting, seed=seed, returns=np.full(150, 10.0), fingerprint=setting)
    (entry,) = reproducibility.verdicts(read_records([tmp_path]))
    assert entry["verdict"] == "equivalent"
    diverged = np.r_[np.full(120, 10.0), np.full(30, np.nan)]
    write_run(setting="b", seed=99, returns=diverged, fingerprint="b")
    (entry,) = reproducibility.verdicts(read_records([tmp_path]))
    assert entry["verdict"] == "undecided"
    assert "30 returns are no numbers: points that average them are left out" in entry["note"]


def test_a_copy_without_fingerprints_is_equivalent():
    """168 runs, three of each game and setting: no statistics are needed."""
    rng = np.random.default_rng(0)
    first = {
        ("a", f"{game}-v5", seed): rng.normal(20, 5, 20)
        for game in list(ATARI)[:56]
        for seed in range(3)
    }
    second = {("b", env_id, seed): returns for (_, env_id, seed), returns in first.items()}
    (entry,) = reproducibility.verdicts(without_fingerprints(first | second), permutations=100)
    assert entry["verdict"] == "equivalent"
    assert "all curves of one side are those of the other" in entry["note"]


def test_swapping_the_settings_changes_no_verdict():
    """1,000 pairs, around the margin and around a difference."""
    rng = np.random.default_rng(1)
    seen = set()
    for number in range(1000):
        runs = int(rng.integers(2, 40))
        spread = rng.choice([0.01, 0.1])
        levels = [1.0, *rng.choice([1.0, 1.09, 1.11, 1.3], 1), rng.choice([0.0, 0.01])]
        first, second = (
            sides(flat(rng.normal(1, spread, runs)), flat(rng.normal(level, spread, runs)))
            for level in levels[:2]
        )
        options = {"permutations": 100, "seed": number}
        ahead, _ = compare(first, second, **options)
        back, _ = compare(second, first, **options)
        assert ahead.p_equivalent == pytest.approx(back.p_equivalent)
        verdict, other = (
            reproducibility._verdict(one._asdict() | {"environments": 2}, 0.05)
            for one in (ahead, back)
        )
        assert verdict == other
        seen.add(verdict)
    assert seen == {"equivalent", "different", "undecided"}


def test_many_equal_settings_are_rarely_different():
    """Of 8 equal settings there are 28 pairs: without a correction, a table in six has a false one."""
    rng = np.random.default_rng(0)
    wrong = 0
    for _ in range(20):
        data = without_fingerprints(
            {
                (f"x{setting}", "Breakout-v5", 10 * setting + seed): rng.normal(50, 5)
                + np.zeros(20)
                for setting in range(8)
                for seed in range(8)
            }
        )
        # the smallest p that a table can have is 28 / 1,000, so a false one is possible
        entries = reproducibility.verdicts(data, points=5, permutations=1000)
        assert len(entries) == 28
        wrong += any(entry["verdict"] == "different" for entry in entries)
    assert wrong <= 3  # 5% of 20 is 1; 3 or fewer with 98.4%


def test_an_environment_without_a_reference_is_not_pooled_with_others(write_run, tmp_path):
    rng = np.random.default_rng(3)
    for setting in ("a", "b"):
        for seed in range(8):
            words = {"setting": setting, "seed": seed, "fingerprint": None}
            write_run(**words, returns=rng.normal(30, 1, 200))
            write_run(**words, env_id="Mine-v0", returns=rng.normal(30_000, 1_000, 200))
    (entry,) = reproducibility.verdicts(read_records([tmp_path]))
    assert entry["environments"] == 2
    assert entry["final"]["first"] == pytest.approx((30 - 1.7) / 28.8, rel=0.05)
    assert "not in the pooled difference, for want of a reference: Mine-v0" in entry["note"]
    levels = {
        row["env_id"]: row["first"] for row in entry["by_environment"] if row["outcome"] == "final"
    }
    assert levels["Mine-v0"] == pytest.approx(30_000, rel=0.02)


def test_more_seeds_are_about_what_is_needed():
    """The number of further seeds that an undecided verdict names decides most of the time."""
    rng = np.random.default_rng(3)
    decided, needed = [], []
    for number in range(40):

        def draw(runs, level):
            return sides(*(flat(rng.normal(level, 0.15, runs)) for _ in range(2)))

        found, _ = compare(draw(5, 1.0), draw(5, 1.3), permutations=200, seed=number)
        if min(found.p_equivalent, found.p_different) <= 0.05:
            continue
        more = reproducibility.comparison.runs_needed(found, 0.05, 0.1)
        needed.append(more)
        if more > 60:
            continue
        again, _ = compare(
            draw(int(more), 1.0), draw(int(more), 1.3), permutations=200, seed=number
        )
        decided.append(min(again.p_equivalent, again.p_different) <= 0.05)
    assert len(decided) >= 5
    assert np.mean(decided) >= 0.6
    assert min(needed) >= 5


def test_a_short_environment_has_as_many_points_as_a_long_one(write_run, tmp_path):
    """50,000 steps of one environment, 1,000 of the other, where the systems differ at the very end."""
    rng = np.random.default_rng(8)
    for system, end in (("a", 0.0), ("b", 60.0)):
        for seed in range(6):
            words = {"system": system, "setting": "x", "seed": seed}
            write_run(**words, returns=rng.normal(10, 0.5, 500), total_steps=50_000)
            returns = rng.normal(10, 0.5, 200) + np.where(np.arange(200) >= 180, end, 0)
            write_run(**words, env_id="Pong-v5", returns=returns, total_steps=1_000)
    (entry,) = reproducibility.system_verdicts(read_records([tmp_path]))
    assert entry["environments"] == 2
    assert entry["verdict"] == "different"
    # 20 of the last 100 episodes have 60 points more: 12 of Pong's 14.6 + 20.7; the IQM halves it
    assert entry["final"]["difference"] == pytest.approx(12 / 35.3 / 2, rel=0.1)
    assert 900 <= entry["starts"] <= 1_000


def test_verdicts_of_records(write_run, tmp_path):
    rng = np.random.default_rng(4)
    for setting, level in (("a0-l0-t1", 10.0), ("a0-l0-t8", 20.0)):
        for seed in range(6):
            write_run(
                system="monobeast",
                setting=setting,
                seed=seed,
                returns=rng.normal(level, 1, 200),
                fingerprint=f"{setting}{seed}-",
            )
            write_run(setting=setting, seed=seed, returns=np.full(200, 5.0 + seed))
    tables = read_records([tmp_path])
    entries = {e["system"]: e for e in reproducibility.verdicts(tables)}
    assert entries["cleanba_ppo"]["verdict"] == "identical"
    assert entries["cleanba_ppo"]["fingerprints"]["pairs"] == 6
    other = entries["monobeast"]
    assert other["verdict"] == "different"
    assert other["fingerprints"]["identical"] == 0
    assert other["fingerprints"]["first_difference"] == 2
    # 10 points of Breakout are 10 / 28.8 of the human level
    assert other["final"]["difference"] == pytest.approx(10 / 28.8, rel=0.05)
    ranked = variation.variation(final_scores(tables))
    assert ranked["system"].tolist() == ["monobeast", "cleanba_ppo"]
    assert ranked["setting_share"].iloc[0] > 0.95
    assert ranked["setting_share"].iloc[1] == 0


@pytest.mark.parametrize(
    ("others", "compared"),
    [({"num_envs": 4}, 1), ({}, 1), ({"num_envs": 8}, 0)],
)
def test_fingerprints_of_runs_with_other_hyperparameters_are_not_compared(
    write_run, tmp_path, others, compared
):
    write_run(setting="a")
    header = write_run(setting="b", fingerprint="other") / "run.json"
    header.write_text(json.dumps(json.loads(header.read_text()) | {"hyperparameters": others}))
    tables = read_records([tmp_path])
    assert len(fingerprints.pairs(tables)) == compared
    (entry,) = reproducibility.verdicts(tables)
    assert entry["fingerprints"]["pairs"] == compared
    assert entry["fingerprints"]["identical"] == 0
    without = tables._replace(runs=tables.runs.drop(columns="hyperparameters"))
    assert len(fingerprints.pairs(without)) == 1


def test_the_first_difference_of_a_pair_of_settings_is_the_earliest_of_all_seeds():
    pieces = []
    for seed, version in ((1, 7), (2, 4), (3, 9)):
        for setting in ("a", "b"):
            prints = [f"{setting * (v >= version)}{v}" for v in range(2, 12)]
            columns = {"version": np.arange(2.0, 12), "fingerprint": prints}
            key = RunKey(f"{setting}{seed}", "s", setting, "Breakout-v5", seed)
            pieces.append((key, columns | {"step": columns["version"], "wall_time": np.zeros(10)}))
    episodes = {"step": [1.0, 2.0], "wall_time": [1.0, 2.0], "return": [1.0, 1.0]}
    data = tables(
        [(key, episodes) for key, _ in pieces],
        updates=pieces,
        runs=[(key, {"status": ["completed"], "completed": [True]}) for key, _ in pieces],
    )
    (entry,) = reproducibility.verdicts(data)
    assert entry["fingerprints"] == {
        "expected": 3, "pairs": 3, "identical": 0, "other_episodes": 0, "without_partner": 0,
        "versions_compared": 30, "first_difference": 4,
    }  # fmt: skip


@pytest.mark.parametrize(("seeds", "verdict"), [(45, "equivalent"), (32, "undecided")])
def test_verdicts_between_systems_are_by_setting_and_by_curves_alone(
    write_run, tmp_path, seeds, verdict
):
    """A side without failures needs 29 runs for one comparison; the first of three needs p < 5% / 3."""
    rng = np.random.default_rng(5)
    for system, level in (("a", 10.0), ("b", 10.0), ("c", 20.0)):
        for seed in range(seeds):
            returns = rng.normal(level, 0.5, 200)
            write_run(system=system, setting="x", seed=seed, returns=returns, fingerprint="same-")
    for seed in range(3):
        write_run(system="c", setting="y", seed=seed, returns=np.full(200, 1.0))
    entries = reproducibility.system_verdicts(read_records([tmp_path]))
    found = {(e["system_a"], e["system_b"], e["setting"]): e["verdict"] for e in entries}
    assert found == {
        ("a", "b", "x"): verdict,  # not identical, whatever the fingerprints
        ("a", "c", "x"): "different",
        ("b", "c", "x"): "different",
    }
    same, only, _ = entries
    assert same["p_equivalent"] == pytest.approx(3 * 0.9**seeds, rel=1e-6)
    assert only["final"]["difference"] == pytest.approx(10 / 28.8, rel=0.05)


def test_a_difference_late_in_the_longer_environment_is_found(write_run, tmp_path):
    rng = np.random.default_rng(7)
    for system, late in (("a", 10.0), ("b", 20.0)):
        for seed in range(6):
            early = rng.normal(10.0, 0.5, 200)
            words = {"system": system, "setting": "x", "seed": seed}
            write_run(**words, env_id="Pong-v5", returns=early, total_steps=1000)
            returns = np.concatenate([early, rng.normal(late, 0.5, 400)])
            write_run(**words, env_id="Breakout-v5", returns=returns, total_steps=3000)
    # one ends before the other has an episode
    write_run("a", "x", "Asterix-v5", returns=np.ones(5), total_steps=100)
    write_run("b", "x", "Asterix-v5", returns=np.ones(1), total_steps=3000)
    (entry,) = reproducibility.system_verdicts(read_records([tmp_path]))
    assert entry["verdict"] == "different"
    assert 1000 < entry["starts"] < 2000
    assert entry["environments"] == 2
    assert "fewer than two points: Asterix-v5" in entry["note"]


def test_variance_components_are_the_known_ones():
    rng = np.random.default_rng(5)
    found = np.mean(
        [
            variation.variance_components([rng.normal(rng.normal(0, 1), 2, 5) for _ in range(40)])
            for _ in range(500)
        ],
        axis=0,
    )
    assert found[0] == pytest.approx(1, rel=0.1)
    assert found[1] == pytest.approx(4, rel=0.05)


def test_variation_needs_two_settings():
    frame = pd.DataFrame(
        {"system": ["a"] * 3, "setting": ["s"] * 3, "env_id": ["e"] * 3, "score": [1.0, 2.0, 3.0]}
    )
    assert np.isnan(variation.variation(frame)["setting_share"].item())


def test_a_share_by_chance_is_not_taken_for_an_effect():
    """Runs of one distribution: the setting's share is more than 0, and what permutations give."""
    rng = np.random.default_rng(0)
    shares, chances, small = [], [], 0
    for number in range(40):
        scores = pd.DataFrame(
            {
                "system": "a",
                "setting": np.repeat(["x", "y", "z"], 4),
                "env_id": "e",
                "score": rng.normal(0, 1, 12),
            }
        )
        (row,) = variation.variation(scores, seed=number).itertuples()
        shares.append(row.setting_share)
        chances.append(row.share_by_chance)
        small += row.p <= 0.05
    assert np.mean(shares) > 0.05
    assert np.mean(shares) == pytest.approx(np.mean(chances), abs=0.06)
    assert small <= 6


def test_an_import_without_a_setting_is_compared_with_every_setting(write_run, tmp_path):
    for seed in (1, 2):
        write_run(system="ppo", setting="-", seed=seed)
        write_run(system="impala", setting="a", seed=seed)
        write_run(system="impala", setting="b", seed=seed)
    entries = reproducibility.system_verdicts(read_records([tmp_path]))
    assert [(e["system_a"], e["system_b"], e["setting"]) for e in entries] == [
        ("impala", "ppo", "a and -"),
        ("impala", "ppo", "b and -"),
    ]
