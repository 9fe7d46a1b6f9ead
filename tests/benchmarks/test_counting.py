"""The hand count of FLOPs and bytes, beside XLA's and beside sums by hand."""

import importlib
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import linen

from fedvi import nn
from fedvi.local import LocalTraining

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module", autouse=True)
def benchmarks_on_the_path():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield


@pytest.fixture(scope="module")
def counting(benchmarks_on_the_path):
    return importlib.import_module("counting")


@pytest.fixture(scope="module")
def floors(benchmarks_on_the_path):
    return importlib.import_module("floors")


def test_xla_counts_a_loop_body_once_and_unrolled_steps_each(floors):
    x, w = jnp.ones((16, 32)), jnp.ones((32, 32))
    once = 2 * 16 * 32 * 32

    def loop(x, w):
        return jax.lax.fori_loop(0, 10, lambda _, x: x @ w, x)

    def unrolled(x, w):
        for _ in range(10):
            x = x @ w
        return x

    for steps, expected in ((jnp.matmul, once), (loop, once), (unrolled, 10 * once)):
        lowered = jax.jit(steps).lower(x, w)
        for program in (lowered, lowered.compile()):
            flops = floors.xla_cost(program)["flops"]
            assert flops == pytest.approx(expected, rel=1e-3)


class Separable(linen.Module):
    """MobileNet's layers, so wide that products outweigh what is elementwise."""

    classes: int

    @linen.compact
    def __call__(self, x, mask=None):
        x = linen.relu(nn.BatchNorm()(nn.Conv(256, (3, 3))(x), mask))
        x = linen.relu(nn.BatchNorm()(nn.DepthwiseConv((3, 3), 2)(x), mask))
        x = linen.relu(nn.BatchNorm()(nn.Conv(1024, (1, 1))(x), mask))
        return nn.Dense(self.classes, name="head")(nn.global_avg_pool(x))


@pytest.mark.parametrize("normalised", [False, True])
def test_products_by_hand_are_those_that_xla_counts(counting, floors, normalised):
    if normalised:
        shape = (8, 8, 64)
        model = nn.from_flax(Separable(10), shape, head="head")
    else:
        shape = (28, 28, 1)
        model = nn.build("mlp", classes=10, input_shape=shape)
    ours = counting.least_step(counting.layers_of(model, shape), 4).flops
    x = jnp.zeros((1, 4, *shape))
    assert 1 <= floors.step_flops(model, LocalTraining(), x) / ours < 1.05


def test_mobilenet_moves_its_412_thousand_values_about_9_times(counting):
    shape = (32, 32, 3)
    layers = counting.layers_of(
        nn.build("mobilenet", classes=10, input_shape=shape), shape
    )
    values = sum(layer.outputs for layer in layers)
    assert values == 411_658
    assert sum(layer.multiply_adds for layer in layers) == 46_354_432
    assert sum(layer.parameters for layer in layers) == 3_206_976 + 10_250
    work = counting.least_step(layers, 1, activation_bytes=2)
    assert work.activation_bytes / 2 / values == pytest.approx(9, rel=0.03)
    double = counting.least_step(layers, 1, activation_bytes=4)
    raw = 2 * 4 * 3072
    assert double.activation_bytes - raw == 2 * (work.activation_bytes - raw)


@pytest.mark.parametrize("normalised, moves", [(True, 9), (False, 7)])
def test_a_layer_in_the_middle_moves_each_value_so_often(counting, normalised, moves):
    layer = counting.Layer("Dense", 100, 100, 0, 0, normalised)
    two, three = (
        counting.least_step([layer] * n, 1, activation_bytes=1) for n in (2, 3)
    )
    assert three.activation_bytes - two.activation_bytes == 100 * moves


