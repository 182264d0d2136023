"""A generator of the run's own, for encoders without a masked LM.

It is the frozen encoder with a masked-LM head that is trained first (the "adjusting dropout"
report). Its replacements are good enough for the discriminator after a few hundred steps.
`train_head` trains any head on a frozen encoder. Fine-tuning also uses it.
"""

import dataclasses
import shutil
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, PRNGKeyArray
from safetensors.numpy import load_file

from diffcse_jax import hosts
from diffcse_jax.batch import Batch, Vocabulary
from diffcse_jax.config import Config
from diffcse_jax.data.batches import BatchSource, make_batches
from diffcse_jax.data.sampling import Crops
from diffcse_jax.data.token_store import TokenStore
from diffcse_jax.errors import ConfigError, Interrupted, counted
from diffcse_jax.hosts import Progress, duration, log_line, stop_requested
from diffcse_jax.io import disk_errors, read_sealed, write_sealed, write_tensors
from diffcse_jax.losses.diffcse import mask_tokens
from diffcse_jax.losses.masked_lm import score_tokens
from diffcse_jax.models import layers
from diffcse_jax.models.forward import FEW, Computation, Networks, fold_in_name, mean_where
from diffcse_jax.models.heads import MaskedLMHead
from diffcse_jax.models.hf import Pretrained
from diffcse_jax.models.layers import Params
from diffcse_jax.models.transformer import Transformer, TransformerConfig
from diffcse_jax.run_folder.checkpoints import saved_steps
from diffcse_jax.run_folder.finding import CHECKPOINTS
from diffcse_jax.training.sharding import (
    in_precision,
    packing_of,
    replicated,
    shard_batch,
    shards_of,
)

if TYPE_CHECKING:
    import grain

FOLDER = "generator"  # of the head, in the folder of a run
REPORT, TEXT = "report.json", "text"  # in it
HELD_OUT_BATCHES = 8  # batches on which the masked-LM head is measured
STEPS_OF_A_STEP = 5  # the most steps of the masked-LM head for each step of the run
LOSS_SHOWN_EVERY = 20  # steps
SAVED_EVERY = 50  # steps between checkpoints of the masked-LM head
ASKED_EVERY = 10  # steps after which several processes ask one another whether to stop
WORTH_TIMING = 20  # steps of a head, whose time is measured and said before they begin

# (head, optimizer state, *batch) -> (head, optimizer state, loss)
HeadStep = Callable[..., tuple[Params, optax.OptState, Float[Array, ""]]]


# Any head


class HeadTraining(NamedTuple):
    """A head at the start of its training, and its compiled step, which takes over their memory."""

    head: Params
    opt_state: optax.OptState
    step: HeadStep


def make_head_step(
    loss: Callable[..., Float[Array, ""]],
    optimizer: optax.GradientTransformation,
) -> HeadStep:
    """Return a compiled step that trains a head. It reuses the memory of the head and of the state.

    Args:
        loss: The loss of a batch: `loss(head, *batch)`.
        optimizer: Updates the head.
    """

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(
        head: Params,
        opt_state: optax.OptState,
        *batch: Any,
    ) -> tuple[Params, optax.OptState, Float[Array, ""]]:
        value, grads = jax.value_and_grad(loss)(head, *batch)
        updates, opt_state = optimizer.update(grads, opt_state, head)
        return optax.apply_updates(head, updates), opt_state, value

    return step


def train_head(
    name: str,
    training: HeadTraining,
    batches: Iterable[tuple[Any, ...]],
    steps: int,
    after: Callable[[int, Params, optax.OptState], None],
    *,
    done_before: int = 0,
) -> Params:
    """Train a head for some steps.

    At most two steps are in flight, so that a request to stop need not wait for more.

    Args:
        name: What is trained, for the progress.
        training: The start.
        batches: The arguments of each step after the head and the state, at least as many as steps.
        steps: The number of steps, with those that were done before.
        after: Called after each step with its number, from 1, the head and the state, whose memory
            the next step takes over.
        done_before: The number of steps after which the start was saved.
    """
    head, opt_state, step = training
    numbered = zip(range(done_before + 1, steps + 1), batches, strict=False)
    previous: Any = None
    with Progress(name, "steps", steps, done_before=done_before) as progress:
        progress.leave_out()  # the first step, which compiles
        for number, batch in numbered:
            head, opt_state, value = step(head, opt_state, *batch)
            jax.block_until_ready(previous)
            # Show the loss of the step before, because this one's is not computed yet.
            shows = previous is not None and number % LOSS_SHOWN_EVERY == 0
            progress.update(1, f"loss {float(previous):.2f}" if shows else "")
            previous = value
            after(number, head, opt_state)
    return head


