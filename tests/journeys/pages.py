"""Runs the code blocks of the pages in a workspace, as a reader would, with trainings that last two steps."""

import contextlib
import dataclasses
import io
import os
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diffcse_jax import cli

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^(?:<!-- (needs [^>]*) -->\n\n?)?```(bash|python)\n(.*?)^```", re.DOTALL | re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Block:
    """A code block of a page. `needs` is the page's own comment on what the block needs that tests do not have."""

    page: str
    language: str
    text: str
    needs: str

    @property
    def commands(self) -> list[str]:
        return self.text.replace("\\\n", " ").splitlines()


def blocks_of(page: str) -> list[Block]:
    found = BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))
    return [Block(page, language, text, needs) for needs, language, text in found]


@dataclasses.dataclass
class Workspace:
    """A folder in which the blocks run, in this process.

    Attributes:
        folder: The folder.
        overrides: Arguments that every command of this name gets in addition, to make it short.
        renamed: Words of commands and code to replace.
    """

    folder: Path
    overrides: Mapping[str, list[str]]
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    names: dict[str, Any] = dataclasses.field(default_factory=dict)

    def run(self, block: Block) -> list[str]:
        """Run a block; return what its commands printed."""
        if block.language == "python":
            return [self.run_python(block.text)]
        return [self.run_command(line) for line in block.commands if line.strip()]

    def run_python(self, text: str) -> str:
        printed = io.StringIO()
        with contextlib.chdir(self.folder), contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            exec(self.rename(text), self.names)
        return printed.getvalue()

    def run_command(self, line: str) -> str:
        """Run a line such as `NAME=value echo text | diffcse COMMAND ... > file`."""
        before, _, after = line.rpartition(" | ")
        words = shlex.split(self.rename(after), comments=True)
        variables = dict(word.split("=", 1) for word in words[: words.index("diffcse")])
        words = words[len(variables) + 1 :]
        words, _, target = (words[: words.index(">")], ">", words[-1]) if ">" in words else (words, "", "")
        stdin = io.TextIOWrapper(io.BytesIO(" ".join(shlex.split(before)[1:]).encode() + b"\n"))
        printed, told = io.StringIO(), io.StringIO()
        old_stdin, sys.stdin = sys.stdin, stdin
        old = os.environ.copy()
        os.environ.update(variables)
        try:
            with contextlib.chdir(self.folder), contextlib.redirect_stdout(printed), contextlib.redirect_stderr(told):
                code = cli.main([*words, *self.overrides.get(words[0], [])])
        except SystemExit as ended:
            code = ended.code
        finally:
            sys.stdin = old_stdin
            os.environ.clear()
            os.environ.update(old)
        assert not code, f"{line}\n{printed.getvalue()}{told.getvalue()}"
        if target:
            (self.folder / target).write_text(printed.getvalue())
        return printed.getvalue() + told.getvalue()

    def rename(self, text: str) -> str:
        for old, new in self.renamed.items():
            text = text.replace(old, new)
        return text
