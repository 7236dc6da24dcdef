"""Sections about the data: hardware settings, problems, every run, videos."""

from pathlib import Path

import msgspec

from analysis.fingerprints import last_fingerprints
from analysis.scores import Rule, final_scores
from cleanba.record.folder import VIDEOS
from experiments.study import explain
from plots import style
from reports import cells
from reports.cells import NAMES, finite, in_order, names
from reports.page import Cell, Section
from reports.sections.parts import table
from reports.study import StudyRuns


def settings(study: StudyRuns) -> Section | None:
    """Return one row per hardware setting, in words."""
    known: dict[str, dict[str, list[str]]] = {}
    for run in study.plan.runs if study.plan else ():
        words = known.setdefault(run.setting.name, {}).setdefault(explain(run.setting), [])
        if (name := style.name_of(run.system)) not in words:
            words.append(name)
    rows = []
    for setting in study.look.settings:
        meanings = known.get(setting, {})
        for words, systems in meanings.items():
            rows.append((setting, words, ", ".join(systems) if len(meanings) > 1 else None))
    text = (
        "What each hardware setting gives to a run. Actor threads are processes in monobeast and HTS-RL, and "
        "peers in moolib."
    )
    found = table(("setting", "hardware", "systems"), rows)
    return Section("settings", "Hardware settings", text, table=found) if rows else None


def quality(study: StudyRuns) -> Section | None:
    """Return one row per problem with the data."""
    rows = [(run, cells.neutral(problem)) for run, problem in study.problems]
    text = "Runs that are not completed are excluded from every figure and number above."
    found = table(("run", "problem"), rows)
    return Section("quality", "Data quality", text, table=found) if rows else None


def runs(study: StudyRuns) -> Section:
    """Return one row per run, completed or not, with a link to its record, and its command."""
    of_run = (
        final_scores(study.tables, Rule(study.score_episodes)).set_index("run")["score"].to_dict()
    )
    prints = last_fingerprints(study.tables)
    rows = []
    for row in in_order(study.tables.runs).itertuples():
        folder = Path(str(row.run))
        link = cells.file_link(folder / "run.json", study.out)
        rows.append(
            (
                *names(row),
                cells.seed(row.seed),
                Cell(str(row.status), tone="good" if row.completed else "bad", link=link),
                cells.rounded(row.steps, 0),
                finite(of_run.get(row.run)),
                finite(row.sps),
                finite(row.seconds),
                prints.get(row.run, "")[:12] or None,
                cells.command(row.command) or None,
            )
        )
    columns = ("seed", "status", "steps", "score", "SPS", "seconds", "last fingerprint")
    found = table((*NAMES, *columns, "command"), rows)
    return Section("runs", "Runs", table=msgspec.structs.replace(found, code="command"))


def videos(study: StudyRuns) -> Section | None:
    """Return one row per run with a recorded video, with a link to it."""
    rows = []
    for row in in_order(study.tables.runs).itertuples():
        for file in sorted(Path(str(row.run)).glob(VIDEOS)):
            link = cells.file_link(file, study.out)
            rows.append((*names(row), cells.seed(row.seed), Cell(file.name, link=link)))
    text = "Games of trained networks, in environments that training did not use."
    found = table((*NAMES, "seed", "video"), rows)
    return Section("videos", "Videos", text, table=found) if rows else None
