"""The model that a finished run exports.

All weights of a model are one number: 0 at the start, else the step.
"""

import dataclasses
import shutil
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_model import write_smallest_model
from tiny_networks import ENCODER, SIMCSE, VOCABULARY, config_of

from diffcse_jax.config import Config, EvalConfig
from diffcse_jax.errors import CheckpointError, ConfigError
from diffcse_jax.evaluation.dev import DevEvaluation
from diffcse_jax.evaluation.metrics import Metric, QueryMetric
from diffcse_jax.evaluation.systems import BM25, System
from diffcse_jax.io import write_json
from diffcse_jax.models import layers
from diffcse_jax.models.forward import Networks
from diffcse_jax.models.hf import read
from diffcse_jax.models.sentence_folder import RecordedPooler
from diffcse_jax.models.tokenizer import load_tokenizer
from diffcse_jax.run_folder.checkpoints import Checkpoints, read_encoder
from diffcse_jax.run_folder.finding import SEARCH
from diffcse_jax.run_folder.records import Measured, Record, read_selection, write_baseline
from diffcse_jax.run_folder.start import open_run
from diffcse_jax.run_folder.state import TrainState
from diffcse_jax.search.recommended import recommended
from diffcse_jax.training.loop import Run
from diffcse_jax.training.networks import Built, StartingCheckpoint
from diffcse_jax.training.optimizer import make_optimizer
from diffcse_jax.training.selection import (
    THIS_MODEL,
    Candidate,
    Comparison,
    Decision,
    Mixtures,
    Wording,
    _candidate,
    check_interpolation,
    choose,
    decide,
    describe,
    how_to_search,
    in_order,
    select,
)
from diffcse_jax.training.sharding import make_mesh

CLEAR = Comparison(start=60.0, interval=(3.5, 6.5), sample=20)
UNCLEAR = CLEAR._replace(interval=(-0.5, 2.5))
WORDING = Wording(
    start="tiny",
    metric="mrr",
    units="90 queries of 20 documents",
    items="documents",
    step=2,
    pooler="cls",
    quality="guard within 1 of 80.00",
)
BETTER = Candidate(1.0, 65.0)
WORSE = Candidate(1.0, 59.0)
DROPPED = BETTER._replace(keeps_quality=False)
LOST = BETTER._replace(lost=["halves 1.00, was 2.00"])
HALFWAY = Candidate(0.5, 65.0)


# The decision


def test_the_best_candidate_within_the_limit_comes_first_and_of_equal_ones_the_nearest_to_the_start():
    third, half, whole = Candidate(0.3, 65.0), Candidate(0.5, 65.0), Candidate(1.0, 66.0)
    assert in_order([whole, half, third]) == [whole, third, half]
    assert in_order([half, whole._replace(keeps_quality=False)]) == [half]
    assert in_order([DROPPED]) == [DROPPED]


def test_a_model_that_loses_nothing_is_chosen_before_a_better_one_that_does():
    worse = Candidate(0.5, 61.0)
    assert choose(60.0, [LOST, worse]) is worse
    assert choose(61.0, [LOST, worse]) is LOST
    assert choose(70.0, [BETTER, worse]) is BETTER


@pytest.mark.parametrize(
    ("candidate", "comparison", "caveat", "keeps_start"),
    [
        (BETTER, CLEAR, "", False),
        (BETTER, UNCLEAR, "interval", True),
        (BETTER, CLEAR._replace(sample=19), "sample", True),
        (BETTER, UNCLEAR._replace(sample=19), "sample", True),
        (BETTER._replace(score=60.0), UNCLEAR, "", True),
        (BETTER._replace(score=59.0), CLEAR._replace(sample=3), "", True),
        (DROPPED, CLEAR, "", True),
        (LOST, CLEAR, "", True),
        # Encoders of queries: made queries alone cannot tell.
        (BETTER, UNCLEAR._replace(words_teach=True), "interval", False),
        (BETTER, CLEAR._replace(words_teach=False), "", True),
        (WORSE, UNCLEAR._replace(words_teach=True), "", False),
        (WORSE, UNCLEAR._replace(words_teach=True, interval=(-2.0, -0.1)), "", True),
        (LOST, CLEAR._replace(words_teach=True), "", True),
    ],
)
def test_the_start_is_kept_unless_the_candidate_is_clearly_better(
    candidate, comparison, caveat, keeps_start
):
    decision = decide(candidate, comparison, keep_start=True)
    assert (decision.caveat, decision.keeps_start) == (caveat, keeps_start)
    assert decision.interpolation == (0.0 if keeps_start else 1.0)
    exported = decide(candidate, comparison, keep_start=False)
    assert (exported.caveat, exported.interpolation) == (caveat, 1.0)


