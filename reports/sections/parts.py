"""Functions that all sections share."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure as Drawing

from analysis.selection import GROUP
from cleanba.record import replace_file
from plots import style
from reports.page import Figure, Table, Value
from reports.study import StudyRuns

BANDS = "95% bootstrap bands over seeds"
MANY_ENVIRONMENTS = 6  # from which on profiles say more than a table


def figure(
    study: StudyRuns,
    name: str,
    caption: str,
    frame: pd.DataFrame,
    draw: Callable[[], Drawing],
    data: pd.DataFrame | str | None = None,
) -> Figure:
    """Draw and save a figure.

    Args:
      study: the study of the page.
      name: file name, without ending.
      caption: what it shows; the number of seeds and the source are added.
      frame: the rows drawn, with `runs` and, over environments, `environments`; stored beside the figure.
      draw: draws it.
      data: what is stored instead, if more than `frame` is drawn; or the figure that stores it.
    """
    folder = study.out / "figures"
    save(draw, folder, name)
    caption = f"{caption} {_counts(study, frame)}; {study.source}."
    if isinstance(data, str):
        return Figure(name, caption, data)
    data = frame if data is None else data
    if "each" in data:
        data = data.assign(each=[" ".join(f"{one:g}" for one in each) for each in data["each"]])
    for column in ("seed", "step"):  # whole numbers, which would be rounded like the others
        if column in data and (data[column].dropna() % 1 == 0).all():
            data = data.assign(**{column: data[column].astype("Int64")})
    replace_file(folder / f"{name}.csv", data.to_csv(index=False, float_format="%.6g"))
    return Figure(name, caption)


def save(draw: Callable[[], Drawing], folder: Path, name: str) -> None:
    """Draw a figure and save it as PNG and SVG. Tests of texts and tables replace it."""
    style.save(draw(), folder, name)


def _counts(study: StudyRuns, frame: pd.DataFrame) -> str:
    """Format the numbers of seeds, environments and runs in a figure."""
    if "env_id" in frame:
        return style.counts_text(frame["runs"], "seeds")
    counts = (
        style.counts_text(study.scores["runs"], "seeds"),
        style.counts_text(frame["environments"], "environments"),
        style.counts_text(frame["runs"]),
    )
    notes = "; ".join(note for note in frame.get("note", pd.Series(dtype=object)).unique() if note)
    return ", ".join(counts) + (f" ({notes})" if notes else "")


def table(
    columns: Sequence[str], rows: Sequence[tuple[Value, ...]], folded: bool = False
) -> Table | None:
    """Return a table without the columns that are empty; None if it has no rows."""
    if not rows:
        return None
    kept = [i for i in range(len(columns)) if any(row[i] is not None for row in rows)]
    cut = tuple(tuple(row[i] for i in kept) for row in rows)
    return Table(tuple(columns[i] for i in kept), cut, folded)


def by_group(frame: pd.DataFrame) -> dict[tuple, object]:
    """Return the rows by system, setting and environment."""
    return {tuple(getattr(row, name) for name in GROUP): row for row in frame.itertuples()}
