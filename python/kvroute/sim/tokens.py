"""A deterministic byte-level tokenizer with a few hundred words, and a ChatML template.

Small and fast, and as awkward as a real one: sequences that the model writes ("re" + "turn", a lone UTF-8 byte) are not
what the tokenizer makes of their text, so a reply that comes back as a message has other tokens than were generated.
"""

from __future__ import annotations

import codecs
import hashlib
import re
from functools import lru_cache
from typing import Any

PAD, IM_START, IM_END, END_OF_TEXT = range(4)
SPECIAL = {IM_START: "<|im_start|>", IM_END: "<|im_end|>", END_OF_TEXT: "<|endoftext|>"}
EOS = IM_END
_BYTE = 4  # the token of byte b is _BYTE + b

_WORDS = """
the of and to in is you that it he was for on are as with his they at be this have from or one had by word but not
what all were we when your can said there use an each which she do how their if will up other about out many then
them these so some her would make like him into time has look two more write go see number no way could people my
than first water been call who oil its now find long down day did get come made may part over new sound take only
little work know place year live me back give most very after thing our just name good sentence man think say great
where help through much before line right too mean old any same tell boy follow came want show also around form three
small set put end does another well large must big even such because turn here why ask went men read need land home us
move try kind hand picture again change off play spell air away animal house point page letter mother answer found
study still learn should world block cache token prefill decode return def class import value true false none list
""".split()  # noqa: SIM905 - a list of quoted words would hide them
_FRAGMENTS = """
re al er in an on at en or es st nt ed ing ion tion ti ar te it is se le ve ro co me de hi ri ne ea ra ce li ch ll be
ma si om ur un con pro com ex dis pre post able ness ment ful less ly th ou ad ca fo ba lo tu rn
""".split()  # noqa: SIM905 - a list of quoted words would hide them

VOCABULARY: list[bytes] = [b""] * _BYTE + [bytes([byte]) for byte in range(256)]
VOCABULARY[:_BYTE] = [b"", *(SPECIAL[token].encode() for token in (IM_START, IM_END, END_OF_TEXT))]
SPACED = range(len(VOCABULARY), len(VOCABULARY) + len(dict.fromkeys(_WORDS)))
VOCABULARY += [b" " + word.encode() for word in dict.fromkeys(_WORDS)]
PIECES = range(len(VOCABULARY), len(VOCABULARY) + len(dict.fromkeys(_WORDS + _FRAGMENTS)))
VOCABULARY += [piece.encode() for piece in dict.fromkeys(_WORDS + _FRAGMENTS)]

_IDS = {text: token for token, text in enumerate(VOCABULARY) if text}
_LONGEST = max(map(len, VOCABULARY))
# Specials first; then words with the space before them, as byte-pair tokenizers split; then single bytes.
_CHUNK = re.compile(rb"<\|(?:im_start|im_end|endoftext)\|>| ?[A-Za-z]+|.", re.DOTALL)


class _Chunks(dict[bytes, tuple[int, ...]]):
    """Tokens by chunk of text, filled as chunks come."""

    LIMIT = 100_000

    def __missing__(self, chunk: bytes) -> tuple[int, ...]:
        if len(self) >= self.LIMIT:  # chunks come from clients
            self.clear()
        tokens = self[chunk] = tuple(_split(chunk))
        return tokens


def _split(chunk: bytes) -> list[int]:
    """Tokens of a chunk: the longest known piece first, again and again."""
    tokens = []
    start = 0
    while start < len(chunk):
        for end in range(min(len(chunk), start + _LONGEST), start, -1):
            token = _IDS.get(chunk[start:end])
            if token is not None:
                tokens.append(token)
                start = end
                break
    return tokens


_chunks = _Chunks()


def encode(text: str) -> list[int]:
    """Tokenise text; the names of special tokens in it become those tokens, as in vLLM."""
    tokens: list[int] = []
    for chunk in _CHUNK.findall(text.encode(errors="surrogatepass")):
        tokens += _chunks[chunk]
    return tokens


@lru_cache(maxsize=4096)
def _encode_message(text: str) -> tuple[int, ...]:
    """Tokens of a rendered message, placeholders in the place of images."""
    first, *rest = text.split(_IMAGE)
    tokens = encode(first)
    for piece in rest:
        tokens += [PAD] * IMAGE_TOKENS + encode(piece)
    return tuple(tokens)


IMAGE_TOKENS = 20
"""Placeholders of one image: all alike, whatever the image, as in vLLM. Its KV is the image's all the same."""

