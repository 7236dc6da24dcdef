"""Audits a published archive: `python -m reports.audit dist/quickstart.zip`.

1. Its manifests are compared with its files, and its records are read.
2. The page's tables and findings are made again from the records, and compared with its `result.json`.
3. Each run that can be repeated is repeated in part: its episodes are simulated from the recorded actions;
   segments of the training, which the auditor's seed draws, are computed again (cleanba/audit/segments.py).

Writes the outcome as JSON, Markdown and HTML to `site/audits/<study>/`, again after every run, so that an
interrupted audit can be continued (`--resume`). Exit code 0: nothing was refuted. 1: something was. 2: the
archive cannot be read. 130: interrupted.
"""

import contextlib
import os
import re
import secrets
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import bagit
import msgspec
import tyro
from tqdm import tqdm

from analysis.output import bad_input
from cleanba.audit.replay import Outcome
from cleanba.audit.verification import check_module
from cleanba.record import find_runs, replace_file
from cleanba.record.files import MB, read_file
from cleanba.run.arguments import Count, CountOrZero
from cleanba.run.command_line import BadInput, parse
from experiments.pool import available_cores
from reports import build, render
from reports.archive import is_plain, sha256, toolkit
from reports.command import run_command
from reports.page import Cell, Page, Section, Table, Value, read_json
from reports.unpack import unpack

# Numbers may differ in their last bits where libraries add in another order on another processor.
TOLERANCE = 1e-6
NO_FIGURE = "data:image/svg+xml;base64,"
FIGURE = re.compile(
    r'(data:image/svg\+xml;base64,|<script type="application/gzip" id="svg-\w+">)[\w+/=]*'
)
LONGEST_REASON = 300  # characters
INTERRUPTED = 130  # exit code, as shells report SIGINT
LARGEST_PAGE = 64 * MB
TONES = {"verified": "good", "refuted": "bad", "failed": "bad"}


class Audit(msgspec.Struct, kw_only=True):
    """`audit.json`.

    Attributes:
      archive: name of the file.
      sha256: SHA-256 of the file.
      records: number of runs in the archive.
      segments: number of segments to repeat of each run.
      seed: seed that drew the segments.
      module: module that repeats the training of other systems; "" for none.
      runs_matching: regular expression that names of runs must contain to be checked; "" for all.
      tables: first difference between the page and the one made from the records; "" if there is none.
      other_toolkit: what made the page, if there is a difference and it was another version of the toolkit.
      seconds: duration of each part.
      runs: outcome of each run that was checked, by its name.
    """

    archive: str
    sha256: str
    records: int
    segments: int
    seed: int
    module: str = ""
    runs_matching: str = ""
    tables: str
    other_toolkit: str = ""
    seconds: dict[str, float]
    runs: dict[str, Outcome]

    @property
    def refuted(self) -> bool:
        """Whether anything is, or a check ended abnormally."""
        bad = {outcome.verdict for outcome in self.runs.values()} & {"refuted", "failed"}
        return bool((self.tables and not self.other_toolkit) or bad)


@dataclass(frozen=True)
class Args:
    """Command line."""

    archive: Annotated[str, tyro.conf.Positional]
    """The archive."""
    segments: CountOrZero = 5
    """Segments of each run's training to repeat."""
    seed: CountOrZero | None = None
    """Seed that draws the segments; random by default."""
    module: str | None = None
    """Module that repeats the training of systems that do not come with the toolkit, see
    docs/adding-a-baseline.md."""
    runs_matching: str = ""
    """Regular expression that names of runs must contain to be checked; by default all are."""
    resume: bool = False
    """Continue an earlier audit of the archive: with its seed, and without the runs that it checked."""
    jobs: Count | None = None
    """Runs to check at a time; by default one per core."""
    out: str = "site/audits"
    """Folder of audits."""
    progress: bool = True
    """Show a progress bar."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns 0, 1 if something is refuted, 2 for bad input, or 130 if interrupted."""
    try:
        checking = False
        args = parse(Args, sys.argv[1:] if argv is None else argv, "Audit a published archive.")
        pattern = pattern_of(args.runs_matching)
        check_module(args.module)
        file = Path(args.archive)
        with tempfile.TemporaryDirectory() as folder:
            bag = unpack(file, Path(folder))
            if not is_plain(bag.name):
                raise BadInput(f"{file}: {bag.name!r} cannot be the name of a study")
            out = Path(args.out) / bag.name
            render.check_replaceable(out / "index.html", out / "README.md")
            data = bag / "data"
            page = read_json(data / "result.json")
            records = records_of(data, bag.name, page)
            chosen = chosen_from(records, pattern, args)
            audit = begin(args, file, data, page, records, out / "audit.json")
            checking = True
            check_runs(chosen, args, audit, lambda: write(audit, page, out))
    except build.ERRORS as error:
        if checking:  # such as a full disk
            raise
        return bad_input(one_line(error))
    except KeyboardInterrupt:
        print("interrupted; make audit RESUME=1 continues it", file=sys.stderr)
        return INTERRUPTED
    report = write(audit, page, out)
    print("\n".join(map(one_line, (*report.finding, *report.caveats))))
    print(out / "index.html")
    return int(audit.refuted)


