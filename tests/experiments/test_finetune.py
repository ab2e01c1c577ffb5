"""Tests fine-tuning at a tiny size: its loss, its files, and that it resumes."""

import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.main_job import untrained

from experiments.common.results import read_results
from experiments.finetune import program, settings, training
from experiments.finetune.conversations import Conversation
from experiments.finetune.encoding import WordsEncoder
from experiments.finetune.exact_match import Exam
from experiments.finetune.packing import PackedWindows
from experiments.finetune.tasks import problems
from experiments.finetune.training import AnswerTrainer
from experiments.pretrain import program as pretrain
from experiments.training import report
from experiments.training.settings import model_config
from experiments.training.text import BYTES_VOCAB_SIZE, text_codec

_STEPS = 4
_PRETRAINED = ["--preset", "tiny", "--recipes", "bf16", "--steps", "2"]
_PRETRAINED += ["--eval-batches", "1", "--save-every", "2"]
_TUNED = ["--steps", str(_STEPS), "--save-every", "2", "--eval-every", "2"]
_TUNED += ["--problems", "60", "--test-questions", "6", "--eval-questions", "4"]
_TUNED += ["--families", "expressions", "--largest", "50", "--eval-batches", "1"]
_TUNED += ["--recipes", "bf16", "--seq-len", "64", "--bad-step", "skip"]


