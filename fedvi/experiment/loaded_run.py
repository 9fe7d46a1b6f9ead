"""A run folder as Python reads it: settings, figures, data, states, posteriors."""

import contextlib
import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import distrax
import jax
import numpy as np

from fedvi import __version__, algorithms, checks, names
from fedvi.algorithm import Algorithm
from fedvi.data import FederatedData, check_scale, some_examples
from fedvi.evaluation import Scores
from fedvi.experiment import checkpoint, folder, npz_tree, report, setup
from fedvi.experiment.config import ExperimentConfig, RunOptions
from fedvi.experiment.loading import LoadedData, load_data
from fedvi.experiment.rows import MODELS
from fedvi.federation import BaseFederation, State, take
from fedvi.keys import is_key

__all__ = ["LoadedRun", "LoadedRuns", "Prediction", "load_run", "load_runs"]

_GROUPS = ("", "novel_")
_SCALED = 32  # examples; fewer may lie anywhere


class Prediction(NamedTuple):
    """What a model says of n examples, NumPy."""

    probabilities: np.ndarray  # [n, classes], averaged over the posterior's draws
    entropy: np.ndarray  # [n] of those probabilities, nats
    mutual_information: np.ndarray  # [n] of label and weights, nats


def load_run(
    run_dir: str | Path,
    *,
    loaded: LoadedData | None = None,
    builder: Callable[..., Algorithm] | None = None,
    data_file: str | None = None,
    data_dir: str | None = None,
    second_data_file: str | None = None,
    ood_data_file: str | None = None,
) -> "LoadedRun":
    """The run that lies in a folder, finished or not. Nothing there is changed.

    ```
    run = fedvi.load_run("runs/mine")
    posterior = run.posterior(client=3)
    draw = posterior.sample(seed=jax.random.key(0))
    ```

    Args:
      run_dir: the run folder.
      loaded: a user's own data, as they were given to `fedvi.experiment.run`.
      builder: a user's own algorithm, as it was given there.
      data_file: where the data lie now, if they have moved; likewise the next three.
      data_dir: likewise.
      second_data_file: likewise.
      ood_data_file: likewise.

    Raises:
      ValueError: a folder that is no run, or one of another version of fedvi.
    """
    where = Path(run_dir).expanduser()
    moved = {
        "data_file": data_file,
        "data_dir": data_dir,
        "second_data_file": second_data_file,
        "ood_data_file": ood_data_file,
    }
    given = {key: path for key, path in moved.items() if path is not None}
    config = dataclasses.replace(_config(where), **given)
    return LoadedRun(where, config, loaded, builder)


def load_runs(run_dir: str | Path, **how: Any) -> "LoadedRuns":
    """All runs that lie in the folders below one, itself included, by name.

    Args:
      run_dir: the folder.
      **how: arguments of `load_run`, the same for all.

    Raises:
      ValueError: as `load_run`; there is none.
    """
    where = Path(run_dir).expanduser()
    found = sorted(path.parent for path in where.rglob(folder.CONFIG))
    found = [path for path in found if (path / folder.CLIENTS).exists()]
    if not found:
        raise ValueError(
            f"{where} holds no run folder: give the folder that holds them"
        )
    return LoadedRuns([load_run(path, **how) for path in found])


def _config(where: Path) -> ExperimentConfig:
    path = where / folder.CONFIG
    if not path.exists():
        raise ValueError(
            f"{where} is no run folder: it has no {folder.CONFIG}; give one that a run "
            "was written to, its --run_dir, or load_runs the folder that holds several"
        )
    fields = folder.read_json(path)
    version = fields.pop(folder.VERSION, "an older version")
    try:
        return ExperimentConfig.from_dict(fields)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{where} was written by fedvi {version}, and this is {__version__}: its "
            f"{folder.CONFIG} {error}; load it with that version"
        ) from error


