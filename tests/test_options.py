from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedvi.options import Options, describe, inherited, option


class Family(Options):
    """What two methods share."""

    scale: float = option(1.0, "A factor.", at_least=0, traced=True)
    kind: Literal["one", "two"] = option("one", "Which.")


class Method(Family):
    count: int = option(3, "How many.", source="§6", at_least=1, at_most=9)
    rate: float | None = option(None, "Of something.", above=0, below=1)
    flag: bool = option(False, "Whether.")
    name: str = option("sum", "Of a thing.", choices=("sum", "mean"))
    power: int = option(1, "Of a norm.", choices=(1, 2))
    pull: float = option(0.1, "Of two.", only_with={"kind": "two"}, traced=True)


@pytest.mark.parametrize(
    "good",
    [
        {},
        {"scale": 0, "count": 9, "rate": 0.5, "flag": True, "kind": "two"},
        {"scale": np.float32(2), "count": np.int64(4), "rate": None, "name": "mean"},
        {"scale": jnp.float32(2)},
        {"kind": "two", "pull": 0.5},
        {"kind": "one", "pull": 0.1},
    ],
)
def test_values_inside_their_range_are_kept(good):
    options = Method(**good)
    assert all(getattr(options, name) == value for name, value in good.items())


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("scale", -1.0, "scale=-1.0 must be at least 0"),
        ("power", 3, "power=3 must be one of 1, 2"),
        ("scale", jnp.float32(-1), "scale=-1.0 must be at least 0"),
        ("count", jnp.float32(2.5), "count=2.5 must be a whole number"),
        ("scale", float("nan"), "scale=nan must be a finite number at least 0"),
        ("scale", float("inf"), "scale=inf must be a finite number"),
        ("scale", "much", "scale='much' must be a number at least 0"),
        ("scale", True, "scale=True must be a number"),
        ("scale", None, "scale=None must be a number"),
        ("kind", "three", "kind='three' must be one of one, two"),
        ("count", 0, "count=0 must be at least 1 and at most 9"),
        ("count", 10, "count=10 must be"),
        ("count", 2.5, "count=2.5 must be a whole number"),
        ("rate", 0.0, "rate=0.0 must be above 0 and below 1"),
        ("rate", 1.0, "rate=1.0 must be"),
        ("flag", 1, "flag=1 must be True or False"),
        ("name", "max", "name='max' must be one of sum, mean"),
        (
            *("pull", 0.5),
            "pull=0.5 has no effect with kind=one: leave it out, or use kind=two",
        ),
    ],
)
def test_other_values_are_named(name, value, message):
    with pytest.raises(ValueError, match=message):
        Method(**{name: value})


def test_only_numbers_in_formulas_may_be_traced():
    jax.eval_shape(lambda s: Method(scale=s, pull=s).scale, jnp.float32(1))
    with pytest.raises(ValueError, match="count is static and cannot be traced"):
        jax.eval_shape(lambda c: Method(count=c).count, jnp.int32(1))


def test_an_unknown_bound_is_the_authors_mistake():
    with pytest.raises(TypeError, match="atleast"):
        option(1, "A number.", atleast=0)


def test_a_description_has_inherited_options_defaults_ranges_and_sources():
    assert describe(Method).splitlines() == [
        "  scale: A factor. (default 1.0, at least 0)",
        "  kind: Which. (one | two, default one)",
        "  count: How many. (default 3, at least 1 and at most 9, §6)",
        "  rate: Of something. (default None, above 0 and below 1)",
        "  flag: Whether. (default False)",
        "  name: Of a thing. (sum | mean, default sum)",
        "  power: Of a norm. (1 | 2, default 1)",
        "  pull: Of two. (default 0.1, only with kind=two)",
    ]


def test_a_plain_field_is_no_option():
    with pytest.raises(ValueError, match=r"Slip.beta must be an option.*= option\("):

        class Slip(Options):
            beta: float = 0.5


def test_an_inherited_option_differs_in_its_default_and_source_alone():
    class Other(Method):
        count: int = inherited(Method, "count", 5, "elsewhere")

    assert (Method().count, Other().count) == (3, 5)
    ours, theirs = (
        next(line for line in describe(options).splitlines() if "count:" in line)
        for options in (Other, Method)
    )
    assert ours == theirs.replace("default 3", "default 5").replace("§6", "elsewhere")
    with pytest.raises(ValueError, match="at least 1 and at most 9"):
        Other(count=10)