def test_a_round_is_its_steps_and_the_average(counting):
    shape = (4,)
    model = nn.build("mlp", classes=2, input_shape=shape, hidden=(3,))
    layers = counting.layers_of(model, shape)
    first, second = (4 + 1) * 3, (3 + 1) * 2
    # Clients of 5 and 11 examples in batches of 4 take 2 and 3 steps; 2 epochs.
    work = counting.least_round(layers, [5, 11], 6, batch_size=4, epochs=2)
    examples, steps = 6 * 2 * 8, 6 * 2 * 2.5
    products = 2 * (2 * 4 * 3 + 3 * 3 * 2)
    update = 4 * (first + second)
    average = 2 * (first + second)
    assert work.flops == examples * products + steps * update + 6 * average
    # First layer: its output and its gradient; second: that, twice more what comes in
    # and goes out.
    values = (3 + 3) + (2 + 2 + 2 * 3 + 2 + 2 * 3)
    assert work.activation_bytes == examples * (4 * values + 4 * 2 * 4)
    moved = steps * (5 * first + 6 * second) + 6 * 3 * (first + second)
    assert work.parameter_bytes == 4 * moved


def test_a_forward_pass_reads_writes_and_multiplies_once(counting, floors):
    model = nn.build("mlp", classes=2, input_shape=(40,), hidden=(30,))
    layers = counting.layers_of(model, (40,))
    work = counting.least_forward(layers, 7, activation_bytes=2, input_bytes=1)
    assert work.activation_bytes == 7 * (2 * (30 + 30 + 2) + 40)
    assert work.parameter_bytes == 4 * (41 * 30 + 31 * 2)
    params = model.init(jax.random.key(0))
    by_xla = floors.xla_cost(jax.jit(model.apply).lower(params, jnp.zeros((7, 40))))
    assert 1 <= by_xla["flops"] / work.flops < 1.1


def test_weights_outside_the_known_layers_are_not_passed_over(counting):
    class Scaled(linen.Module):
        classes: int

        @linen.compact
        def __call__(self, x):
            scale = self.param("scale", linen.initializers.ones, ())
            return linen.Dense(self.classes, name="head")(x) * scale

    model = nn.from_flax(Scaled(2), (3,), head="head")
    with pytest.raises(ValueError, match="model=Scaled has 9 parameters .* layers 8"):
        counting.layers_of(model, (3,))


def test_the_floor_is_the_higher_of_the_two(counting, floors):
    peaks = {"flops_per_second": {"float32": 10.0}, "bytes_per_second": 100.0}
    floor = floors.floors_of(counting.Work(20.0, 150.0, 350.0), peaks)
    assert (floor["flops_seconds"], floor["bytes_seconds"]) == (2.0, 5.0)
    assert floors.over_floor(10.0, floor) == 2.0
    floor = floors.floors_of(counting.Work(80.0, 150.0, 350.0), peaks)
    assert floors.over_floor(10.0, floor) == 10.0 / 8.0


def test_peaks_are_measured_by_number_format(floors):
    peaks = floors.measure_peaks(
        ("float32", "bfloat16"), matrix=8, array_bytes=4096, queued=2
    )
    assert set(peaks["flops_per_second"]) == {"float32", "bfloat16"}
    assert min(peaks["flops_per_second"].values()) > 0
    assert peaks["bytes_per_second"] > 0
    assert "8 × 8 matrices" in floors.describe_peaks(peaks)


def test_only_what_is_read_and_what_is_new_must_move(counting):
    def step(state, aggregate):
        weight = jnp.sum(aggregate["unread"]) * 2
        del weight
        mean = state["mean"] + aggregate["sum"] / 2
        return {"mean": mean, "head": state["head"], "scale": jnp.square(mean)}

    state = {"mean": jnp.ones(3), "head": jnp.ones(1000), "scale": jnp.ones(3)}
    aggregate = {"sum": jnp.ones(3), "unread": jnp.ones(500)}
    # Read: mean and sum; written: mean and scale. The head stays where it is.
    assert counting.moved_bytes(step, state, aggregate) == 4 * 3 * 4
