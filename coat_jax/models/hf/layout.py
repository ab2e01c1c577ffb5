"""The tensors of a checkpoint that make the parameters of a decoder.

A parameter of the decoder consists of rows of tensors. Rows are the entries of all axes
but the last, merged to one axis; in a vector each number is a row. With n query heads,
k key heads, heads of size d and a layer i, where tensors begin with `model.layers.i.`:

| Parameter | Rows |
| --- | --- |
| `embedding` [vocab, h] | `model.embed_tokens.weight` |
| `head` [h, vocab] | the transpose of `lm_head.weight`; absent if embeddings are tied |
| `norm` [h] | `model.norm.weight` |
| `layers/qkv` [(n + 2 k) d, h] | for each key head j in turn: n / k * d rows of |
| | `self_attn.q_proj.weight`, then d rows of `self_attn.k_proj.weight`, then d rows |
| | of `self_attn.v_proj.weight`, each beginning at row j times their number |
| `layers/qkv_bias` [(n + 2 k) d] | the same rows of `self_attn.{q,k,v}_proj.bias` |
| `layers/out` [h, n d] | `self_attn.o_proj.weight` |
| `layers/gate_up` [2, f, h] | `mlp.gate_proj.weight`, then `mlp.up_proj.weight` |
| `layers/down` [h, f] | `mlp.down_proj.weight` |
| `layers/q_norm` | `self_attn.q_norm.weight` |
| `layers/k_norm` | `self_attn.k_norm.weight` |
| `layers/attention_norm` [h] | `input_layernorm.weight` |
| `layers/attention_out_norm` [h] | `post_attention_layernorm.weight` |
| `layers/mlp_norm` [h] | `post_attention_layernorm.weight`, or with norms in both |
| | places `pre_feedforward_layernorm.weight` |
| `layers/mlp_out_norm` [h] | `post_feedforward_layernorm.weight` |

With e experts, a layer has these parameters in place of the MLP's. The names are from
Qwen3-MoE. Mixtral has `block_sparse_moe` for `mlp`, and `w1`, `w3` and `w2` for the
three matrices:

| Parameter | Rows |
| --- | --- |
| `layers/router` [e, h] | `mlp.gate.weight` |
| `layers/gate_up` [e, 2, f, h] | for each expert j in turn: |
| | `mlp.experts.{j}.gate_proj.weight`, then `mlp.experts.{j}.up_proj.weight` |
| `layers/down` [e, h, f] | `mlp.experts.{j}.down_proj.weight` for each j in turn |

Unless they are dequantized or cast, values equal the tensors' values, to the bit. RoPE
pairs the two halves of a head here as in `transformers`, so that rows within a head
keep their order.
"""

import dataclasses
from collections.abc import Iterator

from coat_jax.layers.experts.routing import Experts
from coat_jax.models.hf.families import FAMILIES, ExpertNames
from coat_jax.models.llama import LlamaConfig

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """Consecutive rows of a tensor.

    Attributes:
      tensor: The tensor's name, without the layer's name.
      start: The first row.
      count: The number of rows.
    """

    tensor: str
    start: int
    count: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameter:
    """A parameter of the decoder and the rows of tensors that make it.

    Attributes:
      path: The parameter's path in the model, such as "layers/qkv".
      shape: The shape of the parameter, or of one layer's part if all layers have it.
      rows: The rows of tensors, in the order of the parameter's rows.
      transposed: Whether the parameter is the transpose of the tensor.
      quantized: Whether FP8 checkpoints have codes of the parameter.
    """

    path: str
    shape: tuple[int, ...]
    rows: tuple[Rows, ...]
    transposed: bool = False
    quantized: bool = False

    @property
    def of_layers(self) -> bool:
        """True if every layer has a part of the parameter."""
        return self.path.startswith("layers/")

    @property
    def stored(self) -> tuple[int, ...]:
        """The shape as the tensors have it, with rows first."""
        return self.shape[::-1] if self.transposed else self.shape

    @property
    def columns(self) -> tuple[int, ...]:
        """The shape of a row."""
        return self.stored[-1:] if len(self.shape) > 1 else ()

    def name(self, tensor: str, layer: int) -> str:
        """Returns the full name of a tensor; `layer` matters only if `of_layers`."""
        return f"model.layers.{layer}.{tensor}" if self.of_layers else tensor

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yields the name, without the layer's name, and the shape of each tensor."""
        counts: dict[str, int] = {}
        for rows in self.rows:
            counts[rows.tensor] = counts.get(rows.tensor, 0) + rows.count
        for tensor, count in counts.items():
            yield tensor, (count, *self.columns)


