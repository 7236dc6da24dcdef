"""Every layout with at most as many threads and devices as groups is legal and computes every group."""

import itertools
import subprocess
import sys

import pytest

from cleanba.exact import placement
from cleanba.exact.placement import (
    Hardware,
    default_num_env_groups,
    layout_of,
    local_gpus,
    plan,
    split_contiguous,
)


def test_splitting_keeps_every_item_in_order_in_parts_of_nearly_equal_size():
    for items, parts in itertools.product(range(1, 12), range(13)):
        if not 1 <= parts <= items:
            with pytest.raises(ValueError, match="split"):
                split_contiguous(range(items), parts)
            continue
        found = split_contiguous(range(items), parts)
        assert list(itertools.chain(*found)) == list(range(items))
        assert len(found) == parts
        sizes = list(map(len, found))
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[0] - sizes[-1] <= 1


@pytest.mark.parametrize("threads", range(1, 5))
@pytest.mark.parametrize("learners", range(1, 5))
@pytest.mark.parametrize("processes", [1, 2])
def test_every_group_has_one_actor_thread_and_one_learner_device(threads, learners, processes):
    hardware = Hardware(threads, (0,), tuple(range(learners)))
    acting, learning, numbers = [], [], []
    for process in range(processes):
        layout = plan(hardware, 8, process, processes)
        acting += [g for actor in layout.actors for g in actor.groups]
        learning += layout.local_groups
        numbers += [actor.thread for actor in layout.actors]
        assert set(layout.learner_of_group.values()) == set(range(learners))
    assert acting == learning == list(range(8))
    assert numbers == list(range(threads * processes))


@pytest.mark.parametrize(
    ("hardware", "groups", "processes", "message"),
    [
        (Hardware(3), 2, 1, "3 actor threads"),
        (Hardware(2, (0, 1)), 2, 1, "4 actor threads"),
        (Hardware(1, (0,), (0, 1, 2)), 2, 1, "3 learner devices"),
        (Hardware(1), 3, 2, "multiple of the 2 processes"),
        (Hardware(1, (0, 0)), 4, 1, "different device ids"),
        (Hardware(1, (0,), ()), 4, 1, "different device ids"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_in_one_line(hardware, groups, processes, message):
    with pytest.raises(ValueError, match=message) as caught:
        plan(hardware, groups, 0, processes)
    assert "\n" not in str(caught.value)


def test_settings_are_named_as_in_the_cleanba_readme():
    assert layout_of(Hardware(2, (0,), (1, 2)), 1).name == "a0-l1,2-d1-t2"


CONFIGURE = """
import os

os.environ["XLA_FLAGS"] = "--xla_dump_to=/nowhere"
import jax

from cleanba.exact.placement import GPU_FLAGS, PORTABLE_FLAGS, Hardware, configure_process

on_cpu = Hardware(platform="cpu", learner_device_ids=(1, 2), xla_cpu_pool_size=5)
configure_process(on_cpu, portable=False)
assert os.environ["NPROC"] == "5"
assert os.environ["XLA_FLAGS"] == "--xla_dump_to=/nowhere"
assert (jax.config.jax_num_cpu_devices, jax.config.jax_platforms) == (3, "cpu")
for _ in range(2):  # as by a parent process: a flag that came twice would change the cache's keys
    configure_process(Hardware(platform="cpu"), portable=True)
assert os.environ["NPROC"] == str(len(os.sched_getaffinity(0)))
assert os.environ["XLA_FLAGS"] == f"--xla_dump_to=/nowhere {PORTABLE_FLAGS}"
os.environ["XLA_FLAGS"] = ""
configure_process(Hardware(xla_host_devices=4), portable=False)
assert os.environ["NPROC"] == "8"  # whatever the cores
assert os.environ["XLA_FLAGS"] == GPU_FLAGS
assert jax.config.jax_num_cpu_devices == 4
"""


def test_process_wide_state_is_set_before_jax_starts():
    done = subprocess.run([sys.executable, "-c", CONFIGURE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_default_number_of_groups_suits_every_layout_of_the_readme():
    # 60 environments on 2 threads, in 1 or 2 processes, with up to 6 learner devices
    for processes in (1, 2):
        num_envs = 60 * 2 * processes
        assert default_num_env_groups(num_envs, 128, 4) == 8
        assert default_num_env_groups(num_envs, 1, 4) == 6
    assert default_num_env_groups(128, 1, 4) == 8
    assert default_num_env_groups(1, 128, 4) == 1
    assert default_num_env_groups(7, 20, 4) == 7


ALLOCATE_TWICE = """
import resource

from cleanba.exact.placement import Hardware, start_jax

start_jax(Hardware(platform="cpu"), portable=True)
size = 27
b"x" * 2**size  # freed at once
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
b"x" * 2**size
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults)
"""


def test_freed_memory_is_reused_without_page_faults():
    done = subprocess.run([sys.executable, "-c", ALLOCATE_TWICE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 1000  # page faults; there are 2**27 / 2**12 = 32,768 pages


@pytest.mark.parametrize(
    ("variables", "gpus"),
    [
        ({"SLURM_LOCALID": "0"}, [0, 1, 2]),
        ({"SLURM_LOCALID": "1"}, [3, 4, 5]),
        ({"SLURM_LOCALID": "1", "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5"}, [3, 4, 5]),
        (
            {"SLURM_LOCALID": "1", "CUDA_VISIBLE_DEVICES": "4,5,6"},
            [0, 1, 2],
        ),  # only its own are visible
        ({"SLURM_LOCALID": "0", "CUDA_VISIBLE_DEVICES": "4,5,6,7"}, [0, 1, 2]),  # as in the README
    ],
)
def test_the_processes_of_a_node_divide_its_gpus(variables, gpus):
    assert local_gpus(3, variables) == gpus


def test_features_of_the_processor_are_read_from_cpuinfo(monkeypatch):
    text = (
        "processor\t: 0\nmodel name\t: X 1\nmodel\t\t: 2\nflags\t\t: fpu avx2\nvmx flags\t: ept\n"
    )
    monkeypatch.setattr(placement.Path, "read_text", lambda path: text)
    assert placement.cpu_model() == "X 1"
    assert placement.cpu_info("model") == "2"
    monkeypatch.setattr(placement.os, "uname", lambda: type("", (), {"machine": "x86_64"}))
    with pytest.raises(ValueError, match="lacks fma; give --no-portable"):
        placement.check_instruction_set()
