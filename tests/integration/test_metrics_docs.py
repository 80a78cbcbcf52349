"""docs/metrics.md names every metric that a gateway shows, and no other."""

import re
from pathlib import Path

from kvroute.config import load
from kvroute.http.gateway import Gateway

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


async def test_every_metric_is_documented_and_every_documented_one_exists():
    gateway = Gateway(load(endpoints=[("prefill", "http://p:1"), ("decode", "http://d:1")]))
    shown = set()
    for family in gateway.metrics.registry.collect():
        suffix = {"counter": "_total", "info": "_info"}.get(family.type, "")
        shown.add(family.name + suffix)
    await gateway.close()
    named = set(re.findall(r"^\|.*?\|", DOCS.read_text(), re.MULTILINE))
    documented = {name for cell in named for name in re.findall(r"`(kvroute_\w+)`", cell)}
    assert shown - documented == set()
    assert documented - shown == set()
