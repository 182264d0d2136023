"""Uploads of exports to the Hugging Face hub, with its own client and the token that it finds.

That is the one in `HF_TOKEN`, or the one that `hf auth login` keeps. `HF_ENDPOINT` names another hub.
"""

from pathlib import Path

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from diffcse_jax.errors import CheckpointError, ConfigError, UserError

# Files that an earlier upload may have and the present one may lack; all others on the hub stay.
_OF_EARLIER_EXPORTS = ["[0-9]_Pooling/*", "[0-9]_Dense/*", "[0-9]_WeightedLayerPooling/*", "onnx/*"]


def check(repository: str) -> None:
    """Refuses what cannot be uploaded to, before any work is done.

    Args:
        repository: `USER/NAME`, or `ORGANISATION/NAME`.

    Raises:
        ConfigError: no such form; no token; a token of somebody else.
        CheckpointError: the hub cannot be reached.
    """
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise ConfigError(f"--push_to_hub {repository}: {error}") from error
    owner, _, name = repository.partition("/")
    if not name:
        raise ConfigError(f"--push_to_hub {repository}: give the owner, too: USER/{repository}")
    if get_token() is None:
        raise ConfigError(
            "--push_to_hub needs an access token of the hub with the right to write: put it into the environment "
            "variable HF_TOKEN, or run `hf auth login`"
        )
    try:
        user = HfApi().whoami()
    except Exception as error:
        raise _for_people(error, repository) from error
    owners = [user["name"], *(organisation["name"] for organisation in user.get("orgs", []))]
    if owner not in owners:
        raise ConfigError(
            f"--push_to_hub {repository}: the token is that of {user['name']}, who has no right to write there; it has "
            f"for {', '.join(f'{each}/{name}' for each in owners)}"
        )


def push(folder: Path, repository: str, *, private: bool = False) -> str:
    """Uploads a folder as one model; the repository is made if there is none.

    Args:
        folder: an export.
        repository: `USER/NAME`.
        private: of a new repository; one that exists stays as visible as it is.

    Returns:
        The address of the commit.

    Raises:
        UserError: the hub cannot be reached, or refuses.
    """
    api = HfApi()
    try:
        api.create_repo(repository, private=private or None, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            commit_message="Export of diffcse_jax",
            delete_patterns=_OF_EARLIER_EXPORTS,
        )
    except Exception as error:  # the client passes on whatever its transport raises
        problem = _for_people(error, repository)
        raise type(problem)(f"{problem}; the export in {folder} is whole, and the same command tries again") from error
    return commit.commit_url


def _for_people(error: Exception, repository: str) -> UserError:
    """The cause of a failed upload, and the remedy."""
    if isinstance(error, OfflineModeIsEnabled):
        return ConfigError("--push_to_hub: the hub's client is told to stay offline; unset HF_HUB_OFFLINE")
    endpoint = HfApi().endpoint
    if not isinstance(error, HfHubHTTPError):
        reason = (str(error).splitlines() or [""])[0][:200]
        return CheckpointError(
            f"--push_to_hub: {endpoint} cannot be reached ({type(error).__name__}: {reason}); see to the network, or "
            "to HF_ENDPOINT"
        )
    status = error.response.status_code
    if status == 401:
        return ConfigError(
            f"--push_to_hub: {endpoint} does not accept the token (401); make a new one with the right to write, and "
            "put it into HF_TOKEN, or run `hf auth login`"
        )
    if status in (403, 404):
        return ConfigError(
            f"--push_to_hub {repository}: the token has no right to write there ({status}); use one with the "
            "permission `write`, or name a repository of its user"
        )
    said = getattr(error, "server_message", None) or (str(error).splitlines() or [""])[0]
    return CheckpointError(f"--push_to_hub {repository}: {endpoint} refuses ({status}): {str(said)[:200]}")
