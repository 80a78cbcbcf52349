"""A running gateway whose loading engine publishes what it has of one prompt, in which tier.

In an aggregated fleet the engine that serves a request loads; in a prefill/decode fleet the prefill engine does.
"""

from __future__ import annotations

import dataclasses
import json
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

from tests.field.fleet import ANSWERED, KVP, PREFILLED
from tests.field.pair import Engine, ask, total
from tests.support.gateway import running, until
from tests.support.kv_events import Blocks
from tests.support.publisher import TOPIC, Publisher
from tests.support.scripted import json_reply, reply

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from pathlib import Path

    from kvroute.fleet import Endpoint
    from tests.support.gateway import Running
    from tests.support.raw_client import RawReply
    from tests.support.scripted import Recorded, Script, Scripts

COMPLETIONS = "/v1/completions"
BLOCK = 64
PROMPT = Blocks([number * 7 % 5000 for number in range(40 * BLOCK)], BLOCK)
OTHER = Blocks([number * 11 % 5000 + 9000 for number in range(BLOCK)], BLOCK)
# One token more than the blocks: the last token of a prompt never counts as cached.
BODY = b'{"model":"m", "prompt":%b, "temperature": 1.50}' % json.dumps([*PROMPT.tokens, 1]).encode()

POLICY: dict[str, Any] = {
    "selective_kv__load_policy": "threshold",
    "selective_kv__min_external_reusable_tokens": 1024,
}
GATED: dict[str, Any] = {**POLICY, "selective_kv__max_waiting_requests": 8, "signals__max_age_seconds": 60}
ZERO = b'"max_load_tokens":0'
COLD = (
    b'"do_remote_decode":true,"do_remote_prefill":false,'
    b'"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null'
)
"""The hand-off flags of a first turn, as the prefill engine gets them."""
ONE_TOKEN = b',"stream":false,"max_tokens":1,"n":1'


class Loader(Engine):
    """An engine whose release and load a test may set.

    Attributes:
        version: What `/version` says.
        waiting: Requests that `/metrics` says are waiting; None: there is no such page.
    """

    def __init__(self, script: Scripts, **options: Any) -> None:
        super().__init__(script, **options)
        self.version = "0.32.0"
        self.waiting: float | None = None

    async def _script(self, request: Recorded) -> Script:
        if request.target == "/version":
            return [json_reply(json.dumps({"version": self.version}).encode())]
        if request.target == "/metrics" and self.waiting is not None:
            return [reply(b"vllm:num_requests_waiting %f\nvllm:num_requests_running 1\n" % self.waiting)]
        return await super()._script(request)


class Saying:
    """An index that says what a test wants."""

    def __init__(self, url: str, tokens: Mapping[str, int]) -> None:
        self._matched = {(url, 0): dict(tokens)}

    def match(self, *_: object, **__: object) -> dict[tuple[str, int], dict[str, int]]:
        return self._matched

    def assume(self, *_: object, **__: object) -> None:
        pass

    def expire(self, _now: float) -> None:
        pass

    def is_partial(self, _endpoint: str, _rank: int = 0) -> bool:
        return False


@dataclasses.dataclass(frozen=True)
class Tiered:
    """A gateway, the engine that loads, its publisher, and the decode engine where there is one."""

    gateway: Running
    loader: Loader
    publisher: Publisher
    decode: Engine | None

    @property
    def endpoint(self) -> Endpoint:
        """The gateway's view of the engine that loads."""
        return self.gateway.endpoint(self.loader.url)

    def matched(self) -> dict[str, int]:
        """What the index knows of the prompt on the engine that loads, in tokens."""
        return self.gateway.gateway.index.match([*PROMPT.tokens, 1]).get((self.loader.url, 0), {})

    async def has(self, tiers: Mapping[str, int]) -> None:
        """The engine publishes that it has so many blocks of the prompt in each tier; the gateway hears it.

        One block of another prompt comes first: an engine of which nothing is known has no size of blocks.
        """
        told = [PROMPT.stored(0, blocks, medium=tier) for tier, blocks in tiers.items() if blocks]
        self.publisher.publish(len(self.publisher.kept), OTHER.stored(), *told)
        batches = len(self.publisher.kept)
        await until(lambda: self.endpoint.hearing.batches == batches)

    async def asks(self, body: bytes = BODY, **options: Any) -> bytes:
        """What the engine that loads gets of a request."""
        before = len(self.loader.calls)
        answer = await self.sends(body, **options)
        assert answer.status == 200, answer.body
        assert len(self.loader.calls) == before + 1
        return self.loader.calls[-1].body

    async def sends(self, body: bytes = BODY, target: str = COMPLETIONS, **options: Any) -> RawReply:
        """One request."""
        return await ask(self.gateway, body, target, **options)

    def decided(self, reason: str) -> float:
        """How often it was decided so."""
        return total(self.gateway, "kvroute_selective_kv_decisions_total", reason=reason)

    def decode_got(self, body: bytes = BODY) -> bool:
        """Whether decode, if there is one, got the last request with the hand-off as prefill wrote it and no more."""
        return self.decode is None or self.decode.calls[-1].body == with_params(KVP, body)


