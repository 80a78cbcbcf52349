"""Tokens without asking an engine: the model's tokenizer and chat template from its directory.

Renders chats of plain texts, and encodes nothing else: tools, tool calls, reasoning, parts and templates of the request
go through code of vLLM's that is not repeated here; ``/tokenize`` does them.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from kvroute.tokens.request import NoTokens

if TYPE_CHECKING:
    from array import array
    from pathlib import Path

    from kvroute.tokens.request import Ask, ContentFormat
    from kvroute.tokens.segments import SegmentedEncoder
    from kvroute.tokens.template import ChatTemplate

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TokenizerError(ValueError):
    """A local tokenizer cannot be used; the text says what to do."""


class LocalTokenizer:
    """A model's tokenizer.

    Args:
        encoder: Encodes texts.
        template: The chat template, None when the directory has none.
        why_no_template: Said when there is none.
    """

    def __init__(self, encoder: SegmentedEncoder, template: ChatTemplate | None, why_no_template: str = "") -> None:
        self._encoder = encoder
        self._template = template
        self._why_no_template = why_no_template
        self.splits = encoder.splits

    @classmethod
    def load(cls, path: Path, *, cache_bytes: int) -> LocalTokenizer:
        """Read ``tokenizer.json``, ``tokenizer_config.json`` and ``chat_template.jinja`` of a model's directory.

        Raises:
            TokenizerError: When the extra is not installed, or a file is missing or unreadable.
        """
        try:
            from tokenizers import Tokenizer  # noqa: PLC0415 - an extra

            from kvroute.tokens.segments import SegmentedEncoder  # noqa: PLC0415 - as above
            from kvroute.tokens.template import ChatTemplate  # noqa: PLC0415 - as above
        except ImportError as error:
            raise TokenizerError(f"{error.name} is not installed: pip install 'kvroute[tokenizer]'") from None
        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # noqa: BLE001 - the library raises plain exceptions
            raise TokenizerError(f"{file} cannot be read: {error}") from None
        tokenizer.no_truncation()
        tokenizer.no_padding()
        config = _read_config(file.parent)
        encoder = SegmentedEncoder(tokenizer, cache_bytes=cache_bytes)
        source = _template_source(file.parent, config)
        if source is None:
            return cls(encoder, None, "there is no chat template")
        try:
            return cls(encoder, ChatTemplate(source, _special_tokens(config)))
        except NoTokens as error:
            return cls(encoder, None, str(error))

    def renders(self, ask: Ask) -> bool:
        """Whether it is worth trying: a chat of plain texts."""
        return ask.plain is not None and self._template is not None

    def why_not(self) -> str:
        """Why no chat is rendered, empty when chats are."""
        return self._why_no_template

    def tokens(self, ask: Ask, content: ContentFormat) -> array[int]:
        """The tokens of a chat of plain texts.

        Raises:
            NoTokens: ``local`` for any other prompt; else what `ChatTemplate.render` says.
        """
        if ask.plain is None or self._template is None:
            raise NoTokens("local", "only chats of plain texts are rendered locally")
        return self._encoder.encode(self._template.render(ask.plain, content=content, arguments=ask.arguments))


def _read_config(directory: Path) -> dict[str, Any]:
    try:
        config = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def _template_source(directory: Path, config: dict[str, Any]) -> str | None:
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    source = config.get("chat_template")
    if isinstance(source, list):  # several by name: without tools, the default
        source = next((item.get("template") for item in source if item.get("name") == "default"), None)
    return source if isinstance(source, str) else None


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in _SPECIAL:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found
