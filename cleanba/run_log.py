"""Everything that a run writes: its record, TensorBoard, Weights & Biases, the progress bar."""

import base64
import os
import shlex
import sys
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from cleanba import checkpoints, placement, scalar_log
from cleanba.actions import Frame, combine_digests, pack
from cleanba.groupwise import fingerprint
from cleanba.preparation import Setup, versions
from cleanba.record import RunWriter, read_run, redact_command, source_revision


class RunLog:
    """Everything that is written about a run: record, TensorBoard, W&B, progress bar."""

    def __init__(self, setup: Setup):
        """Begin the record of a run, or go on with it where its checkpoint was made."""
        self._setup = setup
        header = {
            "system": setup.system,
            "setting": setup.setting,
            "env_id": setup.spec.env_id,
            "seed": setup.args.seed,
            "study": setup.args.run.study,
            "hyperparameters": setup.hyperparameters,
            "hardware": placement.describe_hardware(
                setup.args.hardware, setup.layout.num_processes
            ),
            "versions": versions(),
            "revision": source_revision(Path(__file__).parent),
            "command": ["python", *sys.argv],
        }
        board = setup.directory / "tensorboard"
        checkpoint = setup.checkpoint
        if checkpoint is None:
            header["num_actions"] = setup.spec.num_actions
            header["checkpoint_every"] = setup.args.run.checkpoint_every
            overwrite = setup.args.run.overwrite or setup.args.run.resume
            self._record = RunWriter(setup.directory, header, overwrite)
            self._board = scalar_log.TensorBoardWriter(board)
            self._board.write_text(
                "hyperparameters", scalar_log.hyperparameter_table(setup.hyperparameters)
            )
        else:
            note = {k: header[k] for k in ("hardware", "revision")}
            note |= {"update": checkpoint.update, "command": redact_command(header["command"])}
            self._record = RunWriter.resume(setup.directory, checkpoint.sizes, note)
            self._board = scalar_log.TensorBoardWriter(board)
        self._wandb = _start_wandb(setup) if setup.args.run.track else None
        self._returns: deque[float] = deque(maxlen=100)
        self._lengths: deque[int] = deque(maxlen=100)
        if checkpoint is not None:
            self._remember(read_run(setup.directory).lines("episodes"))
        self._bar = tqdm(
            initial=checkpoint.update * setup.batch_size if checkpoint else 0,
            total=setup.num_updates * setup.batch_size,
            unit="step",
            unit_scale=True,
            disable=not setup.args.run.progress,
            dynamic_ncols=True,
            mininterval=0.5,
        )

    def write_update(
        self,
        *,
        version: int,
        now: float,
        update_seconds: float,
        metrics: Mapping[str, float],
        rollout_queue_get_time: float,
        training_time: float,
        params: Any,
        parts: list[dict[str, Any]],
        last: bool,
    ) -> None:
        """Record one update and the rollouts that it learned from, a part from each process."""
        setup = self._setup
        episodes = sorted(
            (e for part in parts for e in part["episodes"]),
            key=lambda e: (e["step"], e["env_index"]),
        )
        self._record.write("episodes", episodes)
        self._record.write("rollouts", (line for part in parts for line in part["rollouts"]))
        self._digests = self._write_actions(parts)
        all_times = [times for part in parts for times in part["times"]]
        times = {k: sum(t[k] for t in all_times) / len(all_times) for k in all_times[0]}
        number = version - 1
        line = {
            "version": version,
            "step": number * setup.batch_size,
            "wall_time": round(now, 4),
            "update_seconds": round(update_seconds, 6),
            **metrics,
            "rollout_queue_get_time": round(rollout_queue_get_time, 6),
            **{k: round(v, 6) for k, v in times.items()},
            "training_time": round(training_time, 6),
            "fingerprint": None,
        }
        if last or number % setup.args.run.fingerprint_every == 0:
            line["fingerprint"] = fingerprint(params)
        self._record.write("updates", [line])
        self._remember(episodes)
        if last or number % setup.args.run.log_frequency == 0:
            scalars = scalar_log.update_scalars(line, setup.batch_size)
            if self._returns:
                scalars["charts/avg_episodic_return"] = float(np.mean(self._returns))
                scalars["charts/avg_episodic_length"] = float(np.mean(self._lengths))
            self._board.write(line["step"], scalars)
            if self._wandb is not None:
                self._wandb.log(scalars | {"global_step": line["step"]}, step=line["step"])
        self._bar.update(setup.batch_size)
        if not self._bar.disable:
            waiting = (
                "learner" if rollout_queue_get_time > times["params_queue_get_time"] else "actors"
            )
            lag = number - parts[0]["rollouts"][0]["version_first"]
            mean = f"{np.mean(self._returns):.1f}" if self._returns else "none yet"
            self._bar.set_postfix_str(
                f"return {mean}, lag {lag}, waiting: {waiting}", refresh=False
            )

    def _remember(self, episodes: list[dict[str, Any]]) -> None:
        self._returns.extend(e["return"] for e in episodes[-100:])
        self._lengths.extend(e["length"] for e in episodes[-100:])

    def _write_actions(self, parts: list[dict[str, Any]]) -> list[str]:
        """Record the actions of one rollout; return the digests of all groups."""
        setup = self._setup
        traces = sorted((t for part in parts for t in part["traces"]), key=lambda t: t["group"])
        shape = (setup.args.num_steps, setup.group_size)
        columns = [
            np.frombuffer(base64.b64decode(t["actions"]), "<u2").reshape(shape) for t in traces
        ]
        digests = [t["digest"] for t in traces]
        whole = combine_digests(map(bytes.fromhex, digests))
        frame = Frame(np.concatenate(columns, axis=1), whole)
        self._record.write_actions(pack(frame, setup.actions_shape))
        return digests

    def save_checkpoint(
        self, tree: Any, update: int, wall_time: float, pinned: Mapping[str, Any]
    ) -> None:
        """Write a checkpoint of what the learner carries after an update that has been written."""
        setup = self._setup
        sizes = self._record.sizes()
        board = self._board.path
        sizes[board.relative_to(setup.directory).as_posix()] = board.stat().st_size
        checkpoints.save(
            setup.directory,
            tree,
            update=update,
            wall_time=wall_time,
            sizes=sizes,
            digests=self._digests,
            pinned=pinned,
            keep=setup.args.run.keep_checkpoints,
        )

    def close(self, error: BaseException | None) -> None:
        """Close everything, with the status that the error, if any, calls for."""
        self._bar.close()
        self._board.close()
        if self._wandb is not None:
            self._wandb.finish(exit_code=int(error is not None))
        self._record.__exit__(type(error) if error else None, error, None)
        if error is None:
            print(f"completed: {shlex.quote(str(self._setup.directory))}")


def _start_wandb(setup: Setup) -> Any:
    import wandb

    mode = os.environ.get("WANDB_MODE")
    if mode is None and not wandb.login(prompt=False):
        print("no Weights & Biases API key: tracking offline (wandb sync uploads it later)")
        mode = "offline"
    return wandb.init(
        project=setup.args.run.wandb_project_name,
        entity=setup.args.run.wandb_entity,
        name=f"{setup.spec.env_id}__{setup.system}__{setup.args.seed}",
        config=setup.hyperparameters | {"setting": setup.setting, "seed": setup.args.seed},
        dir=setup.args.run.runs_dir,  # not in the record: W&B notes user and host
        mode=mode,
    )
