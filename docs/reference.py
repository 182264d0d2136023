"""Reference text in Markdown that is made of the package itself, so that it cannot be out of date.

python docs/reference.py        prints the configuration's keys
"""

import dataclasses
import inspect
import typing
from collections.abc import Iterator

import diffcse_jax
from diffcse_jax.config import Config, known_keys
from diffcse_jax.losses.base import Loss

LOSSES = ("contrastive", "diffcse", "diffcse_variants", "decorrelation", "ranking", "masked_lm", "finetune")
TITLES = {
    "model": "the encoder, its sentence vector and its dropout",
    "generator": "the frozen masked LM that fills masked tokens",
    "data": "text, pairs and what is held out",
    "train": "batches, steps and the seed",
    "optim": "AdamW and its learning rate",
    "matryoshka": "vectors whose beginnings are vectors",
    "eval": "dev metric, selection and guard",
    "mesh": "devices",
}
# Modules and names of theirs that are meant to be used from other code, beside those of the package itself.
MODULES = {
    "Losses": {
        "diffcse_jax.losses.base": ("Loss", "Network", "Checkpoints", "RunInfo"),
        **{f"diffcse_jax.losses.{name}": () for name in LOSSES},
    },
    "Evaluation": {
        "diffcse_jax.evaluation.runner": ("Settings", "evaluate"),
        "diffcse_jax.evaluation.retrieval": ("retrieval_scores",),
        "diffcse_jax.models.pooling": (),
    },
    "Export": {"diffcse_jax.export": ("export",)},
    "Studies": {"diffcse_jax.apps.study": ("Study", "settings_of")},
    "Errors": {"diffcse_jax.errors": ()},
}


def configuration_keys() -> str:
    """Every key under the heading of its group: type, default, accepted values and documentation."""
    lines: list[str] = []
    group = None
    for key, field in known_keys().items():
        found = key.rpartition(".")[0]
        if found != group:
            group = found
            lines += [f"## {heading(group)}", ""]
        lines += [f"```{{confval}} {key}", facts(field), "", sentence(field.metadata["doc"]), "```", ""]
    return "\n".join(lines)


def heading(group: str) -> str:
    """The heading of a group of keys: its name and what it is about."""
    if not group:
        return "Without a group"
    if isinstance(loss := getattr(Config(), group, None), Loss):
        first, *_ = (inspect.getdoc(loss) or "").splitlines()
        return f"`{group}`: {first[:1].lower()}{first[1:].partition('. ')[0].rstrip('.')}"
    return f"`{group}`: {TITLES[group]}" if group in TITLES else f"`{group}`"


def type_name(kind: typing.Any) -> str:
    """A key's type as users write it: `tuple of float`."""
    item = typing.get_args(kind)
    return f"tuple of {item[0].__name__}" if item else kind.__name__


def facts(field: dataclasses.Field) -> str:
    """A key's type, default and, where they are fewer than those of its type, the values that it accepts."""
    choices, low, high = (field.metadata[name] for name in ("choices", "low", "high"))
    found = f"{type_name(field.type)}, default `{field.default!r}`"
    if choices:
        found += "; one of " + ", ".join(f"`{choice or repr(choice)}`" for choice in choices)
    bounds = [f"{word} {bound}" for word, bound in (("from", low), ("to", high)) if bound is not None]
    return f"*{'; '.join([found, *([' '.join(bounds)] if bounds else [])])}*"


def sentence(text: str) -> str:
    """With a capital letter and a full stop, and with nothing that Markdown reads as markup but its backquotes."""
    text = text[:1].upper() + text[1:] if not text.startswith("`") else text
    return text.replace("*", r"\*").replace("[", r"\[") + ("" if text.endswith(".") else ".")


def python_names() -> str:
    """The public names of the package, then those of modules, as directives of autodoc."""
    whole = {module for modules in MODULES.values() for module, names in modules.items() if not names}
    names = getattr(diffcse_jax, "__all__", ["SentenceEncoder"])
    lines = ["## The package", ""]
    lines += directives("diffcse_jax", [name for name in names if getattr(diffcse_jax, name).__module__ not in whole])
    for title, modules in MODULES.items():
        lines += [f"## {title}", ""]
        for module, names in modules.items():
            lines += directives(module, names)
    return "\n".join(lines)


def directives(module: str, names: typing.Sequence[str]) -> Iterator[str]:
    """The directives for some names of a module, or, if there are none, for the whole of it, with a heading."""
    if not names:
        yield f"### `{module}`\n"
    yield "```{eval-rst}"
    if not names:  # options are keys of the configuration, which has a page of its own
        yield f".. automodule:: {module}\n   :members:\n   :exclude-members: Options, objective\n"
    for name in names:
        kind = "class" if name[0].isupper() else "function"  # told without importing what is slow or optional
        yield f".. auto{kind}:: {module}.{name}" + ("\n   :members:\n" if kind == "class" else "\n")
    yield "```\n"


if __name__ == "__main__":
    print(configuration_keys())