def check_finite(what: str, head: Params, key: str, rate: float) -> None:
    """Raise `ConfigError` if a trained head contains NaN or infinite values.

    Args:
        what: The head, in words.
        head: Its parameters.
        key: The configuration key of its learning rate.
        rate: The learning rate.
    """
    for name, array in head.items():
        if not np.isfinite(array).all():
            raise ConfigError(
                f"training {what} diverged ({name} is NaN or infinite). Nothing was saved. Lower "
                f"{key}={rate:g}."
            )


# The masked-LM head


def own_generator(
    config: Config,
    encoder: Pretrained,
    store: TokenStore | Crops,
    vocabulary: Vocabulary,
    *,
    mesh: Mesh,
    workdir: Path,
    text: str,
) -> Pretrained:
    """Return the frozen encoder with a masked-LM head.

    The head is read from the run folder, or trained now and stored there. `text` identifies what
    the sentences are made of.

    Raises:
        Interrupted: A signal asked to stop while the head was trained. Everything is saved.
    """
    folder = workdir / FOLDER
    hosts.decided_by_first(partial(_begin, folder, text))
    weights, record = folder / "mlm_head.safetensors", folder / REPORT
    if record.is_file():
        log_line(f"generator: using the masked-LM head in {folder}")
        scores = read_sealed(record, _remedy(folder))
        head = load_file(weights)
    else:
        steps = counted(config.generator.head_steps, "step{s}")
        log_line(f"generator: the run first trains a masked-LM head, for {steps}")
        head, scores = train_masked_lm_head(
            config, encoder, store, vocabulary, mesh=mesh, folder=folder
        )
        rate = config.generator.head_learning_rate
        what = "the generator's masked-LM head"
        check_finite(what, head, "generator.head_learning_rate", rate)
        if jax.process_index() == 0:
            with disk_errors(folder, safe="The text and the encoder's weights are intact."):
                folder.mkdir(parents=True, exist_ok=True)
                write_tensors(weights, head)
                # Last: if it is there, the head is complete.
                write_sealed(record, scores, [weights])
                _HeadCheckpoints(folder).remove()
    steps = counted(int(scores["steps"]), "step{s}")
    quality = f"accuracy {scores['accuracy']:.1f}%, perplexity {scores['perplexity']:.0f}, {steps}"
    log_line(f"generator: on masked tokens, {quality}")
    return dataclasses.replace(encoder, mlm_head=head)


def _remedy(folder: Path) -> str:
    return f"Remove {folder} to train the head again"


def with_fitting_head(config: Config, steps: int) -> Config:
    """Return the configuration with at most five steps of the generator's head for each step.

    A long training of the head before a short run would only cost time.
    """
    head_steps = min(config.generator.head_steps, STEPS_OF_A_STEP * steps)
    generator = dataclasses.replace(config.generator, head_steps=head_steps)
    return dataclasses.replace(config, generator=generator)


def _begin(folder: Path, text: str) -> None:
    """Record the text that the head is trained on, and remove what another text has left.

    A run without a checkpoint may go on with another text. Later ones refuse it by themselves.
    """
    record = folder / TEXT
    with disk_errors(folder, safe="The text and the encoder's weights are intact."):
        if record.is_file() and record.read_bytes() != text.encode():
            if saved_steps(folder.parent / CHECKPOINTS):
                return
            log_line("notice: the text has changed, so the masked-LM head is trained on it anew")
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        record.write_text(text, encoding="utf-8")


