r"""DSVGD and client selection: from a flag file to a table, a figure and run folders.

```
python examples/dsvgd_selection.py \
    --flagfile=examples/flagfiles/dsvgd/covertype_standin_k30.flags
python examples/dsvgd_selection.py --data_file=covtype.npz \
    --flagfile=examples/flagfiles/dsvgd/covertype_k30.flags
```

Every `--algorithm` may carry its selection, as in `dsvgd:hip`; the table and the figure
of all of them, `comparison.txt` and `comparison.png`, lie in the common run folder.
`--help` lists every setting; a flag on the command line overrides the flag file's.
"""

from fedvi import experiment

if __name__ == "__main__":
    experiment.start()
