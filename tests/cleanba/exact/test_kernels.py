"""The kernels compute the chains that kernels.cc describes, and jax's products to rounding."""

import functools
import importlib.util
import itertools
import os
import shutil
import stat
import subprocess
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from cleanba.exact import kernels, placement
from cleanba.exact.layers import conv, dense, max_pool_3x3_stride_2, orthonormal_columns
from tests.cleanba.conftest import ROOT, outcome
from tests.cleanba.exact import reference_kernels


def normal(*shape):
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize(
    ("m", "k", "n"),
    [
        (1, 1, 1),
        (3, 5, 2),
        (13, 700, 37),
        (60, 1100, 18),
        (70, 513, 1),
        (1, 600, 130),
        (300, 64, 65),
    ],
)
@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
def test_a_matrix_product_is_its_chains_to_the_bit(m, k, n, transpose_a, transpose_b):
    a, b = normal(m, k), normal(k, n)
    out = kernels.matmul(
        a.T.copy() if transpose_a else a,
        b.T.copy() if transpose_b else b,
        transpose_a=transpose_a,
        transpose_b=transpose_b,
    )
    np.testing.assert_array_equal(out, reference_kernels.matmul(a, b))


CONVOLUTIONS = [
    # batch, height, width, channels, size, features, before, after
    (2, 7, 9, 3, 3, 16, 1, 1),
    (3, 30, 30, 16, 3, 32, 1, 1),
    (2, 10, 10, 12, 2, 8, 0, 0),
    (1, 5, 6, 2, 3, 5, 2, 0),
    (1, 1, 1, 8, 3, 4, 1, 1),
    (5, 12, 11, 20, 3, 40, 1, 0),  # images of one piece, in several parts
    (2, 3, 600, 1, 2, 3, 0, 0),  # rows longer than a piece
]


@pytest.mark.parametrize(
    ("batch", "height", "width", "channels", "size", "features", "before", "after"), CONVOLUTIONS
)
def test_a_convolution_and_its_gradient_are_their_chains_to_the_bit(
    batch, height, width, channels, size, features, before, after
):
    x, kernel = normal(batch, height, width, channels), normal(size, size, channels, features)
    out = kernels.convolve(x, kernel, before, after)
    np.testing.assert_array_equal(out, reference_kernels.convolve(x, kernel, before, after))

    gradient = normal(*out.shape)
    np.testing.assert_array_equal(
        kernels.convolve_kernel_gradient(x, gradient, size, before, after),
        reference_kernels.convolve_kernel_gradient(x, gradient, size, before, after),
    )


def outcomes_with_and_without_kernels(train, algorithm, *args):
    with_kernels = train(algorithm, *args, "--setting", "with")
    command = train.command(algorithm, *args, "--setting", "without")[1:]
    program = [sys.executable, reference_kernels.__file__, *command]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        program, capture_output=True, text=True, env=environment, cwd=train.runs_dir
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (without,) = train.runs_dir.glob("default/*__without__*")
    return outcome(with_kernels), outcome(without)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["ppo", "impala"])
def test_training_gives_the_same_bits_without_the_compiled_kernels(train, algorithm):
    ours, reference = outcomes_with_and_without_kernels(train, algorithm)
    assert ours == reference


@pytest.mark.soak
@pytest.mark.parametrize(("network", "num_steps"), [("nature", 8), ("resnet", 4)])
def test_training_on_images_gives_the_same_bits_without_the_compiled_kernels(
    train, network, num_steps
):
    ours, reference = outcomes_with_and_without_kernels(
        train, "impala", "--env-id", "Breakout-v5", "--network", network, "--num-envs", "4",
        "--num-env-groups", "2", "--num-steps", num_steps, "--total-timesteps", 4 * num_steps,
    )  # fmt: skip
    assert ours == reference


def relative_error(ours, theirs):
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    return np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)


def check_against_jax(layer, x, kernel):
    """Compare the result and the gradients with jax's in 64 bits; its own in 32 bits are up to 5e-5 away."""
    inputs = x, kernel, normal(kernel.shape[-1])
    gradient = normal(*jax.eval_shape(functools.partial(layer, portable=False), *inputs).shape)

    def evaluate(portable, dtype):
        @jax.jit
        def evaluate(inputs, gradient):
            out, pull_back = jax.vjp(functools.partial(layer, portable=portable), *inputs)
            return out, *pull_back(gradient)

        return evaluate(*jax.tree.map(lambda x: x.astype(dtype), (inputs, gradient)))

    ours = evaluate(True, np.float32)
    with jax.enable_x64(True):
        theirs = evaluate(False, np.float64)
    for x, y in zip(ours, theirs, strict=True):
        assert x.dtype == np.float32
        assert y.dtype == np.float64
        assert relative_error(x, y) < 1e-5