class LoadedRun:
    """A run, from its folder alone; `load_run` makes it.

    What takes time is done when it is first asked for: data are loaded, checked to be
    those of the run, and an algorithm is built for the posterior; nothing is compiled
    for one that a client kept.

    Attributes:
      folder: the run folder.
      config: with every option, and what the data decided.
      summary: of `summary.json`; {} of an unfinished run.
    """

    def __init__(
        self,
        where: Path,
        config: ExperimentConfig,
        loaded: LoadedData | None = None,
        builder: Callable[..., Algorithm] | None = None,
    ):
        self.folder, self.config = where, config
        self._loaded, self._builder = loaded, builder
        path = where / folder.SUMMARY
        self.summary = folder.read_json(path) if path.exists() else {}

    def __repr__(self) -> str:
        state = "finished" if self.finished else "unfinished"
        return f"<{state} run {self.folder}: {self.label} on {self.config.dataset}>"

    # What the files say.

    @property
    def finished(self) -> bool:
        """Whether it was measured after its last round."""
        return bool(self.summary)

    @property
    def label(self) -> str:
        """The method, with its selection where that is not uniform."""
        return self.config.method

    @property
    def seeds(self) -> range:
        """The seeds."""
        return range(self.config.seed, self.config.seed + self.config.seeds)

    @functools.cached_property
    def evaluations(self) -> list[dict[str, Any]]:
        """The rows of `metrics.csv`, one an evaluation and seed."""
        return folder.metrics_rows(self.folder)

    @property
    def metrics(self) -> Any:
        """One figure a row: method, options that differ from the algorithm's defaults,
        `seed`, `round`, `split`, `model` (global, personal, novel_global,
        novel_personal; training for what the rounds themselves report), `metric`,
        `value`. A pandas DataFrame, without pandas a list of dicts.
        """
        return _table(self._tidy(self._changed_options()))

    def per_client(self) -> Any:
        """The rows of `clients.csv`, one a seed and client, with natural ids; a pandas
        DataFrame, or without pandas a list of dicts."""
        return _table(folder.clients_rows(self.folder))

    @functools.cached_property
    def evaluation(self) -> dict[str, Any]:
        """What was measured at the end (`evaluation.npz`), NumPy `[seeds, clients,
        ...]`: `scores`, and what else was asked for, such as `ood`.

        Raises:
          ValueError: the run is not finished.
        """
        path = self.folder / folder.EVALUATION
        if not path.exists():
            raise ValueError(
                f"{self.folder} has no {folder.EVALUATION}: the run is not finished; "
                "go on with --resume"
            )
        found, _ = npz_tree.read(path)
        found["scores"] = {
            model: Scores(*scores) for model, scores in found["scores"].items()
        }
        return found

    @property
    def scores(self) -> dict[str, Scores]:
        """`Scores` of the last evaluation's `global` and `personal` models, NumPy
        `[seeds, clients, ...]`."""
        return self.evaluation["scores"]

    def _tidy(self, options: Mapping[str, Any]) -> list[dict[str, Any]]:
        models = [f"{group}{model}" for group in _GROUPS for model in MODELS]
        rows = []
        for row in self.evaluations:
            place = {key: row[key] for key in ("seed", "round", "split")}
            for key, value in row.items():
                if key in place or value is None:
                    continue
                model = next((m for m in models if key.startswith(f"{m}_")), "training")
                rows.append(
                    {"method": self.label, **options, **place}
                    | {"model": model, "metric": key.removeprefix(f"{model}_")}
                    | {"value": value}
                )
        return rows

    def _changed_options(self) -> dict[str, Any]:
        given = self.config.options
        known = getattr(self._builder, "options", None)
        if self._builder is None:
            with contextlib.suppress(ValueError):
                known = algorithms.options_of(self.config.algorithm)
        defaults = dataclasses.asdict(known()) if known else {}
        return {
            key: value
            for key, value in given.items()
            if key not in defaults or value != defaults[key]
        }

    # What it is made from.

    @functools.cached_property
    def experiment(self) -> setup.Experiment:
        """Data, model, task, algorithm and selection.

        Raises:
          ValueError: an algorithm that is not registered; data that cannot be loaded,
            or other ones than the run's.
        """
        config = self.config
        if self._builder is None:
            try:
                algorithms.options_of(config.algorithm)
            except ValueError as error:
                if names.is_path(config.algorithm):
                    raise  # which says what is missing
                raise ValueError(
                    f"{self.folder} is a run of algorithm={config.algorithm!r}, which "
                    "is not registered here: import the module that registers it, or "
                    "give load_run its builder="
                ) from error
        built = setup.experiment(config, self._builder, self._loaded or self._load())
        expected = self._data_sha256()
        if expected not in (None, built.data_sha256):
            raise ValueError(
                f"{self.folder} was run on other data: their data_sha256 is "
                f"{expected[:12]}... there and {built.data_sha256[:12]}... here; give "
                "load_run its data, by data_file=, data_dir= or loaded="
            )
        return built

    def _load(self) -> LoadedData:
        try:
            return load_data(self.config)
        except ValueError as error:
            raise ValueError(
                f"the data of {self.folder} cannot be loaded ({error}); give load_run "
                "its data, by data_file=, data_dir= or loaded="
            ) from error

    def _data_sha256(self) -> str | None:
        if self.finished:
            return self.summary["data_sha256"]
        path = self.folder / folder.CHECKPOINT
        if not path.exists():
            return None
        return checkpoint.read_notes(path).config["data_sha256"]

    @property
    def data(self) -> FederatedData:
        """All clients' data, checked by their hash to be those of the run."""
        return self.experiment.data

    @functools.cached_property
    def federation(self) -> BaseFederation:
        """The clients of the run on one device, to go on from its `states`; what a
        streamed run keeps on disk is only read."""
        options = RunOptions(
            run_dir=str(self.folder), stream=(self.folder / folder.STORE).exists()
        )
        return setup.federation(self.experiment, options, None, read_only=True)

    @functools.cached_property
    def states(self) -> State:
        """The state of all seeds, NumPy `[seeds, ...]`, at the last checkpoint.

        Raises:
          ValueError: there is none yet.
        """
        if not (self.folder / folder.CHECKPOINT).exists():
            raise ValueError(
                f"{self.folder} holds no checkpoint: the run was stopped before its "
                "first one; go on with --resume"
            )
        like = jax.tree.map(_on_host, self.federation.shapes(self.config.seeds))
        return checkpoint.restore_run(self.experiment, self.folder, like).states

    def state(self, seed: int | None = None) -> State:
        """The state of one seed; default: the first.

        Raises:
          ValueError: the run has no such seed.
        """
        seed = self.config.seed if seed is None else seed
        if seed not in self.seeds:
            known = ", ".join(map(str, self.seeds))
            raise ValueError(f"seed={seed!r} is none of {self.folder}: it has {known}")
        return take(self.states, seed - self.config.seed)

    # What it says.

    def posterior(
        self, client: int | str | None = None, seed: int | None = None
    ) -> distrax.Distribution:
        """A posterior over the model's parameter tree.

        Args:
          client: whose, by number or natural id (`client_number`). One that keeps no
            posterior of its own (all of FedHB's, a novel one of pFedBayes') adapts to
            its training data first, as in the evaluation, and a line says so: that is
            compiled. None: the global posterior.
          seed: of which run; default: the first.

        Raises:
          ValueError: no such client or seed; a method without posteriors.
        """
        number = None if client is None else self.client_number(client)
        state = self.state(seed)
        if self.experiment.algorithm.personal_posterior is not None:
            self._say_if_adapting(state, number)
        return self.federation.posterior(state, number)

    def predict(
        self,
        x: np.ndarray,
        client: int | str | None = None,
        seed: int | None = None,
    ) -> Prediction:
        """What a model says of any examples, with the keys of the evaluation.

        Args:
          x: `[n, ...]`, raw, as the clients' data are.
          client: as of `posterior`; None: the global model.
          seed: as of `posterior`.

        Raises:
          ValueError: as `posterior`; examples of another shape, type or scale than the
            training data's, or that are not finite.
        """
        number = None if client is None else self.client_number(client)
        x = np.asarray(x)
        if len(x) >= _SCALED:
            trained = some_examples(self.data.train)
            check_scale("the training inputs", trained, "x", x)
        state = self.state(seed)
        self._say_if_adapting(state, number)
        found = jax.device_get(self.federation.predict(state, x, number))
        probabilities = np.exp(found.log_probs)
        return Prediction(
            probabilities, np.asarray(found.entropy), found.mutual_information
        )

    def client_number(self, client: int | str) -> int:
        """The number of a client, which may be given by its natural id.

        Args:
          client: a whole number is the client's number, where there is a client of
            that number; any other, and text, is its id in `clients.csv`.

        Raises:
          ValueError: there is no such client.
        """
        ids, count = self.data.ids, len(self.data.train.size)
        if not isinstance(client, str):
            with contextlib.suppress(ValueError):
                return checks.index("client", client, count)
        known_ids = [] if ids is None else [str(name) for name in ids]
        if str(client) in known_ids:
            return known_ids.index(str(client))
        known = f"0 to {count - 1}"
        if known_ids:
            known += f", or an id such as {', '.join(known_ids[:3])}"
        raise ValueError(f"client={client!r} is none of {self.folder}: give {known}")

    def _say_if_adapting(self, state: State, client: int | None) -> None:
        if client is not None and not self.federation.kept(state, client)[0]:
            print(
                f"client {client} keeps no model of its own: it adapts to its training "
                "data first"
            )


