"""Folders with a query encoder and a document encoder: sentence-transformers' Router.

The folders `query` and `document` are whole sentence-transformers folders. `router_config.json`,
next to them, lists the modules of both. Releases 5 and 6 of sentence-transformers read this layout.
"""

import os
from pathlib import Path

from diffcse_jax.errors import CheckpointError
from diffcse_jax.io import read_json, read_json_object, write_json
from diffcse_jax.models.files import MODULES, ROUTER, read_modules

QUERY, DOCUMENT = "query", "document"
ROUTES = (QUERY, DOCUMENT)
_TYPE = "sentence_transformers.models.Router"


def find_routes(root: Path) -> dict[str, Path] | None:
    """Return the folders of both encoders by their task, or None if there is no Router.

    Raises:
        CheckpointError: The Router is not one of two whole folders.
    """
    if not os.path.isfile(root / MODULES):
        return None
    listed = read_json(root / MODULES)
    modules = (
        [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
    )
    types = [str(module.get("type")) for module in modules]
    if not any(
        each.startswith("sentence_transformers") and each.endswith(".Router") for each in types
    ):
        return None
    folders = {task: root / task for task in ROUTES}
    is_ours = len(types) == 1 and all(os.path.isfile(each / MODULES) for each in folders.values())
    config = read_json_object(root / ROUTER) if os.path.isfile(root / ROUTER) else {}
    if not is_ours or config.get("structure") != _structure(root):
        raise CheckpointError(
            f"{root / MODULES}: this Router is not supported. Supported are two whole models, in "
            f"the folders {' and '.join(ROUTES)}, as `diffcse export` writes them. Use "
            "sentence-transformers for this model"
        )
    return folders


def require_single(root: Path) -> None:
    """Raise `CheckpointError` if a folder has two encoders where one is needed."""
    if find_routes(root):
        raise CheckpointError(
            f"{root} has a query encoder and a document encoder. Name one of them: "
            f"{root / QUERY} or {root / DOCUMENT}"
        )


def card_folder(folder: Path) -> Path:
    """Return the folder with a model's card. Both encoders of a Router have one together."""
    root = folder.parent
    is_route = folder.name in ROUTES and os.path.isfile(root / ROUTER)
    return root if is_route else folder


def write_router(root: Path) -> None:
    """Write the files that combine both folders into one model."""
    types = {
        f"{task}/{module['path']}".rstrip("/"): module["type"]
        for task in ROUTES
        for module in read_json(root / task / MODULES)
    }
    # sentence-transformers takes the default for texts whose task is not named.
    parameters = {"default_route": DOCUMENT, "allow_empty_key": True}
    config = {"types": types, "structure": _structure(root), "parameters": parameters}
    write_json(root / ROUTER, config)
    write_json(root / MODULES, [{"idx": 0, "name": "0", "path": "", "type": _TYPE}])


def _structure(root: Path) -> dict[str, list[str]]:
    """Return the folders of the modules of each task, as the Router lists them."""
    return {
        task: [path.relative_to(root).as_posix() for _, path in read_modules(root / task)]
        for task in ROUTES
    }
