"""Tests tokenizers and chat templates of checkpoints."""

import json
import sys

import pytest
import tokenizers

from coat_jax.models import hf

MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}\n"
    "{{ message['role'] }}: {{ message.content | trim }}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def write(folder, template, **config):
    values = {"chat_template": template, "bos_token": {"content": "<s>"}, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(values))


def test_chat_templates(tmp_path):
    write(tmp_path, TEMPLATE)
    text = "<s>user: Hi\nassistant: Yo\n"
    assert hf.chat_text(tmp_path, MESSAGES) == f"{text}assistant:"
    assert hf.chat_text(tmp_path, MESSAGES, add_generation_prompt=False) == text
    (tmp_path / "chat_template.jinja").write_text("{{ messages | length }}")
    assert hf.chat_text(tmp_path, MESSAGES) == "2"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ tools is none }} {{ documents is none }}", "True True"),
        ("{% if tools is not none %}[{{ tools }}]{% endif %}Hi", "Hi"),
        ("{{ strftime_now('%d %b %Y') }}", "26 Jul 2024"),
    ],
)
def test_templates_see_no_tools_no_documents_and_one_date(tmp_path, template, text):
    write(tmp_path, template)
    assert hf.chat_text(tmp_path, MESSAGES) == text


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ messages.append(1) }}",
        "{% include 'tokenizer_config.json' %}",
        "{% import 'os' as os %}",
        "{{ range(10**9) | list }}",
        "{{ 1 / 0 }}",
        "{{ missing.part.of_it }}",
        "{% for",
        "{{ raise_exception('roles must\nalternate') }}",
    ],
)
def test_templates_that_reach_out_end_in_one_line(tmp_path, template):
    write(tmp_path, template)
    with pytest.raises(ValueError, match=r"^the chat template fails: [\x20-\x7e]+$"):
        hf.chat_text(tmp_path, MESSAGES)


def test_a_list_of_templates_has_a_default(tmp_path):
    names = {"tool_use": "tools", "default": "{{ messages | length }}"}
    listed = [{"name": name, "template": text} for name, text in names.items()]
    write(tmp_path, listed)
    assert hf.chat_text(tmp_path, MESSAGES) == "2"


def test_a_template_may_be_in_chat_template_json(tmp_path):
    write(tmp_path, None)
    text = json.dumps({"chat_template": "{{ bos_token }}"})
    (tmp_path / "chat_template.json").write_text(text)
    assert hf.chat_text(tmp_path, MESSAGES) == "<s>"
    write(tmp_path, "{{ messages | length }}")
    assert hf.chat_text(tmp_path, MESSAGES) == "2"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "must have a chat template"),
        (3, "chat_template in tokenizer_config.json must be a string, .* got 3"),
        (["a"], r"a list with a template of the name \"default\", got \['a'\]"),
        ([{"name": ["default"]}], r"got \[{'name': \['default'\]}\]"),
    ],
)
def test_folders_without_a_template(tmp_path, template, message):
    write(tmp_path, template)
    with pytest.raises(ValueError, match=message):
        hf.chat_text(tmp_path, MESSAGES)


def test_files_that_are_no_tokenizers(tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer.json"):
        hf.load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 1}')
    with pytest.raises(ValueError, match="no tokenizer"):
        hf.load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizers", "jinja2"])
def test_what_is_not_installed_is_named_with_its_extra(tmp_path, monkeypatch, name):
    write(tmp_path, TEMPLATE)
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setitem(sys.modules, name, None)
    read = hf.load_tokenizer if name == "tokenizers" else hf.chat_text
    arguments = (tmp_path,) if name == "tokenizers" else (tmp_path, MESSAGES)
    with pytest.raises(ImportError, match=rf"{name} is not installed.*coat-jax\[hf\]"):
        read(*arguments)


TEXTS = [
    "Hello  world,\n\tna\u00efve caf\u00e9 \U0001f600 42!",
    "\u4f60\u597d ab\u2581c",
]


def byte_level():
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|end|>"], initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator(["Hello world, hello world"], trainer)
    return tokenizer


def sentence_pieces():
    letters = ["\u2581", *"Helo wrd,ab"]
    pieces = {f"<0x{byte:02X}>": byte for byte in range(256)}
    pieces |= {letter: 256 + index for index, letter in enumerate(letters)}
    pieces["lo"] = len(pieces)
    model = tokenizers.models.BPE(pieces, [("l", "o")], byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = tokenizers.normalizers.Replace(" ", "\u2581")
    decoders = tokenizers.decoders
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


@pytest.mark.parametrize("text", ["H", "Hello world, hello world"])
def test_tokenizers_neither_cut_nor_pad_texts(tmp_path, text):
    tokenizer = byte_level()
    ids = tokenizer.encode(text).ids
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=3, pad_token="<|end|>")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert hf.load_tokenizer(tmp_path).encode(text).ids == ids


@pytest.mark.parametrize("make", [byte_level, sentence_pieces])
def test_the_bytes_of_tokens_are_the_text(make):
    tokenizer = make()
    spellings = hf.token_bytes(tokenizer)
    assert len(spellings) == tokenizer.get_vocab_size()
    for text in TEXTS:
        ids = tokenizer.encode(text).ids
        decoded = tokenizer.decode(ids, skip_special_tokens=False)
        assert b"".join(spellings[token] for token in ids) == decoded.encode()
    assert spellings[tokenizer.token_to_id("<|end|>")] == b"<|end|>"


def test_bytes_of_unknown_decoders_are_refused():
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece({"a": 0}))
    with pytest.raises(ValueError, match=r"must be ByteLevel.* got none"):
        hf.token_bytes(tokenizer)
    tokenizer.decoder = tokenizers.decoders.WordPiece()
    with pytest.raises(ValueError, match="got WordPiece"):
        hf.token_bytes(tokenizer)
