"""Uploads by the hub's own client to a server on this machine that speaks as much of its language as it takes."""

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from diffcse_jax import cli
from diffcse_jax.errors import CheckpointError
from diffcse_jax.export import folder as export_folder


class FakeHub(ThreadingHTTPServer):
    """Repositories in memory. The token `hf_ada` is that of ada, who may write to ada/ and lab/, but not to lab/old."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.created: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, content: object, status: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        if self.headers.get("Authorization") != "Bearer hf_ada":
            return self.answer({"error": "Invalid credentials"}, 401)
        if self.path == "/api/whoami-v2":
            return self.answer({"type": "user", "name": "ada", "orgs": [{"name": "lab"}]})
        _, _, _, user, name, *what = self.path.split("/")
        if not what:  # is it there, though it could not be made?
            return self.answer({"error": "Repository not found"}, 404)
        assert what[0] == "tree"
        files = self.server.repositories[f"{user}/{name}"]
        return self.answer([{"type": "file", "path": path, "size": 1, "oid": "0"} for path in files])

    def do_POST(self) -> None:
        assert self.headers.get("Authorization") == "Bearer hf_ada"
        sent = self.rfile.read(int(self.headers["Content-Length"]))
        path = self.path.partition("?")[0]
        if path == "/api/validate-yaml":
            return self.answer({"warnings": [], "errors": []})
        if path == "/api/repos/create":
            asked = json.loads(sent)
            repository = f"{asked.get('organization') or 'ada'}/{asked['name']}"
            if asked["name"] == "old":
                return self.answer({"error": "You don't have the rights to create a model here"}, 403)
            self.server.created.append(asked)
            status = 409 if repository in self.server.repositories else 200
            self.server.repositories.setdefault(repository, {})
            return self.answer({"url": f"{self.server.url}/{repository}"}, status)
        *_, user, name, what, _ = path.split("/")
        if what == "preupload":
            files = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in json.loads(sent)["files"]
            ]
            return self.answer({"files": files})
        assert what == "commit"
        files = self.server.repositories[f"{user}/{name}"]
        for line in map(json.loads, sent.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        return self.answer({"commitUrl": f"{self.server.url}/{user}/{name}/commit/{'0' * 40}", "commitOid": "0" * 40})


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    with FakeHub() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setenv("HF_TOKEN", "hf_ada")
        yield server
        server.shutdown()
        thread.join()


def write(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(name.encode() * 3)
    return folder


def test_a_folder_is_uploaded_and_a_second_upload_replaces_the_first(fake, tmp_path):
    export_folder.check_upload("ada/model")
    first = write(tmp_path / "first", "README.md", "model.safetensors", "1_WeightedLayerPooling/config.json")
    url = export_folder.push(first, "ada/model", private=True)
    assert url == f"{fake.url}/ada/model/commit/{'0' * 40}"
    assert fake.created[0]["visibility"] == "private"
    fake.repositories["ada/model"]["picture.png"] = b"added by hand"
    export_folder.push(write(tmp_path / "second", "README.md", "1_Pooling/config.json"), "ada/model")
    assert fake.repositories["ada/model"] == {
        "README.md": b"README.md" * 3, "model.safetensors": b"model.safetensors" * 3, "picture.png": b"added by hand",
        "1_Pooling/config.json": b"1_Pooling/config.json" * 3,
    }  # fmt: skip
    assert "visibility" not in fake.created[1]
    export_folder.check_upload("lab/model")


def test_problems_are_reported_before_anything_is_exported(fake, tmp_path, monkeypatch, capsys):
    def refused(*arguments: str) -> str:
        with pytest.raises(SystemExit) as ended:
            cli.main(["export", "--model", str(tmp_path), "--push_to_hub", *arguments])
        assert ended.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    assert "HFValidationError" in refused("ada/model/x")
    assert "is not the folder of a run" in refused("ada/x")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "refuses this (HfHubHTTPError: Invalid user token" in refused("ada/x")
    monkeypatch.delenv("HF_TOKEN")
    assert "LocalTokenNotFoundError" in refused("ada/x")
    assert fake.created == []


def test_a_refused_upload_keeps_the_export(fake, tmp_path, monkeypatch):
    folder = write(tmp_path / "export", "README.md")
    whole = rf".* The export in {folder} is complete"
    with pytest.raises(CheckpointError, match=r"You don't have the rights .* the token may write there" + whole):
        export_folder.push(folder, "lab/old")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # where nobody listens
    with pytest.raises(CheckpointError, match=r"http://127\.0\.0\.1:9 cannot be reached" + whole):
        export_folder.push(folder, "ada/model")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE"):
        export_folder.check_upload("ada/model")
