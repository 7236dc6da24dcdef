import functools
import itertools
import re

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
import scipy.optimize
from matplotlib.text import Text
from synthetic_runs import study_folder, write_run

import analysis
from analysis import lag_tables, selection, study_tables, summary
from analysis import speed as speeds_of
from analysis import time_spent as times_of
from analysis.importers.records import read_records
from analysis.scores import final_scores as scores_of
from experiments.games import ATARI_57
from experiments.study import find_study, load_study, study_names
from plots import (
    claims,
    differences,
    efficiency,
    end_labels,
    final_scores,
    game_improvements,
    improvements,
    intervals,
    learning_curves,
    policy_lag,
    profiles,
    run_times,
    speed,
    speed_curves,
    style,
    time_spent,
)

SOURCE = "source: run records of study quickstart"
SYSTEMS = ("cleanba_impala", "cleanba_impala-sync", "cleanba_ppo", "cleanba_ppo-sync")


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    study_folder(root, systems=SYSTEMS, steps=10_240)
    study_folder(root, SYSTEMS[:1], ("a0-l0,1-t2",), ("Pong-v5",), (1,), steps=5_120)
    return selection.completed(read_records([root]))


@pytest.fixture(scope="module")
def look(tables):
    return style.look_of(tables.runs["system"], tables.runs["setting"])


def speeds_by_x():
    """Speeds of a system and its baseline, three times as slow, in one to three runs."""
    rows = [
        (
            system,
            env_id,
            x,
            sps := share * 100.0 * x**0.8,
            len(seeds),
            [sps * s for s in seeds],
        )
        for system, share in (("cleanba_ppo", 3.0), ("cleanba_ppo-sync", 1.0))
        for env_id, seeds in (("Catch-v0", (1.0,)), ("Pong-v5", (0.9, 1.0, 1.1)))
        for x in (1, 2, 4, 8, 16)
    ]
    columns = ["system", "env_id", "x", "sps", "runs", "each"]
    frame = pd.DataFrame(rows, columns=columns)
    return frame.assign(ideal=frame["sps"].groupby(frame["system"]).transform("first") * frame["x"])


def some_claims():
    """A claim over environments, and one over few actors."""
    x = 2.0 ** np.arange(8)
    wide = pd.DataFrame({"environments": x, "formula": x**0.1, "simulated": x**0.1 + 0.01})
    few = pd.DataFrame({"actors": [1, 2, 3], "formula": [3, 2, 1], "simulated": [3, 2, 1.1]})
    return [("Claim 1: run time", "seconds", wide), ("Claim 2: latency", "updates", few)]


