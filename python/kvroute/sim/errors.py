"""Errors in the engine's words; the texts are those of vLLM 0.32.0."""

from __future__ import annotations

from typing import Any

import orjson
from aiohttp import web

NOT_FOUND, BAD_REQUEST, INVALID = "NotFoundError", "BadRequestError", "Bad Request"


class ApiError(Exception):
    """A refusal, as the client sees it."""

    def __init__(self, status: int, message: str, kind: str = BAD_REQUEST, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param

    @property
    def body(self) -> dict[str, Any]:
        """The JSON of the answer."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.status}}

    def response(self) -> web.Response:
        """The answer."""
        return json_response(self.body, self.status)


def json_response(tree: Any, status: int = 200) -> web.Response:
    """An answer in JSON."""
    return web.Response(body=orjson.dumps(tree), status=status, content_type="application/json")


def invalid(kind: str, member: str, message: str, value: Any) -> ApiError:
    """A member of a wrong type, as vLLM reports what pydantic found."""
    location = f"body.{member}" if member else "body"
    detail = {"type": kind, "loc": location, "msg": message, "input": value}
    return ApiError(400, f"1 validation error:\n  {detail}", INVALID, location)


def no_model(name: str, known: list[str]) -> ApiError:
    """A model that the engine does not serve."""
    message = f"The model `{name}` does not exist. Valid aliases: {', '.join(known)}."
    return ApiError(404, message, NOT_FOUND, "model")


def too_long(limit: int, tokens: int) -> ApiError:
    """A prompt that does not fit. vLLM stops tokenising one token behind the limit."""
    seen = f"at least {limit + 1}" if tokens > limit else str(tokens)
    value = min(tokens, limit + 1)
    message = (
        f"This model's maximum context length is {limit} tokens. However, your prompt contains {seen} input tokens, "
        "which exceeds this limit even without any output tokens. Please reduce the length of the input prompt. "
        f"(parameter=input_tokens, value={value})"
    )
    return ApiError(400, message, param="input_tokens")


def failed(message: str) -> ApiError:
    """The engine failed while it worked on a request."""
    return ApiError(500, message, "InternalServerError")


def busy() -> ApiError:
    """The queue is full."""
    message = (
        "The engine is currently busy and cannot accept new requests. "
        "Please try again later or on a different instance."
    )
    return ApiError(503, message, "ServiceUnavailableError")
