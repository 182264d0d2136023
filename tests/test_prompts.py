"""Prompts are read, applied, trained with and exported as in sentence-transformers."""

import json
import warnings

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from tiny_model import write_tiny_model
from tiny_run import overrides, run_settings

from diffcse_jax import SentenceEncoder
from diffcse_jax.cli import main
from diffcse_jax.config import DataConfig
from diffcse_jax.data.batches import BatchSource
from diffcse_jax.data.sampling import Crops, open_augmentation
from diffcse_jax.data.token_store import Corpus, Row, build_or_open
from diffcse_jax.errors import CheckpointError, ConfigError
from diffcse_jax.models.sentence_folder import (
    TWO_LAYER_POOLERS,
    Prompts,
    RecordedPooler,
    for_columns,
    read,
    write,
)
from diffcse_jax.models.tokenizer import load_tokenizer
from diffcse_jax.search.index import Index

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

E5 = Prompts({"query": "query: ", "passage": "passage: "})
TEXTS = ["How do I install a package?", "Write to the list.", "query", "a " * 30]


@pytest.fixture
def folder(tmp_path, minilm_dir):
    """Makes a sentence-transformers folder with prompts."""

    def make(prompts=E5, pooler="avg"):
        path = write_tiny_model(tmp_path / pooler, minilm_dir)
        if pooler in TWO_LAYER_POOLERS:
            config = json.loads((path / "config.json").read_text())
            (path / "config.json").write_text(json.dumps(config | {"output_hidden_states": True}))
        head = {
            "dense.kernel": np.eye(16, dtype=np.float32),
            "dense.bias": np.zeros(16, np.float32),
        }
        write(path, RecordedPooler(pooler, head, prompts=prompts), 3, 16)
        return path

    return make


@pytest.mark.parametrize("pooler", ["avg", "avg_first_last", "cls", "lasttoken", "weightedmean"])
def test_embeddings_equal_those_of_sentence_transformers(folder, pooler):
    path = folder(Prompts({**E5.by_name, "title": "title: "}, "title"), pooler)
    ours, theirs = (
        SentenceEncoder.from_pretrained(path),
        SentenceTransformer(str(path), device="cpu"),
    )
    for encode in (
        lambda model: model.encode(TEXTS),
        lambda model: model.encode(TEXTS, prompt="Represent: "),
        lambda model: model.encode_document(TEXTS),
        lambda model: model.encode_query(TEXTS, prompt_name="title"),
    ):
        np.testing.assert_allclose(encode(ours), encode(theirs), atol=1e-5)


def test_a_forgotten_prompt_is_warned_of_once(folder, recwarn):
    encoder = SentenceEncoder.from_pretrained(folder())
    encoder.encode_query("a")
    encoder.encode("a", prompt="")
    assert not recwarn
    encoder.encode("a")
    encoder.encode("b")
    assert [
        str(each.message)
        for each in recwarn
        if "query ('query: '), passage ('passage: ')" in str(each.message)
    ]
    assert len(recwarn) == 1


def test_prompts_of_the_readme_are_warned_of(folder):
    path = folder(Prompts())
    (path / "README.md").write_text(
        'Each text starts with "query: " or "passage: ". `query: ` is for symmetric tasks.'
    )
    warning = r"README of .* names prompts \('query: ', 'passage: '\)"
    for use in (
        lambda encoder: encoder.encode("a"),
        lambda encoder: encoder.encode_query("a"),
        lambda encoder: Index(encoder, ["a text"]),
    ):
        with pytest.warns(UserWarning, match=warning):
            use(SentenceEncoder.from_pretrained(path))


def test_prompts_with_other_names_than_those_of_queries_are_warned_of(folder):
    path = folder(Prompts({"s2p_query": "Find: ", "s2s_query": "Compare: "}))
    with pytest.warns(UserWarning, match=r"It has: s2p_query \('Find: '\)"):
        SentenceEncoder.from_pretrained(path).encode_document("a")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SentenceEncoder.from_pretrained(path).encode("a", prompt="")


