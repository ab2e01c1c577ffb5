"""The training step of one recipe, and the answers of the trained model."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from coat_jax.models import vlm
from experiments.training.state import EMPTY, TrainState
from experiments.training.step import ModelTrainer
from experiments.vlm.data import END, IMAGE, PAD, Batch
from experiments.vlm.settings import VlmSettings, model_config

# The number of sequences that `evaluate` computes at a time.
_ANSWERED = 240


class VlmTrainer(ModelTrainer):
    """A compiled training step of one recipe, and the answers of the trained model.

    Args:
      config: The configuration of the model, with its recipe.
      settings: The settings of the training.
      words: The number of words, including special tokens.
    """

    def __init__(
        self, config: vlm.VlmConfig, settings: VlmSettings, words: int
    ) -> None:
        self._config = config
        self._words = words
        super().__init__(settings, config.text.recipe, steps=settings.steps)
        self._compiled_evaluate = jax.jit(
            self._evaluate, compiler_options=self._options
        )
        self._compiled_answers = jax.jit(
            self._answers, static_argnames="count", compiler_options=self._options
        )

    def new_model(self, rngs: nnx.Rngs) -> vlm.VisionLanguageModel:
        """Returns a model with float32 parameters."""
        model = vlm.VisionLanguageModel(self._config, rngs=rngs)
        # Llama's initial 0.02 suits layers of a few thousand features. A standard
        # deviation of 1 / sqrt(h) lets narrow ones look at images hundreds of steps
        # earlier.
        factor = 1 / (0.02 * math.sqrt(self._config.text.hidden_size))
        for name in ("qkv", "out", "gate_up", "down"):
            weight = getattr(model.text.layers, name)
            weight[...] = factor * weight[...]
        return model

    def loss(
        self, params: nnx.State, histories: nnx.State, batch: Batch
    ) -> Float32[Array, ""]:
        """Computes the mean loss of the answers' tokens."""
        model = self.merged(params, histories)
        return vlm.cross_entropy(
            model,
            normalized(batch.images),
            batch.tokens[:, :-1],
            batch.tokens[:, 1:],
            batch.is_answer[:, 1:],
        )

    @property
    def abstract_batch(self) -> Batch:
        """The shapes and dtypes of a batch."""
        s, size = self._settings, self._config.vision.image_size
        tokens = s.batch_size, s.length
        return Batch(
            jax.ShapeDtypeStruct((s.batch_size, size, size, 3), jnp.uint8),
            jax.ShapeDtypeStruct(tokens, jnp.int32),
            jax.ShapeDtypeStruct(tokens, jnp.bool_),
        )

    def evaluate(
        self, state: TrainState, batch: Batch
    ) -> tuple[float, Bool[np.ndarray, " b"]]:
        """Returns the mean loss of the answers, and whether each answer is right.

        An answer is right if greedy decoding would write it: if each token of the
        answer is the most likely token after the tokens before it.
        """
        losses, right, sizes = [], [], []
        for start in range(0, len(batch.tokens), _ANSWERED):
            chunk = Batch(*(x[start : start + _ANSWERED] for x in batch))
            loss, is_right = self._compiled_evaluate(state.params, chunk)
            losses.append(float(loss))
            right.append(np.asarray(is_right))
            sizes.append(chunk.is_answer.sum())
        return float(np.average(losses, weights=sizes)), np.concatenate(right)

    def answers(
        self,
        state: TrainState,
        batch: Batch,
        prompts: Int[np.ndarray, " b"],
        count: int,
    ) -> Int32[np.ndarray, "b count"]:
        """Writes answers by greedy decoding, without a KV cache.

        Args:
          state: The state of the training.
          batch: The sequences; only their prompts are read.
          prompts: The number of tokens of each prompt.
          count: The number of tokens to write.

        Returns:
          The tokens that follow each prompt.

        Raises:
          ValueError: If sequences have no room for `count` tokens after the prompts.
        """
        room = batch.tokens.shape[1] - int(prompts.max())
        if count > room:
            raise ValueError(f"count must be at most {room}, got {count}")
        written = self._compiled_answers(
            state.params, batch.images, batch.tokens, prompts, count=count
        )
        return np.asarray(written)

    def _evaluate(
        self, params: nnx.State, batch: Batch
    ) -> tuple[Float[Array, ""], Bool[Array, " b"]]:
        model = self.merged(params)
        logits = model(normalized(batch.images), batch.tokens[:, :-1])
        agrees = self._likeliest(logits) == batch.tokens[:, 1:]
        right = jnp.all(agrees | ~batch.is_answer[:, 1:], axis=1)
        return self.loss(params, EMPTY, batch), right

    def _answers(
        self, params: nnx.State, images: Array, tokens: Array, prompts: Array, count
    ) -> Int32[Array, "b count"]:
        model = self.merged(params)
        image_tokens = model.encode(normalized(images))
        places = jnp.arange(tokens.shape[1])

        def write(i, tokens):
            hidden = model.hidden(image_tokens, tokens)
            last = (prompts + i - 1)[:, None, None]
            logits = model.logits(jnp.take_along_axis(hidden, last, axis=1)[:, 0])
            new = self._likeliest(logits)
            return jnp.where(places == (prompts + i)[:, None], new[:, None], tokens)

        prompt = jnp.where(places < prompts[:, None], tokens, PAD)
        written = jax.lax.fori_loop(0, count, write, prompt)
        positions = prompts[:, None] + jnp.arange(count)
        return jnp.take_along_axis(written, positions, axis=1)

    def _likeliest(self, logits: Float[Array, "*b vocab"]) -> Int32[Array, "*b"]:
        """Returns the most likely tokens among words and the end token."""
        tokens = jnp.arange(logits.shape[-1])
        written = (tokens >= END) & (tokens < self._words)
        likeliest = jnp.argmax(jnp.where(written, logits, -jnp.inf), axis=-1)
        return likeliest.astype(jnp.int32)


def new_trainer(settings: VlmSettings, recipe: str, words: int) -> VlmTrainer:
    """Returns the trainer of a recipe, for a vocabulary of `words` words."""
    return VlmTrainer(model_config(settings, recipe, words, IMAGE), settings, words)


def normalized(images: Array) -> Float32[Array, "b 1 size size 3"]:
    """Returns uint8 images, one for each sequence, with values in [-1, 1]."""
    return images[:, None].astype(jnp.float32) / 127.5 - 1