def curves_of_many_settings(count=8):
    """Curves of two systems under eight settings, half of which end at the same value."""
    rows = [
        (
            system,
            f"setting-{index}",
            env_id,
            step,
            step / 100,
            step * min(index, count // 2),
            1,
            2,
            5,
        )
        for system in ("cleanba_ppo", "cleanba_impala")
        for index in range(count)
        for env_id in ("Catch-v0", "Pong-v5")
        for step in range(0, 1_100, 100)
    ]
    names = ["system", "setting", "env_id", "step", "seconds", "value", "low", "high", "runs"]
    return pd.DataFrame(rows, columns=names)


def curves_over_decades():
    """Curves of losses, one environment each: in a small part of a decade to over eight decades."""
    losses = {"A-v5": (0.021, 0.024), "B-v5": (1.5, 9.0), "C-v5": (0.01, 9.0), "D-v5": (1e-3, 1e5)}
    frames = [
        pd.DataFrame({"step": [1, 2], "value": ends, "low": ends, "high": ends, "env_id": env_id})
        for env_id, ends in losses.items()
    ]
    return pd.concat(frames).assign(system="monobeast", setting="s", seconds=0.0, runs=3)


def game_by_game(games=57):
    """Improvements of a system over three others, from -80% to 10,000%, on every Atari game."""
    first, *others = [(system, "a0-l0-t1") for system in list(style.SYSTEMS)[:4]]
    values = np.concatenate([np.linspace(-0.8, 0.8, games - 2), [30.0, 100.0]])
    rows = [
        (*side, env_id, value, value - 0.5, value + 0.5, 3)
        for side in others
        for env_id, value in zip(ATARI_57, values, strict=False)
    ]
    columns = ["system", "setting", "env_id", "value", "low", "high", "runs"]
    return pd.DataFrame(rows, columns=columns), first


@pytest.fixture(scope="module")
def draw(tables, look):
    """Functions that draw each figure, by name."""
    means, runs = study_tables.learning_curves(tables)
    scores, speeds = study_tables.score_table(tables), speeds_of.speed_table(tables)
    times, lags = times_of.time_table(tables), lag_tables.lag_table(tables)
    aggregates, curves = study_tables.aggregate_table(tables), study_tables.efficiency(tables)
    shares = summary.profiles(scores_of(tables), np.linspace(0, 2, 21))
    seconds = pd.DataFrame(summary.run_times(tables))
    return {
        "aggregates": lambda: intervals.draw(aggregates, look, SOURCE, "score"),
        "efficiency": lambda: efficiency.draw(curves, look, SOURCE, "score"),
        "profiles": lambda: profiles.draw(shares, look, SOURCE, "score"),
        "run_times": lambda: run_times.draw(seconds, look, SOURCE),
        "steps": lambda: learning_curves.draw(means, look, SOURCE, runs=runs),
        "time": lambda: learning_curves.draw(means, look, SOURCE, x="seconds", runs=runs),
        "scores": lambda: final_scores.draw(scores, look, SOURCE),
        "speed": lambda: speed.draw(speeds, look, SOURCE),
        "spent": lambda: time_spent.draw(times, look, SOURCE),
        "lag": lambda: policy_lag.draw(lags, look, SOURCE),
        "scaling": lambda: speed_curves.draw(
            speeds_by_x(), look, SOURCE, "devices", "in proportion"
        ),
        "ratios": lambda: speed_curves.draw(
            speeds_of.speedups(speeds_by_x()), look, SOURCE, "variance (ms²)", y="times as fast"
        ),
        "losses": lambda: learning_curves.draw(
            curves_over_decades(), source=SOURCE, what="value loss"
        ),
        "claims": lambda: claims.draw(some_claims(), SOURCE),
        "improvements": lambda: improvements.draw(
            analysis.probability_of_improvement(selection.comparable(tables).tables), SOURCE
        ),
        "many_settings": lambda: learning_curves.draw(curves_of_many_settings(), source=SOURCE),
        "game_improvements": lambda: game_improvements.draw(*game_by_game(), source=SOURCE),
        "differences": lambda: differences.draw(analysis.compare(tables, "settings"), SOURCE),
    }


@pytest.fixture(scope="module")
def drawn(draw):
    """Returns a figure by name, drawn once."""
    return functools.cache(lambda name: draw[name]())


@pytest.fixture(scope="module")
def texts(drawn):
    """Returns the texts that a figure shows, by its name, laid out once."""
    return functools.cache(lambda name: shown_texts(drawn(name)))


BY_ENVIRONMENT = ("steps", "time", "scores", "speed", "spent", "lag", "scaling", "ratios")
OVER_ENVIRONMENTS = ("aggregates", "efficiency", "profiles", "run_times")
OF_RUNS = BY_ENVIRONMENT + OVER_ENVIRONMENTS
FIGURES = (
    *OF_RUNS, "losses", "claims", "improvements", "game_improvements", "differences", "many_settings",
)  # fmt: skip


def shown_texts(figure):
    with mpl.rc_context(style.RC):
        style.lay_out(figure)
        figure.draw_without_rendering()
    hidden = set()  # matplotlib keeps ticks beyond the ends of an axis, and does not draw them
    for axis in (axis for panel in figure.axes for axis in (panel.xaxis, panel.yaxis)):
        low, high = sorted(axis.get_view_interval())
        hidden |= {t.label1 for t in axis.get_major_ticks() if not low <= t.get_loc() <= high}
    texts = [text for text in figure.findobj(Text) if text not in hidden]
    return [text for text in texts if text.get_visible() and text.get_text().strip()]


@pytest.mark.parametrize("name", FIGURES)
def test_no_text_is_cut_off_at_the_edge(drawn, texts, name):
    figure = drawn(name)
    for text in texts(name):
        box = text.get_window_extent()
        assert figure.bbox.x0 - 1 <= box.x0, text
        assert box.x1 <= figure.bbox.x1 + 1, text
        assert figure.bbox.y0 - 1 <= box.y0, text
        assert box.y1 <= figure.bbox.y1 + 1, text


@pytest.mark.parametrize("name", FIGURES)
def test_no_two_texts_overlap(texts, name):
    boxes = [(t.get_text(), t.get_window_extent()) for t in texts(name)]
    for (a, box_a), (b, box_b) in itertools.combinations(boxes, 2):
        across = min(box_a.x1, box_b.x1) - max(box_a.x0, box_b.x0)
        down = min(box_a.y1, box_b.y1) - max(box_a.y0, box_b.y0)
        assert not (across > 1 and down > 1), (a, b)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"), (950, "950"), (1000, "1k"), (1234, "1.23k"), (50_000, "50k"), (1e6, "1M"),
        (1.5e6, "1.5M"), (2e9, "2G"), (-1000, "-1k"),
    ],
)  # fmt: skip
def test_large_numbers_are_short(value, text):
    assert style.short_number(value) == text


