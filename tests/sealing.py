"""Changes finished records as if the run had written them so: the checksums fit."""

import json
from pathlib import Path

import msgspec

from cleanba.record.folder import digest_files


def rewrite(path: Path, text: str):
    """Replace a file of a finished record as if the run had written it: with its checksum."""
    path.write_text(text)
    seal(path.parent)


def seal(folder: Path):
    """Bring the checksums of a finished record up to date."""
    info = json.loads((folder / "run.json").read_text())
    info["files"] = msgspec.to_builtins(digest_files(folder))
    (folder / "run.json").write_text(json.dumps(info))