@pytest.fixture(scope="module")
def base(tmp_path_factory, shared_trainers):
    """Returns the folder of a pretraining run."""
    folder = tmp_path_factory.mktemp("base")
    (folder / "words.txt").write_text("User: 1 + 1?\nAssistant: 2\n" * 400)
    out = folder / "run"
    data = ["--data", str(folder / "words.txt")]
    assert pretrain.main([*_PRETRAINED, *data, "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def finished(tmp_path_factory, base):
    """Returns the folder of a fine-tuning that nothing interrupted."""
    out = tmp_path_factory.mktemp("runs") / "undisturbed"
    assert program.main([*_TUNED, "--base", str(base), "--out", str(out)]) == 0
    return out


def _bits(tree) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def _lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _state(folder, recipe="bf16"):
    run = settings.FinetuneRun.resume(folder, {})
    inputs, _ = program.load_inputs(run.settings, folder / "tokenizer.json")
    trainer = inputs.trainer(run.settings, recipe, run.steps)
    with run.checkpoints(recipe) as checkpoints:
        return trainer, checkpoints.state(trainer.abstract_state())


@pytest.mark.slow
def test_a_run_leaves_its_exact_match(finished):
    summary = read_results(finished / "summary.json")
    rows = {(row["recipe"], row["family"]): row for row in summary["rows"]}
    families = ("expressions", "all")
    assert rows.keys() == {(r, f) for r in ("before", "bf16") for f in families}
    labels = list(report.table(summary).columns[0].cells)
    assert "validation loss, nats a byte" in labels
    assert not any("gap to" in label for label in labels)
    answers = _lines(finished / "answers.jsonl")
    for recipe in ("before", "bf16"):
        of_recipe = [record for record in answers if record["recipe"] == recipe]
        pairs = [(record["question"], record["expected"]) for record in of_recipe]
        test = problems("test", 6, families=["expressions"], largest=50)
        assert pairs == [(problem.question, problem.answer) for problem in test]
        row = rows[recipe, "all"]
        share = 100 * np.mean([record["exact"] for record in of_recipe])
        assert row["questions"] == 6
        assert row["exact_match_percent"] == pytest.approx(share)
    metrics = _lines(finished / "metrics.jsonl")
    assert [row["step"] for row in metrics if "exact_match_percent" in row] == [2, 4]
    for name in ("loss.png", "exact_match.png"):
        assert (finished / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_run_starts_from_its_base_in_bfloat16(finished, base):
    trainer, state = _state(finished)
    run = pretrain.Run.resume(base, {})
    recipe = "bf16"
    pretrainer = pretrain.Trainer(
        model_config(run.settings, recipe, BYTES_VOCAB_SIZE), run.settings, steps=2
    )
    with run.checkpoints(recipe) as checkpoints:
        expected = checkpoints.state(pretrainer.abstract_state()).params
    start = trainer.init().params
    assert _bits(start) == _bits(
        jax.tree.map(lambda p: p.astype(jnp.bfloat16), expected)
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {
        np.dtype(jnp.bfloat16)
    }
    assert _bits(state.params) != _bits(start)


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_same_bits(finished, tmp_path):
    folder = tmp_path / "killed"
    shutil.copytree(finished, folder)
    shutil.rmtree(folder / "checkpoints" / "bf16" / str(_STEPS))
    (folder / "checkpoints" / "checksums" / "bf16" / f"{_STEPS}.json").unlink()
    assert program.main(["--resume", str(folder)]) == 0
    for name in ("metrics.jsonl", "answers.jsonl"):
        assert (folder / name).read_bytes() == (finished / name).read_bytes()
    assert _bits(_state(folder)[1]) == _bits(_state(finished)[1])


def test_loss_is_that_of_the_answers_alone():
    arguments = {
        "preset": "tiny",
        "seq_len": 100,
        "batch_size": 2,
        "param_dtype": "float32",
    }
    of_run = settings.settings(arguments | {"rounding": "nearest"})
    config = model_config(of_run, "bf16", BYTES_VOCAB_SIZE)
    trainer = AnswerTrainer(config, of_run, steps=1, base=None)
    encoder = WordsEncoder(text_codec())
    conversations = map(Conversation.of, problems("train", 4, families=["expressions"]))
    examples = [encoder.encode(each) for each in conversations]
    windows = PackedWindows(examples, of_run.seq_len)
    batch = np.stack([windows[0], windows[1]])
    assert len(windows) == 2

    losses = []
    model = trainer.model(trainer.init())
    forward = jax.jit(lambda state, t: nnx.merge(nnx.graphdef(model), state)(t))
    for tokens, answers in examples:
        padded = np.zeros((1, of_run.seq_len), np.int32)
        padded[0, : tokens.size] = tokens
        logits = np.asarray(forward(nnx.state(model), padded), np.float64)[0]
        likely = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        places = np.flatnonzero(answers)
        losses += [-likely[position - 1, tokens[position]] for position in places]
    loss = trainer.evaluate(trainer.init(), [batch])
    assert loss == pytest.approx(np.mean(losses), rel=0.01)


def test_rounding_keeps_the_mean_of_small_updates():
    params = {"a": jnp.full((200, 200), 1.0, jnp.bfloat16)}
    updates = {"a": jnp.full((200, 200), 1e-4)}  # BF16's next number is 1 + 2**-7.
    rounded = jax.jit(training.rounded_sum)(params, updates, jax.random.key(0))["a"]
    assert rounded.dtype == jnp.bfloat16
    assert set(np.unique(rounded.astype(np.float32))) == {1.0, 1 + 2.0**-7}
    assert float(rounded.astype(jnp.float32).mean() - 1) == pytest.approx(1e-4, rel=0.2)


class _Oracle:
    """A stand-in for `coat.generate` that knows some answers."""

    def __init__(self, recorded: dict[str, str]) -> None:
        self._codec, self._known = text_codec(), recorded
        self.calls = 0

    def __call__(self, model, prompts, *, max_new_tokens, stop_tokens, prompt_length):
        self.calls += 1
        tokens = np.full((len(prompts), max_new_tokens), 65)
        lengths = []
        for row, prompt in zip(tokens, prompts, strict=True):
            assert len(prompt) <= prompt_length
            question = self._codec.decode(prompt).split("\n")[0].removeprefix("User: ")
            arguments = self._codec.encode(" " + self._known.get(question, "no idea"))
            row[: arguments.size] = arguments
            lengths.append(arguments.size)
        return program.exact_match.coat.Generated(tokens, np.array(lengths))


def test_exact_match_counts_right_results(monkeypatch):
    conversations = [
        *map(Conversation.of, problems("test", 140, families=["steps", "stories"]))
    ]
    recorded = {c.messages[0][1]: c.messages[1][1] for c in conversations}
    wrong = [question for question in recorded][::5]
    oracle = _Oracle(recorded | {question: "1 #### -1" for question in wrong})
    monkeypatch.setattr("coat_jax.generate", oracle)
    answers = Exam(conversations, WordsEncoder(text_codec())).ask(None)
    assert oracle.calls == 2
    assert [record.question for record in answers] == list(recorded)
    assert [record.exact for record in answers] == [q not in wrong for q in recorded]
    rows = {row["family"]: row for row in program.exact_match.rows("bf16", answers)}
    assert rows["all"]["exact_match_percent"] == pytest.approx(80)
    assert rows["steps"]["questions"] == rows["stories"]["questions"] == 70


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--base", "nowhere"], "there is no run in .*nowhere: it has no run.json"),
        (["--base-recipe", "coat"], "--base-recipe needs a --base"),
        (
            ["--base", "BASE", "--base-recipe", "coat"],
            "has the recipes bf16, got --base-recipe coat",
        ),
        (["--base", "BASE", "--preset", "cpu"], "--preset must be the base's, tiny"),
        (["--data", "x.jsonl"], "no file or folder at .*x.jsonl"),
        (["--test", "x.jsonl"], "--test needs --data"),
        (["--eval-questions", "-1"], "eval_questions must be zero or more, got -1"),
        (["--families", "poems"], "families are expressions, stories, .*got 'poems'"),
        (["--preset", "tiny", "--seq-len", "20"], "must fit into --seq-len 20, but it"),
    ],
)
def test_bad_input_is_one_line(tmp_path, capsys, flags, message):
    base = untrained(tmp_path / "base", recipes=("bf16",))
    flags = [str(base) if flag == "BASE" else flag for flag in flags]
    code = program.main([*flags, "--out", str(tmp_path / "run")])
    output = capsys.readouterr().err.strip()
    assert code == 2
    assert output.startswith("error: ")
    assert len(output.splitlines()) == 1
    assert re.search(message, output)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_resumed_run_keeps_its_data(finished, capsys):
    assert program.main(["--resume", str(finished), "--problems", "61"]) == 2
    assert "--problems 61 was given" in capsys.readouterr().err
