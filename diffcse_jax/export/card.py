"""The model card: README.md of an exported folder, rendered from `card.md.j2`, with metadata for the hub."""

import json
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from diffcse_jax.config import SHIPPED, Config, flat, machine_keys, shipped_config
from diffcse_jax.errors import ConfigError
from diffcse_jax.evaluation.results import Results, Row, format_scores, scores_by_column, table
from diffcse_jax.export.onnx import GRAPH
from diffcse_jax.io import HUB_REPOSITORY, expand_path, find_run, read_json_object
from diffcse_jax.models import families
from diffcse_jax.run_folder.folder import BaseModel, is_local
from diffcse_jax.run_folder.records import SELECTION, origin
from diffcse_jax.run_folder.saved_encoder import SavedEncoder

TEMPLATE = Path(__file__).with_name("card.md.j2")
BIBTEX: dict[str, str] = {
    name: entry.strip()
    for name, entry in tomllib.loads(Path(__file__).with_name("papers.toml").read_text(encoding="utf-8")).items()
}

PLACE = "path/to/this/folder"  # in the examples for a model that is not on the hub
_SENTENCES = 'sentences = ["A man plays the guitar.", "Someone makes music."]'
_TAGS = ("sentence-transformers", "feature-extraction", "sentence-similarity", "transformers", "diffcse", "jax")
_LANGUAGES = {"wiki1m": "en", "docstrings": "en"}  # of texts with a name
_DATASETS = {"wiki1m": HUB_REPOSITORY}
_HUB_DATA = {  # hub ids of the data that `diffcse evaluate` reads from SentEval's folders
    **{f"STS{year}": f"mteb/sts{year}-sts" for year in (12, 13, 14, 15, 16)},
    "STSBenchmark": "mteb/stsbenchmark-sts",
    "SICKRelatedness": "mteb/sickr-sts",
}
_UNKNOWN = "unknown"  # in metadata, for data without a hub id
_METRICS = {"spearman": "spearman", "accuracy": "acc"}  # kinds of results and their keys in results.json
_RESULT_FILES = ("results.json", "evaluation.json")  # in a run's folder
_RETRIEVAL = {
    "halves_retrieval": "halves of sentences",
    "lead_retrieval": "titles or first sentences, and the rest,",
    "neighbours_retrieval": "sentences and the next sentences",
}


class RecordedResults(NamedTuple):
    """Test results of the exported model and, if they are known, of its starting checkpoint."""

    model: Results
    baseline: Results | None


class Exported(NamedTuple):
    """What a card says about an export.

    Attributes:
        name: The model's id on the hub, or the name of the run.
        on_hub: Whether the name is an id on the hub.
        truncate_dim: The size that embeddings are cut to.
        results: Test results.
        checks: Sentences on how its readers agree with the trained model.
        versions: Versions of the software that wrote it.
        license: The license, if it differs from the base model's.
        language: The languages, if they differ from the base model's.
        onnx: Whether it has ONNX files.
    """

    name: str
    on_hub: bool
    truncate_dim: int | None
    results: RecordedResults
    checks: Sequence[str]
    versions: Mapping[str, str]
    license: str | None = None
    language: Sequence[str] = ()
    onnx: bool = False


def model_card(saved: SavedEncoder, base: BaseModel, exported: Exported) -> str:
    """Return the content of README.md: metadata as YAML, then Markdown.

    Args:
        saved: The exported encoder.
        base: The starting checkpoint.
        exported: Everything else.
    """
    config, whole = saved.config, saved.transformer_config.hidden_size
    baseline_label = base.name
    dev_rows = []
    if saved.baseline is not None:
        baseline_label = f"{base.name} before training ({saved.baseline.pooler})"
        dev_rows.append(Row(baseline_label, format_scores(saved.baseline.dev)))
    label = f"this model ({saved.pooler})"
    dev_rows.append(Row(label, format_scores(saved.dev)))
    tests = {baseline_label: exported.results.baseline, label: exported.results.model}
    test_rows = [Row(name, format_scores(scores_by_column(results))) for name, results in tests.items() if results]
    card = ModelCard.from_template(
        metadata(saved, base, exported),
        template_path=str(TEMPLATE),
        title=exported.name,
        base=_describe_base(base),
        unchanged=saved.interpolation == 0,
        size=exported.truncate_dim or whole,
        whole_size=whole,
        is_cut=_is_cut(saved, exported),
        facts={name: _cell(value) for name, value in _facts(saved, base, exported).items()},
        dev_table=_markdown(dev_rows) if saved.dev else "",
        verdict=_sentence(saved.verdict.replace(config.model.name_or_path, base.name)),
        test_table=_markdown(test_rows),
        not_official=exported.results.model.get("not_official", {}),
        sentences=_SENTENCES,
        place=exported.name if exported.on_hub else PLACE,
        max_length=saved.transformer_config.max_length,
        pooling=_pooling_in_torch(saved, exported.truncate_dim),
        two_layers=saved.pooler in _LAYERS,
        matryoshka=config.matryoshka.sizes,
        onnx=exported.onnx,
        graph=GRAPH,
        on_hub=exported.on_hub,
        command=recipe_of(config).command,
        configuration=json.dumps(portable(config), indent=2),
        citations=[BIBTEX[paper] for paper in papers_of(config)],
        checks=exported.checks,
        versions=", ".join(f"{package} {version}" for package, version in exported.versions.items()),
    )
    return f"{card.content.rstrip()}\n"