def test_counts_are_words_of_their_number():
    assert style.counts_text([1, 1.0], "environments") == "1 environment"
    assert style.counts_text([1, np.nan, 57], "environments") == "1 to 57 environments"
    assert style.counts_text([1_000]) == "1,000 runs"
    assert style.counts_text([np.nan]) == ""
    assert style.counts_text([1], "seeds") == "1 seed"
    assert style.counts_text([1, 3], "seeds") == "1 to 3 seeds"
    assert style.sentence("", "a", "", "b") == "a · b"


@pytest.mark.parametrize("name", OF_RUNS)
def test_every_figure_says_how_many_seeds_and_where_the_data_come_from(texts, name):
    said = " ".join(" ".join(text.get_text() for text in texts(name)).split())
    assert SOURCE in said
    assert ("1 to 3 seeds" if name in BY_ENVIRONMENT else "6 to 7 runs") in said


def test_intervals_are_drawn_from_end_to_end(drawn, tables):
    frame = study_tables.aggregate_table(tables)
    medians = frame[frame["metric"] == "median"]
    panel = drawn("aggregates").axes[0]
    widths = sorted((bar.get_x(), bar.get_x() + bar.get_width()) for bar in panel.patches)
    expected = sorted(zip(medians["low"], medians["high"], strict=True))
    assert np.allclose(widths, expected)
    low, high = panel.get_xlim()
    assert low < medians["low"].min()  # no bar ends at the edge, as if it were cut off
    assert high > medians["high"].max()


def test_the_interval_of_a_final_score_is_drawn_from_end_to_end():
    scores = pd.DataFrame(
        {
            "system": ["a", "b"], "setting": "x", "env_id": "Pong-v5", "value": [2.0, 5.0],
            "low": [1.0, 3.0], "high": [6.0, 7.5], "runs": 5, "each": [(1.0, 2.0), (4.0, 5.0)],
        }
    )  # fmt: skip
    figure = final_scores.draw(scores, style.look_of(["a", "b"], ["x"]), SOURCE)
    lines = [line.get_xdata() for line in figure.axes[0].lines if line.get_linestyle() == "-"]
    assert sorted(tuple(x) for x in lines if len(x) == 2) == [(1.0, 6.0), (3.0, 7.5)]
    few = final_scores.draw(scores.assign(runs=3), style.look_of(["a", "b"], ["x"]), SOURCE)
    assert not [line for line in few.axes[0].lines if len(line.get_xdata()) == 2]


