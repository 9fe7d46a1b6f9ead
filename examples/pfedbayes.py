r"""pFedBayes, sFedBayes and cFedBayes: from a flag file to a table and a run folder.

```
python examples/pfedbayes.py \
    --flagfile=examples/flagfiles/pfedbayes/pfedbayes_fashion_mnist_small.flags
python examples/pfedbayes.py --data_file=mnist.npz \
    --flagfile=examples/flagfiles/pfedbayes/sfedbayes_mnist_small.flags
```

`--help` lists every setting; a flag on the command line overrides the flag file's.
"""

from fedvi import experiment

if __name__ == "__main__":
    experiment.start()
