"""The pages are right: links, keys, commands and tests exist.

So do the shipped configurations that they name.
"""

import ast
import dataclasses
import importlib
import re
import runpy
import shlex
from pathlib import Path

import pytest

from diffcse_jax.cli import build_parser
from diffcse_jax.config import (
    SHIPPED,
    Config,
    configuration,
    default_config,
    known_keys,
    read_overrides,
)
from diffcse_jax.documents.find import KNOWN_EXTENSIONS
from diffcse_jax.documents.text.lines import COMPRESSED
from diffcse_jax.losses import Loss

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEXTS = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in PAGES}
REFERENCE = runpy.run_path(str(ROOT / "docs/reference.py"))
LARGEST_PICTURE = 40_000  # bytes
KEYS = known_keys()
GROUPS = {key.partition(".")[0] for key in KEYS if "." in key}
MOST_WORDS = 1200  # of a page, and
MOST_WORDS_OF_A_CELL = 12  # of a table. Its code counts as one word.
NOT_FROM_PAPERS = {
    "masked_lm", "quickstart", "simcse_minilm", "simcsepp_minilm", "diffcse_minilm", "adapt", "adapt_queries",
    "finetune_multitask",
}  # fmt: skip
# a generated table; measurements and their history
MAY_BE_LONGER = ("docs/keys.md", "docs/records/")
SHORT = [page for page in TEXTS if not page.startswith(MAY_BE_LONGER)]


# Keys


@pytest.mark.parametrize("page", REFERENCE["WRITTEN"])
def test_pages_repeat_the_keys_and_the_stable_names_of_the_code(page):
    text = TEXTS[f"docs/{page}"]
    assert REFERENCE["rewritten"](page, text) == text, "run `make reference`"


def keys_named_in(text: str) -> set[str]:
    """Return the keys on a page: overrides, and names in backquotes that begin with a group."""
    overrides = set(re.findall(r"--config\.([a-z][\w.]*\w)", text))
    quoted = re.findall(r"`([a-z_]+)\.([a-z_]+)(?:[= ][^`]*)?`", text)
    files = {"py", "json", "safetensors", "md"}
    return overrides | {
        f"{group}.{name}" for group, name in quoted if group in GROUPS and name not in files
    }


@pytest.mark.parametrize("page", TEXTS)
def test_keys_that_a_page_names_exist(page):
    others = {
        "docs/extending.md": {"spread.weight"},  # of the example
        "docs/finetuning.md": {"init", "finetune.tasks"},
        "docs/commands.md": {"init"},
        "docs/from_flax.md": {"model.mlm_head"},  # attributes of a `model` in Python
        "docs/from_sentence_transformers.md": {
            "model.dimension",
            "model.max_seq_length",
            "model.max_length",
            "model.similarity",
        },
    }
    assert keys_named_in(TEXTS[page]) - KEYS.keys() <= others.get(page, set())


def test_every_loss_is_explained():
    losses = [
        field.name
        for field in dataclasses.fields(Config)
        if isinstance(getattr(Config(), field.name), Loss)
    ]
    explained = TEXTS["docs/losses.md"] + TEXTS["docs/finetuning.md"]
    assert [name for name in losses if f"`{name}" not in explained] == []


# Commands


def commands() -> list[str]:
    """Return the commands `diffcse ...` in the blocks of all pages."""
    blocks = re.findall(r"^```bash\n(.*?)^```", "\n".join(TEXTS.values()), re.DOTALL | re.MULTILINE)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    found = (re.match(r"(?:[A-Z_]+=\S+ )*(diffcse [a-z].*)", line) for line in lines)
    return list(dict.fromkeys(match[1] for match in found if match))


@pytest.mark.parametrize("command", commands())
def test_commands_are_valid(command):
    _, name, *arguments = shlex.split(command, comments=True)
    if arguments == ["--help"]:
        return
    options, rest = build_parser().parse_known_args([name, *arguments])
    if name not in ("train", "finetune", "study"):
        assert rest == []
        return
    rest = [argument.replace("--config.init=", "--config.model.name_or_path=") for argument in rest]
    of_tasks = [each for each in rest if each.startswith("--finetune.")]
    read_overrides(of_tasks, "finetune")
    values = read_overrides(
        each for each in rest if each not in of_tasks and not each.startswith("--config.KEY=")
    )
    if options.config.endswith(".py") or options.config == "NAME":
        return
    if name == "study":
        assert (SHIPPED / "studies" / f"{options.config}.py").is_file()
    else:
        configuration(options.config, values)


def test_options_that_pages_mention_exist():
    """Commands with options in backquotes, whose values may be left out."""
    (commands,) = (action.choices for action in build_parser()._actions if action.choices)
    for command in re.findall(r"`diffcse ([a-z]+ --[^`]*)`", "\n".join(TEXTS.values())):
        name, *arguments = command.split()
        for option in (
            argument.partition("=")[0] for argument in arguments if argument.startswith("--")
        ):
            known = (
                option.startswith(("--config.", "--finetune."))
                or option in commands[name].format_help()
            )
            assert known, f"{command}: {option}"


# Names, links and length


