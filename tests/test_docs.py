"""What the pages say of the configuration holds: a description for every key, and no name that does not exist."""

import re
import runpy
from pathlib import Path

import pytest

from diffcse_jax import objectives
from diffcse_jax.config import known_keys

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
REFERENCE = runpy.run_path(str(ROOT / "docs/reference.py"))
KEYS = known_keys()
GROUPS = {key.partition(".")[0] for key in KEYS if "." in key}


def described() -> dict[str, list[str]]:
    """The lines of each key in the reference, by key."""
    blocks = re.findall(
        r"^````\{confval\} (\S+)\n(.*?)^````$", REFERENCE["configuration_keys"](), re.DOTALL | re.MULTILINE
    )
    return {key: [line for line in block.splitlines() if line] for key, block in blocks}


def test_every_key_has_type_default_and_description():
    reference = described()
    assert list(reference) == list(KEYS)
    for key, field in KEYS.items():
        type_line, default_line, description, *values = reference[key]
        assert type_line.startswith(":type: ")
        assert default_line == f":default: `{field.default!r}`"
        assert description.replace("\\", "")[1:].startswith(field.metadata["doc"][1:])
        assert all(f"`{choice}`" in values[0] for choice in field.metadata["choices"] if choice)
        assert bool(values) == any(field.metadata[name] not in ((), None) for name in ("choices", "low", "high"))


def keys_named_in(text: str) -> set[str]:
    """The keys on a page: overrides, and what stands in backquotes with the name of a group before its dot."""
    overrides = set(re.findall(r"--config\.([a-z][\w.]*\w)", text))
    quoted = re.findall(r"`([a-z_]+)\.([a-z_]+)(?:[= ][^`]*)?`", text)
    files = {"py", "json", "safetensors"}
    return overrides | {f"{group}.{name}" for group, name in quoted if group in GROUPS and name not in files}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_keys_that_a_page_names_exist(page):
    of_the_example = {"uniformity.weight"} if page.stem == "extending" else set()
    assert keys_named_in(page.read_text(encoding="utf-8")) - KEYS.keys() == of_the_example


def test_pages_name_keys():
    """The patterns find some, so that the test above is about something."""
    assert len(set().union(*(keys_named_in(page.read_text(encoding="utf-8")) for page in PAGES))) > 60


def test_every_objective_is_explained():
    explained = "".join(page.read_text(encoding="utf-8") for page in PAGES if page.stem in ("objectives", "finetuning"))
    assert [name for name in objectives.modules() if f"`{name}`" not in explained] == []


def test_every_name_of_the_python_reference_is_found():
    directives = re.findall(r"\.\. auto(\w+):: (\S+)", REFERENCE["python_names"]())
    assert ("class", "diffcse_jax.SentenceEncoder") in directives
    assert {name.rpartition(".")[2] for _, name in directives} >= set(objectives.modules()) - {"difference"}
