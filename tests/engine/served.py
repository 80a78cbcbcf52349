"""What an engine's HTTP API tells a test, whoever serves it: a real engine, a simulated one or the gateway."""

from __future__ import annotations

import json
import time
import urllib.request

FORGET_DEADLINE_SECONDS = 90.0


class EngineError(Exception):
    """An engine that did not start or does not do what it must; the message names its log where there is one."""


class Served:
    """Something that answers like an engine at a URL.

    Attributes:
        url: Its base URL.
    """

    __slots__ = ()

    url: str

    @property
    def block_size(self) -> int:
        """Tokens per KV block."""
        raise NotImplementedError

    def alive(self) -> bool:
        """Tell whether it runs and answers as healthy."""
        raise NotImplementedError

    def get(self, path: str) -> str:
        """GET a path and return the body's text."""
        with urllib.request.urlopen(self.url + path, timeout=10) as reply:
            body: bytes = reply.read()
        return body.decode()

    def metric(self, name: str, **labels: str) -> float:
        """Sum a metric's samples whose labels contain ``labels``; 0 when there is none."""
        total = 0.0
        for line in self.get("/metrics").splitlines():
            sample, _, value = line.rpartition(" ")
            family, _, rest = sample.partition("{")
            if family == name and all(f'{key}="{wanted}"' in rest for key, wanted in labels.items()):
                total += float(value)
        return total

    def forget(self) -> None:
        """Empty the prefix cache, so that what is reused comes from the other engine.

        vLLM answers 200 and ``success: false`` while any block is held, such as those that wait for the other engine.

        Raises:
            EngineError: If blocks are held for longer than a lease lasts.
        """
        request = urllib.request.Request(self.url + "/reset_prefix_cache", method="POST")
        deadline = time.monotonic() + FORGET_DEADLINE_SECONDS
        while True:
            with urllib.request.urlopen(request, timeout=10) as reply:
                if json.loads(reply.read())["success"]:
                    return
            if time.monotonic() > deadline:
                raise EngineError(f"{self} still holds blocks")
            time.sleep(0.05)
