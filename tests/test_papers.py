"""The page of the papers' rows names every study and every configuration, and only those that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/papers.md").read_text(encoding="utf-8")
NOT_FROM_PAPERS = {"quickstart", "diffcse_minilm", "adapt", "finetune_multitask"}


@pytest.mark.parametrize(
    ("word", "folder", "elsewhere"), [("study", "configs/studies", set()), ("config", "configs", NOT_FROM_PAPERS)]
)
def test_every_file_is_named(word, folder, elsewhere):
    shipped = {file.stem for file in (ROOT / folder).glob("*.py")}
    lists = re.findall(rf"\b{word} ((?:`\w+`(?:, )?)+)", PAGE)
    named = {name for names in lists for name in re.findall(r"\w+", names)}
    named |= set(re.findall(r"diffcse train --config (\w+)", PAGE)) if word == "config" else set()
    assert named - {"NAME"} == shipped - elsewhere
