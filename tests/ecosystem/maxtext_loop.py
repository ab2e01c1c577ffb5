"""Trains a Llama on a CPU with the setup and step of MaxText's pre-training."""

import tempfile
from pathlib import Path
from unittest import mock

import jax
import maxtext
import numpy as np
from ecosystem.harness import compare, main, tokens
from flax import nnx
from flax.linen import logical_axis_rules
from maxtext.configs import pyconfig
from maxtext.optimizers import optimizers
from maxtext.trainers.pre_train import train
from maxtext.utils import sharding, train_utils

import coat_jax as coat
from coat_jax.integrations.adam import as_adam_state

_BATCH, _LENGTH, _VOCAB = 8, 64, 128
_BASE = Path(maxtext.__file__).parent / "configs" / "base.yml"
_OPTIONS = {
    "run_name": "ecosystem",
    "hardware": "cpu",
    "decoder_block": "llama2",
    "base_emb_dim": 128,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 2,
    "head_dim": 32,
    "base_mlp_dim": 384,
    "base_num_decoder_layers": 2,
    "vocab_size": _VOCAB,
    "max_target_length": _LENGTH,
    "per_device_batch_size": _BATCH,
    "dataset_type": "synthetic",
    "enable_checkpointing": "false",
    "attention": "dot_product",
    "dtype": "float32",
    "weight_dtype": "float32",
    "remat_policy": "full",
    "steps": 100,
    "gradient_clipping_threshold": 0.0,
    "enable_goodput_recording": "false",
    "skip_jax_distributed_system": "true",
}


class Run:
    """Runs MaxText's `train_step` on the state that MaxText's setup makes."""

    def __init__(self, tx, **options):
        folder = tempfile.mkdtemp()
        settings = _OPTIONS | options | {"base_output_directory": folder}
        arguments = [f"{name}={value}" for name, value in settings.items()]
        self.config = config = pyconfig.initialize(["train", str(_BASE), *arguments])
        with mock.patch.object(optimizers, "get_optimizer", return_value=tx):
            setup = train_utils.setup_train_loop(config, None)
        _, _, shardings, _, mesh, _, _, _, _, _, state = setup
        self.shardings = shardings
        graph, self._state = nnx.split(state)
        params, shardings = sharding.maybe_update_params_sharding_with_opt(
            config, shardings
        )
        self._step, _ = train_utils.jit_train_and_eval_step(
            config,
            graph,
            mesh,
            self._state,
            shardings,
            train.train_step,
            params_shardings=params,
        )
        self._mesh = mesh

    def step(self, number):
        """Trains on batch `number` and returns the loss."""
        walk = tokens(number, batch=_BATCH, length=_LENGTH + 1, vocab=_VOCAB)
        places = np.tile(np.arange(_LENGTH, dtype=np.int32), (_BATCH, 1))
        batch = {}
        for name, x in (("inputs", walk[:, :-1]), ("targets", walk[:, 1:])):
            batch |= {name: x, f"{name}_position": places}
            batch[f"{name}_segmentation"] = np.ones_like(x)
        with (
            jax.set_mesh(self._mesh),
            logical_axis_rules(self.config.logical_axis_rules),
        ):
            self._state, metrics = self._step(self._state, batch)
        return float(metrics["scalar"]["learning/loss"])

    def arrays(self):
        """Returns MaxText's train state."""
        return self._state

    def restore(self, arrays):
        """Replaces MaxText's train state."""
        self._state = arrays

    def opt_state(self):
        """Returns the optimizer's state as arrays instead of `nnx.Variable`."""
        return nnx.as_pure(self._state)["optimizer"]["opt_state"]


def _alike(shardings):
    """Returns how many parameters are sharded over data, and how many there are."""
    nodes = jax.tree.leaves(shardings, is_leaf=lambda x: isinstance(x, nnx.Variable))
    specs = [x.get_value().spec for x in nodes if isinstance(x, nnx.Param)]
    return sum("data" in str(spec) for spec in specs), len(specs)


def _zero_1():
    """Returns a sentence about how many parameters ZeRO-1 shards like their moments."""
    run = Run(coat.fp8_adamw(1e-3), shard_optimizer_over_data="true")
    update = sharding.maybe_update_params_sharding_with_opt
    _, alone = update(run.config, run.shardings)
    _, viewed = update(run.config, as_adam_state(run.shardings))
    (before, _), (after, count) = _alike(alone.model), _alike(viewed.model)
    return (
        f"ZeRO-1 shards {after} of {count} parameters like their moments with "
        f"as_adam_state, and {before} without"
    )


def rows():
    """Trains the model of this program and returns its row of results."""
    name = "MaxText setup_train_loop and train_step, a Llama"
    return [compare(name, Run, packages=["maxtext"], note=_zero_1())]


if __name__ == "__main__":
    main(rows)
