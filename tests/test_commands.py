"""What the commands accept and say, as recorded in `tests/golden/commands.json`.

To record it again after a deliberate change, run `RECORD_GOLDEN=1 python -m pytest tests/test_commands.py`
and explain the differences in the commit message.
"""

import json
import os
import re
import shlex
from pathlib import Path

import pytest

from diffcse_jax import cli

GOLDEN = Path(__file__).with_name("golden") / "commands.json"
MISTAKES = """

nonsense
search --input text.txt --nonsense
search --input text.txt --top-k 3 words
search --input text.txt --top 3 words
search words
search --input
search --input text.txt --mode words
search --input text.txt --storage int4
search --input text.txt --top_k 0 words
search --input text.txt --top_k many words
search --input text.txt --threshold nan words
search --input text.txt --weight much words
search --input text.txt --output gs://bucket/index
embed --model minilm --input text.txt --output vectors --rows_per_file 0
embed --model minilm --input text.txt --output vectors --dtype float64
embed --model minilm --input text.txt
encode --input text.txt
encode --model minilm --batch_size -1
encode --model minilm --pooler best
encode --model minilm --pooler 'avg + Dense'
encode --model minilm --precision float16
evaluate --tasks sts
evaluate --model
evaluate --model minilm --format html
evaluate --model minilm --top_k 0
init --output start
init --output start --blocks few --model minilm
init --output start --blocks 3
export --model runs/mine
export --model runs/mine --output mine --truncate-dim 8
report --model runs/a runs/my-b
demo --model minilm --input text.txt --port any
train
train --config quickstart --workdri=x
train --config quickstart --lr=3e-5
train --config quickstart --config.optim.lerning_rate=3e-6
train --config quickstart --config.train.steps=many
finetune --config finetune_multitask --wrokdir x
study --config minilm --seed 3
study --config minilm --seeds many
"""


def options_of(parser) -> list[str]:
    """Return each option as a user reads it: its names, values, whether it is required, and its help."""
    formatter = parser._get_formatter()
    lines = []
    for action in parser._actions:
        invocation = formatter._format_action_invocation(action)
        required = "; required" if action.required and action.option_strings else ""
        text = re.sub(r"(one in configs\S*: ).*", r"\1...", formatter._expand_help(action))
        lines.append(f"{invocation}{required}: {text}")
    return sorted(lines)


def recorded() -> dict[str, object]:
    return json.loads(GOLDEN.read_text(encoding="utf-8"))


def check(name: str, value: object) -> None:
    """Compare a value with the record, or record it."""
    if os.environ.get("RECORD_GOLDEN"):
        content = (recorded() if GOLDEN.exists() else {}) | {name: value}
        GOLDEN.write_text(
            json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
        )
    assert recorded()[name] == value


def test_commands_and_options_are_as_recorded():
    (commands,) = (action.choices for action in cli.build_parser()._actions if action.choices)
    found = {
        name: {"about": parser.description, "options": options_of(parser)}
        for name, parser in commands.items()
    }
    check("commands", found)


def test_mistakes_are_answered_as_recorded(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    answers = {}
    for line in MISTAKES.splitlines()[1:]:
        with pytest.raises(SystemExit) as stopped:
            cli.main(shlex.split(line))
        assert stopped.value.code == 2, line
        printed = capsys.readouterr()
        assert printed.out == ""
        answer = printed.err.splitlines()[-1]  # not the usage above it
        answers[line] = re.sub(r"choose from .*\)", "choose from ...)", answer)
    check("mistakes", answers)
