"""Tests chat templates with thoughts and roles in words, and texts with markup."""

import json

import numpy as np
import pytest
import tokenizers
from helpers.chat_folders import TEMPLATE, write_tokenizer

from experiments.finetune.conversations import Conversation, Passage
from experiments.finetune.encoding import WordsEncoder
from experiments.finetune.exact_match import Exam
from experiments.finetune.folder_encoding import FolderEncoder
from experiments.training.text import text_codec

# The last answer has thoughts, maybe empty ones, and no earlier one, as in Qwen3.
_THINKS = (
    "{% for m in messages %}{{ '<|start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.last %}"
    "{{ '[think]\n' + (m.reasoning_content or '') + '\n[/think]\n\n' }}{% endif %}"
    "{{ m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
# Roles are plain words, next to the token that ends a document, as in Zephyr.
_WORDS = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
# The system message is a part of the first question, as in Llama 2.
_WITHIN = (
    "{% set ns = namespace(system='') %}{% for m in messages %}"
    "{% if m.role == 'system' %}{% set ns.system = '<<SYS>>\n' + m.content + "
    "'\n<</SYS>>\n\n' %}{% elif m.role == 'user' %}{{ '[INST] ' + ns.system + "
    "m.content.strip() + ' [/INST]' }}{% set ns.system = '' %}"
    "{% else %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
# The system message comes before a question that is last, as in Mistral 7B v0.3.
_LAST = (
    "{% for m in messages %}{% if m.role != 'system' %}"
    "{{ '<|start|>' + m.role + '\n' }}"
    "{% if loop.last and m.role == 'user' and messages[0].role == 'system' %}"
    "{{ messages[0].content + '\n\n' }}{% endif %}{{ m.content + '<|end|>\n' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
_DEFAULT = (
    "{% if messages[0].role != 'system' %}"
    "{{ '<|start|>system\nYou are kind.\nKnowledge: 2023<|end|>\n' }}{% endif %}"
)
_TEMPLATES = {"plain": TEMPLATE, "default": _DEFAULT + TEMPLATE, "thinks": _THINKS}
_TEMPLATES |= {"words": _WORDS, "within": _WITHIN}


def _encoder(folder, template=TEMPLATE, markup="refuse") -> FolderEncoder:
    write_tokenizer(folder, template)
    return FolderEncoder(folder, 384, markup)


def _chat(*contents: str, system: str = "", **options) -> Conversation:
    roles = ("user", "assistant") * len(contents)
    messages = tuple(zip(roles, contents, strict=False))
    if system:
        messages = (("system", system), *messages)
    return Conversation(messages=messages, place="x", **options)


def _text(encoder, tokens) -> str:
    return encoder._tokens.tokenizer.decode(tokens, skip_special_tokens=False)


def _learned(encoder, record) -> str:
    tokens, answers = encoder.encode(record)
    return _text(encoder, tokens[answers].tolist())


_THOUGHT = ({}, {"reasoning_content": "4, or 5 [/think] 4?"})


@pytest.mark.parametrize(
    ("template", "record"),
    [(name, _chat("2 + 2?", "It is #### 4")) for name in _TEMPLATES]
    + [(name, _chat("a", "b", "2 + 2?", " 4\n", system="s")) for name in _TEMPLATES]
    + [("thinks", _chat("2 + 2?", "4", thoughts=_THOUGHT))]
    + [("plain", Passage(prompt="<|start|>2 + 2?", completion="\n4<|end|>\n"))],
)
def test_a_model_that_repeats_the_data_is_right(tmp_path, template, record):
    encoder = _encoder(tmp_path, _TEMPLATES[template], "read")
    tokens, question = encoder.encode(record).tokens.tolist(), encoder.question(record)
    assert tokens[: len(question)] == question
    assert "4" not in _text(encoder, question)
    answer = tokens[len(question) :]
    stops = [n for n, token in enumerate(answer) if token in encoder.stop_tokens]
    text = encoder.answer(record, answer[: min(stops)])
    assert Exam([record], encoder)._answer(record, text).exact
    wrong = encoder.answer(record, encoder._tokens.tokenizer.encode("5").ids)
    assert not Exam([record], encoder)._answer(record, wrong).exact


def test_answers_are_learned_where_the_whole_text_has_them(tmp_path):
    encoder = _encoder(tmp_path, _THINKS)
    record = _chat("b", "b", "c", "d")
    assert _learned(encoder, record) == "b<|end|>[think]\n\n[/think]\n\nd<|end|>"
    tokens, answers = encoder.encode(record)
    assert _text(encoder, tokens[: int(np.argmax(answers))].tolist()) == (
        "<|start|>user\nb<|end|>\n<|start|>assistant\n"
    )
    upper = _THINKS.replace("{{ m.content", "{{ m.content | replace('b', 'B')")
    encoder = _encoder(tmp_path, upper)
    with pytest.raises(ValueError, match=r'x: .*; "weight": 0 on this answer leav'):
        encoder.encode(record)
    excluded = _chat("b", "b", "c", "d", learned=(False, False, False, True))
    assert _learned(encoder, excluded).endswith("d<|end|>")


def test_thoughts_are_for_templates_that_read_them(tmp_path):
    record = _chat("a", "b", thoughts=({}, {"reasoning_content": "c"}))
    learned = "[think]\nc\n[/think]\n\nb<|end|>"
    assert _learned(_encoder(tmp_path, _THINKS), record) == learned
    with pytest.raises(ValueError, match='x: the chat template reads no "reasoning_c'):
        _encoder(tmp_path).encode(record)
    with pytest.raises(ValueError, match='of --base has no place for "reasoning_conte'):
        WordsEncoder(text_codec()).encode(record)
    forged = _chat("a", "b", thoughts=({}, {"reasoning_content": "<|end|>"}))
    with pytest.raises(ValueError, match='"reasoning_content" spells the special tok'):
        _encoder(tmp_path, _THINKS).encode(forged)


@pytest.mark.parametrize(
    ("template", "content"),
    [
        ("words", "a\n<|assistant|>\nb"),
        ("words", "<|system|> b"),
        ("within", "<<SYS>>\nb"),
        ("within", "b <</SYS>>"),
        ("within", "[INST] b"),
        ("within", "b [/INST]"),
    ],
)
def test_no_message_has_words_that_mark_roles(tmp_path, template, content):
    encoder = _encoder(tmp_path, _TEMPLATES[template])
    for record in (_chat(content, "b"), _chat("b", content)):
        with pytest.raises(ValueError, match="x: a message must not have the words"):
            encoder.encode(record)


@pytest.mark.parametrize("template", ["plain", "default", "thinks"])
def test_words_next_to_special_tokens_are_no_marks_of_roles(tmp_path, template):
    encoder = _encoder(tmp_path, _TEMPLATES[template])
    system = "user assistant system\nYou are kind.\nKnowledge: 2023"
    encoder.encode(_chat("a user", "an assistant", system=system))


@pytest.mark.parametrize(
    ("template", "is_refused"),
    [
        (TEMPLATE, False),  # A role follows the token, as in SmolLM2.
        (_DEFAULT + TEMPLATE, False),
        (TEMPLATE.replace("'<|start|>'", "'<|start|>\n'"), True),
        (
            TEMPLATE.replace(
                "'<|start|>' + m", "('' if loop.index > 1 else '<|start|>') + m"
            ),
            True,
        ),
    ],
)
def test_a_token_before_each_role_may_begin_documents(tmp_path, template, is_refused):
    write_tokenizer(tmp_path, template)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"bos_token": "<|start|>"}
    path.write_text(json.dumps(config))
    encoder = FolderEncoder(tmp_path, 384, "refuse")
    record = _chat("operating systems\nuser", "of a user\nassistant")
    if is_refused:
        with pytest.raises(ValueError, match="x: a message must not have the words"):
            encoder.encode(record)
    else:
        assert _learned(encoder, record) == "of a user\nassistant<|end|>"


@pytest.mark.parametrize("loss", ["answers", "all"])
def test_no_system_message_is_left_out_silently(tmp_path, loss):
    encoder = _encoder(tmp_path, _LAST)
    encoder.encode(_chat("a", "b", "c", "d"), loss)
    with pytest.raises(ValueError, match="x: the chat template leaves out the system"):
        encoder.encode(_chat("a", "b", "c", "d", system="s"), loss)


def test_a_template_without_a_token_after_answers_is_named(tmp_path, capsys):
    for template, has_note in ((TEMPLATE, False), (TEMPLATE.replace("|", ""), True)):
        encoder = _encoder(tmp_path, template)
        _ = encoder.template
        assert (
            "no special token after an answer" in capsys.readouterr().out
        ) is has_note


_RENDERED = "<|start|>user\nq<|end|>\n<|start|>assistant\na<|end|>\n"


def test_markup_of_texts_is_refused_or_characters_or_tokens(tmp_path):
    refusing = _encoder(tmp_path)
    prompt, completion = _RENDERED[:-9], _RENDERED[-9:]
    records = (
        Passage(completion=_RENDERED, place="x"),
        Passage(prompt=prompt, completion=completion, place="x"),
    )
    plain, reads = (FolderEncoder(tmp_path, 384, name) for name in ("plain", "read"))
    tokenizer = reads._tokens.tokenizer
    for record in records:
        with pytest.raises(ValueError, match=r"x: .* '<\|start\|>'; --markup"):
            refusing.encode(record)
        tokens = plain.encode(record).tokens.tolist()
        assert sum(token in tokens for token in refusing._tokens.special.values()) == 1
        assert _text(plain, tokens) == _RENDERED + "<|end|>"
        assert reads.encode(record).tokens.tolist() == tokenizer.encode(_RENDERED).ids
    assert _learned(reads, records[1]) == "a<|end|>\n"
    for encoder in (refusing, plain, reads):
        assert _text(encoder, encoder.encode(Passage(completion="a")).tokens) == (
            "a<|end|>"
        )


def test_first_and_last_tokens_are_not_doubled(tmp_path):
    write_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    values = json.loads(path.read_text())
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(values))
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|start|> $A <|end|>", special_tokens=[("<|end|>", 0), ("<|start|>", 1)]
    )
    tokenizer.save(str(path))
    reads = FolderEncoder(tmp_path, 384, "read")
    letter = tokenizer.encode("a", add_special_tokens=False).ids
    for text in ("a", "<|start|>a", "<|start|>a<|end|>", "a<|end|>"):
        tokens = reads.encode(Passage(completion=text)).tokens.tolist()
        assert tokens == [1, *letter, 0]
    asked = Passage(prompt="<|start|>a<|end|>", completion="a")
    assert reads.question(asked) == [1, *letter, 0]
    assert reads.encode(asked).tokens.tolist() == [1, *letter, 0, *letter, 0]


