"""The configuration: every key once, with its type, default, unit and source.

Keys that every run has are in `groups.py`; an objective's are in its module, in a group of the objective's name.
Files under `configs/` start from `default_config()` and change what differs; overrides on the command line
(`--config.optim.learning_rate=3e-6`) come last. `Config.from_dict` turns the result into frozen dataclasses and
refuses unknown keys, wrong types and impossible combinations.
"""

import dataclasses
import difflib
import os
import runpy
import traceback
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from diffcse_jax import objectives, original_names
from diffcse_jax.errors import ConfigError, UserError
from diffcse_jax.groups import DEV_METRICS, OWN_POOLER, OWN_TASKS, START, RunConfig
from diffcse_jax.objectives import Objective
from diffcse_jax.options import Table, build_options, tables_of

if TYPE_CHECKING:
    import ml_collections

PAIRS_OF_TWO_TEXTS = {
    "lead": "the rest",
    "neighbours": "the next sentence",
    "passages": "the next passage",
    "crops": "another span",
}
SHIPPED = Path(__file__).with_name("configs")  # of the repository by a link, of the wheel in fact


@dataclasses.dataclass(frozen=True)
class _Config(RunConfig):
    """A whole configuration, but for the groups of objectives, which `Config` adds."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """The options of an objective."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "_Config":
        """Builds a checked configuration from what differs from the defaults.

        Args:
            values: groups of keys, `{"train": {"steps": 60}}`, or keys as users write them, `{"train.steps": 60}`.

        Raises:
            ConfigError: an unknown key (with the nearest known one), a wrong type, a value outside its choices or
                range, or an impossible combination.
        """
        config = build_options(cls, nested(values), unknown_key_message)
        _check_combinations(config)
        return config

    def to_dict(self) -> dict[str, Any]:
        """The configuration as nested plain dicts (tuples stay tuples)."""
        return dataclasses.asdict(self)

    @cached_property
    def objectives(self) -> dict[str, Objective]:
        """The objectives that take part in training, by name: those of weight above 0."""
        found = {name: module.objective(getattr(self, name), self) for name, module in objectives.modules().items()}
        return {name: objective for name, objective in found.items() if objective and objective.weight > 0}

    def needs(self, what: str) -> bool:
        """True if an objective that takes part in training, or the data, needs this member of `objectives.NEEDS`."""
        return bool(self.those_that_need(what))

    def those_that_need(self, what: str) -> list[str]:
        """The settings for which this member of `objectives.NEEDS` is needed, as messages name them."""
        found = [f"{name}.weight > 0" for name, each in self.objectives.items() if what in each.needs]
        by_data = what in ("generator", "mask_token") and self.data.augmentation == "mlm"
        return [*found, "data.augmentation='mlm'"] if by_data else found

    @property
    def trains_generator_head(self) -> bool:
        """True if a masked-LM head is trained first, for want of a named generator."""
        return self.needs("generator") and not self.generator.name_or_path

    @property
    def generator_is_start(self) -> bool:
        """True if the generator is the encoder's own checkpoint, which then needs a masked-LM head."""
        return self.needs("generator") and self.generator.name_or_path == START


def _with_objectives() -> type[_Config]:
    """`_Config` with a group of keys for each objective."""
    groups = [
        (name, module.Options, dataclasses.field(default=module.Options()))
        for name, module in objectives.modules().items()
    ]
    complete = dataclasses.make_dataclass("Config", groups, bases=(_Config,), frozen=True)
    complete.__module__ = __name__
    return complete


if TYPE_CHECKING:
    Config = _Config
else:
    Config = _with_objectives()


def default_config() -> "ml_collections.ConfigDict":
    """The defaults as a ConfigDict, for files under `configs/`."""
    import ml_collections  # here, because training from Python needs no more than the dataclasses

    return ml_collections.ConfigDict(Config().to_dict())


