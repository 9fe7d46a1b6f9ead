r"""FedABML: from a flag file to a table and a run folder.

```
python examples/fedabml.py
python examples/fedabml.py \
    --flagfile=examples/flagfiles/fedabml/fedabml_fashion_mnist_n200_s2.flags
python examples/fedabml.py \
    --flagfile=examples/flagfiles/fedabml/fedabml_fashion_mnist_n200_s2_new_clients.flags
```

Without a flag file it is FedABML on scikit-learn's digits, which need no download: 20
clients with at most 2 classes each. The flag files have the paper's data and settings.
`--help` lists every setting of the method; a flag on the command line goes before the
flag file's.
"""

from fedvi import experiment

if __name__ == "__main__":
    experiment.start(
        algorithm="fedabml",
        dataset="digits",
        partition="class_shards",
        clients=20,
        shards=2,
        model="logistic",
        kl_weight=0.01,
        personal_steps=5,
        mc_samples=5,
        learning_rate=0.01,
        momentum=0.0,
        lr_decay=1.0,
        finetune_learning_rate=0.01,
        batch_size=10,
        epochs=5,
        fraction=0.25,
        rounds=50,
    )