@pytest.mark.parametrize(
    ("asked", "columns", "expected"),
    [
        ((), 3, ("query: ", "passage: ", "passage: ")),
        ((), 1, ("query: ",)),
        (("none",), 2, ("", "")),
        (("passage",), 2, ("passage: ", "passage: ")),
        (("query", "Text: "), 2, ("query: ", "Text: ")),
    ],
)
def test_columns_get_their_prompts_and_the_trained_model_keeps_them(asked, columns, expected):
    texts, trained = for_columns(E5, asked, columns)
    assert texts == expected
    if asked:
        assert (trained.query, trained.document) == (texts[0], texts[-1])
    else:
        assert trained is E5


def test_wrong_prompts_are_refused(folder):
    with pytest.raises(ConfigError, match=r"no prompt 'querry'.*Known: query, passage, none"):
        for_columns(E5, ("querry",), 2)
    with pytest.raises(ConfigError, match="has 2 prompts, and the text 3 columns"):
        for_columns(E5, ("query", "passage"), 3)
    with pytest.raises(
        ConfigError, match=r"prompt_name='document': the model has no such prompt. It has: query"
    ):
        E5.choose(prompt_name="document")
    path = folder()
    (path / "config_sentence_transformers.json").write_text(
        '{"prompts": {"query": "q"}, "default_prompt_name": "x"}'
    )
    with pytest.raises(CheckpointError, match="default_prompt_name 'x' is not one of the prompts"):
        read(path)


def test_a_model_whose_pooling_leaves_prompts_out_is_refused(folder):
    path = folder() / "1_Pooling/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"include_prompt": False}))
    message = r"1_Pooling/config\.json: include_prompt is false: .*not supported"
    with pytest.raises(CheckpointError, match=message):
        SentenceEncoder.from_pretrained(path.parents[1])


@pytest.mark.parametrize("pairs", ["dropout", "crops"])
def test_views_begin_with_their_prompt(tmp_path, minilm_dir, pairs):
    """Neither crops nor augmentations touch it."""
    tokenizer = load_tokenizer(minilm_dir)
    rows = [Row((" ".join(map(str, range(start, start + 30))),), start) for start in range(8)]
    data = DataConfig(
        "rows", pairs=pairs, max_length=20, augmentation="none" if pairs == "crops" else "crop"
    )
    corpus = Corpus("rows", ("sentence",), lambda _: iter([rows]), lambda: "rows")
    store = build_or_open(corpus, tokenizer, 64, tmp_path, prompts=["search query: "])
    examples = Crops(store, 20, 3) if pairs == "crops" else store  # the prompt has three tokens
    options = {
        "augmentation": open_augmentation(data, tokenizer),
        "prompt_tokens": 3,
        "pad_token_id": 0,
    }
    options |= {"batch_size": 4, "steps": 3, "seed": 1}
    source = BatchSource(examples, **options)
    for index in range(3):
        batch = source[index]
        for ids in batch.input_ids.reshape(-1, batch.input_ids.shape[-1]):
            words = tokenizer.decode(ids, skip_special_tokens=False).removesuffix(" [PAD]").split()
            assert words[:4] == ["[CLS]", "search", "query", ":"]
            numbers = [int(word) for word in words[4:] if word.isdecimal()]
            assert numbers == [*range(numbers[0], numbers[0] + len(numbers))]


@pytest.mark.slow
def test_a_run_trains_evaluates_and_exports_with_prompts(tmp_path, minilm_dir, capsys, folder):
    settings = run_settings(tmp_path, minilm_dir, train={"steps": 2})
    settings |= {
        "model.name_or_path": str(folder()),
        "model.pooler": "own",
        "data.prompts": "passage",
    }
    main(
        [
            "train",
            "--config",
            "simcse_base",
            "--workdir",
            str(tmp_path / "run"),
            *overrides(settings),
        ]
    )
    assert "prompts: 'passage: '" in capsys.readouterr().err
    export = tmp_path / "run" / "export"
    trained, exported = (
        SentenceEncoder.from_pretrained(each) for each in (tmp_path / "run", export)
    )
    assert trained.prompts == exported.prompts
    assert (exported.prompts.query, exported.prompts.document) == ("passage: ", "passage: ")
    theirs = SentenceTransformer(str(export), device="cpu")
    np.testing.assert_allclose(
        exported.encode_document(TEXTS), theirs.encode_document(TEXTS), atol=1e-5
    )
    np.testing.assert_allclose(trained.encode_query(TEXTS), theirs.encode_query(TEXTS), atol=1e-5)
    assert read(export).pooler == "avg"