def test_the_verdict_says_why_a_query_encoder_is_exported():
    comparison = UNCLEAR._replace(words_teach=True)
    first, _, exported = describe(decide(WORSE, comparison, keep_start=True), WORDING).split("\n")[
        :3
    ]
    assert "BM25 alone finds about as much as tiny" in first
    assert first.endswith("You get the trained model.")
    assert exported == "  Exported step 2."


def test_search_does_what_the_run_recommends_as_far_as_the_exported_model_can(tmp_path, capsys):
    def system(name: str, mode: str, encoder: str, score: float) -> System:
        return System(name, mode, encoder, 0.5, np.full(30, score))

    def searched(decision: Decision) -> tuple[tuple[str, float | None], str]:
        write_json(tmp_path / SEARCH, how_to_search(decision))
        return recommended(str(tmp_path)), capsys.readouterr().err

    words, start = system(BM25, "lexical", "", 70.0), system("tiny", "dense", "tiny", 60.0)
    dense, hybrid = (
        system(THIS_MODEL, "dense", THIS_MODEL, 65.0),
        system("both", "hybrid", THIS_MODEL, 68.0),
    )
    decision = decide(BETTER, CLEAR, keep_start=True, compared=[words, start, dense, hybrid])
    assert (decision.recommended, decision.search) == (words, words)
    first, *details = describe(decision, WORDING).splitlines()
    assert first.endswith(
        "is better than tiny. But no search with it is clearly better than BM25, which needs no "
        "training. Search with BM25."
    )
    assert "BM25" not in "".join(details)  # no other search has a higher score
    way, printed = searched(decision)
    assert way == ("lexical", None)
    assert "recommends --mode lexical, which is used. --mode dense compares" in printed
    other = system("tiny + BM25", "hybrid", "tiny", 70.0)
    decision = decide(BETTER, CLEAR, keep_start=True, compared=[start, other, dense, hybrid])
    assert (decision.recommended, decision.search) == (other, hybrid)
    way, printed = searched(decision)
    assert way == ("hybrid", 0.5)
    assert (
        "recommends --model tiny --mode hybrid --weight 0.5. Its own model is searched with --mode "
        "hybrid" in printed
    )
    equal = [
        words,
        start,
        other,
        dense,
        dataclasses.replace(hybrid, reciprocal_ranks=np.linspace(66.5, 74.5, 30)),
    ]
    helped = decide(BETTER, CLEAR, keep_start=True, compared=equal)
    assert helped.recommended is helped.search is equal[-1]  # not clearly better than the start's
    assert describe(helped, WORDING).endswith(
        "\n  The score of both is 0.50 higher than that of BM25, but this may be chance (95% interval -0.35 to +1.32)."
    )
    unclear = decide(BETTER, UNCLEAR, keep_start=True, compared=[start, other, hybrid])
    assert unclear.recommended is unclear.search is other
    advice = {"mode": "lexical", "weight": 0, "instead": {"model": "tiny", "mode": "hybrid"}}
    write_json(tmp_path / SEARCH, advice)
    assert recommended(str(tmp_path)) == ("lexical", None)
    assert "by words alone (--mode lexical), without its own model" in capsys.readouterr().err
    kept = decide(LOST, CLEAR, keep_start=True, compared=[start, dense])
    assert (kept.recommended, kept.search) == (dense, start)
    way, printed = searched(kept)
    assert way == ("dense", None)
    assert printed.endswith("recommends --mode dense, which is used\n")
    assert decide(BETTER, CLEAR, keep_start=True).search is None


# The verdict


HIGHER = (
    "\n  mrr 65.00 after training, 60.00 before (+5.00, 95% interval +3.50 to +6.50 over 90 queries of 20 "
    "documents"
)
MAY_BE_CHANCE = (
    "\n  mrr 65.00 after training, 60.00 before (+5.00, 95% interval -0.50 to +2.50 over 90 queries of 20 "
    "documents; the interval includes 0, so this may be chance)."
)