def with_params(params: bytes, body: bytes = BODY) -> bytes:
    """A body with a last member `kv_transfer_params`."""
    return body[:-1] + b',"kv_transfer_params":' + params + b"}"


def expected(mode: str, members: bytes, *, sent: bool = False) -> bytes:
    """What the engine that loads has to get of `BODY` when these are its policy members, to the byte.

    Args:
        mode: The fleet's.
        members: The policy members, as JSON text without braces.
        sent: The client's body had transfer parameters: what replaces them stands where they stood.
    """
    if mode == "aggregated":
        return with_params(b"{" + members + b"}") if members else BODY
    params = b"{" + COLD + (b"," + members if members else b"") + b"}"
    if sent:
        return with_params(params)[:-1] + ONE_TOKEN + b"}"
    return with_params(params, BODY[:-1] + ONE_TOKEN + b"}")


def _published(publishers: Sequence[Publisher | None]) -> dict[str, Any]:
    """Where an engine publishes, a publisher for each rank."""
    ranks = [one for one in publishers if one is not None]
    addresses = {"kv_events": [one.live for one in ranks], "kv_events_replay": [one.again for one in ranks]}
    return {**addresses, "kv_events_topic": TOPIC} if ranks else {}


@asynccontextmanager
async def tiered(
    folder: Path,
    mode: str,
    script: Scripts | None = None,
    *,
    publisher: Publisher | None = None,
    loader: Loader | None = None,
    decode: Engine | None = None,
    ranks: Sequence[Publisher] = (),
    beside: Sequence[tuple[Engine, Publisher | None]] = (),
    heard: bool = True,
    **settings: Any,
) -> AsyncIterator[Tiered]:
    """Start the engines and a gateway over them; by default with the published policy, and all events heard.

    Args:
        folder: Where the gateway's file goes.
        mode: ``aggregated`` or ``disaggregated``.
        script: Of the engine that loads.
        publisher: Its publisher, else one of its own.
        loader: The engine that loads, else one that plays the script.
        decode: The decode engine, else one that answers.
        ranks: Publishers of further data-parallel ranks of the engine that loads.
        beside: Further engines of its role, which run already, and their publishers.
        heard: Return when its events are heard.
        settings: Of the gateway.
    """
    settings = {"health__interval_seconds": 60, "signals__scrape_seconds": 0, **POLICY, **settings}
    split = mode == "disaggregated"
    async with AsyncExitStack() as stack:
        if publisher is None:
            publisher = await stack.enter_async_context(Publisher())
        loader = loader or Loader(script or (PREFILLED if split else ANSWERED))
        await stack.enter_async_context(loader)
        role = "prefill" if split else "both"
        listed = [
            {"url": engine.url, "role": role, **_published(publishers)}
            for engine, publishers in ((loader, (publisher, *ranks)), *((one, (its,)) for one, its in beside))
        ]
        if split:
            decode = decode or Engine(ANSWERED)
            await stack.enter_async_context(decode)
            listed.append({"url": decode.url, "role": "decode"})
        file = folder / "kvroute.yaml"
        file.write_text(json.dumps({"endpoints": listed}))
        gateway = await stack.enter_async_context(running(file=file, **settings))
        made = Tiered(gateway, loader, publisher, decode if split else None)
        if heard:
            await until(lambda: made.endpoint.hearing.state == "live")
            await until(publisher.is_subscribed)
        yield made