def test_a_band_is_drawn_from_its_low_to_its_high_end():
    x = np.array([1.0, 2.0, 3.0])
    curve = pd.DataFrame({"step": x, "value": 10 * x, "low": 10 * x - 4, "high": 10 * x + 7})
    curve = curve.assign(system="a", setting="s", env_id="Pong-v5", runs=5)
    panel = learning_curves.draw(curve, source=SOURCE).axes[0]
    (band,) = panel.collections
    drawn = {tuple(vertex) for vertex in band.get_paths()[0].vertices}
    assert drawn >= {(a, 10 * a - 4) for a in x} | {(a, 10 * a + 7) for a in x}
    assert panel.lines[0].get_ydata().tolist() == [10, 20, 30]
    assert not learning_curves.draw(curve.assign(runs=3), source=SOURCE).axes[0].collections


def test_the_mean_lag_is_that_of_the_rollouts():
    shares = pd.DataFrame({"value": [1.0, 2.0, 9.0], "share": [0.5, 0.4, 0.1]})
    shares = shares.assign(system="a", setting="s", env_id="Pong-v5", runs=3)
    panel = policy_lag.draw(shares, style.look_of(["a"], ["s"]), SOURCE).axes[0]
    assert [text.get_text() for text in panel.texts] == ["50%", "mean 2.20"]  # 0.5 + 0.8 + 0.9
    bars = {bar.get_x() + bar.get_width() / 2: -bar.get_height() for bar in panel.patches}
    heights = [bars[value] for value in (1.0, 2.0, 9.0)]
    assert np.array(heights) / sum(bars.values()) == pytest.approx([0.5, 0.4, 0.1])


@pytest.mark.slow
@pytest.mark.parametrize("name", FIGURES)
def test_the_same_data_give_the_same_files(draw, name, tmp_path):
    first = style.save(draw[name](), tmp_path / "a", name)
    second = style.save(draw[name](), tmp_path / "b", name)
    assert first.png.read_bytes() == second.png.read_bytes()
    assert first.svg.read_bytes() == second.svg.read_bytes()
    assert b"<script" not in first.svg.read_bytes()


@pytest.mark.parametrize("name", [name for name in OF_RUNS if name != "spent"])
def test_a_system_has_the_same_colour_on_every_figure(drawn, look, name):
    """All but that of the time spent, whose colours are those of activities."""
    figure = drawn(name)
    colours = {look.name(system): mpl.colors.to_rgb(look.colour(system)) for system in look.systems}
    if figure.legends:
        (legend,) = figure.legends
        found = {
            text.get_text(): mpl.colors.to_rgb(line.get_color())
            for text, line in zip(legend.get_texts(), legend.get_lines(), strict=True)
            if text.get_text() in colours
        }
        assert found
        assert found == {label: colours[label] for label in found}
    else:
        found = colours
    parts = {line.get_color() for panel in figure.axes for line in panel.lines}
    parts |= {bar.get_facecolor()[:3] for panel in figure.axes for bar in panel.patches}
    greys = {style.INK, style.GREY, style.LINE}
    assert {mpl.colors.to_rgb(c) for c in parts - greys} == set(found.values())


def test_curves_of_two_settings_that_agree_are_both_visible(drawn, look):
    panel = drawn("steps").axes[0]
    colour = look.colour("cleanba_ppo", "a0-l0-t1")
    lines = [
        line for line in panel.lines if line.get_color() == colour and line.get_linewidth() >= 1
    ]
    assert len(lines) == 2  # beside the thin ones of single runs
    first, second = sorted(lines, key=lambda line: line.get_zorder() or panel.lines.index(line))
    assert np.array_equal(first.get_ydata(), second.get_ydata(), equal_nan=True)
    assert first.get_linewidth() > 2 * second.get_linewidth()  # the second lies within the first
    assert first.get_linestyle() == "-"
    assert second.get_linestyle() != "-"


def test_the_drawn_numbers_are_those_of_the_table(drawn, tables, look):
    speeds = speeds_of.speed_table(tables)
    here = speeds[speeds["env_id"] == "CartPole-v1"]
    widths = sorted(patch.get_width() for patch in drawn("speed").axes[0].patches)
    assert widths == pytest.approx(sorted(here["sps"]))