def one_line(text: object) -> str:
    """Return a text of an archive as one line without control characters."""
    return render.visible(" ".join(str(text).split()))


def records_of(data: Path, name: str, page: Page) -> list[Path]:
    """Return the records of an archive, which all lie in the one folder that its page is made from.

    Raises:
      BadInput: if there are records elsewhere, or the page belongs to another study.
    """
    if page.name != name:
        raise BadInput(f"{name}: its page belongs to another study")
    folder = data / "runs" / name
    records = find_runs(folder)
    others = {path.parent for path in data.rglob("run.json")} - set(records)
    if others or any(path.parent != folder for path in records):
        raise BadInput(f"{name}: records lie in other folders than runs/{name}/*")
    return records


def pattern_of(text: str) -> re.Pattern[str]:
    """Return a regular expression.

    Raises:
      BadInput: if it is none.
    """
    try:
        return re.compile(text)
    except re.error as error:
        raise BadInput(f"--runs-matching {text}: {error}") from None


def chosen_from(records: Sequence[Path], pattern: re.Pattern[str], args: Args) -> list[Path]:
    """Return the records to check.

    Raises:
      BadInput: if no name of a run matches.
    """
    chosen = [path for path in records if pattern.search(path.name)]
    if not chosen:
        raise BadInput(f"{args.archive}: no run matches {args.runs_matching!r}")
    return chosen


def begin(
    args: Args, file: Path, data: Path, page: Page, records: Sequence[Path], earlier: Path
) -> Audit:
    """Check the tables of an unpacked archive; return an audit without runs, or an earlier one to continue.

    Args:
      args: the command line.
      file: the archive.
      data: its unpacked content.
      page: its page.
      records: folders of its records.
      earlier: `audit.json` of the audit to continue.

    Raises:
      BadInput: if the earlier audit is of another archive, or has other segments, seed or module.
    """
    digest = sha256(file)
    matching = args.runs_matching
    found = read_audit(earlier) if earlier.exists() else None
    if found is not None and not args.resume:
        if found.sha256 == digest and len(found.runs) < found.records:
            raise BadInput(
                f"{earlier} is an audit of a part of this archive: --resume, or delete it"
            )
        found = None
    if found is not None:
        seed = found.seed if args.seed is None else args.seed
        given = (digest, args.segments, seed, args.module or "")
        if given != (found.sha256, found.segments, found.seed, found.module):
            module = f", module {found.module}" if found.module else ""
            raise BadInput(
                f"--resume: {earlier} has other arguments: archive {found.sha256[:12]}, segments "
                f"{found.segments}, seed {found.seed}{module}"
            )
        if matching != found.runs_matching:  # "" matches all
            both = matching and found.runs_matching
            matching = f"{found.runs_matching}|{matching}" if both else ""
    begun = time.perf_counter()
    tables = compare_page(page, data)
    agent = bagit.Bag(str(data.parent)).info.get("Bag-Software-Agent", "unknown")
    maker = one_line(agent)[:LONGEST_REASON]
    return Audit(
        archive=file.name,
        sha256=digest,
        records=len(records),
        segments=args.segments,
        seed=found.seed if found else secrets.randbits(32) if args.seed is None else args.seed,
        module=args.module or "",
        runs_matching=matching,
        tables=one_line(tables),
        other_toolkit=maker if tables and maker != toolkit() else "",
        seconds={
            "tables": round(time.perf_counter() - begun, 1),
            "runs": found.seconds["runs"] if found else 0.0,
        },
        runs=found.runs if found else {},
    )


def read_audit(file: Path) -> Audit:
    """Read an `audit.json`.

    Raises:
      BadInput: if it is none.
    """
    try:
        return msgspec.json.decode(file.read_bytes(), type=Audit)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{file}: not an audit: {error}") from None


