"""Tests of the fidelity study: operands, intervals, rows, and interrupted runs."""

import functools
import json
import math
from typing import get_args

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from helpers.marks import slow_except
from helpers.tables import text_of

import coat_jax as coat
from coat_jax.models import llama
from experiments.common.results import write_results
from experiments.studies.fidelity import __main__ as program
from experiments.studies.fidelity import join, model, summary, texts, training, variants
from experiments.studies.fidelity.operands import Grid, Operands, Weight

_E4M3, _E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2


def _run(variant, seed, loss):
    return {"variant": variant, "seed": seed} | dict.fromkeys(summary.LOSSES, loss)


def test_differences_are_paired_and_their_intervals_are_students():
    runs = [_run("bf16", seed, loss) for seed, loss in enumerate((1.0, 2.0, 4.0, 9.0))]
    runs += [_run("coat", 2, 4.0), _run("coat", 0, 1.01), _run("coat", 1, 2.04)]
    runs.append(_run("te", 3, 9.9))
    table = {row["variant"]: row for row in summary.differences(runs)}
    assert table.keys() == {"coat", "te"}
    # Differences are 1%, 2% and 0%: their deviation is 1%, and t is 4.303 for n = 3.
    coat_row = table["coat"]
    assert coat_row["seeds"] == 3
    assert coat_row["percent"] == pytest.approx(1.0)
    assert coat_row["percent_deviation"] == pytest.approx(1.0)
    assert coat_row["percent_half"] == pytest.approx(4.303 / math.sqrt(3))
    assert coat_row["nats"] == pytest.approx(0.05 / 3)
    assert table["te"]["percent"] == pytest.approx(10.0)
    assert table["te"]["percent_half"] is None
    whole = {"regime": "text", "shared": 0.0}
    targets = summary.bars(list(table.values()), whole)
    assert targets == []  # The last row of each variant is of another loss.
    targets = summary.bars(summary.differences(runs), whole)
    assert [bar.holds for bar in targets] == [False, False]
    assert summary.bars(summary.differences(runs), whole | {"shared": 0.7}) == []
    drawn = summary.table(summary.differences(runs), "title", "percent")
    assert "coat" in text_of(drawn)


def test_variants_are_compared_with_their_own_reference():
    runs = [_run("bf16", 0, 1.0), _run("b2_999", 0, 2.0), _run("coat_b2_999", 0, 2.2)]
    table = {row["variant"]: row for row in summary.differences(runs)}
    assert table["b2_999"]["percent"] == pytest.approx(100.0)
    assert table["coat_b2_999"]["percent"] == pytest.approx(10.0)
    assert [v.name for v in variants.chosen("coat_b2_999")] == ["b2_999", "coat_b2_999"]
    with pytest.raises(ValueError, match="got 'cost'"):
        variants.chosen("coat,cost")
    with pytest.raises(ValueError, match="named once"):
        variants.chosen("coat,coat")


def test_a_table_has_a_column_for_each_regime_and_part_of_shared_steps():
    def results(shared, runs, regime="text"):
        rows = [_run(name, seed, loss) for name, seed, loss in runs]
        settings = {"settings": {"shared": shared}, "regime": regime}
        return settings | {"summary": summary.differences(rows)}

    first = [("bf16", 0, 1.0), ("coat", 0, 1.01), ("bf16", 1, 2.0), ("coat", 1, 2.06)]
    memorized = [("bf16", 0, 1e-3), ("coat", 0, 2e-3)]
    files = [results(0.7, memorized, "memorize")]
    files += [results(0.1, first), results(0.7, [*first, ("te", 0, 1.05)])]
    te, coat_row = summary.by_shared(files)
    assert coat_row["memorized, after 70%"] == "+100.000 ± nan"
    assert (te["variant"], te["after 10%"]) == ("te", None)
    assert te["after 70%"] == "+5.000 ± nan"
    # Student's t is 12.706 for two seeds, and the deviation is the root of two.
    assert coat_row["after 10%"] == coat_row["after 70%, in BF16"] == "+2.000 ± 12.706"
    assert coat_row["what differs"] == "the recipe coat"


def _rounded(x, dtype, largest, axis=None):
    """Rounds float64 numbers with scales of powers of two, or of BF16 along an axis."""
    amax = np.abs(x).max(axis=axis, keepdims=True)
    if axis is None:
        scale = 2.0 ** np.ceil(np.log2(amax / largest))
    else:
        scale = (amax / largest).astype(ml_dtypes.bfloat16).astype(np.float64)
    codes = np.clip(x / scale, -largest, largest).astype(dtype)
    return (codes.astype(np.float64) * scale).astype(ml_dtypes.bfloat16)