def test_bars_of_time_spent_add_up_to_the_whole(drawn):
    for panel in drawn("spent").axes:
        ends = {}
        for patch in panel.patches:
            end = patch.get_x() + patch.get_width()
            ends[patch.get_y()] = max(end, ends.get(patch.get_y(), 0))
        assert list(ends.values()) == pytest.approx([100] * len(ends))


def test_names_with_dollar_signs_are_drawn_as_they_are(tmp_path):
    study_folder(tmp_path, ("cost_$5_and_$6", "free"), seeds=(1, 2), steps=5_120)
    tables = selection.completed(read_records([tmp_path]))
    look = style.look_of(tables.runs["system"], tables.runs["setting"])
    figure = speed.draw(speeds_of.speed_table(tables), look, SOURCE)
    assert any(text.get_text() == "cost_$5_and_$6" for text in shown_texts(figure))
    style.save(figure, tmp_path, "speed")


# What protanopes and deuteranopes see of linear RGB (Machado, Oliveira and Fernandes, 2009).
PROTANOPIA = [
    [0.152286, 1.052583, -0.204868],
    [0.114503, 0.786281, 0.099216],
    [-0.003882, -0.048116, 1.051998],
]
DEUTERANOPIA = [
    [0.367322, 0.860646, -0.227968],
    [0.280085, 0.672501, 0.047413],
    [-0.011820, 0.042940, 0.968881],
]


DAY, NIGHT = style.PALETTE, tuple(style.DARK[colour] for colour in style.PALETTE)


def linear(colours):
    colours = np.array([mpl.colors.to_rgb(colour) for colour in colours])
    return np.where(colours <= 0.04045, colours / 12.92, ((colours + 0.055) / 1.055) ** 2.4)


@pytest.mark.parametrize("colours", [DAY, NIGHT], ids=["day", "night"])
@pytest.mark.parametrize("seen", [np.eye(3), PROTANOPIA, DEUTERANOPIA], ids=["all", "p", "d"])
def test_the_colour_blind_can_tell_the_systems_apart(seen, colours):
    lab = to_lab(np.clip(linear(colours) @ np.transpose(seen), 0, 1))
    for a, b in itertools.combinations(lab, 2):
        assert np.linalg.norm(a - b) > 12


@pytest.mark.parametrize(
    ("colours", "paper"),
    [(DAY, style.PAPER), (NIGHT, style.DARK[style.PAPER])],
    ids=["day", "night"],
)
def test_thin_lines_have_enough_contrast(colours, paper):
    weights = [0.2126, 0.7152, 0.0722]  # of WCAG 2
    drawn, behind = linear(colours) @ weights, linear([paper]) @ weights
    contrast = (np.maximum(drawn, behind) + 0.05) / (np.minimum(drawn, behind) + 0.05)
    assert contrast.min() > 4.5


@pytest.mark.parametrize("name", study_names())
def test_no_two_systems_of_a_study_look_alike(name):
    systems = {run.system for run in load_study(find_study(name)).runs}
    look = style.look_of(systems, ["x"])
    assert len({(look.colour(one), look.marker(one)) for one in systems}) == len(systems)
    assert len({style.name_of(one) for one in systems}) == len(systems)


def test_a_system_looks_the_same_beside_any_others():
    alone = style.look_of(["cleanba_ppo"], ["x"])
    beside = style.look_of(["moolib", "mine", "cleanba_ppo"], ["x"])
    for look in (alone, beside):
        assert look.colour("cleanba_ppo") == style.SYSTEMS["cleanba_ppo"].colour
        assert look.marker("cleanba_ppo") == style.SYSTEMS["cleanba_ppo"].marker