BATCHES = [1, 15, 16, 60, 480]
DENSE = [
    (4, 64),
    (64, 64),
    (64, 2),
    (64, 1),
    (3136, 512),
    (512, 18),
    (512, 1),
    (3872, 256),
    (256, 18),
    (256, 1),
]
RESNET = [(84, 4, 16), (42, 16, 16), (42, 16, 32), (21, 32, 32), (11, 32, 32)]  # side, channels
NATURE = [(84, 4, 8, 4, 32), (20, 32, 4, 2, 64), (9, 64, 3, 1, 64)]  # side, channels, size, stride


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("inputs", "outputs"), DENSE)
def test_dense_layers_of_the_networks_agree_with_jax(batch, inputs, outputs):
    check_against_jax(dense, normal(batch, inputs), normal(inputs, outputs))


IMAGES = [pytest.param(b, marks=[pytest.mark.soak] if b == 480 else []) for b in BATCHES]


@pytest.mark.parametrize("batch", IMAGES)
@pytest.mark.parametrize(("side", "channels", "features"), RESNET)
def test_convolutions_of_the_resnet_agree_with_jax(batch, side, channels, features):
    def layer(*inputs, portable):
        return conv(*inputs, padding=1, portable=portable)

    check_against_jax(layer, normal(batch, side, side, channels), normal(3, 3, channels, features))


@pytest.mark.parametrize("batch", IMAGES)
@pytest.mark.parametrize(("side", "channels", "size", "stride", "features"), NATURE)
def test_convolutions_of_the_nature_cnn_agree_with_jax(
    batch, side, channels, size, stride, features
):
    def layer(*inputs, portable):
        return conv(*inputs, stride=stride, portable=portable)

    check_against_jax(
        layer, normal(batch, side, side, channels), normal(size, size, channels, features)
    )


POOLS = [
    (42, 84, 84, 16),
    (3, 42, 42, 32),
    (2, 21, 21, 32),
    (2, 1, 1, 3),
    (2, 2, 5, 7),
    (1, 3, 4, 1),
]


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("shape", POOLS)
def test_pooling_is_jaxs_to_the_bit(shape, ties):
    """With rounded numbers, many are equal: the gradient of jax.numpy.maximum gives each half."""
    x = np.round(normal(*shape)) if ties else normal(*shape)
    pools = [functools.partial(max_pool_3x3_stride_2, portable=p) for p in (True, False)]
    (ours, pull_back), (theirs, their_pull_back) = (jax.vjp(pool, x) for pool in pools)
    np.testing.assert_array_equal(ours, theirs)
    gradient = normal(*ours.shape)
    np.testing.assert_array_equal(*pull_back(gradient), *their_pull_back(gradient))


def test_pooling_keeps_numbers_that_are_not():
    """A maximum that dropped them would hide that a run diverged."""
    for row, column in itertools.product(range(5), range(5)):
        x = np.zeros((1, 5, 5, 2), np.float32)
        x[0, row, column, 0] = np.nan
        pooled, expected = (max_pool_3x3_stride_2(x, portable=p) for p in (True, False))
        np.testing.assert_array_equal(pooled, expected)
        assert np.isnan(pooled).any()


@pytest.mark.parametrize("side", [10, 11])
def test_a_stride_need_not_divide_the_kernel(side):
    layer = functools.partial(conv, stride=2)
    check_against_jax(layer, normal(15, side, side, 27), normal(3, 3, 27, 16))


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(50))
def test_layers_of_random_shapes_agree_with_jax(seed):
    rng = np.random.default_rng(seed)
    batch, channels, features = (int(rng.integers(1, most)) for most in (70, 70, 70))
    if seed % 5 == 0:
        inputs = int(rng.integers(1, 1500))
        check_against_jax(dense, normal(batch, inputs), normal(inputs, features))
        return
    stride, more = (int(rng.integers(1, 4)) for _ in range(2))
    size = stride + more - 1
    padding = int(rng.integers(size)) if stride == 1 else 0
    height, width = (int(rng.integers(size, size + 20)) for _ in range(2))
    layer = functools.partial(conv, stride=stride, padding=padding)
    check_against_jax(
        layer, normal(batch, height, width, channels), normal(size, size, channels, features)
    )


@pytest.mark.parametrize("shape", [(5, 1), (64, 64), (1024, 64), (3136, 512)])
def test_columns_are_made_orthonormal_as_by_qr_with_a_positive_diagonal(shape):
    x = normal(*shape)
    q, r = np.linalg.qr(x.astype(np.float64))
    out = np.asarray(jax.jit(orthonormal_columns, static_argnames="portable")(x, portable=True))
    np.testing.assert_allclose(out, q * np.sign(np.diag(r)), atol=2e-5)
    np.testing.assert_allclose(out.T @ out, np.eye(shape[1]), atol=2e-6)


