"""Open the token store of a run's text, and log what it holds."""

from collections.abc import Sequence
from pathlib import Path

import transformers

from diffcse_jax.data.token_store import Corpus, TokenStore, build_or_open
from diffcse_jax.errors import counted
from diffcse_jax.hosts import Progress, log_line

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
    if store.is_new and not corpus.reading:  # rows of documents need further passes
        row = zip(corpus.columns, next(corpus.rows()).texts, strict=True)
        log_line(f"first row: {', '.join(f'{column} {text[:60]!r}' for column, text in row)}")
    return store
