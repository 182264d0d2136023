r"""Measure adaptation on search collections.

Their queries and judgements are people's own, and no run trains on them.

    python -m benchmarks.search_collections --data COLLECTIONS --work FOLDER \
        --output benchmarks/results/NAME.json

COLLECTIONS contains a folder for each collection in BEIR's form. Each run trains on a collection's
documents, with the preset `adapt` (`ours`) or with sentence-transformers' recipe for pairs on the
same texts (`pairs`), from the same starting checkpoint, with the same number of steps, batch size
and sentence length. `queries` trains the query encoder alone, with the preset `adapt_queries`,
from an index of the documents, so that its time is without encoding them.
`pretrained` first continues the starting checkpoint as a masked LM on the documents (configuration
`masked_lm`), and then does as `ours`.

Five systems then answer the questions: BM25, the starting checkpoint, the trained model (the best
checkpoint, even if the run exports the start), and both with BM25, with each weight that a run may
recommend. `recommended` is the one that the run recommends. Paired randomisation tests compare
scores of the same questions, which are means over the seeds.

WORK keeps each result, so the same command resumes after an interruption.
"""

import argparse
import dataclasses
import json
import multiprocessing
import re
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import scipy.stats

from benchmarks import adaptation_recipes, measure
from diffcse_jax.config import Config, shipped_config
from diffcse_jax.errors import reported_to_user
from diffcse_jax.search.modes import DEFAULT_WEIGHT, HIGHER_WEIGHT

OURS, PAIRS, PRETRAINED, QUERIES = "ours", "pairs", "pretrained", "queries"
START, TRAINED, WITH_BM25, RECOMMENDED = "start", "trained", " + BM25", "recommended"
# The ends of names of hybrid systems, and the weight of BM25.
HYBRID = {WITH_BM25: DEFAULT_WEIGHT, f"{WITH_BM25} {HIGHER_WEIGHT:g}": HIGHER_WEIGHT}
COMPARED = (
    (START, START + WITH_BM25),
    (START, TRAINED),
    (START + WITH_BM25, TRAINED + WITH_BM25),
    (START, f"{PAIRS}: {TRAINED}"),
    (f"{PAIRS}: {TRAINED}", TRAINED),
    (START, RECOMMENDED),
    (START + WITH_BM25, RECOMMENDED),
    (START, f"{QUERIES}: {TRAINED}"),
    (START + WITH_BM25, f"{QUERIES}: {TRAINED}{WITH_BM25}"),
    (START + WITH_BM25, f"{QUERIES}: {RECOMMENDED}"),
)

Scores = dict[str, dict[str, dict[str, float]]]  # by system, measure and query


def answer(folder: Path, model: Path | str, name: str, embeddings: Path | None = None) -> Scores:
    """Score BM25, a model, and both, on the questions of a collection.

    Args:
        folder: The collection.
        model: The model's name or folder.
        name: The name of the model as a system.
        embeddings: A file with the embeddings of the documents. It is written if it is missing,
            and read otherwise, so name it only for models that encode documents alike.
    """
    from diffcse_jax import SentenceEncoder
    from diffcse_jax.evaluation.retrieval import measure as score
    from diffcse_jax.evaluation.search_collections import read_collection
    from diffcse_jax.search.fusion import combine
    from diffcse_jax.search.lexical import LexicalIndex, best_rows, found_by_words

    collection = read_collection(folder)
    encoder = SentenceEncoder.from_pretrained(str(model))
    documents, queries = [*collection.documents.values()], [*collection.queries.values()]
    if embeddings and embeddings.is_file():
        of_documents = np.load(embeddings)
    else:
        of_documents = encoder.encode_document(documents, normalize=True)
        if embeddings:
            np.save(embeddings, of_documents)
    similarities = encoder.encode_query(queries, normalize=True) @ of_documents.T
    index, ids = LexicalIndex.build(documents), [*collection.documents]
    rankings: dict[str, dict[str, dict[str, float]]] = {}
    for key, text, dense in zip(collection.queries, queries, similarities, strict=True):
        lexical = index.scores(text)
        found = {"BM25": lexical, name: dense}
        for end, weight in HYBRID.items():
            found[name + end] = combine(dense, lexical, weight, dense, lexical)
        for system, scores in found.items():
            best_of = found_by_words if system == "BM25" else best_rows
            rows = best_of(scores, 101)  # one more than counts: a query does not find itself
            best = {ids[row]: float(scores[row]) for row in rows.tolist()}
            rankings.setdefault(system, {})[key] = best
    return {system: score(collection.judgements, ranking) for system, ranking in rankings.items()}