def test_spaces_and_tags_of_html_are_no_markup(tmp_path):
    write_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    tokenizer.add_tokens(["  ", "\n\n", "<h1>", "</td>", "<s>"])
    tokenizer.add_special_tokens(["<b>"])
    tokenizer.save(str(path))
    encoder = FolderEncoder(tmp_path, 400)
    text = "What  is\n\n<h1>7?</td>"
    ids = tokenizer.encode(text).ids
    assert encoder.encode(Passage(completion=text)).tokens.tolist() == [*ids, 0]
    tokens = encoder.encode(_chat("<think>", text)).tokens.tolist()
    assert {tokenizer.token_to_id(tag) for tag in ("<h1>", "</td>")} <= set(tokens)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["bos_token"] = "<s>"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    encoder = FolderEncoder(tmp_path, 400)
    for tag in ("<b>", "<s>"):
        with pytest.raises(ValueError, match=f"special token '{tag}'"):
            encoder.encode(Passage(completion=tag))


@pytest.mark.parametrize("scheme", ["first", "always"])
def test_a_special_token_in_a_message_changes_no_other_token(tmp_path, scheme):
    write_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    values = json.loads(path.read_text())
    values["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "split": False}
    values["pre_tokenizer"] |= {"prepend_scheme": scheme}
    size = len(values["model"]["vocab"])
    values["model"]["vocab"] |= {"▁": size, "\n": size + 1}
    for token in values["added_tokens"]:
        token["rstrip"] = token["content"] == "<|start|>"
        if token["content"] == "<think>":
            token["id"] = size + 2
    path.write_text(json.dumps(values))
    encoder = FolderEncoder(tmp_path, 384)
    tokens, spelled = (
        encoder.encode(_chat("what is", content)).tokens.tolist()
        for content in ("7", "7<think>")
    )
    common = len(tokens) - len(encoder._tokens.tokenizer.encode("<|end|>\n").ids)
    assert spelled[:common] == tokens[:common]
    assert spelled[common - len(tokens) :] == tokens[common:]
    assert encoder._tokens.special["<think>"] not in spelled
