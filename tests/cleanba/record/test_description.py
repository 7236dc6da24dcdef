"""docs/run-record.md describes every field of every type of the schema, and no other."""

import re
from pathlib import Path

import msgspec
import pytest

from cleanba.record.schema import (
    SCHEMA_VERSION,
    Episode,
    FileDigest,
    Resumption,
    Rollout,
    RunInfo,
    Update,
)

TEXT = (Path(__file__).parents[3] / "docs" / "run-record.md").read_text()
BEGINS = {
    RunInfo: "## run.json\n",
    Resumption: "An entry of `resumed`:\n",
    FileDigest: "An entry of `files`:\n",
    Episode: "## episodes.jsonl\n",
    Update: "## updates.jsonl\n",
    Rollout: "## rollouts.jsonl\n",
}


def table(kind):
    """The fields in the first column of the first table after where a type's description begins."""
    rows = re.search(r"\| field \|.*\n\| --- .*\n((\|.*\n)+)", TEXT.split(BEGINS[kind])[1])[1]
    return [name for row in rows.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])]


@pytest.mark.parametrize("kind", BEGINS)
def test_every_field_is_described_once_and_no_other(kind):
    assert sorted(table(kind)) == sorted(f.encode_name for f in msgspec.structs.fields(kind))


def test_the_required_fields_of_an_update_are_named():
    sentence = re.search(r"Every row has (.*?);", TEXT)[1]
    required = [f.name for f in msgspec.structs.fields(Update) if f.required]
    assert re.findall(r"`(\w+)`", sentence) == required


def test_the_version_is_described():
    assert f"| `schema_version` | {SCHEMA_VERSION} |" in TEXT
