"""The types of a run record: `run.json` and one line of each of its files.

Every system writes these and every reader returns them. docs/run-record.md
describes each field, and a test compares it with this module.
"""

import re
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

SCHEMA_VERSION = 2

Status = Literal["running", "completed", "failed", "interrupted"]

# Up to here a float64, which tables and figures hold, has every integer.
LARGEST = 2**53

Count = Annotated[int, Meta(ge=0, le=LARGEST)]
Version = Annotated[
    int, Meta(ge=1, le=LARGEST)
]  # of a policy; the initial parameters are version 1
Seconds = Annotated[float, Meta(ge=0, le=LARGEST)]
# NaN and infinities, which JSON cannot express, are written as null.
Number = float | None
# Characters of names, which become part of folders and pages: none that controls, breaks lines, reorders
# text or is invisible.
HIDDEN = r"\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff"
SHOWN = rf"[^{HIDDEN}]"
LONGEST_NAME = 200
Name = Annotated[str, Meta(pattern=rf"^{SHOWN}+\Z", max_length=LONGEST_NAME)]
# A file inside the record's folder.
FileName = Annotated[str, Meta(pattern=rf"^(?!/)(?!(.*/)?\.\.(/|\Z)){SHOWN}+\Z", max_length=200)]
Digest = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]  # SHA-256


class FileDigest(Struct, frozen=True, kw_only=True):
    """What a file of a finished record held when the run ended."""

    bytes: Count
    lines: Count | None = None  # of a text file; null for a binary one
    sha256: Digest


class Resumption(Struct, kw_only=True):
    """One entry of `resumed`: the run was resumed."""

    at: str  # UTC, ISO 8601
    update: Count | UnsetType = UNSET
    hardware: dict[str, Any]
    revision: str
    command: list[str]


class RunInfo(Struct, kw_only=True):
    """`run.json`: what a run is, how it was started, how it ended."""

    schema_version: int = SCHEMA_VERSION
    system: Name
    setting: Name
    env_id: Name
    seed: Count
    study: Name = "default"
    program: Name | UnsetType = UNSET
    hyperparameters: dict[str, Any] = {}
    hardware: dict[str, Any] = {}
    versions: dict[str, str] = {}
    revision: str = ""
    command: list[str] = []
    started: str | None = None  # UTC, ISO 8601
    ended: str | None = None
    status: Status = "running"
    error: str | None = None
    num_actions: Annotated[int, Meta(ge=1, le=2**31)] | UnsetType = UNSET
    autoreset: Literal["next_step", "same_step"] | UnsetType = UNSET
    checkpoint_every: Count | UnsetType = UNSET
    resumed: list[Resumption] | UnsetType = UNSET
    files: dict[FileName, FileDigest] | UnsetType = UNSET


class Episode(Struct, kw_only=True, gc=False, rename={"episode_return": "return"}):
    """One line of `episodes.jsonl`: a finished episode."""

    step: Count
    wall_time: Seconds
    env_index: Count
    episode_return: Number
    length: Count
    invalid_null: Count | UnsetType = UNSET
    invalid_busy: Count | UnsetType = UNSET
    invalid_owner: Count | UnsetType = UNSET


class Rollout(Struct, kw_only=True, gc=False):
    """One line of `rollouts.jsonl`: a rollout of one actor or environment group, once it was used."""

    actor: Count
    group: Count | None
    rollout: Version
    steps: Count
    wall_time: Seconds
    version_first: Version
    version_last: Version
    versions: list[tuple[Version, Count]]  # run lengths: (version, steps)
    learner_version: Version
    first_env: Count | UnsetType = UNSET
    envs: Count | UnsetType = UNSET
    mixed_steps: Count | UnsetType = UNSET


class Update(Struct, kw_only=True, gc=False):
    """One line of `updates.jsonl`: a learner update."""

    version: Version
    step: Count
    wall_time: Seconds
    update_seconds: Seconds
    learning_rate: Number
    loss: Number
    policy_loss: Number | UnsetType = UNSET
    value_loss: Number | UnsetType = UNSET
    entropy: Number | UnsetType = UNSET
    approx_kl: Number | UnsetType = UNSET
    clip_fraction: Number | UnsetType = UNSET
    alpha_loss: Number | UnsetType = UNSET
    alpha: Number | UnsetType = UNSET
    grad_norm: Number | UnsetType = UNSET
    rollout_queue_get_time: Seconds | UnsetType = UNSET
    params_queue_get_time: Seconds | UnsetType = UNSET
    rollout_queue_put_time: Seconds | UnsetType = UNSET
    rollout_time: Seconds | UnsetType = UNSET
    inference_time: Seconds | UnsetType = UNSET
    env_time: Seconds | UnsetType = UNSET
    training_time: Seconds | UnsetType = UNSET
    virtual_batch_size: Count | UnsetType = UNSET
    num_gradients: Count | UnsetType = UNSET
    num_skipped: Count | UnsetType = UNSET
    num_replaced: Count | UnsetType = UNSET
    num_lost: Count | UnsetType = UNSET
    gradient_version: Version | UnsetType = UNSET
    fingerprint: Digest | None = None
    checkpoint: Digest | UnsetType = UNSET


Row = Episode | Rollout | Update
FILE_OF_ROW: dict[type[Row], str] = {
    Episode: "episodes.jsonl",
    Rollout: "rollouts.jsonl",
    Update: "updates.jsonl",
}

# Files whose sizes a checkpoint stores; resuming from it truncates them to these sizes.
CUT_FILE = r"^(episodes\.jsonl|rollouts\.jsonl|updates\.jsonl|actions/rollouts\.bin"
CUT_FILE += r"|tensorboard/events\.out\.tfevents\.[0-9]+\.cleanba)\Z"
CutFile = Annotated[str, Meta(pattern=CUT_FILE)]


def is_name(text: str) -> bool:
    """Whether a text can be a `Name`."""
    return bool(re.match(rf"{SHOWN}{{1,{LONGEST_NAME}}}\Z", text))
