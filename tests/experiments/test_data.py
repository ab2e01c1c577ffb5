"""Tests of corpora: the training text, its order, and refused files."""

import itertools
import json

import numpy as np
import pytest

from experiments.training import data, files, text


def _windows(arrays, length=4):
    return data.Windows(arrays, length)


@pytest.fixture(scope="module")
def standard_library():
    return data.load_corpus()


def test_standard_library_is_the_default(standard_library):
    (train,), (validation,) = standard_library.train, standard_library.validation
    assert train.dtype == np.uint16
    assert standard_library.vocab_size == 257
    assert train.size > 5e6
    assert 0.02 < validation.size / (train.size + validation.size) < 0.1
    source = bytes(np.where(train == 256, 10, train).astype(np.uint8))
    assert source.count(b"import ") > 1000


def test_a_file_that_is_named_twice_is_refused(tmp_path):
    folder = tmp_path / "texts"
    (folder / "inner").mkdir(parents=True)
    for path in (folder / "a.txt", folder / "inner" / "b.txt"):
        path.write_text("letters")
    (tmp_path / "link").symlink_to(folder)
    (folder / "c.txt").symlink_to(folder / "a.txt")  # A copy of another name.
    files.check_once([folder])
    files.check_once([folder / "a.txt", folder / "inner"])
    for twice in ("texts/a.txt", "texts/inner", "texts", "link/inner/b.txt"):
        with pytest.raises(ValueError, match=r"once, got .*/(a|b)\.txt twice"):
            files.check_once([folder, tmp_path / twice])


def test_no_document_is_in_both_splits(standard_library):
    def documents(tokens):
        ends = np.flatnonzero(tokens == 256)
        return {tokens[a:b].tobytes() for a, b in itertools.pairwise(ends)}

    train = documents(standard_library.train[0])
    assert not train & documents(standard_library.validation[0])
    assert len(train) > 100


def test_fingerprint_tells_corpora_apart(standard_library):
    again = data.load_corpus()
    assert again.fingerprint() == standard_library.fingerprint()
    tokens = again.train[0].copy()
    tokens[tokens.size // 3] ^= 1
    other = data.Corpus(
        train=[tokens], validation=again.validation, vocab_size=257, token="byte"
    )
    assert other.fingerprint() != again.fingerprint()


def test_split_is_by_content_and_keeps_order():
    documents = [bytes([65 + i % 26]) * (i + 1) for i in range(200)]
    train, validation = text.split_documents(documents)
    assert sorted(train + validation) == sorted(documents)
    assert train == [d for d in documents if d in set(train)]
    again, _ = text.split_documents(documents[::-1])
    assert set(again) == set(train)


def test_one_text_file_is_cut_in_two(tmp_path):
    (tmp_path / "one.txt").write_bytes(bytes(range(1, 201)))
    corpus = data.load_corpus([tmp_path / "one.txt"])
    assert corpus.train[0].tolist() == [*range(1, 191), 256]
    assert corpus.validation[0].tolist() == [*range(191, 201), 256]


def test_json_lines(tmp_path):
    texts = [f"text {i} é" for i in range(100)]
    lines = [json.dumps({"text": text, "id": 1}) for text in texts]
    (tmp_path / "a.jsonl").write_text("\n\n".join(lines))
    corpus = data.load_corpus([tmp_path])
    tokens = np.concatenate([corpus.train[0], corpus.validation[0]])
    assert tokens.size == sum(len(text.encode()) + 1 for text in texts)
    first = bytes(tokens[: np.argmax(tokens == 256)].astype(np.uint8)).decode()
    assert first in texts


@pytest.mark.parametrize("line", ["[1]", '{"body": "x"}', '{"text": 3}', "{"])
def test_bad_json_lines_are_named(tmp_path, line):
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n' + line)
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2: .*\"text\""):
        data.load_corpus([tmp_path / "a.jsonl"])


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
@pytest.mark.parametrize("header", [True, False])
def test_token_arrays_are_mapped(tmp_path, dtype, header):
    tokens = np.random.default_rng(0).integers(0, 60000, 1000).astype(dtype)
    path = tmp_path / "tokens.npy"
    np.save(path, tokens) if header else tokens.tofile(path)
    corpus = data.load_corpus([path], token_dtype=dtype)
    assert isinstance(corpus.train[0], np.memmap)
    assert corpus.vocab_size is None
    np.testing.assert_array_equal(corpus.train[0], tokens[:950])
    np.testing.assert_array_equal(corpus.validation[0], tokens[950:])


def test_unusable_data_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no file or folder at .*nothing"):
        data.load_corpus([tmp_path / "nothing.txt"])
    (tmp_path / "table.csv").write_text("a,b")
    with pytest.raises(ValueError, match=r"must be \.txt.*table\.csv"):
        data.load_corpus([tmp_path / "table.csv"])
    with pytest.raises(ValueError, match=r"must be \.txt"):
        data.load_corpus([tmp_path])
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.bin").write_bytes(b"\0\0")
    with pytest.raises(ValueError, match="all text or all tokens"):
        data.load_corpus([tmp_path])
    (tmp_path / "b.bin").write_bytes(b"\0\0\0")
    with pytest.raises(ValueError, match="3 bytes is no array of uint16"):
        data.load_corpus([tmp_path / "b.bin"])
    np.save(tmp_path / "c.npy", np.zeros((2, 2)))
    with pytest.raises(ValueError, match="2 axes of float64"):
        data.load_corpus([tmp_path / "c.npy"])


