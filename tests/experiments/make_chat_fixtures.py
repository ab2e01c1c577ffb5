"""Makes the fixtures of the tests of chat templates, with transformers.

    pip install transformers tokenizers
    python tests/experiments/make_chat_fixtures.py      # writes fixtures/

chat_tokenizer.json is a small byte-level BPE, and chat_templates.json has five
templates with what transformers renders and encodes of the same messages.
"""

import json
from pathlib import Path

import tokenizers
import transformers

FIXTURES = Path(__file__).parent / "fixtures"
_SPECIAL = ("</s>", "<s>", "<|start|>", "<|end|>", "<|eot|>")
TEMPLATES = {
    "words and markers": (
        "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}"
        "{{ '<|start|>system\nBe kind.<|end|>\n' }}{% endif %}"
        "{{ '<|start|>' + m['role'] + '\n' + m['content'] + '<|end|>' + '\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}"
        "{% endif %}"
    ),
    "headers": (
        "{{ bos_token }}\n{% set ns = namespace(first=true) %}\n"
        "{% for m in messages %}\n"
        "    {{- '<|start|>' ~ m.role ~ '<|end|>\n\n' ~ m.content | trim ~ "
        "'<|eot|>' }}\n"
        "    {%- set ns.first = false %}\n"
        "{% endfor %}\n"
        "{% if add_generation_prompt %}{{- '<|start|>assistant<|end|>\n\n' }}"
        "{% endif %}"
    ),
    "brackets": (
        "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}"
        "{{ '[INST] ' + m['content'] + ' [/INST]' }}{% elif m['role'] == 'system' %}"
        "{{ '<<SYS>>' + m['content'] + '<</SYS>>' }}{% else %}"
        "{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
    ),
    "loop controls": (
        "{% for m in messages %}\n{% if m['role'] not in ['system', 'user', "
        "'assistant'] %}\n{{ raise_exception('roles') }}\n{% continue %}\n{% endif %}\n"
        "<|start|>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{{ m.content }}<|end|>\n{% endfor %}\n"
        "{% if add_generation_prompt %}\n<|start|>model\n{% endif %}"
    ),
    "generation blocks": (
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        "<|start|>assistant\n{% generation %}{{ m.content }}<|end|>{% endgeneration %}"
        "{% else %}<|start|>{{ m.role }}\n{{ m.content | tojson }}<|end|>{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
    ),
}
MESSAGES = [
    {"role": "system", "content": 'Sums <b>only</b> & "no" more.'},
    {"role": "user", "content": "What is 7 + 5?\n  Say é or 🎉. "},
    {"role": "assistant", "content": "It is 12.\n\nOk"},
    {"role": "user", "content": "And 1?"},
    {"role": "assistant", "content": "13"},
]


def tokenizer() -> tokenizers.Tokenizer:
    """Returns a byte-level BPE of 400 words."""
    result = tokenizers.Tokenizer(tokenizers.models.BPE())
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    result.pre_tokenizer = byte_level(add_prefix_space=False)
    result.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(_SPECIAL),
        initial_alphabet=byte_level.alphabet(),
    )
    texts = [m["content"] + " " + m["role"] for m in MESSAGES] * 5
    result.train_from_iterator(texts, trainer)
    return result


def main() -> None:
    """Writes the fixtures."""
    FIXTURES.mkdir(exist_ok=True)
    bpe = tokenizer()
    bpe.save(str(FIXTURES / "chat_tokenizer.json"), pretty=False)
    cases = {}
    for name, template in TEMPLATES.items():
        fast = transformers.PreTrainedTokenizerFast(
            tokenizer_object=bpe, bos_token="<s>", eos_token="</s>"
        )
        fast.chat_template = template
        options = {"tokenize": False}
        whole = fast.apply_chat_template(MESSAGES, **options)
        asked = fast.apply_chat_template(
            MESSAGES[:-1], add_generation_prompt=True, **options
        )
        cases[name] = {
            "template": template,
            "text": whole,
            "asked": asked,
            "tokens": fast(whole, add_special_tokens=False)["input_ids"],
        }
    record = {
        "transformers": transformers.__version__,
        "messages": MESSAGES,
        "cases": cases,
    }
    text = json.dumps(record, indent=1, ensure_ascii=False)
    (FIXTURES / "chat_templates.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
