"""What is wrapped is checked first; what differs stays off, loudly, and the engine starts all the same."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import kvroute.vllm_plugin as plugin
from kvroute.vllm_plugin import scheduler, wraps
from kvroute.vllm_plugin.endpoint import FEATURES, ROUTE, Plugin, describe
from kvroute.vllm_plugin.wraps import CannotWrapError, Status, Target, wraps_for

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

WRAPS = wraps_for("0.32.0")


class Scheduler:
    def request_finished(self, request: Any, block_ids: Any) -> Any: ...
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: Any) -> Any: ...


class Chat:
    async def chat_completion_stream_generator(  # noqa: PLR0917 - vLLM's signature
        self,
        request: Any,
        result_generator: Any,
        request_id: str,
        model_name: str,
        conversation: Any,
        tokenizer: Any,
        request_metadata: Any,
        chat_template_kwargs: Any = None,
        mm_token_counts: Any = None,
    ) -> AsyncGenerator[str, None]:
        async for _ in result_generator:
            yield "data: {}\n\n"
        yield "data: [DONE]\n\n"


class Completion:
    async def completion_stream_generator(  # noqa: PLR0917 - vLLM's signature
        self,
        request: Any,
        engine_inputs: Any,
        result_generator: Any,
        request_id: str,
        created_time: int,
        model_name: str,
        num_prompts: int,
        tokenizer: Any,
        request_metadata: Any,
    ) -> AsyncGenerator[str, None]:
        async for _ in result_generator:
            yield "data: {}\n\n"
        yield "data: [DONE]\n\n"


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A vLLM 0.32.0 that consists of what the plugin touches, in an engine that names the plugin."""
    package = ModuleType("vllm")
    monkeypatch.setattr(package, "__version__", "0.32.0", raising=False)
    monkeypatch.setitem(sys.modules, "vllm", package)
    for target, owner in (
        (WRAPS.request_finished, type("NixlPullConnectorScheduler", (Scheduler,), dict(vars(Scheduler)))),
        (WRAPS.chat_stream, type("OpenAIServingChat", (Chat,), dict(vars(Chat)))),
        (WRAPS.completion_stream, type("OpenAIServingCompletion", (Completion,), dict(vars(Completion)))),
    ):
        module = ModuleType(target.module)
        setattr(module, target.name.split(".")[0], owner)
        monkeypatch.setitem(sys.modules, target.module, module)
        setattr(package, target.module, module)
    monkeypatch.setattr(wraps, "STATUS", status := Status())
    monkeypatch.setattr("kvroute.vllm_plugin.endpoint.STATUS", status)
    monkeypatch.setenv("VLLM_PLUGINS", "other,kvroute")
    monkeypatch.setenv(plugin.INSTANCE, "")
    monkeypatch.delenv(plugin.INSTANCE)
    return package


def owner(target: Target) -> Any:
    return getattr(sys.modules[target.module], target.name.split(".")[0])


def test_the_supported_release_is_wrapped_once_however_often_it_is_asked_for(vllm: ModuleType) -> None:
    plugin.register()
    wrapped = owner(WRAPS.match_tokens).get_num_new_matched_tokens
    assert wrapped is not Scheduler.get_num_new_matched_tokens
    plugin.register()
    assert owner(WRAPS.match_tokens).get_num_new_matched_tokens is wrapped
    assert wraps.STATUS.on == {"export_digests", "hold", "verify_digests"}
    assert wraps.STATUS.off == {}


