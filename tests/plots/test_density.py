import numpy as np
import pytest
from fedvi.experiment.plots import entropy_density, kernel_density
from scipy.stats import gaussian_kde

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


def test_every_client_with_values_has_a_curve_on_both_sides(
    tmp_path, drawn, assert_png
):
    inside = [np.full(4, 0.2), np.array([]), RNG.uniform(0, 0.5, 30)]
    outside = [np.full(4, 2.0), np.full(2, np.nan), RNG.uniform(1, 2, 30)]
    path = tmp_path / "d.png"
    assert entropy_density(path, inside, outside, classes=10, title="digits")
    assert_png(path)
    left, right = drawn[0].axes
    assert len(left.lines) == len(right.lines) == 2
    peaks = [
        axis.lines[0].get_xdata()[np.argmax(axis.lines[0].get_ydata())]
        for axis in (left, right)
    ]
    np.testing.assert_allclose(peaks, [0.2, 2.0], atol=0.02)
    assert (left.get_title(), right.get_title()) == (
        "in distribution",
        "out of distribution",
    )


def test_without_matplotlib_nothing_is_drawn(tmp_path, no_matplotlib):
    values = [np.ones(3)]
    assert entropy_density(tmp_path / "d.png", values, values, classes=3) is False
    assert list(tmp_path.iterdir()) == []
