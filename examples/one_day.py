"""A day's work in one script: sweep, load, ask, trust, draw.

`python examples/one_day.py` takes a minute or two on two cores. Every line works the
same in a notebook.
"""

import fedvi
from fedvi.experiment import ExperimentConfig, RunOptions

RULES = ("before", "global", "client")  # no temperature, one for all, one a client

# Of every client's training images a third chooses settings, a third calibrates.
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

# Sweep: two numbers of formulas, so all cells share one program; the best on held-out
# data is trained on the rest too and measured on the test data.
grid = {"zeta": [0.03, 0.1], "learning_rate": [0.003, 0.01]}
where = RunOptions("runs/one_day", overwrite=True)
found = fedvi.sweep(config, grid, where, seeds=3)
print("chosen:", found.chosen.settings)

# Load and ask: one client's posterior, and what it makes of its own test images.
run = fedvi.load_run("runs/one_day/winner")
print("a draw of client 3's posterior:", run.posterior(client=3).sample(seed=0).keys())
images = run.data.test.x[3, : run.data.test.size[3]]
print(f"its largest entropy: {run.predict(images, client=3).entropy.max():.2f} nats")

# Trust: temperatures and prediction sets, from images that nobody trained on.
for model in ("global", "personal"):
    nll = {rule: run.summary["recalibration"][model][rule]["nll"] for rule in RULES}
    sets = run.summary["conformal"][model]["lac"]["global"]
    print(f"{model}: NLL", ", ".join(f"{rule} {nll[rule]:.3f}" for rule in RULES))
    print(f"  sets cover {sets['coverage']:.1%}, hold {sets['set_size']:.2f} classes")
print("a row per seed and client, the first:", run.per_client()[:1])

# Draw: the winner's pictures lie in its folder; the cells in one:
cells = [fedvi.load_run(cell.run_dir) for cell in found.cells]
fedvi.plots.learning_curves(cells, "runs/one_day/cells.svg")
