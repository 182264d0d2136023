"""SentenceEncoder: from sentences to embeddings, similarities and search.

The path of a sentence: `encode`, `_tokenize`, `_batches` (padded rows of similar lengths),
`compiled_forward`.
"""

import collections
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Float32, Int32
from numpy.typing import ArrayLike

from diffcse_jax.batch import Vocabulary
from diffcse_jax.commands import BACKENDS
from diffcse_jax.errors import CheckpointError, ConfigError, warn_user
from diffcse_jax.hosts import Progress, keep_compiled
from diffcse_jax.io import expand_path
from diffcse_jax.models import hf, layers, pooling, sentence_folder
from diffcse_jax.models.forward import compiled_forward, compiled_masked_lm
from diffcse_jax.models.graph import Graph
from diffcse_jax.models.layers import Params
from diffcse_jax.models.poolers import check_pooler, our_name
from diffcse_jax.models.routes import DOCUMENT, QUERY, ROUTES
from diffcse_jax.models.sentence_folder import RecordedPooler, checked_truncation
from diffcse_jax.models.shapes import Shapes
from diffcse_jax.models.text_settings import max_length_of
from diffcse_jax.models.their_names import (
    ATTRIBUTES,
    OF_ENCODE,
    OF_LOADING,
    also_named,
    check_arguments,
)
from diffcse_jax.models.tokenizer import (
    FastTokenizer,
    Tokenizer,
    Tokens,
    check_token_ids,
    read_tokenizer,
    tokenise,
)
from diffcse_jax.models.transformer import TransformerConfig
from diffcse_jax.models.unread import Reader, report_unread
from diffcse_jax.run_folder.finding import find_run, finished_export
from diffcse_jax.search.hits import Hits
from diffcse_jax.search.index import Index, check_count, find_index
from diffcse_jax.search.passages import Passage, split_text
from diffcse_jax.search.texts import Sentences, checked_sentences
from diffcse_jax.search.vector_store import EncoderRecord

if TYPE_CHECKING:
    import transformers

    from diffcse_jax.run_folder.checkpoints import SavedEncoder

SPLIT_AT_ONCE = 1024  # passages, whose tokens are in memory

# Token ids, and the attention mask.
IdsAndMask = tuple[Int32[np.ndarray, "rows length"], Int32[np.ndarray, "rows length"]]

# Programs for several devices may deadlock if two threads start them at once.
_devices_lock = threading.RLock()


