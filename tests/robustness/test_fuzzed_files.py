"""Fuzzes loaders of text, arrays, settings, records, results and tokenizers.

A loader must read a file, or raise a ValueError or OSError with the file's name, in
little time and memory. `--hypothesis-profile=fresh` looks for new examples.
"""

import dataclasses
import json
import time
import tracemalloc

import numpy as np
import pytest
from helpers.damages import altered, damaged, json_values
from hypothesis import example, given
from hypothesis import strategies as st

from experiments.common import results
from experiments.training import data, text
from experiments.training.runs import Run
from experiments.training.settings import PRESETS, Settings
from tests.robustness.hostile_inputs import INPUTS

TEXT = b"The quick brown fox jumps over the lazy dog. " * 4
LINES = b"".join(b'{"text": "%d ' % i + TEXT + b'", "id": 1}\n' for i in range(3))
TOKENS = np.arange(200, dtype=np.uint16) % 250
SETTINGS = dataclasses.asdict(PRESETS["tiny"].settings)
JSON = json.loads(json.dumps(SETTINGS))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("files")


@pytest.fixture(scope="module")
def npy(folder):
    np.save(folder / "whole.npy", TOKENS)
    return (folder / "whole.npy").read_bytes()


@pytest.fixture(scope="module")
def tokenizer(folder):
    text.bpe_encoder([TEXT * 9], 280, folder / "whole.json")
    return (folder / "whole.json").read_bytes()


def tried(load, path):
    """Returns what a loader returns, or None if it refuses the file by its name."""
    started = time.perf_counter()
    try:
        return load(path)
    except (ValueError, OSError) as error:
        message = str(error)
        assert str(path) in message
        assert len(message) < 1000 + len(str(path))
    finally:
        assert time.perf_counter() - started < 10


def loaded(path, **options):
    """Returns training and then validation tokens, or None if they are refused."""
    corpus = tried(lambda p: data.load_corpus([p], **options), path)
    if corpus is None:
        return None
    assert len(corpus.fingerprint()) == 32
    return np.concatenate([*corpus.train, *corpus.validation])


@given(content=st.binary(max_size=300) | damaged(TEXT))
@pytest.mark.parametrize("suffix", [".txt", ".py"])
def test_text_is_read_byte_for_byte(suffix, folder, content):
    path = folder / f"a{suffix}"
    path.write_bytes(content)
    tokens = loaded(path)
    if tokens is None:
        assert b"\0" in content or not content.isascii() or content[0] in b"%P"
    else:
        inputs = tokens[tokens != 256].astype(np.uint8).tobytes()
        assert inputs == content.removeprefix(b"\xef\xbb\xbf")


@given(content=st.binary(max_size=300) | damaged(TEXT))
def test_a_bpe_reads_utf_8_without_a_loss(folder, content):
    path, cache = folder / "b.txt", folder / "bpe"
    path.write_bytes(content)
    (cache / "tokenizer.json").unlink(missing_ok=True)
    try:
        expected = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        expected = None
    tokens = loaded(path, tokenizer="bpe", vocab_size=270, cache=cache)
    if tokens is None:
        assert expected is None or "\0" in expected or expected[0] in "%P"
        return
    import tokenizers

    bpe = tokenizers.Tokenizer.from_file(str(cache / "tokenizer.json"))
    complete = bpe.decode(tokens.tolist(), skip_special_tokens=True)
    # A document of few bytes may be cut within a letter.
    assert complete.replace("\ufffd", "") in expected or complete == expected


json_lines = st.lists(
    st.dictionaries(st.sampled_from(["text", "id"]), json_values).map(json.dumps)
).map(lambda lines: "\n".join(lines).encode())


@given(content=st.binary(max_size=300) | damaged(LINES) | json_lines)
def test_lines_of_json_are_texts(folder, content):
    path = folder / "a.jsonl"
    path.write_bytes(content)
    tokens = loaded(path)
    if tokens is not None:
        lines = [line for line in content.split(b"\n") if line.strip()]
        texts = [json.loads(line)["text"] for line in lines]
        sizes = [len(text.encode("utf-8", "surrogatepass")) for text in texts]
        assert (tokens != 256).sum() == sum(sizes)


