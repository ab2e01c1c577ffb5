"""A vision-language model: a ViT encoder, a projector and a Llama decoder.

LLaVA and VILA have this architecture. The encoder turns an image into vectors, the
projector turns these into embeddings of the decoder's size, and the decoder reads them
in place of image tokens, in front of the text or within it. Only answers have a loss.

The decoder is `coat_jax.models.llama`, with recipes that run the FP8 flow. The encoder
and the projector have the recipes of `coat_jax.models.vit`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from coat_jax.models import llama, vit
from coat_jax.models.llama import Llama, LlamaConfig
from coat_jax.models.loss import check_shapes, comparable
from coat_jax.models.vit import Vit, VitConfig
from pallas_kernels.checks import check_positive


@dataclasses.dataclass(frozen=True, kw_only=True)
class VlmConfig:
    """Shape and precision of a `VisionLanguageModel`.

    Attributes:
      vision: The configuration of the encoder; its recipe is also the projector's.
      text: The configuration of the decoder.
      image_token: The token that the decoder replaces by an embedding of an image.
      merge_size: The height and width of the square of patches that becomes one
        embedding: 1, or 2 to have a fourth of the image tokens.
    """

    vision: VitConfig
    text: LlamaConfig
    image_token: int
    merge_size: int = 1

    def __post_init__(self) -> None:
        check_positive(merge_size=self.merge_size)
        if self.vision.grid_size % self.merge_size:
            raise ValueError(
                "merge_size must divide the patches in a row, got "
                f"{self.merge_size}, {self.vision.grid_size}"
            )
        if not 0 <= self.image_token < self.text.vocab_size:
            raise ValueError(
                f"image_token must be in the vocabulary of {self.text.vocab_size}, "
                f"got {self.image_token}"
            )
        if jnp.dtype(self.vision.dtype) != jnp.dtype(self.text.dtype):
            raise ValueError(
                "vision and text must have one dtype, got "
                f"{jnp.dtype(self.vision.dtype)}, {jnp.dtype(self.text.dtype)}"
            )

    @property
    def tokens_per_image(self) -> int:
        """The number of image tokens that stand for one image."""
        return (self.vision.grid_size // self.merge_size) ** 2


class VisionLanguageModel(nnx.Module):
    """A causal language model that also reads images.

    Args:
      config: The shape and precision of the model.
      rngs: The random number generators for the initialization, which does not depend
        on the recipes.

    Examples:
      >>> import jax.numpy as jnp
      >>> from coat_jax.models import llama, vit, vlm
      >>> from flax import nnx
      >>> config = vlm.VlmConfig(
      ...     vision=vit.VitConfig(
      ...         image_size=32, patch_size=8, hidden_size=64, intermediate_size=128,
      ...         num_layers=2, num_heads=4),
      ...     text=llama.LlamaConfig(
      ...         vocab_size=256, hidden_size=64, intermediate_size=128, num_layers=2,
      ...         num_heads=4, num_kv_heads=2),
      ...     image_token=255, merge_size=2)
      >>> model = vlm.VisionLanguageModel(config, rngs=nnx.Rngs(0))
      >>> images = jnp.zeros((1, 1, 32, 32, 3))
      >>> tokens = jnp.array([[255, 255, 255, 255, 1, 2, 3, 4]])
      >>> model(images, tokens).shape
      (1, 8, 256)
    """

    config: VlmConfig
    vision: Vit
    projector: "Projector"
    text: Llama

    def __init__(self, config: VlmConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.vision = Vit(config.vision, rngs=rngs)
        self.projector = Projector(config, rngs=rngs)
        self.text = Llama(config.text, rngs=rngs)

    def __call__(
        self, images: Float[Array, "b i height width c"], tokens: Int[Array, "b s"]
    ) -> Float[Array, "b s vocab"]:
        """Computes the logits of each position's next token, in float32."""
        return self.logits(self.hidden(self.encode(images), tokens))

    def encode(
        self, images: Float[Array, "b i height width c"]
    ) -> Float[Array, "b n h"]:
        """Computes embeddings of images, in the order of their image tokens.

        Args:
          images: The images of each sequence, in the order of their image tokens.
            Values are usually in [-1, 1].

        Raises:
          ValueError: If images are not floating or not of the configuration's size, or
            if there are none.
        """
        if images.ndim != 5:
            raise ValueError(
                f"images must have the shape [b, i, h, w, c], got {images.shape}"
            )
        if not images.shape[1]:
            raise ValueError(
                f"sequences must have one image or more, got images {images.shape}; "
                "`VisionLanguageModel.text` computes text without images"
            )
        features = self.vision(images.reshape(-1, *images.shape[2:]))
        x = self.projector(features)
        return x.reshape(images.shape[0], -1, x.shape[-1])

    def hidden(
        self, image_embeddings: Float[Array, "b n h"], tokens: Int[Array, "b s"]
    ) -> Float[Array, "b s h"]:
        """Computes the output of the decoder's final norm.

        Args:
          image_embeddings: The embeddings that `encode` returns.
          tokens: The tokens; a sequence has `config.tokens_per_image` image tokens for
            each of its images; see `check_tokens`. If a sequence has more image tokens
            than embeddings, its results are NaN.

        Raises:
          ValueError: If the embeddings are not of the decoder's size, or not of as many
            sequences as `tokens`.
        """
        size = self.config.text.hidden_size
        shape = image_embeddings.shape
        if len(shape) != 3 or tokens.ndim != 2 or shape[::2] != (len(tokens), size):
            raise ValueError(
                f"images of tokens [b, s] must have embeddings [b, n, {size}], got "
                f"{list(shape)} for tokens {list(tokens.shape)}"
            )
        is_image = comparable(tokens) == self.config.image_token
        which = jnp.cumsum(is_image, axis=1) - 1
        of_images = jnp.take_along_axis(
            image_embeddings,
            jnp.maximum(which, 0)[..., None],
            axis=1,
            mode="fill",
            fill_value=jnp.nan,
        )
        of_text = self.text.embed(tokens)
        return self.text.decode(jnp.where(is_image[..., None], of_images, of_text))

    def logits(self, hidden: Float[Array, "*b h"]) -> Float[Array, "*b vocab"]:
        """Computes logits from the result of `hidden`, at all or at some positions."""
        return self.text.logits(hidden)


