"""The configuration of a run: one static tree of dataclasses, its checks, files and overrides."""

import collections
import dataclasses
import difflib
import functools
import importlib
import importlib.metadata
import itertools
import os
import re
import runpy
import traceback
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from diffcse_jax.config.groups import (
    DEV_METRICS,
    MASKED_ACCURACY,
    OF_DOCUMENTS,
    OWN_POOLER,
    SECOND_TEXTS,
    DataConfig,
    EvalConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
)
from diffcse_jax.errors import ConfigError, UserError
from diffcse_jax.io import SHIPPED
from diffcse_jax.losses import (
    GeneratorOptions,
    Loss,
    RunInfo,
    Table,
    contrastive,
    decorrelation,
    diffcse,
    diffcse_variants,
    masked_lm,
    ranking,
)
from diffcse_jax.losses.finetune import Finetune, LabelledTask
from diffcse_jax.losses.loss import NEEDS
from diffcse_jax.losses.total import MatryoshkaOptions
from diffcse_jax.models.forward import STARTING_CHECKPOINT
from diffcse_jax.options import check_value, option, read_value

if TYPE_CHECKING:
    import ml_collections

# The group of entry points under which other packages offer losses.
ENTRY_POINTS = "diffcse_jax.losses"
TASKS = "finetune.tasks."  # groups of keys, whose names users choose, begin with this
CLASS = ".class"  # ends the key that names the class of a loss which was given to `train`
OWN_METRICS = ("pairs_retrieval:FILE", "retrieval:FOLDER")  # dev metrics on the user's own files


