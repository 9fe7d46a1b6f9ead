r"""FedABML: from a flag file to a table and a run folder.

```
python examples/fedabml.py \
    --flagfile=examples/flagfiles/fedabml/fedabml_fashion_mnist_n200_s2.flags
python examples/fedabml.py \
    --flagfile=examples/flagfiles/fedabml/fedabml_fashion_mnist_n200_s2_new_clients.flags
```

`--help` lists every setting; a flag on the command line overrides the flag file's.
"""

from fedvi import experiment

if __name__ == "__main__":
    experiment.start()
