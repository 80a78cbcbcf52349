"""What is done to engines on request."""

import asyncio
import json

import aiohttp
import pytest
from aiohttp.test_utils import make_mocked_request

from kvroute.sim.faults import Exposure, Faults
from tests.support.gateway import until
from tests.support.params import FIRST_TURN

from .wire import chat, events, get, post


async def test_faults_by_the_admin_route(client, fleet):
    async def fault(**members):
        return (await post(client, fleet["d"], "/sim/faults", members))[0]

    assert await fault(kind="status", status=429, count=1) == 200
    assert (await chat(client, fleet["d"]))[0] == 429
    assert (await chat(client, fleet["d"]))[0] == 200
    assert await fault(kind="reset") == 200
    with pytest.raises(aiohttp.ClientError):
        await chat(client, fleet["d"])
    assert await fault(kind="reset", after=3) == 200
    with pytest.raises(aiohttp.ClientError):
        await chat(client, fleet["d"], stream=True)
    assert await fault(kind="stream_error", after=3) == 200
    _, _, raw = await chat(client, fleet["d"], stream=True)
    assert len(events(raw)) == 3 + 2
    assert await fault(kind="unhealthy") == 200
    assert (await get(client, fleet["d"], "/health"))[0] == 503
    assert await fault(kind="tsunami") == 400
    assert await fault(kind="delay", seconds="x") == 400


async def test_a_stall_ends_when_faults_are_cleared(client, fleet):
    fleet["d"].faults.add("stall", after=2)
    running = asyncio.create_task(chat(client, fleet["d"], stream=True))
    await until(lambda: not fleet["d"].faults.active)
    async with client.delete(fleet["d"].url + "/sim/faults") as answer:
        assert answer.status == 200
    assert (await running)[0] == 200


@pytest.mark.parametrize("after", [None, 1])
async def test_a_stall_that_is_cleared_before_the_request_gets_there_is_none(after):
    faults = Faults()
    faults.add("stall", after=after)
    exposure = Exposure(faults.cleared, faults.take("/"), make_mocked_request("POST", "/"))
    faults.clear()
    await asyncio.wait_for(exposure.before(), 10)
    assert await asyncio.wait_for(exposure.before_event(1), 10) == 1
    assert await asyncio.wait_for(exposure.before_event(1), 10) == 1


async def test_a_restart_has_the_same_address_another_id_and_an_empty_cache(client, fleet):
    _, _, raw = await chat(client, fleet["p"], max_tokens=1, kv_transfer_params=FIRST_TURN)
    old = json.loads(raw)["kv_transfer_params"]
    url = fleet["p"].url
    await fleet["p"].restart()
    assert fleet["p"].url == url
    _, _, raw = await chat(client, fleet["p"], max_tokens=1, kv_transfer_params=FIRST_TURN)
    new = json.loads(raw)["kv_transfer_params"]
    assert new["remote_engine_id"] != old["remote_engine_id"]
    assert (new["remote_host"], new["remote_port"]) == (old["remote_host"], old["remote_port"])
    assert (await chat(client, fleet["d"], kv_transfer_params=old))[0] == 500


async def test_a_crash_cuts_streams_and_refuses_connections(client, fleet):
    fleet["d"].faults.add("stall", after=2)
    running = asyncio.create_task(chat(client, fleet["d"], stream=True))
    await until(lambda: not fleet["d"].faults.active)
    await fleet["d"].crash()
    with pytest.raises(aiohttp.ClientError):
        await running
    with pytest.raises(aiohttp.ClientConnectorError):
        await chat(client, fleet["d"])


async def test_refused_connections(client, fleet):
    await fleet["d"].refuse()
    with pytest.raises(aiohttp.ClientConnectorError):
        await chat(client, fleet["d"])
    await fleet["d"].accept()
    assert (await chat(client, fleet["d"]))[0] == 200


async def test_a_dead_engine_core_ends_the_server(client, fleet):
    _, _, raw = await chat(client, fleet["p"], max_tokens=1, kv_transfer_params=FIRST_TURN)
    handoff = json.loads(raw)["kv_transfer_params"]
    status, _, _ = await chat(client, fleet["d"], kv_transfer_params={**handoff, "remote_block_ids": None})
    assert status == 500
    assert fleet["d"].dead
    await until(lambda: not fleet["d"].listening)
    with pytest.raises(aiohttp.ClientConnectorError):
        await chat(client, fleet["d"])


async def test_a_client_that_leaves_aborts_its_request(client, fleet):
    fleet["d"].faults.add("stall", after=2)
    running = asyncio.create_task(chat(client, fleet["d"], stream=True, max_tokens=20_000))
    await until(lambda: not fleet["d"].faults.active)
    running.cancel()
    await until(lambda: fleet["d"].used_blocks() == 0)
    assert fleet["d"].running() == 0


@pytest.mark.parametrize("path", ["/metrics", "/health", "/v1/models", "/kv_event_sources"])
async def test_faults_of_paths_that_do_not_generate_meet_those_alone(client, fleet, path):
    await post(client, fleet["d"], "/sim/faults", {"kind": "status", "status": 503, "path": path})
    assert (await get(client, fleet["d"], "/version"))[0] == 200
    assert [(await get(client, fleet["d"], path))[0] for _ in range(2)] == [503, 200]
    for members in ({}, {"after": 0}):
        await post(client, fleet["d"], "/sim/faults", {"kind": "reset", "count": -1, "path": path, **members})
        with pytest.raises(aiohttp.ClientError):
            await get(client, fleet["d"], path)
        fleet["d"].faults.clear()


@pytest.mark.parametrize("path", ["metrics", "/sim/state", 7])
async def test_faults_of_paths_that_no_request_has_are_refused(client, fleet, path):
    assert (await post(client, fleet["d"], "/sim/faults", {"kind": "status", "path": path}))[0] == 400