def metadata(saved: SavedEncoder, base: BaseModel, exported: Exported) -> ModelCardData:
    """Return the metadata for the hub. What is not known is left out."""
    text = training_text(saved.config)
    results = [] if _is_cut(saved, exported) else dev_results(saved)  # dev scores are those of whole embeddings
    results += official_results(exported.results.model)
    language = exported.language or base.language or ([_LANGUAGES[text]] if text in _LANGUAGES else [])
    license = {"license": exported.license} if exported.license else dict(base.license)
    optional = {"matryoshka": bool(saved.config.matryoshka.sizes), "onnx": exported.onnx}
    return ModelCardData(
        base_model=base.hub_id or None,
        datasets=[_DATASETS[text]] if text in _DATASETS else None,
        eval_results=results or None,
        language=(language[0] if len(language) == 1 else list(language)) or None,
        library_name="sentence-transformers",
        model_name=exported.name.rpartition("/")[2] if results else None,
        pipeline_tag="sentence-similarity",
        tags=[*_TAGS, *(tag for tag, applies in optional.items() if applies)],
        license=license.get("license"),
        license_name=license.get("license_name"),
        license_link=license.get("license_link"),
    )


def _is_cut(saved: SavedEncoder, exported: Exported) -> bool:
    return exported.truncate_dim not in (None, saved.transformer_config.hidden_size)


def _describe_base(base: BaseModel) -> str:
    if base.name == base.hub_id:
        return f"[{base.name}](https://huggingface.co/{base.name})"
    return f"`{base.name}` (a local checkpoint{f', derived from {base.hub_id}' if base.hub_id else ''})"


def _facts(saved: SavedEncoder, base: BaseModel, exported: Exported) -> dict[str, Any]:
    config, whole, cut = saved.config, saved.transformer_config.hidden_size, exported.truncate_dim
    facts = {
        "starting checkpoint": base.name,
        "training text": training_text(config),
        "loss": " + ".join(f"{each.weight:g} {name}" for name, each in config.losses.items()),
        "pooler": saved.pooler,
        "projector": config.model.projector + (" (training only)" if config.model.projector_train_only else ""),
        "batch size, maximum length in training": f"{config.train.batch_size}, {config.data.max_length} tokens",
        "learning rate, seed": f"{config.optim.learning_rate:g}, {config.train.seed}",
        "weights": origin(saved.interpolation, saved.step),
        "chosen by": saved.dev_metric,
        "embedding size": f"{cut}, cut from {whole}" if cut else str(whole),
    }
    if sizes := config.matryoshka.sizes:
        facts["sizes that it was trained for"] = ", ".join(map(str, [*sizes, whole]))
    facts["longest input"] = f"{saved.transformer_config.max_length} tokens; longer texts are cut"
    return facts


_LAYERS = {"avg_top2": (-2, -1), "avg_first_last": (0, -1), "avg_first_block_last": (1, -1)}