@pytest.mark.parametrize(
    ("candidate", "comparison", "keep_start", "verdict"),
    [
        (
            BETTER,
            CLEAR,
            True,
            "Training helped: the trained model is better than tiny."
            f"{HIGHER}).\n  Exported step 2.",
        ),
        (
            BETTER,
            UNCLEAR,
            True,
            "Training did not clearly help, so you keep tiny."
            f"{MAY_BE_CHANCE}\n  Exported tiny unchanged (eval.keep_start=False would export step 2).",
        ),
        (
            BETTER,
            CLEAR._replace(sample=11),
            False,
            "Training did not clearly help. You get the trained model anyway."
            f"{HIGHER}; fewer than 20 documents are too few to tell, so this may be chance)."
            "\n  Exported step 2.",
        ),
        (
            Candidate(1.0, 58.0),
            Comparison(60.0, (-4.0, 1.0), 20, start_with_pooler=55.0),
            False,
            "Training did not help. You get the trained model anyway."
            "\n  mrr 58.00 after training, 60.00 before (-2.00, 95% interval -4.00 to +1.00 over 90 queries "
            "of 20 documents)."
            "\n  With the pooler cls, tiny scored 55.00 before training: the change of pooler lost 5.00, "
            "and training gained 3.00."
            "\n  Exported step 2 anyway.",
        ),
        (
            DROPPED,
            CLEAR,
            False,
            "Training helped, but general quality dropped too far. You get the trained model anyway."
            f"{HIGHER}).\n  None of the models that were scored keeps guard within 1 of 80.00."
            "\n  Exported step 2 anyway.",
        ),
        (
            LOST,
            CLEAR,
            True,
            "Training helped, but other queries got worse, so you keep tiny."
            f"{HIGHER}).\n  Other queries got worse: halves 1.00, was 2.00 (eval.hold)."
            "\n  Exported tiny unchanged (eval.keep_start=False would export step 2).",
        ),
        (
            HALFWAY,
            CLEAR._replace(best=66.0),
            True,
            "Training helped: the trained model is better than tiny."
            f"{HIGHER}).\n  Exported 0.5 x step 2 + 0.5 x the starting checkpoint. Step 2 alone scores "
            "66.00. eval.interpolate=() scores step 2 alone.",
        ),
    ],
)
def test_the_verdict_says_what_and_why(candidate, comparison, keep_start, verdict):
    assert describe(decide(candidate, comparison, keep_start=keep_start), WORDING) == verdict


def test_the_best_checkpoint_is_named_only_if_it_is_better_and_not_exported():
    compared = [System("tiny", "dense", "tiny", 0.5, np.full(30, 60.0))]
    searched = describe(
        decide(HALFWAY, CLEAR._replace(best=66.0), keep_start=True, compared=compared), WORDING
    )
    assert (
        "66.00, but such mixtures answer people's own questions better (docs/records/search.md)"
        in searched
    )
    same = describe(decide(HALFWAY, CLEAR._replace(best=65.0), keep_start=True), WORDING)
    kept = describe(decide(HALFWAY, UNCLEAR._replace(best=66.0), keep_start=True), WORDING)
    assert "alone" not in same + kept


# Runs

AVG = {"model": {"projector": "none", "pooler": "avg"}}
BASELINE = Record(0, "avg_top2", {"mrr": 60.0, "guard": 80.0}, "mrr", "text", [[60.0] * 20])
MEASURED = {  # by the mean weight
    0.0: Measured({"mrr": 55.0, "guard": 80.0}, [[55.0] * 20]),
    1.0: Measured({"mrr": 59.0, "guard": 79.5}, [[59.0] * 20]),
    2.0: Measured({"mrr": 65.0, "guard": 79.0}, [[65.0] * 20]),
    3.0: Measured({"mrr": 65.0, "guard": 75.0}, [[65.0] * 20]),
    4.0: Measured({"mrr": 64.0, "guard": 70.0}, [[64.0] * 20]),
    5.0: Measured({"mrr": 70.0, "guard": 80.0}, [[70.0] * 10 + [60.0] * 10]),  # lucky
    6.0: Measured({"mrr": 59.0, "guard": 80.0}, [[59.0] * 10 + [70.0] * 10]),  # unlucky
}
QUARTERS = (0.25, 0.5, 1.0)


