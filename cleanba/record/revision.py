"""The git revision of the source that a run was made with."""

import subprocess
from pathlib import Path


def source_revision(folder: Path) -> str:
    """Return the git commit of a checkout, with `+changes` if it has uncommitted ones, or ''.

    Changes in `results/` do not count. Its files are generated from records, so otherwise every run
    after `make publish-results` would appear to come from changed source.
    """

    def git(*args: str) -> str:
        return subprocess.run(
            ["git", "-C", str(folder), *args],
            capture_output=True,
            text=True,
            check=True,
            timeout=20,
        ).stdout.strip()

    source = ("--", ":(top)", ":(top,exclude)results")
    try:
        revision = git("rev-parse", "HEAD")
        return revision + ("+changes" if git("status", "--porcelain", "-uno", *source) else "")
    except (OSError, subprocess.SubprocessError):
        return ""
