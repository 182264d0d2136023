import io
import tarfile

import huggingface_hub
import pytest

from diffcse_jax.errors import DataError
from diffcse_jax.evaluation import suite

ROW = b"-\t-\t-\t-\t5\ta\tb\n"


def write_archive(path, members):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            if isinstance(content, str):
                member.type, member.linkname = tarfile.SYMTYPE, content
                tar.addfile(member)
            else:
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return path


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Stands in for the hub: what it holds is given by its members; counts downloads."""
    monkeypatch.delenv("DIFFCSE_DATA_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    downloads = []

    def holds(members):
        archive = write_archive(tmp_path / "snapshots/0123456789abcdef/senteval.tar", members)

        def download(repository, name, *, repo_type, local_files_only=False):
            assert (repository, name, repo_type) == (
                "princeton-nlp/datasets-for-simcse",
                "senteval.tar",
                "dataset",
            )
            if local_files_only and not downloads:
                raise FileNotFoundError
            downloads.append(name)
            return str(archive)

        monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
        return downloads

    return holds


def test_the_folder_comes_from_the_argument_or_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("DIFFCSE_DATA_DIR", str(tmp_path))
    with pytest.raises(DataError, match=r"there is no folder .*senteval"):
        suite.senteval_folder("")
    (tmp_path / "senteval").mkdir()
    assert suite.senteval_folder("") == tmp_path / "senteval"
    assert suite.senteval_folder(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("inner", ["senteval", "SentEval/data/downstream", "senteval/downstream"])
def test_a_folder_that_holds_the_suite_is_taken_for_it(tmp_path, monkeypatch, inner):
    (tmp_path / inner / "SICK").mkdir(parents=True)
    assert suite.senteval_folder(str(tmp_path)) == tmp_path / inner
    monkeypatch.setenv("DIFFCSE_DATA_DIR", str(tmp_path))
    assert suite.senteval_folder(str(tmp_path / inner)) == tmp_path / inner
    (tmp_path / "STS").mkdir()
    assert suite.senteval_folder(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("prefix", ["", "./", "SentEval/data/downstream/"])
def test_without_a_folder_the_hubs_suite_is_extracted_once(prefix, hub, tmp_path):
    hub({f"{prefix}STS/STSBenchmark/sts-dev.csv": ROW, f"{prefix}MR/rt-polarity.pos": b"good\n"})
    folder = suite.senteval_folder("")
    assert folder.is_relative_to(tmp_path / "cache/diffcse_jax/senteval-0123456789ab")
    assert (folder / "STS/STSBenchmark/sts-dev.csv").read_bytes() == ROW
    (folder / "MR/rt-polarity.pos").write_text("kept\n")
    assert suite.senteval_folder("") == folder
    assert (folder / "MR/rt-polarity.pos").read_text() == "kept\n"
    assert [path.name for path in (tmp_path / "cache/diffcse_jax").iterdir()] == ["senteval-0123456789ab"]


@pytest.mark.parametrize("members", [{"../outside": b"x"}, {"STS": "/etc"}, {"STS": "../../.."}])
def test_an_archive_that_reaches_outside_is_refused(members, hub, tmp_path):
    hub(members)
    with pytest.raises(DataError, match=r"cannot extract .*senteval\.tar"):
        suite.senteval_folder("")
    assert list((tmp_path / "cache/diffcse_jax").iterdir()) == []


def test_damaged_or_foreign_archives_are_named(hub, tmp_path):
    hub({"README": b"nothing"})
    with pytest.raises(DataError, match="no folder STS"):
        suite.senteval_folder("")
    (tmp_path / "broken.tar").write_bytes(b"no archive")
    with pytest.raises(DataError, match=r"cannot extract .*broken\.tar"):
        suite.extracted(tmp_path / "broken.tar", tmp_path / "out")


def test_offline_the_message_says_what_to_put_where(monkeypatch):
    monkeypatch.delenv("DIFFCSE_DATA_DIR", raising=False)

    def download(*_, **__):
        raise ConnectionError

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    with pytest.raises(DataError, match=r"senteval\.tar could not be downloaded \(ConnectionError\)") as caught:
        suite.senteval_folder("")
    for hint in ("--data_dir", "eval.data_dir", "DIFFCSE_DATA_DIR"):
        assert hint in str(caught.value)
