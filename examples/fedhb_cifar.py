r"""FedHB and its baselines: one command from a flag file to a table and a run folder.

```
python examples/fedhb_cifar.py
python examples/fedhb_cifar.py \
    --flagfile=examples/flagfiles/fedhb/niw_fashion_mnist_s5_f0.1_tau1.flags
python examples/fedhb_cifar.py --data_file=cifar100.npz \
    --flagfile=examples/flagfiles/fedhb/niw_cifar100_s100_f0.1_tau1.flags
```

Without a flag file it is FedHB-NIW on scikit-learn's digits, which need no download: 20
clients with 5 shards each. The flag files have the paper's data and settings. `--help`
lists every setting of the method; a flag on the command line goes before the flag
file's.
"""

from fedvi import experiment

if __name__ == "__main__":
    experiment.start(
        algorithm="fedhb_niw",
        dataset="digits",
        partition="class_shards",
        clients=20,
        shards=5,
        model="mlp",
        learning_rate=0.05,
        finetune_learning_rate=0.01,
        batch_size=10,
        fraction=0.25,
        rounds=50,
    )
