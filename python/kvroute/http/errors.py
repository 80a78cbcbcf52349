"""Errors that the gateway itself answers, in the shape of the API that was called.

The OpenAI shape is ``{"error": {"message", "type", "param", "code"}}`` with the HTTP status as code, as vLLM writes it;
``/v1/messages`` answers in Anthropic's shape. An engine's own errors never pass here: they reach the client as they
are.
"""

from __future__ import annotations

import orjson
from aiohttp import web

_TYPES = {
    400: ("BadRequestError", "invalid_request_error"),
    401: ("AuthenticationError", "authentication_error"),
    404: ("NotFoundError", "not_found_error"),
    405: ("MethodNotAllowedError", "invalid_request_error"),
    408: ("RequestTimeoutError", "timeout_error"),
    413: ("PayloadTooLargeError", "request_too_large"),
    415: ("UnsupportedMediaTypeError", "invalid_request_error"),
    429: ("RateLimitError", "rate_limit_error"),
    500: ("InternalServerError", "api_error"),
    502: ("BadGatewayError", "api_error"),
    503: ("ServiceUnavailableError", "overloaded_error"),
    504: ("GatewayTimeoutError", "timeout_error"),
}


class GatewayError(Exception):
    """An answer that ends the request.

    Args:
        status: The HTTP status.
        message: One clear sentence; never a prompt, a key or an engine's address that the client did not name.
        param: The request member that is wrong, if it is one.
        retry_after: Whole seconds after which a retry makes sense.
        close: Whether the client's connection ends with this answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        retry_after: int | None = None,
        close: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.retry_after = retry_after
        self.close = close


def error_body(path: str, status: int, message: str, param: str | None = None) -> bytes:
    """The JSON text of an error for a client that called ``path``."""
    openai_type, anthropic_type = _TYPES.get(status, ("InternalServerError", "api_error"))
    if path.startswith("/v1/messages"):
        return orjson.dumps({"type": "error", "error": {"type": anthropic_type, "message": message}})
    return orjson.dumps({"error": {"message": message, "type": openai_type, "param": param, "code": status}})


def error_response(path: str, error: GatewayError, request_id: str) -> web.Response:
    """The response for ``error``."""
    headers = {"X-Request-Id": request_id}
    if error.retry_after is not None:
        headers["Retry-After"] = str(error.retry_after)
    if error.status == 415:
        headers["Accept-Encoding"] = "gzip"
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    response = web.Response(
        body=error_body(path, error.status, error.message, error.param),
        status=error.status,
        content_type="application/json",
        headers=headers,
    )
    if error.close:
        response.force_close()
    return response
