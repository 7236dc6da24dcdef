"""Publishes a study as one file that anybody can audit: `python -m reports.archive quickstart`.

Writes `dist/<study>.zip`, a BagIt folder (RFC 8493):

    <study>/bagit.txt, bag-info.txt, manifest-sha256.txt, tagmanifest-sha256.txt
    <study>/data/index.html, result.json              page of the study
    <study>/data/ro-crate-metadata.json               what is in it (https://w3id.org/ro/crate)
    <study>/data/runs/<study>/study.toml, <run>/...   study and records, with checkpoints as asked

At the same revision of this toolkit, the same records give the same bytes. Logs, TensorBoard files and models
are left out: the records are enough to make all tables and figures, and to repeat the training. Videos are
published, because the page links to them.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

import bagit
import tyro
from rocrate.model.contextentity import ContextEntity
from rocrate.model.person import Person
from rocrate.model.softwareapplication import SoftwareApplication
from rocrate.rocrate import ROCrate

from analysis.output import bad_input
from cleanba import __version__
from cleanba.record import Run, find_runs, read_run, source_revision
from cleanba.record.checkpoints import ARRAYS, MARKER
from cleanba.record.files import open_regular
from cleanba.record.folder import CHECKPOINTS_FOLDER, INFO_FILE, PUBLISHED, VIDEOS
from cleanba.record.redaction import is_private
from cleanba.run.command_line import BadInput, parse
from reports import build
from reports.command import run_command
from reports.page import Page
from reports.study import ReportError

Checkpoints = Literal["none", "some", "all"]

LOCK = Path(__file__).parents[1] / "requirements.lock"
STUDY_FILE = "study.toml"
TEXT = {".json", ".jsonl", ".toml"}
LARGEST_FILE = 1 << 40  # bytes
PLAIN = "letters of ASCII, digits, '_', '-' and '.', not first '-' or '.'"
NO_TIME = (1980, 1, 1, 0, 0, 0)  # the first that a zip file can hold
LEVEL = 9  # of zlib


@dataclass(frozen=True)
class Args:
    """Command line."""

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]
    """Name of the study."""
    runs: str | None = None
    """Folder with its run records; by default runs/<name>."""
    out: str = "dist"
    """Folder for the archive."""
    checkpoints: Checkpoints = "some"
    """Checkpoints that are published: of no run, of one run of each system, or of all. Those after the last
    update are left out, because no segment begins there."""
    authors: str = ""
    """Names of the authors, separated by semicolons."""
    license: str = ""
    """Licence of the data, by its address or its SPDX identifier, such as CC-BY-4.0."""
    overwrite: bool = False
    """Replace an archive of the same name with other content."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns 0, or 2 for bad input."""
    try:
        args = parse(Args, sys.argv[1:] if argv is None else argv, "Publish a study's records.")
        if not is_plain(args.name):
            raise BadInput(f"{args.name!r} cannot be the name of an archive: {PLAIN}")
        runs, file = Path(args.runs or f"runs/{args.name}"), Path(args.out) / f"{args.name}.zip"
        with tempfile.TemporaryDirectory() as folder:
            made = make(args, runs, Path(folder))
            place(made, file, args.overwrite)
    except build.ERRORS as error:
        return bad_input(error)
    print(f"{file}: {file.stat().st_size:,} bytes, SHA-256 {sha256(file)}")
    print(f"make audit ARCHIVE={file}")
    return 0


def is_plain(name: str) -> bool:
    """Whether a name can be that of an archive's folder, on any machine."""
    return bool(re.fullmatch(r"\w[\w.-]*", name, re.ASCII))


def toolkit() -> str:
    """Return the version of this toolkit, and the revision of its checkout, if it has one."""
    return " ".join(filter(None, (f"cleanba {__version__}", source_revision(LOCK.parent))))


def make(args: Args, runs: Path, folder: Path) -> Path:
    """Make the archive of a study in a temporary folder; return its file."""
    bag = folder / args.name
    stage(runs, bag / "runs" / args.name, args.checkpoints)
    check_private(bag)
    with contextlib.chdir(bag):  # the page's links and commands are relative to its folder
        page = build.build(args.name, Path("runs") / args.name, Path("."), published=True)
    for name in ("README.md", "figures"):  # the figures are also inside index.html
        path = bag / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    records = [read_run(path) for path in find_runs(bag / "runs")]
    describe(bag, page, records, args)
    ends = [run.info.ended or run.info.started or "" for run in records]
    bagit.make_bag(
        str(bag),
        {
            "Bagging-Date": max(ends)[:10],
            "Bag-Software-Agent": toolkit(),
            "External-Identifier": args.name,
            "External-Description": page.question or page.title,
            "Source-Revision": list(page.revisions),
            "Lock-File-SHA256": sha256(LOCK),
            "Checkpoints": args.checkpoints,
        },
        checksums=["sha256"],
    )
    file = folder / "archive.zip"
    write_zip(bag, file)
    return file


