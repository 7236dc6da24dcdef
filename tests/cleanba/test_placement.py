"""Every layout from one to as many threads and devices as groups is legal, and none is lost."""

import itertools
import subprocess
import sys

import pytest

from cleanba.placement import (
    Hardware,
    deal,
    default_num_env_groups,
    local_gpus,
    plan,
    setting_name,
)


def test_dealing_keeps_every_item_in_order_in_hands_of_nearly_equal_size():
    for items, hands in itertools.product(range(1, 12), range(1, 12)):
        if hands > items:
            with pytest.raises(ValueError, match="deal"):
                deal(range(items), hands)
            continue
        dealt = deal(range(items), hands)
        assert list(itertools.chain(*dealt)) == list(range(items))
        assert len(dealt) == hands
        assert max(map(len, dealt)) - min(map(len, dealt)) <= 1


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
        (Hardware(0), 4, 1, "--num-actor-threads"),
        (Hardware(1, envpool_threads=0), 4, 1, "--envpool-threads"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_in_one_line(hardware, groups, processes, message):
    with pytest.raises(ValueError, match=message) as caught:
        plan(hardware, groups, 0, processes)
    assert "\n" not in str(caught.value)


def test_settings_are_named_as_in_the_cleanba_readme():
    assert setting_name(Hardware(2, (0,), (1, 2)), 1) == "a0-l1,2-d1-t2"


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

from cleanba.placement import Hardware, start_jax

start_jax(Hardware(platform="cpu"), 8)
size = 27
b"x" * 2**size  # freed at once
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
b"x" * 2**size
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults)
"""


def test_memory_that_is_freed_is_there_for_the_next_allocation():
    done = subprocess.run([sys.executable, "-c", ALLOCATE_TWICE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 1000  # page faults; there are 2**27 / 2**12 = 32,768 pages


@pytest.mark.parametrize(
    ("variables", "gpus"),
    [
        ({"SLURM_LOCALID": "0"}, [0, 1, 2]),  # one process on the node, of those that it sees
        ({"SLURM_LOCALID": "1"}, [3, 4, 5]),
        ({"SLURM_LOCALID": "1", "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5"}, [3, 4, 5]),
        ({"SLURM_LOCALID": "1", "CUDA_VISIBLE_DEVICES": "4,5,6"}, [0, 1, 2]),  # its own alone
        ({"SLURM_LOCALID": "0", "CUDA_VISIBLE_DEVICES": "4,5,6,7"}, [0, 1, 2]),  # as in the README
    ],
)
def test_processes_of_a_node_share_its_gpus_out(variables, gpus):
    assert local_gpus(3, variables) == gpus
