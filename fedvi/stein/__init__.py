"""Stein operators on particle sets: SVGD, kernelised Stein discrepancy, densities.

A particle set is a pytree whose leaves `[particles, ...]` share their leading axis; a
matrix `[particles, dimension]` is one with a single leaf. Every function needs two or
three matrix products and never an array `[particles, particles, dimension]`.
"""

from fedvi.stein.discrepancy import hip, ksd
from fedvi.stein.kde import kde_log_density, kde_score
from fedvi.stein.kernels import IMQ, KERNELS, RBF, Kernel, median_bandwidth
from fedvi.stein.particles import squared_distances, squared_norm
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
    "squared_norm",
    "svgd_direction",
]