def stage(runs: Path, out: Path, checkpoints: Checkpoints) -> None:
    """Copy the published files of a study's records.

    Args:
      runs: folder of the records.
      out: folder to make.
      checkpoints: see `Args`.

    Raises:
      ReportError: if there is no record, or a link or a damaged file is in the way.
    """
    out.mkdir(parents=True)
    records = [read_run(path) for path in find_runs(runs)]
    if not records:
        raise ReportError(f"{runs}: no run records there")
    seen = set()
    for run in records:
        if run.path.parent != runs:
            raise ReportError(f"{run.path}: not directly below {runs}")
        info = run.info
        if info.status == "running":
            raise ReportError(f"{run.path}: is running, or was killed (--resume or delete it)")
        if problems := run.check_files(PUBLISHED):
            raise ReportError(f"{run.path}: {problems[0]}")
        names = [INFO_FILE, *(name for name in PUBLISHED if (run.path / name).is_file())]
        names += [str(file.relative_to(run.path)) for file in sorted(run.path.glob(VIDEOS))]
        last = f"{len(run.updates()):08d}"
        saved = [
            path.parent.relative_to(run.path)
            for path in sorted(run.path.glob(f"{CHECKPOINTS_FOLDER}/*/{MARKER}"))
            if path.parent.name != last
        ]
        first = run.completed and info.system not in seen  # only completed runs are repeated
        if saved and (checkpoints == "all" or (checkpoints == "some" and first)):
            seen.add(info.system)
            names += [str(folder / name) for folder in saved for name in (ARRAYS, MARKER)]
        for name in names:
            copy(run.path / name, out / run.path.name / name)
    if (runs / STUDY_FILE).is_file():
        copy(runs / STUDY_FILE, out / STUDY_FILE)


def copy(source: Path, target: Path) -> None:
    """Stage a regular file: by a hard link if possible, because a study may have gigabytes of checkpoints."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with open_regular(source, LARGEST_FILE) as file:
        if not source.is_symlink():
            with contextlib.suppress(OSError):  # such as of a target on another disk
                os.link(source, target)
                return
        with open(target, "xb") as new:
            shutil.copyfileobj(file, new)


def check_private(folder: Path) -> None:
    """Refuse to publish secrets, home folders and names of this user and machine.

    Raises:
      ReportError: with the file and line, but not what is there.
    """
    for path in sorted(folder.rglob("*")):
        if path.suffix in TEXT:
            with open(path, encoding="utf-8", errors="replace") as file:
                for number, line in enumerate(file, start=1):
                    if is_private(line):
                        where = path.relative_to(folder)
                        raise ReportError(
                            f"{where}, line {number}: a secret, or the name of a user, host or home "
                            "folder; nothing was published"
                        )


def describe(folder: Path, page: Page, records: Sequence[Run], args: Args) -> None:
    """Write `ro-crate-metadata.json`: title, question, licence, authors, software, one entry per run."""
    crate = ROCrate()
    crate.name, crate.description = page.title, page.question or page.title
    ends = [run.info.ended or run.info.started or "" for run in records]
    crate.datePublished = datetime.fromisoformat(max(ends))
    if args.license:
        crate.license = args.license
    people = [
        crate.add(Person(crate, f"#author-{number}", {"name": name}))
        for number, name in enumerate(
            filter(None, map(str.strip, args.authors.split(";"))), start=1
        )
    ]
    if people:
        crate.root_dataset["author"] = people
    software = crate.add(
        SoftwareApplication(
            crate,
            "#cleanba",
            {
                "name": "cleanba",
                "version": __version__,
                "softwareRequirements": list(page.versions),
                "identifier": list(page.revisions),
            },
        )
    )
    crate.root_dataset["additionalProperty"] = [
        crate.add(
            ContextEntity(
                crate,
                f"#processor-{number}",
                {"@type": "PropertyValue", "name": "processor", "value": line},
            )
        )
        for number, line in enumerate(page.hardware, start=1)
    ]
    for name, kind in (("index.html", "text/html"), ("result.json", "application/json")):
        crate.add_file(dest_path=name, properties={"name": name, "encodingFormat": kind})
    for run in records:
        info = run.info
        made = crate.add_dataset(
            dest_path=f"{run.path.relative_to(folder).as_posix()}/",
            properties={
                "name": f"{info.system} on {info.env_id}, seed {info.seed}",
                "description": f"hardware setting {info.setting}; {info.status}",
            },
        )
        crate.add_action(
            software,
            identifier=f"#{run.path.name}",
            result=[made],
            properties={
                "name": " ".join(info.command),
                "startTime": info.started,
                "endTime": info.ended,
            },
        )
    graph = crate.metadata.generate()
    text = json.dumps(graph, indent=1, sort_keys=True, ensure_ascii=False)
    (folder / "ro-crate-metadata.json").write_text(text + "\n")


def write_zip(folder: Path, file: Path) -> None:
    """Write a folder to a zip file whose bytes depend on names and content alone."""
    with zipfile.ZipFile(file, "x", zipfile.ZIP_DEFLATED, compresslevel=LEVEL) as archive:
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            name = path.relative_to(folder.parent).as_posix()
            member = zipfile.ZipInfo(name, NO_TIME)
            member.compress_type = zipfile.ZIP_DEFLATED
            member.external_attr = 0o644 << 16
            with open(path, "rb") as source, archive.open(member, "w", force_zip64=True) as target:
                shutil.copyfileobj(source, target)


def place(made: Path, file: Path, overwrite: bool) -> None:
    """Move an archive to its place, if nothing else is lost there.

    Raises:
      ReportError: if there is another archive, and it may not be overwritten.
    """
    if file.exists() and not overwrite and sha256(file) != sha256(made):
        raise ReportError(f"{file} has other content: give --overwrite, or another --out")
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(".tmp")
    shutil.copyfile(made, temporary)
    temporary.replace(file)


def sha256(file: Path) -> str:
    """Return the SHA-256 of a file."""
    with open(file, "rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


if __name__ == "__main__":
    run_command(main)