def train_masked_lm_head(
    config: Config,
    encoder: Pretrained,
    store: TokenStore | Crops,
    vocabulary: Vocabulary,
    *,
    mesh: Mesh,
    folder: Path,
) -> tuple[Params, dict[str, float]]:
    """Train the head for `generator.head_steps` steps, from its last checkpoint if there is one.

    Args:
        config: The configuration of the run.
        encoder: The encoder, which is frozen.
        store: The sentences.
        vocabulary: The tokenizer's vocabulary.
        mesh: The devices.
        folder: Where checkpoints of the head are written.

    Returns:
        The parameters of the head, and scores: accuracy (%) and perplexity on masked tokens of the
        batches that would come next, the number of steps, and the seconds of one (0: not measured).
    """
    options = config.generator
    initial, loss, step = make_masked_lm_training(config, encoder.config, vocabulary, mesh)
    source = BatchSource(
        store,
        batch_size=options.head_batch_size,
        steps=options.head_steps + HELD_OUT_BATCHES,
        seed=config.train.seed_of("heads"),
        pad_token_id=encoder.config.pad_token_id,
        shards=shards_of(mesh),
        packing=packing_of(config, mesh),
        compares_views=False,
    )
    delivered = make_batches(source)
    head, opt_state = jax.jit(initial, out_shardings=replicated(mesh))()
    frozen = layers.prefixed(encoder.transformer, "transformer")
    frozen = jax.device_put(frozen, replicated(mesh))
    checkpoints = _HeadCheckpoints(folder)
    (head, opt_state), done_before = checkpoints.restore((head, opt_state), delivered, mesh)
    training = HeadTraining(head, opt_state, step)
    key = fold_in_name(_root_key(config), "train step")
    step_seconds = 0.0
    if (left := options.head_steps - done_before) >= WORTH_TIMING:
        batch = shard_batch(source[done_before], mesh)
        step_seconds = _time_step(training, frozen, batch, key, np.int32(0))
        log_line(
            f"generator: training the masked-LM head takes about {duration(left * step_seconds)}"
        )
    head = _train_from_checkpoint(
        training,
        frozen,
        delivered,
        options.head_steps,
        key=key,
        done_before=done_before,
        mesh=mesh,
        checkpoints=checkpoints,
    )
    held_out = (shard_batch(batch, mesh) for batch in delivered)
    scores = _score(loss, head, frozen, held_out, fold_in_name(_root_key(config), "held out"))
    scores |= {"steps": options.head_steps, "step_seconds": step_seconds}
    trained = layers.subset(head, "head")
    return {name: np.asarray(value) for name, value in trained.items()}, scores


def _score(
    loss: Callable[..., tuple[jax.Array, jax.Array]],
    head: Params,
    frozen: Params,
    batches: Iterable[Batch],
    key: PRNGKeyArray,
) -> dict[str, float]:
    """Return accuracy (%) and perplexity on masked tokens: means over these batches."""
    measure = jax.jit(loss)
    values = []
    for index, batch in enumerate(batches):
        result = measure(head, frozen, batch, jax.random.fold_in(key, index))
        values.append([float(value) for value in result])
    mean_loss, accuracy = np.mean(values, axis=0)
    return {"accuracy": 100 * float(accuracy), "perplexity": float(np.exp(mean_loss))}


def _time_step(training: HeadTraining, *arguments: Any) -> float:
    """Return the seconds of a step with these arguments, without training: it changes copies.

    The first of two steps compiles.
    """
    seconds = 0.0
    for _ in range(2):
        head, opt_state = jax.tree.map(jnp.copy, (training.head, training.opt_state))
        began = time.perf_counter()
        jax.block_until_ready(training.step(head, opt_state, *arguments))
        seconds = time.perf_counter() - began
    return seconds


def _train_from_checkpoint(
    training: HeadTraining,
    frozen: Params,
    batches: "grain.DatasetIterator",
    steps: int,
    *,
    key: PRNGKeyArray,
    done_before: int,
    mesh: Mesh,
    checkpoints: "_HeadCheckpoints",
) -> Params:
    """Train a masked-LM head from a checkpoint, and save others.

    Args:
        training: The head of the checkpoint, or a new one.
        frozen: The parameters of the encoder.
        batches: The batches of all steps that are left. They are taken up to the last step.
        steps: The number of steps, with those that were done before.
        key: Decides, with the number of a step, which tokens it masks.
        done_before: The step of the checkpoint. 0: a new head.
        mesh: The devices.
        checkpoints: Where checkpoints are written.

    Raises:
        Interrupted: A signal asked to stop. Everything is saved.
    """
    numbered = enumerate(batches, start=done_before)
    arguments = (
        (frozen, shard_batch(batch, mesh), key, np.int32(index)) for index, batch in numbered
    )
    with stop_requested() as stop:

        def after(step: int, head: Params, opt_state: optax.OptState) -> None:
            stops = stop.is_agreed(may_ask=step % ASKED_EVERY == 0)
            if stops or step % SAVED_EVERY == 0 or step == steps:
                checkpoints.save((head, opt_state), step, batches)
            if stops:
                raise Interrupted(
                    f"Stopped at step {step} of the generator's masked-LM head. Everything is "
                    "saved; run the same command again to resume."
                )

        return train_head(
            "masked-LM head", training, arguments, steps, after, done_before=done_before
        )