@dataclasses.dataclass(frozen=True)
class Config:
    """The whole configuration of a run.

    To add a loss, add its file to `losses/`, and here its import and one line below.
    """

    model: ModelConfig = ModelConfig()
    generator: GeneratorOptions = GeneratorOptions()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    optim: OptimConfig = OptimConfig()
    matryoshka: MatryoshkaOptions = MatryoshkaOptions()
    eval: EvalConfig = EvalConfig()
    mesh: MeshConfig = MeshConfig()
    precision: str = option(
        "auto",
        "type of the computation; `auto`: bfloat16 on accelerators",
        choices=("auto", "float32", "bfloat16"),
    )
    distributed: bool = option(
        False,
        "start JAX's multi-host runtime first, which detects TPU pods, GKE, Slurm and Open MPI; "
        "elsewhere set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID",
        changes="nothing",
    )
    # The losses, in alphabetical order. `diffcse_variants` also extends the tables of `difference`.
    barlow_twins: decorrelation.BarlowTwins = decorrelation.BarlowTwins()
    consistency: ranking.RankingConsistency = ranking.RankingConsistency()
    contrast: contrastive.Contrast = contrastive.Contrast()
    dcl: decorrelation.DimensionContrast = decorrelation.DimensionContrast()
    difference: diffcse.DiffCSE = diffcse.DiffCSE()
    distillation: ranking.RankingDistillation = ranking.RankingDistillation()
    edited_contrast: diffcse_variants.EditedContrast = diffcse_variants.EditedContrast()
    finetune: Finetune = Finetune()
    mlm: masked_lm.AuxiliaryMaskedLM = masked_lm.AuxiliaryMaskedLM()
    query_distillation: ranking.QueryDistillation = ranking.QueryDistillation()
    reconstruction: masked_lm.Reconstruction = masked_lm.Reconstruction()
    # Losses from elsewhere: of other packages, by the names of their entry points, and those given
    # to `train`. Their keys are next to the other losses' keys.
    installed: Table = Table()

    def __post_init__(self) -> None:
        """Refuse values where groups belong, such as those of `Config({"train.steps": 1})`."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(field.type, type) or isinstance(value, field.type):
                continue
            if isinstance(value, Mapping):
                is_first = field.name == "model"  # that of an argument without a name
                Config.from_dict(value if is_first else {field.name: value})  # names wrong keys
            raise ConfigError(
                f"{field.name}={value!r:.60}: use Config.from_dict(values), which takes values in "
                "groups or by key"
            )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, for_reading: bool = False) -> "Config":
        """Build a checked configuration from what differs from the defaults.

        The values are in groups (`{"train": {"steps": 60}}`) or by key (`{"train.steps": 60}`). A
        `ConfigError` names a key that is unknown, a value of the wrong type or out of range, or
        values that cannot work together.

        A run is only read, and not trained, with `for_reading`. Then it does not matter if the
        class of a loss that was given to `train` is not found here.
        """
        by_key = flat(checked_values("Config.from_dict", values))
        group_types: dict[str, Any] = {
            field.name: field.type
            for field in dataclasses.fields(cls)
            if dataclasses.is_dataclass(field.type)
        }
        classes = named_classes(by_key, for_reading=for_reading)
        absent = tuple(f"{name}." for name, kind in classes.items() if kind is AbsentLoss)

        def is_read(key: str) -> bool:  # of a loss whose class is not found, only the weight is
            of_absent = key.startswith(absent) and not key.endswith(".weight")
            return not of_absent and key.removesuffix(CLASS) not in classes

        by_key = {key: value for key, value in by_key.items() if is_read(key)}
        known = known_keys(by_key, classes)
        # The given options of each group.
        groups = collections.defaultdict[str, dict[str, Any]](dict)
        for key, value in by_key.items():
            group, _, name = key.rpartition(".")
            if key in known:
                value = os.fspath(value) if isinstance(value, os.PathLike) else value
                groups[group][name] = check_value(key, value, known[key])
            elif (
                isinstance(value, Mapping)
                and not value
                and (key in group_types or f"{key}.".startswith(TASKS))
            ):
                groups[key] = {}
            elif key in group_types:
                raise ConfigError(f"{key}={value!r}: expected a group of keys")
            else:
                raise ConfigError(unknown_key_message(key))
        for group in sorted(group for group in groups if group.startswith(TASKS)):
            if not re.fullmatch(r"[a-z][a-z0-9_]*", name := group.removeprefix(TASKS)):
                raise ConfigError(
                    f"{group}: {name!r} is not a valid name. Use lower-case letters, digits and _"
                )
            groups["finetune"].setdefault("tasks", Table())[name] = LabelledTask(**groups[group])
        built = {name: kind(**groups[name]) for name, kind in group_types.items()}
        others = sorted(
            name for name in {*groups, *classes} - group_types.keys() if name and "." not in name
        )
        installed = {
            name: (classes.get(name) or installed_losses()[name])(**groups[name]) for name in others
        }
        config = cls(**groups[""], **built, installed=Table(installed))
        if contradiction := next(_contradictions(config), ""):
            raise ConfigError(contradiction)
        return config

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as nested dicts. Tuples stay tuples.

        The group of a loss that was given to `train` also names the class of the loss.
        """
        values = dataclasses.asdict(self)
        installed = values.pop("installed")
        for name in self.given_losses:
            installed[name] |= {CLASS[1:]: class_path(self.installed[name])}
        return values | installed

    @property
    def given_losses(self) -> list[str]:
        """The names of the losses that were given to `train` as objects."""
        return [
            name
            for name, loss in self.installed.items()
            if type(loss) is not installed_losses().get(name)
        ]

    @cached_property
    def losses(self) -> dict[str, Loss]:
        """The losses to train with, by name, in alphabetical order."""
        groups = vars(self) | self.installed
        losses = {name: group for name, group in sorted(groups.items()) if isinstance(group, Loss)}
        active = {name: loss.active() for name, loss in losses.items()}
        losses = {name: loss for name, loss in active.items() if loss is not None}
        for name, loss in losses.items():
            if unknown := loss.needs - NEEDS:
                raise ConfigError(
                    f"{name}: the loss needs {', '.join(sorted(unknown))}, which is unknown. Use "
                    f"{', '.join(sorted(NEEDS))}"
                )
            loss.check(self.run_info)
        return losses

    @property
    def run_info(self) -> RunInfo:
        """What losses may know about the run."""
        seed = self.train.seed_of("heads")
        return RunInfo(self.model.pooler, self.generator, self.data.max_length, seed)

    def needs(self, what: str) -> bool:
        """Return True if a loss that trains, or the data, needs this (see `Loss.needs`)."""
        return bool(self.settings_that_need(what))

    def settings_that_need(self, what: str) -> list[str]:
        """Return the settings that need this (see `Loss.needs`), as messages name them."""
        needing = [f"{name}.weight > 0" for name, loss in self.losses.items() if what in loss.needs]
        by_data = what in ("generator", "mask_token") and self.data.augmentation == "mlm"
        return [*needing, "data.augmentation='mlm'"] if by_data else needing

    @property
    def trains_generator_head(self) -> bool:
        """True if no generator is named, so that a masked-LM head is trained first."""
        return self.needs("generator") and not self.generator.name_or_path

    @property
    def generator_is_start(self) -> bool:
        """True if the generator is the encoder's own checkpoint.

        That checkpoint then needs a masked-LM head.
        """
        return self.needs("generator") and self.generator.name_or_path == STARTING_CHECKPOINT

    @property
    def keeps_projector(self) -> bool:
        """True if the trained projector is kept, as the head of the pooler `cls`."""
        return self.model.projector != "none" and not self.model.projector_train_only

    @property
    def keeps_mlm_head(self) -> bool:
        """True if a masked-LM head is trained whose decoder is the word embeddings.

        Checkpoints store the decoder in this way.
        """
        return "mlm" in self.losses and self.mlm.tied

    @property
    def trains_masked_lm(self) -> bool:
        """True if a masked LM is trained and nothing else."""
        return self.keeps_mlm_head and not self.needs("embeddings")

    @property
    def trains_queries(self) -> bool:
        """True if the query encoder is trained, and documents keep their embeddings."""
        return self.needs("ranked")

    @property
    def encoding_pooler(self) -> str:
        """The pooler to evaluate and export with, once `own` is resolved.

        `cls` means Hugging Face's `pooler_output` (position 0, dense, tanh), so it needs the
        trained head. If the head is dropped, the pooler is `cls_before_pooler`.
        """
        dropped = self.model.pooler == "cls" and not self.keeps_projector
        return "cls_before_pooler" if dropped else self.model.pooler