_IMAGE = "\0"
"""Stands for an image in a message's text until that is tokenised; ``PAD`` is the placeholder, no text makes it."""

_THINKING = "<think>"
_THOUGHT = "</think>"
NO_THOUGHT = f"{_THINKING}\n\n{_THOUGHT}\n\n"


def text_of(content: Any) -> str:
    """The text of a message's content: a string, or parts of which those with text count."""
    return _content(content).replace(_IMAGE, "")


def images_of(messages: list[dict[str, Any]]) -> list[str]:
    """The images of messages in their order, each by a digest of what names it."""
    found = []
    for message in messages:
        content = message.get("content")
        images = filter(_is_image, content if isinstance(content, list) else ())
        found += [hashlib.blake2b(_canonical(image).encode(), digest_size=8).hexdigest() for image in images]
    return found


def _content(content: Any) -> str:
    if not isinstance(content, list):
        return "" if content is None else str(content).replace(_IMAGE, "")
    texts = []
    for part in content:
        if _is_image(part):
            texts.append(_IMAGE)
        elif isinstance(part, (str, dict)):
            text = part if isinstance(part, str) else str(part.get("text", ""))
            texts.append(text.replace(_IMAGE, ""))
    return "".join(texts)


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in {"image_url", "input_image", "image"}


def render(
    messages: list[dict[str, Any]],
    *,
    tools: Any = None,
    generate: bool = True,
    go_on: bool = False,
    thinking: bool = True,
) -> list[int]:
    """Apply the chat template and tokenise.

    Args:
        messages: With ``role`` and ``content``. ``tool_calls`` are rendered; reasoning (``reasoning_content``, or what
            stands before ``</think>``) only in answers after the last question, as Qwen3's template does.
        tools: Rendered before the first message when given.
        generate: Whether the header of the assistant's reply is appended (``add_generation_prompt``).
        go_on: Whether the last message is left open (``continue_final_message``).
        thinking: False tells the model not to think (``chat_template_kwargs.enable_thinking``).
    """
    tokens: list[int] = []
    if tools:
        tokens += _encode_message(f"<|im_start|>system\ntools {_canonical(tools)}<|im_end|>\n")
    last_question = max((place for place, message in enumerate(messages) if message.get("role") == "user"), default=-1)
    for place, message in enumerate(messages):
        role, content = message.get("role", "user"), _content(message.get("content"))
        if role == "assistant":
            content = _answer(message, content, recent=place > last_question)
        if message.get("tool_calls"):
            content += f"\ncalls {_canonical(message['tool_calls'])}"
        end = "" if go_on and place == len(messages) - 1 else "<|im_end|>\n"
        tokens += _encode_message(f"<|im_start|>{role}\n{content}{end}")
    if generate:
        tokens += _encode_message("<|im_start|>assistant\n" + ("" if thinking else NO_THOUGHT))
    return tokens


def _answer(message: dict[str, Any], content: str, *, recent: bool) -> str:
    reasoning = message.get("reasoning_content")
    if isinstance(reasoning, str):
        return f"{_THINKING}\n{reasoning}\n{_THOUGHT}\n\n{content}" if recent and reasoning else content
    return content if recent else content.rpartition(_THOUGHT)[2].lstrip("\n")


def _canonical(value: Any) -> str:
    import json  # noqa: PLC0415 - only where tools are used

    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def decode(tokens: list[int]) -> str:
    """The text of tokens, specials left out, invalid UTF-8 replaced."""
    return b"".join(VOCABULARY[token] for token in tokens if token >= _BYTE).decode(errors="replace")


class StreamDecoder:
    """Turns tokens into text as they come; bytes of an unfinished character wait for the next ones."""

    __slots__ = ("_decoder",)

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token: int, *, last: bool = False) -> str:
        """The text that ``token`` completes."""
        return self._decoder.decode(VOCABULARY[token] if token >= _BYTE else b"", final=last)


_OPENING = encode(f"{_THINKING}\n")
_CLOSING = encode(f"\n{_THOUGHT}\n\n")
_THOUGHT_TOKENS = 8


def thought(place: int) -> int | None:
    """The token that a thinking model writes at a place of its reply whatever it read; None where it is free."""
    if place < len(_OPENING):
        return _OPENING[place]
    place -= len(_OPENING) + _THOUGHT_TOKENS
    return _CLOSING[place] if 0 <= place < len(_CLOSING) else None
