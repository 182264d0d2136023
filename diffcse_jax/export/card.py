"""The model card: README.md of an exported folder, with metadata, rendered from `card.md.j2`."""

import importlib.metadata
import json
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from diffcse_jax.config import SHIPPED, Config, flat, machine_keys, shipped_config
from diffcse_jax.documents.find import DOCSTRINGS, WIKI1M
from diffcse_jax.evaluation.results import Results, TableRow, format_scores, scores_by_column, table
from diffcse_jax.io import HUB_REPOSITORY, expand_path
from diffcse_jax.models import hf
from diffcse_jax.models.poolers import OTHER_POOLERS
from diffcse_jax.models.text_settings import max_length_of
from diffcse_jax.run_folder.checkpoints import SavedEncoder
from diffcse_jax.run_folder.finding import SELECTION, find_run
from diffcse_jax.run_folder.records import origin
from diffcse_jax.run_folder.start import BaseModel, is_local
from diffcse_jax.run_folder.summary import RESULTS, read_results
from diffcse_jax.version import __version__

TEMPLATE = Path(__file__).with_name("card.md.j2")
_PAPERS = tomllib.loads(Path(__file__).with_name("papers.toml").read_text(encoding="utf-8"))
BIBTEX: dict[str, str] = {name: entry.strip() for name, entry in _PAPERS.items()}

_PACKAGES = ("jax", "flax", "transformers", "tokenizers", "safetensors", "numpy")
_TAGS = (
    "sentence-transformers",
    "feature-extraction",
    "sentence-similarity",
    "transformers",
    "diffcse",
    "jax",
)
_MASKED_LM_TAGS = ("fill-mask", "transformers", "diffcse", "jax")
_LANGUAGES = {WIKI1M: ("en",), DOCSTRINGS: ("en",)}  # of texts with a name
_DATASETS = {WIKI1M: HUB_REPOSITORY}


def model_card(
    saved: SavedEncoder,
    base: BaseModel,
    *,
    name: str,
    truncate_dim: int | None,
    hub_id: str | None,
    license: str | None,
    language: Sequence[str],
    results: tuple[Results, Results | None],
    check: str,
    graph: str,
) -> str:
    """Return the content of README.md: metadata as YAML, then Markdown.

    `name` is the title of a model without an id on the hub. `license` replaces the license of the
    starting checkpoint, and `language` the languages of the training text. `results` are those of
    `recorded_results`. `check` is a sentence on how closely readers of the folder agree with the
    trained model, and `graph` the path of the ONNX file, if any.
    """
    config = saved.config
    baseline = saved.baseline
    sizes = saved.checkpoint.config
    whole = saved.checkpoint.embedding_size(saved.pooler)
    described = "; ".join(filter(None, (loss.data_description for loss in config.losses.values())))
    text = described or portable(config)["data"]["train_file"]
    if not language:
        of_text = config.data.language or _LANGUAGES.get(text, ())
        # At 0, it is the starting checkpoint itself.
        language = base.language if saved.selection.interpolation == 0 else of_text
    tags = [*(_MASKED_LM_TAGS if config.trains_masked_lm else _TAGS)]
    tags += ["matryoshka"] if config.matryoshka.sizes else []
    tags += ["onnx"] if graph else []
    licenses: dict[str, Any] = {"license": license} if license else {**base.license}
    metadata = ModelCardData(
        base_model=base.hub_id or None,
        datasets=[_DATASETS[text]] if text in _DATASETS else None,
        language=(language[0] if len(language) == 1 else list(language)) or None,
        library_name="transformers" if config.trains_masked_lm else "sentence-transformers",
        pipeline_tag="fill-mask" if config.trains_masked_lm else "sentence-similarity",
        tags=tags,
        **licenses,
    )
    ours = f"this model ({saved.applied})"
    start = f"{base.name} before training ({saved.applied_before})" if baseline else base.name
    of_start = {start: scores_by_column(results[1])} if results[1] else {}
    of_model = {ours: scores_by_column(results[0])} if results[0] else {}
    before = baseline.dev if baseline else {}
    dev_table = _score_table({start: before, ours: saved.dev}) if saved.dev else ""
    dev_metric = _without_folder("metric", saved.dev_metric)
    verdict = " ".join(saved.selection.verdict.split())
    verdict = verdict.replace(config.model.name_or_path, base.name)
    card = ModelCard.from_template(
        metadata,
        template_path=str(TEMPLATE),
        title=hub_id or name,
        on_hub=bool(hub_id),
        place=hub_id or "path/to/this/folder",
        saved=saved,
        base=base,
        config=config,
        text=text,
        architecture=hf.architecture(sizes, has_mlm_head=True),
        whole=whole,
        cut=None if truncate_dim == whole else truncate_dim,
        origin=origin(saved.selection.interpolation, saved.step),
        dev_metric=dev_metric,
        dev_table=dev_table,
        verdict=verdict.replace(saved.dev_metric, dev_metric).rstrip("."),
        test_table=_score_table(of_start | of_model),
        not_official=results[0].get("not_official", {}),
        max_length=max_length_of(saved.checkpoint.folder, sizes.max_length),
        other_poolers=OTHER_POOLERS,
        prompts=", ".join(
            f"{kind} `{prompt}`" for kind, prompt in saved.prompts.by_name.items() if prompt
        ),
        unknown=baseline.unknown if baseline else 0.0,
        has_query_encoder=saved.documents is not None,
        has_pooler=bool(hf.FAMILIES[sizes.family].pooler),
        graph=graph,
        command=command_of(config),
        configuration=json.dumps(portable(config), indent=2),
        citations=[BIBTEX[paper] for paper in papers_of(config)],
        check=check,
        diffcse_jax=__version__,
        versions={package: importlib.metadata.version(package) for package in _PACKAGES},
    )
    return f"{card.content.rstrip()}\n"


