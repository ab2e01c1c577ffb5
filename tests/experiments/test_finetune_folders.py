"""Tests fine-tunings of Hugging Face folders: resumed, moved, with adapters, saved."""

import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.chat_folders import write_model

from coat_jax.models import hf, llama
from experiments.common.results import read_results
from experiments.finetune import checkers, compare, program, settings
from experiments.finetune.base import folder_fingerprint, random_base
from experiments.finetune.conversations import Conversation
from experiments.finetune.folder_encoding import FolderEncoder
from experiments.finetune.training import AnswerTrainer
from experiments.studies import finetune_real, made_up

_FLAGS = ["--steps", "4", "--eval-every", "2", "--save-every", "2", "--batch-size", "2"]
_FLAGS += ["--seq-len", "64", "--eval-batches", "1", "--checker", "number"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Returns a folder with a model and a file of conversations."""
    folder = tmp_path_factory.mktemp("data")
    write_model(folder / "model")
    lines = (
        {
            "messages": [
                {"role": "user", "content": f"What is {n} + 5?"},
                {"role": "assistant", "content": f"It is {n + 5}."},
            ]
        }
        for n in range(60)
    )
    (folder / "chat.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def _run(data, out, *flags):
    paths = ["--model", str(data / "model"), "--data", str(data / "chat.jsonl")]
    assert program.main([*paths, *_FLAGS, *flags, "--out", str(out)]) == 0
    return out


def _logits(folder, tokens):
    return np.asarray(hf.load(folder, recipe="bf16", dtype=jnp.float32)(tokens))


@pytest.mark.slow
def test_a_run_goes_on_where_its_data_and_its_model_have_moved(data, tmp_path):
    out = _run(data, tmp_path / "run", "--recipe", "coat", "--save-format", "fp8-block")
    moved = tmp_path / "moved"
    moved.mkdir()
    shutil.copytree(data / "model", moved / "model")
    shutil.copy(data / "chat.jsonl", moved / "other-name.jsonl")
    killed = tmp_path / "killed"
    shutil.copytree(out, killed)
    shutil.rmtree(killed / "checkpoints" / "coat" / "4")
    (killed / "checkpoints" / "checksums" / "coat" / "4.json").unlink()
    paths = ["--model", str(moved / "model"), "--data", str(moved / "other-name.jsonl")]
    assert program.main(["--resume", str(killed), *paths]) == 0
    for name in ("metrics.jsonl", "answers.jsonl"):
        assert (killed / name).read_bytes() == (out / name).read_bytes()
    tensors = [folder / "models/coat/model.safetensors" for folder in (out, killed)]
    assert tensors[0].read_bytes() == tensors[1].read_bytes()
    (moved / "other-name.jsonl").write_text('{"text": "other"}\n{"text": "two"}')
    assert program.main(["--resume", str(killed), *paths]) == 2
    # The folder is the model of the last checkpoint, and its second form is in FP8.
    run = settings.FinetuneRun.resume(out, {})
    inputs, _ = program.load_inputs(run.settings, out / "tokenizer.json")
    trainer = inputs.trainer(run.settings, "coat", 4)
    with run.checkpoints("coat") as checkpoints:
        state = checkpoints.state(trainer.abstract_state())
    tokens = jnp.arange(12)[None]
    expected = np.asarray(trainer.model(state)(tokens))
    loaded = np.asarray(hf.load(out / "models/coat", recipe="bf16")(tokens))
    np.testing.assert_array_equal(loaded, expected)
    assert (out / "models/coat/tokenizer.json").exists()
    codes = np.asarray(hf.load(out / "models/coat-fp8-block", recipe="bf16")(tokens))
    assert 0 < np.abs(codes - expected).max() < 0.1 * np.abs(expected).max()
    summary = read_results(out / "summary.json")
    assert summary["perplexity"].keys() == {"before", "coat"}
    assert summary["perplexity"]["coat"] < summary["perplexity"]["before"]


@pytest.mark.slow
def test_adapters_are_all_that_is_trained_and_saved(data, tmp_path):
    out = _run(
        data, tmp_path / "run", "--recipe", "coat", "--lora", "4", "--lr", "0.02"
    )
    checkpoint = sum(
        file.stat().st_size for file in (out / "checkpoints/coat/4").rglob("*")
    )
    summary = read_results(out / "summary.json")
    parameters = summary["recipes"]["coat"]["parameters"]
    assert parameters == 2 * 4 * (64 + 128 + 64 + 64 + 64 + 256 + 128 + 64)
    assert checkpoint < 20 * parameters + 20_000
    assert summary["perplexity"]["coat"] < summary["perplexity"]["before"]
    tokens = jnp.arange(12)[None]
    before, after = (
        _logits(folder, tokens) for folder in (data / "model", out / "models/coat")
    )
    assert np.abs(after - before).max() > 1e-3
    saved = hf.load(out / "models/coat", recipe="bf16")
    base = hf.load(data / "model", recipe="bf16")
    np.testing.assert_array_equal(saved.embedding[...], base.embedding[...])


def test_microbatches_have_the_gradient_of_the_batch():
    values = {"preset": "tiny", "batch_size": 4, "seq_len": 16, "rounding": "nearest"}
    values |= {"param_dtype": "float32", "recipes": ("bf16",)}
    of_run = settings.settings(values)
    parts = settings.settings(values | {"accumulate": 2})
    config = random_base(257).config(of_run, "bf16")
    one, two = (AnswerTrainer(config, x, steps=1, base=None) for x in (of_run, parts))
    rng = np.random.default_rng(0)
    batch = rng.integers(0, 200, (4, 3, 17)).astype(np.int32)
    batch[:, 1] = 1
    batch[:, 2] = rng.random((4, 17)) < np.array([0.9, 0.1, 0.3, 0.0])[:, None]

    @jax.jit
    def both(batch):
        state = one._init(0)
        empty = nnx.State({})
        return [each._gradients(state, batch, empty)[:2] for each in (one, two)]

    ((loss, _), grads), ((sum_of_parts, _), sums) = both(batch)
    assert float(sum_of_parts) == pytest.approx(float(loss), rel=1e-3)
    for a, b in zip(*map(jax.tree.leaves, (grads, sums)), strict=True):
        assert np.linalg.norm(a - b) < 0.02 * np.linalg.norm(a)


def test_a_checker_takes_three_arguments():
    rule = "called with an answer, the expected result and the record's fields, but: "
    with pytest.raises(ValueError, match=rule + "too many positional"):
        settings.settings({"checker": f"{__name__}:_of_two"})
    assert checkers.load_checker("builtins:max") is max  # It has no signature.


def _of_two(answer, expected):
    return answer == expected


def _capitals(answer, expected, fields):
    return answer == fields["answer"].upper()


def test_checkers():
    load = checkers.load_checker
    assert load("number")("so 1,200.0 eggs", "#### 1200", {})
    assert not load("number")("none", "1", {})
    assert load("exact")("a #### 7", "7", {})
    own = load(f"{__name__}:_capitals")
    assert own("YES", "yes", {"answer": "yes"})
    for name in (
        "best",
        "no.module:f",
        f"{__name__}:nothing",
        f"{__name__}:_FLAGS",
        ":",
    ):
        with pytest.raises(ValueError, match="checker"):
            load(name)
    assert not checkers.is_code("exact")


def test_folders_are_known_by_what_is_in_them(data, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(data / "model", copy)
    first = folder_fingerprint(copy)
    assert first == folder_fingerprint(data / "model")
    for name in ("model.safetensors", "tokenizer.json"):
        content = (copy / name).read_bytes()
        (copy / name).write_bytes(content[:-2] + b"  ")
        assert folder_fingerprint(copy) != first
        (copy / name).write_bytes(content)
    assert isinstance(hf.load(copy), llama.Llama)


@pytest.mark.slow
def test_a_released_run_has_the_losses_of_an_ordinary_one(data, tmp_path):
    flags = ["--recipe", "coat", "--tensorboard"]
    released = _run(data, tmp_path / "released", *flags, "--release")
    ordinary = _run(data, tmp_path / "ordinary", *flags)
    losses = [
        [row["loss"] for row in map(json.loads, lines) if "loss" in row]
        for lines in (
            (out / "metrics.jsonl").read_text().splitlines()
            for out in (released, ordinary)
        )
    ]
    assert len(losses[0]) == 4
    np.testing.assert_allclose(*losses, rtol=1e-3)
    assert list((released / "tensorboard" / "coat").iterdir())
    tokens = jnp.arange(12)[None]
    assert np.isfinite(_logits(released / "models" / "coat", tokens)).all()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "MODEL", "--base", "x"], "no run in .*x|got both"),
        (["--model", "MODEL", "--hidden", "4"], "unrecognized arguments: --hidden"),
        (["--model", "MODEL", "--preset", "cpu"], "--model has a shape of its own"),
        (["--model", "nowhere"], "must have the file 'config.json'"),
        (["--lora", "4"], "--lora needs a --model"),
        (["--model", "MODEL", "--lora", "0"], "lora must be 1 or more, a rank, got 0"),
        (["--model", "MODEL", "--lora-alpha", "2"], "--lora-alpha needs --lora"),
        (["--model", "MODEL", "--lora", "4", "--recipe", "te"], "--lora takes the rec"),
        (["--model", "MODEL", "--lora", "4", "--release"], "--lora needs release='no'"),
        (["--model", "MODEL", "--recipe", "bf16", "--release"], "release rounds stoch"),
        (["--markup", "read"], "--markup needs a --model, got 'read'"),
        (["--largest", "9"], "--largest is of generated problems, and --data takes"),
        (["--families", "steps"], "--families is of generated problems, and --data"),
        (["--save-format", "fp8-block"], "--save-format needs a --model"),
        (["--checker", "mine"], "checkers are exact, number or MODULE:FUNCTION"),
        (["--model", "MODEL", "--mesh", "fsdp=3"], "--mesh fsdp=3 needs 3 devices"),
        (
            ["--model", "MODEL", "--accumulate", "3"],
            "accumulate must divide batch_size",
        ),
    ],
)
def test_bad_input_is_one_line(data, tmp_path, capsys, flags, message):
    flags = [str(data / "model") if flag == "MODEL" else flag for flag in flags]
    paths = ["--data", str(data / "chat.jsonl"), "--out", str(tmp_path / "run")]
    try:
        code = program.main([*flags, *paths])
    except SystemExit as end:
        code = end.code
    output = capsys.readouterr().err.strip()
    assert code == 2
    assert output.startswith("error: ")
    assert len(output.splitlines()) == 1
    assert re.search(message, output), output
    assert not (tmp_path / "run").exists()


def test_code_of_a_folder_is_not_run(data, tmp_path, capsys):
    given = {"model": str(data / "model"), "data": (str(data / "chat.jsonl"),)}
    given |= {"checker": f"{__name__}:_capitals"}
    of_run = settings.settings(given)
    run = settings.FinetuneRun.create(tmp_path / "run", of_run, "x")
    folder = run.folder
    del run
    assert program.main(["--resume", str(folder)]) == 2
    assert "no folder's code runs by itself" in capsys.readouterr().err


def test_made_up_folders_are_loaded_and_encoded(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_layers": 1}
    config = llama.LlamaConfig(vocab_size=384, num_heads=4, num_kv_heads=2, **sizes)
    made_up.write(tmp_path / "model", config)
    assert hf.load(tmp_path / "model").embedding.dtype == jnp.bfloat16
    encoder = FolderEncoder(tmp_path / "model", 384)
    asked = Conversation(messages=(("user", "<|end|> é"), ("assistant", "b")))
    tokens, answers = encoder.encode(asked)
    text = encoder.decode(tokens[answers].tolist())
    assert text == "b"
    assert (tokens == encoder.stop_tokens[0]).sum() == 2


def test_bars_of_the_study_are_of_problems_alone():
    exact = np.zeros((3, 5, 400))
    exact[1:, :, ::2] = 1
    exact[2, :, :4] = 1
    families = ["stories"] * 390 + [finetune_real.DIALOGUES] * 10
    hits = compare.Hits(["before", "bf16", "coat"], families, exact)
    problems = finetune_real.problems_of(hits)
    assert problems.exact.shape == (3, 5, 390)
    losses = [
        {"recipe": recipe, "val_loss": loss}
        for recipe, loss in (("bf16", 2.0), ("coat", 2.04))
    ]
    first, second = finetune_real._bars(compare.paired(problems), losses)
    assert first.measured == pytest.approx(2)
    assert not first.holds
    # Two of 390 answers differ.
    assert 100 * 2 / 390 < second.measured < 2
    assert finetune_real._suffices(problems)
    few = compare.Hits(hits.recipes, families[:9], exact[:, :, :9])
    assert not finetune_real._suffices(few)
