r"""DSVGD and client selection: from a flag file to a table, a figure and run folders.

```
python examples/dsvgd_selection.py
python examples/dsvgd_selection.py \
    --flagfile=examples/flagfiles/dsvgd/covertype_standin_k30.flags
python examples/dsvgd_selection.py --data_file=covtype.npz \
    --flagfile=examples/flagfiles/dsvgd/covertype_k30.flags
```

Every `--algorithm` may carry its selection, as in `dsvgd:hip`; the table and the figure
of all of them, `comparison.txt` and `comparison.png`, lie in the common run folder.
Without a flag file it is three selections on the synthetic data of the first of these,
which need no download. `--help` lists every setting of the method; a flag on the
command line goes before the flag file's.
"""

from fedvi import experiment

if __name__ == "__main__":
    experiment.start(
        algorithm="dsvgd:round_robin,dsvgd,dsvgd:ksd",
        dataset="covertype_standin",
        one_against_rest=1,
        partition="class_majority",
        majority=0.9,
        clients=30,
        model="binary_logistic",
        prior="hierarchical",
        first_t="one",
        particles=20,
        optimizer="rmsprop",
        learning_rate=0.005,
        lr_decay=1.0,
        batch_size=100,
        local_steps=10,
        rounds=100,
        window=50,
        eval_batch_size=600,
        finetune_epochs=0,
    )
