"""What all generate endpoints have in common: members of the body, their checks, and what they ask of the engine."""

from __future__ import annotations

import dataclasses
import secrets
import time
from typing import TYPE_CHECKING, Any

import orjson

from kvroute.sim.errors import ApiError, invalid, no_model, too_long
from kvroute.sim.generation import Ask
from kvroute.sim.sequence import Sampling

if TYPE_CHECKING:
    from aiohttp import web

    from kvroute.sim.config import EngineSpec

_NAMES = {list: "list", str: "string", int: "integer", bool: "boolean", dict: "dictionary", float: "number"}


@dataclasses.dataclass(slots=True)
class Members:
    """A request's body and the engine it came to; reads members with their types checked."""

    spec: EngineSpec
    tree: dict[str, Any]
    header_id: str | None

    @classmethod
    async def read(cls, request: web.Request, spec: EngineSpec) -> Members:
        """Read a body.

        Raises:
            ApiError: When it is no JSON object.
        """
        raw = await request.read()
        try:
            tree = orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            raise invalid("json_invalid", str(error.pos), "JSON decode error", {}) from None
        if not isinstance(tree, dict):
            raise invalid("model_attributes_type", "", "Input should be a valid dictionary", tree)
        return cls(spec, tree, request.headers.get("X-Request-Id"))

    def get(self, name: str, kind: type, default: Any = None) -> Any:
        """A member of one type; ``default`` when absent or null."""
        value = self.tree.get(name)
        if value is None:
            return default
        if kind is float and type(value) is int:
            return float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            word = _NAMES[kind]
            raise invalid(f"{'dict' if kind is dict else word.split()[0]}_type", name, _should(word), value)
        return value

    def need(self, name: str, kind: type) -> Any:
        """A member that must be there."""
        if name not in self.tree:
            raise invalid("missing", name, "Field required", self.tree)
        return self.get(name, kind)

    def identity(self, prefix: str) -> str:
        """The request's id: the client's header, or random."""
        return f"{prefix}{self.header_id or secrets.token_hex(8)}"

    def model(self) -> tuple[str, str | None]:
        """The model's name as the answer shows it, and the LoRA adapter if it is one."""
        name = self.get("model", str, self.spec.model)
        if name == self.spec.model:
            return name, None
        if name in self.spec.loras:
            return name, name
        raise no_model(name, [self.spec.model, *self.spec.loras])

    def params(self) -> dict[str, Any] | None:
        """``kv_transfer_params``."""
        value: dict[str, Any] | None = self.get("kv_transfer_params", dict)
        return value

    def stop(self) -> list[str]:
        """Stop strings."""
        value = self.tree.get("stop", self.tree.get("stop_sequences"))
        if value is None:
            return []
        stops = [value] if isinstance(value, str) else value
        if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
            raise invalid("list_type", "stop", "Input should be a valid list", value)
        if "" in stops:
            raise ApiError(400, "stop cannot contain an empty string.")
        return stops

    def stream(self) -> bool:
        """Whether the answer streams; stream options without it are refused."""
        stream: bool = self.get("stream", bool, False)
        if self.tree.get("stream_options") is not None and not stream:
            message = "Stream options can only be defined when `stream=True`. (parameter=stream_options)"
            raise ApiError(400, message, param="stream_options")
        return stream

    def include_usage(self) -> bool:
        """``stream_options.include_usage``."""
        return bool((self.get("stream_options", dict) or {}).get("include_usage"))

    def check_length(self, prompts: list[list[int]]) -> None:
        """Refuse prompts that do not fit."""
        limit = self.spec.context_length
        for prompt in prompts:
            if not prompt:
                raise ApiError(400, "The decoder prompt cannot be empty")
            if len(prompt) >= limit:
                raise too_long(limit, len(prompt))

    def sampling(self, prompts: list[list[int]], *, names: tuple[str, ...], default: int | None) -> Sampling:
        """Sampling parameters.

        Args:
            prompts: They bound the reply.
            names: Members that give its length, the first that is there wins.
            default: Length when none is there; None for what fits.
        """
        room = self.spec.context_length - max(map(len, prompts))
        limit = next((value for name in names if (value := self.get(name, int)) is not None), default)
        most = room if limit is None else limit
        if most < 1:
            raise ApiError(400, f"max_tokens must be at least 1, got {most}. (parameter=max_tokens, value={most})")
        if limit is not None and limit > room and any(name in self.tree for name in names):
            length = max(map(len, prompts))
            raise ApiError(
                400,
                f"This model's maximum context length is {self.spec.context_length} tokens. However, you "
                f"requested {limit} output tokens and your prompt contains at least {length} input tokens, for a total "
                f"of at least {limit + length} tokens. Please reduce the length of the input prompt or the number of "
                f"requested output tokens. (parameter=input_tokens, value={length})",
                param="input_tokens",
            )
        least = self.get("min_tokens", int, 0)
        if least > most:
            raise ApiError(400, f"min_tokens must be less than or equal to max_tokens={most}, got {least}.")
        temperature = self.get("temperature", float, 1.0)
        if temperature < 0:
            raise ApiError(400, f"temperature must be non-negative, got {temperature}.", param="temperature")
        if self.get("n", int, 1) > 1 and temperature == 0:
            raise ApiError(400, f"n must be 1 when using greedy sampling, got {self.tree['n']}.")
        seed = self.get("seed", int)
        return Sampling(
            max_tokens=min(most, room),
            min_tokens=least,
            ignore_eos=self.get("ignore_eos", bool, False),
            stop_token_ids=frozenset(self.get("stop_token_ids", list, [])),
            # Without a seed sampling is greedy at every temperature: tests compare texts.
            salt=b"" if seed is None or temperature == 0 else b"seed %d" % seed,
        )

    def ask(
        self,
        request_id: str,
        prompts: list[list[int]],
        lora: str | None,
        *,
        names: tuple[str, ...],
        default: int | None,
        suffixes: tuple[str, ...] = ("",),
        images: list[str] | None = None,
    ) -> Ask:
        """What chat and completions ask of the engine, which differ in little.

        Args:
            request_id: As the answer names it.
            prompts: Token ids per prompt.
            lora: The adapter.
            names: Members that give the reply's length, the first that is there wins.
            default: Its length when none is there; None for what fits.
            suffixes: What the API appends to the engine's id, per prompt.
            images: Digests of the images in the prompt.
        """
        return Ask(
            request_id,
            prompts,
            self.sampling(prompts, names=names, default=default),
            suffixes=list(suffixes),
            n=self.get("n", int, 1),
            stop=self.stop(),
            include_stop=self.get("include_stop_str_in_output", bool, False),
            params=self.params(),
            images=images or [],
            salt=self.get("cache_salt", str),
            lora=lora,
            # Log probabilities of the prompt need all of it computed.
            use_cache=self.tree.get("prompt_logprobs") is None
            and not (self.get("echo", bool, False) and self.tree.get("logprobs") is not None),
        )


def _should(word: str) -> str:
    return f"Input should be a valid {word}"


def created() -> int:
    """The wall time of an answer."""
    return int(time.time())
