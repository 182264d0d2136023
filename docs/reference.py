"""What pages repeat of the code: configuration keys, stable names, and names for docs/python.md.

python docs/reference.py            prints the keys and the stable names
python docs/reference.py --write    rewrites them in docs/keys.md and docs/stability.md
                                    (`make reference`)
"""

import argparse
import dataclasses
import inspect
import pkgutil
import re
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import diffcse_jax
from diffcse_jax.cli import COMMANDS, flag_of, options_of
from diffcse_jax.config import Config, known_keys
from diffcse_jax.losses import Loss
from diffcse_jax.losses.finetune import LabelledTask

BEGIN, END = "<!-- written by docs/reference.py -->", "<!-- end of what is written -->"
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
# Functions and classes, and the members of classes that other code may call. Of other classes, the
# arguments alone are stable.
STABLE = (
    *(f"diffcse_jax.{name}" for name in diffcse_jax.__all__),
    "diffcse_jax.search.index.Index",
    "diffcse_jax.apps.study.Study",
    "diffcse_jax.evaluation.EvaluationSettings",
    "diffcse_jax.evaluation.runner.evaluate_model",
    "diffcse_jax.evaluation.retrieval.retrieval_scores",
    "diffcse_jax.export.export",
)
STABLE_MEMBERS = {
    "Callback": ("on_start", "on_step", "on_evaluation", "on_save", "on_end"),
    "Index": ("add", "load", "remove", "save", "search", "update"),
    "SentenceEncoder": (
        *("from_pretrained", "encode", "encode_document", "encode_query", "similarity"),
        *("similarity_pairwise", "get_embedding_dimension", "max_seq_length", "build_index"),
        *("search", "search_hits", "save_index", "load_index", "index"),
    ),
    "Config": ("from_dict", "to_dict"),
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


def stable_names() -> str:
    """Return the signatures of what is stable: names in Python, and commands with their options."""
    lines = ["```text"]
    for name in STABLE:
        found = pkgutil.resolve_name(name)
        lines.append(_signature(name, found))
        for member in STABLE_MEMBERS.get(found.__name__, ()):
            lines.append("    " + _signature(f".{member}", inspect.getattr_static(found, member)))
    lines += ["```", "", "```text"]
    for name, command in COMMANDS.items():
        flags = " ".join(flag_of(field) for field in options_of(command.options))
        lines.append(f"diffcse {name} {flags}")
    return "\n".join([*lines, "```", ""])


def _signature(name: str, each: Any) -> str:
    """Return a name with its arguments, without their types, and `...` for defaults of our own."""
    if isinstance(each, property) or (isinstance(each, type) and issubclass(each, BaseException)):
        return name
    function = each.__func__ if isinstance(each, classmethod) else each
    arguments = []
    for argument in inspect.signature(function).parameters.values():
        is_plain = isinstance(argument.default, str | int | float | tuple | None)
        default = argument.default if is_plain or argument.default is argument.empty else _DOTS
        if argument.name not in ("self", "cls"):
            arguments.append(argument.replace(annotation=argument.empty, default=default))
    return name + str(inspect.Signature(arguments))


class _Dots:
    def __repr__(self) -> str:
        return "..."


_DOTS = _Dots()


WRITTEN = {"keys.md": keys_table, "stability.md": stable_names}


def rewritten(page: str, text: str) -> str:
    """Return the text of a page in this folder, with what is written by this script made anew."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin, f"docs/{page} has no line {BEGIN}"
    assert end, f"docs/{page} has no line {END}"
    return f"{before}{begin}\n\n{WRITTEN[page]()}\n{end}{after}"


def main() -> None:
    """Print or rewrite the pages."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="rewrite the pages")
    is_to_write = parser.parse_args().write
    for page, content in WRITTEN.items():
        file = Path(__file__).with_name(page)
        if is_to_write:
            file.write_text(rewritten(page, file.read_text(encoding="utf-8")), encoding="utf-8")
        else:
            print(content())


if __name__ == "__main__":
    main()