def measure_start(folder: Path, model: str, place: Path) -> dict[str, Any]:
    """Score a starting checkpoint on people's questions, and on queries made of the documents."""
    from diffcse_jax import SentenceEncoder
    from diffcse_jax.evaluation import CachedEncoder
    from diffcse_jax.evaluation.queries import queries_of_documents
    from diffcse_jax.evaluation.systems import compare_systems, made_weight, words_find_as_much

    scores = answer(folder, model, START, embeddings_of(place))
    metric = queries_of_documents(str(folder))
    encoder = CachedEncoder(SentenceEncoder.from_pretrained(model))
    weight = made_weight(words_find_as_much(START, encoder, metric))
    compared = compare_systems({START: encoder}, metric.without_repetitions(), weight)
    return {
        "scores": scores,
        "made": [system.summary() for system in compared],
        "weight": weight,
    }


def embeddings_of(place: Path) -> Path:
    """Return the file of a starting checkpoint's embeddings of documents.

    Args:
        place: The path of a part: `WORK/COLLECTION.MODEL.start` or
            `WORK/COLLECTION.MODEL.RECIPE.SEED`.
    """
    name = place.name.removesuffix(".start")
    name = re.sub(rf"\.({'|'.join(RECIPES)})\.\d+$", "", name)
    return place.with_name(f"{name}.documents.npy")


def measure_ours(folder: Path, config: Config, place: Path) -> dict[str, Any]:
    """Train as the configuration says, score the best checkpoint, and name the recommendation."""
    from diffcse_jax.run_folder.records import read_selection
    from diffcse_jax.training.train import train_in_folder

    keeps_documents = "query_distillation" in config.losses
    if keeps_documents:
        config = from_index(config, place)
    start = time.process_time()
    verdict = train_in_folder(config, place)
    processor_seconds = time.process_time() - start
    selection = read_selection(place)
    assert selection is not None  # the run has finished
    advice = verdict.partition(" Search with ")[2]
    named = {f"{each['name']}{end}": each for each in selection.systems for end in ".,"}
    system = next((each for name, each in named.items() if advice.startswith(name)), None)
    if selection.interpolation == 0:
        values = config.to_dict()
        train_in_folder(
            Config.from_dict(values | {"eval": values["eval"] | {"keep_start": False}}), place
        )
    return {
        "scores": answer(folder, place, TRAINED, embeddings_of(place) if keeps_documents else None),
        "verdict": verdict,
        "made": selection.systems,
        RECOMMENDED: name_of(system) if system else None,
        "exported": selection.interpolation,
        "processor_seconds": processor_seconds,  # of the run, without the scores above
    }


def from_index(config: Config, place: Path) -> Config:
    """Build an index of the documents unless it exists, and return the training from it."""
    from diffcse_jax import SentenceEncoder
    from diffcse_jax.search.index import Index

    folder = embeddings_of(place).with_suffix(".index")
    if not folder.is_dir():
        encoder = SentenceEncoder.from_pretrained(config.model.name_or_path)
        Index(encoder, config.data.train_file, mode="hybrid").save(folder)
    return dataclasses.replace(
        config, data=dataclasses.replace(config.data, train_file=str(folder))
    )


def measure_pretrained(folder: Path, config: Config, place: Path) -> dict[str, Any]:
    """Continue the start as a masked LM on the documents, score it, and train it as `ours`."""
    from diffcse_jax.export import export
    from diffcse_jax.run_folder.records import read_selection
    from diffcse_jax.training.train import train_in_folder

    values = shipped_config("masked_lm")
    values.data.train_file = str(folder)
    values.data.cache_dir = config.data.cache_dir
    values.model.name_or_path = config.model.name_or_path
    values.train.seed = config.train.seed
    masked_lm = place / "masked_lm"
    verdict = train_in_folder(Config.from_dict(values.to_dict()), masked_lm)
    selection = read_selection(masked_lm)
    assert selection is not None  # the run has finished
    scores = answer(folder, masked_lm, START)
    export(masked_lm, masked_lm / "export")
    model = dataclasses.replace(config.model, name_or_path=str(masked_lm / "export"))
    adapted = measure_ours(folder, dataclasses.replace(config, model=model), place / "adapted")
    adapted["scores"] = scores | adapted["scores"]
    adapted["masked_lm"] = {"verdict": verdict, "steps": selection.record.step}
    return adapted


