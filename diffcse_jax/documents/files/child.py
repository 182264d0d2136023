"""A process that reads documents for another one: python -m diffcse_jax.documents.files.child.

A request is a line of JSON, followed by the bytes of a file. The answer is a line of JSON. The
process ends with the other one. It imports little, and a library when a format needs it.
"""

import contextlib
import faulthandler
import json
import math
import os
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from diffcse_jax.documents.files.formats import Unreadable, parse

READY = b"ready\n"  # the first answer


def main() -> None:
    """Answer requests until there are no more."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # where libraries may print
    answers.write(READY)
    answers.flush()
    for line in iter(sys.stdin.buffer.readline, b""):
        request = json.loads(line)
        content = sys.stdin.buffer.read(request["size"])
        # The process ends if it is late, also inside a library that never returns to Python.
        is_limited = _limit_processor_time(request["seconds"])
        most = request["most_seconds"] if is_limited else request["seconds"]
        faulthandler.dump_traceback_later(most, exit=True)
        answer = _answer(request, content)
        faulthandler.cancel_dump_traceback_later()
        answers.write(json.dumps(answer, ensure_ascii=False).encode() + b"\n")
        answers.flush()


def _end_with_parent() -> None:
    """End this process soon after the one that started it, though a file may not be read yet.

    While a library lets no other thread run, only the limit of time ends the process.
    """
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _answer(request: Mapping[str, Any], content: bytes) -> dict[str, Any]:
    _limit_memory(request["memory"])
    document = parse(content, request["kind"], with_code=request["with_code"])
    if isinstance(document, Unreadable):
        return document._asdict()
    return document._asdict()


def _limit_processor_time(seconds: int) -> bool:
    """Have the system end this process after so many seconds of processor time, if it can."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource  # not on Windows

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        _, most = resource.getrlimit(resource.RLIMIT_CPU)
        used = math.ceil(time.process_time())
        resource.setrlimit(resource.RLIMIT_CPU, (used + seconds, most))
        return True
    return False


def _limit_memory(number: int) -> None:
    """Limit the addresses of this process, where the system can do that."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource  # not on Windows

        _, most = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (number, most))


if __name__ == "__main__":
    main()
