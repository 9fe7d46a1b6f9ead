"""Covertype as scikit-learn keeps it, and a synthetic stand-in of the same shape."""

from pathlib import Path

import numpy as np

from fedvi.data.readers import KEYS, Found

__all__ = ["CLASSES", "read_covertype", "read_covertype_standin"]

CLASSES = 7
_FEATURES = 54
_SEED = 42  # of the random split, and of the stand-in
_TRAIN, _TEST = 10_000, 2_500  # rows of the stand-in
# Class shares of the real data, to three places.
_SHARES = (0.365, 0.488, 0.062, 0.005, 0.016, 0.030, 0.034)
# Set by trial: logistic regression for class 1 against the rest is right on 75 % of
# the stand-in's test rows, as it is on the real data.
_MEAN_SCALE = 0.165


def read_covertype(data_dir: str | Path | None) -> Found:
    """Reads scikit-learn's copy, if it is on disk: nothing is downloaded.

    The 54 features are float32, the labels 1..7 become 0..6. The copy has no test
    split: a fifth of the rows, drawn with a fixed seed, becomes one.

    Args:
      data_dir: scikit-learn's `data_home`; None is its own default.

    Raises:
      ValueError: no readable copy, or no scikit-learn; names the ways to supply one.
    """
    where = "" if data_dir is None else f" in data_dir={str(data_dir)!r}"
    try:
        from sklearn.datasets import fetch_covtype

        # scikit-learn would create a folder that is not there.
        if data_dir is not None and not Path(data_dir).is_dir():
            raise FileNotFoundError(data_dir)
        x, y = fetch_covtype(
            data_home=data_dir, download_if_missing=False, return_X_y=True
        )
    # A damaged copy fails in any way; the report stays reachable as the cause.
    except Exception as error:
        raise ValueError(
            f"no data set 'covertype'{where} ({type(error).__name__}): supply it with "
            f"--data_file=FILE.npz (arrays {', '.join(KEYS)}), or fetch scikit-learn's "
            "copy once with sklearn.datasets.fetch_covtype(data_home=DATA_DIR) "
            "(scikit-learn: pip install 'fedvi[digits]'); --dataset=covertype_standin "
            "needs no data, but is synthetic"
        ) from error
    order = np.random.default_rng(_SEED).permutation(len(y))
    train, test = np.split(order, [round(0.8 * len(y))])
    x, y = x.astype(np.float32), y - 1
    return Found(
        dict(zip(KEYS, (x[train], y[train], x[test], y[test]))),
        CLASSES,
        "scikit-learn's copy of Covertype, split 80/20 at random by fedvi (it has no "
        "split of its own)",
    )


def read_covertype_standin() -> Found:
    """Draws a Gaussian mixture with Covertype's 54 features, 7 classes and shares.

    Each class has its own mean; all share one random covariance, so that the best
    classifier of two of them is linear. The seed is fixed.
    """
    rng = np.random.default_rng(_SEED)
    means = _MEAN_SCALE * rng.standard_normal((CLASSES, _FEATURES))
    mixing = rng.standard_normal((_FEATURES, _FEATURES)) / np.sqrt(_FEATURES)
    # Half an identity bounds the condition number, and with it the classes' distance.
    covariance = 0.5 * np.eye(_FEATURES) + 0.5 * mixing @ mixing.T
    shares = np.array(_SHARES) / sum(_SHARES)
    y = rng.choice(CLASSES, _TRAIN + _TEST, p=shares)
    noise = rng.standard_normal((len(y), _FEATURES))
    x = (means[y] + noise @ np.linalg.cholesky(covariance).T).astype(np.float32)
    arrays = (x[:_TRAIN], y[:_TRAIN], x[_TRAIN:], y[_TRAIN:])
    return Found(
        dict(zip(KEYS, arrays)),
        CLASSES,
        "synthetic Gaussian mixture of Covertype's shape, no substitute for Covertype",
    )
