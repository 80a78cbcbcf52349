"""What clients do to a conversation between two turns, by name.

Each shape changes a `Conversation` whose last message is an answer, and leaves one that ends with a question.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from .conversation import Conversation

TITLES = {
    "first": "first turn",
    "grow": "growing history",
    "edit_first": "first message edited",
    "edit_middle": "message in the middle edited",
    "edit_answer": "last answer edited",
    "edit_last": "last question edited",
    "drop_answer": "last answer dropped",
    "truncated": "oldest messages dropped",
    "regenerate": "regenerated",
    "branch": "branch: last question replaced",
    "parallel": "branch: two continuations at once",
    "strip_reasoning": "reasoning stripped by the client",
    "system_changed": "system prompt changed",
    "replaced": "another conversation under the same id",
    "stopped": "stop string",
    "tools_added": "tools added or removed",
    "tools_changed": "tool changed",
    "tools_reordered": "tools reordered",
    "template_arguments": "chat_template_kwargs changed",
    "no_generation_prompt": "add_generation_prompt: false",
    "continue_final": "continue_final_message",
    "salt_changed": "cache_salt changed",
    "model_changed": "model changed",
    "lora_changed": "LoRA changed",
    "media_changed": "image added or changed",
    "expired": "handle expired",
    "restarted_prefill": "prefill engine restarted",
    "restarted_decode": "decode engine restarted",
}
"""In the words of the table, in its order."""

EVENTS = {"expired": "expire", "restarted_prefill": "restart_prefill", "restarted_decode": "restart_decode"}
"""What happens to the engines before a request of that shape."""

_ANY_KIND = frozenset(
    {
        *("grow", "edit_first", "edit_middle", "edit_answer", "edit_last", "drop_answer", "truncated", "regenerate"),
        *("branch", "parallel", "strip_reasoning", "replaced", *EVENTS),
    }
)
_THINK_END = "</think>"


def applicable(shape: str, talk: Conversation) -> bool:
    """Whether a conversation can take this shape now."""
    if shape in {"system_changed", "salt_changed", "lora_changed", "model_changed"}:
        # Prompts of token ids have no system message; the other members belong to every API.
        if shape == "lora_changed":
            return bool(talk.menu.loras)
        if shape == "model_changed":
            return bool(talk.menu.models)
        return shape == "salt_changed" or talk.kind != "token_ids"
    if shape == "stopped":
        return talk.kind in {"chat", "completions"}
    if shape == "truncated":
        return len(talk.places("user")) > 1
    if shape in {"tools_changed", "tools_reordered"}:
        return len(talk.members.get("tools", ())) > 1
    return shape in _ANY_KIND or talk.kind == "chat"


def grow(talk: Conversation) -> None:
    """Ask the next question."""
    talk.messages.append(talk.question())


def edit_first(talk: Conversation) -> None:
    """Rewrite the first message and ask on."""
    talk.rewrite(talk.places("user")[0])
    grow(talk)


def edit_middle(talk: Conversation) -> None:
    """Rewrite any message and ask on."""
    talk.rewrite(talk.rng.randrange(len(talk.messages)))
    grow(talk)


def edit_answer(talk: Conversation) -> None:
    """Rewrite the last answer and ask on."""
    talk.rewrite(talk.places("assistant")[-1])
    grow(talk)


def edit_last(talk: Conversation) -> None:
    """Rewrite the last question and ask it again."""
    _back_to_the_question(talk)
    talk.rewrite(len(talk.messages) - 1)


def drop_answer(talk: Conversation) -> None:
    """Ask on without the last answer."""
    _back_to_the_question(talk)
    grow(talk)


def truncated(talk: Conversation) -> None:
    """Forget the oldest question and its answer, as clients with short context windows do."""
    first, second = talk.places("user")[:2]
    del talk.messages[first:second]
    grow(talk)


def regenerate(talk: Conversation) -> None:
    """Ask the same again."""
    _back_to_the_question(talk)


def branch(talk: Conversation) -> None:
    """Take the last question back and ask another one."""
    _back_to_the_question(talk)
    talk.messages.pop()
    grow(talk)


def parallel(talk: Conversation) -> None:
    """Ask two questions after the same answer at the same time."""
    talk.branches = [[*copy.deepcopy(talk.messages), talk.question()]]
    grow(talk)


def strip_reasoning(talk: Conversation) -> None:
    """Send the last answer back without its reasoning: what is before its end mark, or simply the first half."""
    last = talk.messages[-1]
    content = last["content"]
    if isinstance(content, str) and _THINK_END in content:
        last["content"] = content.rpartition(_THINK_END)[2].lstrip("\n")
    else:
        last["content"] = content[len(content) // 2 :]
    grow(talk)


def system_changed(talk: Conversation) -> None:
    """Give the conversation a system prompt, or another one."""
    system = {"role": "system", "content": talk.words(5, 20)}
    if talk.messages[0]["role"] == "system":
        talk.messages[0] = system
    else:
        talk.messages.insert(0, system)
    grow(talk)


def replaced(talk: Conversation) -> None:
    """Start over under the same id."""
    talk.messages = [talk.question(*talk.menu.first_words)]


def stopped(talk: Conversation) -> None:
    """Let a stop string end the answer: the engine then leaves no handle."""
    talk.once["stop"] = [" the", " e", "a"]
    grow(talk)


def tools_added(talk: Conversation) -> None:
    """Offer tools, or none any more."""
    if talk.members.pop("tools", None) is None:
        talk.members["tools"] = [_tool(talk) for _ in range(talk.rng.randint(2, 4))]
        talk.members["tool_choice"] = "none"
    else:
        del talk.members["tool_choice"]
    grow(talk)


def tools_changed(talk: Conversation) -> None:
    """Offer another tool in the place of one."""
    tools = talk.members["tools"] = list(talk.members["tools"])
    tools[talk.rng.randrange(len(tools))] = _tool(talk)
    grow(talk)


def tools_reordered(talk: Conversation) -> None:
    """Offer the same tools in another order."""
    tools = talk.members["tools"]
    talk.members["tools"] = [*tools[1:], tools[0]]
    grow(talk)


def template_arguments(talk: Conversation) -> None:
    """Switch thinking off for the template, or on again."""
    if talk.members.pop("chat_template_kwargs", None) is None:
        talk.members["chat_template_kwargs"] = {"enable_thinking": False}
    grow(talk)


def no_generation_prompt(talk: Conversation) -> None:
    """Let the model write the head of its message itself."""
    talk.once["add_generation_prompt"] = False
    grow(talk)


def continue_final(talk: Conversation) -> None:
    """Have the model go on with the first half of its own last answer."""
    content = talk.messages[-1]["content"]
    # Template engines strip what ends a message that is continued, so it ends with a word.
    talk.messages[-1]["content"] = content[: len(content) // 2].strip() + " and"
    talk.once |= {"add_generation_prompt": False, "continue_final_message": True}


def salt_changed(talk: Conversation) -> None:
    """Go on under another salt: KV of the old one is another tenant's, though the text would be the same."""
    talk.members["cache_salt"] = f"salt-{talk.rng.randrange(10**6)}"
    grow(talk)


