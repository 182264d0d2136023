"""Upload an export to the Hugging Face hub with the hub's own client.

The token is the one in `HF_TOKEN` or the one that `hf auth login` has stored. `HF_ENDPOINT` names another hub.
"""

from pathlib import Path

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from diffcse_jax.errors import CheckpointError, ConfigError

# An earlier upload may have these files although the new one has not. All other files on the hub stay.
_OF_EARLIER_EXPORTS = ["[0-9]_Pooling/*", "[0-9]_Dense/*", "[0-9]_WeightedLayerPooling/*", "onnx/*"]


def check(repository: str) -> None:
    """Check that an upload to `USER/NAME` or `ORGANISATION/NAME` is possible, before any work is done."""
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise ConfigError(f"--push_to_hub {repository}: {error}") from error
    owner, _, name = repository.partition("/")
    if not name:
        raise ConfigError(f"--push_to_hub {repository}: the owner is missing. Give USER/{repository}")
    if get_token() is None:
        raise ConfigError(
            "--push_to_hub needs an access token of the hub with write permission. Set the environment variable "
            "HF_TOKEN, or run `hf auth login`"
        )
    try:
        user = HfApi().whoami()
    except Exception as error:
        raise _explain(error, repository) from error
    owners = [user["name"], *(organisation["name"] for organisation in user.get("orgs", []))]
    if owner not in owners:
        raise ConfigError(
            f"--push_to_hub {repository}: the token belongs to {user['name']}, who may not write there. Use "
            f"{' or '.join(f'{each}/{name}' for each in owners)}"
        )


def push(folder: Path, repository: str, *, private: bool = False) -> str:
    """Upload an export, and return the address of the commit. Create the repository if it does not exist.

    Args:
        folder: An export.
        repository: `USER/NAME`.
        private: Make a new repository private. The visibility of an existing one does not change.
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
        raise CheckpointError(
            f"{_explain(error, repository)}. The export in {folder} is complete. Run the same command again to retry "
            "the upload"
        ) from error
    return commit.commit_url


def _explain(error: Exception, repository: str) -> CheckpointError:
    reason = getattr(error, "server_message", None) or (str(error).splitlines() or [""])[0][:200]
    return CheckpointError(
        f"--push_to_hub {repository}: {HfApi().endpoint} cannot be reached or refuses this ({type(error).__name__}: "
        f"{reason}). Check the network, HF_ENDPOINT and HF_HUB_OFFLINE, and that the token may write there: it is the "
        "one in HF_TOKEN or from `hf auth login`"
    )