# ---- the same chains on every instruction set


def random_convolutions(count):
    """Return shapes as in CONVOLUTIONS."""
    rng = np.random.default_rng(count)
    for _ in range(count):
        size = int(rng.integers(1, 5))
        before, after = (int(x) for x in rng.integers(0, size, 2))
        height, width = (int(x) for x in rng.integers(size, size + 20, 2))
        batch, channels, features = (int(x) for x in rng.integers(1, (4, 20, 70)))
        yield batch, height, width, channels, size, features, before, after


BITS = """
import ctypes, hashlib, sys
import jax
from cleanba.exact import kernels
functions = ctypes.CDLL(sys.argv[1])
for target in kernels.TARGETS:
    jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(functions, target)), platform="cpu")
kernels.load = lambda: None
from tests.cleanba.exact.test_kernels import CONVOLUTIONS, POOLS, normal, random_convolutions
results = [
    kernels.matmul(normal(m, k), normal(k, n)) for m in (1, 15, 60) for k in (7, 600) for n in (1, 18, 70)
]
convolutions = [*CONVOLUTIONS, *random_convolutions(20)]
for batch, height, width, channels, size, features, before, after in convolutions:
    x, kernel = normal(batch, height, width, channels), normal(size, size, channels, features)
    out = kernels.convolve(x, kernel, before, after)
    results += [out, kernels.convolve_kernel_gradient(x, normal(*out.shape), size, before, after)]
for shape in POOLS:
    x = normal(*shape)
    out = kernels.max_pool(x)
    results += [out, kernels.max_pool_gradient(x, normal(*out.shape))]
print(hashlib.sha256(b"".join(jax.device_get(x).tobytes() for x in results)).hexdigest())
"""


INSTRUCTION_SETS = {"anywhere": set(), "avx2": {"avx2", "fma"}, "avx512": {"avx512f", "fma"}}
on_x86_64 = pytest.mark.skipif(os.uname().machine != "x86_64", reason="instruction sets of x86-64")


def supported_sets():
    features = set(placement.cpu_info("flags").split())
    return [name for name, needed in INSTRUCTION_SETS.items() if needed <= features]