def test_each_operand_is_rounded_where_its_name_says():
    rng = np.random.default_rng(0)
    x, w, dy = (
        rng.normal(size=shape).astype(ml_dtypes.bfloat16).astype(np.float64)
        for shape in ((24, 32), (40, 32), (24, 40))
    )
    linear = Operands(
        x=Grid(scales="row"),
        dy_for_dx=Grid(format=coat.E5M2),
        w_for_dx=Grid(scales="column"),
        x_for_dw=Grid(),
    )
    arrays = (jnp.asarray(x, jnp.bfloat16), jnp.asarray(w, jnp.float32))

    @jax.jit
    def passes(x, w, dy):
        y, vjp = jax.vjp(linear, x, w)
        return y, *vjp(dy)

    y, dx, dw = passes(*arrays, jnp.asarray(dy, jnp.bfloat16))
    assert (y.dtype, dx.dtype, dw.dtype) == ("bfloat16", "bfloat16", "float32")
    wide = [
        a.astype(np.float64)
        for a in (
            _rounded(x, _E4M3, 448, axis=1),
            _rounded(dy, _E5M2, 57344),
            _rounded(w, _E4M3, 448, axis=0),
            _rounded(x, _E4M3, 448),
        )
    ]
    expected = wide[0] @ w.T, wide[1] @ wide[2], dy.T @ wide[3]
    for actual, exact in zip((y, dx, dw), expected, strict=True):
        # Only the rounding of results to BF16 may differ.
        error = np.abs(np.asarray(actual, np.float64) - exact)
        assert error.max() <= 2**-8 * np.abs(exact).max()
    other = np.abs(np.asarray(dw, np.float64) - dy.T @ x)
    assert other.max() > 2**-6 * np.abs(dy.T @ x).max()  # Rounding does show.


@pytest.mark.parametrize("only", slow_except(["gate_up"], get_args(Weight)))
def test_operands_of_one_weight_alone_are_rounded(only):
    shapes = {
        "qkv": (96, 32),
        "out": (32, 32),
        "gate_up": (2, 48, 32),
        "down": (32, 48),
    }
    linear = Operands(only=only, w=Grid(scales="row"))
    for name, shape in shapes.items():
        w = jax.random.normal(jax.random.key(0), shape)
        x = jnp.eye(shape[-1])
        y = linear(x, w).reshape(len(x), -1)
        is_exact = bool((y == w.reshape(-1, shape[-1]).T).all())
        assert is_exact == (name != only)


def test_stochastic_rounding_has_the_right_mean():
    x = jnp.full((512, 64), 1.03, jnp.bfloat16).at[0, 0].set(1.75)
    y = np.asarray(jax.jit(Grid(stochastic=True))(x), np.float64)[1:]
    assert set(np.unique(y)) == {1.0, 1.125}
    assert y.mean() == pytest.approx(float(x[1, 1]), abs=4 * 0.06 / math.sqrt(y.size))


