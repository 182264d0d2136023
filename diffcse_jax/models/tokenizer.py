"""The tokenizer of a Hugging Face folder, and texts as token ids."""

import copy
import dataclasses
import importlib
import itertools
import json
import os
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import tokenizers

from diffcse_jax.errors import CheckpointError
from diffcse_jax.models.files import SENTENCEPIECE, why_pointer
from diffcse_jax.models.plain_tokenizer import read_as_it_stands
from diffcse_jax.models.text_settings import text_settings

if TYPE_CHECKING:
    import transformers

# Each one holds a vocabulary.
TOKENIZER_FILES = ("tokenizer.json", "vocab.txt", "vocab.json", SENTENCEPIECE)
# Characters per wanted token that are tokenised first. English has 4 to 5 per token.
READ_FIRST = 16
TEXTS_AT_ONCE = 1000  # limits memory: the library needs about 100 bytes per token
LARGE_SHARE = 1 / 4  # of a text's letters, in unknown words
WIDE = 3  # letters that a wide one, such as a Chinese character, counts as


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder has the files of a tokenizer."""
    return any(os.path.isfile(folder / name) for name in TOKENIZER_FILES)


@runtime_checkable
class FastTokenizer(Protocol):
    """What encoding needs of a tokenizer: a `Tokenizer`, or a fast one of transformers."""

    backend_tokenizer: tokenizers.Tokenizer
    truncation_side: str
    model_input_names: Any
    if TYPE_CHECKING:  # `isinstance` does not find what transformers gives by `__getattr__`
        unk_token_id: int | None
        mask_token_id: int | None

    def __len__(self) -> int: ...


@dataclasses.dataclass
class Tokenizer:
    """A tokenizer for encoding, by transformers' names.

    Attributes:
        backend_tokenizer: Without padding and truncation.
        source: The folder that it is from, or transformers' tokenizer.
    """

    backend_tokenizer: tokenizers.Tokenizer
    truncation_side: str
    model_input_names: Sequence[str]
    unk_token_id: int | None
    mask_token_id: int | None
    source: Any

    @classmethod
    def of(cls, tokenizer: FastTokenizer) -> "Tokenizer":
        """Return that of transformers' tokenizer, which is not changed, or the same object."""
        if isinstance(tokenizer, Tokenizer):
            return tokenizer
        return cls(
            unlimited_tokenizer(tokenizer),
            tokenizer.truncation_side,
            tokenizer.model_input_names,
            tokenizer.unk_token_id,
            tokenizer.mask_token_id,
            tokenizer,
        )

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size()

    def copy(self) -> "Tokenizer":
        """Return one with a backend of its own."""
        return dataclasses.replace(self, backend_tokenizer=copy.deepcopy(self.backend_tokenizer))

    def of_transformers(self) -> "transformers.PreTrainedTokenizerFast":
        """Return transformers' tokenizer."""
        if isinstance(self.source, Path):
            self.source = load_tokenizer(self.source)
        return self.source


def read_tokenizer(folder: Path) -> Tokenizer:
    """Read the tokenizer of a Hugging Face folder for encoding, or raise `CheckpointError`.

    It gives the ids that `load_tokenizer` gives. transformers is imported only for a folder that
    needs its conversion.
    """
    _check_files(folder)
    read = read_as_it_stands(folder)
    if read is None:
        return Tokenizer.of(load_tokenizer(folder))
    backend, settings = read
    _prepare(backend, folder, splits_special=bool(settings.values.get("split_special_tokens")))
    backend.no_truncation()
    backend.no_padding()
    unk, mask = (
        backend.token_to_id(settings.tokens[name]) if name in settings.tokens else None
        for name in ("unk", "mask")
    )
    return Tokenizer(
        backend,
        settings.truncation_side,
        settings.input_names,
        unk,
        mask,
        folder,
    )


def load_tokenizer(folder: Path) -> "transformers.PreTrainedTokenizerFast":
    """Load the fast tokenizer of a Hugging Face folder, or raise `CheckpointError`.

    Code in the folder never runs.
    """
    import transformers

    _check_files(folder)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # transformers and tokenizers raise a dozen types
        reason = str(error)
        if "trust_remote_code" in reason:  # advice to execute it
            reason = (
                "it needs code from the folder, which is never executed here. Use a folder with "
                "tokenizer.json"
            )
        raise CheckpointError(f"{folder}: cannot load the tokenizer: {reason}") from error
    if not isinstance(tokenizer, transformers.PreTrainedTokenizerFast):
        raise CheckpointError(
            f"{folder}: {type(tokenizer).__name__} is not a fast tokenizer. Add a tokenizer.json"
        )
    _prepare(tokenizer.backend_tokenizer, folder, splits_special=tokenizer.split_special_tokens)
    return tokenizer


