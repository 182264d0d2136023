"""Encoders to evaluate: this package's, PyTorch's, and post-processed ones.

PyTorch's are an independent computation.
"""

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float32

from diffcse_jax.documents.open import open_documents_to_search
from diffcse_jax.documents.sentences import join
from diffcse_jax.encoder import SentenceEncoder, require_finite
from diffcse_jax.errors import CheckpointError, ConfigError, DataError, require_extra
from diffcse_jax.evaluation import Embeddings, Encoder, EvaluationSettings
from diffcse_jax.hosts import quiet_transformers
from diffcse_jax.io import read_json_object, write_json
from diffcse_jax.losses.decorrelation import dimension_contrast
from diffcse_jax.models import files, sentence_folder
from diffcse_jax.models.routes import DOCUMENT, QUERY, find_routes
from diffcse_jax.models.text_settings import TEXT_SETTINGS, text_settings
from diffcse_jax.models.tokenizer import cutting_tokenizer, tokenise
from diffcse_jax.models.unread import Reader, report_unread
from diffcse_jax.run_folder.finding import model_of
from diffcse_jax.search.reading import read_documents

DCL_TEMPERATURE, DCL_BATCH_SIZE, DCL_STEPS = 0.05, 512, 1000
SMALLEST_VARIANCE = 1e-9  # of a kept direction, relative to the largest
BLOCK = 8192  # embeddings held in float64 at once
NAMES_OF_CODE = ("auto_map", "configuration_files")  # in config.json
OPTIMIZER = optax.adam(1e-3)
# Files that are written for the chosen pooler.
WRITTEN = ("config", "modules.json", TEXT_SETTINGS)


def load_encoder(model: str, settings: EvaluationSettings) -> Encoder:
    """Load a model on a backend, and post-process its embeddings if asked.

    For the folder of a run, `torch` loads the run's export.
    """
    load: Callable[..., Encoder] = partial(
        SentenceEncoder.from_pretrained, backend=settings.backend
    )
    if settings.backend == "torch":
        load = TorchEncoder
        model = model_of(model)
    encoder = load(model, pooler=settings.pooler, truncate_dim=settings.truncate_dim)
    if settings.post is None:
        return encoder
    return post_process(encoder, settings.post, strict=settings.strict)


class TorchEncoder:
    """Encodes in PyTorch, with sentence-transformers.

    It shares no computation with the JAX encoder. Arguments and errors are those of
    `SentenceEncoder.from_pretrained`.
    """

    def __init__(self, path_or_id: str, pooler: str | None = None, truncate_dim: int | None = None):
        require_extra("torch", "torch")
        library = require_extra("sentence_transformers", "torch")
        import transformers

        # This checks the pooler and the size.
        ours = SentenceEncoder.from_pretrained(path_or_id, pooler=pooler, truncate_dim=truncate_dim)
        self.pooler, self.truncate_dim, self.prompts = ours.pooler, ours.truncate_dim, ours.prompts
        self._tokenizer, self._max_length = ours.tokenizer, ours.max_length
        self._name = ours.name
        source = files.find_folder(path_or_id)
        self.queries: TorchEncoder | None = None
        if folders := find_routes(source):
            assert ours.queries is not None
            self.queries = TorchEncoder(str(folders[QUERY]), ours.queries.pooler, truncate_dim)
            source = folders[DOCUMENT]
        source = files.transformer_folder(source)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for file in source.iterdir():
                if file.is_file() and not file.name.startswith(WRITTEN):
                    (folder / file.name).symlink_to(file.resolve())
            config = read_json_object(source / "config.json")
            config = {key: value for key, value in config.items() if key not in NAMES_OF_CODE}
            write_json(folder / "config.json", config | {"output_hidden_states": True})
            sentence_folder.write(
                folder, ours.recorded, ours.config.num_blocks, ours.config.hidden_size
            )
            text_settings(source)._replace(max_length=self._max_length).write(folder)
            try:
                with quiet_transformers():
                    self._model = library.SentenceTransformer(
                        name,
                        trust_remote_code=False,
                        local_files_only=True,
                        model_kwargs={"dtype": "float32"},
                    )
                    _, loaded = transformers.AutoModel.from_pretrained(
                        name,
                        trust_remote_code=False,
                        local_files_only=True,
                        output_loading_info=True,
                    )
            except Exception as error:  # transformers raises a dozen types
                raise CheckpointError(
                    f"{path_or_id}: sentence-transformers cannot load the model: {error}"
                ) from error
        # transformers invents missing weights. A pooler's do not matter: ours is another module.
        if missing := sorted(
            key for key in loaded["missing_keys"] if not key.startswith("pooler.")
        ):
            raise CheckpointError(
                f"{path_or_id}: transformers does not find the weights {', '.join(missing)[:500]}"
            )

    def encode(
        self, sentences: Sequence[str], *, batch_size: int = 64, prompt: str | None = None
    ) -> Embeddings:
        """Return embeddings. Sentences longer than the model's positions are cut."""
        prompt = self.prompts.choose(prompt)
        backend = cutting_tokenizer(self._tokenizer, self._max_length)
        tokens = tokenise(backend, sentences, self._tokenizer.unk_token_id, [prompt])
        report_unread(
            Reader(self._name, self._max_length),
            texts=len(sentences),
            cut=sum(tokens.cut),
            unknown=sum(tokens.unknown),
        )
        embeddings = self._model.encode(
            [*sentences], prompt=prompt, batch_size=batch_size, show_progress_bar=False
        )
        return require_finite(embeddings)


