"""Scalars for TensorBoard and Weights & Biases, under the names that Cleanba users know."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import UNSET
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.text.metadata import create_summary_metadata
from tensorboard.summary.writer.record_writer import RecordWriter
from tensorboard.util.tensor_util import make_tensor_proto

from cleanba.record.schema import Update


class TensorBoardWriter:
    """Writes one TensorBoard event file.

    It uses TensorBoard's components instead of its writer, which puts the host name into the file name.
    """

    def __init__(self, folder: Path):
        """Continue the event file of a folder, or start one."""
        folder.mkdir(parents=True, exist_ok=True)
        earlier = sorted(folder.glob("events.out.tfevents.*"))
        name = f"events.out.tfevents.{int(time.time())}.cleanba"
        self.path = earlier[-1] if earlier else folder / name
        self._file = open(self.path, "ab")  # noqa: SIM115
        self._writer = RecordWriter(self._file)
        if not earlier:
            self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write the scalars of one step, and flush them."""
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._write(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def write_text(self, tag: str, text: str) -> None:
        """Write a text in Markdown."""
        metadata = create_summary_metadata(display_name=tag, description="")
        tensor = make_tensor_proto(text.encode(), dtype="string")
        value = Summary.Value(tag=f"{tag}/text_summary", metadata=metadata, tensor=tensor)
        self._write(Event(wall_time=time.time(), step=0, summary=Summary(value=[value])))

    def size(self) -> int:
        """Return the size of the file in bytes, after an fsync."""
        os.fsync(self._file.fileno())
        return self.path.stat().st_size

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, event: Event) -> None:
        self._writer.write(event.SerializeToString())
        self._file.flush()


def hyperparameter_table(hyperparameters: Mapping[str, Any]) -> str:
    """Return the Markdown table of hyperparameters that CleanRL shows in TensorBoard."""
    rows = "\n".join(f"|{key}|{value}|" for key, value in hyperparameters.items())
    return f"|param|value|\n|-|-|\n{rows}"


def update_scalars(update: Update, batch_size: int) -> dict[str, float]:
    """Return the fields of an update under the names that Cleanba gives them in TensorBoard.

    Args:
      update: a row of `updates.jsonl`.
      batch_size: steps learned from in one update.

    Returns:
      Value by tag.
    """
    tags = {
        "loss": "losses/loss",
        "policy_loss": "losses/policy_loss",
        "value_loss": "losses/value_loss",
        "entropy": "losses/entropy",
        "approx_kl": "losses/approx_kl",
        "clip_fraction": "losses/clipfrac",
        "grad_norm": "losses/grad_norm",
        "learning_rate": "charts/learning_rate",
        "rollout_queue_get_time": "stats/rollout_queue_get_time",
        "params_queue_get_time": "stats/params_queue_get_time",
        "rollout_queue_put_time": "stats/rollout_queue_put_time",
        "rollout_time": "stats/rollout_time",
        "inference_time": "stats/inference_time",
        "env_time": "stats/env_recv_time",
        "training_time": "stats/training_time",
    }
    values = {tag: getattr(update, field) for field, tag in tags.items()}
    scalars = {tag: value for tag, value in values.items() if value not in (None, UNSET)}
    waits = update.rollout_queue_get_time, update.params_queue_get_time
    if UNSET not in waits:
        scalars["stats/rollout_params_queue_get_time_diff"] = waits[0] - waits[1]
    scalars["charts/SPS"] = update.step / max(update.wall_time, 1e-9)
    if update.update_seconds > 0:
        scalars["charts/SPS_update"] = batch_size / update.update_seconds
    return scalars