def test_the_model_is_llama():
    shape = model.Shape(layers=3, hidden=32, intermediate=64, head_dim=16)
    params = model.init(shape, jax.random.key(0))
    config = llama.LlamaConfig(
        vocab_size=model.VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_layers=3,
        num_heads=2,
        num_kv_heads=2,
        tie_embeddings=True,
        recipe="bf16",
    )
    llama_model = nnx.eval_shape(lambda: llama.Llama(config, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(llama_model)
    nnx.replace_by_pure_dict(state, params)
    windows = jax.random.randint(jax.random.key(1), (2, 17), 0, 257)
    # The gates' copies are for backward, so that the loss is the same in three parts.
    recipes = [variants.VARIANTS[name].recipe for name in ("bf16", "gates")]
    forward = variants.Forward(*recipes, head="bf16")

    @jax.jit
    def losses(params, state):
        merged = nnx.merge(graph, state)
        return (
            llama.cross_entropy(merged, windows[:, :-1], windows[:, 1:]),
            model.loss(params, windows, shape=shape, forward=forward),
        )

    expected, actual = map(float, losses(params, state))
    assert actual == pytest.approx(expected, rel=1e-5)


def test_windows_are_of_distinct_documents_and_read_once_a_pass():
    documents = [bytes([65 + i]) * 40 for i in range(26)]
    windows = texts.windows(documents * 2, train=30, test=8, length=16)
    assert windows.train.shape == (30, 17)
    assert not set(np.unique(windows.train)) & set(np.unique(windows.test)) - {256}
    np.testing.assert_array_equal(windows.train[0, -1], windows.train[1, 0])
    again = texts.windows(reversed(documents), train=30, test=8, length=16)
    assert again.fingerprint == windows.fingerprint
    order = texts.order(3, windows=5, count=12)
    assert sorted(order[:5]) == sorted(order[5:10]) == [0, 1, 2, 3, 4]
    np.testing.assert_array_equal(order, texts.order(3, windows=5, count=12))
    assert order.tolist() != texts.order(4, windows=5, count=12).tolist()
    with pytest.raises(ValueError, match="fewer --steps"):
        texts.windows(documents, train=90, test=8, length=16)


def test_a_cut_run_goes_on_without_repeating_anything(tmp_path, monkeypatch, capsys):
    documents = [np.random.default_rng(i).bytes(200) for i in range(20)]
    monkeypatch.setattr(texts, "python_files", lambda: documents)
    compiled_once = functools.cache(training.compiled)

    def compiled(setup, variant, **sizes):
        """Returns the programs of bf16; "again" starts from other parameters."""
        programs = compiled_once(setup, variants.VARIANTS["bf16"], **sizes)
        if variant.name == "bf16":
            return programs
        return programs._replace(init=lambda seed: programs.init(seed + np.int32(9)))

    monkeypatch.setattr(training, "compiled", compiled)
    out = tmp_path / "fidelity.json"
    argv = ["--preset", "tiny", "--variants", "bf16,again", "--out", str(out)]
    complete, trained = program.Study._run, []

    def interrupted(self, variant, *arguments):
        if len(trained) == 3:
            raise KeyboardInterrupt
        trained.append(variant.name)
        complete(self, variant, *arguments)

    monkeypatch.setattr(program.Study, "_run", interrupted)
    assert program.main([*argv, "--seeds", "2"]) == 130
    assert trained == ["bf16", "again", "bf16"]
    saved = json.loads(out.read_text())["rows"]

    monkeypatch.setattr(program.Study, "_run", complete)
    assert program.main([*argv, "--seeds", "2", "--seconds", "0"]) == 0
    assert json.loads(out.read_text())["rows"] == saved  # It was too late to start.
    assert program.main([*argv, "--seeds", "2"]) == 0
    contents = json.loads(out.read_text())
    runs = contents["rows"]
    assert runs[:3] == saved
    assert [(r["seed"], r["variant"]) for r in runs] == [
        (0, "bf16"),
        (0, "again"),
        (1, "bf16"),
        (1, "again"),
    ]
    (difference,) = (r for r in contents["summary"] if r["loss"] == "last_own")
    percents = [
        100 * (runs[i + 1]["last_own"] / runs[i]["last_own"] - 1) for i in (0, 2)
    ]
    assert difference["percent"] == pytest.approx(np.mean(percents))
    # Student's t is 12.706 for two seeds.
    half = 12.706 * abs(percents[0] - percents[1]) / 2
    assert difference["percent_half"] == pytest.approx(half)
    assert 0.5 * math.log(384) < runs[0]["last_own"] < 1.2 * math.log(384)
    assert runs[0]["last_own"] != runs[2]["last_own"]
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert program.main([*argv, "--steps", "3"]) == 2
    assert "other settings" in capsys.readouterr().err


def test_differences_are_between_ends_of_the_same_shared_steps(tmp_path, monkeypatch):
    documents = [np.random.default_rng(i).bytes(200) for i in range(20)]
    monkeypatch.setattr(texts, "python_files", lambda: documents)
    compiled = functools.cache(training.compiled)
    one = variants.VARIANTS["bf16"]
    monkeypatch.setattr(
        training, "compiled", lambda setup, _, **sizes: compiled(setup, one, **sizes)
    )
    out = tmp_path / "fidelity.json"
    argv = ["--preset", "tiny", "--shared", "0.5", "--seeds", "1", "--out", str(out)]

    def seeds_of_rows(names):
        assert program.main([*argv, "--variants", names]) == 0
        contents = json.loads(out.read_text())
        rows = [(row["variant"], row["start"]) for row in contents["rows"]]
        return rows, {row["variant"]: row["seeds"] for row in contents["summary"]}

    rows, seeds = seeds_of_rows("bf16,again")
    (first,) = {start for _, start in rows}
    assert (len(rows), seeds) == (2, {"again": 1})
    # Another process may end the shared steps in other bits.
    complete = training.shared

    def shared(*arguments):
        return complete(*arguments)._replace(seed=np.int32(7))

    monkeypatch.setattr(training, "shared", shared)
    rows, seeds = seeds_of_rows("bf16,again,moments")
    (_, second) = rows[-1]
    assert second != first
    assert rows[2:] == [("bf16", second), ("moments", second)]
    assert seeds == {"again": 1, "moments": 1}


def test_a_late_recipe_has_the_last_steps():
    variant = variants.VARIANTS["coat_last_20"]
    assert variant.late_steps(10) == 2
    assert variant.forward.recipe == variants.RECIPES["coat"]
    assert variant.last_forward.recipe == variants.RECIPES["coat_bf16"]
    assert variants.VARIANTS["coat"].late_steps(10) == 0
    steps = []

    def step(name):
        return lambda state, *_: (state, steps.append(name) or jnp.float32(0))

    programs = training.Programs(
        init=lambda seed: 0,
        begin=None,
        step=step("early"),
        late_step=step("late"),
        early_steps=10 - variant.late_steps(10),
        losses={},
    )
    args = program._parser().parse_args(["--preset", "tiny", "--steps", "10"])
    arguments = program.setup_of(args), programs, 0, np.zeros((4, 17), np.uint16)
    training._after(*arguments, lambda _: None, 0, range(10))
    assert steps == ["early"] * 8 + ["late"] * 2


@pytest.mark.slow
def test_variants_go_on_from_their_references_state():
    """A reference that starts from its own saved state ends as if uninterrupted."""
    args = program._parser().parse_args(["--preset", "tiny", "--shared", "0.5"])
    setup = program.setup_of(args)
    rng = np.random.default_rng(0)
    windows = tuple(rng.integers(0, 384, (8, 17)).astype(np.uint16) for _ in range(2))
    programs = training.compiled(setup, variants.VARIANTS["bf16"], 8, 8)
    start = training.shared(setup, programs, 0, windows[0])
    assert start.step == setup.shared_steps == 2
    whole = training.train(setup, programs, 0, windows)
    later = training.train(setup, programs, 0, windows, start=start)
    assert later["average_own"] == whole["average_own"]
    assert later["last_own"] == whole["last_own"]

    begin = functools.partial(training._begin, setup=setup)
    begun = jax.jit(begin, static_argnames="variant")(
        start, variant=variants.VARIANTS["coat"]
    )
    for actual, expected in zip(
        jax.tree.leaves(begun.params), jax.tree.leaves(start.params), strict=True
    ):
        np.testing.assert_array_equal(actual, expected)
    moments = coat.to_optax_state(begun.opt_state)
    for actual, expected in zip(
        jax.tree.leaves(moments), jax.tree.leaves(start.opt_state), strict=True
    ):
        error = np.linalg.norm(np.asarray(actual - expected, np.float64))
        assert error <= 0.05 * np.linalg.norm(expected)
    with pytest.raises(ValueError, match=r"below 1, got 1\.0"):
        program.setup_of(program._parser().parse_args(["--shared", "1"]))


def _file(path, seed, **changes):
    """Writes a results file of a process that has trained one seed."""
    settings = {"shape": {"layers": 3, "hidden": 32}, "steps": 4}
    settings |= {"batch_size": 2, "seq_len": 16, "regime": "text", "shared": 0.0}
    extra = {"regime": "text", "settings": settings, "data": "a", "test_tokens": 64}
    runs = [_run("bf16", seed, 2.0), _run("coat", seed, 2.0 * (1 + seed / 100))]
    write_results(path, rows=runs, **extra | {"summary": [], "errors": {}} | changes)
    return str(path)


def test_files_of_processes_are_joined(tmp_path, capsys, monkeypatch):
    files = []
    for seed in (1, 3):
        monkeypatch.setenv("GIT_COMMIT", f"commit {seed}")
        files.append(_file(tmp_path / f"{seed}.json", seed, command=f"train {seed}"))
    out = tmp_path / "joined.json"
    assert join.main([*files, "--out", str(out)]) == 0
    contents = json.loads(out.read_text())
    first, last = (
        json.loads((tmp_path / f"{seed}.json").read_text()) for seed in (1, 3)
    )
    assert contents["versions"]["commit"] == "commit 1, commit 3"
    assert contents["command"].startswith("train 1; train 3; uv run python ")
    assert contents["date"] == last["date"]
    shared = "device", "regime", "settings", "data", "test_tokens"
    assert [contents[name] for name in shared] == [first[name] for name in shared]
    assert [row["seed"] for row in contents["rows"]] == [1, 1, 3, 3]
    (difference,) = (r for r in contents["summary"] if r["loss"] == "average_own")
    assert difference["percent"] == pytest.approx(2.0)
    # Student's t is 12.706 for two seeds, and the deviation is the root of two.
    assert difference["percent_half"] == pytest.approx(12.706)
    assert [bar["holds"] for bar in contents["bars"]] == [False, False]
    assert out.with_suffix(".png").exists()
    assert join.main([files[0], files[0], "--out", str(out)]) == 2
    assert "bf16 with seed 1, as another file does" in capsys.readouterr().err
    other = _file(tmp_path / "other.json", 5, data="b")
    assert join.main([files[0], other, "--out", str(out)]) == 2
    assert "differ in their data" in capsys.readouterr().err
