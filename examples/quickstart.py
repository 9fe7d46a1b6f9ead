r"""Five methods on embedded real images, each with settings of its own, in one table.

```
python examples/quickstart.py --flagfile=examples/flagfiles/quickstart.flags
python examples/quickstart.py --flagfile=examples/flagfiles/quickstart.flags \
    --train_per_class=10 --validation_fraction=0.5 --algorithm=fedavg \
    --learning_rate=0.01 --finetune_learning_rate=0.003 --name=choosing
```

The second line is one of the runs that the settings below were chosen from
(docs/runs.md). What the command line or the flag file gives goes before them; other
methods than these need a --learning_rate.
"""

import dataclasses

from absl import flags

from fedvi import experiment

# Fields of the configuration, and options of the method: those with the smallest
# personalised NLL on held-out training data.
CHOSEN = {
    "fedavg": ({"learning_rate": 0.003, "finetune_learning_rate": 0.003}, {}),
    "local_only": ({"learning_rate": 0.0001, "finetune_learning_rate": 0.01}, {}),
    "fedbabu": ({"learning_rate": 0.01, "finetune_learning_rate": 0.003}, {}),
    "fedhb_niw": (
        {"learning_rate": 0.03, "finetune_learning_rate": 0.01},
        {"penalty_scale": 0.1},
    ),
    "pfedbayes": ({"learning_rate": 0.01}, {"zeta": 0.03}),
    "bpfed": ({"learning_rate": 0.003}, {"zeta": 0.1}),
}


def with_chosen(config):
    """The configuration with its method's settings, but for those that were given."""
    fields, options = (
        {name: value for name, value in part.items() if not flags.FLAGS[name].present}
        for part in CHOSEN.get(config.algorithm, ({}, {}))
    )
    return dataclasses.replace(config, options=config.options | options, **fields)


def main(runs):
    """The closing table compares them."""
    summaries = experiment.run_all(runs)
    print("what this shows, and what not: docs/runs.md, 'The quickstart'")
    return summaries


if __name__ == "__main__":
    experiment.start(main, adjust=with_chosen)
