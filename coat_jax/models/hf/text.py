"""Tokenizers and chat templates of checkpoints."""

import datetime
import importlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

from coat_jax.models.hf.folder import read_bytes, read_json
from coat_jax.models.hf.safetensors import shown

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_DATE = datetime.datetime(2024, 7, 26)
_LARGEST_TEMPLATE = 2**20
_LARGEST_TOKENIZER = 2**28


def load_tokenizer(path: str | os.PathLike) -> "Tokenizer":
    """Loads the tokenizer of a folder from tokenizer.json.

    The tokenizer neither cuts nor pads texts, even if the program that wrote the file
    did. The function needs the library tokenizers, which the extra "hf" installs.

    Args:
      path: The path of the folder.

    Raises:
      ImportError: If the library tokenizers is not installed.
      ValueError: If the file is missing or is not a tokenizer.

    Examples:
      >>> import pathlib, tempfile, tokenizers
      >>> from coat_jax.models import hf
      >>> words = tokenizers.models.WordLevel({"one": 0, "two": 1}, unk_token="one")
      >>> tokenizer = tokenizers.Tokenizer(words)
      >>> tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
      >>> folder = pathlib.Path(tempfile.mkdtemp())
      >>> tokenizer.save(str(folder / "tokenizer.json"))
      >>> hf.load_tokenizer(folder).encode("two one").ids
      [1, 0]
    """
    name = "tokenizer.json"
    text = read_bytes(Path(path), name, _LARGEST_TOKENIZER)
    tokenizers = _imported("tokenizers")
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(text)
    except Exception as error:  # The library raises exceptions of no narrower class.
        raise ValueError(f"{name} is no tokenizer: {shown(str(error))}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


class ChatTemplate:
    """The chat template of a folder, which renders messages as text.

    The template is in chat_template.jinja, tokenizer_config.json or chat_template.json;
    of a list of templates it is the one with the name "default". It runs in the sandbox
    of jinja2, where it can neither reach internal attributes of Python objects nor
    change its arguments. As in transformers, `tools` and `documents` are none, `tojson`
    escapes no HTML, and blocks of `{% generation %}` render as their contents. The
    template has no clock: `strftime_now` always has the date 26 July 2024, which
    templates of Llama 3 have by default.

    Args:
      path: The path of the folder.

    Raises:
      ImportError: If jinja2, which the extra "hf" installs, is missing.
      ValueError: If there is no template, or it is not a template of jinja2.

    Examples:
      >>> import pathlib, tempfile
      >>> from coat_jax.models import hf
      >>> folder = pathlib.Path(tempfile.mkdtemp())
      >>> template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
      >>> _ = (folder / "chat_template.jinja").write_text(template)
      >>> hf.ChatTemplate(folder).render([{"role": "user", "content": "Hello"}])
      '<user>Hello'
    """

    def __init__(self, path: str | os.PathLike) -> None:
        template, self._names = _template(Path(path)), special_tokens(path)
        jinja2, sandbox = _imported("jinja2"), _imported("jinja2.sandbox")

        def raise_exception(message: str) -> None:
            raise jinja2.TemplateError(message)

        environment = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _generation_blocks()],
        )
        environment.globals["raise_exception"] = raise_exception
        environment.globals["strftime_now"] = _DATE.strftime
        environment.filters["tojson"] = _to_json
        try:
            self._compiled = environment.from_string(template)
        except Exception as error:  # jinja2's parser can raise anything.
            raise _failure(error) from None

    def render(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Renders messages as text for the folder's tokenizer.

        Args:
          messages: The messages, with "role" and "content".
          add_generation_prompt: Whether the text ends with the beginning of an answer.

        Raises:
          ValueError: If the template fails or is refused by the sandbox.
        """
        try:
            return self._compiled.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self._names,
            )
        except Exception as error:  # A template can raise anything, such as TypeError.
            raise _failure(error) from None


def chat_text(
    path: str | os.PathLike,
    messages: Sequence[Mapping[str, str]],
    *,
    add_generation_prompt: bool = True,
) -> str:
    """Renders messages with the chat template of a folder; see `ChatTemplate`.

    Args:
      path: The path of the folder.
      messages: The messages, with "role" and "content".
      add_generation_prompt: Whether the text ends with the beginning of an answer.

    Raises:
      ImportError: If jinja2 is not installed.
      ValueError: If there is no template, or it fails or is refused by the sandbox.

    Examples:
      >>> import pathlib, tempfile
      >>> from coat_jax.models import hf
      >>> folder = pathlib.Path(tempfile.mkdtemp())
      >>> template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
      >>> _ = (folder / "chat_template.jinja").write_text(template)
      >>> hf.chat_text(folder, [{"role": "user", "content": "Hello"}])
      '<user>Hello'
    """
    template = ChatTemplate(path)
    return template.render(messages, add_generation_prompt=add_generation_prompt)


def _failure(error: Exception) -> ValueError:
    return ValueError(f"the chat template fails: {shown(str(error))}")


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _generation_blocks() -> type:
    """Returns a jinja2 extension that renders `generation` blocks as their contents."""
    extension = _imported("jinja2.ext").Extension

    class GenerationBlocks(extension):
        tags: ClassVar[set[str]] = {"generation"}

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(["name:endgeneration"], drop_needle=True)

    return GenerationBlocks


def _template(folder: Path) -> str:
    """Returns the chat template of a folder."""
    if os.path.lexists(folder / "chat_template.jinja"):
        text = read_bytes(folder, "chat_template.jinja", _LARGEST_TEMPLATE)
        return text.decode(errors="replace")
    for file in ("tokenizer_config.json", "chat_template.json"):
        if not os.path.lexists(folder / file):
            continue
        template = read_json(folder, file).get("chat_template")
        for named in template if isinstance(template, list) else ():
            if isinstance(named, dict) and named.get("name") == "default":
                template = named.get("template")
        if isinstance(template, str):
            return template
        if template is not None:
            rule = 'a string, or a list with a template of the name "default"'
            raise ValueError(
                f"chat_template in {file} must be {rule}, got {shown(template)}"
            )
    raise ValueError(f"{shown(str(folder))} must have a chat template")


def special_tokens(path: str | os.PathLike) -> dict[str, str]:
    """Returns the special tokens of a folder by name, such as "eos_token".

    Names of tokens that the folder lacks have the value "".

    Args:
      path: The path of the folder.

    Raises:
      ValueError: If tokenizer_config.json or special_tokens_map.json exists and is not
        a JSON object.
    """
    tokens = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), "")
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        if not os.path.lexists(Path(path) / file):
            continue
        values = read_json(Path(path), file)
        for name in tokens:
            token = values.get(name)
            token = token.get("content") if isinstance(token, dict) else token
            tokens[name] = token if isinstance(token, str) else tokens[name]
    return tokens


def _imported(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"{name.partition('.')[0]} is not installed; the extra hf has it: "
            'pip install "coat-jax[hf]"'
        ) from error