def test_windows_predict_every_token_once():
    arrays = [np.arange(10, dtype=np.uint16), np.arange(100, 109, dtype=np.uint32)]
    windows = _windows(arrays)
    assert len(windows) == 4
    targets = np.concatenate([windows[i][1:] for i in range(4)])
    assert targets.tolist() == [*range(1, 9), *range(101, 109)]
    assert windows[2].dtype == np.int32


def test_windows_refuse_short_data():
    with pytest.raises(ValueError, match=r"length of 8 needs 9 tokens .* has 5"):
        _windows([np.arange(5), np.arange(3)], length=8)


@pytest.mark.parametrize(("token", "rule"), [(20, "size 20, got 20"), (-1, "got -1")])
def test_tokens_outside_the_vocabulary_are_named(token, rule, tmp_path):
    path = tmp_path / "tokens.npy"
    np.save(path, np.arange(20))
    data.check_tokens(data.load_corpus([path]), 20)
    np.save(path, np.where(np.arange(20) == 18, token, 0))
    message = f"{rule} at 18 of the training part of .*tokens.npy"
    with pytest.raises(ValueError, match=message):
        data.check_tokens(data.load_corpus([path]), 20)


def test_batches_visit_every_window_each_epoch_in_new_order():
    windows = _windows([np.arange(41, dtype=np.uint16)])
    batches = data.train_batches(windows, batch_size=5, seed=3)
    epochs = [[next(batches)[:, 0] for _ in range(2)] for _ in range(2)]
    orders = [np.concatenate(epoch).tolist() for epoch in epochs]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(0, 40, 4))
    assert orders[0] != orders[1]
    other = data.train_batches(windows, batch_size=5, seed=4)
    assert next(other)[:, 0].tolist() != orders[0][:5]


@pytest.mark.parametrize("count", [1, 3])
def test_batches_of_one_window_have_no_end(count):
    batches = data.train_batches(
        _windows([np.arange(4 * count + 1)]), batch_size=1, seed=0
    )
    starts = [int(next(batches)[0, 0]) for _ in range(2 * count)]
    epochs = starts[:count], starts[count:]
    assert [sorted(epoch) for epoch in epochs] == [list(range(0, 4 * count, 4))] * 2


def test_rows_of_batches_are_read_alone():
    class Counted(data.Windows):
        def __getitem__(self, index):
            inputs.append(index)
            return super().__getitem__(index)

    inputs = []
    # Batches are read ahead by threads, but not to the end of this first epoch.
    windows = Counted([np.arange(16_001, dtype=np.uint16)], 4)
    complete = data.train_batches(_windows([windows._arrays[0]]), batch_size=5, seed=3)
    some = data.train_batches(windows, batch_size=5, seed=3, rows=np.array([1, 2]))
    for _ in range(4):
        batch = next(complete)
        np.testing.assert_array_equal(next(some), batch[1:3])
        assert some.get_state() == complete.get_state()
        numbers = (batch[:, 0] // 4).tolist()
        assert set(numbers) & set(inputs) == set(numbers[1:3])


def test_batches_continue_from_a_saved_state():
    windows = _windows([np.arange(400, dtype=np.uint16)])
    batches = data.train_batches(windows, batch_size=3, seed=0)
    for _ in range(7):
        next(batches)
    state = json.loads(json.dumps(batches.get_state()))
    expected = [next(batches) for _ in range(40)]
    resumed = data.train_batches(windows, batch_size=3, seed=0)
    resumed.set_state(state)
    np.testing.assert_array_equal([next(resumed) for _ in range(40)], expected)


def test_validation_batches_are_fixed_and_distinct():
    windows = _windows([np.arange(400, dtype=np.uint16)])
    batches = data.validation_batches(windows, batch_size=4, count=5)
    again = data.validation_batches(windows, batch_size=4, count=5)
    np.testing.assert_array_equal(batches, again)
    assert len({int(row[0]) for batch in batches for row in batch}) == 20
    few = data.validation_batches(
        _windows([np.arange(9, dtype=np.uint16)]), batch_size=4, count=5
    )
    assert [batch.shape for batch in few] == [(2, 5)]


def test_bpe_is_trained_once_and_loses_nothing(tmp_path):
    import tokenizers

    documents = [f"def f_{i}(x): return x + {i}  # naïve\n" * 9 for i in range(60)]
    (tmp_path / "a.jsonl").write_text(
        "\n".join(json.dumps({"text": document}) for document in documents)
    )
    arguments = dict(tokenizer="bpe", vocab_size=300, cache=tmp_path)
    corpus = data.load_corpus([tmp_path / "a.jsonl"], **arguments)
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokens = np.concatenate([corpus.train[0], corpus.validation[0]])
    assert tokens.max() < corpus.vocab_size == 300
    assert tokens.size < sum(map(len, documents)) / 2
    decoded = tokenizer.decode(tokens.tolist(), skip_special_tokens=True)
    assert len(decoded) == sum(map(len, documents))
    assert documents[0] in decoded
    again = data.load_corpus([tmp_path / "a.jsonl"], **arguments)
    assert again.fingerprint() == corpus.fingerprint()
    with pytest.raises(ValueError, match="needs a vocab_size"):
        data.load_corpus([tmp_path / "a.jsonl"], tokenizer="bpe", cache=tmp_path)
