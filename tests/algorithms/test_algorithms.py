import pytest

from fedvi import nn
from fedvi.algorithms import build, options_of


def test_unknown_names_and_options_are_named(task):
    with pytest.raises(ValueError, match=r"algorithm='fedsgd' must be one of .*fedavg"):
        options_of("fedsgd")
    with pytest.raises(ValueError, match=r"mu=1 is no option of fedbabu, .* none"):
        build("fedbabu", task, mu=1)


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("fedavg", "server_momentum", 1.0),
        ("fedavg", "server_learning_rate", 0.0),
        ("fedavg", "server_optimizer", "lbfgs"),
        ("fedprox", "mu", -1.0),
        ("fedhb_niw", "covariance", "full"),
        ("fedhb_niw", "prior_mean", "one"),
        ("fedhb_niw", "prediction", "mean"),
        ("fedhb_niw", "p_drop", 1.0),
        ("fedhb_niw", "epsilon", -1.0),
        ("fedhb_niw", "penalty_scale", -1.0),
        ("fedhb_niw", "num_samples", 0),
        ("fedhb_niw", "num_samples", 5),  # without prediction="sample"
        ("fedhb_mixture", "components", 0),
        ("fedhb_mixture", "variance", 0.0),
        ("fedhb_mixture", "start", "zero"),
        ("fedhb_mixture", "prior_mean", "one"),
        ("fedhb_mixture", "init_spread", -1.0),
        ("fedhb_mixture", "penalty_scale", -1.0),
    ],
)
def test_option_values_are_checked_by_name(task, name, option, value):
    with pytest.raises(ValueError, match=f"{option}={value!r}"):
        build(name, task, **{option: value})


@pytest.mark.parametrize("name", ["fedbabu", "fedhb_niw", "fedhb_mixture"])
def test_methods_with_a_frozen_head_refuse_a_model_that_is_all_head(task, name):
    model = nn.build("logistic", classes=3, input_shape=(6,))
    with pytest.raises(ValueError, match=f"model='logistic' has no body and {name}"):
        build(name, task._replace(model=model))
