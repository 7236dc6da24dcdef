"""The networks are those of the papers, although their operations are computed differently."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cleanba.exact.layers import max_pool_3x3_stride_2
from cleanba.networks import Conv, Dense, StridedConv, check_fits, default_network, make_network


def images(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def check_same_layer(ours, theirs, x):
    """Initial values, outputs and gradients are those of a Flax layer."""
    params, expected = (jax.jit(layer.init)(jax.random.key(1), x) for layer in (ours, theirs))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), params, expected)
    params["params"]["bias"] = images(ours.features)

    def evaluate(layer):
        def loss(params, x):
            outputs = layer.apply(params, x)
            return jnp.sum(jnp.sin(outputs)), outputs

        return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(params, x)

    (gradients, outputs), (expected, expected_outputs) = evaluate(ours), evaluate(theirs)
    np.testing.assert_allclose(outputs, expected_outputs, atol=1e-4)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-3, rtol=1e-4), gradients, expected
    )


@pytest.mark.parametrize("portable", [True, False])
@pytest.mark.parametrize(
    ("size", "channels", "kernel", "stride"), [(84, 4, 8, 4), (20, 32, 4, 2), (9, 64, 3, 1)]
)
def test_strided_conv_is_flax_conv_with_the_same_parameters(
    size, channels, kernel, stride, portable
):
    x = images(2, size, size, channels)
    start = nn.initializers.orthogonal(np.sqrt(2))
    theirs = nn.Conv(16, (kernel, kernel), (stride, stride), padding="VALID", kernel_init=start)
    check_same_layer(StridedConv(16, kernel, stride, portable), theirs, x)


@pytest.mark.parametrize("portable", [True, False])
@pytest.mark.parametrize(
    ("height", "width", "channels"),
    [(10, 10, 16), (7, 11, 3), (1, 1, 8)],
)
def test_3x3_conv_is_flax_conv_with_the_same_parameters(height, width, channels, portable):
    x = images(2, height, width, channels)
    check_same_layer(Conv(16, portable), nn.Conv(16, (3, 3)), x)


@pytest.mark.parametrize("portable", [True, False])
@pytest.mark.parametrize(("rows", "columns"), [(4, 64), (3136, 64), (64, 18), (7, 1)])
def test_a_dense_layer_is_flax_dense_with_the_same_parameters(rows, columns, portable):
    start = nn.initializers.orthogonal(np.sqrt(2))
    theirs = nn.Dense(columns, kernel_init=start)
    check_same_layer(Dense(columns, np.sqrt(2), portable), theirs, images(5, rows))


@pytest.mark.parametrize("portable", [True, False])
@pytest.mark.parametrize("size", [42, 21, 5])
def test_max_pool_is_flax_max_pool(size, portable):
    x = images(2, size, size, 3)

    def ours(x):
        return max_pool_3x3_stride_2(x, portable=portable)

    def reference(x):
        return nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")

    np.testing.assert_array_equal(ours(x), reference(x))
    gradient, expected = (
        jax.jit(jax.grad(lambda x, f=f: jnp.sum(jnp.sin(f(x)))))(x) for f in (ours, reference)
    )
    np.testing.assert_allclose(gradient, expected, atol=1e-5)


# Multiply and add up by hand: kernels + biases, with the two heads for 18 actions and a value.
RESNET = sum(
    9 * c_in * c + c + 4 * (9 * c * c + c) for c_in, c in ((4, 16), (16, 32), (32, 32))
) + (11 * 11 * 32 * 256 + 256) + (256 * 18 + 18) + 257  # fmt: skip
NATURE = (
    (8 * 8 * 4 * 32 + 32) + (4 * 4 * 32 * 64 + 64) + (9 * 64 * 64 + 64)
    + (7 * 7 * 64 * 512 + 512) + (512 * 18 + 18) + 513
)  # fmt: skip
MLP = 2 * ((4 * 64 + 64) + (64 * 64 + 64)) + (64 * 18 + 18) + 65


@pytest.mark.parametrize(
    ("name", "shape", "count"),
    [
        pytest.param("resnet", (4, 84, 84), RESNET, marks=pytest.mark.slow),
        ("nature", (4, 84, 84), NATURE),
        ("mlp", (4,), MLP),
    ],
)
def test_networks_have_the_shapes_of_the_papers(name, shape, count):
    dtype = np.float32 if name == "mlp" else np.uint8
    obs = np.random.default_rng(0).integers(0, 255, (3, *shape)).astype(dtype)
    network = make_network(name, 18, portable=True)
    params = jax.jit(network.init)(jax.random.key(0), obs)
    assert sum(x.size for x in jax.tree.leaves(params)) == count
    logits, values = jax.jit(network.apply)(params, obs)
    assert logits.shape == (3, 18)
    assert values.shape == (3,)
    assert np.abs(logits).max() < 1  # the policy starts nearly uniform: gain 0.01
    heads = params["params"]
    kernel = np.asarray(heads["actor"]["kernel"])
    gram = kernel.T @ kernel
    np.testing.assert_allclose(gram, 0.01**2 * np.eye(18), atol=1e-6)
    gain = np.linalg.norm(heads["critic"]["kernel"])
    assert gain == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("name", ["resnet", "nature"])
def test_images_may_have_their_channels_last(name):
    """EnvPool's football has images of 72 x 96 x 4."""
    network = make_network(name, 3, portable=False)
    first = np.random.default_rng(0).integers(0, 256, (2, 4, 72, 96), dtype=np.uint8)
    params = network.init(jax.random.key(0), first)
    last = np.moveaxis(first, 1, 3)
    for there, here in zip(network.apply(params, first), network.apply(params, last), strict=True):
        np.testing.assert_allclose(there, here, atol=1e-5)


def test_the_default_network_follows_the_observation():
    assert default_network((4, 84, 84)) == "resnet"
    assert default_network((4,)) == "mlp"
    assert default_network((10, 5)) == "mlp"


@pytest.mark.parametrize(
    ("name", "options"),
    [("mlp", {"channels": (1, 2, 3)}), ("nature", {"channels": (1, 2)}), ("lstm", {})],
)
def test_options_that_a_network_lacks_are_refused(name, options):
    with pytest.raises(ValueError, match="--"):
        make_network(name, 3, portable=True, **options)


def test_a_network_for_images_is_refused_for_vectors():
    with pytest.raises(ValueError, match="choose mlp"):
        check_fits("resnet", (4,))
    with pytest.raises(ValueError, match="choose resnet or nature"):
        check_fits("mlp", (4, 84, 84))
    check_fits("nature", (72, 96, 4))
    check_fits("resnet", (3, 20, 20))
    with pytest.raises(ValueError, match="too small; choose resnet"):
        check_fits("nature", (3, 20, 20))
