"""What the pages say holds: a description for every key, no name that does not exist, commands that are valid."""

import dataclasses
import functools
import re
import runpy
import shlex
from pathlib import Path

import pytest

from diffcse_jax.cli import build_parser
from diffcse_jax.config import Config, known_keys, read_overrides, shipped_config
from diffcse_jax.losses.base import Loss

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
REFERENCE = runpy.run_path(str(ROOT / "docs/reference.py"))
KEYS = known_keys()
LOSSES = [field.name for field in dataclasses.fields(Config) if isinstance(getattr(Config(), field.name), Loss)]
GROUPS = {key.partition(".")[0] for key in KEYS if "." in key}


def described() -> dict[str, list[str]]:
    """The lines of each key in the reference, by key: facts and description."""
    text = REFERENCE["configuration_keys"]()
    blocks = re.findall(r"^```\{confval\} (\S+)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return {key: [line for line in block.splitlines() if line] for key, block in blocks}


def test_every_key_has_type_default_values_and_description():
    reference = described()
    assert list(reference) == list(KEYS)
    for key, field in KEYS.items():
        facts, description = reference[key]
        assert f", default `{field.default!r}`" in facts
        assert all(f"`{choice}`" in facts for choice in field.metadata["choices"] if choice)
        for word, bound in (("from", field.metadata["low"]), ("to", field.metadata["high"])):
            told = re.search(rf"\b{word} ([\d.e-]+)", facts)
            assert (told and told[1]) == (None if bound is None else str(bound))
        assert description.replace("\\", "")[1:].startswith(field.metadata["doc"][1:])


def keys_named_in(text: str) -> set[str]:
    """The keys on a page: overrides, and what stands in backquotes with the name of a group before its dot."""
    overrides = set(re.findall(r"--config\.([a-z][\w.]*\w)", text))
    quoted = re.findall(r"`([a-z_]+)\.([a-z_]+)(?:[= ][^`]*)?`", text)
    files = {"py", "json", "safetensors"}
    return overrides | {f"{group}.{name}" for group, name in quoted if group in GROUPS and name not in files}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_keys_that_a_page_names_exist(page):
    others = {"extending": {"uniformity.weight"}, "finetuning": {"init"}}  # of the example; short for another key
    assert keys_named_in(page.read_text(encoding="utf-8")) - KEYS.keys() == others.get(page.stem, set())


def test_pages_name_keys():
    """The patterns find some, so that the test above is about something."""
    assert len(set().union(*(keys_named_in(page.read_text(encoding="utf-8")) for page in PAGES))) > 60


def commands(script: str, name: str) -> list[str]:
    """The arguments of a command in the blocks of all pages, each once."""
    pages = (page.read_text(encoding="utf-8").replace("\\\n", " ") for page in PAGES)
    blocks = "".join(
        block for page in pages for block in re.findall(r"^```(?:bash)?\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    )
    return list(dict.fromkeys(re.findall(rf"(?:python {re.escape(script)}|diffcse {name}) (.*)", blocks)))


base_config = functools.cache(shipped_config)


def test_training_commands_are_valid():
    found = [shlex.split(command, comments=True) for command in commands("train.py", "train")]
    of_configs = [(file, arguments) for _, file, *arguments in found if file.startswith("configs/") or "." not in file]
    assert len(of_configs) > 5
    for file, arguments in of_configs:
        base = base_config(file.removeprefix("configs/").removesuffix(".py"))
        given = [each for each in arguments if re.match(r"--config\.(?!KEY=|train\.seed=|uniformity)", each)]
        values = base.to_dict()
        for key, value in read_overrides(given).items():
            group, _, name = key.rpartition(".")
            (values[group] if group else values)[name] = value
        Config.from_dict(values)


def test_evaluation_commands_are_valid():
    found = commands("eval.py", "evaluate")
    assert len(found) > 5
    for command in found:
        build_parser()[0].parse_args(["evaluate", *shlex.split(command, comments=True)])


def test_every_objective_is_explained():
    explained = "".join(page.read_text(encoding="utf-8") for page in PAGES if page.stem in ("losses", "finetuning"))
    assert [name for name in LOSSES if f"`{name}`" not in explained] == []


def test_every_name_of_the_python_reference_is_found():
    directives = re.findall(r"\.\. auto(\w+):: (\S+)", REFERENCE["python_names"]())
    assert ("class", "diffcse_jax.SentenceEncoder") in directives
    assert ("class", "diffcse_jax.losses.base.Loss") in directives