class _HeadCheckpoints:
    """The checkpoint of a masked-LM head that is being trained, in the folder of the generator.

    There is at most one that is complete: the record names its file, and is written after it.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._record = folder / "training.json"

    def save(
        self, state: tuple[Params, optax.OptState], step: int, batches: "grain.DatasetIterator"
    ) -> None:
        """Write the state after a step and its place in the batches, in place of earlier ones."""
        if jax.process_index() > 0:
            return
        leaves = jax.tree.leaves(state)
        tensors = {str(index): np.asarray(leaf) for index, leaf in enumerate(leaves)}
        weights = self._folder / f"training_{step}.safetensors"
        with disk_errors(self._folder, safe="The text and the encoder's weights are intact."):
            self._folder.mkdir(parents=True, exist_ok=True)
            write_tensors(weights, tensors)
            position = {"step": step, "weights": weights.name, "batches": batches.get_state()}
            write_sealed(self._record, position, [weights])
            for path in self._weights():
                if path != weights:
                    path.unlink(missing_ok=True)

    def restore(
        self, state: tuple[Params, optax.OptState], batches: "grain.DatasetIterator", mesh: Mesh
    ) -> tuple[tuple[Params, optax.OptState], int]:
        """Return the state and the step of the checkpoint, and set the batches to what follows.

        Without a checkpoint, return the state as it is, and step 0.
        """
        if not self._record.is_file():
            return state, 0
        position = read_sealed(self._record, _remedy(self._folder))
        tensors = load_file(self._folder / position["weights"])
        leaves, structure = jax.tree.flatten(state)
        # The file keeps a scalar as one value in a row.
        saved = [tensors[str(index)].reshape(leaf.shape) for index, leaf in enumerate(leaves)]
        restored = jax.tree.unflatten(structure, saved)
        batches.set_state(position["batches"])
        log_line(f"generator: resuming the masked-LM head after step {position['step']}")
        return jax.device_put(restored, replicated(mesh)), position["step"]

    def remove(self) -> None:
        """Remove the checkpoint. The head is complete."""
        for path in (self._record, *self._weights()):
            path.unlink(missing_ok=True)

    def _weights(self) -> list[Path]:
        return [*self._folder.glob("training_*.safetensors")]


def make_masked_lm_training(
    config: Config, sizes: TransformerConfig, vocabulary: Vocabulary, mesh: Mesh
) -> tuple[Callable, Callable, HeadStep]:
    """Return three functions that train a masked-LM head on a frozen encoder of these sizes.

    Returns:
        `initial() -> (head, optimizer state)`, `loss(head, frozen, batch, key) -> (mean loss,
        accuracy)`, and compiled `step(head, optimizer state, frozen, batch, key, index) -> (head,
        optimizer state, loss)`. The key is an argument, because a constant would have the step
        compiled again for each seed.
    """
    options = config.generator
    root = _root_key(config)
    dtype = jnp.dtype(config.precision)
    build_head = partial(MaskedLMHead, sizes, dtype=dtype)
    modules: dict[str, layers.Build] = {
        "transformer": partial(Transformer, sizes, dtype=dtype),
        "head": build_head,
    }
    definitions = {name: layers.definition(build) for name, build in modules.items()}
    networks = Networks(vocabulary, definitions)
    rate = optax.linear_schedule(options.head_learning_rate, 0.0, max(options.head_steps, 1))
    optimizer = optax.adamw(rate, weight_decay=1e-4)  # of all parameters, as by Optax's default

    def initial() -> tuple[Params, optax.OptState]:
        start = layers.initial(build_head, fold_in_name(root, "initial weights"))
        head = layers.prefixed(start, "head")
        return head, optimizer.init(head)

    def loss(
        head: Params,
        frozen: Params,
        batch: Batch,
        key: PRNGKeyArray,
    ) -> tuple[jax.Array, jax.Array]:
        rows = batch.rows  # all that DiffCSE edits
        ratio = options.head_mask_ratio
        masked = mask_tokens(key, rows, vocabulary=vocabulary, ratio=ratio, style="bert")
        computation = Computation(networks, head | frozen, devices=mesh.shape["data"])
        states = computation.network("transformer")(masked.rows)[-1]
        words = frozen["transformer.embeddings.word.embedding"]
        at_tokens = partial(score_tokens, computation.network("head"), words)
        ids, selected = rows.input_ids, masked.selected
        losses, right = computation.gather_positions(at_tokens, selected, states, ids, shares=FEW)
        return mean_where(losses, selected), mean_where(right, selected)

    def mean_loss(
        head: Params, frozen: Params, batch: Batch, key: PRNGKeyArray, index: Int[Array, ""]
    ) -> Float[Array, ""]:
        return loss(head, frozen, batch, jax.random.fold_in(key, index))[0]

    step = make_head_step(in_precision(config.precision, mean_loss), optimizer)
    return initial, in_precision(config.precision, loss), step


def _root_key(config: Config) -> PRNGKeyArray:
    return fold_in_name(jax.random.key(config.train.seed_of("heads")), "generator head")