class Projector(nnx.Module):
    """A two-layer MLP with GELU that maps the encoder's output to the decoder's size.

    Before the MLP, each square of `merge_size` by `merge_size` patches is concatenated
    to one vector.

    Args:
      config: The configuration of the model.
      rngs: The random number generators for the initialization.
    """

    config: VlmConfig
    up: nnx.Linear
    down: nnx.Linear

    def __init__(self, config: VlmConfig, *, rngs: nnx.Rngs):
        self.config = config
        merged = config.merge_size**2 * config.vision.hidden_size
        hidden = config.text.hidden_size
        self.up = vit.linear(merged, hidden, config.vision, rngs)
        self.down = vit.linear(hidden, hidden, config.vision, rngs)

    def __call__(self, x: Float[Array, "b patches v"]) -> Float[Array, "b n h"]:
        """Computes embeddings for the decoder from patches in row-major order."""
        grid = self.config.vision.grid_size
        x = vit.cut(x.reshape(-1, grid, grid, x.shape[-1]), self.config.merge_size)
        return vit.precision(self.config.vision.recipe).segment(Projector._mlp)(self, x)

    def _mlp(self, x: Array) -> Array:
        gelu = vit.precision(self.config.vision.recipe).pointwise(jax.nn.gelu)
        return self.down(gelu(self.up(x)))


def cross_entropy(
    model: VisionLanguageModel,
    images: Float[Array, "b i height width c"],
    tokens: Int[Array, "b s"],
    targets: Int[Array, "b s"],
    is_answer: Bool[Array, "b s"],
) -> Float[Array, ""]:
    """Computes the mean negative log-likelihood of the answers, in nats per token.

    Auxiliary losses of a decoder's experts are not part of it.

    Args:
      model: The model.
      images: The images of each sequence.
      tokens: The input of the decoder.
      targets: The token that follows each input token. The loss is NaN if an answer
        has one that is not in the vocabulary.
      is_answer: Whether each target belongs to an answer; other targets have no loss.
        If no target belongs to an answer, the loss is 0.

    Raises:
      ValueError: If `tokens` is not [b, s] or has no token, if `targets` or
        `is_answer` does not have its shape, or if there are not images of as many
        sequences.
    """
    check_shapes(tokens, targets=targets, is_answer=is_answer)
    hidden = model.hidden(model.encode(images), tokens)
    return llama.mean_loss(model.text, hidden, targets, is_answer)


def check_tokens(
    config: VlmConfig, tokens: Int[np.ndarray, "b s"], images_per_sequence: int
) -> None:
    """Checks that sequences have as many image tokens as their images have embeddings.

    Raises:
      ValueError: If a sequence has another number of image tokens. A compiled function
        cannot check this, so check the data before you pass them to one.

    Examples:
      >>> import numpy as np
      >>> from coat_jax.models import llama, vit, vlm
      >>> shape = dict(hidden_size=64, intermediate_size=128, num_layers=1, num_heads=4)
      >>> config = vlm.VlmConfig(
      ...     vision=vit.VitConfig(image_size=16, patch_size=8, **shape),
      ...     text=llama.LlamaConfig(vocab_size=8, num_kv_heads=2, **shape),
      ...     image_token=7)
      >>> vlm.check_tokens(config, np.array([[7, 7, 7, 7, 0, 1]]), 1)
    """
    expected = images_per_sequence * config.tokens_per_image
    found = np.sum(np.asarray(tokens) == config.image_token, axis=1)
    if wrong := np.flatnonzero(found != expected).tolist():
        raise ValueError(
            f"each sequence needs {expected} image tokens, sequence {wrong[0]} has "
            f"{found[wrong[0]]}"
        )
