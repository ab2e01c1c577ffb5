"""A smoke test for every supported version of JAX and Python, without kernels.

One model trains with an FP8 optimizer, FP8 residuals and FP8 matmuls. A second model is
converted by `coat.fp8`.
"""

import subprocess
import sys

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import coat_jax as coat
import pallas_kernels
from pallas_kernels import versions


class _Mlp(nnx.Module):
    def __init__(self, dot_general, *, rngs):
        wide = {"dot_general": dot_general, "rngs": rngs}
        self.up, self.down = nnx.Linear(128, 256, **wide), nnx.Linear(256, 128, **wide)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(x)))


class _Model(nnx.Module):
    def __init__(self, dot_general=jax.lax.dot_general, wrap=lambda layer: layer):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([wrap(_Mlp(dot_general, rngs=rngs)) for _ in range(2)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def _trained(model, tx, steps=20):
    """Returns the losses of a model that learns to shift a vector."""
    x = jax.random.normal(jax.random.key(0), (64, 128))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        def loss(model):
            return jnp.mean((model(x) - jnp.roll(x, 1, axis=-1)) ** 2)

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    return [float(step(model, optimizer)) for _ in range(steps)]


def test_training_is_that_of_optax():
    plain = _trained(_Model(), optax.adamw(3e-3))
    model = _Model(coat.fp8_dot_general, coat.fp8_remat)
    light = _trained(model, coat.fp8_adamw(3e-3))
    converted = coat.fp8(_Model())
    other = _trained(converted, coat.with_quantized_state(optax.adamw(3e-3)))
    assert plain[-1] < 0.2 * plain[0]
    # The curve is steep: a step is a tenth of the loss.
    assert light[-1] == pytest.approx(plain[-1], rel=0.1)
    assert other[-1] == pytest.approx(plain[-1], rel=0.1)


def test_explain_says_which_jax_the_kernels_need(monkeypatch):
    x = jnp.ones((64, 256), jnp.bfloat16)
    obstacle = versions.kernels_obstacle()
    assert (obstacle is None) == (jax.__version_info__ >= (0, 11, 2))
    monkeypatch.setattr(pallas_kernels.dispatch.devices, "has_hopper", lambda: True)
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 1))
    monkeypatch.setattr(jax, "__version__", "0.10.1")
    with pytest.warns(
        UserWarning, match="kernels do not run: the kernels need jax 0.11"
    ):
        (choice,) = pallas_kernels.explain(pallas_kernels.norm, x).choices
    assert choice.implementation == "reference"
    assert choice.reason == "the kernels need jax 0.11.2 or newer, got 0.10.1"


def test_a_sharded_result_needs_a_ragged_dot_with_shardings(monkeypatch):
    x, w, sizes = jnp.ones((32, 8)), jnp.ones((2, 8, 4)), jnp.array([10, 22])
    monkeypatch.setattr(jax.lax, "ragged_dot", lambda lhs, rhs, group_sizes: None)
    monkeypatch.setattr(jax, "__version__", "0.10.0")
    with pytest.raises(ValueError, match=r"needs jax 0\.11 or newer, got .* 0\.10\.0"):
        coat.fp8_ragged_dot(x, w, sizes, out_sharding=jax.sharding.PartitionSpec())


def test_the_optimizer_imports_neither_flax_nor_kernels():
    program = (
        "import coat_jax as coat, sys\n"
        "wrong = {'flax', 'optax'} & set(sys.modules)\n"
        "assert not wrong, wrong\n"
        "import jax.numpy as jnp\n"
        "tx = coat.fp8_adamw(1e-3)\n"
        "tx.init({'w': jnp.ones((64, 128))})\n"
        "wrong = {'flax', 'jax.experimental.pallas.mosaic_gpu'} & set(sys.modules)\n"
        "assert not wrong, wrong\n"
        "import coat_jax.fp8.dot_general\n"
        "assert callable(coat.fp8)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.slow
def test_threads_may_read_names_first():
    program = (
        "import threading, coat_jax as coat, pallas_kernels as kernels\n"
        "names = [(m, n) for m in (coat, kernels) for n in m.__all__]\n"
        "start, errors = threading.Barrier(16), []\n"
        "def read(i):\n"
        "    start.wait()\n"
        "    try:\n"
        "        for j in range(len(names)):\n"
        "            getattr(*names[(7 * j + 11 * i) % len(names)])\n"
        "    except BaseException as error:\n"
        "        errors.append(error)\n"
        "threads = [threading.Thread(target=read, args=(i,)) for i in range(16)]\n"
        "[thread.start() for thread in threads]\n"
        "[thread.join() for thread in threads]\n"
        "assert not errors, errors[:3]\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
