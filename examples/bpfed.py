r"""BPFed: from a flag file to a table and a run folder.

```
python examples/bpfed.py
python examples/bpfed.py \
    --flagfile=examples/flagfiles/bpfed/bpfed_fashion_mnist_small.flags
python examples/bpfed.py \
    --flagfile=examples/flagfiles/bpfed/bpfed_fashion_mnist_small_novel.flags
```

Without a flag file it is BPFed on scikit-learn's digits, which need no download: 10
clients with 5 of 10 labels each. The flag files have the paper's data and settings.
`--help` lists every setting of the method; a flag on the command line goes before the
flag file's.
"""

from fedvi import experiment

if __name__ == "__main__":
    experiment.start(
        algorithm="bpfed",
        dataset="digits",
        partition="class_subsets",
        clients=10,
        classes_per_client=5,
        train_per_class=20,
        test_per_class=6,
        model="mlp",
        hidden=(100,),
        optimizer="adam",
        learning_rate=0.003,
        finetune_learning_rate=0.003,
        zeta=0.1,
        lr_decay=1.0,
        batch_size=25,
        epochs=2,
        fraction=1.0,
        rounds=30,
        personal_every=10,
    )