class SentenceEncoder:
    """A transformer with a pooler and a tokenizer.

    Load one with `SentenceEncoder.from_pretrained(name)`. Methods that take one string return one
    result; with an iterable of strings they return one row for each. Several threads may use one
    encoder, and encoders can be pickled and copied. A process that was forked after JAX has started
    hangs: start processes with the method "spawn".

    Args:
        config: The sizes of the transformer.
        transformer: The parameters of the transformer. Batches are spread over the device mesh of
            these arrays; other arrays are copied to all devices of this host.
        tokenizer: A fast tokenizer. Of its settings for truncation and padding, only the side that
            is truncated is used, and none is changed.
        record: The pooler, what follows it, and the prompts that the encoder was trained with.
        dtype: The precision of the computation, `float32` or `bfloat16`. Embeddings are always
            float32.
        max_length: The number of tokens that texts are cut to. By default it is that of the model's
            positions.
        name: The name of the model, for records and errors.
        mlm_head: The parameters of a masked-LM head on the transformer, for `fill_masks`.
        languages: The languages that the model is for, as its card states them.
        graph: Computes embeddings in place of the parameters.
        queries: Computes the embeddings of queries, if they have an encoder of their own. All else
            is of the document encoder.
    """

    def __init__(
        self,
        config: TransformerConfig,
        transformer: Mapping[str, Any],
        tokenizer: FastTokenizer,
        record: RecordedPooler,
        *,
        dtype: DTypeLike = jnp.float32,
        max_length: int | None = None,
        name: str = "an encoder without a name",
        mlm_head: Params | None = None,
        languages: tuple[str, ...] = (),
        graph: Graph | None = None,
        queries: "SentenceEncoder | None" = None,
    ):
        pooler = check_pooler(record.pooler)
        sentence_head = record.sentence_head.of(pooler)
        head = (record.head or {}) if pooler == "cls" else sentence_head.params
        if pooler == "cls" and (
            not head or head["dense.kernel"].shape != 2 * (config.hidden_size,)
        ):
            raise CheckpointError(
                f"pooler 'cls' needs a dense + tanh head of size {config.hidden_size}, and this "
                "model has no weights for it. Use 'cls_before_pooler' for the first position "
                "without a head"
            )
        check_token_ids(tokenizer, config.vocab_size, config.type_vocab_size, name)
        self.config = config
        self._tokenizer = Tokenizer.of(tokenizer)
        self.pooler = sentence_head.applied(pooler)  # with the modules after it
        self.name = name
        self.mlm_head = mlm_head
        self.languages = languages
        self.graph = graph
        self.queries = queries
        self.prompts = record.prompts
        self._backend = self._tokenizer.backend_tokenizer
        self.max_length = config.max_length if max_length is None else max_length
        self.dtype = _checked_dtype(dtype)
        self.sentence_head = sentence_head
        self.recorded = record._replace(pooler=pooler, sentence_head=sentence_head)
        size = sentence_head.embedding_size(pooler, config.hidden_size)
        if graph is not None:
            size = graph.dimension or size  # which may be cut already
        self.truncate_dim = checked_truncation(record.truncate_dim, size)
        self.dimension = self.truncate_dim or size  # of the embeddings
        self._index: Index | None = None
        self._has_warned_of_prompts = self._has_warned_of_tasks = False
        # A lock, because the backend holds the length that it truncates to.
        self._tokenizing = threading.Lock()
        params = layers.prefixed(transformer, "transformer") | layers.prefixed(head, "pooler_head")
        sharding = getattr(next(iter(params.values())), "sharding", None)
        if not isinstance(sharding, NamedSharding):
            devices = jax.local_devices()
            mesh = jax.make_mesh(
                (len(devices),), ("data",), axis_types=(AxisType.Auto,), devices=devices
            )
            sharding = NamedSharding(mesh, PartitionSpec())
            if graph is None:
                params = jax.device_put(params, sharding)
        self.params: Params = params  # of the transformer and of its head
        self._mesh = sharding.mesh
        self._is_made = True

    def __new__(cls, *arguments: Any, **options: Any) -> "SentenceEncoder":
        """Make an encoder; say how to load one by its name."""
        name = arguments[0] if arguments else options.get("model_name_or_path")
        # A class that extends this one may take a name.
        if cls.__init__ is SentenceEncoder.__init__ and isinstance(name, str | Path):
            raise ConfigError(
                f"SentenceEncoder({str(name)!r}): an encoder is loaded with "
                f"SentenceEncoder.from_pretrained({str(name)!r})"
            )
        return super().__new__(cls)

    def __getattr__(self, name: str) -> Any:
        """Say what takes the place of a name of sentence-transformers."""
        advice = f": {ATTRIBUTES[name]}" if name in ATTRIBUTES else ""
        raise AttributeError(f"SentenceEncoder has no attribute {name!r}{advice}")

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; refuse those that would have no effect on an encoder that is made."""
        is_made = "_is_made" in vars(self)
        if is_made and not name.startswith("_") and name not in ("max_length", "max_seq_length"):
            raise AttributeError(
                f"{name} of an encoder cannot be set. Load the encoder again, and name what you "
                "want in from_pretrained. Only max_length can be set"
            )
        super().__setattr__(name, value)

    @property
    def tokenizer(self) -> "transformers.PreTrainedTokenizerFast":
        """The tokenizer, as transformers reads it. transformers is imported at its first use."""
        return self._tokenizer.of_transformers()

    @property
    def max_length(self) -> int:
        """The number of tokens that texts are cut to, special tokens included."""
        return self._max_length

    @max_length.setter
    def max_length(self, length: int) -> None:
        if check_count("max_length", length) > self.config.max_length:
            raise ConfigError(
                f"max_length={length}: {self.name} reads at most {self.config.max_length} tokens"
            )
        self._require_room(length)
        self._max_length = length

    max_seq_length = max_length  # its name in sentence-transformers

    @classmethod
    @also_named(model_name_or_path="path_or_id")
    def from_pretrained(
        cls,
        path_or_id: str | Path,
        *,
        pooler: str | None = None,
        dtype: DTypeLike = jnp.float32,
        truncate_dim: int | None = None,
        prompts: Mapping[str, str] | None = None,
        default_prompt_name: str | None = None,
        backend: str = "jax",
        **others: Any,
    ) -> "SentenceEncoder":
        """Load an encoder.

        Programs that `encode` compiles are kept for later processes (`hosts.keep_compiled`), unless
        $JAX_COMPILATION_CACHE_DIR or JAX's own setting names another folder or is empty.

        Args:
            path_or_id: A run folder (its export or, before the run has finished, its best
                checkpoint is used), one of its checkpoints, a Hugging Face or sentence-transformers
                folder, a hub id, perhaps with a revision (`name@revision`), or `minilm`. An export
                may have a query encoder and a document encoder.
            pooler: This pooler alone, without the modules that the folder has after its own, as in
                SimCSE's evaluation. By default the whole folder is applied, which needs a pooler.
            dtype: The precision of the computation, `float32` or `bfloat16`.
            truncate_dim: Keep only the first dimensions of each embedding. By default as many as
                the folder records.
            prompts: Prompts by name, which replace recorded ones of the same names.
            default_prompt_name: The name of the prompt of texts for which none is chosen.
            backend: What computes embeddings: `jax`, or `onnx` for ONNX Runtime, which reads the
                file that `diffcse export --onnx` has written.
            **others: Names of sentence-transformers are accepted with a value that changes nothing,
                such as `device=None`.

        Raises:
            UserError: The model cannot be read, its pooler is unknown, or an option is invalid.
        """
        check_arguments("from_pretrained", others, OF_LOADING)
        keep_compiled()
        options: dict[str, Any] = {
            "pooler": pooler,
            "truncate_dim": truncate_dim,
            "dtype": _checked_dtype(dtype),
            "prompts": prompts,
            "default_prompt_name": default_prompt_name,
            "backend": backend,
        }
        name, path = str(path_or_id), expand_path(path_or_id)
        export = finished_export(path)
        if export is None and find_run(path):  # a checkpoint, or a run that has not finished
            from diffcse_jax.run_folder.checkpoints import read_encoder  # needs Orbax

            return cls.from_saved(read_encoder(path), name=name, **options)
        return cls.of_pretrained(hf.read_encoders(str(export or name)), name, **options)

    @classmethod
    def of_pretrained(
        cls,
        encoders: hf.Encoders,
        name: str,
        *,
        record_of: Callable[[hf.Pretrained], RecordedPooler] = sentence_folder.recorded,
        **options: Any,
    ) -> "SentenceEncoder":
        """Return the encoder of checkpoints that are in memory.

        `record_of` returns what the folder of a checkpoint records. Options are those of
        `from_pretrained`.
        """
        documents, queries = encoders
        record = record_of(documents)
        if queries is not None:
            # The whole document encoder's name stands for both encoders, which may differ in it.
            whole = record.sentence_head.applied(record.pooler)
            is_whole = our_name(options.get("pooler")) == whole
            of_queries = options | {"pooler": None} if is_whole else options
            options["queries"] = cls.of(queries, record_of(queries), name, **of_queries)
        return cls.of(documents, record, name, **options)

    @classmethod
    def from_saved(
        cls, saved: "SavedEncoder", *, name: str = "", **options: Any
    ) -> "SentenceEncoder":
        """Return the encoder of a checkpoint that `read_encoder` has read.

        Options are those of `from_pretrained`.
        """
        name = name or f"the checkpoint of step {saved.step}"
        return cls.of_pretrained(saved.checkpoints, name, record_of=saved.record_of, **options)

    @classmethod
    def of(
        cls,
        model: hf.Pretrained,
        record: RecordedPooler,
        name: str,
        *,
        pooler: str | None = None,
        truncate_dim: int | None = None,
        dtype: DTypeLike = jnp.float32,
        prompts: Mapping[str, str] | None = None,
        default_prompt_name: str | None = None,
        backend: str = "jax",
        queries: "SentenceEncoder | None" = None,
    ) -> "SentenceEncoder":
        """Return the encoder of a checkpoint that is in memory, and of what its folder records.

        `queries` is the query encoder, if it is another one. Other options are those of
        `from_pretrained`.
        """
        graph = None
        if backend == "onnx":
            _require_as_exported(record, pooler, dtype)
            graph = Graph(model.root, name)
        elif backend != "jax":
            raise ConfigError(f"backend={backend!r}: use one of {', '.join(BACKENDS)}")
        record = sentence_folder.with_pooler(record, pooler, name)
        if prompts is not None or default_prompt_name is not None:
            chosen = record.prompts.replaced(prompts or {}, default_prompt_name)
            record = record._replace(prompts=chosen)
        record = record._replace(
            head=record.head or model.pooler,
            truncate_dim=record.truncate_dim if truncate_dim is None else truncate_dim,
        )
        tokenizer = read_tokenizer(model.folder)
        longest = max_length_of(model.folder, model.config.max_length)
        options: dict[str, Any] = {
            "dtype": dtype,
            "max_length": longest,
            "name": name,
            "mlm_head": model.mlm_head,
            "languages": model.languages,
            "graph": graph,
            "queries": queries,
        }
        return cls(model.config, model.transformer, tokenizer, record, **options)

    def __repr__(self) -> str:
        options = f"pooler={self.pooler!r}, dimension={self.dimension}, dtype={self.dtype.name!r}"
        return f"SentenceEncoder({self.name!r}, {options}, backend={self.backend!r})"

    @property
    def backend(self) -> str:
        """What computes embeddings, `jax` or `onnx`."""
        return "jax" if self.graph is None else "onnx"

    def __reduce__(self) -> tuple[Any, ...]:
        """Let pickle and copy make an equal encoder from NumPy arrays.

        Locks and devices are left out.
        """
        params = {name: np.asarray(array) for name, array in self.params.items()}
        transformer, head = (layers.subset(params, part) for part in ("transformer", "pooler_head"))
        recorded = self.recorded._replace(
            head=head, sentence_head=self.sentence_head._replace(params=head)
        )
        names = ("dtype", "max_length", "name", "mlm_head", "languages", "graph", "queries")
        options = {name: getattr(self, name) for name in names}
        make = functools.partial(
            type(self), self.config, transformer, self._tokenizer.copy(), recorded, **options
        )
        return make, (), {"_index": self._index}

    @also_named(inputs="sentences")
    def encode(
        self,
        sentences: Sentences,
        *,
        batch_size: int = 64,
        normalize: bool = False,
        show_progress: bool = False,
        max_length: int | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        task: str | None = None,
        **others: Any,
    ) -> Float32[np.ndarray, "*sentences dimension"]:
        """Return the embedding of one sentence, or the embeddings of many.

        Shapes are (dimension,) and (sentences, dimension).

        A program is compiled for each shape of a batch. For one `batch_size`, there are at most 57
        shapes for a model that reads 512 tokens (`models.shapes`).

        Args:
            sentences: A string, or any iterable of strings. Each distinct sentence is computed
                once.
            batch_size: Sentences in a call of the compiled function; on a CPU fewer if they are
                long.
            normalize: Scale embeddings to length 1.
            show_progress: Report progress on stderr.
            max_length: Truncate sentences to this many tokens, special tokens included. By default
                sentences are truncated to the length that the folder records or else to the model's
                positions, with a warning.
            prompt: A text to put in front of each sentence, such as "query: ".
            prompt_name: The name of one of the model's prompts. By default its default prompt is
                used, if it has one.
            task: What the sentences are, `query` or `document`, for a model with an encoder for
                each. By default a `prompt_name` of one of these decides. Otherwise they are
                documents, and a warning says so.
            **others: Names of sentence-transformers: `normalize_embeddings` and `show_progress_bar`
                are accepted, and so is any value that changes nothing, such as
                `convert_to_numpy=True`.

        Raises:
            UserError: A sentence is not text, an option or prompt is wrong, or an embedding is NaN
                or infinite.
        """
        normalize |= bool(others.pop("normalize_embeddings", False))
        show_progress |= bool(others.pop("show_progress_bar", False))
        check_arguments("encode", others, OF_ENCODE)
        is_by_default = prompt is None and prompt_name is None
        if task is None and prompt_name in ROUTES:
            task = prompt_name
        self._check_task(task, is_by_default=is_by_default)
        if task == QUERY and self.queries is not None:
            return self.queries.encode(
                sentences,
                batch_size=batch_size,
                normalize=normalize,
                show_progress=show_progress,
                max_length=max_length,
                prompt=prompt,
                prompt_name=prompt_name,
            )
        prompt = self.prompts.choose(prompt, prompt_name)
        if is_by_default and not prompt and not self._has_warned_of_prompts:
            self._has_warned_of_prompts = True
            if warning := self.prompts.warning(self.name):
                warn_user(warning)
        batch_size = check_count("batch_size", batch_size)
        texts = checked_sentences(sentences)
        distinct = {text: row for row, text in enumerate(dict.fromkeys(texts))}
        limit = self.max_length
        if max_length is not None:
            limit = min(check_count("max_length", max_length), self.config.max_length)
        token_ids, cut, unknown = self._tokenize([*distinct], limit, prompt)
        if limit == max_length:  # the caller has asked for this limit, the model does not need it
            cut = [False] * len(distinct)
        report_unread(
            Reader(self.name, limit),
            texts=len(texts),
            cut=sum(cut[distinct[text]] for text in texts),
            unknown=sum(unknown[distinct[text]] for text in texts),
        )
        vectors = np.empty((len(distinct), self.dimension), np.float32)
        alone = _devices_lock if self._mesh.size > 1 else contextlib.nullcontext()
        with (
            alone,
            Progress("encoding", "sentences", len(distinct), quiet=not show_progress) as progress,
        ):
            for rows, computed in self._encode_distinct(token_ids, batch_size):
                vectors[rows] = computed
                progress.update(len(rows))
        require_finite(vectors)
        if normalize:
            vectors = pooling.normalize(vectors)
        if isinstance(sentences, str):
            return vectors[0]
        return vectors[[distinct[text] for text in texts]]

    @also_named(inputs="queries")
    def encode_query(
        self,
        queries: Sentences,
        *,
        prompt: str | None = None,
        prompt_name: str | None = None,
        **options: Any,
    ) -> Float32[np.ndarray, "*sentences dimension"]:
        """Encode with the model's prompt of queries, unless another prompt is given.

        All else is as in `encode`, with the task `query`.
        """
        chosen = self._prompt(prompt, prompt_name, self.prompts.query)
        return self.encode(queries, prompt=chosen, task=QUERY, **options)

    @also_named(inputs="documents")
    def encode_document(
        self,
        documents: Sentences,
        *,
        prompt: str | None = None,
        prompt_name: str | None = None,
        **options: Any,
    ) -> Float32[np.ndarray, "*sentences dimension"]:
        """Encode with the model's prompt of documents, unless another prompt is given.

        All else is as in `encode`, with the task `document`.
        """
        chosen = self._prompt(prompt, prompt_name, self.prompts.document)
        return self.encode(documents, prompt=chosen, task=DOCUMENT, **options)

    def _check_task(self, task: str | None, *, is_by_default: bool) -> None:
        """Raise `ConfigError` for an unknown task.

        If neither a task nor a prompt says which of two encoders to take, warn once.
        """
        if task not in (None, QUERY, DOCUMENT):
            raise ConfigError(f"task={task!r}: use {QUERY!r}, {DOCUMENT!r} or None")
        is_unclear = task is None and is_by_default and self.queries is not None
        if is_unclear and not self._has_warned_of_tasks:
            self._has_warned_of_tasks = True
            warn_user(
                f"{self.name} has a query encoder and a document encoder, and `encode` "
                "takes the document encoder. Use encode_query for queries and encode_document for "
                "documents"
            )

    def _prompt(self, prompt: str | None, prompt_name: str | None, default: str) -> str | None:
        """Return the prompt that the caller chose, or the default."""
        chosen = self.prompts.choose(prompt, prompt_name, default)
        is_by_default = prompt is None and prompt_name is None
        return self.prompts.or_warned(chosen) if is_by_default else chosen

    def fill_masks(
        self, token_ids: Sequence[list[int]], batch_size: int = 64
    ) -> list[Int32[np.ndarray, " tokens"]]:
        """Return the likeliest token at each [MASK] of tokenised texts, and 0 elsewhere.

        Args:
            token_ids: The tokens of each text, with [CLS] and [SEP].
            batch_size: Texts in a call of the compiled function; on a CPU fewer if they are long.

        Raises:
            CheckpointError: The model has no masked-LM head, or its tokenizer no mask token.
        """
        mask_id = self._tokenizer.mask_token_id
        if self.mlm_head is None or mask_id is None:
            raise CheckpointError(
                f"{self.name} is not a masked LM: it has no masked-LM head or no mask token"
            )
        vocabulary = Vocabulary(len(self._tokenizer), mask_id, ())
        forward = compiled_masked_lm(self.config, vocabulary, self.dtype, self._mesh)
        params = layers.prefixed(layers.subset(self.params, "transformer"), "transformer")
        params |= layers.prefixed(self.mlm_head, "mlm_head")
        filled_tokens = [np.zeros(0, np.int32)] * len(token_ids)
        for rows, batch in self._batches(list(token_ids), batch_size):
            filled = np.asarray(forward(params, *map(self._spread, batch)))
            for row, tokens in zip(rows, filled, strict=False):
                filled_tokens[row] = tokens[: len(token_ids[row])].astype(np.int32)
        return filled_tokens

    def largely_unknown(self, texts: Sequence[str]) -> list[bool]:
        """Return which texts consist largely of words that the tokenizer does not know.

        Texts that differ only in such words have the same embedding.
        """
        return self._tokenize(texts, self.max_length).unknown

    @also_named(embeddings1="a", embeddings2="b")
    def similarity(
        self,
        a: Sentences | ArrayLike,
        b: Sentences | ArrayLike,
    ) -> Float32[np.ndarray, "*rows_and_columns"]:
        """Return the similarities of all pairs, shape (len(a), len(b)).

        One string adds no axis. Texts are encoded first. Embeddings of this model, shapes
        (dimension,) and (texts, dimension), are taken as they are: an array, a tensor or a list of
        rows. Similarities are those of the cosine, unless the model records another function
        (`similarity_fn_name`).
        """
        rows, columns = self._embedded(a), self._embedded(b)
        if rows.shape[-1] != columns.shape[-1]:
            raise ConfigError(
                f"embeddings of {rows.shape[-1]} and of {columns.shape[-1]} dimensions cannot be "
                "compared"
            )
        return pooling.similarities(rows, columns, self.sentence_head.similarity)

    def _embedded(self, texts: Any) -> Float32[np.ndarray, "*texts dimension"]:
        """Encode texts, and return embeddings as an array."""
        first = next(iter(texts), "") if isinstance(texts, list | tuple) else texts
        if not isinstance(first, str):
            with contextlib.suppress(ValueError):  # rows of different lengths
                rows = np.asarray(texts)
                if rows.dtype.kind == "f" and rows.ndim:
                    return rows.astype(np.float32, copy=False)
        return self.encode(texts)

    @also_named(embeddings1="a", embeddings2="b")
    def similarity_pairwise(
        self,
        a: Sentences | ArrayLike,
        b: Sentences | ArrayLike,
    ) -> Float32[np.ndarray, "*rows"]:
        """Return the similarity of each row of `a` with the same row of `b`; see `similarity`."""
        rows, others = self._embedded(a), self._embedded(b)
        if rows.shape != others.shape:
            raise ConfigError(
                f"embeddings of the shapes {rows.shape} and {others.shape} are not pairs"
            )
        name = self.sentence_head.similarity
        pairs = zip(np.atleast_2d(rows), np.atleast_2d(others), strict=True)
        compared = [pooling.similarities(row, other, name) for row, other in pairs]
        return np.array(compared, np.float32).reshape(rows.shape[:-1])

    def get_embedding_dimension(self) -> int:
        """Return `dimension`, by its name in sentence-transformers."""
        return self.dimension

    get_sentence_embedding_dimension = get_embedding_dimension  # the older name

    # Search

    def build_index(
        self,
        texts: Any,
        batch_size: int = 64,
        show_progress: bool = False,
        *,
        prompt_name: str | None = None,
        mode: str = "dense",
        language: str = "",
        weight: float | None = None,
        storage: str = "float32",
        passages: bool = True,
        id_column: str = "",
        strict: bool = False,
    ) -> None:
        """Index the texts that `search` looks through. An earlier index is replaced.

        `texts` are strings, dicts, rows of a table, or the path of a file or folder. Arguments are
        those of `diffcse_jax.search.index.Index`.
        """
        self._index = Index(
            self,
            texts,
            batch_size=batch_size,
            show_progress=show_progress,
            prompt_name=prompt_name,
            mode=mode,
            language=language,
            weight=weight,
            storage=storage,
            passages=passages,
            id_column=id_column,
            strict=strict,
        )

    @property
    def index(self) -> Index:
        """The index that is searched; it can be changed. Raises `ConfigError` if there is none."""
        if self._index is None:
            raise ConfigError(
                "there is no index to search. Call build_index(texts) or load_index(folder) first"
            )
        return self._index

    def save_index(self, folder: str | Path) -> None:
        """Write the index to a folder; see `Index.save`."""
        self.index.save(folder)

    def load_index(self, folder: str | Path) -> None:
        """Load what `save_index`, `diffcse search` or `diffcse embed` has written.

        Embeddings stay on disk.
        """
        self._index = find_index(expand_path(folder), self)

    def search(
        self, queries: Sentences, top_k: int = 5, threshold: float | None = None, **options: Any
    ) -> list[tuple[str, float]] | list[list[tuple[str, float]]]:
        """Find the best texts of the index. Arguments are those of `search_hits`.

        Returns:
            Pairs (text, score), best first: a list for one string, a list of such lists for many.
        """
        hits = self.search_hits(queries, top_k, threshold, **options)
        pairs = [[(hit.text, hit.score) for hit in each] for each in hits]
        return pairs[0] if isinstance(queries, str) else pairs

    def search_hits(
        self,
        queries: Sentences,
        top_k: int = 5,
        threshold: float | None = None,
        *,
        prompt_name: str | None = None,
        mode: str = "",
    ) -> list[Hits]:
        """Find the best documents of the index, with their ids, places and columns.

        See `Index.search`.
        """
        return self.index.search(queries, top_k, threshold, prompt_name=prompt_name, mode=mode)

    def split(self, passages: Sequence[Passage], prompt: str = "") -> list[Passage]:
        """Split passages that are longer than the model reads, after their titles and the prompt.

        A title that takes more than half of the room becomes a part of the text.
        """
        room = self.max_length - self._backend.num_special_tokens_to_add(is_pair=False)
        parts: list[Passage] = []
        for start in range(0, len(passages), SPLIT_AT_ONCE):
            some = passages[start : start + SPLIT_AT_ONCE]
            cut = self._tokenize([each.searched for each in some], self.max_length, prompt).cut
            with self._tokenizing:
                self._backend.no_truncation()
                for passage, is_cut in zip(some, cut, strict=True):
                    parts += self._parts(passage, prompt, room) if is_cut else [passage]
        return parts

    def _parts(self, passage: Passage, prompt: str, room: int) -> list[Passage]:
        """Return passages of at most `room` tokens. The caller holds the tokenizer."""
        whole = passage.searched
        title = len(whole) - len(passage.text)
        offsets = self._backend.encode(prompt + whole, add_special_tokens=False).offsets

        def tokens(skipped: int) -> list[tuple[int, int]]:
            """Return the places of the tokens after so many characters, counted from there."""
            after = [span for span in offsets if max(span[0], skipped) < span[1]]
            return [(start - skipped, end - skipped) for start, end in after]

        places = tokens(len(prompt) + title)
        limit = room - (len(offsets) - len(places))
        if title and limit < room // 2:
            passage = passage._replace(title="", text=whole)
            places = tokens(len(prompt))
            limit = room - (len(offsets) - len(places))
        else:
            title = 0
        parts = []
        for start, end in split_text(passage.text, places, max(limit, 1)):
            place = passage.start + max(0, start - title)
            parts.append(passage._replace(text=passage.text[start:end], start=place))
        return parts

    def record(self, prompt: str = "") -> EncoderRecord:
        """Return what distinguishes the embeddings of texts with a prompt.

        Warn if they do not rank by cosine.
        """
        if not self.sentence_head.ranks_by_cosine:
            warn_user(
                f"{self.name} is made for similarity by {self.sentence_head.similarity}; search "
                "ranks by cosine"
            )
        return EncoderRecord(
            self.name,
            self.pooler,
            self.dtype.name,
            self.dimension,
            self.fingerprint(),
            prompt,
            self.backend,
        )

    def fingerprint(self) -> str:
        """Return a hash of all that determines an embedding.

        These are the sizes, weights or ONNX file, pooler, precision and tokenizer. The hash covers
        values only, no names of classes or modules, so it stays the same when code moves. Values
        that equal their default are left out, so that new options do not change it.
        """
        sizes = {}
        for field in dataclasses.fields(self.config):
            value = getattr(self.config, field.name)
            # Fields without repr only say how to compute embeddings.
            changes_embeddings = field.repr and "dropout" not in field.name
            if (
                changes_embeddings
                and value != field.default
                and isinstance(value, str | int | float | tuple)
            ):
                sizes[field.name] = value
        settings: dict[str, Any] = {"transformer": sizes, "pooler": self.recorded.pooler}
        settings |= {"precision": self.dtype.name, "dimension": self.dimension}
        if self.sentence_head.layers:
            settings["head"] = self.sentence_head.layers
        if self.max_length != self.config.max_length:
            settings["max_length"] = self.max_length
        if self._tokenizer.truncation_side != "right":
            settings["truncation_side"] = self._tokenizer.truncation_side
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
        with self._tokenizing:
            self._backend.no_truncation()
            digest.update(self._backend.to_str().encode())
        if self.graph is not None:
            digest.update(self.graph.digest().encode())
            return digest.hexdigest()[:32]
        for name, array in sorted(self.params.items()):
            digest.update(f"{name} {array.dtype} {array.shape}".encode())
            digest.update(np.asarray(array).tobytes())
        return digest.hexdigest()[:32]

    def _encode_distinct(
        self, token_ids: list[list[int]], batch_size: int
    ) -> Iterator[tuple[list[int], Float32[np.ndarray, "rows dimension"]]]:
        """Yield numbers of sentences and their embeddings, longest sentences first."""
        forward = self._forward()
        batches = self._batches(token_ids, batch_size)
        running: collections.deque[tuple[list[int], Any]] = collections.deque()
        while True:
            # Two batches wait while the device computes one.
            for rows, batch in itertools.islice(batches, 3 - len(running)):
                running.append((rows, forward(*batch)))
            if not running:
                return
            rows, computed = running.popleft()
            yield rows, np.asarray(computed)[: len(rows), : self.dimension]

    def _forward(self) -> Callable[..., Any]:
        """Return what computes embeddings of padded rows: `(input_ids, attention_mask) -> ...`."""
        if self.graph is not None:
            return self.graph
        pooler, modules = self.recorded.pooler, self.sentence_head.layers
        compiled = compiled_forward(self.config, pooler, self.dtype, self._mesh, modules)
        return lambda *batch: compiled(self.params, *map(self._spread, batch))

    def _batches(
        self, token_ids: list[list[int]], batch_size: int
    ) -> Iterator[tuple[list[int], IdsAndMask]]:
        """Yield numbers of sentences, their token ids and mask, longest first, in few shapes."""
        by_length = sorted(range(len(token_ids)), key=lambda row: -len(token_ids[row]))
        on_cpu = self.graph is not None or self._mesh.devices.flat[0].platform == "cpu"
        shapes = Shapes(batch_size, self.config.max_length, on_cpu, self._mesh.size)
        start = 0
        for count, length in shapes.of([len(token_ids[row]) for row in by_length]):
            rows = by_length[start : start + count]
            yield rows, self._padded([token_ids[row] for row in rows], count, length)
            start += count

    def _require_room(self, limit: int) -> None:
        """Raise `ConfigError` for a length that special tokens alone fill."""
        least = self._backend.num_special_tokens_to_add(is_pair=False) + 1
        if limit < least:
            raise ConfigError(f"max_length={limit}: expected at least {least} tokens")

    def _tokenize(self, sentences: Sequence[str], limit: int, prompt: str = "") -> Tokens:
        """Return the tokens of sentences after a prompt, at most `limit` each."""
        self._require_room(limit)
        with self._tokenizing:
            self._backend.enable_truncation(limit, direction=self._tokenizer.truncation_side)
            return tokenise(self._backend, sentences, self._tokenizer.unk_token_id, [prompt])

    def _padded(self, token_ids: list[list[int]], rows: int, length: int) -> IdsAndMask:
        """Return token ids and attention mask, padded to `rows` and to `length`."""
        input_ids = np.full((rows, length), self.config.pad_token_id, np.int32)
        attention_mask = np.zeros((rows, length), np.int32)
        for row, ids in enumerate(token_ids):
            input_ids[row, : len(ids)] = ids
            attention_mask[row, : len(ids)] = 1
        return input_ids, attention_mask

    def _spread(self, rows: Int32[np.ndarray, "rows length"]) -> Int32[jax.Array, "rows length"]:
        """Return an array whose rows are spread over the devices."""
        sharding = NamedSharding(self._mesh, PartitionSpec(self._mesh.axis_names))
        return jax.make_array_from_callback(rows.shape, sharding, rows.__getitem__)


def _require_as_exported(record: RecordedPooler, pooler: str | None, dtype: DTypeLike) -> None:
    """Raise `ConfigError` for options that an ONNX file cannot follow."""
    whole = record.sentence_head.applied(record.pooler) if record.pooler else ""
    if pooler and our_name(pooler) != whole:
        raise ConfigError(f"pooler={pooler!r}: the ONNX file applies {whole}. Leave the pooler out")
    if _checked_dtype(dtype).name != "float32":
        raise ConfigError(
            f"dtype={_checked_dtype(dtype).name!r}: the precision is that of the ONNX file. Leave "
            "it out"
        )


def _checked_dtype(dtype: Any) -> np.dtype:
    with contextlib.suppress(TypeError):
        if jnp.dtype(dtype).name in ("float32", "bfloat16"):
            return jnp.dtype(dtype)
    raise ConfigError(
        f"dtype={str(getattr(dtype, '__name__', dtype))!r}: use 'float32' or 'bfloat16'"
    )


def require_finite(
    vectors: Float32[np.ndarray, "*n dimension"],
) -> Float32[np.ndarray, "*n dimension"]:
    """Return the embeddings, or raise `CheckpointError` if one is NaN or infinite.

    Comparisons would give such an embedding a score.
    """
    if not np.isfinite(vectors).all():
        raise CheckpointError(
            "the encoder returns embeddings that are NaN or infinite: its training diverged, or "
            "its weights are damaged. Use an earlier checkpoint, or train with a lower learning "
            "rate"
        )
    return vectors
