"""Ways to falsify a finished record. The forger recomputes every digest that no training is needed for."""

import json
import shutil
import subprocess
import sys

import numpy as np

from cleanba.audit.segments import segments_of
from cleanba.audit.simulation import Simulation, shape_of
from cleanba.record import ACTIONS_FILE, checkpoints, fingerprint, read_run
from cleanba.record.actions import Frame, pack, read_frames
from tests.cleanba.conftest import ROOT, SMALL
from tests.sealing import seal

# A trainer that falsifies its training and records that faithfully: all of its digests are right.
# `tuned`: update `first` changes the parameters a little more. `untrained`: none does from `first` on.
_TRAINER = """
import runpy, sys
import jax
from cleanba import training
kind, first, sys.argv = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
train = training.train
def forged(setup, trainer):
    def update(state, data, number):
        after, metrics = trainer.update(state, data, number)
        if kind == "tuned" and number == first:
            after = after._replace(params=jax.tree.map(lambda x: x * 1.0001, after.params))
        if kind == "untrained" and number >= first:
            after = after._replace(params=state.params)
        return after, metrics
    return train(setup, trainer._replace(update=update))
training.train = forged
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def train_falsely(kind, first, runs_dir, *options):
    """Train with falsified updates; return the folder of the record."""
    script = str(ROOT / "cleanba" / "cleanba_ppo.py")
    command = [sys.executable, "-c", _TRAINER, kind, str(first), script, *SMALL, *options]
    subprocess.run([*command, "--runs-dir", str(runs_dir)], check=True, capture_output=True)
    (folder,) = runs_dir.glob("default/*")
    return folder


def rows_of(path):
    """Return the rows of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_rows(path, rows):
    """Replace the rows of a file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def change_row(folder, update, **fields):
    """Change the row of an update."""
    rows = rows_of(folder / "updates.jsonl")
    rows[update - 1].update(fields)
    write_rows(folder / "updates.jsonl", rows)


def change_info(folder, part=None, **fields):
    """Change `run.json`, or a part of it."""
    info = json.loads((folder / "run.json").read_text())
    (info[part] if part else info).update(fields)
    (folder / "run.json").write_text(json.dumps(info))


def change_checkpoint(folder, update, change):
    """Replace the arrays of a checkpoint by `change(arrays)`."""
    saved = checkpoints.read(folder / "checkpoints" / f"{update:08d}")
    arrays = change(checkpoints.load(saved))
    fields = {k: getattr(saved, k) for k in ("update", "wall_time", "sizes", "digests", "pinned")}
    checkpoints.save(folder, arrays, **fields, keep="all")
    change_row(folder, update, checkpoint=fingerprint(arrays))


def flip_a_bit(arrays):
    """Change the last bit of one parameter."""
    name = next(name for name in arrays if name.startswith("['params']"))
    arrays[name].view(np.uint32).flat[0] ^= 1
    return arrays


def change_actions(folder, rng):
    """Change an action to another that exists; return the number of its rollout, from 0."""
    path, shape = folder / ACTIONS_FILE, shape_of(read_run(folder))
    frames = list(read_frames(path, shape))
    number = int(rng.integers(len(frames)))
    actions = frames[number].actions
    t, i = rng.integers(shape.num_steps), rng.integers(shape.num_envs)
    actions[t, i] = (actions[t, i] + rng.integers(1, shape.num_actions)) % shape.num_actions
    path.write_bytes(b"".join(pack(frame, shape) for frame in frames))
    return number


def simulate_again(folder):
    """Make the digests and episodes of a record those of its actions."""
    run = read_run(folder)
    shape, simulation = shape_of(run), Simulation(run, 1)
    rollouts = rows_of(folder / "rollouts.jsonl")
    times = {(row["rollout"], row["group"]): row["wall_time"] for row in rollouts}
    size = shape.num_envs // run.info.hyperparameters["num_env_groups"]
    packed, episodes = b"", []
    for number, frame in enumerate(list(read_frames(folder / ACTIONS_FILE, shape))):
        made = simulation.replay(frame.actions)
        packed += pack(Frame(frame.actions, made.digest), shape)
        episodes += [
            {
                "step": (number * shape.num_steps + e.t + 1) * shape.num_envs,
                "wall_time": times[number + 1, e.index // size],
                "env_index": e.index,
                "return": e.episode_return,
                "length": e.length,
            }
            for e in made.episodes
        ]
    simulation.close()
    (folder / ACTIONS_FILE).write_bytes(packed)
    write_rows(folder / "episodes.jsonl", episodes)


def forged_copy(honest, folder, forge, *arguments):
    """Copy a record, falsify it, and recompute its checksums; return what `forge` returned."""
    shutil.copytree(honest, folder)
    found = forge(folder, *arguments)
    seal(folder)
    return found


def segments(folder):
    """Return the segments of a record."""
    run = read_run(folder)
    return segments_of(run, run.updates())
