import math

import pytest

from fedvi import checks


@pytest.mark.parametrize(
    ("check", "good", "bad"),
    [
        (checks.positive, [1e-9, 3], [0, -1.0, math.nan]),
        (checks.finite, [-1e9, 0], [math.inf, -math.inf, math.nan]),
        (checks.fraction, [0, 0.5], [1, -0.1, math.nan]),
        (lambda n, v: checks.at_least(n, v, 2), [2, 3.5], [1.9, math.nan]),
        (lambda n, v: checks.one_of(n, v, ("a", "b")), ["a"], ["c", None]),
    ],
)
def test_a_check_names_argument_and_value(check, good, bad):
    for value in good:
        check("width", value)
    for value in bad:
        with pytest.raises(ValueError, match=f"width={value!r} must"):
            check("width", value)
