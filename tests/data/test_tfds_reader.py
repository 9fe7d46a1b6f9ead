"""tensorflow-datasets without TensorFlow, on tiny sets prepared here (C17)."""

import numpy as np
import pytest

from fedvi.data import tfds_reader
from fedvi.data.sources import load

tfds = pytest.importorskip("tensorflow_datasets")


class FedviTiny(tfds.core.GeneratorBasedBuilder):
    """12 and 6 images whose pixels all equal the example's number."""

    VERSION = tfds.core.Version("1.0.0")
    SUPERVISED = ("image", "label")

    def _info(self):
        features = {
            "image": tfds.features.Tensor(shape=(4, 5, 1), dtype=np.uint8),
            "label": tfds.features.ClassLabel(num_classes=7),
        }
        return tfds.core.DatasetInfo(
            builder=self,
            features=tfds.features.FeaturesDict(features),
            supervised_keys=self.SUPERVISED,
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager):
        sizes = {"train": 12, "test": 6}
        return {name: self._generate_examples(n) for name, n in sizes.items()}

    def _generate_examples(self, n):
        for i in range(n):
            yield i, {"image": np.full((4, 5, 1), i, np.uint8), "label": i % 3}


class FedviUnlabelled(FedviTiny):
    """The same without an (input, label) pair."""

    SUPERVISED = None


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tfds")
    tfds.disable_progress_bar()
    for builder in (FedviTiny, FedviUnlabelled):
        prepared = builder(data_dir=folder, file_format="array_record")
        prepared.download_and_prepare()
    return folder


@pytest.fixture(autouse=True)
def no_tensorflow(monkeypatch):
    """The answers below are those of a machine without it, whatever is installed."""
    monkeypatch.setattr(tfds_reader, "_has_tensorflow", lambda: False)


def test_c17_prepared_set_loads_without_network(folder):
    dataset = load("fedvi_tiny", data_dir=folder)
    assert dataset.train_x.shape == (12, 4, 5, 1)
    assert dataset.train_x.dtype == np.uint8
    np.testing.assert_array_equal(dataset.train_x[:, 0, 0, 0], np.arange(12))
    np.testing.assert_array_equal(dataset.train_y, np.arange(12) % 3)
    np.testing.assert_array_equal(dataset.test_y, np.arange(6) % 3)
    assert dataset.classes == 7
    assert dataset.fidelity == (
        "tensorflow-datasets fedvi_tiny/1.0.0; 4 of 7 classes have no example"
    )


@pytest.mark.parametrize("name", ["cifar100", "no_such_set"])
def test_c17_missing_set_names_the_three_ways(tmp_path, name):
    with pytest.raises(ValueError) as caught:
        load(name, data_dir=tmp_path)
    message = str(caught.value)
    for part in (name, str(tmp_path), "--data_file", "--data_dir", "fedvi[tf]"):
        assert part in message
    assert "\n" not in message
    assert not list(tmp_path.iterdir())


def test_set_without_labels_is_refused(folder):
    with pytest.raises(ValueError, match="'fedvi_unlabelled' is no classification set"):
        load("fedvi_unlabelled", data_dir=folder)


def test_tfrecord_copy_needs_tensorflow(folder, monkeypatch):
    def refuse(self, split):
        raise NotImplementedError

    monkeypatch.setattr(tfds.core.DatasetBuilder, "as_data_source", refuse)
    with pytest.raises(ValueError, match=r"only TensorFlow reads: pip install"):
        load("fedvi_tiny", data_dir=folder)


def test_encoded_images_need_pillow(folder, monkeypatch):
    def refuse(self, split):
        raise ImportError

    monkeypatch.setattr(tfds.core.DatasetBuilder, "as_data_source", refuse)
    with pytest.raises(ValueError, match="needs Pillow"):
        load("fedvi_tiny", data_dir=folder)


def test_set_is_prepared_where_tensorflow_is_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(tfds_reader, "_has_tensorflow", lambda: True)
    assert len(load("fedvi_tiny", data_dir=tmp_path).train_x) == 12


def test_failed_preparation_names_the_three_ways(tmp_path, monkeypatch):
    def fail(self):
        raise ConnectionError("no network")

    monkeypatch.setattr(tfds_reader, "_has_tensorflow", lambda: True)
    monkeypatch.setattr(FedviTiny, "download_and_prepare", fail)
    with pytest.raises(ValueError, match=r"ConnectionError.*--data_file") as caught:
        load("fedvi_tiny", data_dir=tmp_path)
    assert isinstance(caught.value.__cause__, ConnectionError)
