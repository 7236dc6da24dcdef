"""Problems with the data of a study, beyond those of single records (see `analysis.quality`)."""

from collections.abc import Collection, Iterable, Mapping

from analysis import quality
from analysis.selection import completed, run_folder_name
from analysis.tables import Tables
from analysis.time_spent import counted_twice


def problems(
    tables: Tables,
    planned: Iterable[str] = (),
    settings_vary: Collection[str] = (),
    changed: Collection[str] = (),
) -> list[tuple[str, str]]:
    """Return every problem with the data as (run or system, problem).

    Args:
      tables: all runs, completed or not.
      planned: names of the runs that the study plans; a planned run without a record is a problem.
      settings_vary: systems whose settings may differ in hyperparameters; for all others, that is
        a problem.
      changed: names of planned runs that were completed by another command.
    """
    planned = list(planned)
    checked = quality.check(tables).itertuples(index=False, name=None)
    # The plan, where there is one, decides which runs are missing.
    found = [
        (run_folder_name(run), what)
        for run, what in checked
        if not (planned and what.startswith("missing"))
    ]
    runs = tables.runs
    for row in runs[~runs["completed"].to_numpy(bool)].itertuples():
        error = f": {row.error}" if isinstance(row.error, str) else ""
        found.append((run_folder_name(row.run), f"excluded from every figure and number{error}"))
    present = {run_folder_name(run) for run in runs["run"]}
    found += [(name, "planned, but there is no record") for name in planned if name not in present]
    if planned:
        found += [(name, "not planned by the study") for name in sorted(present - set(planned))]
    what = "made by a different command than the study's: excluded from every figure and number"
    found += [(name, what) for name in changed]
    complete = completed(tables, changed)
    done = complete.runs
    setting = done["setting"].astype(object).where(done["system"].isin(list(settings_vary)), "")
    for (system, env_id, _), group in done.groupby(["system", "env_id", setting], observed=True):
        found += [
            (str(system), f"{name} differs between runs on {env_id}: {', '.join(values)}")
            for name, values in _differences(group["hyperparameters"]).items()
        ]
    for system, group in done.groupby("system", observed=True):
        portable = [_is_portable(one) for one in group["hyperparameters"]]
        for name, of_portable in (("device_kind", False), ("machine", True)):
            kinds = {
                str(one.get(name) or "")
                for one, is_portable in zip(group["hardware"], portable, strict=True)
                if isinstance(one, Mapping) and is_portable == of_portable
            } - {""}
            if len(kinds) > 1:  # their arithmetic differs in the last bits
                listed = ", ".join(sorted(kinds))
                found.append((str(system), f"ran on several kinds of device: {listed}"))
    revisions = len({str(value) for value in done["revision"]})
    if revisions > 1:
        found.append(("all runs", f"made with {revisions} different source revisions"))
    # Systems use different packages; only packages that both runs list are compared.
    found += [
        ("all runs", f"made with different versions of {name}: {', '.join(values)}")
        for name, values in _differences(done["versions"]).items()
    ]
    found += [
        (run_folder_name(run), "does not list the versions of its packages")
        for run, versions in zip(done["run"], done["versions"], strict=True)
        if not versions
    ]
    found += counted_twice(complete)
    return list(dict.fromkeys(found))


def _is_portable(hyperparameters: object) -> bool:
    """Return whether the bits of a run depend on the architecture alone, not on the processor model."""
    return isinstance(hyperparameters, Mapping) and hyperparameters.get("portable") is True


def _differences(mappings: Iterable) -> dict[str, list[str]]:
    """Return the keys on which mappings disagree, with their values; seed and env_id do not count."""
    values: dict[str, dict[str, None]] = {}
    for mapping in mappings:
        for name, value in (mapping if isinstance(mapping, dict) else {}).items():
            if name not in ("seed", "env_id"):
                values.setdefault(name, {})[str(value)] = None
    return {name: list(seen) for name, seen in values.items() if len(seen) > 1}
