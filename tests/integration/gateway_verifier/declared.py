"""What an operator says of engines without the plugin."""

from kvroute.cli.findings import findings
from tests.support.simulated import posts

DECLARED = {"bidirectional_kv_xfer": True, "kv_layout": "full_attention"}
# A machine that is busy with something else must not look like a slow tokenizer.
PATIENT = {"tokenize": {"timeout_seconds": 30.0}}


def generations(engine):
    """The legs of clients' requests: all posts but probes and questions for tokens."""
    return [call for call in posts(engine) if call.params is not None]


def found(gateway):
    return findings(gateway.gateway.settings, gateway.gateway.fleet, gateway.gateway.prompts)
