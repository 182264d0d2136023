"""The text of a model card, and its metadata as the hub reads them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from huggingface_hub import ModelCardData

from diffcse_jax.card import recipe, scores
from diffcse_jax.card.citations import BIBTEX, papers_of
from diffcse_jax.evaluation.results import Row, format_scores, table
from diffcse_jax.io import HUB_REPOSITORY
from diffcse_jax.models import families
from diffcse_jax.onnx_graph import GRAPH
from diffcse_jax.run_folder.folder import BaseModel
from diffcse_jax.run_folder.records import origin
from diffcse_jax.run_folder.saved_encoder import SavedEncoder

PLACE = "path/to/this/folder"  # in the usage, of a model without a name on the hub
SENTENCES = 'sentences = ["A man plays the guitar.", "Someone makes music."]'

_KNOWN_TEXT = {"wiki1m": "en", "docstrings": "en"}  # texts by their names, and their languages
_DATASETS = {"wiki1m": HUB_REPOSITORY}


class Exported(NamedTuple):
    """An export, as its card tells of it.

    Attributes:
        name: of the model in metadata: its id on the hub, or a word for it.
        on_hub: the name is its id on the hub.
        truncate_dim: the cut of its vectors that is recorded.
        recorded: its results on test data.
        checks: sentences on how its readers agree with the trained model.
        versions: of the software that wrote it.
        license: in place of the base model's.
        language: in place of the base model's.
        onnx: it holds ONNX files.
    """

    name: str
    on_hub: bool
    truncate_dim: int | None
    recorded: scores.Recorded
    checks: Sequence[str]
    versions: Mapping[str, str]
    license: str | None = None
    language: Sequence[str] = ()
    onnx: bool = False


def model_card(saved: SavedEncoder, base: BaseModel, exported: Exported) -> str:
    """The folder's README.md: metadata as YAML, then Markdown.

    Args:
        saved: the encoder that is exported.
        base: the checkpoint that it was trained from.
        exported: what else there is to tell.
    """
    sections = [
        f"# {exported.name}",
        _summary(saved, base, exported),
        _facts(saved, base, exported),
        _scores(saved, base, exported),
        _usage(saved, exported),
        _training(saved),
        _citation(saved),
        _checks(exported),
    ]
    body = "\n\n".join(section for section in sections if section)
    return f"---\n{metadata(saved, base, exported).to_yaml()}\n---\n\n{body}\n"


def metadata(saved: SavedEncoder, base: BaseModel, exported: Exported) -> ModelCardData:
    """The metadata; what is not known is left out."""
    text = recipe.training_text(saved.config)
    results = [] if _is_cut(saved, exported) else scores.dev_results(saved)  # which are those of whole vectors
    results += scores.results_of_test(exported.recorded.model)
    language = exported.language or base.language or ([_KNOWN_TEXT[text]] if text in _KNOWN_TEXT else [])
    license = {"license": exported.license} if exported.license else dict(base.license)
    tags = ["sentence-transformers", "feature-extraction", "sentence-similarity", "transformers", "diffcse", "jax"]
    if saved.config.matryoshka.sizes:
        tags.append("matryoshka")
    if exported.onnx:
        tags.append("onnx")
    return ModelCardData(
        base_model=base.hub_id or None,
        datasets=[_DATASETS[text]] if text in _DATASETS else None,
        eval_results=results or None,
        language=(language[0] if len(language) == 1 else list(language)) or None,
        library_name="sentence-transformers",
        model_name=exported.name.rpartition("/")[2] if results else None,
        pipeline_tag="sentence-similarity",
        tags=tags,
        license=license.get("license"),
        license_name=license.get("license_name"),
        license_link=license.get("license_link"),
    )


def _is_cut(saved: SavedEncoder, exported: Exported) -> bool:
    """True if vectors are shorter than those that dev scores were measured with."""
    return exported.truncate_dim not in (None, saved.transformer_config.hidden_size)


def _summary(saved: SavedEncoder, base: BaseModel, exported: Exported) -> str:
    start = f"[{base.name}](https://huggingface.co/{base.name})" if base.name == base.hub_id else f"`{base.name}`"
    if base.name != base.hub_id:
        start += f", a checkpoint that names {base.hub_id} as its origin," if base.hub_id else ", a folder,"
    size = exported.truncate_dim or saved.transformer_config.hidden_size
    told = f"A sentence-transformers model: it maps texts to vectors of {size} numbers, which are compared by cosine."
    if saved.interpolation == 0:
        return f"{told} It is {start} itself: no training of this run gave better dev scores."
    return f"{told} It was trained from {start} with diffcse_jax."


def _facts(saved: SavedEncoder, base: BaseModel, exported: Exported) -> str:
    config, whole = saved.config, saved.transformer_config.hidden_size
    cut = exported.truncate_dim
    facts = {
        "start": base.name,
        "training text": recipe.training_text(config),
        "objective": " + ".join(f"{each.weight:g} {name}" for name, each in config.objectives.items()),
        "pooler": saved.pooler,
        "projector": config.model.projector + (" (training only)" if config.model.projector_train_only else ""),
        "batch size, maximal length in training": f"{config.train.batch_size}, {config.data.max_length} tokens",
        "learning rate, seed": f"{config.optim.learning_rate:g}, {config.train.seed}",
        "weights": origin(saved.interpolation, saved.step),
        "chosen by": saved.dev_metric,
        "dimension": f"{cut}, cut from {whole}" if cut else str(whole),
    }
    if sizes := config.matryoshka.sizes:
        facts["dimensions that it was trained for"] = ", ".join(map(str, [*sizes, whole]))
    facts["longest input"] = f"{saved.transformer_config.max_length} tokens; what is longer is cut"
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {_cell(value)} |" for name, value in facts.items())])


def _scores(saved: SavedEncoder, base: BaseModel, exported: Exported) -> str:
    rows = []
    start = base.name
    if saved.baseline is not None:
        start = f"{base.name}, the start ({saved.baseline.pooler})"
        rows.append(Row(start, format_scores(saved.baseline.dev)))
    ours = f"this model ({saved.pooler})"
    rows.append(Row(ours, format_scores(saved.dev)))
    parts = []
    if saved.dev:
        columns = list(dict.fromkeys(column for row in rows for column in row.cells))
        whole = f", with whole vectors of {saved.transformer_config.hidden_size} numbers"
        heading = f"On dev data, which chose the checkpoint{whole if _is_cut(saved, exported) else ''}:"
        parts.append(f"{heading}\n\n{table(columns, rows, 'markdown')}")
    if saved.verdict:
        parts.append("The run's verdict: " + saved.verdict.replace(saved.config.model.name_or_path, base.name) + ".")
    if tests := scores.rows_of(exported.recorded, start, ours):
        columns = list(dict.fromkeys(column for row in tests for column in row.cells))
        parts.append("On test data:\n\n" + table(columns, tests, "markdown"))
        unlike = exported.recorded.model.get("not_official", {})
        parts += [f"{task} is not the official data: {reason}." for task, reason in unlike.items()]
    if not parts:
        return ""
    legend = "Scores are 100 x the coefficient, the reciprocal rank or the share; `uniformity` is as it is."
    return "\n\n".join(["## Scores", *parts, legend])


def _usage(saved: SavedEncoder, exported: Exported) -> str:
    place = exported.name if exported.on_hub else PLACE
    parts = [
        "## Use",
        "With sentence-transformers:",
        _python(
            "from sentence_transformers import SentenceTransformer",
            "",
            SENTENCES,
            f'model = SentenceTransformer("{place}")',
            "vectors = model.encode(sentences)",
            "print(model.similarity(vectors, vectors))",
        ),
        "With diffcse_jax, without PyTorch:",
        _python(
            "from diffcse_jax import SentenceEncoder",
            "",
            SENTENCES,
            f'encoder = SentenceEncoder.from_pretrained("{place}")',
            "vectors = encoder.encode(sentences)",
            "print(encoder.similarity(sentences, sentences))",
        ),
        "With transformers:",
        _in_transformers(saved, place, exported.truncate_dim),
    ]
    if sizes := saved.config.matryoshka.sizes:
        shown = ", ".join(map(str, sizes))
        parts.append(
            f"Vectors can be cut to their first {shown} numbers, for which the model was trained: "
            f"`SentenceTransformer(..., truncate_dim={sizes[0]})`, "
            f"`SentenceEncoder.from_pretrained(..., truncate_dim={sizes[0]})`."
        )
    if exported.onnx:
        parts += ["With ONNX Runtime:", _in_onnxruntime(saved, exported)]
    return "\n\n".join(parts)


def _in_transformers(saved: SavedEncoder, place: str, cut: int | None) -> str:
    """The steps from the model's outputs to the vectors."""
    has_pooler = bool(families.find(saved.transformer_config.family).pooler)
    if saved.pooler == "cls" and not has_pooler:
        return "This architecture has no pooler in transformers; use sentence-transformers, which reads it."
    layers = {"avg": None, "avg_top2": (-2, -1), "avg_first_last": (0, -1), "avg_first_block_last": (1, -1)}
    steps = {"cls": ["vectors = outputs.pooler_output"], "cls_before_pooler": ["vectors = states[:, 0]"]}.get(
        saved.pooler
    ) or [
        'mask = inputs["attention_mask"].unsqueeze(-1)',
        "vectors = (states * mask).sum(dim=1) / mask.sum(dim=1)",
    ]
    pair = layers.get(saved.pooler)
    if saved.pooler != "cls":
        states = "outputs.last_hidden_state"
        if pair:
            states = " + ".join(f"outputs.hidden_states[{layer}]" for layer in pair)
            states = f"({states}) / 2"
        steps.insert(0, f"states = {states}")
    if cut:
        steps.append(f"vectors = vectors[:, :{cut}]")
    length = saved.transformer_config.max_length
    return _python(
        "import torch",
        "from transformers import AutoModel, AutoTokenizer",
        "",
        SENTENCES,
        f'tokenizer = AutoTokenizer.from_pretrained("{place}")',
        f'model = AutoModel.from_pretrained("{place}")',
        f'inputs = tokenizer(sentences, padding=True, truncation=True, max_length={length}, return_tensors="pt")',
        "with torch.inference_mode():",
        f"    outputs = model(**inputs{', output_hidden_states=True' if pair else ''})",
        *steps,
    )


