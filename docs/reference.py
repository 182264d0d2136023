"""The tables of configuration keys in docs/keys.md, and names for docs/python.md.

They are made from the configuration itself.

python docs/reference.py            prints them
python docs/reference.py --write    rewrites them in docs/keys.md (`make reference`)
"""

import argparse
import dataclasses
import inspect
import re
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path

import diffcse_jax
from diffcse_jax.config import Config, known_keys
from diffcse_jax.losses import Loss
from diffcse_jax.losses.finetune import LabelledTask

PAGE = Path(__file__).with_name("keys.md")
BEGIN, END = "<!-- keys: written by docs/reference.py -->", "<!-- end of keys -->"
LOSSES = (
    "contrastive",
    "diffcse",
    "diffcse_variants",
    "decorrelation",
    "ranking",
    "masked_lm",
    "finetune",
)
TITLES = {
    "model": "The encoder, its sentence embedding and its dropout.",
    "generator": "The frozen masked LM that replaces masked tokens.",
    "data": "Text, pairs and held-out documents.",
    "train": "Batches, steps and the seed.",
    "optim": "AdamW and its learning rate.",
    "matryoshka": "Embeddings that can be shortened.",
    "eval": "Dev metrics, the selected model and the drift check.",
    "mesh": "Devices.",
}
# Modules, and the names in them that other code may use. No names: the whole module.
MODULES: dict[str, dict[str, Sequence[str]]] = {
    "Losses": {
        "diffcse_jax.losses": ("Loss", "Network", "PretrainedCheckpoints", "RunInfo"),
        **{f"diffcse_jax.losses.{name}": () for name in LOSSES},
    },
    "Evaluation": {
        "diffcse_jax.evaluation": ("EvaluationSettings",),
        "diffcse_jax.evaluation.runner": ("evaluate_model",),
        "diffcse_jax.evaluation.retrieval": ("retrieval_scores",),
        "diffcse_jax.models.pooling": (),
    },
    "Export": {"diffcse_jax.export": ("export",)},
    "Studies and fine-tuning": {
        "diffcse_jax.apps.study": ("Study", "settings_of"),
        "diffcse_jax.apps.finetune": ("TaskModel",),
    },
    "Errors": {"diffcse_jax.errors": ()},
}


def keys_table() -> str:
    """Return all configuration keys as Markdown, with a table for each group."""
    lines: list[str] = []
    group = None
    for key, field in known_keys().items():
        found = key.rpartition(".")[0]
        if found != group:
            group = found
            lines += ["", *_heading(group)]
        lines.append(_row(key, field))
    lines += [
        "",
        "## `finetune.tasks.NAME`",
        "",
        "A labelled task. See [fine-tuning](finetuning.md).",
        "",
        *_HEADER,
    ]
    lines += [
        _row(f"finetune.tasks.NAME.{field.name}", field)
        for field in dataclasses.fields(LabelledTask)
    ]
    return "\n".join([*lines[1:], ""])


_HEADER = ("| key | default | accepts | meaning |", "|---|---|---|---|")


def _heading(group: str) -> list[str]:
    if not group:
        return ["## No group", "", *_HEADER]
    loss = getattr(Config(), group, None)
    if isinstance(loss, Loss):
        about = " ".join((inspect.getdoc(loss) or "").partition("\n\n")[0].split())
        about = f"{_escaped(about)} See [losses](losses.md)."
    else:
        about = TITLES[group]
    return [f"## `{group}`", "", about, "", *_HEADER]


def _row(key: str, field: dataclasses.Field) -> str:
    default = f"`{field.default!r}`" if field.default != "" else "`''`"
    meaning = _sentence(field.metadata["doc"])
    if field.metadata["changes"] != "training":
        meaning += " *May change on resume.*"
    return f"| `{key}` | {_escaped(default)} | {_escaped(accepted(field))} | {meaning} |"


def accepted(field: dataclasses.Field) -> str:
    """Return the type of a key, or its choices, and its range."""
    choices, low, high = (field.metadata[name] for name in ("choices", "low", "high"))
    item = typing.get_args(field.type)
    kind = f"tuple of {item[0].__name__}" if item else field.type.__name__  # type: ignore[union-attr]
    if choices:
        names = ", ".join(f"`{choice}`" for choice in choices if choice)
        return f"tuple of {names}" if item else names
    bounds = [
        f"{word} {bound:g}" for word, bound in (("from", low), ("to", high)) if bound is not None
    ]
    return " ".join([kind, *bounds])


def _sentence(text: str) -> str:
    text = text[:1].upper() + text[1:] if not text.startswith("`") else text
    return _escaped(text) + ("" if text.endswith(".") else ".")


def _escaped(text: str) -> str:
    """Escape what Markdown would read as markup outside of backquotes, and `|` everywhere."""
    parts = re.split(r"(`[^`]*`)", text.replace("|", r"\|"))
    return "".join(
        part if index % 2 else part.replace("*", r"\*").replace("[", r"\[").replace("<", r"\<")
        for index, part in enumerate(parts)
    )


def python_directives() -> str:
    """Return Sphinx directives for all public names and modules."""
    whole = {
        module for modules in MODULES.values() for module, names in modules.items() if not names
    }
    lines = ["## The package", ""]
    own = [
        name for name in diffcse_jax.__all__ if getattr(diffcse_jax, name).__module__ not in whole
    ]
    lines += _directives("diffcse_jax", own)
    for title, modules in MODULES.items():
        lines += [f"## {title}", ""]
        for module, names in modules.items():
            lines += _directives(module, names)
    return "\n".join(lines)


def _directives(module: str, names: Sequence[str]) -> Iterator[str]:
    if not names:
        yield f"### `{module}`\n"
    yield "```{eval-rst}"
    if not names:
        yield f".. automodule:: {module}\n   :members:\n"
    for name in names:
        kind = "class" if name[0].isupper() else "function"
        yield f".. auto{kind}:: {module}.{name}" + ("\n   :members:\n" if kind == "class" else "\n")
    yield "```\n"


def rewritten(text: str) -> str:
    """Return the text of the page with its tables made anew."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin, f"docs/keys.md has no line {BEGIN}"
    assert end, f"docs/keys.md has no line {END}"
    return f"{before}{begin}\n\n{keys_table()}\n{end}{after}"


def main() -> None:
    """Print or rewrite the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="rewrite docs/keys.md")
    if parser.parse_args().write:
        PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(keys_table())


if __name__ == "__main__":
    main()