def test_the_time_curve_ends_at_the_mean_of_the_final_scores(tmp_path):
    for seed, seconds in ((1, 4.2), (2, 4.2), (3, 10.6)):
        speed = 10_240 / (seconds - 1.5)  # 1.5 s of compilation
        write_run(tmp_path / f"s{seed}", seed=seed, steps=10_240, sps=speed)
    tables = selection.completed(read_records([tmp_path]))
    curves, scores = study_tables.learning_curves(tables).means, study_tables.score_table(tables)
    figure = learning_curves.draw(curves, source=SOURCE, x="seconds")
    (line,) = (line for line in figure.axes[0].lines if len(line.get_xdata()) == len(curves))
    assert line.get_ydata()[-1] == pytest.approx(scores["value"].item())
    assert line.get_xdata()[-1] == pytest.approx(np.mean([4.2, 4.2, 10.6]), rel=0.02)


def to_lab(linear):
    to_xyz = np.array(
        [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    )
    x, y, z = np.cbrt(np.maximum(linear @ to_xyz.T / [0.9505, 1.0, 1.089], 0.008856)).T
    return np.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], axis=1)


def test_policy_lag_is_counted_in_whole_versions():
    row = {
        "system": "a",
        "setting": "one",
        "env_id": "Catch-v0",
        "runs": 3,
        "value": 0,
        "share": 1.0,
    }
    figure = policy_lag.draw(pd.DataFrame([row]), style.Look(("a",), ("one",)), SOURCE)
    ticks = figure.axes[0].get_xticks()
    assert len(ticks)
    assert (ticks == np.round(ticks)).all()


def test_more_systems_than_colours_differ_in_their_markers():
    names = tuple(f"system-{index}" for index in range(20))
    look = style.Look(names, ("one",))
    assert len({(look.colour(name, "one"), look.marker(name)) for name in names}) == len(names)


def test_every_curve_has_markers_that_others_do_not_cover():
    names = tuple(f"system-{index}" for index in range(9))
    look = style.Look(names, ("one",))
    x = np.linspace(0.0, 1.0, 100)
    frames = [
        pd.DataFrame(
            {
                "system": name, "setting": "one", "env_id": "Catch-v0", "step": x,
                "value": np.where(x <= 1 - index / 10, x, np.nan), "low": np.nan, "high": np.nan, "runs": 1,
            }
        )
        for index, name in enumerate(names)
    ]  # fmt: skip
    figure = learning_curves.draw(pd.concat(frames), look, SOURCE)
    assert len(figure.axes[0].lines) == len(names)
    for line in figure.axes[0].lines:
        assert np.isfinite(line.get_ydata()[line.get_markevery()]).sum() >= 3
    same = learning_curves.draw(pd.concat(frame.assign(value=x) for frame in frames), look, SOURCE)
    marks = [mark for line in same.axes[0].lines for mark in line.get_markevery()]
    assert len(set(marks)) == len(marks) == 4 * len(names)


def test_of_one_system_the_settings_have_shades_of_its_colour(tables):
    only = selection.of_runs(
        tables, tables.runs["run"][(tables.runs["system"] == "cleanba_ppo").to_numpy(bool)]
    )
    look = style.look_of(only.runs["system"], only.runs["setting"])
    figure = learning_curves.draw(study_tables.learning_curves(only).means, look, SOURCE)
    colours = {line.get_color() for panel in figure.axes for line in panel.lines}
    assert len(colours) == len(look.settings) == 2
    assert look.colour("cleanba_ppo", look.settings[0]) == style.SYSTEMS["cleanba_ppo"].colour
    assert [line.get_color() for line in figure.legends[0].get_lines()[-2:]] == [
        look.colour("cleanba_ppo", setting) for setting in look.settings
    ]


def test_pairs_of_system_and_setting_without_runs_have_no_row(tables, look):
    lags = lag_tables.lag_table(tables)
    lags = lags[(lags["system"] != "cleanba_ppo") | (lags["setting"] == "a0-l0-t1")]
    figure = policy_lag.draw(lags, look, SOURCE)
    labels = [t.get_text() for t in figure.axes[0].get_yticklabels()]
    assert labels.count("a0-l0,1-t2") == 3
    assert labels.count("a0-l0-t1") == 4
    assert set(labels) - set(look.settings) == {look.name(system) for system in look.systems}


