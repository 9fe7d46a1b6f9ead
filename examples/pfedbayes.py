r"""pFedBayes, sFedBayes and cFedBayes: from a flag file to a table and a run folder.

```
python examples/pfedbayes.py
python examples/pfedbayes.py \
    --flagfile=examples/flagfiles/pfedbayes/pfedbayes_fashion_mnist_small.flags
python examples/pfedbayes.py --data_file=mnist.npz \
    --flagfile=examples/flagfiles/pfedbayes/sfedbayes_mnist_small.flags
```

Without a flag file it is pFedBayes on scikit-learn's digits, which need no download: 10
clients with 5 of 10 labels each. The flag files have the paper's data and settings.
`--help` lists every setting of the method; a flag on the command line goes before the
flag file's.
"""

from fedvi import experiment

if __name__ == "__main__":
    experiment.start(
        algorithm="pfedbayes",
        dataset="digits",
        partition="class_subsets",
        clients=10,
        classes_per_client=5,
        train_per_class=20,
        test_per_class=6,
        model="mlp",
        hidden=(100,),
        optimizer="adam",
        learning_rate=0.01,
        finetune_learning_rate=0.01,
        zeta=0.03,
        lr_decay=1.0,
        batch_size=25,
        epochs=1,
        fraction=1.0,
        rounds=30,
        personal_every=10,
    )
