"""What the plugin wraps in vLLM, version by version, and whether it is on in this process.

Everything is checked before it is touched: the version, that the thing is there, and the names of its parameters. When
something differs, the feature stays off, one log line says which and why, and ``GET /kvroute/capabilities`` repeats it.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger("vllm.kvroute")


class CannotWrapError(Exception):
    """vLLM is not what the plugin was written for. The message is shown to operators."""


@dataclass(frozen=True, slots=True)
class Target:
    """A function of vLLM that the plugin wraps or calls.

    Attributes:
        module: Where it lives.
        name: Its name there, with the class for a method.
        parameters: The names of its parameters, in order.
    """

    module: str
    name: str
    parameters: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Wraps:
    """Everything the plugin touches in one minor release of vLLM."""

    request_finished: Target
    match_tokens: Target
    chat_stream: Target
    completion_stream: Target


_PULL_SCHEDULER = "vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler"

_NIXL_PULL = Wraps(
    request_finished=Target(
        _PULL_SCHEDULER, "NixlPullConnectorScheduler.request_finished", ("self", "request", "block_ids")
    ),
    match_tokens=Target(
        _PULL_SCHEDULER,
        "NixlPullConnectorScheduler.get_num_new_matched_tokens",
        ("self", "request", "num_computed_tokens"),
    ),
    chat_stream=Target(
        "vllm.entrypoints.openai.chat_completion.serving",
        "OpenAIServingChat.chat_completion_stream_generator",
        (
            "self",
            "request",
            "result_generator",
            "request_id",
            "model_name",
            "conversation",
            "tokenizer",
            "request_metadata",
            "chat_template_kwargs",
            "mm_token_counts",
        ),
    ),
    completion_stream=Target(
        "vllm.entrypoints.openai.completion.serving",
        "OpenAIServingCompletion.completion_stream_generator",
        (
            "self",
            "request",
            "engine_inputs",
            "result_generator",
            "request_id",
            "created_time",
            "model_name",
            "num_prompts",
            "tokenizer",
            "request_metadata",
        ),
    ),
)

VERSIONS: dict[tuple[int, int], Wraps] = dict.fromkeys(((0, 29), (0, 30), (0, 31), (0, 32)), _NIXL_PULL)
"""A release is added here after its sources were read and the engine tests ran against it: see docs/reuse.md."""


@dataclass(slots=True)
class Status:
    """Which features are on in this process, and why the others are off."""

    on: set[str] = field(default_factory=set)
    off: dict[str, str] = field(default_factory=dict)

    def turn_on(self, feature: str, install: Callable[[], None]) -> None:
        """Install a feature; when that fails, say so loudly and leave vLLM as it is."""
        try:
            install()
        except Exception as error:  # noqa: BLE001 - a plugin must never stop the engine from starting
            self.turn_off(feature, str(error) or type(error).__name__)
        else:
            self.on.add(feature)
            self.off.pop(feature, None)

    def turn_off(self, feature: str, reason: str) -> None:
        """Record that a feature is off, with one log line."""
        self.on.discard(feature)
        if self.off.get(feature) != reason:
            log.warning("kvroute: %s is OFF on this engine: %s", feature, reason)
        self.off[feature] = reason


STATUS = Status()
"""Of this process. The engine core and the API server run the same checks on the same packages."""


def wraps_for(version: str) -> Wraps:
    """Look up what to wrap in a release such as ``0.32.0`` or ``0.32.1+cpu``.

    Raises:
        CannotWrapError: If the release is not known.
    """
    try:
        major, minor = (int(part) for part in version.split(".")[:2])
        return VERSIONS[major, minor]
    except (ValueError, KeyError):
        known = ", ".join(f"{major}.{minor}" for major, minor in VERSIONS)
        raise CannotWrapError(f"vLLM {version} is not supported (supported: {known})") from None


def resolve(target: Target) -> Callable[..., Any]:
    """Find a target and check its parameters.

    Raises:
        CannotWrapError: If it is not there, or has other parameters.
    """
    try:
        found: Any = importlib.import_module(target.module)
        for name in target.name.split("."):
            found = getattr(found, name)
        parameters = tuple(inspect.signature(found).parameters)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise CannotWrapError(f"{target.module}:{target.name} cannot be read: {error}") from error
    if parameters != target.parameters:
        raise CannotWrapError(f"{target.name} takes {parameters}, expected {target.parameters}")
    return found  # type: ignore[no-any-return]  # a callable, as inspect.signature has shown


def replace_method(target: Target, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a method by its wrapped form, once per process however often it is called.

    Raises:
        CannotWrapError: As `resolve`.
    """
    method = resolve(target)
    if hasattr(method, "__kvroute__"):
        return
    owner_name, name = target.name.rsplit(".", 1)
    owner = getattr(importlib.import_module(target.module), owner_name)
    wrapped = wrap(method)
    wrapped.__kvroute__ = True  # type: ignore[attr-defined]
    setattr(owner, name, wrapped)