# Keys.


@functools.cache
def installed_losses() -> dict[str, type[Loss]]:
    """Return the losses of other packages, by the names of their entry points.

    Raises:
        ConfigError: A name is taken or invalid, or a class cannot be imported or is not a loss.
    """
    losses: dict[str, type[Loss]] = {}
    places: dict[str, str] = {}
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
        name, place = entry.name, entry.value
        if places.get(name) == place:  # a package that is on the path twice
            continue
        described = f"the loss {name} ({place})"
        _check_name(name, described, taken_by=f"the loss {places[name]}" if name in places else "")
        places[name] = place
        try:
            losses[name] = entry.load()
        except Exception as error:  # whatever the other package raises
            raise ConfigError(f"{described} cannot be imported: {error}") from error
        _check_class(name, place, losses[name])
    return losses


def _check_name(name: str, described: str, *, taken_by: str = "") -> None:
    """Raise a `ConfigError` if a loss from elsewhere cannot have this name.

    Args:
        name: The name, which is the group of the loss's keys.
        described: What has the name, for the error.
        taken_by: Another loss from elsewhere with this name, if there is one.
    """
    if name in (field.name for field in dataclasses.fields(Config)):
        taken_by = "a key of the configuration"
    if taken_by:
        raise ConfigError(
            f"{described}: the name {name!r} is taken by {taken_by}. Choose another name"
        )
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ConfigError(
            f"{described}: {name!r} is not a valid name. Use lower-case letters, digits and _, "
            "starting with a letter"
        )


def _check_class(name: str, path: str, loss: Any) -> None:
    if not (isinstance(loss, type) and issubclass(loss, Loss) and dataclasses.is_dataclass(loss)):
        raise ConfigError(f"the loss {name} ({path}) is not a dataclass that extends Loss")
    for field in dataclasses.fields(loss):
        if "doc" not in field.metadata:
            raise ConfigError(
                f"the loss {name} ({path}): declare {field.name} with "
                "diffcse_jax.options.option(...)"
            )


