"""What XLA compiles for the trainers depends neither on the processor nor on the size of its thread pool."""

import re

import pytest

from cleanba.exact.kernels import TARGETS
from tests.cleanba.conftest import outcome

# Dots and convolutions run in Eigen, custom fusions in YNNPACK, XNNPACK or oneDNN.
LIBRARY_CALL = re.compile(r' (dot|convolution)\(|(kind=kCustom)|custom_call_target="([^"]+)"')

PRODUCTS = {target for target in TARGETS if "pool" not in target}

ATARI = (
    "--env-id", "Breakout-v5", "--num-envs", 4, "--num-env-groups", 2, "--num-steps", 4,
    "--total-timesteps", 16,
)  # fmt: skip


def library_calls(train, folder, *args):
    flags = f"--xla_dump_to={folder} --xla_dump_hlo_as_text"
    train(*args, env={"XLA_FLAGS": flags})
    programs = list(folder.glob("*.cpu_after_optimizations.txt"))
    assert programs
    calls = (LIBRARY_CALL.findall(path.read_text()) for path in programs)
    return {"".join(call) for found in calls for call in found}


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_anew")
@pytest.mark.parametrize(
    ("algorithm", "args", "calls"),
    [
        ("ppo", (), {"cleanba_matmul"}),
        ("impala", (*ATARI, "--network", "nature"), PRODUCTS),
        ("ppo", (*ATARI, "--network", "resnet"), set(TARGETS)),
    ],
)
def test_portable_trainers_call_no_library_but_the_kernels(train, tmp_path, algorithm, args, calls):
    assert library_calls(train, tmp_path / "dump", algorithm, *args) == calls


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_anew")
def test_other_trainers_call_libraries(train, tmp_path):
    calls = library_calls(train, tmp_path / "dump", "ppo", "--no-portable")
    assert {"dot", "kCustom"} & calls


@pytest.mark.soak
@pytest.mark.usefixtures("compiled_anew")
@pytest.mark.parametrize(
    ("algorithm", "args"),
    [
        ("impala", ()),
        ("impala", (*ATARI, "--network", "nature")),
        ("ppo", (*ATARI, "--network", "resnet")),
    ],
)
def test_pools_of_all_sizes_give_the_same_bits(train, algorithm, args):
    folders = [
        train(algorithm, *args, "--xla-cpu-pool-size", size, "--setting", f"pool{size}")
        for size in (1, 2, 8, 16)
    ]
    first, *others = map(outcome, folders)
    assert all(other == first for other in others)
