"""Models that a fine-tuning starts from: runs, folders, or random parameters."""

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from coat_jax.models import hf, llama
from coat_jax.models.hf import config as configs
from coat_jax.models.hf.folder import PASSED, read_json
from coat_jax.models.hf.loading import Origin
from experiments.common.trained import structure
from experiments.training.checkpoints import Checkpoints
from experiments.training.files import is_tokens
from experiments.training.record import read_settings
from experiments.training.settings import RECIPES, Recipe, Settings, model_config
from experiments.training.trainer import Trainer

_CHUNK, _CHUNKS = 2**16, 2**12  # Bytes of a hashed piece, and most pieces of a file.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Base:
    """A model that a fine-tuning starts from.

    Attributes:
      config: A function of settings and a recipe that returns the model's config.
      load: A function of a mesh and a dtype that returns the model, with the recipe
        "bf16"; None means random parameters.
      fingerprint: A hash of the parameters, and for a folder also of the config and the
        tokenizer; "random" for random parameters.
      origin: The folder's path and config, for `hf.save`; None without a folder.
    """

    config: Callable[[Settings, Recipe], llama.LlamaConfig]
    load: Callable[[Mesh | None, Any], llama.Llama] | None = None
    fingerprint: str = "random"
    origin: Origin | None = None


def random_base(vocab_size: int) -> Base:
    """Returns a base with random parameters, and with the shape of the preset."""
    return Base(
        config=lambda settings, recipe: model_config(settings, recipe, vocab_size)
    )


def base_of_run(folder: Path, recipe: Recipe, vocab_size: int) -> Base:
    """Returns the base with the model of a pretraining's latest checkpoint.

    Args:
      folder: The folder of the run.
      recipe: The recipe of the checkpoint.
      vocab_size: The size of the vocabulary.

    Raises:
      ValueError: If the run is damaged, used token files, or has no checkpoint.
    """
    params = load_params(folder, recipe, vocab_size)

    settings = read_settings(folder)

    def load(mesh: Mesh | None, dtype: Any) -> llama.Llama:
        del mesh  # The trainer places the parameters on the mesh.
        config = model_config(settings, "bf16", vocab_size)
        arrays = jax.tree.map(lambda x: jnp.asarray(x).astype(dtype), params)
        return nnx.merge(structure(config), arrays)

    base = random_base(vocab_size)
    fingerprint = params_fingerprint(params)
    return dataclasses.replace(base, load=load, fingerprint=fingerprint)


def base_of_folder(folder: Path) -> Base:
    """Returns the base with the model of a Hugging Face folder.

    Only `Base.load` and the fingerprint read the weights.

    Raises:
      ValueError: If the folder is damaged, or its architecture is not supported.
    """
    values = read_json(folder, "config.json")
    shape = configs.read(values)

    def config(settings: Settings, recipe: Recipe) -> llama.LlamaConfig:
        scalings = RECIPES[recipe].scalings
        scaling = settings.scaling if settings.scaling in scalings else "just_in_time"
        dtype = jnp.dtype(settings.param_dtype)
        return dataclasses.replace(
            shape, recipe=recipe, scaling=scaling, param_dtype=dtype
        )

    def load(mesh: Mesh | None, dtype: Any) -> llama.Llama:
        return hf.load(folder, mesh=mesh, recipe="bf16", param_dtype=dtype)

    return Base(
        config=config,
        load=load,
        fingerprint=folder_fingerprint(folder),
        origin=Origin(path=str(folder), config=json.dumps(values)),
    )


def folder_fingerprint(folder: Path) -> str:
    """Returns a hash of a folder's config, tokenizer and tensors.

    Files of up to 256 MiB are hashed completely. For a longer file, the size and a
    sample of the content are hashed.
    """
    digest = hashlib.blake2b(digest_size=16)
    tensors = sorted(path.name for path in folder.glob("*.safetensors"))
    for name in ("config.json", *PASSED, *tensors):
        path = folder / name
        if not path.is_file():
            continue
        size = path.stat().st_size
        digest.update(f"{name} {size}\n".encode())
        starts = range(0, size, _CHUNK)
        if size > _CHUNK * _CHUNKS:
            starts = np.linspace(0, size - _CHUNK, _CHUNKS, dtype=int).tolist()
        with path.open("rb") as file:
            for start in starts:
                file.seek(start)
                digest.update(file.read(_CHUNK))
    return digest.hexdigest()


def load_params(folder: Path, recipe: Recipe, vocab_size: int) -> nnx.State:
    """Returns the parameters of a pretraining's latest checkpoint, as NumPy arrays.

    Raises:
      ValueError: If the run is damaged, used token files, or has no checkpoint.
    """
    settings = read_settings(folder)
    if any(is_tokens(Path(path)) for path in settings.data):
        raise ValueError(
            f"a base must be trained on text, but {folder} is of token files: "
            f"{settings.data[0]}"
        )
    states = folder / "checkpoints" / recipe
    if not states.is_dir():
        raise ValueError(f"the base has no checkpoint of {recipe}: no {states}")
    config = model_config(settings, recipe, vocab_size)
    trainer = Trainer(config, settings, steps=settings.steps)
    with Checkpoints(states) as checkpoints:
        if not checkpoints.progress().step:
            raise ValueError(f"the base has no checkpoint of {recipe} in {states}")
        state = checkpoints.state(trainer.abstract_state())
    return jax.tree.map(np.asarray, state.params)


def params_fingerprint(params: nnx.State) -> str:
    """Returns a hash of all parameters."""
    digest = hashlib.blake2b(digest_size=16)
    for leaf in jax.tree.leaves(params):
        digest.update(np.ascontiguousarray(leaf).view(np.uint8))
    return digest.hexdigest()