def _in_onnxruntime(saved: SavedEncoder, exported: Exported) -> str:
    """The same with the graph in `onnx/`, in which pooling and scaling to unit length are included."""
    length, name = saved.transformer_config.max_length, exported.name
    file, download = f'"{PLACE}/{GRAPH}"', []
    if exported.on_hub:
        file, download = f'hf_hub_download("{name}", "{GRAPH}")', ["from huggingface_hub import hf_hub_download"]
    return _python(
        *download,
        "from onnxruntime import InferenceSession",
        "from transformers import AutoTokenizer",
        "",
        SENTENCES,
        f'tokenizer = AutoTokenizer.from_pretrained("{name if exported.on_hub else PLACE}")',
        f"session = InferenceSession({file})",
        f'inputs = tokenizer(sentences, padding=True, truncation=True, max_length={length}, return_tensors="np")',
        "inputs = {each.name: inputs[each.name] for each in session.get_inputs()}",
        '(vectors,) = session.run(["sentence_embedding"], inputs)  # of unit length',
    )


def _training(saved: SavedEncoder) -> str:
    made = recipe.recipe_of(saved.config)
    rows = [f"| `{key}` | {_cell(repr(value))} |" for key, value in made.changed.items()]
    values = json.dumps(recipe.portable(saved.config), indent=2)
    parts = [
        "## Training",
        "The command that repeats it, started where the files that it names are:",
        f"```bash\n{made.command}\n```",
    ]
    if rows:
        heading = f"| key | value, where it is not that of the configuration `{made.config}` |\n|---|---|"
        parts.append("\n".join([heading, *rows]))
    parts.append("<details><summary>The whole configuration</summary>\n\n" + f"```json\n{values}\n```\n\n</details>")
    return "\n\n".join(parts)


def _citation(saved: SavedEncoder) -> str:
    papers = papers_of(saved.config)
    if not papers:
        return ""
    entries = "\n\n".join(BIBTEX[paper] for paper in papers)
    return f"## Citation\n\nThe methods that this training used:\n\n```bibtex\n{entries}\n```"


def _checks(exported: Exported) -> str:
    versions = ", ".join(f"{package} {version}" for package, version in exported.versions.items())
    return "\n\n".join(["## Checks", *exported.checks, f"Written with {versions}."])


def _cell(value: Any) -> str:
    """A value in a Markdown table."""
    return str(value).replace("|", "\\|").replace("\n", " ")


def _python(*lines: str) -> str:
    return "\n".join(["```python", *lines, "```"])