def settings_of_losses(losses: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys and values of losses that were given to `train`, with their classes.

    Raises:
        ConfigError: A name is taken, an option has a wrong value, or a later process could not find
            a class.
    """
    if not isinstance(losses, Mapping):
        raise ConfigError(
            "losses: give a dict of losses by name, such as {'mine': MyLoss(weight=0.1)}, not "
            f"{type(losses).__name__}"
        )
    values: dict[str, Any] = {}
    installed = installed_losses()
    for name, loss in losses.items():
        is_installed = installed.get(name) is type(loss)  # an object of the class of an entry point
        taken = name in installed and not is_installed
        _check_name(name, f"losses[{name!r}]", taken_by="an installed loss" if taken else "")
        if not (isinstance(loss, Loss) and dataclasses.is_dataclass(loss)):
            raise ConfigError(
                f"losses[{name!r}]: expected an instance of a dataclass that extends Loss, got "
                f"{loss!r}"
            )
        _check_class(name, f"losses[{name!r}]", type(loss))
        for field in dataclasses.fields(loss):
            key = f"{name}.{field.name}"
            values[key] = check_value(key, getattr(loss, field.name), field)
        if loss.active() is None:
            raise ConfigError(
                f"losses[{name!r}] is off: its weight is 0. Give it a weight, such as 0.1"
            )
        if not is_installed:
            values[f"{name}{CLASS}"] = class_path(loss)
    return values


def class_path(loss: Loss) -> str:
    """Return where a later process finds the class of a loss, such as `my_losses:Uniformity`.

    Raises:
        ConfigError: It is not found there, because it was defined inside a function or has been
            defined again.
    """
    kind = type(loss)
    path = f"{kind.__module__}:{kind.__qualname__}"
    if _class_at(path) is not kind:
        raise ConfigError(
            f"the class {path} of a loss cannot be found by its name, so training could not "
            "resume. Define it at the top level of a module or notebook, and create the loss after "
            "that"
        )
    return path


def _class_at(path: str) -> Any:
    """Return the class at a path, or None."""
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name, None)
    except Exception:  # whatever the module raises
        return None


@dataclasses.dataclass(frozen=True)
class AbsentLoss(Loss):
    """Stands for a loss whose class is not found, in a configuration that is only read."""

    weight: float = option(0.0, "weight of a loss whose class is not found here", low=0.0)

    def loss(self, forward: Any, inputs: Any, key: Any) -> Any:
        """Raise an error: a run with this loss is only read."""
        raise ConfigError(
            "the class of a loss of this run is not found here, so the run cannot be trained"
        )


def named_classes(values: Mapping[str, Any], *, for_reading: bool = False) -> dict[str, type[Loss]]:
    """Return the classes that values name as `NAME.class`, by the name of the loss.

    With `for_reading`, `AbsentLoss` stands for those that are not found.

    Raises:
        ConfigError: This process does not have such a class.
    """
    classes = {}
    for key, path in values.items():
        name = key.removesuffix(CLASS)
        if name == key or "." in name:
            continue
        kind = _class_at(str(path)) or (AbsentLoss if for_reading else None)
        if kind is None:
            raise ConfigError(
                f"this run trains the loss {name} of the class {path}, which is not found here. "
                "Start it from the script, notebook or folder that defines this class"
            )
        _check_class(name, str(path), kind)
        classes[name] = kind
    return classes


def known_keys(
    near: Iterable[str] | None = None, classes: Mapping[str, type[Loss]] = MappingProxyType({})
) -> dict[str, dataclasses.Field]:
    """Return every dotted key with its field.

    Users name the tables of `finetune.tasks`, so only those of keys `near` are known. If all of
    these are in groups of our own or of `classes`, other packages are not imported.
    """
    groups: dict[str, Any] = {
        field.name: field.type for field in dataclasses.fields(Config)
    } | dict(classes)
    if near is None or {key.partition(".")[0] for key in near} - groups.keys():
        groups |= installed_losses() | dict(classes)
    groups |= {
        ".".join(key.split(".")[:3]): LabelledTask for key in near or () if key.startswith(TASKS)
    }
    return {
        f"{name}.{field.name}".removeprefix("."): field
        for name, group in (groups | {"": Config}).items()
        if dataclasses.is_dataclass(group)
        for field in dataclasses.fields(group)
        if field.type is not Table and not dataclasses.is_dataclass(field.type)
    }


def nearest_key(key: str) -> str:
    """Return the known key that is nearest to an unknown one, or an empty string."""
    keys = [*known_keys([key])]
    group, dot, name = key.rpartition(".")
    # The names in papers and in other programs.
    name = {"lambda": "weight", "lr": "learning_rate"}.get(name, name)
    meant = f"{group}{dot}{name}"
    near = [known for known in keys if known == meant or known.startswith(f"{meant}.")]
    of_other_groups = [known for known in keys if known.endswith(f".{name}")]
    if dot:  # the group may be misspelt, and several groups have a `weight`
        of_other_groups = difflib.get_close_matches(meant, of_other_groups, n=1, cutoff=0.0)
    near = near or of_other_groups or difflib.get_close_matches(meant, keys, n=1, cutoff=0.6)
    return near[0] if near else ""


def unknown_key_message(key: str) -> str:
    """Return `unknown key K; did you mean L?`, with the nearest known key if one is near."""
    near = nearest_key(key)
    return f"unknown key {key}" + (f"; did you mean {near}?" if near else "")


def machine_keys() -> frozenset[str]:
    """Return the keys that only say where and how fast a run is computed, and what it logs.

    None of them belongs to a loss of another package.
    """
    return frozenset(
        key for key, field in known_keys(()).items() if field.metadata["changes"] == "nothing"
    )


def resume_keys(config: Config) -> frozenset[str]:
    """Return the keys that may change when a run is resumed.

    The trained parameters do not depend on them.
    """
    classes = {name: type(loss) for name, loss in config.installed.items()}
    keys = known_keys(classes, classes)
    free = frozenset(key for key, field in keys.items() if field.metadata["changes"] != "training")
    # With a limit, these decide when training ends, and which checkpoints may be the best.
    if config.eval.max_drop:
        return free - {"eval.interpolate", "eval.every"}
    return free - {"eval.every"} if config.eval.patience else free


def checked_values(what: str, values: Any) -> Mapping[str, Any]:
    """Return values by key or in groups; raise `ConfigError` for anything else."""
    if not isinstance(values, Mapping):
        got = type(values).__name__
    elif wrong := [key for key in values if not isinstance(key, str)]:
        got = f"the key {wrong[0]!r}"
    else:
        return values
    raise ConfigError(f"{what}: give a dict of values, such as {{'train.steps': 60}}, not {got}")


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested values by dotted key: `{"model.pooler": "cls", ...}`."""
    leaves: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:  # an empty table is a leaf
            leaves |= {f"{name}.{key}": leaf for key, leaf in flat(value).items()}
        else:
            leaves[name] = value
    return leaves


# Files and overrides.


@runtime_checkable
class ConvertsToDict(Protocol):
    """A `Config`, or a ConfigDict of ml_collections."""

    def to_dict(self) -> dict[str, Any]:
        """Return the values in nested groups."""


def default_config() -> "ml_collections.ConfigDict":
    """Return the defaults as a ConfigDict, for files in `configs/`."""
    import ml_collections  # only configuration files need it

    return ml_collections.ConfigDict(Config().to_dict())


def shipped_config(name: str) -> "ml_collections.ConfigDict":
    """Return the configuration of `configs/NAME.py`, of which another file changes a few keys."""
    return runpy.run_path(str(SHIPPED / f"{name}.py"))["get_config"]()


def configuration(
    config: str | os.PathLike[str] | Mapping[str, Any] | ConvertsToDict, changes: Mapping[str, Any]
) -> tuple[str, Config]:
    """Return the name of a configuration and the checked configuration.

    It is given by the name of a file in configs/, the path of a file, the values that differ from
    the defaults, a `Config`, or a ConfigDict. `changes` override its values, by key or in groups.
    """
    if isinstance(config, Mapping | ConvertsToDict):
        name = "custom"
        values = config if isinstance(config, Mapping) else config.to_dict()
    elif not isinstance(config, str | os.PathLike):
        raise ConfigError(
            f"config={config!r:.60}: give the name of a configuration, the path of a file, a dict "
            "of values or a Config"
        )
    else:
        path = Path(config)
        path = path if path.suffix == ".py" else SHIPPED / f"{path}.py"
        name = path.stem
        values = _read(path, str(config))
    return name, Config.from_dict(flat(checked_values("config", values)) | flat(changes))


def _read(path: Path, name: str) -> dict[str, Any]:
    if not path.is_file():
        known = sorted(file.stem for file in SHIPPED.glob("*.py"))
        near = difflib.get_close_matches(Path(name).stem, known, n=1)
        meant = f" Did you mean {near[0]}?" if near else ""
        raise ConfigError(
            f"--config: {name!r} is neither a file nor the name of a configuration.{meant} Known "
            f"names: {', '.join(known)}."
        )
    try:
        functions = runpy.run_path(str(path))
        if "get_config" not in functions:
            raise ConfigError(
                f"--config: {path} does not define get_config(), which returns the configuration"
            )
        return functions["get_config"]().to_dict()
    except UserError:
        raise
    except Exception as error:  # whatever the code of the file raises
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(path)]
        where = f"{path}, line {lines[-1]}" if lines else str(path)
        raise ConfigError(f"--config: {where}: {type(error).__name__}: {error}") from error