def write(audit: Audit, page: Page, out: Path) -> Page:
    """Write an audit as JSON, Markdown and HTML; return its page."""
    out.mkdir(parents=True, exist_ok=True)
    report = report_of(audit, page)
    replace_file(out / "audit.json", msgspec.json.format(msgspec.json.encode(audit), indent=1))
    replace_file(out / "README.md", render.markdown_page(report, ()))
    replace_file(out / "index.html", render.html_page(report, {}))
    return report


def compare_page(page: Page, data: Path) -> str:
    """Make the page of an archive again; return the first difference from the one in it, or "".

    Figures are not compared.
    """
    published = read_file(data / "index.html", LARGEST_PAGE).decode(errors="replace")
    names = [one.name for one in page.figures()]
    large = dict.fromkeys(re.findall(r'id="svg-(\w+)"', published), "")
    images = {name: NO_FIGURE for name in names if name not in large}
    if without_figures(published) != without_figures(render.html_page(page, images, svgs=large)):
        return "index.html does not show what result.json has"
    try:
        with contextlib.chdir(data), contextlib.redirect_stdout(None):
            runs = Path("runs") / page.name
            study = build.read_study(page.name, runs, Path("."), published=True)
            made = build.page_of(study)
    except Exception as error:  # records of a stranger
        return f"the tables cannot be made: {type(error).__name__}: {error}"
    then, now = (msgspec.json.decode(msgspec.json.encode(one)) for one in (page, made))
    return first_difference(then, now)


def without_figures(html: str) -> str:
    """Return a page without the content of its images."""
    return FIGURE.sub(r"\1", html)


def first_difference(then: object, now: object, where: str = "result.json") -> str:
    """Return where two values of JSON differ first, in one line, or "".

    Args:
      then: as published.
      now: as made again.
      where: what they are.
    """
    if isinstance(then, dict) and isinstance(now, dict):
        for name in sorted({*then, *now}):
            part = f"{where}, {then.get('name', name) if name == 'table' else name}"
            if found := first_difference(then.get(name), now.get(name), part):
                return found
        return ""
    if isinstance(then, list) and isinstance(now, list):
        if len(then) != len(now):
            return f"{where}: {len(then)} entries published, {len(now)} made from the records"
        pairs = enumerate(zip(then, now, strict=True), start=1)
        found = (first_difference(a, b, f"{where} {number}") for number, (a, b) in pairs)
        return next(filter(None, found), "")
    if same_value(then, now):
        return ""
    return f"{where}: {str(then)[:100]!r} published, {str(now)[:100]!r} made from the records"


def same_value(then: object, now: object) -> bool:
    """Whether two values are equal but for the last digits of numbers."""
    numbers = [isinstance(x, int | float) and not isinstance(x, bool) for x in (then, now)]
    if all(numbers):
        return abs(then - now) <= TOLERANCE * max(abs(then), abs(now))
    return not any(numbers) and then == now


def check_runs(
    records: Sequence[Path], args: Args, audit: Audit, save: Callable[[], object]
) -> None:
    """Check records of an archive, each in a process of its own.

    Args:
      records: folders of the records.
      args: the command line.
      audit: to which the outcomes are added; runs that it has already are not checked again, unless their
        check ended abnormally.
      save: called after each run.
    """
    begun = time.perf_counter() - audit.seconds["runs"]
    left = [
        x for x in records if x.name not in audit.runs or audit.runs[x.name].verdict == "failed"
    ]
    sizes = {path: sum(x.stat().st_size for x in path.rglob("*.bin")) for path in left}
    bar = tqdm(
        total=len(records), initial=len(records) - len(left), unit="run", disable=not args.progress
    )
    pool = ThreadPoolExecutor(args.jobs or len(available_cores()))
    with bar, tempfile.TemporaryDirectory() as compiled:
        # The longest first, so that none is left over at the end.
        ordered = sorted(left, key=lambda path: -sizes[path])
        futures = {
            pool.submit(check_run, path, args, audit.seed, compiled): path.name for path in ordered
        }
        try:
            for future in as_completed(futures):
                outcomes = {**audit.runs, futures[future]: future.result()}
                audit.runs = dict(sorted(outcomes.items()))
                audit.seconds["runs"] = round(time.perf_counter() - begun, 1)
                save()
                bar.update()
        finally:
            pool.shutdown(cancel_futures=True)  # if the audit is interrupted