def model_changed(talk: Conversation) -> None:
    """Ask another model, or the first one again."""
    others = {talk.menu.model, *talk.menu.models} - {talk.members["model"]}
    talk.members["model"] = talk.rng.choice(sorted(others))
    grow(talk)


def lora_changed(talk: Conversation) -> None:
    """Ask with another LoRA adapter, or without one."""
    others = {talk.menu.model, *talk.menu.loras} - {talk.members["model"]}
    talk.members["model"] = talk.rng.choice(sorted(others))
    grow(talk)


def media_changed(talk: Conversation) -> None:
    """Show an image, or another one in its place: the text and the token ids around it stay the same."""
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{talk.rng.randrange(10**9):09d}"}}
    first = talk.messages[talk.places("user")[0]]
    text = first["content"] if isinstance(first["content"], str) else first["content"][-1]["text"]
    first["content"] = [image, {"type": "text", "text": text}]
    grow(talk)


def _back_to_the_question(talk: Conversation) -> None:
    while talk.messages[-1]["role"] == "assistant":
        talk.messages.pop()


def _tool(talk: Conversation) -> dict[str, object]:
    name = talk.rng.choice(("search", "weather", "clock", "calculate", "read_file"))
    described = {"name": name, "description": talk.words(3, 10), "parameters": {"type": "object", "properties": {}}}
    return {"type": "function", "function": described}


SHAPES: dict[str, Callable[[Conversation], None]] = {
    "grow": grow,
    "edit_first": edit_first,
    "edit_middle": edit_middle,
    "edit_answer": edit_answer,
    "edit_last": edit_last,
    "drop_answer": drop_answer,
    "truncated": truncated,
    "regenerate": regenerate,
    "branch": branch,
    "parallel": parallel,
    "strip_reasoning": strip_reasoning,
    "system_changed": system_changed,
    "replaced": replaced,
    "stopped": stopped,
    "tools_added": tools_added,
    "tools_changed": tools_changed,
    "tools_reordered": tools_reordered,
    "template_arguments": template_arguments,
    "no_generation_prompt": no_generation_prompt,
    "continue_final": continue_final,
    "salt_changed": salt_changed,
    "model_changed": model_changed,
    "lora_changed": lora_changed,
    "media_changed": media_changed,
    **dict.fromkeys(EVENTS, grow),
}