def parameters(config: LlamaConfig) -> list[Parameter]:
    """Returns the parameters of a decoder in the order of a checkpoint's tensors.

    Examples:
      >>> from coat_jax.models import llama
      >>> from coat_jax.models.hf import layout
      >>> decoder = layout.parameters(llama.CONFIGS["llama3-8b"])
      >>> [(p.path, p.shape) for p in decoder if p.path == "layers/qkv"]
      [('layers/qkv', (6144, 4096))]
    """
    h, vocab = config.hidden_size, config.vocab_size
    decoder = [_whole("embedding", EMBEDDING, vocab, h)]
    if not config.tie_embeddings:
        rows = (Rows(tensor=HEAD, start=0, count=vocab),)
        decoder.append(
            Parameter(path="head", shape=(h, vocab), rows=rows, transposed=True)
        )
    return [*decoder, _whole("norm", "model.norm.weight", h), *_of_layer(config)]


def _of_layer(config: LlamaConfig) -> Iterator[Parameter]:
    h, f = config.hidden_size, config.intermediate_size
    d = config.size_of_heads
    width = config.num_heads * d, config.num_kv_heads * d
    for norm, tensor in _norms(config).items():
        yield _whole(f"layers/{norm}", f"{tensor}.weight", h)
    yield Parameter(
        path="layers/qkv",
        shape=(width[0] + 2 * width[1], h),
        rows=tuple(_heads(config, d, "weight")),
        quantized=True,
    )
    if config.qkv_bias:
        rows = tuple(_heads(config, d, "bias"))
        yield Parameter(
            path="layers/qkv_bias", shape=(width[0] + 2 * width[1],), rows=rows
        )
    if config.qk_norm != "none":
        for name, size in zip(("q_norm", "k_norm"), width, strict=True):
            size = d if config.qk_norm == "head" else size
            yield _whole(f"layers/{name}", f"self_attn.{name}.weight", size)
    out = _whole("layers/out", "self_attn.o_proj.weight", h, width[0])
    yield dataclasses.replace(out, quantized=True)
    if config.experts is not None:
        yield from _experts(config, config.experts)
        return
    yield Parameter(
        path="layers/gate_up",
        shape=(2, f, h),
        rows=_all_rows(f, "mlp.gate_proj.weight", "mlp.up_proj.weight"),
        quantized=True,
    )
    down = _whole("layers/down", "mlp.down_proj.weight", h, f)
    yield dataclasses.replace(down, quantized=True)


def _experts(config: LlamaConfig, experts: Experts) -> Iterator[Parameter]:
    names, count = expert_names(config), experts.num_experts
    h, f = config.hidden_size, config.intermediate_size
    of_experts = [f"{names.block}.experts.{j}" for j in range(count)]
    yield _whole("layers/router", f"{names.block}.gate.weight", count, h)
    pairs = ((names.gate, names.up), (names.down,))
    gate_up, down = (
        [f"{expert}.{name}.weight" for expert in of_experts for name in matrices]
        for matrices in pairs
    )
    yield Parameter(
        path="layers/gate_up",
        shape=(count, 2, f, h),
        rows=_all_rows(f, *gate_up),
        quantized=True,
    )
    yield Parameter(
        path="layers/down",
        shape=(count, h, f),
        rows=_all_rows(h, *down),
        quantized=True,
    )


def expert_names(config: LlamaConfig) -> ExpertNames:
    """Returns the names of the experts' tensors.

    Norms of queries and keys distinguish the families of models with experts.
    """
    fields = {"qk_norm": config.qk_norm} if config.qk_norm != "none" else {}
    return next(
        family.experts
        for family in FAMILIES.values()
        if family.experts is not None and family.fields == fields
    )


def _all_rows(count: int, *tensors: str) -> tuple[Rows, ...]:
    """Returns the rows of whole tensors, which have `count` rows each."""
    return tuple(Rows(tensor=tensor, start=0, count=count) for tensor in tensors)


def _norms(config: LlamaConfig) -> dict[str, str]:
    """Returns a dict from the name of each norm of a layer to its tensor's name."""
    after_attention, after_mlp = (
        "post_attention_layernorm",
        "post_feedforward_layernorm",
    )
    names = {"attention_norm": "input_layernorm"}
    after = {"attention_out_norm": after_attention, "mlp_out_norm": after_mlp}
    if config.norm_placement == "before":
        return names | {"mlp_norm": after_attention}
    if config.norm_placement == "after":
        return after
    return names | after | {"mlp_norm": "pre_feedforward_layernorm"}


def _heads(config: LlamaConfig, d: int, kind: str) -> Iterator[Rows]:
    """Yields the rows of queries, keys and values, key head by key head."""
    queries = config.num_heads // config.num_kv_heads * d
    for j in range(config.num_kv_heads):
        for name, count in (("q", queries), ("k", d), ("v", d)):
            tensor = f"self_attn.{name}_proj.{kind}"
            yield Rows(tensor=tensor, start=j * count, count=count)


def _whole(path: str, tensor: str, *shape: int) -> Parameter:
    rows = (Rows(tensor=tensor, start=0, count=shape[0]),)
    return Parameter(path=path, shape=shape, rows=rows)