@given(content=st.data())
def test_arrays_end_with_their_tokens(folder, npy, content):
    path = folder / "a.npy"
    path.write_bytes(content.draw(damaged(npy, 130) | damaged(npy[:128])))
    tokens = loaded(path)
    if tokens is not None:
        assert tokens.ndim == 1
        assert path.read_bytes().endswith(tokens.tobytes())


@given(
    descr=st.sampled_from(["<u2", ">i8", "|u1", "<f2", "(3,)u2", "u2,u2", "O", "|O8"])
    | st.text(max_size=6)
    | json_values,
    shape=st.lists(st.integers(-3, 300)).map(tuple) | json_values,
    more=st.dictionaries(st.text(max_size=4), json_values, max_size=1),
    version=st.integers(0, 4),
)
def test_headers_with_anything_in_them(folder, descr, shape, more, version):
    path = folder / "b.npy"
    header = {"descr": descr, "fortran_order": False, "shape": shape} | more
    text = repr(header).encode("utf-8", "replace")
    size = len(text).to_bytes(2 if version == 1 else 4, "little")
    content = b"\x93NUMPY" + bytes([version, 0]) + size + text + TOKENS.tobytes()
    path.write_bytes(content)
    tokens = loaded(path)
    if tokens is not None:
        assert version in (1, 2, 3)
        assert content.endswith(tokens.tobytes())


@given(content=st.binary(max_size=300) | damaged(TOKENS.tobytes()))
@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_raw_tokens_are_read_byte_for_byte(dtype, folder, content):
    path = folder / "a.bin"
    path.write_bytes(content)
    tokens = loaded(path, token_dtype=dtype)
    if tokens is not None and not content.startswith(b"\x93NUMPY"):
        assert tokens.dtype == dtype
        assert tokens.tobytes() == content


@given(values=json_values | altered(JSON))
@example(values=JSON | {"steps": 10**400})
@example(values=JSON | {"recipes": "bf16"})
@example(values=JSON | {"preset": ["tiny"]})
@example(values=JSON | {"data": [3]})
@example(values=JSON | {"steps": 2.5})
@example(values=JSON | {"lr": True})
def test_settings_are_read_or_refused(values):
    try:
        settings = Settings.from_json(values)
    except ValueError:
        return
    inputs = json.loads(json.dumps(dataclasses.asdict(settings)))
    assert inputs == inputs | values
    assert isinstance(settings.steps, int)
    assert settings.preset in PRESETS


RECORD = {"settings": JSON, "data": "0" * 32, "steps": 20, "command": "c", "files": {}}
ROW = {"recipe": "bf16", "step": 1, "lr": 1e-3, "loss": 2.5, "grad_norm": 1.0}


@pytest.fixture(scope="module")
def run(folder):
    """Returns a run's folder without checkpoints."""
    (folder / "run").mkdir()
    return folder / "run"


@given(values=json_values | altered(RECORD))
@example(values=RECORD | {"steps": None})
@example(values=RECORD | {"steps": "20"})
@example(values=RECORD | {"files": {"../../dev/zero": 0}})
@example(values=RECORD | {"files": 3})
def test_records_are_read_or_refused(run, values):
    (run / "run.json").write_text(json.dumps(values))
    tried(lambda _: Run.resume(run, {}), run / "run.json")


@given(content=st.binary(max_size=99) | damaged(json.dumps(RECORD).encode()))
@example(content=b"[" * 100_000)
@example(content=b'{"settings": ' * 100_000)
def test_damaged_records_are_read_or_refused(run, content):
    (run / "run.json").write_bytes(content)
    tried(lambda _: Run.resume(run, {}), run / "run.json")


@given(
    content=st.binary(max_size=99)
    | damaged(json.dumps(ROW).encode() * 2 + b"\n")
    | altered(ROW).map(lambda row: json.dumps(row).encode() + b"\n")
)
@example(content=b"[" * 100_000 + b"\n")
@pytest.mark.parametrize("name", ["metrics", "moments"])
def test_rows_are_read_or_refused(name, run, content):
    (run / "run.json").write_text(json.dumps(RECORD))
    path = run / f"{name}.jsonl"
    path.unlink(missing_ok=True)
    complete = Run.resume(run, {})
    path.write_bytes(content)
    rows = tried(lambda _: complete.rows(name), path)
    path.unlink()
    assert rows is None or all(row["step"] > 0 for row in rows)


