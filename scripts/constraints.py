"""Write `constraints.txt`: the versions of all packages that the requirements depend on.

    python scripts/constraints.py      (or: make constraints)

The supported Pythons, python3.11 and python3.12, must be on the PATH. The requirements files pin
the packages that the project uses, and `constraints.txt` pins all others. Nothing is installed: pip
only resolves for an empty environment. For at least one Python, pip must find torch's default
build, because the CPU build does not need the CUDA packages that are also pinned.
"""

import json
import re
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
MARKERS = {"python3.11": 'python_version < "3.12"', "python3.12": 'python_version >= "3.12"'}
HEADER = """\
# What the requirements need in turn, pinned; made by `make constraints`, not by hand. With these
# versions an installation of requirements.txt or requirements-dev.txt is the same everywhere and
# always:
#   pip install -c constraints.txt -r requirements.txt -e .
# CUDA packages are those of torch's default build on Linux; its CPU build installs none of them.
"""


def main() -> None:
    """Resolves and writes."""
    stacks = {python: resolved(python) for python in MARKERS}
    direct = directly_required()
    lines = []
    for name in sorted(set().union(*stacks.values()) - direct):
        versions = {
            python: packages[name] for python, packages in stacks.items() if name in packages
        }
        if len(set(versions.values())) == 1:
            lines.append(f"{name}=={next(iter(versions.values()))}")
        else:
            lines += [
                f"{name}=={version}; {MARKERS[python]}" for python, version in versions.items()
            ]
    (ROOT / "constraints.txt").write_text(HEADER + "\n".join(lines) + "\n", encoding="utf-8")


def resolved(python: str) -> dict[str, str]:
    """Return versions by package, as pip resolves the development requirements from nothing."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([python, "-m", "venv", folder], check=True)
        report = Path(folder) / "report.json"
        pip = [
            f"{folder}/bin/python",
            "-m",
            "pip",
            "install",
            "--quiet",
            "--dry-run",
            "--ignore-installed",
        ]
        requirements = ["--report", str(report), "-r", str(ROOT / "requirements-dev.txt")]
        subprocess.run([*pip, *requirements], check=True)
        installed = json.loads(report.read_text(encoding="utf-8"))["install"]
    return {
        normalised(package["metadata"]["name"]): package["metadata"]["version"]
        for package in installed
    }


def directly_required() -> set[str]:
    """Return the packages that the requirements files name."""
    lines = [
        line
        for file in ROOT.glob("requirements*.txt")
        for line in file.read_text(encoding="utf-8").splitlines()
    ]
    return {normalised(line.partition("==")[0]) for line in lines if re.match(r"\w", line)}


def normalised(name: str) -> str:
    """Return a package's name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    main()
