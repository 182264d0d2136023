import json
import shutil
import sys

import huggingface_hub
import pytest
from test_sts import write_stsb
from tiny_model import MAX_LENGTH, write_tiny_model

from diffcse_jax import cli
from diffcse_jax.config import Config
from diffcse_jax.models import sentence_folder

ROWS = [
    (5, "a dog runs", "a dog is running"),
    (1, "a cat", "the market fell"),
    (3, "no one sings", "a man sings"),
]


@pytest.fixture
def senteval(tmp_path):
    for split, rows in (("dev", ROWS), ("test", [*ROWS[::-1], ROWS[0]])):
        write_stsb(tmp_path / "senteval", split, rows)
    return tmp_path / "senteval"


@pytest.fixture(scope="module")
def model(tmp_path_factory, minilm_dir):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "model", minilm_dir)


@pytest.fixture
def run(tmp_path, model, senteval, capsys):
    """Evaluates a small model; returns the exit code, the results and what was printed."""

    def run(*arguments):
        output = tmp_path / "out/results.json"
        models = [] if "--model" in arguments else ["--model", str(model)]
        arguments = [*models, "--data_dir", str(senteval), "--output", str(output), *arguments]
        try:
            code = cli.main(["evaluate", *arguments])
        except SystemExit as exit_:
            code = exit_.code
        return (
            code,
            json.loads(output.read_text()) if output.exists() else None,
            capsys.readouterr(),
        )

    return run


def test_results_that_would_not_be_replaced_are_set_aside(run, tmp_path):
    """Hours of scores may be in a file that a short command writes to."""
    task = ("--tasks", "STSBenchmark", "--pooler")
    _, first, printed = run(*task, "avg")
    _, again, repeated = run(*task, "avg")
    assert again == first
    assert "other results" not in printed.err + repeated.err
    _, _, printed = run(*task, "cls")
    assert "held other results (" in printed.err
    assert "STSBenchmark). They are now in results.1.json." in printed.err
    assert json.loads((tmp_path / "out/results.1.json").read_text()) == first
    _, _, printed = run(*task, "cls", "--truncate_dim", "8")
    assert "They are now in results.2.json." in printed.err
    _, _, printed = run(*task, "cls")  # whole embeddings, without the option
    assert "They are now in results.3.json." in printed.err
    (tmp_path / "out/results.json").write_text("notes")
    _, _, printed = run(*task, "cls")
    assert "(not of an evaluation). They are now in results.4.json." in printed.err
    assert (tmp_path / "out/results.4.json").read_text() == "notes"


def test_results_hold_what_scripts_rely_on(run):
    code, results, printed = run("--tasks", "STSBenchmark", "--pooler", "avg")
    assert code == 0
    assert {
        "model",
        "pooler",
        "backend",
        "mode",
        "aggregation",
        "tasks",
        "averages",
        "missing",
    } <= set(results)
    assert [results[key] for key in ("pooler", "backend", "mode", "aggregation")] == [
        "avg",
        "jax",
        "test",
        "all",
    ]
    scores = results["tasks"]["STSBenchmark"]
    assert set(scores) == {"spearman", "pearson", "n", "dev"}
    assert (scores["n"], scores["dev"]["n"]) == (4, 3)
    assert (results["averages"], results["missing"]) == ({"sts": None, "transfer": None}, {})
    reason = "test has 4 instead of 1,379 examples, dev has 3 instead of 1,500 examples"
    assert results["not_official"] == {"STSBenchmark": reason}
    assert f"not the official data: {reason}" in printed.out
    assert f"{scores['spearman']:.2f}" in printed.out


def test_several_models_are_compared(run, tmp_path, model):
    models = [str(model), str(shutil.copytree(model, tmp_path / "other"))]
    arguments = ("--model", *models, "--tasks", "STSBenchmark", "--pooler", "avg", "--published")
    code, results, printed = run(*arguments, "--format", "markdown")
    assert code == 0
    assert [each["model"] for each in results["models"]] == models
    head, _, *rows = printed.out.splitlines()
    assert head.startswith("| model ")
    assert any(row.startswith("| SimCSE-BERT-base (published) ") for row in rows)
    for each, row in zip(results["models"], rows[-2:], strict=True):
        assert row.startswith(f"| {each['model']} (not the official data: STS-B) ")
        assert row.endswith(f" {each['tasks']['STSBenchmark']['spearman']:.2f} |")


def test_another_pooler_than_the_recorded_one_is_warned_of(run, tmp_path, model):
    shutil.copytree(model, tmp_path / "model")
    sentence_folder.write(
        tmp_path / "model", sentence_folder.RecordedPooler("avg"), num_blocks=3, hidden_size=16
    )
    arguments = (
        "--model",
        str(tmp_path / "model"),
        "--tasks",
        "STSBenchmark",
        "--pooler",
        "cls_before_pooler",
    )
    with pytest.warns(
        UserWarning, match="was trained with the pooler 'avg' and is used with 'cls_before_pooler'"
    ):
        _, results, _ = run(*arguments)
    assert results["pooler"] == "cls_before_pooler"