def check_run(path: Path, args: Args, seed: int, compiled: str) -> Outcome:
    """Check one record in a process of its own, because jax is configured once in a process.

    Args:
      path: folder of the record.
      args: the command line.
      seed: that draws the segments.
      compiled: folder of compiled code, which runs of one configuration share.
    """
    command = [sys.executable, "-m", "cleanba.audit.replay", str(path), "--json", "--published"]
    command += ["--segments", str(args.segments), "--seed", str(seed), "--no-progress"]
    command += ["--module", args.module] if args.module else []
    cache = {
        "JAX_COMPILATION_CACHE_DIR": compiled,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    done = subprocess.run(command, capture_output=True, env=cache | os.environ)
    try:
        outcome = msgspec.json.decode(done.stdout.strip().split(b"\n")[-1], type=Outcome)
    except msgspec.DecodeError:
        lines = done.stderr.decode(errors="replace").strip().split("\n")
        reason = f"exit code {done.returncode}: {one_line(lines[-1])}"
        return Outcome(verdict="failed", reason=reason[:LONGEST_REASON])
    outcome.reason = one_line(outcome.reason)[:LONGEST_REASON]
    return outcome


def report_of(audit: Audit, page: Page) -> Page:
    """Return the page of an audit."""
    counts = Counter(outcome.verdict for outcome in audit.runs.values())
    if not audit.tables:
        tables = "Tables and findings match the records; figures were not compared."
    elif audit.other_toolkit:
        tables = (
            f"Not comparable: the page was made by {audit.other_toolkit}, and this is {toolkit()}. Only that "
            f"version can compare it. First difference: {audit.tables}."
        )
    else:
        tables = f"Refuted: {audit.tables}."
    finding = [
        tables,
        ", ".join(f"{count} of {len(audit.runs)} runs {name}" for name, count in counts.items())
        + ".",
    ]
    finding += [
        f"{outcome.verdict.capitalize()}: {name}: {outcome.reason}"
        for name, outcome in audit.runs.items()
        if outcome.verdict in ("refuted", "failed")
    ]
    left = audit.records - len(audit.runs)
    caveats = [f"{left} of {audit.records} runs were not checked."] if left else []
    caveats += [
        f"{sum(x.episodes for x in audit.runs.values()):,} episodes were simulated, and "
        f"{sum(x.updates for x in audit.runs.values()):,} updates repeated, in "
        f"{audit.seconds['runs']:,.0f} s; the tables took {audit.seconds['tables']:,.0f} s.",
        f"Segments were drawn with seed {audit.seed}.",
        f"SHA-256 of {audit.archive}: {audit.sha256}",
    ]
    columns = (
        "run",
        "verdict",
        "episodes",
        "updates repeated",
        "segments",
        "missed 10%",
        "seconds",
        "why",
    )
    rows = []
    for name, x in audit.runs.items():
        drawn = f"{len(x.segments)} of {x.all_segments}" if x.segments else None
        missed: Value = f"{x.missed['10%']:.1%}" if x.missed else None
        verdict = Cell(x.verdict, tone=TONES.get(x.verdict, "note"))
        rows.append(
            (name, verdict, x.episodes, x.updates, drawn, missed, x.seconds, x.reason or None)
        )
    text = (
        "verified: the episodes, and all repeated updates, equal the record to the bit. consistent only: the "
        "system is nondeterministic, and its rows do not contradict each other. not checkable: the training "
        "was not repeated. missed 10%: the chance, at most, that this audit misses a falsified tenth of "
        "the run's updates."
    )
    return Page(
        name=page.name,
        title=f"Audit: {page.title}",
        question=f"Were the results of {audit.archive} computed as it claims?",
        finding=tuple(finding),
        caveats=tuple(caveats),
        sections=(Section("runs", "Runs", text=text, table=Table(columns, tuple(rows))),),
        commands=(command_of(audit),),
    )


def command_of(audit: Audit) -> str:
    """Return the command that repeats an audit."""
    words = {
        "ARCHIVE": audit.archive,
        "SEGMENTS": audit.segments,
        "SEED": audit.seed,
        "RUNS_MATCHING": audit.runs_matching,
        "MODULE": audit.module,
    }
    # Make expands a dollar sign, and the shell the other characters of a regular expression.
    quoted = {
        name: shlex.quote(str(word).replace("$", "$$"))
        for name, word in words.items()
        if word != ""
    }
    return " ".join(["make audit", *(f"{name}={word}" for name, word in quoted.items())])


if __name__ == "__main__":
    run_command(main)
