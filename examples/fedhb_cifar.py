r"""FedHB and its baselines: one command from a flag file to a table and a run folder.

```
python examples/fedhb_cifar.py \
    --flagfile=examples/flagfiles/fedhb/niw_fashion_mnist_s5_f0.1_tau1.flags
python examples/fedhb_cifar.py --data_file=cifar100.npz \
    --flagfile=examples/flagfiles/fedhb/niw_cifar100_s100_f0.1_tau1.flags
```

`--help` lists every setting; a flag on the command line overrides the flag file's.
"""

from fedvi import experiment

if __name__ == "__main__":
    experiment.start()