@pytest.mark.parametrize(
    ("seconds", "labels", "axis"),
    [
        ((10.0, 30.0), ["10.0 s (1.0×)", "30.0 s (3.0×)"], "seconds per run"),
        ((60.0, 180.0), ["1.0 min (1.0×)", "3.0 min (3.0×)"], "minutes per run"),
    ],
)
def test_run_times_are_in_a_unit_that_fits_them(seconds, labels, axis):
    times = pd.DataFrame(
        {
            "system": ["a", "b"],
            "setting": "x",
            "seconds": seconds,
            "runs": 3,
            "times_the_fastest": [1.0, 3.0],
        }
    )
    figure = run_times.draw(times, style.look_of(times["system"], times["setting"]), SOURCE)
    (panel,) = figure.axes
    assert [text.get_text() for text in panel.texts] == labels
    assert panel.get_xlabel() == axis


def test_a_logarithmic_axis_has_two_or_more_plain_numbers(drawn, texts):
    shown = set(texts("losses"))
    for panel in drawn("losses").axes:
        labels = [t.get_text() for t in panel.get_yticklabels(which="both") if t in shown]
        assert 2 <= len(labels) <= 9, labels
        assert all(re.fullmatch(r"[0-9.]+k?", label) for label in labels), labels


@pytest.mark.parametrize("what", ["episodic return", "value loss"])
def test_many_environments_are_drawn_small(what):
    x = np.linspace(1.0, 100.0, 10)
    frames = [
        pd.DataFrame({"step": x, "value": x, "low": x, "high": x, "env_id": f"Game{i}-v5"})
        for i in range(15)
    ]
    curves = pd.concat(frames).assign(system="a", setting="s", runs=3)
    figure = learning_curves.draw(curves, source=SOURCE, what=what)
    assert len({round(panel.get_position().x0, 3) for panel in figure.axes}) == 7
    assert figure.axes[0].lines[0].get_xdata()[-1] == 100  # of every other point, the last is one


def test_differences_are_drawn_in_margins():
    row = {"env_id": "Pong-v5", "outcome": "final", "margin": 0.5}
    rows = [row | {"low": 0.5, "difference": 1.0, "high": 1.5}]
    pair = {"system_a": "a", "system_b": "b", "verdict": "different", "by_environment": rows}
    panel = differences.draw(pd.DataFrame([pair])).axes[0]
    drawn = [np.asarray(line.get_xdata(), float).tolist() for line in panel.lines]
    assert [1.0, 3.0] in drawn
    assert [2.0] in drawn


def test_differences_at_the_edge_are_explained():
    row = {"env_id": "Pong-v5", "outcome": "final", "margin": 0.1, "low": 1.9, "high": 2.1}
    for difference, explained in ((2.0, True), (0.2, False)):
        rows = [row | {"difference": difference}]
        pair = {"system_a": "a", "system_b": "b", "verdict": "different", "by_environment": rows}
        figure = differences.draw(pd.DataFrame([pair]))
        said = " ".join(text.get_text() for text in figure.findobj(mpl.text.Text))
        assert ("beyond 5 margins: at the edge" in " ".join(said.split())) == explained


def test_probabilities_of_improvement_are_drawn_from_end_to_end():
    row = {"x": "a, -", "y": "b, -", "value": 0.6, "low": 0.4, "high": 0.7, "environments": 2}
    (bar,) = improvements.draw(pd.DataFrame([row])).axes[0].patches
    assert (bar.get_x(), bar.get_x() + bar.get_width()) == pytest.approx((0.4, 0.7))


def test_improvements_by_game_are_sorted_and_coloured_by_the_better_side():
    frame, first = game_by_game(games=4)
    frame["value"] = [3.0, -0.5, 0.0, 1.0] * 3
    look = style.look_of([*frame["system"], first[0]], [first[1]])
    figure = game_improvements.draw(frame, first, look)
    for panel, system in zip(figure.axes, look.systems[1:], strict=True):
        assert [bar.get_width() for bar in panel.patches] == [3.0, 1.0, 0.0, -0.5]
        colours = [mpl.colors.to_hex(bar.get_facecolor()) for bar in panel.patches]
        assert colours == [look.colour(first[0])] * 3 + [look.colour(system)]
        names = [label.get_text() for label in panel.get_yticklabels()]
        assert names == [ATARI_57[i].removesuffix("-v5") for i in (0, 3, 2, 1)]