def measure_theirs(folder: Path, config: Config, place: Path) -> dict[str, Any]:
    """Train by the library's recipe for pairs, and score the result."""
    start = time.process_time()
    adaptation_recipes.train_theirs(PAIRS, config, place)
    processor_seconds = time.process_time() - start
    return {"scores": answer(folder, place, TRAINED), "processor_seconds": processor_seconds}


KEPT = ("seconds", "processor_seconds", "verdict", RECOMMENDED, "masked_lm")  # of a run
RECIPES = {
    OURS: measure_ours,
    QUERIES: measure_ours,
    PAIRS: measure_theirs,
    PRETRAINED: measure_pretrained,
}


def configured(folder: Path, options: argparse.Namespace, seed: int, recipe: str) -> Config:
    """Return the preset of a recipe for the documents of a collection."""
    values = shipped_config("adapt_queries" if recipe == QUERIES else "adapt")
    values.data.train_file, values.model.name_or_path, values.train.seed = (
        str(folder),
        options.model,
        seed,
    )
    values.data.cache_dir = str(options.work / "tokens")
    values.eval.guard = False
    if options.learning_rate:
        values.optim.learning_rate = options.learning_rate
    return Config.from_dict(values.to_dict())


def timed(function: Any, *arguments: Any) -> dict[str, Any]:
    """Return the result of a call, its seconds, those of the processor, and its device."""
    start, processor = time.perf_counter(), time.process_time()
    result = function(*arguments)
    measured = {
        "seconds": time.perf_counter() - start,
        "processor_seconds": time.process_time() - processor,
        "device": jax.devices()[0].device_kind,
    }
    return measured | result  # a result may have the times of a part


def remembered(path: Path, function: Any, *arguments: Any) -> dict[str, Any]:
    """Return the result of a call in a new process, or the one that the file has already.

    An earlier command may have written the file.
    """
    if not path.is_file():
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            result = pool.submit(timed, function, *arguments).result()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result), encoding="utf-8")
        means = {
            name: round(np.mean([*each["ndcg@10"].values()]), 2)
            for name, each in result["scores"].items()
        }
        print(path.stem, means, file=sys.stderr, flush=True)
    return json.loads(path.read_text(encoding="utf-8"))