@pytest.mark.parametrize("named", ["", "other", "kvroute2"])
def test_an_engine_that_does_not_name_the_plugin_stays_as_it_is(
    vllm: ModuleType, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", named)
    plugin.register()
    assert owner(WRAPS.match_tokens).get_num_new_matched_tokens is Scheduler.get_num_new_matched_tokens
    assert Status() == wraps.STATUS


@pytest.mark.parametrize("version", ["0.28.1", "0.33.0rc1", "1.0", "dev", ""])
def test_an_unknown_release_is_left_alone_loudly(
    vllm: ModuleType, version: str, caplog: pytest.LogCaptureFixture
) -> None:
    vars(vllm)["__version__"] = version
    plugin.register()
    assert owner(WRAPS.match_tokens).get_num_new_matched_tokens is Scheduler.get_num_new_matched_tokens
    assert set(wraps.STATUS.off) == {"export_digests", "hold", "verify_digests"}
    assert "verify_digests is OFF" in caplog.text
    assert "not supported" in caplog.text


def test_only_the_feature_whose_method_differs_is_off(vllm: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    owner(WRAPS.match_tokens).get_num_new_matched_tokens = lambda self, request: None
    plugin.register()
    assert wraps.STATUS.on == {"export_digests", "hold"}
    assert "num_computed_tokens" in wraps.STATUS.off["verify_digests"]
    assert caplog.text.count("OFF") == 1


def test_a_missing_module_is_a_reason_not_an_error(vllm: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, WRAPS.request_finished.module, None)
    plugin.register()
    assert wraps.STATUS.on == set()
    assert "cannot be read" in wraps.STATUS.off["hold"]


def test_switched_off_verification_is_loud_and_advertised(
    vllm: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(scheduler.SKIP_VERIFICATION, "1")
    plugin.register()
    described = describe(engine_config(), "0.32.0")
    assert described["features"]["verify_digests"] is False
    assert "WRONG" in described["off"]["verify_digests"]
    assert "WRONG" in caplog.text


@pytest.mark.parametrize(
    ("nested", "said"),
    [({"bidirectional_kv_xfer": True}, None), ({"bidirectional_kv_xfer": False}, False), (None, False)],
)
def test_a_connector_among_several_that_transfers_both_ways_is_not_denied(
    vllm: ModuleType, nested: dict[str, Any] | None, said: bool | None
) -> None:
    plugin.register()
    nixl: dict[str, Any] = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    if nested is not None:
        nixl["kv_connector_extra_config"] = nested
    several = {"connectors": [{"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}, nixl]}
    config = engine_config(kv_connector="MultiConnector", kv_connector_extra_config=several)
    described = describe(config, "0.32.0")
    assert described["bidirectional_kv_xfer"] is said
    assert not described["features"]["verify_digests"]


def test_the_processes_of_one_engine_share_an_instance_id(vllm: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin.register()
    first = describe(engine_config(), "0.32.0")["instance"]
    plugin.register()
    assert first
    assert describe(engine_config(), "0.32.0")["instance"] == first


def engine_config(**changes: Any) -> Any:
    """The parts of a `VllmConfig` that the route shows."""
    transfer = SimpleNamespace(
        kv_connector="NixlConnector",
        kv_role="kv_producer",
        engine_id="p1",
        kv_connector_extra_config={"bidirectional_kv_xfer": True, "kv_recompute_threshold": 128},
        kv_load_failure_policy="fail",
    )
    parallel = SimpleNamespace(
        tensor_parallel_size=2,
        data_parallel_size=1,
        decode_context_parallel_size=1,
        prefill_context_parallel_size=1,
    )
    for name, value in changes.items():
        setattr(transfer if hasattr(transfer, name) else parallel, name, value)
    cache = SimpleNamespace(block_size=32, enable_prefix_caching=True)
    return SimpleNamespace(kv_transfer_config=transfer, parallel_config=parallel, cache_config=cache)


class App:
    def __init__(self) -> None:
        self.routes: dict[str, Any] = {}

    def add_api_route(self, path: str, endpoint: Any, methods: list[str]) -> None:
        self.routes[path] = endpoint


async def served(config: Any) -> tuple[dict[str, Any], Any]:
    """Run the plugin as vLLM's API server does; what the route answers, and the server's state."""
    state = SimpleNamespace(
        openai_serving_chat=owner(WRAPS.chat_stream)(), openai_serving_completion=owner(WRAPS.completion_stream)()
    )
    app, endpoint = App(), Plugin()
    endpoint.attach_router(app)
    await endpoint.init_state(SimpleNamespace(vllm_config=config), state, SimpleNamespace())  # type: ignore[arg-type]
    return await app.routes[ROUTE](), state


async def test_the_route_tells_what_is_on(vllm: ModuleType) -> None:
    plugin.register()
    answer, _ = await served(engine_config())
    assert answer["features"] == dict.fromkeys(FEATURES, True)
    assert answer["off"] == {}
    assert (answer["engine_id"], answer["block_size"], answer["tp_size"], answer["vllm"]) == ("p1", 32, 2, "0.32.0")
    assert (answer["kv_recompute_threshold"], answer["decoder_kv_blocks_ttl"]) == (128, 480)


async def test_data_parallel_engines_list_the_ids_that_handles_carry(vllm: ModuleType) -> None:
    plugin.register()
    answer, _ = await served(engine_config(data_parallel_size=2))
    assert (answer["engine_id"], answer["engine_ids"]) == (None, ["p1_dp0", "p1_dp1"])
    assert answer["dp_ranks"] is None  # a release without the members that tell


@pytest.mark.parametrize(
    ("change", "ranks"),
    [
        ({}, [0, 1, 2, 3]),
        ({"local_engines_only": True, "data_parallel_index": 2, "data_parallel_size_local": 2}, [2, 3]),
        ({"local_engines_only": True, "data_parallel_index": 3, "data_parallel_size_local": 1}, [3]),
        ({"enable_elastic_ep": True}, None),
    ],
)
async def test_the_route_tells_which_ranks_requests_can_be_sent_to(
    vllm: ModuleType, change: dict[str, Any], ranks: list[int] | None
) -> None:
    plugin.register()
    internal = {
        "data_parallel_size": 4,
        "data_parallel_size_local": 4,
        "data_parallel_index": 0,
        "local_engines_only": False,
        "enable_elastic_ep": False,
    }
    answer, _ = await served(engine_config(**internal | change))
    assert answer["dp_ranks"] == ranks
    assert answer["engine_ids"] == [f"p1_dp{rank}" for rank in ranks or range(4)]


@pytest.mark.parametrize(
    ("change", "off", "reason"),
    [
        ({"kv_connector": "NixlPushConnector"}, {"export_digests", "verify_digests", "hold"}, "NixlPushConnector"),
        ({"kv_connector_extra_config": {}}, {"export_digests", "verify_digests"}, "bidirectional_kv_xfer"),
        ({"decode_context_parallel_size": 2}, {"export_digests", "verify_digests"}, "parallelism"),
    ],
)
async def test_a_setting_that_makes_a_feature_a_no_op_is_named(
    vllm: ModuleType, change: dict[str, Any], off: set[str], reason: str
) -> None:
    plugin.register()
    answer, _ = await served(engine_config(**change))
    assert {feature for feature, on in answer["features"].items() if not on} == off
    assert all(reason in answer["off"][feature] for feature in off)


async def test_an_engine_without_a_connector_still_answers(vllm: ModuleType) -> None:
    plugin.register()
    config = engine_config()
    config.kv_transfer_config = None
    answer, _ = await served(config)
    assert (answer["connector"], answer["engine_id"]) == (None, None)
    assert answer["features"] == {**dict.fromkeys(FEATURES, False), "stream_params": True}


async def test_a_stream_generator_that_differs_is_left_alone(vllm: ModuleType) -> None:
    plugin.register()
    owner(WRAPS.completion_stream).completion_stream_generator = lambda self, request: None
    answer, state = await served(engine_config())
    assert answer["features"]["stream_params"] is False
    assert "completion_stream_generator" in answer["off"]["stream_params"]
    assert "chat_completion_stream_generator" not in vars(state.openai_serving_chat)


async def test_both_stream_generators_send_the_parameters(vllm: ModuleType) -> None:
    plugin.register()
    _, state = await served(engine_config())
    request = SimpleNamespace(kv_transfer_params={"do_remote_decode": True})

    async def outputs() -> AsyncGenerator[Any, None]:
        yield SimpleNamespace(kv_transfer_params={"remote_port": 1})

    chat = state.openai_serving_chat.chat_completion_stream_generator
    completion = state.openai_serving_completion.completion_stream_generator
    for stream in (
        chat(request, outputs(), "id", "model", [], None, None, chat_template_kwargs={}, mm_token_counts={}),
        completion(request, [], outputs(), "id", 7, "model", num_prompts=1, tokenizer=None, request_metadata=None),
    ):
        events = [event async for event in stream]
        assert '"kv_transfer_params":{"remote_port":1}' in events[-2]


def test_importing_the_plugin_imports_neither_vllm_nor_the_gateway() -> None:
    code = (
        "import sys, kvroute.vllm_plugin;"
        "assert not {'vllm', 'aiohttp', 'pydantic', 'kvroute._core', 'torch'} & set(sys.modules), 'too much imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_class_attribute_that_is_no_function_cannot_be_wrapped(vllm: ModuleType) -> None:
    owner(WRAPS.match_tokens).get_num_new_matched_tokens = 7
    with pytest.raises(CannotWrapError):
        wraps.resolve(WRAPS.match_tokens)