def _pooling_in_torch(saved: SavedEncoder, truncate_dim: int | None) -> str | None:
    """Return the code from the model's outputs to embeddings, or None if transformers has no such pooler."""
    lines = ["embeddings = outputs.pooler_output"]
    if saved.pooler == "cls":
        if not families.find(saved.transformer_config.family).pooler:
            return None
    elif saved.pooler == "cls_before_pooler":
        lines = ["embeddings = outputs.last_hidden_state[:, 0]"]
    else:
        layers = [f"outputs.hidden_states[{layer}]" for layer in _LAYERS.get(saved.pooler, ())]
        states = f"({' + '.join(layers)}) / 2" if layers else "outputs.last_hidden_state"
        lines = [
            f"states = {states}",
            'mask = inputs["attention_mask"].unsqueeze(-1)',
            "embeddings = (states * mask).sum(dim=1) / mask.sum(dim=1)",
        ]
    return "\n".join([*lines, *([f"embeddings = embeddings[:, :{truncate_dim}]"] if truncate_dim else [])])


def _markdown(rows: Sequence[Row]) -> str:
    columns = list(dict.fromkeys(column for row in rows for column in row.cells))
    return table(columns, rows, "markdown") if rows else ""


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def _sentence(text: str) -> str:
    return f"{text.rstrip('.')}." if text else ""


def papers_of(config: Config) -> list[str]:
    """Return the keys of `BIBTEX` for the methods that a run uses; those of its losses come first."""
    papers = [paper for objective in config.losses.values() for paper in objective.papers]
    papers += ["matryoshka"] * bool(config.matryoshka.sizes)
    papers += ["contriever"] * (config.data.pairs == "crops")
    papers += ["wise_ft"] * bool(config.eval.interpolate)
    return list(dict.fromkeys(papers))


# The recipe: a run's configuration without local paths


class Recipe(NamedTuple):
    """A run as its difference from a shipped configuration.

    Attributes:
        config: Name of the shipped configuration that differs in the fewest keys.
        changed: The keys that differ, with the run's values.
        subcommand: The command of `diffcse` for such runs.
    """

    config: str
    changed: Mapping[str, Any]
    subcommand: str = "train"

    @property
    def command(self) -> str:
        """The command that trains with the same configuration, one override per line."""
        overrides = (f"--config.{key}={shlex.quote(str(value))}" for key, value in self.changed.items())
        return " \\\n    ".join([f"diffcse {self.subcommand} --config {self.config}", *overrides])


def recipe_of(config: Config) -> Recipe:
    """Return the recipe of a run, without the keys that depend on the machine."""
    values = flat(portable(config))
    subcommand = "finetune" if config.needs("labels") else "train"
    recipes = [Recipe(name, _changed(values, name), subcommand) for name in shipped_names()]
    return min(recipes, key=lambda recipe: (len(recipe.changed), recipe.config))


def shipped_names() -> list[str]:
    """Return the names of the shipped configurations."""
    return sorted(path.stem for path in SHIPPED.glob("*.py"))


def training_text(config: Config) -> str:
    """Return the name of the training data."""
    own = "; ".join(filter(None, (objective.data_description for objective in config.losses.values())))
    return own or portable(config)["data"]["train_file"]


def portable(config: Config) -> dict[str, Any]:
    """Return the configuration as nested dicts, with the last part of each local path in place of the path."""
    return {key: _without_folder(key, value) for key, value in config.to_dict().items()}


def _without_folder(key: str, value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_folder(name, each) for name, each in value.items()}
    if isinstance(value, tuple):
        return tuple(_without_folder(key, item) for item in value)
    if not isinstance(value, str):
        return value
    if key.endswith("_dir"):
        return ""
    return PurePath(value.replace("\\", "/")).name if key.endswith("file") or is_local(value) else value


