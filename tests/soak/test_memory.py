"""A long run's memory does not grow."""

import json
import time

import psutil
import pytest

from tests.cleanba.conftest import Trainer

pytestmark = pytest.mark.soak


def test_memory_does_not_grow_with_steps(tmp_path):
    train = Trainer(tmp_path)
    process = train.start(
        "impala", "--total-timesteps", 310_000, "--num-envs", 32, "--num-env-groups", 1,
        "--num-actor-threads", 1, "--num-steps", 20, "--fingerprint-every", 100,
    )  # fmt: skip
    sizes = {}
    watched = psutil.Process(process.pid)
    while process.poll() is None:
        for path in train.runs_dir.glob("*/*/updates.jsonl"):
            tail = path.read_bytes()[-2000:].splitlines()
            step = json.loads(tail[-2])["step"] if len(tail) > 2 else 0
            for mark in (100_000, 300_000):
                if step >= mark and mark not in sizes:
                    sizes[mark] = watched.memory_info().rss
        time.sleep(0.02)
    assert process.returncode == 0, process.communicate()[1]
    assert sizes[300_000] <= 1.05 * sizes[100_000], sizes
