"""Open the token store of a run's text, log what it holds, and check what a run adds to it."""

from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
import transformers
from jax.experimental import multihost_utils

from diffcse_jax import hosts
from diffcse_jax.data.token_store import Corpus, TokenStore, build_or_open
from diffcse_jax.documents.language import SAMPLE_TEXTS
from diffcse_jax.errors import ConfigError, DataError, counted
from diffcse_jax.hosts import Progress, log_line
from diffcse_jax.models.foreign_text import foreign_texts
from diffcse_jax.models.unread import describe_unknown

SECONDS_BEFORE_BAR = 1.0  # a store that is found needs no bar


def open_tokens(
    corpus: Corpus,
    tokenizer: transformers.PreTrainedTokenizerFast,
    max_length: int,
    cache_dir: str | Path = "",
    *,
    prompts: Sequence[str] = (),
) -> TokenStore:
    """Open the token store of a corpus or build it, and log its size and what was left out.

    The arguments are those of `build_or_open`.
    """
    with Progress(f"tokenising {corpus.name}", "rows", delay=SECONDS_BEFORE_BAR) as progress:
        store = build_or_open(
            corpus, tokenizer, max_length, cache_dir, prompts=prompts, on_rows=progress.update
        )
    verb = "tokenised" if store.is_new else "found tokens of"
    rows = f"{counted(len(store), 'row{s}')} ({', '.join(store.columns)})"
    tokens = counted(len(store.token_ids), "token{s}")
    log_line(f"{verb} {corpus.name}: {rows}, {tokens}, in {store.folder}")
    for line in store.account:
        log_line(line)
    if store.unknown_count:
        sentences = len(store.offsets) - 1
        problem = describe_unknown(store.unknown_count, sentences, "the model")
        log_line(f"warning: {corpus.name}: {problem}")
    if store.is_new and not corpus.reading:  # rows of documents need further passes
        row = zip(corpus.columns, next(corpus.rows()).texts, strict=True)
        log_line(f"first row: {', '.join(f'{column} {text[:60]!r}' for column, text in row)}")
    return store


def require_same_text(text: str, name: str) -> None:
    """Raise `DataError` if a process has read another text than the first one.

    Each draws its rows of a batch from the text that it has read, and steps and batches depend on
    its size. So this comes first.

    Args:
        text: Identifies what this process has read.
        name: What the user calls it.
    """
    first = hosts.decided_by_first(lambda: text)
    if jax.process_count() == 1:
        return
    same = multihost_utils.process_allgather(np.int32(text == first))
    if others := np.flatnonzero(same == 0).tolist():
        raise DataError(
            f"{name}: process {others[0]} of {len(same)} has read another text than process 0, or "
            "has left out other files. Give all processes the same text"
        )


def require_room(
    tokenizer: transformers.PreTrainedTokenizerFast, max_length: int, prompts: Sequence[str]
) -> None:
    """Raise `ConfigError` if a prompt leaves no room for text."""
    longest = max(len(tokenizer.encode(prompt)) for prompt in prompts)
    if longest >= max_length:
        raise ConfigError(
            f"data.max_length={max_length} leaves no room for text: a prompt has {longest} tokens "
            "with [CLS] and [SEP]. Give a larger data.max_length"
        )


def length_of(prompt: str, tokenizer: transformers.PreTrainedTokenizerFast) -> int:
    """Return the number of a prompt's tokens before a text.

    A last space may belong to the first token of the text, as in RoBERTa.
    """
    encoded = tokenizer(f"{prompt}a", add_special_tokens=False, return_offsets_mapping=True)
    return sum(end <= len(prompt) for _, end in encoded["offset_mapping"])


def warn_of_languages(
    store: TokenStore,
    tokenizer: transformers.PreTrainedTokenizerFast,
    model: str,
    languages: Sequence[str],
) -> None:
    """Log a warning if much of a text is in languages that the starting checkpoint is not for.

    Args:
        store: The tokens of the text, of which evenly spaced sentences are decoded.
        tokenizer: The one that made them.
        model: The name of the checkpoint.
        languages: The codes that its card states.
    """
    if not languages:
        return
    number = len(store.offsets) - 1
    chosen = np.unique(np.linspace(0, number - 1, min(number, SAMPLE_TEXTS)).astype(np.int64))
    sentences = [store.token_ids[store.offsets[i] : store.offsets[i + 1]] for i in chosen]
    texts = tokenizer.batch_decode(sentences, skip_special_tokens=True)
    if warning := foreign_texts(model, languages, texts):
        log_line(f"warning: {warning}")
