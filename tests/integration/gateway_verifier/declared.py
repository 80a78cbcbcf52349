"""What an operator says of engines without the plugin."""

from contextlib import asynccontextmanager

from kvroute.cli.findings import findings
from tests.support.gateway import running
from tests.support.simulated import posts

DECLARED = {"bidirectional_kv_xfer": True, "kv_layout": "full_attention"}
# A machine that is busy with something else must not look like a slow tokenizer.
PATIENT = {"tokenize": {"timeout_seconds": 30.0}}


def generations(engine):
    """The legs of clients' requests: all posts but probes and questions for tokens."""
    return [call for call in posts(engine) if call.params is not None]


def found(gateway):
    return findings(gateway.gateway.settings, gateway.gateway.fleet, gateway.gateway.prompts)


@asynccontextmanager
async def settled(file, **settings):
    """A gateway that knows which sources of tokens are exact."""
    async with running(file=file, **settings) as gateway:
        await gateway.gateway.prompts.settled()
        yield gateway
