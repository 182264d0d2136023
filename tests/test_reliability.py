"""The table of docs/reliability.md names tests that there are."""

import re
from pathlib import Path

TESTS = Path(__file__).parent
PROMISES = (TESTS.parent / "docs" / "reliability.md").read_text(encoding="utf-8")


def test_every_promise_has_its_tests():
    tables = re.findall(r"^\| .* \| test \|\n\|---\|---\|\n((?:\|.*\n)+)", PROMISES, re.MULTILINE)
    rows = [row for table in tables for row in table.splitlines()]
    assert len(rows) > 50
    for row in rows:
        names, file = re.findall(r"`(?:(test_\w+\.py))?(?:::)?(test_\w+)?`", row.rpartition(" | ")[2]), ""
        assert names, row
        for named_file, test in names:
            file = named_file or file
            assert f"def {test}(" in (TESTS / file).read_text(encoding="utf-8") if test else (TESTS / file).is_file(), (
                row
            )
