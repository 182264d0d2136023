"""Documents are read in other processes, each with limits of time and memory."""

import gzip
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from diffcse_jax.documents.files import formats, pool
from diffcse_jax.documents.files.formats import Parsed, Unreadable
from diffcse_jax.documents.files.pool import parse_files

SLOW = "-a" * 30_000  # docutils takes minutes


@pytest.fixture(autouse=True)
def few_processes(monkeypatch):
    """Start with none, so that limits which a test sets hold, and end those that were started."""
    monkeypatch.setattr(pool, "_cores", lambda: 2)
    yield
    pool._stop_all()
    pool._idle.clear()


def parsed(file: Path, text: str) -> Parsed | Unreadable:
    return formats.parse(text.encode(), file.suffix, with_code=True)


def test_answers_come_in_the_order_of_the_files(tmp_path, monkeypatch):
    texts = {
        tmp_path / f"{number}{kind}": f"Title {number}\n=======\n\nText {number}."
        for number, kind in enumerate([".rst", ".txt", ".md", ".txt", ".md", ".rst"] * 5)
    }
    for file, text in texts.items():
        file.write_text(text)
    expected = [parsed(file, text) for file, text in texts.items()]
    assert list(parse_files([*texts], with_code=True)) == expected
    assert len(pool._running) == 2
    with ThreadPoolExecutor(2) as threads:
        found = [threads.submit(list, parse_files([*texts], with_code=True)) for _ in range(2)]
        assert [each.result() for each in found] == [expected, expected]
    monkeypatch.setattr(formats, "PLAIN_TEXT", (".rst", ".txt", ".md"))
    assert list(parse_files([*texts], with_code=True)) == expected


def test_a_file_that_cannot_be_read_costs_only_itself(tmp_path, monkeypatch):
    good, slow, large, cut, empty, missing = (
        tmp_path / name for name in ("a.md", "b.rst", "c.md.gz", "d.html.gz", "e.pdf", "f.md")
    )
    good.write_text("# A\n\nText.")
    slow.write_text(SLOW)
    large.write_bytes(gzip.compress(bytes(2_000_000)))
    cut.write_bytes(gzip.compress(b"<p>Text")[:20])
    empty.write_bytes(b"")
    monkeypatch.setattr(pool, "SECONDS", 3)
    monkeypatch.setattr(pool, "MOST_BYTES", 2_000_000 - 1)
    found = list(parse_files([slow, good, large, cut, empty, missing, good], with_code=True))
    assert found[1] == found[6] == parsed(good, good.read_text())
    reasons = [each.reason for each in found if isinstance(each, Unreadable)]
    assert reasons[0] == "took longer than 3 seconds of processor time"
    assert reasons[1] == "larger than 256 MB"
    assert reasons[2].startswith("damaged archive")
    assert reasons[3:] == ["empty", "no such file"]


@pytest.mark.skipif(sys.platform == "win32", reason="sends signals")
def test_a_file_is_left_out_for_its_processor_time_and_only_much_later_for_the_clock(
    tmp_path, monkeypatch
):
    (tmp_path / "a.md").write_text("Text.")
    (tmp_path / "b.rst").write_text(SLOW)
    assert pool.MOST_SECONDS == 10 * pool.SECONDS
    process = pool._Process.take()
    process.give_back()
    monkeypatch.setattr(pool, "SECONDS", 1)
    os.kill(process._process.pid, signal.SIGSTOP)  # as on a machine that is busy
    threading.Timer(1.5, os.kill, (process._process.pid, signal.SIGCONT)).start()
    (first,) = parse_files([tmp_path / "a.md"], with_code=True)
    assert isinstance(first, Parsed)
    monkeypatch.setattr(pool, "SECONDS", 60)
    monkeypatch.setattr(pool, "MOST_SECONDS", 2)
    assert [*parse_files([tmp_path / "b.rst"], with_code=True)] == [
        Unreadable("took longer than 2 seconds", is_limit=True)
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="not every system can limit memory")
def test_memory_has_a_limit(tmp_path, monkeypatch):
    (tmp_path / "a.html").write_text("<p>x" * 500_000)
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"ab\n\n" * 2_000_000))
    (tmp_path / "c.html").write_text("<p>Text.")
    monkeypatch.setattr(pool, "MEMORY", 130 << 20)
    files = [tmp_path / name for name in ("a.html", "b.txt.gz", "c.html")]
    *large, small = parse_files(files, with_code=True)
    assert large == [Unreadable("needs too much memory", is_limit=True)] * 2
    assert isinstance(small, Parsed)


def test_only_small_files_of_plain_text_are_read_without_limits(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("One.\n\nTwo.")
    files = [tmp_path / "a.txt", tmp_path / "none.txt"]
    expected = [parsed(files[0], "One.\n\nTwo."), Unreadable("no such file")]
    assert list(parse_files(files, with_code=True)) == expected
    assert not pool._running
    monkeypatch.setattr(pool, "SMALL", 4)
    assert list(parse_files(files, with_code=True)) == expected
    assert len(pool._running) == 1


def test_a_process_that_ends_is_replaced(tmp_path):
    (tmp_path / "a.md").write_text("Text.")
    files = [tmp_path / "a.md"] * 9
    first = next(parse_files(files, with_code=True))  # the others are not asked for
    for process in tuple(pool._running):
        os.kill(process._process.pid, signal.SIGTERM)
        process._process.wait()
    assert list(parse_files(files, with_code=True)) == [first] * 9


# A background job of a shell ignores Ctrl-C, and so does what it starts.
SCRIPT = """
import signal
import sys
from pathlib import Path
from diffcse_jax.documents.files.pool import parse_files

signal.signal(signal.SIGINT, signal.default_int_handler)
print("started", flush=True)
for found in parse_files([Path(name) for name in sys.argv[1:]], with_code=True):
    print(type(found).__name__, "jax" in sys.modules, flush=True)
"""


def run(folder: Path, *names: str) -> subprocess.Popen[str]:
    """Run a script without a guard, in a folder with a file that has the name of a module."""
    (folder / "script.py").write_text(SCRIPT)
    (folder / "json.py").write_text("raise RuntimeError('never imported')")
    command = [sys.executable, "-P", "script.py", *names]
    environment = {**os.environ, "PYTHONPATH": str(Path(pool.__file__).parents[3])}
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )  # fmt: skip


def test_a_script_is_not_run_again(tmp_path):
    (tmp_path / "a.md").write_text("Text.")
    process = run(tmp_path, "a.md", "a.md")
    output, errors = process.communicate(timeout=60)
    assert output.splitlines() == ["started", *["Parsed False"] * 2], errors


@pytest.mark.skipif(sys.platform == "win32", reason="sends signals")
def test_ctrl_c_ends_a_program_and_its_processes_at_once(tmp_path):
    (tmp_path / "a.rst").write_text(SLOW)
    process = run(tmp_path, "a.rst", "a.rst")
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    time.sleep(1)
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in errors
    assert time.monotonic() - start < 10
    if Path("/proc").is_dir():
        children = [
            each for each in Path("/proc").glob("[0-9]*/cmdline") if _is_child(each, process.pid)
        ]
        assert not children


def _is_child(command: Path, parent: int) -> bool:
    try:
        is_of_parent = b"PPid:\t%d\n" % parent in (command.parent / "status").read_bytes()
        return is_of_parent and b"diffcse_jax.documents.files.child" in command.read_bytes()
    except OSError:
        return False