def _prepare(backend: tokenizers.Tokenizer, folder: Path, *, splits_special: bool) -> None:
    """Raise `CheckpointError` if a tokenizer cannot be used; let it read as the folder records."""
    try:
        backend.encode("\u16a0")  # a rune
    except (
        Exception
    ) as error:  # the library raises Exception: the vocabulary lacks a token for unknown words
        raise CheckpointError(
            f"{folder}: the tokenizer cannot read an unknown word: {error}"
        ) from error
    if splits_special:
        raise CheckpointError(
            f"{folder}: tokenizer_config.json: split_special_tokens is true, which is not "
            "supported. Use sentence-transformers for this model, or set it to false if texts "
            "never contain special tokens"
        )
    if text_settings(folder).lower_case:
        _put_into_lower_case(backend)


def _put_into_lower_case(backend: tokenizers.Tokenizer) -> None:
    """Let a tokenizer put texts into lower case first, unless it does so already."""
    steps = json.loads(backend.to_str())["normalizer"] or {}
    if "Lowercase" in (steps.get("type"), *(each["type"] for each in steps.get("normalizers", []))):
        return
    both = [tokenizers.normalizers.Lowercase(), *filter(None, [backend.normalizer])]
    backend.normalizer = tokenizers.normalizers.Sequence(both)


def _check_files(folder: Path) -> None:
    """Raise `CheckpointError` for a folder that transformers would misread."""
    # Without any of these, transformers returns a tokenizer with an empty vocabulary.
    if not has_tokenizer(folder):
        raise CheckpointError(
            f"{folder} does not contain a tokenizer (tokenizer.json or a vocabulary)"
        )
    for name in TOKENIZER_FILES:
        if os.path.isfile(folder / name) and (problem := why_pointer(folder / name)):
            raise CheckpointError(problem)
    _check_converter(folder)
    for path in folder.iterdir():
        # transformers would wait for such a file.
        if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
            raise CheckpointError(
                f"{folder} contains {path.name}, which is a pipe or a device. Remove it"
            )


def _check_converter(folder: Path) -> None:
    """Raise `CheckpointError` if transformers lacks a package to convert a vocabulary."""
    if [name for name in TOKENIZER_FILES if os.path.isfile(folder / name)] != [SENTENCEPIECE]:
        return
    try:
        importlib.import_module("sentencepiece")
        importlib.import_module("google.protobuf")
    except ImportError as error:
        raise CheckpointError(
            f"{folder}: {SENTENCEPIECE} is converted by packages that are missing: pip install "
            "sentencepiece protobuf. Or save the folder with transformers' fast tokenizer, which "
            "writes tokenizer.json"
        ) from error


def unlimited_tokenizer(tokenizer: FastTokenizer) -> tokenizers.Tokenizer:
    """Return a copy of the tokenizer's backend without padding and truncation."""
    backend = tokenizers.Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_padding()
    backend.no_truncation()
    return backend


def cutting_tokenizer(tokenizer: FastTokenizer, max_length: int) -> tokenizers.Tokenizer:
    """Return a copy of the tokenizer's backend that cuts texts, on the side that the model asks."""
    backend = unlimited_tokenizer(tokenizer)
    backend.enable_truncation(max_length, direction=tokenizer.truncation_side)
    return backend


def largest_token(backend: tokenizers.Tokenizer) -> tuple[int, str]:
    """Return the largest token id that a tokenizer may give, and its token.

    The tokens that it puts around a text have ids of their own, perhaps outside its vocabulary.
    """
    around, vocabulary = backend.encode(""), backend.get_vocab()
    ids = zip(vocabulary.values(), vocabulary, strict=True)
    return max(itertools.chain(ids, zip(around.ids, around.tokens, strict=True)))


