"""PD-18: a gateway is the same however it is started."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvroute.cli.options import settings_from
from kvroute.config import EndpointSettings, Server, Settings
from kvroute.http.gateway import Gateway
from kvroute.http.server import serving
from tests.field.fleet import ANSWERED, BASE, PREFILLED
from tests.field.pair import Engine, ask
from tests.support.gateway import Running

if TYPE_CHECKING:
    from pathlib import Path


async def test_pd_18_every_way_to_start_is_the_same_gateway(tmp_path: Path):
    async with Engine(PREFILLED) as prefill, Engine(ANSWERED) as decode:
        file = tmp_path / "kvroute.yaml"
        file.write_text(
            "server: {port: 0}\n"
            f"endpoints: [{{url: '{prefill.url}', role: prefill}}, {{url: '{decode.url}', role: decode}}]\n"
        )
        none: Any = {"endpoint": (), "prefill": (), "decode": (), "host": None, "port": None, "assign": ()}
        ways = [
            settings_from(config=file, **none),
            settings_from(**{"config": None, **none, "prefill": (prefill.url,), "decode": (decode.url,), "port": 0}),
            Settings(
                server=Server(port=0),
                endpoints=(
                    EndpointSettings(url=prefill.url, role="prefill"),
                    EndpointSettings(url=decode.url, role="decode"),
                ),
            ),
        ]
        assert ways[0] == ways[1] == ways[2]
        for settings in ways:
            gateway = Gateway(settings)
            async with serving(gateway) as url:
                await gateway.monitor.first_round()
                assert (await ask(Running(gateway, url), BASE)).status == 200
        for engine in (prefill, decode):
            assert len({call.body for call in engine.calls}) == 1
            assert len(engine.calls) == 3