def test_every_name_of_the_python_reference_exists():
    directives = re.findall(r"\.\. auto(\w+):: (\S+)", REFERENCE["python_directives"]())
    assert ("class", "diffcse_jax.SentenceEncoder") in directives
    for name in re.findall(r"^\| `(diffcse_jax\S*)`", TEXTS["docs/python.md"], re.MULTILINE):
        module, _, attribute = name.rpartition(".")
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            assert hasattr(importlib.import_module(module), attribute), name


def test_every_file_and_function_of_the_tour_exists():
    rows = re.findall(r"^\| `(\S+\.py)` \| (.*?) \|", TEXTS["docs/code_tour.md"], re.MULTILINE)
    assert len(rows) > 20
    for file, functions in rows:
        tree = ast.parse((ROOT / "diffcse_jax" / file).read_text(encoding="utf-8"))
        defined = {
            node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)
        }
        assert set(re.findall(r"`(\w+)`", functions)) - defined == set(), file


def anchors(page: Path) -> set[str]:
    """Return the anchors that a Git host gives to the headings of a page."""
    headings = re.findall(
        r"^#+ (.*)$",
        re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL),
        re.M,
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", TEXTS)
def test_links_lead_to_files_and_headings(page):
    text = re.sub(r"```.*?```", "", TEXTS[page], flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?:", link):
            continue
        file, _, anchor = link.partition("#")
        target = ((ROOT / page).parent / file).resolve() if file else ROOT / page
        assert target.exists(), link
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), link


def test_pictures_are_small_and_drawn():
    """Code hosts show the files; the other figures are drawn when the pages are built."""
    files = [path for path in (ROOT / "docs").rglob("*.png") if "_build" not in path.parts]
    assert [path for path in files if path.stat().st_size > LARGEST_PICTURE] == []
    drawn = runpy.run_path(str(ROOT / "docs/figures.py"))["BUILT"]
    named = re.findall(r"<!-- figure (\w+): .+ -->", "\n".join(TEXTS.values()))
    assert sorted(named) == sorted(draw.__name__ for draw in drawn)


def words_of(text: str) -> list[str]:
    """Return the words that a reader reads: not the targets of links, nor marks of a table."""
    return [word for word in re.sub(r"\]\([^)]*\)", "]", text).split() if re.search(r"\w", word)]


def without_code(text: str) -> str:
    """Return a page without its blocks of code, which are copied or run and not read from start to end."""
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", SHORT)
def test_pages_are_short(page):
    assert len(words_of(without_code(TEXTS[page]))) <= MOST_WORDS


@pytest.mark.parametrize("page", SHORT)
def test_cells_of_tables_are_short(page):
    rows = [line for line in without_code(TEXTS[page]).splitlines() if line.startswith("|")]
    cells = [
        cell for row in rows for cell in re.split(r"(?<!\\)\|", re.sub(r"`[^`]*`", "code", row))
    ]
    assert [cell for cell in cells if len(words_of(cell)) > MOST_WORDS_OF_A_CELL] == []


# Configurations, papers and promises


@pytest.mark.parametrize(
    "file", sorted([*SHIPPED.glob("*.py"), *SHIPPED.glob("base/*.py")]), ids=lambda file: file.stem
)
def test_a_shipped_configuration_is_valid_and_gives_its_command(file):
    config = Config.from_dict(runpy.run_path(str(file))["get_config"]().to_dict())
    # The published DiffCSE run is the default itself.
    assert (config == Config.from_dict(default_config().to_dict())) == (file.stem == "diffcse_base")
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
    files = re.findall(r"python train\.py --config configs/(\S+)\.py\b", docstring)
    names = re.findall(r"diffcse \w+ --config (\S+)", docstring)
    assert {*files, *names} == {file.relative_to(SHIPPED).with_suffix("").as_posix()}


@pytest.mark.parametrize(
    ("word", "folder", "elsewhere"),
    [("study", SHIPPED / "studies", set()), ("config", SHIPPED, NOT_FROM_PAPERS)],
)
def test_the_pages_on_papers_name_every_configuration_and_study(word, folder, elsewhere):
    pages = TEXTS["docs/papers.md"] + TEXTS["docs/paper_rows.md"]
    lists = re.findall(rf"\b{word} ((?:`\w+`(?:, )?)+)", pages)
    named = {name for names in lists for name in re.findall(r"\w+", names)}
    named |= set(re.findall(r"diffcse train --config (\w+)", pages)) if word == "config" else set()
    assert named - {"NAME"} == {file.stem for file in folder.glob("*.py")} - elsewhere


def test_the_page_on_text_names_every_kind_of_file():
    page = (ROOT / "docs/text.md").read_text(encoding="utf-8")
    for kind in (*KNOWN_EXTENSIONS, *COMPRESSED):
        assert f"`{kind}`" in page, kind


def test_every_promise_has_its_tests():
    tables = re.findall(
        r"^\| .* \| test \|\n\|---\|---\|\n((?:\|.*\n)+)",
        TEXTS["docs/reliability.md"],
        re.MULTILINE,
    )
    rows = [row for table in tables for row in table.splitlines()]
    assert len(rows) == 15
    for row in rows:
        names, file = (
            re.findall(r"`(?:(test_\w+\.py))?(?:::)?(test_\w+)?`", row.rpartition(" | ")[2]),
            "",
        )
        assert names, row
        for named_file, test in names:
            file = named_file or file
            found = f"def {test}(" if test else "def test_"
            assert found in (ROOT / "tests" / file).read_text(encoding="utf-8"), row