class LoadedRuns(Sequence):
    """Several runs, side by side; `load_runs` makes it.

    Args:
      runs: of `load_run`.
    """

    def __init__(self, runs: Sequence[LoadedRun]):
        self._runs = list(runs)

    def __len__(self) -> int:
        return len(self._runs)

    def __getitem__(self, index):
        found = self._runs[index]
        return LoadedRuns(found) if isinstance(index, slice) else found

    def __iter__(self) -> Iterator[LoadedRun]:
        return iter(self._runs)

    def __repr__(self) -> str:
        return "\n".join(map(repr, self._runs))

    @property
    def metrics(self) -> Any:
        """`LoadedRun.metrics` of all, with the settings that differ between them in
        place of an algorithm's changed options."""
        return _table(
            [
                row
                for run, differing in zip(self, self._differing())
                for row in run._tidy(differing)
            ]
        )

    def per_client(self) -> Any:
        """`LoadedRun.per_client` of all, each with its method and what differs."""
        return _table(
            [
                {"method": run.label, **differing, **row}
                for run, differing in zip(self, self._differing())
                for row in folder.clients_rows(run.folder)
            ]
        )

    def comparison(self) -> str:
        """The closing table of the finished runs, and below it the differences.

        Raises:
          ValueError: none is finished.
        """
        finished = [run for run in self if run.finished]
        if not finished:
            raise ValueError("none of these runs is finished: nothing to compare")
        options = [RunOptions(run_dir=str(run.folder)) for run in finished]
        return report.comparison([run.summary for run in finished], options)

    def _differing(self) -> list[dict[str, Any]]:
        """Of each run, the settings that are not the same in all."""
        settings = [setup.settings(run.config.to_dict()) for run in self]
        for one in settings:
            del one["algorithm"]  # the method says it
        names = dict.fromkeys(key for one in settings for key in one)
        names = [k for k in names if len({repr(one.get(k)) for one in settings}) > 1]
        return [
            {key.removeprefix("options."): one.get(key) for key in names}
            for one in settings
        ]


def _on_host(shape: jax.ShapeDtypeStruct) -> Any:
    """A likeness in NumPy that takes no memory; a key stays JAX's."""
    if is_key(shape):
        return shape
    return np.broadcast_to(np.zeros((), shape.dtype), shape.shape)


def _table(rows: list[dict[str, Any]]) -> Any:
    """Rows as a pandas DataFrame, if pandas is installed."""
    if importlib.util.find_spec("pandas") is None:
        return rows
    import pandas

    return pandas.DataFrame(rows)
