import numpy as np
import pytest
from scipy.stats import gaussian_kde

from fedvi.evaluation import Uncertainty
from fedvi.plots import entropy
from fedvi.plots.entropy import entropy_density, kernel_density

LARGEST = np.log(10)
GRID = np.linspace(0, LARGEST, 2001)
RNG = np.random.default_rng(0)


@pytest.mark.parametrize(
    "values",
    [
        RNG.beta(1, 8, 300) * LARGEST,  # most of it near 0
        RNG.beta(8, 1, 50) * LARGEST,
        np.zeros(5),
        np.full(3, LARGEST),
        np.array([0.7]),
    ],
)
def test_the_density_integrates_to_one(values):
    density = kernel_density(values, GRID, LARGEST)
    assert density.min() >= 0
    assert np.trapezoid(density, GRID) == pytest.approx(1, rel=1e-3)


def test_far_from_the_ends_it_is_scipys():
    values = np.clip(RNG.normal(1.2, 0.1, 200), 0.9, 1.5)
    iqr = np.subtract(*np.percentile(values, [75, 25]))
    bandwidth = 0.9 * min(values.std(), iqr / 1.34) * 200**-0.2
    # SciPy scales its factor by the sample standard deviation.
    expected = gaussian_kde(values, bandwidth / values.std(ddof=1))(GRID)
    found = kernel_density(values, GRID, LARGEST)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-9)


def uncertainty(clients):
    """`[seeds, clients, capacity]` of one seed, from each client's entropies."""
    mask = np.zeros((1, len(clients), 30), bool)
    entropy = np.zeros(mask.shape)
    for number, values in enumerate(clients):
        mask[0, number, : len(values)] = True
        entropy[0, number, : len(values)] = values
    return Uncertainty(entropy, entropy, mask)


def test_every_training_client_with_values_has_a_curve_on_both_sides(make_run):
    inside = [np.full(4, 0.2), [], RNG.uniform(0, 0.5, 30), np.ones(3)]
    outside = [np.full(4, 2.0), np.full(2, np.nan), RNG.uniform(1, 2, 30), np.ones(3)]
    run = make_run(clients=4, novel=(3,))
    run.evaluation["ood"] = uncertainty(inside), uncertainty(outside)
    figure = entropy_density(run)
    left, right = figure.axes
    assert len(left.lines) == len(right.lines) == 2
    peaks = [
        axis.lines[0].get_xdata()[np.argmax(axis.lines[0].get_ydata())]
        for axis in (left, right)
    ]
    np.testing.assert_allclose(peaks, [0.2, 2.0], atol=0.02)
    assert left.get_xlim() == right.get_xlim() == pytest.approx((0, LARGEST))
    assert left.get_title().startswith("own test data")
    assert right.get_title().startswith("digits 8, 9")
    both = entropy_density({"a": run, "b": make_run(), "c": run})
    assert [axis.get_ylabel() for axis in both.axes[::2]] == [
        "a: density",
        "c: density",
    ]
    with pytest.raises(ValueError, match="use --ood_dataset"):
        entropy_density(make_run())


def test_of_many_clients_some_are_drawn(make_run, monkeypatch):
    monkeypatch.setattr(entropy, "_MOST", 2)
    run = make_run(clients=5)
    values = uncertainty([np.full(3, 0.2 * number) for number in range(5)])
    run.evaluation["ood"] = values, values
    lines = entropy_density(run).axes[0].lines
    peaks = [line.get_xdata()[np.argmax(line.get_ydata())] for line in lines]
    np.testing.assert_allclose(peaks, [0.0, 0.8], atol=0.02)