def test_sentences_that_torch_cuts_are_reported(run, senteval):
    pytest.importorskip("torch")
    write_stsb(senteval, "dev", [*ROWS, (5, "long " * 60, "a dog")])
    with pytest.warns(
        UserWarning, match=f"truncated 1 of 8 texts to {MAX_LENGTH} tokens, the most that the model"
    ):
        run("--tasks", "STSBenchmark", "--mode", "dev", "--pooler", "avg", "--backend", "torch")


def test_vectors_are_cut_and_post_processed(run, tmp_path):
    words = ["dog", "cat", "man", "market", "runs", "sings", "fell", "bird", "tree", "house"]
    (tmp_path / "text.txt").write_text(
        "\n".join(f"the {a} {b}" for a in words for b in words) + "\n"
    )
    post = f"whitening:{tmp_path}/text.txt"
    arguments = ("--tasks", "STSBenchmark", "--pooler", "avg", "--post", post)
    code, results, printed = run(*arguments, "--truncate_dim", "7")
    assert code == 0
    assert (results["truncate_dim"], results["post"]) == (7, post)
    assert (
        f"{results['model']}, 7 dimensions (not the official data: STS-B), pooler avg, post {post}\n"
        in printed.out
    )


def test_scores_before_an_error_are_kept(run, senteval):
    (senteval / "SICK").mkdir()
    (senteval / "SICK/SICK_trial.txt").write_text("id\ta\tb\tscore\n1\ta dog\ta cat\thigh\n")
    code, results, printed = run(
        "--mode", "dev", "--tasks", "STSBenchmark,SICKRelatedness", "--pooler", "avg"
    )
    assert code == 2
    assert "SICK_trial.txt, line 2: expected a number from 0 to 5, found 'high'" in printed.err
    assert results["tasks"]["STSBenchmark"]["n"] == 3


def test_missing_data_is_listed_and_never_averaged(run, senteval):
    code, results, printed = run("--pooler", "avg")
    assert code == 3
    assert list(results["tasks"]) == ["STSBenchmark"]
    assert str(senteval / "SICK/SICK_trial.txt") in results["missing"]["SICKRelatedness"]
    assert results["averages"]["sts"] is None
    assert "missing" in printed.out
    assert run("--pooler", "avg", "--allow_missing")[0] == 0


def test_data_that_cannot_be_downloaded_is_missing(run, monkeypatch):
    def no_network(*_, **__):
        raise OSError("no network")

    monkeypatch.delenv("DIFFCSE_DATA_DIR", raising=False)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", no_network)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", no_network)
    code, results, printed = run("--tasks", "STSBenchmark,MR", "--data_dir", "", "--pooler", "avg")
    assert code == 3
    assert list(results["missing"]) == ["STSBenchmark", "MR"]
    assert printed.out.count("could not be downloaded") == 1
    assert "STS-B, MR: missing: senteval.tar could not be downloaded (OSError)" in printed.out


def test_geometry_and_retrieval_are_printed_and_drawn(run, tmp_path):
    code, results, printed = run("--tasks", "geometry,retrieval", "--pooler", "avg")
    assert code == 0
    assert [results["tasks"][name]["n"] for name in ("geometry", "retrieval")] == [4, 2]
    for score in ("alignment", "recall@5"):
        assert score in printed.out
    pictures = {path.name for path in (tmp_path / "out/report").iterdir()}
    assert pictures == {"similarity_by_rating.png", "singular_values.png"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--data_dir", "/nowhere", "--pooler", "avg"],
            "error: no evaluation data: there is no folder /nowhere",
        ),
        (["--tasks", "STSBenchmark"], "does not record its pooler. Choose one of: cls"),
        (["--model", "/nowhere"], "error: model folder not found: /nowhere"),
        (["--published", "--mode", "dev"], "error: --published scores are scores of test splits"),
        (
            ["--queries", "/dev/null", "--tasks", "retrieval"],
            "error: --queries: cannot read /dev/null: it is a pipe",
        ),
        (["--output", "/dev/null", "--pooler", "avg"], "it is not a regular file. Name a file"),
    ],
)
def test_mistakes_exit_with_2_and_a_reason(arguments, message, run):
    code, results, printed = run(*arguments)
    assert (code, results) == (2, None)
    assert message in printed.err


def test_torch_reads_the_export_of_a_run_or_asks_for_it(run, tmp_path, model, monkeypatch):
    pytest.importorskip("torch")
    (tmp_path / "run/checkpoints/7").mkdir(parents=True)
    (tmp_path / "run/config.json").write_text(json.dumps(Config().to_dict()))
    shutil.copytree(model, tmp_path / "run/export")
    (tmp_path / "run/selection.json").touch()
    tasks = ("--tasks", "STSBenchmark", "--pooler", "avg", "--backend", "torch")
    assert run("--model", str(tmp_path / "run"), *tasks)[0] == 0
    step = tmp_path / "run/checkpoints/7"
    code, _, printed = run("--model", str(step), *tasks)
    assert code == 2
    assert f"`diffcse export --model {step} --output DIR`" in printed.err
    monkeypatch.setitem(sys.modules, "torch", None)
    code, _, printed = run(*tasks)
    assert code == 2
    assert "pip install 'diffcse_jax[torch]'" in printed.err