def summarise(start: dict[str, Any], runs: Mapping[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return nDCG@10 by system and seed, paired tests on it, and how label-free scores agree."""
    from diffcse_jax.evaluation.retrieval import CHOOSES, compare

    queries = [*start["scores"]["BM25"][CHOOSES]]
    by_query: dict[str, np.ndarray] = {}
    table: dict[str, list[float]] = {}
    systems = [("", name, [start]) for name in start["scores"]]
    for recipe, each in runs.items():
        prefix = "" if recipe == OURS else f"{recipe}: "
        systems += (
            [(prefix, name, each) for name in each[0]["scores"] if name != "BM25"] if each else []
        )
    for prefix, name, each in systems:
        found = [run["scores"][name] for run in each]
        table[prefix + name] = [float(np.mean([*scores[CHOOSES].values()])) for scores in found]
        by_query[prefix + name] = np.mean(
            [[scores[CHOOSES][query] for query in queries] for scores in found], axis=0
        )
    of_pretrained = {name: f"{PRETRAINED}: {name}" for name in (START, TRAINED)}
    of_pretrained[TRAINED + WITH_BM25] = f"{PRETRAINED}: {TRAINED}{WITH_BM25}"
    tests = {
        f"{one} -> {other}": compare(by_query[one], by_query[other])
        for one, other in (*COMPARED, *of_pretrained.items())
        if one in by_query and other in by_query
    }
    return {
        "queries": len(queries),
        CHOOSES: table,
        "tests": tests,
        "made queries": {each["name"]: each["score"] for each in start["made"]},
        "weight of BM25": start["weight"],  # that the made queries give
        "runs": {
            recipe: [{key: run[key] for key in KEPT if key in run} for run in each]
            for recipe, each in runs.items()
        },
        "agreement": [agreement(run) for run in runs.get(OURS, ()) if run["made"]],
    }


def agreement(run: Mapping[str, Any]) -> dict[str, float]:
    """Return how a run's label-free table ranks the five systems, against people's questions.

    `tau` is Kendall's tau of the two rankings. `lost` is the nDCG@10 that the best of the
    label-free table has less than the best of the five, and `lost_recommended` what the run's
    recommendation has less.
    """
    made = {name_of(each): each["score"] for each in run["made"]}
    asked = {name: float(np.mean([*run["all"][name].values()])) for name in made}
    tau = scipy.stats.kendalltau(
        [made[name] for name in made], [asked[name] for name in made]
    ).statistic
    return {
        "tau": float(tau),
        "lost": max(asked.values()) - asked[max(made, key=lambda name: made[name])],
        "lost_recommended": max(asked.values()) - asked[run[RECOMMENDED]],
    }


def name_of(system: Mapping[str, Any]) -> str:
    """Return the name of a system of a run's table, as this benchmark calls it."""
    from diffcse_jax.training.selection import THIS_MODEL

    if not system["encoder"]:
        return "BM25"
    name = TRAINED if system["encoder"] == THIS_MODEL else START
    ends = {weight: end for end, weight in HYBRID.items()}
    return name + (ends[system["weight"]] if system["mode"] == "hybrid" else "")


def main() -> None:
    """Train, score, and write the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder of collections")
    add("--work", type=Path, required=True, help="folder for runs and results of parts")
    add("--model", default="minilm", help="the starting checkpoint (default: minilm)")
    add(
        "--learning_rate",
        type=float,
        help="default: the preset's; 2e-5 for other encoders than MiniLM",
    )
    add("--collections", nargs="+", help="names of folders (default: all)")
    add("--train", nargs="*", help="collections to train on (default: all)")
    add("--recipes", nargs="+", choices=tuple(RECIPES), default=[OURS, PAIRS])
    add("--seeds", type=int, nargs="+", default=[1, 2, 3])
    add("--output", type=Path, help="file for the record (default: print it)")
    options = parser.parse_args()
    names = options.collections or sorted(
        path.parent.name for path in options.data.glob("*/corpus.jsonl")
    )
    trained = [name for name in names if options.train is None or name in options.train]
    short = Path(options.model).name
    with reported_to_user():
        starts = {
            name: remembered(
                options.work / f"{name}.{short}.start.json",
                measure_start,
                options.data / name,
                options.model,
                options.work / f"{name}.{short}.start",
            )
            for name in names
        }
        runs: dict[str, dict[str, list[dict[str, Any]]]] = {name: {} for name in names}
        for seed in options.seeds:
            for name in trained:
                for recipe in options.recipes:
                    config = configured(options.data / name, options, seed, recipe)
                    key = f"{name}.{short}.{recipe}.{seed}"
                    arguments = (RECIPES[recipe], options.data / name, config, options.work / key)
                    run = remembered(options.work / f"{key}.json", *arguments)
                    scores = {**starts[name]["scores"], **run["scores"]}
                    if run.get(RECOMMENDED):
                        run["scores"][RECOMMENDED] = scores[run[RECOMMENDED]]
                    run["all"] = {system: each["ndcg@10"] for system, each in scores.items()}
                    runs[name].setdefault(recipe, []).append(run)
        table = {name: summarise(starts[name], runs[name]) for name in names}
    devices = {start["device"] for start in starts.values()}
    devices |= {
        run["device"] for recipes in runs.values() for each in recipes.values() for run in each
    }
    record = {
        "device": ", ".join(sorted(devices)),
        "model": short,
        "seeds": options.seeds,
        "collections": table,
    }
    measure.write_record(options.output, "benchmarks.search_collections", sys.argv[1:], record)


if __name__ == "__main__":
    main()