def shipped_config(name: str) -> "ml_collections.ConfigDict":
    """The configuration that the file `configs/NAME.py` gives, for files that change less than they keep."""
    return runpy.run_path(str(SHIPPED / f"{name}.py"))["get_config"]()


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration's values under their keys as users write them: `{"model.pooler": "cls", ...}`."""
    leaves: dict[str, Any] = {}
    for name, value in values.items():
        group = flat(value) if isinstance(value, Mapping) and value else None  # a table without groups is a leaf
        leaves |= {name: value} if group is None else {f"{name}.{key}": leaf for key, leaf in group.items()}
    return leaves


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same with groups of keys: `{"model": {"pooler": "cls"}, ...}`. Paths become strings, as keys have them."""
    groups: dict[str, Any] = {}
    for key, value in flat(values).items():
        *path, name = key.split(".")
        members = groups
        for group in path:
            members = members.setdefault(group, {})
            if not isinstance(members, dict):
                raise ConfigError(f"{'.'.join(path)}: expected a group of keys, got {members!r}")
        members[name] = os.fspath(value) if isinstance(value, os.PathLike) else value
    return groups


def known_keys() -> dict[str, dataclasses.Field]:
    """Every dotted key with its field, in the order of definition; without those of tables, which users name."""
    keys: dict[str, dataclasses.Field] = {}
    for group in dataclasses.fields(Config):
        if dataclasses.is_dataclass(group.type):
            keys |= _keys_of(group.type, f"{group.name}.")
        else:
            keys[group.name] = group
    return keys


def _keys_of(group: Any, prefix: str) -> dict[str, dataclasses.Field]:
    return {prefix + field.name: field for field in dataclasses.fields(group) if field.type is not Table}


def _keys_beside(key: str) -> dict[str, dataclasses.Field]:
    """The known keys; of a key in a table those of its group, too."""
    for table, group in tables_of(Config).items():
        if key.startswith(f"{table}."):
            name = key.removeprefix(f"{table}.").partition(".")[0]
            return known_keys() | _keys_of(group, f"{table}.{name}.")
    return known_keys()


def unknown_key_message(key: str) -> str:
    """`unknown key K; did you mean L?`, with the nearest known key where one is near."""
    leaf = key.rpartition(".")[2]
    keys = _keys_beside(key)
    meant = original_names.key_for(key)
    if meant not in keys:
        meant = original_names.key_for(leaf)
    near = [meant] if meant else difflib.get_close_matches(key, keys, n=1, cutoff=0.6)
    near = near or [known for known in keys if known.rpartition(".")[2] == leaf][:1]
    return f"unknown key {key}" + (f"; did you mean {near[0]}?" if near else "")


@runtime_checkable
class ConvertsToDict(Protocol):
    """A `Config` or a ConfigDict of ml_collections."""

    def to_dict(self) -> dict[str, Any]:
        """Its values by key, groups nested."""


def configuration(
    given: str | os.PathLike[str] | Mapping[str, Any] | ConvertsToDict, changes: Mapping[str, Any]
) -> tuple[str, Config]:
    """A checked configuration from whatever form it is given in, and its name.

    Args:
        given: the name of a file in configs/, a path of such a file, what differs from the defaults as `from_dict`
            takes it, a `Config` or a ConfigDict.
        changes: values that override those, by key or in groups.

    Raises:
        ConfigError: there is no such file, it defines no `get_config`, or as `Config.from_dict`.
    """
    if isinstance(given, Mapping | ConvertsToDict):
        name, values = "custom", given if isinstance(given, Mapping) else given.to_dict()
    else:
        path = Path(given)
        path = path if path.suffix == ".py" else SHIPPED / f"{path}.py"
        name, values = path.stem, _read(path, str(given))
    return name, Config.from_dict(nested(flat(values) | flat(changes)))


def _read(path: Path, given: str) -> dict[str, Any]:
    """The configuration that a file gives."""
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in SHIPPED.glob("*.py")))
        raise ConfigError(f"config: there is no {given!r}: give the path of a file NAME.py, or one of {known}")
    try:
        functions = runpy.run_path(str(path))
        if "get_config" not in functions:
            raise ConfigError(f"config: {path} defines no get_config(), which gives the configuration")
        return functions["get_config"]().to_dict()
    except UserError:
        raise
    except Exception as error:  # whatever the file's own code raises
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        where = f"{path}, line {lines[-1]}" if lines else str(path)
        raise ConfigError(f"config: {where}: {type(error).__name__}: {error}") from error


def check_override_names(argv: list[str], flag: str = "config") -> None:
    """Refuses `--config.some.key` arguments that name no key, before any config file is read.

    Args:
        argv: the command line.
        flag: another name for `config`.

    Raises:
        ConfigError: naming the key and the nearest known one.
    """
    for argument in argv:
        if argument.startswith((f"--{flag}.", f"-{flag}.")):
            key = argument.partition("=")[0].partition(f"{flag}.")[2]
            if key not in _keys_beside(key):
                raise ConfigError(unknown_key_message(key))


def _check_combinations(config: _Config) -> None:
    """Refuses what no run can do, with the reason; what only a checkpoint knows is checked where it is loaded."""
    model, generator = config.model, config.generator
    if not model.projector_train_only and (model.projector != "mlp" or model.pooler not in ("cls", OWN_POOLER)):
        raise ConfigError(
            "model.projector_train_only=False needs model.projector='mlp' and model.pooler='cls': only a dense + tanh "
            "head on position 0 can be exported, as Hugging Face's pooler"
        )
    if config.trains_generator_head and generator.head_steps == 0:
        raise ConfigError(
            f"{' and '.join(config.those_that_need('generator'))} needs a generator: name a masked LM in "
            "generator.name_or_path, train an own head with generator.head_steps > 0, or set the weight to 0"
        )
    if config.matryoshka.sizes:
        _check_matryoshka(config)
    train = config.train
    if (size := train.batch_size // train.chunks) < min(train.batch_size, train.chunk_size) / 2:
        raise ConfigError(
            f"train.batch_size={train.batch_size} in equal chunks of at most train.chunk_size={train.chunk_size} gives "
            f"chunks of {size}, far fewer: choose another of the two, with a common divisor, or train.chunk_size=0"
        )
    if not config.objectives:
        raise ConfigError(f"nothing to train: {', '.join(objectives.modules())} all have weight 0")
    _check_dev_metrics(config)
    _check_data(config)


def _check_dev_metrics(config: _Config) -> None:
    options = config.eval
    for name in options.beside:
        kind, colon, file = name.partition(":")
        if not (kind in OWN_TASKS and file if colon else name in DEV_METRICS):
            known = (*DEV_METRICS, *(f"{kind}:FILE" for kind in OWN_TASKS))
            raise ConfigError(f"eval.beside: {name!r} is not one of {', '.join(known)}")
        _check_dev_metric(config, f"eval.beside={name!r}", name)
    for name in options.hold:
        _check_dev_metric(config, f"eval.hold={name!r}", name)
    _check_dev_metric(config, f"eval.metric={options.metric!r}", options.metric)


def _check_dev_metric(config: _Config, asked: str, metric: str) -> None:
    options = config.eval
    if metric in ("pairs_spearman", "pairs_retrieval") and not options.pairs_file:
        raise ConfigError(f"{asked} needs eval.pairs_file, a tab-separated file of pairs")
    if metric == "stsb_spearman" and "STSBenchmark" not in options.tasks:
        raise ConfigError(f"{asked} needs STSBenchmark in eval.tasks")
    if metric == "average_spearman" and not options.tasks:
        raise ConfigError(f"{asked} needs eval.tasks")
    if metric in ("lead_retrieval", "neighbours_retrieval") and not config.data.held_out:
        raise ConfigError(f"{asked} needs held-out documents: set data.held_out, such as 0.05")


def _check_matryoshka(config: _Config) -> None:
    sizes, weights = config.matryoshka.sizes, config.matryoshka.weights
    if config.model.projector != "none" and not config.keeps_projector:
        raise ConfigError(
            f"matryoshka.sizes={sizes} is for vectors as encoding gives them, and model.projector="
            f"{config.model.projector!r} is dropped then, so that their prefixes would not be trained; use "
            "model.projector='none', or 'mlp' with model.projector_train_only=False"
        )
    if len(weights) not in (0, len(sizes)):
        raise ConfigError(
            f"matryoshka.weights has {len(weights)} values for {len(sizes)} sizes; give one each, or none"
        )
    if not any(objective.prefixes for objective in config.objectives.values()):
        raise ConfigError(f"matryoshka.sizes={sizes}, but no objective that takes part compares sentence vectors")


def _check_data(config: _Config) -> None:
    data = config.data
    asked = config.those_that_need("next_sentence")
    if data.pairs in PAIRS_OF_TWO_TEXTS:
        positive = PAIRS_OF_TWO_TEXTS[data.pairs]
        if asked:
            raise ConfigError(
                f"data.pairs={data.pairs!r} makes {positive} the positive, while {asked[0]} needs the next sentence "
                "beside the views of single sentences; choose one of the two"
            )
        if data.augmentation != "none":
            raise ConfigError(
                f"data.augmentation={data.augmentation!r} makes second views of single sentences, and with "
                f"data.pairs={data.pairs!r} the second view is {positive}; choose one of the two"
            )
        asked = [f"data.pairs={data.pairs!r}"]
    if asked and not data.reads_documents:
        raise ConfigError(
            f"{asked[0]} needs documents: set data.documents='blank_lines' for a txt file that has one sentence a line "
            "and blank lines between documents, or data.documents='auto' for any other and data.pairs for what is made "
            "of them"
        )
    if data.held_out and not data.reads_documents:
        raise ConfigError(
            f"data.held_out={data.held_out} is a share of the documents, and data.pairs={data.pairs!r} with "
            f"data.documents={data.documents!r} reads none; use data.pairs='dropout' and data.documents='auto'"
        )
    if data.augmentation == "synonyms" and not data.synonyms_file:
        raise ConfigError(
            "data.augmentation='synonyms' needs data.synonyms_file: lines of a word and its synonyms, separated by tabs"
        )
