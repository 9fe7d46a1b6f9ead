r"""BPFed: from a flag file to a table and a run folder.

```
python examples/bpfed.py \
    --flagfile=examples/flagfiles/bpfed/bpfed_fashion_mnist_small.flags
python examples/bpfed.py \
    --flagfile=examples/flagfiles/bpfed/bpfed_fashion_mnist_small_novel.flags
```

`--help` lists every setting; a flag on the command line overrides the flag file's.
"""

from fedvi import experiment

if __name__ == "__main__":
    experiment.start()
