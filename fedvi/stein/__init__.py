"""Stein operators on particle sets: SVGD, kernelised Stein discrepancy, densities.

A particle set is a matrix `[particles, coordinates]`, and so are the scores at it. No
function needs more than three matrix products, or an array of pairs × coordinates.
"""

from fedvi.stein.discrepancy import hip, ksd
from fedvi.stein.kde import kde_log_density, kde_score
from fedvi.stein.kernels import IMQ, KERNELS, RBF, Kernel, median_bandwidth
from fedvi.stein.particles import squared_distances
from fedvi.stein.svgd import svgd_direction

__all__ = [
    "IMQ",
    "KERNELS",
    "RBF",
    "Kernel",
    "hip",
    "kde_log_density",
    "kde_score",
    "ksd",
    "median_bandwidth",
    "squared_distances",
    "svgd_direction",
]
