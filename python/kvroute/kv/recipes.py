"""The prefill leg's body: what is set, what is dropped, per API. Everything not named is kept, byte for byte.

The rule: a one-token, non-streaming run of the same prompt. Members that shape only the output
are dropped, because several make a one-token run fail (``min_tokens``, ``stream_options``, forced tool calls,
grammars); members that shape the prompt (``tools``, ``chat_template``, ``chat_template_kwargs``, ``reasoning_effort``,
``documents``, ``cache_salt``, ``model``,
``mm_processor_kwargs``, ``add_generation_prompt``, ``continue_final_message``, ``truncate_prompt_tokens`` …) stay,
because prefill and decode must see the same tokens.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from kvroute._core import Body, BodyError, Edits

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvroute.plan.api import Api

# Output only, in every API.
_OUTPUT = (
    "stream_options",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "logprobs",
    "top_logprobs",
    "logprob_token_ids",
    "prompt_logprobs",
    "echo",
    "best_of",
    "use_beam_search",
    "length_penalty",
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "guided_decoding_backend",
    "guided_whitespace_pattern",
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
    "repetition_detection",
    "thinking_token_budget",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "return_token_offsets",
    "return_prompt_text",
    "return_mm_kwargs",
)


@dataclasses.dataclass(frozen=True, slots=True)
class Recipe:
    """How a request body becomes the body of its prefill leg.

    Attributes:
        api: The API it is for.
        set: Members that get this raw JSON value, present or not.
        drop: Members that are taken out.
        no_tool: The raw JSON of ``tool_choice`` that forces no tool, in this API's shape.
    """

    api: Api
    set: Mapping[str, bytes]
    drop: tuple[str, ...]
    no_tool: bytes
    _edits: Edits = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_edits", Edits(set=self.set, drop=self.drop))

    def apply(self, body: Body, params: bytes, *, token_ids: bool = False) -> bytes:
        """The prefill leg's body.

        Args:
            body: The client's body.
            params: Raw JSON of ``kv_transfer_params`` for this leg.
            token_ids: Have the engine return the prompt as it computed it.
        """
        members = {"kv_transfer_params": params}
        if token_ids:
            members["return_token_ids"] = b"true"
        if _forces_a_tool(body.raw("tool_choice")):
            # A forced call cannot be parsed from one token: engines have answered 500 (vLLM 38911).
            members["tool_choice"] = self.no_tool
        return body.splice(self._edits, **members)


def _forces_a_tool(choice: bytes | None) -> bool:
    """Read from the text, because what a client sends here may be anything of any size."""
    if choice is None:
        return False
    try:
        kind = Body.scan(choice).raw("type") if choice.startswith(b"{") else choice
    except BodyError:
        return True  # an engine may still find a tool in it
    return kind is not None and kind.startswith(b'"') and kind not in {b'"auto"', b'"none"'}


# Taken out of every leg: the gateway's own member, and members by which a client could name addresses.
OWNED = ("conversation_id", "ec_transfer_params")
# All that is edited where the client's own request goes to an engine, beside its transfer parameters.
CLIENT_BODY = Edits(drop=OWNED)

# Each API's own cap is set to one token; the other APIs' names for it are dropped, since nothing says that an engine
# ignores them for ever.
RECIPES: dict[Api, Recipe] = {
    "chat": Recipe(
        "chat",
        set={"stream": b"false", "max_tokens": b"1", "n": b"1"},
        drop=(*OWNED, *_OUTPUT, "max_completion_tokens", "max_output_tokens"),
        no_tool=b'"none"',
    ),
    "completions": Recipe(
        "completions",
        set={"stream": b"false", "max_tokens": b"1", "n": b"1"},
        drop=(*OWNED, *_OUTPUT, "max_completion_tokens", "max_output_tokens"),
        no_tool=b'"none"',
    ),
    "responses": Recipe(
        "responses",
        # store: a response object kept on the prefill engine would be found by nobody.
        set={"stream": b"false", "max_output_tokens": b"1", "store": b"false"},
        drop=(*OWNED, *_OUTPUT, "max_tokens", "max_completion_tokens", "n", "text", "include", "max_tool_calls"),
        no_tool=b'"none"',
    ),
    "messages": Recipe(
        "messages",
        set={"stream": b"false", "max_tokens": b"1"},
        drop=(*OWNED, *_OUTPUT, "max_completion_tokens", "max_output_tokens", "n", "stop_sequences"),
        no_tool=b'{"type":"none"}',
    ),
}
