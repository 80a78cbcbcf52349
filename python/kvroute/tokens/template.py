"""A model's chat template, rendered as transformers renders it (`render_jinja_template` of 5.x)."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.sandbox

from kvroute.tokens.request import NoTokens

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from jinja2.parser import Parser

    from kvroute.tokens.request import ContentFormat

# What the caller decides, and what transformers or vLLM take for arguments of their own.
_RESERVED = frozenset(
    {
        *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "conversation"),
        *("chat_template", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
        *("return_assistant_tokens_mask", "tokenizer_kwargs", "processor_kwargs", "load_audio_from_video"),
    }
)


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks what the assistant wrote; it renders as its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja's interface

    def parse(self, parser: Parser) -> jinja2.nodes.Node:
        """Read the body up to the end tag; what is set inside is not seen outside."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class ChatTemplate:
    """A compiled template.

    Args:
        source: The template's text.
        special_tokens: ``bos_token`` and the like, by which templates name them.

    Raises:
        NoTokens: ``template`` when it cannot be compiled, or uses the clock: its text then depends on when it is
            rendered, and not on the request alone.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, jinja2.ext.loopcontrols],
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise NoTokens("template", f"the chat template cannot be compiled: {error}") from None
        self._variables = frozenset(jinja2.meta.find_undeclared_variables(tree)) - {"raise_exception"}
        if "strftime_now" in self._variables:
            raise NoTokens("template", "the chat template uses the date")
        self._special = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        content: ContentFormat = "string",
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """Render messages that hold texts, with the header of the assistant's answer.

        Args:
            messages: Each with ``role`` and ``content``.
            content: How the template wants contents.
            arguments: ``chat_template_kwargs``; those the template does not use have no effect, as in vLLM.

        Raises:
            NoTokens: ``template`` when the template refuses the messages, ``member`` for an argument that means
                something to transformers itself.
        """
        arguments = arguments or {}
        if _RESERVED & arguments.keys():
            raise NoTokens("member", "chat_template_kwargs holds arguments that are not the template's")
        # None and "auto" are as if they were not there.
        used = {
            name: value for name, value in arguments.items() if name in self._variables and value not in (None, "auto")
        }
        if content == "parts":
            messages = [
                {"role": message["role"], "content": [{"type": "text", "text": message["content"]}]}  # type: ignore[dict-item]
                for message in messages
            ]
        else:
            messages = [{"role": message["role"], "content": message["content"]} for message in messages]
        try:
            return self._template.render(
                **{**self._special, **used},
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=True,
            )
        except Exception as error:  # noqa: BLE001 - templates are programs: anything may come out of one
            raise NoTokens("template", f"the chat template failed: {type(error).__name__}") from None


def _tojson(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - transformers' signature, which templates call
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002 - as above
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> str:
    raise jinja2.TemplateError(message)
