"""Variational families over parameter pytrees.

Each module is one family, but for `priors`. What is carried between functions is a
family's parameters, pytrees of arrays; a distribution object, distrax's, is made of
them where one is asked.
"""

from fedvi.distributions import (
    dropout,
    mean_field,
    mixture,
    normal_inverse_wishart,
    polya_gamma,
    priors,
    spike_and_slab,
    student_t,
)

__all__ = [
    "dropout",
    "mean_field",
    "mixture",
    "normal_inverse_wishart",
    "polya_gamma",
    "priors",
    "spike_and_slab",
    "student_t",
]
