"""Uploads to the hub. The hub's own client is replaced: what it sends is tested where it is made."""

from pathlib import Path
from unittest import mock

import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import LocalTokenNotFoundError

from diffcse_jax import cli
from diffcse_jax.errors import CheckpointError
from diffcse_jax.export import folder as export_folder


@pytest.fixture
def api(monkeypatch) -> mock.Mock:
    api = mock.create_autospec(HfApi, instance=True, endpoint="https://hub.example")
    api.create_repo.return_value = mock.Mock(repo_id="ada/model")
    api.upload_folder.return_value = mock.Mock(commit_url="https://hub.example/ada/model/commit/0")
    monkeypatch.setattr(export_folder, "HfApi", lambda: api)
    return api


def test_a_folder_is_uploaded(api):
    assert export_folder.push(Path("out"), "model", private=True).endswith("/ada/model/commit/0")
    api.create_repo.assert_called_once_with("model", private=True, exist_ok=True)
    sent = api.upload_folder.call_args.kwargs
    assert (sent["repo_id"], sent["folder_path"]) == ("ada/model", Path("out"))
    assert "[0-9]*_[A-Z]*/*" in sent["delete_patterns"]  # modules of an earlier upload
    export_folder.push(Path("out"), "ada/model")
    assert api.create_repo.call_args.kwargs["private"] is None  # the visibility stays


def test_problems_are_reported_before_anything_is_exported(api, tmp_path, capsys):
    def refused(name: str) -> str:
        with pytest.raises(SystemExit) as ended:
            cli.main(["export", "--model", str(tmp_path), "--push_to_hub", name])
        assert ended.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    assert "https://hub.example cannot be reached or refuses this (HFValidationError" in refused("ada/model/x")
    assert "is not the folder of a run" in refused("ada/x")
    api.whoami.side_effect = LocalTokenNotFoundError("Token is required")
    assert "(LocalTokenNotFoundError: Token is required). Check the network, HF_ENDPOINT" in refused("ada/x")
    api.create_repo.assert_not_called()


def test_a_refused_upload_keeps_the_export(api):
    api.upload_folder.side_effect = OSError("You don't have the rights")
    with pytest.raises(CheckpointError, match=r"You don't have the rights\).* The export in out is complete"):
        export_folder.push(Path("out"), "ada/model")
