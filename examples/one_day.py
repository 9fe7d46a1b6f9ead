"""A day's work in one script: sweep, load, ask, trust, draw.

```
python examples/one_day.py
```

Four cells of pFedBayes and its winner, three seeds each, on scikit-learn's digits: a
minute or two on two cores. Every line works the same in a notebook.
"""

import fedvi
from fedvi.experiment import ExperimentConfig, RunOptions

RULES = ("before", "global", "client")  # no temperature, one for all, one a client

# What: 20 clients with 30 images each, five of each of three digits for training; ten
# of each are held out, half to choose settings by, half to calibrate with.
config = ExperimentConfig(
    algorithm="pfedbayes",
    dataset="digits",
    partition="class_subsets",
    clients=20,
    classes_per_client=3,
    train_per_class=15,
    test_per_class=4,
    validation_fraction=1 / 3,
    calibration_fraction=1 / 3,
    hidden=(100,),
    rounds=40,
    fraction=0.5,
    epochs=5,
    batch_size=15,
    optimizer="adam",
)

# Which settings: two numbers of formulas, so that all cells share one program; chosen
# on held-out data, trained on the rest, measured on the test data.
found = fedvi.sweep(
    config,
    {"zeta": [0.03, 0.1], "learning_rate": [0.003, 0.01]},
    RunOptions("runs/one_day", overwrite=True),
    seeds=3,
)
print("chosen:", found.chosen.settings)

# Ask: one client's posterior, and what it makes of its own test images.
run = fedvi.load_run("runs/one_day/winner")
posterior = run.posterior(client=3)
images = run.data.test.x[3, : run.data.test.size[3]]
predicted = run.predict(images, client=3)
print(f"client 3: {predicted.probabilities.shape=}")
print(f"its least certain image: entropy {predicted.entropy.max():.2f} nats")

# Trust: temperatures and prediction sets from data that nobody trained on.
for model in ("global", "personal"):
    nll = {rule: run.summary["recalibration"][model][rule]["nll"] for rule in RULES}
    sets = run.summary["conformal"][model]["lac"]["global"]
    print(f"{model}: NLL", ", ".join(f"{rule} {nll[rule]:.3f}" for rule in RULES))
    print(f"  sets cover {sets['coverage']:.1%}, hold {sets['set_size']:.2f} classes")
worst = min(run.per_client(), key=lambda row: row["personal_accuracy"])
print("worst served:", {key: worst[key] for key in ("client", "personal_accuracy")})

# Draw: every picture of the winner lies in its folder; more than one run in one.
fedvi.plots.learning_curves(fedvi.load_runs("runs/one_day"), "runs/one_day/all.svg")