def weight_of(checkpoint) -> float:
    (weight,) = {round(float(array.mean()), 5) for array in checkpoint.transformer.values()}
    return weight


@dataclasses.dataclass(frozen=True)
class Mrr(Metric):
    units = "20 queries"
    sample = (20, "queries")


@dataclasses.dataclass(frozen=True)
class DividedMrr(QueryMetric):
    """The first ten queries choose, and the others judge."""

    units = "10 queries"
    sample = (20, "queries")
    groups = np.arange(20)


class ByWeight(DevEvaluation):
    """The scores of `MEASURED`. A weight above 2 loses other queries."""

    drift_metric = "guard"

    def measure(self, encoder):
        return MEASURED[self._weight(encoder)]

    def held(self, encoder):
        return {"halves": [[self._weight(encoder)]]}

    def regressions(self, start, model):
        return ["halves 1.00, was 2.00"] if model["halves"][0][0] > 2 else []

    def _weight(self, encoder) -> float:
        weights = layers.subset(encoder.params, "transformer")
        (weight,) = {round(float(array.mean()), 5) for array in weights.values()}
        return weight


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> StartingCheckpoint:
    folder = write_smallest_model(tmp_path_factory.mktemp("model"), ["one", "word"])
    model = read(str(folder))
    zeros = {name: np.zeros_like(array) for name, array in model.transformer.items()}
    recorded = RecordedPooler("avg_top2")
    model = dataclasses.replace(model, transformer=zeros)
    return StartingCheckpoint("tiny", model, load_tokenizer(folder), recorded)


@pytest.fixture
def chosen(tmp_path, start):
    """Finishes a run with checkpoints at steps, and gives the encoder that is read from its workdir."""

    def state_of(step: int) -> TrainState:
        params = {
            name: jnp.full_like(array, step) for name, array in start.checkpoint.transformer.items()
        }
        return TrainState(
            jnp.int32(step),
            layers.prefixed(params, "encoder"),
            {"count": jnp.int32(step)},
            jnp.int32(0),
        )

    def finish(*steps, metric=Mrr("mrr", 8), **options):
        config = config_of(SIMCSE, AVG, {"eval": {"guard": True, **options}})
        open_run(tmp_path, config, start.checkpoint, start.tokenizer, None)
        write_baseline(tmp_path, BASELINE)
        with Checkpoints(
            tmp_path, Record(0, "avg", {}, "mrr", "text", dev_text="dev")
        ) as checkpoints:
            for step in steps:
                checkpoints.save(state_of(step), {}, MEASURED[step])
        run = Run(
            config=config,
            workdir=tmp_path,
            mesh=make_mesh(config),
            base=start,
            built=Built(Networks(VOCABULARY, {}), state_of(0).params, {}),
            optimizer=make_optimizer(config.optim, 4),
            source=[],
            text="text",
            evaluation=ByWeight(metric, "dev"),
            sentences=lambda step: [],
        )
        verdict = select(run, BASELINE)
        assert read_selection(tmp_path).verdict == verdict
        return read_encoder(tmp_path), verdict

    return finish


@pytest.mark.parametrize(
    ("steps", "options", "weight", "exported"),
    [
        ((1, 2), {}, 2.0, "step 2"),
        ((1,), {"keep_start": True}, 0.0, "tiny unchanged"),
        ((4,), {"interpolate": QUARTERS}, 2.0, "0.5 x step 4 + 0.5 x the starting checkpoint"),
        (
            (4,),
            {"interpolate": QUARTERS, "max_drop": 1.0},
            2.0,
            "0.5 x step 4 + 0.5 x the starting",
        ),
        ((4,), {"max_drop": 1.0}, 4.0, "step 4 anyway."),
        ((4,), {"hold": ("halves_retrieval",), "keep_start": True}, 0.0, "tiny unchanged ("),
        (
            (4,),
            {"hold": ("halves_retrieval",), "interpolate": (0.5, 1.0)},
            2.0,
            "0.5 x step 4 + 0.5 x the",
        ),
    ],
)
def test_what_is_exported(steps, options, weight, exported, chosen):
    saved, verdict = chosen(*steps, **options)
    assert weight_of(saved.checkpoint) == weight
    assert f" Exported {exported}" in verdict
    assert saved.selection.verdict == verdict
    assert saved.baseline == BASELINE
    if weight == 0:
        assert (saved.pooler, saved.step, saved.dev) == ("avg_top2", 0, BASELINE.dev)
    else:
        assert saved.pooler == "avg"
        assert saved.dev == MEASURED[weight].scores


