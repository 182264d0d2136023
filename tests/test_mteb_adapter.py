import json

import datasets
import mteb
import numpy as np
import pytest
from mteb.abstasks.sts import AbsTaskSTS
from mteb.abstasks.task_metadata import TaskMetadata
from tiny_model import write_tiny_model

from diffcse_jax import SentenceEncoder
from diffcse_jax.config import Config
from diffcse_jax.evaluation import sts
from diffcse_jax.evaluation.mteb_adapter import MtebEncoder

PAIRS = [
    ("a dog runs", "a dog is running", 5.0),
    ("a cat sleeps", "the market fell sharply", 0.5),
    ("no one sings", "a man sings", 2.0),
    ("the sun shines over the sea", "it is sunny at the sea", 4.0),
    ("two plus two is four", "a bird", 0.0),
]


class TinySTS(AbsTaskSTS):
    """A task that downloads nothing."""

    metadata = TaskMetadata(
        name="TinySTS",
        description="Five pairs.",
        dataset={"path": "tiny/sts", "revision": "1"},
        type="STS",
        category="t2t",
        eval_splits=["test"],
        eval_langs=["eng-Latn"],
        main_score="cosine_spearman",
        modalities=["text"],
    )

    def load_data(self, **_):
        columns = dict(
            zip(
                ("sentence1", "sentence2", "score"),
                map(list, zip(*PAIRS, strict=True)),
                strict=True,
            )
        )
        self.dataset = datasets.DatasetDict({"test": datasets.Dataset.from_dict(columns)})
        self.data_loaded = True


pytestmark = pytest.mark.filterwarnings("ignore")  # of mteb and its dependencies


def scores_of(encoder, cache):
    results = mteb.evaluate(encoder, [TinySTS()], cache=cache, co2_tracker=False)
    (scores,) = results.task_results[0].scores["test"]
    return scores


def test_scores_agree_with_ours_and_no_model_gets_those_of_another(tmp_path, minilm_dir):
    """Two exports have folders of the same name; another pooler changes the embeddings of one folder."""
    models = [
        write_tiny_model(tmp_path / run / "export", minilm_dir, blocks=n)
        for run, n in (("a", 1), ("b", 2))
    ]
    (tmp_path / "a/config.json").write_text(json.dumps(Config().to_dict()))
    choices = [(models[0], "avg"), (models[1], "avg"), (models[0], "cls_before_pooler")]
    encoders = [MtebEncoder(str(model), pooler=pooler) for model, pooler in choices]
    cache = mteb.ResultCache(tmp_path / "cache")
    first, second, gold = zip(*PAIRS, strict=True)
    for encoder, (model, pooler) in zip(encoders, choices, strict=True):
        ours = SentenceEncoder.from_pretrained(str(model), pooler=pooler)
        expected = sts.correlations(
            sts.cosine(ours.encode(first), ours.encode(second)), np.array(gold)
        )
        scores = scores_of(encoder, cache)
        assert 100 * scores["cosine_spearman"] == pytest.approx(expected["spearman"], abs=1e-4)
        assert 100 * scores["cosine_pearson"] == pytest.approx(expected["pearson"], abs=1e-3)
        assert scores["main_score"] == scores["cosine_spearman"]
    names = [encoder.mteb_model_meta.name for encoder in encoders]
    assert [name.rpartition("-")[0] for name in names] == [
        "diffcse_jax/a",
        "diffcse_jax/export",
        "diffcse_jax/a",
    ]
    assert len(set(names)) == 3
    again, renamed = (
        MtebEncoder(str(models[0]), pooler="avg"),
        MtebEncoder(str(models[0]), "1", pooler="avg"),
    )
    assert again.mteb_model_meta.revision == encoders[0].mteb_model_meta.revision
    assert (renamed.mteb_model_meta.revision, renamed.mteb_model_meta.name) == ("1", names[0])