def check_token_ids(
    tokenizer: FastTokenizer, embeddings: int, token_types: int, source: str
) -> None:
    """Raise `CheckpointError` if a model lacks the embedding of an id that its tokenizer may give.

    Without this check JAX would read another row of the table, and different texts would get equal
    embeddings.

    Args:
        tokenizer: The tokenizer whose ids the model reads.
        embeddings: The number of token embeddings of the model.
        token_types: The number of its token types; 0 if it has none.
        source: The model's name or the configuration key, for the error.
    """
    largest, token = largest_token(tokenizer.backend_tokenizer)
    if largest >= embeddings:
        raise CheckpointError(
            f"{source}: the tokenizer's largest token id is {largest} ({token!r:.60}), but the "
            f"model has {embeddings} token embeddings, for the ids 0 to {embeddings - 1}. Use the "
            "tokenizer that the model was trained with, or enlarge the model with transformers' "
            "`resize_token_embeddings` and train it on"
        )
    has_types = token_types and "token_type_ids" in tokenizer.model_input_names
    types = tokenizer.backend_tokenizer.encode("a").type_ids
    if has_types and any(types):
        raise CheckpointError(
            f"{source}: the tokenizer gives a single text the token type {max(types)}, and only "
            "type 0 is supported. If the model was trained with type 0, set each `type_id` of "
            "`single` in the post_processor of its tokenizer.json to 0"
        )


class Tokens(NamedTuple):
    """Texts as tokens."""

    ids: list[list[int]]  # of each text, with special tokens
    cut: list[bool]  # whether the text was truncated
    unknown: list[bool]  # whether it consists largely of words that the tokenizer does not know


def tokenise(
    backend: tokenizers.Tokenizer,
    texts: Sequence[str],
    unknown_id: int | None = None,
    prompts: Sequence[str] = ("",),
) -> Tokens:
    """Return the tokens of texts, and what of them is not read.

    The part of a long text that is kept as a rule, up to a space, is tokenised first. The whole
    text is tokenised only if that gives too few tokens, so the part that is cut costs nothing.

    Args:
        backend: The tokenizer, which truncates texts.
        texts: The texts.
        unknown_id: The token of all unknown words. None: the tokenizer has none, or nobody asks.
        prompts: What stands in front of texts: of the first, the second, ..., and from the start.
    """
    assert backend.truncation is not None
    size = READ_FIRST * backend.truncation["max_length"]
    part = _end if backend.truncation["direction"] == "left" else _beginning
    tokens = Tokens([], [], [])
    prompted = zip(itertools.cycle(prompts), texts)
    while group := list(itertools.islice(prompted, TEXTS_AT_ONCE)):
        whole = [prompt + text for prompt, text in group]
        parts = [part(text, size) if len(text) > size else text for text in whole]
        encodings = backend.encode_batch_fast(parts)
        for row, text in enumerate(whole):
            if len(parts[row]) < len(text) and not encodings[row].overflowing:  # too few tokens
                parts[row] = text
                (encodings[row],) = backend.encode_batch_fast([text])
        ids = [encoding.ids for encoding in encodings]
        lengths = [len(prompt) for prompt, _ in group]
        tokens.ids.extend(ids)
        tokens.cut.extend(bool(encoding.overflowing) for encoding in encodings)
        tokens.unknown.extend(largely_unknown(backend, parts, lengths, ids, unknown_id))
    return tokens


def _beginning(text: str, size: int) -> str:
    return text[: max(0, text.rfind(" ", 0, size))]


def _end(text: str, size: int) -> str:
    space = text.find(" ", len(text) - size)
    return text[space:] if space >= 0 else ""


def largely_unknown(
    backend: tokenizers.Tokenizer,
    texts: Sequence[str],
    prompts: Sequence[int],
    token_ids: Sequence[list[int]],
    unknown_id: int | None,
) -> list[bool]:
    """Return which texts have a large share of their letters in words that the tokenizer lacks.

    Tokens are no measure: in a script without spaces, a whole clause is one unknown token. The
    places of tokens in a text cost time, so they are asked for only if it has an unknown one.

    Args:
        backend: The tokenizer, which may truncate texts.
        texts: The texts.
        prompts: How many characters at the beginning of each text are not counted.
        token_ids: The tokens of each text.
        unknown_id: The token of all unknown words. None: the tokenizer never gives one.
    """
    found = [unknown_id in ids for ids in token_ids]
    rows = [row for row, has_unknown in enumerate(found) if has_unknown]
    for row, encoding in zip(rows, backend.encode_batch([texts[row] for row in rows]), strict=True):
        skipped = prompts[row]
        # Special tokens around the text have no extent.
        spans = [
            (token, max(start, skipped), end)
            for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True)
            if max(start, skipped) < end
        ]
        unknown = sum(
            _letters(texts[row][start:end]) for token, start, end in spans if token == unknown_id
        )
        found[row] = unknown > 0 and unknown >= LARGE_SHARE * _letters(
            texts[row][spans[0][1] : spans[-1][2]]
        )
    return found


def _letters(text: str) -> int:
    """Return the number of characters that are not white space. Wide letters count more."""
    return sum(
        WIDE if char.isalpha() and unicodedata.east_asian_width(char) == "W" else 1
        for char in text
        if not char.isspace()
    )