def read_overrides(arguments: Iterable[str], flag: str = "config") -> dict[str, Any]:
    """Return the values of arguments `--FLAG.KEY=VALUE`, by key."""
    values: dict[str, Any] = {}
    following = iter(arguments)
    for argument in following:
        name, equals, text = argument.partition("=")
        bare = name.lstrip("-")
        key = bare.removeprefix(f"{flag}.")
        if key == bare or not name.startswith("-"):
            if meant := nearest_key(bare):
                advice = f"Write --{flag}.{meant}={text or 'VALUE'}."
            else:
                advice = f"Overrides are written --{flag}.KEY=VALUE."
            raise ConfigError(f"{argument!r} is not an option. {advice}")
        if key not in (known := known_keys([key])):
            raise ConfigError(unknown_key_message(key))
        value = text if equals else next(following, None)
        if value is None:
            raise ConfigError(f"{argument}: the value is missing. Write {argument}=VALUE.")
        values[key] = read_value(key, value, known[key])
    return values


# Checks of combinations. What depends on a checkpoint is checked where the checkpoint is loaded.


def _contradictions(config: Config) -> Iterator[str]:
    """Yield what is wrong with values that cannot work together."""
    yield from _contradictions_of_networks(config)
    train = config.train
    if (size := train.batch_size // train.chunks) < min(train.batch_size, train.chunk_size) / 2:
        yield (
            f"train.batch_size={train.batch_size} can only be cut into equal chunks of {size} "
            f"sentences, far below train.chunk_size={train.chunk_size}. Choose two numbers with a "
            "common divisor, or train.chunk_size=0"
        )
    if not config.losses:
        names = [name for name, group in vars(Config()).items() if isinstance(group, Loss)]
        yield (
            f"nothing to train: the losses {', '.join([*names, *config.installed])} all have "
            "weight 0"
        )
    if not config.needs("embeddings") and not config.trains_queries:
        yield from _contradictions_of_single_views(config)
    yield from _dev_contradictions(config)
    yield from _contradictions_of_data(config)


def _contradictions_of_networks(config: Config) -> Iterator[str]:
    """Yield what is wrong with the pooler, the projector, the generator and embedding sizes."""
    model, matryoshka = config.model, config.matryoshka
    if not model.projector_train_only and (
        model.projector != "mlp" or model.pooler not in ("cls", OWN_POOLER)
    ):
        yield "model.projector_train_only=False needs model.projector='mlp' and model.pooler='cls'"
    if config.trains_generator_head and config.generator.head_steps == 0:
        needing = " and ".join(config.settings_that_need("generator"))
        yield (
            f"{needing} needs a generator. Name one in generator.name_or_path, or set "
            "generator.head_steps > 0"
        )
    if matryoshka.sizes and model.projector != "none" and not config.keeps_projector:
        dropped = f"model.projector={model.projector!r} is dropped when encoding"
        yield (
            f"matryoshka.sizes shortens what encoding gives, but {dropped}. Use "
            "model.projector='none'"
        )
    for name, size in itertools.product(config.losses, matryoshka.sizes):
        if f"{name}_{size}" in config.losses:
            yield (
                f"matryoshka.sizes={matryoshka.sizes}: the metric loss_{name}_{size} would be that "
                f"of {name} with {size} dimensions and that of the loss {name}_{size}. Rename the "
                "loss"
            )
    if matryoshka.sizes and not any(loss.compares_embeddings for loss in config.losses.values()):
        yield f"matryoshka.sizes={matryoshka.sizes}, but no loss with a weight compares embeddings"


def _contradictions_of_data(config: Config) -> Iterator[str]:
    """Yield what is wrong with pairs, held-out documents and changed views."""
    data = config.data
    setting = f"data.pairs={data.pairs!r}"
    needing_next = config.settings_that_need("next_sentence")
    if second := SECOND_TEXTS.get(data.pairs):
        if needing_next:
            yield (
                f"{setting} makes {second} the positive, but {needing_next[0]} needs single "
                "sentences. Choose one"
            )
        if data.augmentation != "none":
            changed = (
                f"data.augmentation={data.augmentation!r} changes the second view of single "
                "sentences"
            )
            yield f"{changed}, but with {setting} it is {second}. Choose one"
    needing_documents = needing_next + ([f"data.held_out={data.held_out}"] if data.held_out else [])
    if needing_documents and not data.reads_documents:
        advice = "Set data.pairs='dropout' for single sentences of documents"
        if not needing_next:
            advice = (
                "For pairs, set data.held_out=0, and choose by others: eval.metric="
                f"'pairs_retrieval' with eval.pairs_file. {advice}"
            )
        yield f"{needing_documents[0]} needs documents. {advice}"
    if data.augmentation == "synonyms" and not data.synonyms_file:
        yield (
            "data.augmentation='synonyms' needs data.synonyms_file: lines of a word and its "
            "synonyms, tab-separated"
        )


def _contradictions_of_single_views(config: Config) -> Iterator[str]:
    """Yield what is wrong with pairs and second views in a run whose losses compare no texts."""
    data = config.data
    training = " and ".join(config.losses)
    if data.pairs in ("lead", "neighbours", "crops"):
        yield (
            f"data.pairs={data.pairs!r} makes pairs, but {training} compares no texts. Use "
            "'passages' or 'columns'"
        )
    if data.augmentation != "none":
        yield (
            f"data.augmentation={data.augmentation!r} changes second views, but {training} "
            "compares no texts"
        )


def _dev_contradictions(config: Config) -> Iterator[str]:
    """Yield what is wrong with dev metrics: unknown names, and missing data that they need."""
    options = config.eval
    missing: dict[str, str] = {}  # what metrics need and do not have
    if not options.pairs_file:
        missing |= dict.fromkeys(
            ("pairs_spearman", "pairs_retrieval"), "eval.pairs_file, a file of pairs"
        )
    if "STSBenchmark" not in options.tasks:
        missing["stsb_spearman"] = "STSBenchmark in eval.tasks"
    if not options.tasks:
        missing["average_spearman"] = "eval.tasks"
    if not config.data.held_out:
        advice = (
            "held-out documents. Set data.held_out, such as 0.05; or, for pairs, use "
            "'pairs_retrieval' with eval.pairs_file"
        )
        missing |= dict.fromkeys((*OF_DOCUMENTS, MASKED_ACCURACY), advice)
    if not config.keeps_mlm_head:
        missing[MASKED_ACCURACY] = "a masked LM. Set mlm.weight > 0 and mlm.tied=True"
    kinds_with_path = [name.partition(":")[0] for name in OWN_METRICS]
    for key, metrics in (
        ("beside", options.beside),
        ("hold", options.hold),
        ("metric", (options.metric,)),
    ):
        for metric in metrics:
            kind, _, path = metric.partition(":")
            if metric not in DEV_METRICS and not (path and kind in kinds_with_path):
                known = ", ".join((*DEV_METRICS, *OWN_METRICS))
                yield f"eval.{key}: {metric!r} is not one of {known}"
            if metric in missing:
                yield f"eval.{key}={metric!r} needs {missing[metric]}"