def bits_of(library, compiler, environment=None):
    """Compile the kernels and run BITS in a process of its own."""
    kernels.compile_library(library, compiler)
    return subprocess.run(
        [sys.executable, "-c", BITS, str(library)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | (environment or {}),
    )


@pytest.mark.slow
@on_x86_64
def test_all_instruction_sets_and_compilers_give_the_same_bits(tmp_path):
    known = {"c++": shutil.which("c++"), "clang++": shutil.which("clang++")}
    compilers = {name: [name] for name, path in known.items() if path}
    if importlib.util.find_spec("ziglang"):
        compilers["zig"] = [sys.executable, "-m", "ziglang", "c++"]
    outputs = {}
    for name, compiler in itertools.product(supported_sets(), compilers):
        library = tmp_path / f"{name}-{compiler}.so"
        done = bits_of(library, [*compilers[compiler], f"-DMULTIPLY=multiply_{name}"])
        assert done.returncode == 0, done.stderr
        outputs[library.stem] = done.stdout
    assert len(outputs) >= 2
    assert len(set(outputs.values())) == 1


@pytest.mark.slow
def test_any_number_of_threads_gives_the_same_bits(tmp_path):
    outputs = {}
    for threads in ("1", "2", "5"):
        done = bits_of(tmp_path / f"{threads}.so", ["c++"], {"NPROC": threads})
        assert done.returncode == 0, done.stderr
        outputs[threads] = done.stdout
    assert len(set(outputs.values())) == 1


# ---- with AddressSanitizer and UndefinedBehaviorSanitizer


@pytest.fixture
def sanitized(tmp_path):
    """Run BITS with sanitizers, for one instruction set."""
    command = ["c++", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
    runtimes = [
        subprocess.run(["c++", f"-print-file-name={name}"], capture_output=True, text=True).stdout
        for name in ("libasan.so", "libubsan.so")
    ]
    environment = {"LD_PRELOAD": " ".join(map(str.strip, runtimes))}
    environment["ASAN_OPTIONS"] = "detect_leaks=0"  # Python's own
    return lambda name: bits_of(
        tmp_path / f"{name}.so", [*command, f"-DMULTIPLY=multiply_{name}"], environment
    )


needs_sanitizers = pytest.mark.skipif(
    not shutil.which("g++"), reason="needs GCC and its sanitizers' runtimes"
)


@pytest.mark.soak
@on_x86_64
@needs_sanitizers
def test_sanitizers_find_nothing_and_the_bits_are_the_same(tmp_path, sanitized):
    expected = bits_of(tmp_path / "plain.so", ["c++"]).stdout
    for name in supported_sets():
        done = sanitized(name)
        assert done.returncode == 0, done.stderr
        assert done.stdout == expected


@pytest.mark.soak
@on_x86_64
@needs_sanitizers
def test_sanitizers_find_a_buffer_that_is_one_element_short(monkeypatch, tmp_path, sanitized):
    source = kernels.SOURCE.read_text()
    size = "new float[std::min(batch, kImages) * elements"
    assert source.count(size) == 1
    (tmp_path / "kernels.cc").write_text(source.replace(size, f"{size} - 1"))
    monkeypatch.setattr(kernels, "SOURCE", tmp_path / "kernels.cc")
    done = sanitized("anywhere")
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr


@pytest.mark.parametrize("width", [5, 600])  # one piece, and rows longer than a piece
def test_memory_of_many_images_is_bounded_and_their_order_kept(width):
    x, gradient = normal(150, 4, width, 2), normal(150, 2, width - 2, 4)
    whole = kernels.convolve_kernel_gradient(x, gradient, 3, 0, 0)
    images = [kernels.convolve_kernel_gradient(x[[i]], gradient[[i]], 3, 0, 0) for i in range(150)]
    total = images[0]
    for image in images[1:]:
        total = total + image
    np.testing.assert_array_equal(whole, total)


def test_empty_inputs_and_layers_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="cleanba_matmul"):
        kernels.matmul(normal(3, 0), normal(0, 4))
    for options in ({"stride": 4}, {"stride": 0}, {"padding": 3}, {"padding": -1}):
        for portable in (True, False):
            with pytest.raises(ValueError, match="stride"):
                conv(
                    normal(1, 9, 9, 2), normal(3, 3, 2, 4), normal(4), portable=portable, **options
                )


# ---- what may be missing


@pytest.fixture
def nothing_compiled(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "cleanba"


def test_a_damaged_library_is_one_line(monkeypatch, nothing_compiled):
    monkeypatch.setattr(kernels, "compile_library", lambda path, compiler: path.write_bytes(b"x"))
    nothing_compiled.mkdir()
    with pytest.raises(ValueError, match=r"file too short.*--no-portable"):
        kernels.load.__wrapped__()


@pytest.mark.parametrize("suffix", ["", ".so"])
def test_a_library_in_a_folder_or_file_of_another_user_is_not_executed(
    monkeypatch, nothing_compiled, suffix
):
    monkeypatch.setattr(kernels, "compile_library", lambda path, compiler: path.write_bytes(b"x"))
    nothing_compiled.mkdir()
    own, other = (SimpleNamespace(st_uid=os.getuid() + n, st_mode=stat.S_IFDIR) for n in range(2))
    monkeypatch.setattr(
        type(nothing_compiled),
        "stat",
        lambda path, **options: other if path.suffix == suffix else own,
    )
    with pytest.raises(ValueError, match=f"cleanba.*{suffix}: belongs to another user"):
        kernels.load.__wrapped__()


@pytest.mark.parametrize(
    ("compiler", "problem"), [("no-such-compiler", "No such file"), ("false", "false failed")]
)
@pytest.mark.usefixtures("nothing_compiled")
def test_without_a_compiler_one_line_says_what_to_do(monkeypatch, compiler, problem):
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(ValueError, match=f"{problem}.*install a C.*--no-portable") as caught:
        kernels.load.__wrapped__()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("variables", "found", "package", "command"),
    [
        ({"CXX": "ccache g++"}, "/usr/bin/c++", True, ["ccache", "g++"]),
        ({}, "/usr/bin/c++", True, ["c++"]),
        ({}, None, True, [sys.executable, "-m", "ziglang", "c++"]),
        ({}, None, False, ["c++"]),
    ],
)
def test_the_compiler_is_cxx_or_the_systems_or_zigs(
    monkeypatch, variables, found, package, command
):
    monkeypatch.delenv("CXX", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(kernels.shutil, "which", lambda name: found)
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: package or None)
    assert kernels.compiler_command() == command


def test_a_failed_compilation_leaves_nothing_behind(monkeypatch, nothing_compiled):
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(ValueError, match="--portable"):
        kernels.load.__wrapped__()
    assert list(nothing_compiled.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_named(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    with pytest.raises(ValueError, match="/dev/null/cleanba: Not a directory"):
        kernels.load.__wrapped__()
