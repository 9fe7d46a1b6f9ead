"""Suggestions, and what is imported from a user's own modules."""

import pytest

from fedvi import names

KNOWN = ("fedavg", "fedhb_niw", "fashion_mnist", "iid", "personal_nll")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("FedAvg", "fedavg"),
        ("fed-avg", "fedavg"),
        ("fedvag", "fedavg"),
        ("FEDHB-NIW", "fedhb_niw"),
        ("FashionMNIST", "fashion_mnist"),
        ("fashionmnist", "fashion_mnist"),
        ("idi", "iid"),
    ],
)
def test_a_near_name_is_found_apart_from_capitals_and_dashes(name, meant):
    assert names.near(name, KNOWN) == f": did you mean {meant}?"


@pytest.mark.parametrize("name", ["sgd", "", None, 3, "covertype", ("fedavg",)])
def test_a_name_that_is_far_from_all_has_no_suggestion(name):
    assert names.near(name, KNOWN[1:]) == ""
    assert names.near(name, ()) == ""


def test_what_lies_in_the_current_folder_is_imported(own_module):
    assert names.imported("x", "own_parts:number") == 3
    assert names.imported("x", "own_parts:Net.__call__").__name__ == "__call__"
    assert names.imported("x", "os.path:join")("a", "b") == "a/b"
    assert names.is_path("a:b") and not names.is_path("a.b") and not names.is_path(3)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("own_parts:", "x='own_parts:' must be package.module:name"),
        (":rate", "x=':rate' must be package.module:name"),
        (".own_parts:rate", "must be package.module:name"),
        ("own_parts.sub:rate", "there is no module own_parts.sub, neither installed"),
        ("own_part:rate", "there is no module own_part, .*: did you mean own_parts?"),
        ("own_parts:rte", "x='own_parts:rte': own_parts has no rte: did you mean rate"),
        ("own_slip:a", "importing it raised AttributeError: .*own_slip.py, line 3"),
        ("own_lack:a", "raised ModuleNotFoundError: .*no_such_package.*own_lack.py"),
    ],
)
def test_what_cannot_be_imported_is_named_in_a_line(own_module, path, message):
    with pytest.raises(ValueError, match=message) as raised:
        names.imported("x", path, ["own_parts"])
    assert "\n" not in str(raised.value)