def test_more_settings_than_lines_are_named_at_the_ends_of_their_curves(drawn):
    figure = drawn("many_settings")
    titles = [panel.get_title() for panel in figure.axes]
    names = ("Cleanba PPO", "Cleanba IMPALA")
    assert titles == [f"{name}\n{env_id}" for name in names for env_id in ("Catch-v0", "Pong-v5")]
    assert not figure.legends
    for panel in figure.axes:
        labels, leaders = panel.texts[::2], panel.texts[1::2]
        ends = {one.get_text(): lead for one, lead in zip(labels, leaders, strict=True)}
        assert list(ends) == [f"setting-{i}" for i in (0, 1, 2, 3, 7, 6, 5, 4)]  # from below
        for index in range(8):
            assert ends[f"setting-{index}"].xy == (1000, 1000 * min(index, 4))
        lines = {line.get_color() for line in panel.lines}
        assert lines == {label.get_color() for label in labels}


def test_names_are_as_near_to_the_ends_of_their_curves_as_their_height_allows():
    """SciPy's general solver is the oracle."""
    rng = np.random.default_rng(0)
    for count in (1, 2, 5, 9):
        wanted, step = np.sort(rng.uniform(0.2, 0.8, count)) ** 2 + 0.2, 0.06
        gaps = scipy.optimize.LinearConstraint(np.diff(np.eye(count), axis=0), step, np.inf)
        found = scipy.optimize.minimize(
            lambda x, wanted=wanted: ((x - wanted) ** 2).sum(),
            step * np.arange(count),
            constraints=[gaps] if count > 1 else [],
            method="SLSQP",
            options={"ftol": 1e-12},
        ).x
        assert end_labels.spread(wanted, step) == pytest.approx(found, abs=1e-4)
    crowded = end_labels.spread(np.full(5, 0.5), step=0.4)
    assert crowded == pytest.approx(np.linspace(0, 1, 5))
    assert end_labels.spread(np.array([1.0, 1.0]), step=0.1) == pytest.approx([0.9, 1.0])


@pytest.mark.parametrize(
    ("factor", "scale"), [(1.3, "linear"), (4.0, "linear"), (6.0, "log"), (500.0, "log")]
)
def test_the_axis_of_speeds_has_labels_to_read_them_by(look, factor, scale):
    speeds = speeds_by_x()
    speeds = speeds[(speeds["system"] == "cleanba_ppo") & (speeds["env_id"] == "Catch-v0")]
    sps = 250.0 * np.geomspace(1, factor, len(speeds))
    speeds = speeds.assign(sps=sps, each=[[value] for value in sps])
    figure = speed_curves.draw(speeds, look, SOURCE, "actors")
    figure.canvas.draw()
    axis = figure.axes[0].yaxis
    low, high = axis.get_view_interval()
    labels = [t for t in axis.get_majorticklocs() if low <= t <= high]
    assert len(labels) >= 3
    assert axis.get_scale() == scale
    assert low > 0 if scale == "log" else low == 0


@pytest.mark.parametrize(("proportion", "scale"), [(0.25, "linear"), (1.0, "log")])
def test_the_line_in_proportion_lies_within_the_axis_of_speeds(look, proportion, scale):
    speeds = speeds_by_x()
    speeds = speeds[(speeds["system"] == "cleanba_ppo") & (speeds["env_id"] == "Catch-v0")]
    sps = np.full(len(speeds), 250.0)
    ideal = sps * np.maximum(1.0, proportion * speeds["x"])
    speeds = speeds.assign(sps=sps, each=[[value] for value in sps], ideal=ideal)
    axis = speed_curves.draw(speeds, look, SOURCE, "devices", "in proportion").axes[0].yaxis
    assert axis.get_scale() == scale
    assert axis.get_view_interval()[1] > ideal.max()
