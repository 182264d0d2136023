"""The sizes of the official data sets: a score on other data is not one to compare with published ones.

Pairs and examples of each split as SentEval, SimCSE and DiffCSE score them. Where a task cross-validates its training
examples, these are its dev split, as in its scores.
"""

from collections.abc import Mapping
from typing import Any

_STSB = {"train": 5749, "dev": 1500, "test": 1379}
_SICK = {"train": 4500, "dev": 500, "test": 4927}

SIZES: dict[str, dict[str, int]] = {
    "STS12": {"MSRpar": 750, "MSRvid": 750, "SMTeuroparl": 459, "surprise.OnWN": 750, "surprise.SMTnews": 399},
    "STS13": {"FNWN": 189, "headlines": 750, "OnWN": 561},
    "STS14": {
        "deft-forum": 450, "deft-news": 300, "headlines": 750, "images": 750, "OnWN": 750, "tweet-news": 750,
    },
    "STS15": {"answers-forums": 375, "answers-students": 750, "belief": 375, "headlines": 750, "images": 750},
    "STS16": {
        "answer-answer": 254, "headlines": 249, "plagiarism": 230, "postediting": 244, "question-question": 209,
    },
    "STSBenchmark": _STSB,
    "STSBenchmark-finetune": _STSB,
    "STSBenchmark-senteval": _STSB,
    "SICKRelatedness": _SICK,
    "SICKRelatedness-finetune": _SICK,
    "SICKRelatedness-senteval": _SICK,
    "SICKEntailment": _SICK,
    "MR": {"dev": 10662, "test": 10662},
    "CR": {"dev": 3775, "test": 3775},
    "SUBJ": {"dev": 10000, "test": 10000},
    "MPQA": {"dev": 10606, "test": 10606},
    "SST2": {"train": 67349, "dev": 872, "test": 1821},
    "SST5": {"train": 8544, "dev": 1101, "test": 2210},
    "TREC": {"dev": 5452, "test": 500},
    "MRPC": {"dev": 4076, "test": 1725},
    "geometry": _STSB,
    "retrieval": {"dev": 56, "test": 97},  # pairs rated 5.0
}  # fmt: skip


def deviation(task: str, scores: Mapping[str, Any], mode: str) -> str:
    """The splits whose numbers of pairs or examples are not the official ones, for a person; empty if all are.

    Args:
        task: its name.
        scores: what it returned.
        mode: that it ran in.
    """
    official = SIZES.get(task, {})
    return ", ".join(
        f"{split} {count:,} instead of {official[split]:,}"
        for split, count in _counts(scores, mode).items()
        if split in official and count != official[split]
    )


def _counts(scores: Mapping[str, Any], mode: str) -> dict[str, int]:
    """The numbers of pairs or examples by split or subset."""
    if "subsets" in scores:
        return {subset: entry["n"] for subset, entry in scores["subsets"].items()}
    counts = {split: scores[f"n{split}"] for split in ("train", "dev", "test") if f"n{split}" in scores}
    if "n" in scores:
        counts["dev" if mode == "dev" else "test"] = scores["n"]
    return counts | ({"dev": scores["dev"]["n"]} if "dev" in scores else {})
