"""The run record: what every trainer writes and every analysis reads.

A record is a folder, described in docs/run-record.md. `RunWriter` is the only writer and `read_run` the
only reader; `schema` has the types of `run.json` and of the rows. Nothing here imports jax or torch.

    from cleanba.record import Episode, Rollout, RunInfo, RunWriter, Update, read_run
"""

from cleanba.record.fingerprint import fingerprint
from cleanba.record.folder import (
    ACTIONS_FILE,
    RecordError,
    find_runs,
    replace_file,
    run_name,
)
from cleanba.record.locks import check_idle
from cleanba.record.reader import Run, read_run
from cleanba.record.redaction import redact_command, redact_text
from cleanba.record.revision import source_revision
from cleanba.record.schema import (
    FILE_OF_ROW,
    SCHEMA_VERSION,
    Episode,
    FileDigest,
    Resumption,
    Rollout,
    Row,
    RunInfo,
    Update,
)
from cleanba.record.writer import RunWriter, check_writable, now_utc

__all__ = [
    "ACTIONS_FILE",
    "FILE_OF_ROW",
    "SCHEMA_VERSION",
    "Episode",
    "FileDigest",
    "RecordError",
    "Resumption",
    "Rollout",
    "Row",
    "Run",
    "RunInfo",
    "RunWriter",
    "Update",
    "check_idle",
    "check_writable",
    "find_runs",
    "fingerprint",
    "now_utc",
    "read_run",
    "redact_command",
    "redact_text",
    "replace_file",
    "run_name",
    "source_revision",
]