def test_an_index_is_searched_with_the_prompts_that_it_was_built_with(folder, tmp_path, capsys):
    path = folder()
    encoder = SentenceEncoder.from_pretrained(path)
    encoder.build_index(TEXTS)
    encoder.save_index(tmp_path / "index")
    ((text, score),) = encoder.search(TEXTS[0], top_k=1)
    vectors = (
        encoder.encode_query(TEXTS[0], normalize=True),
        encoder.encode_document(text, normalize=True),
    )
    assert score == pytest.approx(np.dot(*vectors), abs=1e-5)

    encoder.build_index(TEXTS, prompt_name="query")
    assert encoder.search(TEXTS[0], top_k=1)[0] == (TEXTS[0], pytest.approx(1, abs=1e-5))
    with pytest.raises(
        ConfigError, match=r"texts with the prompt 'query: '.*prompt of documents is 'passage: '"
    ):
        encoder.search(TEXTS[0], prompt_name="passage")

    settings = path / "config_sentence_transformers.json"
    settings.write_text(settings.read_text().replace("passage: ", "text: "))
    with pytest.raises(SystemExit):
        main(["search", "--input", str(tmp_path / "index"), "a"])
    said = "texts with the prompt 'passage: ', but the model's prompt of documents is 'text: '"
    assert said in capsys.readouterr().err


def test_embed_uses_the_prompt_of_documents_or_the_named_one(folder, tmp_path, capsys):
    (tmp_path / "text.txt").write_text("".join(f"{text}\n" for text in TEXTS))
    common = ["embed", "--model", str(folder()), "--input", str(tmp_path / "text.txt")]
    main([*common, "--output", str(tmp_path / "documents")])
    main([*common, "--output", str(tmp_path / "queries"), "--prompt_name", "query"])
    main(["search", "--input", str(tmp_path / "documents"), "Write to the list."])
    capsys.readouterr()
    main(["search", "--input", str(tmp_path / "queries"), "--top_k", "1", TEXTS[1]])
    shown = " ".join(capsys.readouterr().out.split())
    assert " 1.000 " in shown
    assert "text.txt:2 Write to the list." in shown
    with pytest.raises(SystemExit):
        main(["search", "--input", str(tmp_path / "queries"), "--prompt_name", "passage", TEXTS[1]])
    with pytest.raises(SystemExit):
        main([*common, "--output", str(tmp_path / "documents"), "--prompt_name", "query"])
    assert "prompt: 'passage: ' then, 'query: ' now" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["bert", "distilbert"])  # the latter in some folders of 2020
def test_texts_are_cut_and_lower_cased_as_the_folder_records(folder, recwarn, kind):
    path = folder(Prompts())
    (path / f"sentence_{kind}_config.json").write_text(
        '{"max_seq_length": 12, "do_lower_case": true}'
    )
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    (path / "tokenizer.json").write_text(json.dumps(tokenizer | {"normalizer": None}))
    ours, theirs = (
        SentenceEncoder.from_pretrained(path),
        SentenceTransformer(str(path), device="cpu"),
    )
    texts = ["A Man PLAYS the guitar", "word " * 30]
    np.testing.assert_allclose(ours.encode(texts), theirs.encode(texts), atol=1e-5)
    assert "truncated 1 of 2 texts to 12 tokens, the most that the model reads" in str(
        recwarn[-1].message
    )
    assert np.abs(ours.encode(texts[1], max_length=40) - ours.encode(texts[1])).max() > 1e-3
