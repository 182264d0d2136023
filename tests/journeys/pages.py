"""Runs the code blocks of the pages in a workspace, as a reader would, with trainings that last two steps."""

import contextlib
import dataclasses
import io
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from diffcse_jax import cli

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(
    r"^(?:<!-- (needs [^>]*) -->\n\n?)?```(bash|python)\n(.*?)^```", re.DOTALL | re.MULTILINE
)


@dataclasses.dataclass(frozen=True)
class Block:
    """A code block of a page. `needs` is the page's own comment on what the block needs that tests do not have."""

    page: str
    language: str
    text: str
    needs: str

    @property
    def file(self) -> str:
        """The file that the page tells the reader to save the block in, or nothing."""
        after = (ROOT / self.page).read_text(encoding="utf-8").partition(self.text)[2][:60]
        found = re.match(r"```\n\nSave (?:it|this) as `(\w+\.py)`", after)
        return found[1] if found else ""

    @property
    def commands(self) -> list[str]:
        return self.text.replace("\\\n", " ").splitlines()


def blocks_of(page: str) -> list[Block]:
    found = BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))
    return [Block(page, language, text, needs) for needs, language, text in found]


def write_documents(folder: Path, pages: str = "*.md") -> None:
    """Write each section of the pages as a markdown file."""
    folder.mkdir()
    for page in sorted((ROOT / "docs").glob(pages)):
        sections = page.read_text(encoding="utf-8").split("\n## ")
        for number, section in enumerate(sections[1:]):
            (folder / f"{page.stem}_{number}.md").write_text(f"# {section}", encoding="utf-8")


# run by .ci/run and test_hub.py
ELSEWHERE = ("make ", "pip ", "source ", "python train.py", "python eval.py")


@dataclasses.dataclass
class Workspace:
    """A folder in which blocks run, in this process.

    Attributes:
        folder: The folder.
        overrides: Arguments to add to each command of this name, which make it short.
        renamed: Text of blocks to replace.
        names: The variables of Python blocks.
    """

    folder: Path
    overrides: Mapping[str, list[str]]
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    names: dict[str, Any] = dataclasses.field(default_factory=dict)

    def run(self, block: Block) -> str:
        """Run a block and return what it printed."""
        if block.language == "bash":
            lines = [
                line for line in block.commands if line.strip() and not line.startswith(ELSEWHERE)
            ]
            return "".join(map(self.run_command, lines))
        text = self.rename(block.text)
        if block.file:
            (self.folder / block.file).write_text(text)
            return ""
        printed = io.StringIO()
        with (
            contextlib.chdir(self.folder),
            contextlib.redirect_stdout(printed),
            contextlib.redirect_stderr(printed),
        ):
            exec(text, self.names)
        return printed.getvalue()

    def run_command(self, line: str) -> str:
        """Run a line such as `echo text | diffcse COMMAND ... > file`."""
        before, _, after = self.rename(line).rpartition(" | ")
        words, _, target = after.partition(" > ")
        program, *arguments = shlex.split(words, comments=True)
        assert program == "diffcse", line
        stdin = io.TextIOWrapper(io.BytesIO(before.removeprefix("echo ").encode() + b"\n"))
        printed, told = io.StringIO(), io.StringIO()
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.chdir(self.folder))
            stack.enter_context(contextlib.redirect_stdout(printed))
            stack.enter_context(contextlib.redirect_stderr(told))
            stack.enter_context(mock.patch.object(sys, "stdin", stdin))
            try:
                code = cli.main([*arguments, *self.overrides.get(arguments[0], [])])
            except SystemExit as ended:
                code = ended.code
        assert not code, f"{line}\n{printed.getvalue()}{told.getvalue()}"
        if target:
            (self.folder / target.strip()).write_text(printed.getvalue())
        return printed.getvalue() + told.getvalue()

    def rename(self, text: str) -> str:
        for old, new in self.renamed.items():
            text = text.replace(old, new)
        return text