def test_what_training_gained_with_its_own_pooler(chosen):
    _, verdict = chosen(1)
    assert "With the pooler avg, tiny scored 55.00 before training: " in verdict
    assert "the change of pooler lost 5.00, and training gained 4.00." in verdict


def test_queries_that_judge_have_no_say_in_what_is_chosen_and_the_others_none_in_the_verdict(
    chosen,
):
    metric = DividedMrr("mrr", 8, judges=[False] * 10 + [True] * 10)
    lucky, verdict = chosen(2, 5, metric=metric)
    assert weight_of(lucky.checkpoint) == 5
    assert "Training did not help. You get" in verdict
    assert "mrr 60.00 after training, 60.00 before (+0.00, 95% interval +0.00 to" in verdict
    assert "over 10 queries)." in verdict
    together = DividedMrr("mrr", 8)
    _, verdict = chosen(metric=together)
    assert "mrr 70.00 after training, 60.00 before (+10.00, 95% interval +3.00 to" in verdict
    assert verdict.endswith("The same queries chose the checkpoint, which favours it a little.")


def test_a_model_that_only_the_judging_queries_prefer_is_checked_for_losses_too(chosen):
    metric = DividedMrr("mrr", 8, judges=[False] * 10 + [True] * 10)
    _, verdict = chosen(6, metric=metric, hold=("halves_retrieval",))
    assert "mrr 70.00 after training, 60.00 before" in verdict
    assert "Other queries got worse: halves 1.00, was 2.00 (eval.hold)." in verdict


def test_queries_that_learned_are_checked_for_losses_whatever_their_score(start):
    """They may be exported without a higher score. Then the verdict does not say that training helped."""
    config = mock.Mock(spec=Config, trains_queries=True, eval=EvalConfig(hold=("lead_retrieval",)))
    evaluation = mock.Mock(spec=DevEvaluation, metric="mrr", chosen=Mrr("mrr", 8))
    evaluation.regressions.return_value = LOST.lost
    run = mock.Mock(spec=Run, config=config, evaluation=evaluation, base=mock.Mock())
    candidate = _candidate(run, BASELINE, {1.0: MEASURED[1.0]}, mock.Mock(spec=Mixtures))
    assert candidate.lost == LOST.lost
    decision = decide(candidate, UNCLEAR._replace(words_teach=True), keep_start=True)
    assert decision.keeps_start
    assert describe(decision, WORDING).startswith(
        "Training did not clearly help, and other queries got worse, so you keep tiny."
    )


def test_the_earlier_choice_stays_where_no_new_one_can_be_made(chosen, tmp_path):
    assert weight_of(chosen(1)[0].checkpoint) == 1
    assert not (tmp_path / "selected.safetensors").exists()
    chosen(keep_start=True)
    assert (tmp_path / "selected.safetensors").is_file()
    for file in (tmp_path / "checkpoints/1/params").rglob("d/*"):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(CheckpointError, match="checkpoints/1"):
        chosen(keep_start=False)
    assert weight_of(read_encoder(tmp_path).checkpoint) == 0


def test_no_other_checkpoint_takes_the_place_of_the_selected_one(chosen, tmp_path):
    chosen(1, 2)
    shutil.rmtree(tmp_path / "checkpoints/2")
    with pytest.raises(
        CheckpointError, match=r"no complete checkpoint .*/checkpoints/2\. There are: 1$"
    ):
        read_encoder(tmp_path)


def test_interpolation_needs_the_same_parameters(start):
    halfway = {"eval": {"interpolate": (0.5,)}}
    kept = {"model": {"pooler": "cls", "projector": "mlp", "projector_train_only": False}}
    start = dataclasses.replace(start, checkpoint=ENCODER, recorded=RecordedPooler())
    with pytest.raises(
        ConfigError,
        match=r"eval\.interpolate=\(0\.5,\) needs a starting checkpoint with all trained",
    ):
        check_interpolation(config_of(SIMCSE, kept, halfway), start)
    check_interpolation(config_of(SIMCSE, AVG, halfway), start)