RESULTS = {
    "command": "c",
    "date": "2026-01-01",
    "device": {"name": results.device()["name"], "count": 1, "driver": None},
    "versions": {},
    "rows": [{"ms": 3.0}, {"ms": 4.0}],
    "bars": [],
}


@given(
    content=(json_values | altered(RESULTS)).map(lambda x: json.dumps(x).encode())
    | damaged(json.dumps(RESULTS).encode())
)
@example(content=b"[" * 100_000)
@example(content=b"\xff")
def test_results_are_read_or_refused(folder, content):
    path = folder / "results.json"
    path.write_bytes(content)
    rows = tried(results.known_rows, path)
    assert rows is None or all(isinstance(row, dict) for row in rows)


def encoded(path):
    return text.bpe_encoder([], 280, path)([TEXT])


@given(content=st.data())
def test_tokenizers_are_read_or_refused(folder, tokenizer, content):
    path = folder / "tokenizer.json"
    values = altered(json.loads(tokenizer)).map(lambda x: json.dumps(x).encode())
    path.write_bytes(content.draw(values | damaged(tokenizer)))
    tokens = tried(encoded, path)
    assert tokens is None or tokens.max() < 280


def changed(record, **model):
    return record | {"model": record["model"] | model}


@pytest.mark.parametrize(
    "change",
    [
        lambda r: changed(r, vocab=r["model"]["vocab"] | {"z" * 9: 2**32}),
        lambda r: changed(r, vocab=r["model"]["vocab"] | {"z" * 9: -1}),
        lambda r: changed(r, vocab=r["model"]["vocab"] | {"z" * 9: 0}),
        lambda r: changed(r, vocab={}),
        lambda r: changed(r, vocab=[]),
        lambda r: changed(r, vocab={f"{i}": i for i in range(280)}),
        lambda r: changed(r, vocab={f"{i}": i for i in range(100_000)}),
        lambda r: changed(r, merges=[["a", "b"], ["ab", "a"]]),
        lambda r: changed(r, merges=[["a"]]),
        lambda r: changed(r, merges=[["a", 3]]),
        lambda r: changed(r, merges={"a": "b"}),
        lambda r: changed(r, merges=[["Ġ" * 10**6, "a"]]),
        lambda r: r | {"model": {"type": "WordLevel", "vocab": {}, "unk_token": ""}},
        lambda r: r | {"model": None},
        lambda r: [r],
        lambda r: {},
    ],
)
def test_other_tokenizers_are_refused(change, folder, tokenizer):
    path = folder / "other.json"
    path.write_text(json.dumps(change(json.loads(tokenizer))))
    assert tried(encoded, path) is None


_BOMB = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated"}


@pytest.mark.parametrize(
    "more",
    [
        {"pre_tokenizer": _BOMB | {"invert": False}},
        {
            "normalizer": {
                "type": "Replace",
                "pattern": {"Regex": "(a|a)*b"},
                "content": "",
            }
        },
        {"normalizer": {"type": "Lowercase"}},
        {"truncation": {"max_length": 1, "strategy": "LongestFirst", "stride": 0}},
        {"padding": {"strategy": {"Fixed": 10**9}}},
        {"post_processor": {"type": "Sequence", "processors": []}},
        {"added_tokens": [{"id": 5, "content": "quick", "special": True}]},
    ],
)
def test_only_a_tokenizers_vocabulary_and_merges_are_read(more, folder, tokenizer):
    path = folder / "more.json"
    path.write_bytes(tokenizer)
    expected = encoded(path)
    path.write_text(json.dumps(json.loads(tokenizer) | more))
    np.testing.assert_array_equal(tried(encoded, path), expected)


def test_memory_stays_near_the_files_size(folder):
    peaks = {}
    for number, (label, actual) in enumerate(INPUTS.items()):
        if not isinstance(actual.content, bytes) or len(actual.content) > 2**20:
            continue
        path = folder / f"{number}.{actual.file.rpartition('.')[-1]}"
        path.write_bytes(actual.content)
        tracemalloc.start()
        try:
            tried(lambda p: data.load_corpus([p]), path)
        finally:
            peaks[label] = tracemalloc.get_traced_memory()[1], len(actual.content)
            tracemalloc.stop()
    assert len(peaks) > 150
    large = {k: v for k, v in peaks.items() if v[0] > 2**22 + 20 * v[1]}
    assert not large