def _score_table(scores: Mapping[str, Mapping[str, float]]) -> str:
    known = {label: by_column for label, by_column in scores.items() if by_column}
    rows = [TableRow(label, format_scores(by_column)) for label, by_column in known.items()]
    columns = dict.fromkeys(column for row in rows for column in row.cells)
    return table([*columns], rows, "markdown") if rows else ""


def papers_of(config: Config) -> list[str]:
    """Return the keys of `BIBTEX` for the methods that a run uses, those of its losses first."""
    papers = [paper for loss in config.losses.values() for paper in loss.papers]
    if config.trains_masked_lm:
        papers = ["bert"]  # alone, the loss is not SimCSE's
    if config.matryoshka.sizes:
        papers.append("matryoshka")
    if config.data.pairs == "crops":
        papers.append("contriever")
    if config.eval.interpolate:
        papers.append("wise_ft")
    return list(dict.fromkeys(papers))


def command_of(config: Config) -> str:
    """Return the command that trains with the same configuration.

    Keys that depend on the machine are left out. The command names the shipped configuration that
    differs in the fewest keys, and has one override per line.
    """
    prefixes = tuple(f"{name}." for name in config.given_losses)
    unnamed = machine_keys()
    values = {
        key: value
        for key, value in flat(portable(config)).items()
        if key not in unnamed and not key.startswith(prefixes)
    }
    changes = {}
    for name in sorted(path.stem for path in SHIPPED.glob("*.py")):
        shipped = flat(Config.from_dict(shipped_config(name).to_dict()).to_dict())
        changes[name] = {key: value for key, value in values.items() if shipped.get(key) != value}
    nearest = min(changes, key=lambda name: len(changes[name]))
    changed = changes[nearest].items()
    overrides = (f"--config.{key}={shlex.quote(str(value))}" for key, value in changed)
    command = "finetune" if config.needs("labels") else "train"
    lines = " \\\n    ".join([f"diffcse {command} --config {nearest}", *overrides])
    names = ", ".join(config.given_losses)
    return f"{lines}\n# from Python, with `losses` for {names}" if names else lines


def portable(config: Config) -> dict[str, Any]:
    """Return the configuration as nested dicts, with only the last part of each local path."""
    return _without_folder("", config.to_dict())


def _without_folder(key: str, value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_folder(name, each) for name, each in value.items()}
    if isinstance(value, tuple):
        return tuple(_without_folder(key, item) for item in value)
    if not isinstance(value, str):
        return value
    if key.endswith("_dir"):
        return ""
    if key in ("metric", "beside"):  # retrieval:FOLDER and pairs_retrieval:FILE
        kind, colon, path = value.partition(":")
        return f"{kind}{colon}{PurePath(path).name}"
    if key.endswith("file") or is_local(value):
        return PurePath(value.replace("\\", "/")).name
    return value


def recorded_results(
    source: Path, saved: SavedEncoder, truncate_dim: int | None
) -> tuple[Results, Results | None]:
    """Return the test results of the exported model and of its starting checkpoint.

    The former are empty if unknown, and the latter None. `diffcse evaluate` has written them to the
    folder of the run. Files older than the selection are left out.
    """
    run = find_run(source) or source
    since = (run / SELECTION).stat().st_mtime if (run / SELECTION).is_file() else 0.0
    files = [
        path for name in RESULTS if (path := run / name).is_file() and path.stat().st_mtime >= since
    ]
    comparable = {"mode": "test", "aggregation": "all", "post": None}  # as published
    measured = [row for path in files for row in read_results(path)]
    rows = [
        row for row in measured if all(row.get(key) == value for key, value in comparable.items())
    ]
    places = {source.resolve()} | ({(run / "export").resolve()} if source == run else set())
    exported = (saved.applied, truncate_dim)
    start = saved.config.model.name_or_path
    for row in rows:
        is_exported = (row["pooler"], row.get("truncate_dim")) == exported
        if is_exported and expand_path(row["model"]).resolve() in places:
            of_start = saved.applied_before
            poolers = {of_start} if of_start else {row["pooler"] for row in rows}
            starts = (each for each in rows if each["model"] == start)
            return row, next((each for each in starts if each["pooler"] in poolers), None)
    return {}, None