# Post-processing: baselines that transform the embeddings of a frozen encoder, fitted on unlabelled
# sentences


class PostProcessed:
    """An encoder whose embeddings x become (x - mean) @ matrix."""

    def __init__(
        self,
        encoder: Encoder,
        mean: Float32[np.ndarray, " dim"],
        matrix: Float32[np.ndarray, "dim target"],
    ):
        self.pooler = encoder.pooler
        self.truncate_dim = encoder.truncate_dim
        self.prompts = encoder.prompts
        queries = encoder.queries
        self.queries = None if queries is None else PostProcessed(queries, mean, matrix)
        self._encoder, self._mean, self._matrix = encoder, mean, matrix

    def encode(
        self, sentences: Sequence[str], *, batch_size: int = 64, prompt: str | None = None
    ) -> Embeddings:
        """Return transformed embeddings."""
        return (
            self._encoder.encode(sentences, batch_size=batch_size, prompt=prompt) - self._mean
        ) @ self._matrix


def post_process(encoder: Encoder, specification: str, *, strict: bool = False) -> PostProcessed:
    """Fit `whitening:FILE` or `dcl:FILE` on the text of a file, and log what was read.

    If `strict`, a text that cannot be used raises `DataError`.
    """
    method, _, file = specification.partition(":")
    if method not in ("whitening", "dcl") or not file:
        raise ConfigError(f"--post: expected whitening:FILE or dcl:FILE, got {specification!r}")
    documents = read_documents(open_documents_to_search(file, "--post"), strict=strict)
    texts = (join(section.lines) for document in documents for section in document.sections)
    sentences = list(dict.fromkeys(filter(None, map(str.strip, texts))))
    embeddings = encoder.encode(sentences)
    try:
        return PostProcessed(
            encoder,
            *(whitening(embeddings) if method == "whitening" else decorrelation(embeddings)),
        )
    except DataError as error:
        raise DataError(f"--post {specification}: {error}") from error


def whitening(
    embeddings: Embeddings,
) -> tuple[Float32[np.ndarray, " dim"], Float32[np.ndarray, "dim dim"]]:
    """Return the mean, and a map to directions of variance 1 (Su et al. 2021)."""
    mean = embeddings.mean(axis=0, dtype=np.float64)
    blocks = (
        embeddings[start : start + BLOCK] - mean for start in range(0, len(embeddings), BLOCK)
    )
    variances, directions = np.linalg.eigh(
        sum(block.T @ block for block in blocks) / len(embeddings)
    )
    variances = variances[::-1]
    directions = directions[:, ::-1]
    spanned = int((variances > SMALLEST_VARIANCE * variances[0]).sum())
    if spanned < len(variances):
        span = f"{len(embeddings)} different sentences span {spanned} dimensions"
        raise DataError(f"{span}, not {len(variances)}. Give more text")
    return mean.astype(np.float32), (directions / np.sqrt(variances)).astype(np.float32)


def decorrelation(
    embeddings: Embeddings,
) -> tuple[Float32[np.ndarray, " dim"], Float32[np.ndarray, "dim dim"]]:
    """Return the mean, and a linear map that decorrelates dimensions (SimCSE++, equation 5).

    The map is trained so that each dimension resembles only itself. A sentence is its own second
    view. Each dimension is scaled to variance 1, which the loss does not see.
    """
    mean, std = embeddings.mean(axis=0), embeddings.std(axis=0)
    if len(embeddings) < 2 or not std.all():
        raise DataError(
            f"{len(embeddings)} different sentences leave dimensions constant. Give more text"
        )
    inputs = (embeddings - mean) / std
    generator = np.random.default_rng(0)
    matrix = jnp.eye(embeddings.shape[1])
    opt_state = OPTIMIZER.init(matrix)
    for _ in range(DCL_STEPS):
        rows = generator.choice(len(inputs), min(DCL_BATCH_SIZE, len(inputs)), replace=False)
        matrix, opt_state = _dcl_step(matrix, opt_state, inputs[rows])
    trained = np.asarray(matrix)
    return mean, trained / std[:, None] / (inputs @ trained).std(axis=0)


@jax.jit
def _dcl_step(
    matrix: Float32[Array, "dim dim"],
    opt_state: optax.OptState,
    batch: Float32[Array | np.ndarray, "batch dim"],
) -> tuple[Float32[Array, "dim dim"], optax.OptState]:
    def loss(matrix: Float32[Array, "dim dim"]) -> Float32[Array, ""]:
        mapped = jnp.dot(batch, matrix, precision="highest")
        return dimension_contrast(mapped, mapped, temperature=DCL_TEMPERATURE, form="code").mean()

    updates, opt_state = OPTIMIZER.update(jax.grad(loss)(matrix), opt_state)
    return optax.apply_updates(matrix, updates), opt_state