def _changed(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    shipped = flat(Config.from_dict(shipped_config(name).to_dict()).to_dict())
    return {key: value for key, value in values.items() if key not in machine_keys() and shipped.get(key) != value}


# Scores


def recorded_results(
    source: Path, saved: SavedEncoder, truncate_dim: int | None, files: Sequence[Path]
) -> RecordedResults:
    """Return the results that `diffcse evaluate` has written for the exported model; empty if there are none.

    Args:
        source: The run's folder, or the checkpoint in it, that is exported.
        saved: The encoder.
        truncate_dim: The size that its embeddings are cut to.
        files: The `results.json` files to look in. If empty, those in the run's folder.

    Raises:
        ConfigError: The given files have no results of this model.
    """
    run = find_run(source) or source
    rows = [row for path in files or _result_files(run) for row in _read_rows(path)]
    ours = {source.resolve()} | ({(run / "export").resolve()} if source == run else set())
    model = next(
        (
            row
            for row in rows
            if row["pooler"] == saved.pooler
            and row.get("truncate_dim") == truncate_dim
            and expand_path(row["model"]).resolve() in ours
        ),
        None,
    )
    if model is None:
        if files:
            raise ConfigError(
                f"--results: {', '.join(map(str, files))} has no test results of {source} with the pooler "
                f"{saved.pooler}. Write them with: diffcse evaluate --model {source} --output FILE"
            )
        return RecordedResults({}, None)
    baseline = saved.baseline
    for row in rows:
        if row["model"] == saved.config.model.name_or_path and (baseline is None or row["pooler"] == baseline.pooler):
            return RecordedResults(model, row)
    return RecordedResults(model, None)


def _result_files(run: Path) -> list[Path]:
    """Return the files of results in a run's folder that are newer than its selection."""
    selection = run / SELECTION
    since = selection.stat().st_mtime if selection.is_file() else 0.0
    return [path for name in _RESULT_FILES if (path := run / name).is_file() and path.stat().st_mtime >= since]


def _read_rows(path: Path) -> list[Results]:
    """Return the test results in a file that are comparable with published tables, one row per model."""
    content = read_json_object(path)
    comparable = {"mode": "test", "similarity": "cosine", "aggregation": "all", "post": None}
    return [
        row
        for row in content.get("models", [content])
        if isinstance(row, dict)
        and {"model", "pooler", "tasks"} <= row.keys()
        and all(row.get(key) == value for key, value in comparable.items())
    ]


def dev_results(saved: SavedEncoder) -> list[EvalResult]:
    """Return the dev scores as results of metadata."""
    results: dict[tuple, EvalResult] = {}  # the drift check may be the dev metric as well
    for metric, score in saved.dev.items():
        name, _, k = metric.partition("_recall@")
        if data := _dev_data(name, saved.config):
            kind = "spearman" if name.endswith("spearman") else f"recall@{k}" if k else "mrr"
            results.setdefault((kind, *data), _result(kind, score, *data))
    return list(results.values())


def official_results(results: Results) -> list[EvalResult]:
    """Return test scores as results of metadata."""
    not_official = results.get("not_official", {})
    found = []
    for task, scores in results.get("tasks", {}).items():
        data, name = _HUB_DATA.get(task, _UNKNOWN), f"SentEval {task}"
        if task in not_official:
            data, name = _UNKNOWN, f"{name}, not the official data: {not_official[task]}"
        found += [_result(kind, scores[key], data, name, "test") for kind, key in _METRICS.items() if key in scores]
    return found


def _dev_data(metric: str, config: Config) -> tuple[str, str, str] | None:
    """Return hub id, name and split of a dev metric's data, or None if it is not the score of a data set."""
    text, pairs = PurePath(config.data.train_file).name, PurePath(config.eval.pairs_file).name
    if metric in ("stsb_spearman", "guard_stsb_spearman"):
        return _HUB_DATA["STSBenchmark"], "STS-B, dev", "validation"
    if metric == "sickr_spearman":
        return _UNKNOWN, "SICK-R, dev (trial)", "validation"
    if metric in ("pairs_spearman", "pairs_retrieval"):
        docstrings = "first sentences and rests of the docstrings of held-out functions"
        return _UNKNOWN, docstrings if config.eval.pairs_file == "docstrings" else f"pairs of {pairs}", "validation"
    if metric in _RETRIEVAL:
        held_out = "held-out documents of" if config.data.held_out else "the training text"
        return _UNKNOWN, f"{_RETRIEVAL[metric]} of {held_out} {text}", "validation"
    return None


def _result(kind: str, score: float, data: str, name: str, split: str) -> EvalResult:
    """Return one result. sentence-transformers' scale is 1, not 100."""
    label = "MRR" if kind == "mrr" else kind.capitalize()
    task, task_name, metric, metric_name = {
        "spearman": ("semantic-similarity", "Semantic Similarity", "spearman_cosine", "Spearman Cosine"),
        "accuracy": ("text-classification", "Classification of frozen embeddings", "accuracy", "Accuracy"),
    }.get(kind, ("information-retrieval", "Information Retrieval", f"cosine_{kind}", f"Cosine {label}"))
    return EvalResult(
        task_type=task,
        task_name=task_name,
        dataset_type=data,
        dataset_name=name,
        dataset_split=split,
        metric_type=metric,
        metric_name=metric_name,
        metric_value=round(score / 100, 6),
    )
