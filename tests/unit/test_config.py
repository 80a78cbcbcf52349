import pytest

from kvroute.cli.options import describe_settings
from kvroute.config import ConfigError, Settings, load

ENGINE = [("both", "http://127.0.0.1:8100")]


def refused(**arguments: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load(**arguments)  # type: ignore[arg-type]
    return str(caught.value)


def test_later_sources_win_over_earlier_ones(tmp_path):
    file = tmp_path / "kvroute.yaml"
    file.write_text(
        "server: {port: 1111, host: 0.0.0.0}\nconversations: {ttl_seconds: 100}\nendpoints: [{url: http://a:1}]\n"
    )

    from_file = load(file=file)
    with_environment = load(file=file, environment={"KVROUTE_SERVER__PORT": "2222", "PATH": "/bin"})
    with_flag = load(file=file, environment={"KVROUTE_SERVER__PORT": "2222"}, assignments=[("server.port", "3333")])

    assert (from_file.server.port, with_environment.server.port, with_flag.server.port) == (1111, 2222, 3333)
    assert with_flag.server.host == "0.0.0.0"
    assert with_flag.conversations.ttl_seconds == 100


def test_a_variable_with_one_underscore_too_few_is_not_passed_over():
    assert "KVROUTE_SERVER__PORT" in refused(environment={"KVROUTE_SERVER_PORT": "1"}, endpoints=ENGINE)
    assert "no setting server.prot" in refused(environment={"KVROUTE_SERVER__PROT": "1"}, endpoints=ENGINE)


def test_variables_of_the_engine_plugin_are_not_settings():
    load(environment={"KVROUTE_UNSAFE_SKIP_VERIFICATION": "1", "KVROUTE_WHEEL": "x"}, endpoints=ENGINE)


def test_endpoints_given_as_flags_replace_those_of_the_file(tmp_path):
    file = tmp_path / "kvroute.yaml"
    file.write_text("endpoints: [{url: http://a:1}]\n")

    settings = load(file=file, endpoints=[("prefill", "http://p:1/"), ("decode", "http://d:1")])

    assert [(item.role, item.url) for item in settings.endpoints] == [
        ("prefill", "http://p:1"),
        ("decode", "http://d:1"),
    ]
    assert settings.disaggregated


@pytest.mark.parametrize(
    ("endpoints", "words"),
    [
        ([], "at least one engine"),
        ([("both", "http://a:1"), ("both", "http://a:1/")], "listed twice: http://a:1"),
        ([("both", "http://a:1"), ("prefill", "http://b:1")], "cannot be mixed"),
        ([("prefill", "http://a:1")], "at least one engine with role decode"),
        ([("decode", "http://a:1")], "at least one engine with role prefill"),
        ([("both", "a:1")], "http://host:port"),
        ([("both", "ftp://a:1")], "http://host:port"),
        ([("both", "http://user:pass@a:1")], "must not hold a user"),
        ([("both", "http://a:99999")], "1 to 65535"),
        ([("both", "http://a:0")], "1 to 65535"),
        ([("both", "http://a:1?x=y")], "must not hold"),
        ([("both", "http://a b:1")], "endpoints.0.url"),
        ([("both", "http://a:1/%zz")], "endpoints.0.url"),
        ([("both", "http://a:1/é")], "endpoints.0.url"),
        ([("both", "http://é:1")], "endpoints.0.url"),
        ([("both", "http://a:80"), ("both", "HTTP://A/")], "listed twice: http://a"),
    ],
)
def test_a_fleet_that_cannot_work_is_refused_with_the_reason(endpoints, words):
    assert words in refused(endpoints=endpoints)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("server.port", "70000", "server.port"),
        ("server.port", "1.5", "server.port"),
        ("server.port", "-1", "server.port"),
        ("server.max_body_bytes", "0", "server.max_body_bytes"),
        ("timeouts.connect_seconds", "0", "timeouts.connect_seconds"),
        ("timeouts.connect_seconds", ".inf", "timeouts.connect_seconds"),
        ("conversations.ttl_seconds", "-5", "conversations.ttl_seconds"),
        ("conversations.max_entries", "0", "conversations.max_entries"),
        ("conversations.verify", "maybe", "conversations.verify"),
        ("routing.policy", "fastest", "routing.policy"),
        ("server.nothing", "1", "there is no setting server.nothing"),
        ("nothing", "1", "there is no setting nothing"),
        ("server.port.deep", "1", "server.port"),
        ("server.api_keys", "['a b ']", "server.api_keys"),
        ("server.api_keys", "['']", "server.api_keys"),
        ("server.api_keys", "[a, a]", "server.api_keys"),
        ("server.host", '"a\\0"', "server.host"),
        ("server.max_header_bytes", "99999999999999999999", "server.max_header_bytes"),
        ("server.max_event_bytes", "99999999999999999999", "server.max_event_bytes"),
        ("server.keepalive_seconds", "1.0e+300", "server.keepalive_seconds"),
        ("routing.session_tokens", "9" * 400, "routing.session_tokens"),
        ("routing.session_tokens", "9" * 5000, "routing.session_tokens"),
        ("server.host", "2001-99-99", "server.host"),
        ("server.host", "!!timestamp x", "server.host"),
        ("server.host", "[" * 3000, "server.host"),
    ],
)
def test_a_bad_value_names_the_setting(name, value, words):
    assert words in refused(assignments=[(name, value)], endpoints=ENGINE)


@pytest.mark.parametrize("key", ['""', '"a\\nb"', '"é"', '" a"'])
def test_a_key_of_an_engine_that_no_header_can_hold_is_refused_and_not_quoted(tmp_path, key):
    file = tmp_path / "kvroute.yaml"
    file.write_text(f"endpoints: [{{url: http://a:1, api_key: {key}}}]\n", encoding="utf-8")
    text = refused(file=file)
    assert text == "endpoints.0.api_key: must be printable ASCII without surrounding spaces, and not empty"


def test_an_unknown_member_in_the_file_is_refused(tmp_path):
    file = tmp_path / "kvroute.yaml"
    file.write_text("server: {prot: 1}\nendpoints: [{url: http://a:1, rolle: both}]\n")

    words = refused(file=file)

    assert "server.prot: there is no such setting" in words
    assert "endpoints.0.rolle" in words


@pytest.mark.parametrize("text", ["[1, 2]", "just text", "{", "\xff", "a: 2001-99-99"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path, text):
    file = tmp_path / "kvroute.yaml"
    file.write_bytes(text.encode("latin-1"))

    assert str(file) in refused(file=file)


def test_an_empty_file_means_defaults(tmp_path):
    file = tmp_path / "kvroute.yaml"
    file.write_text("")

    assert load(file=file, endpoints=ENGINE).server == Settings.model_fields["server"].default


def test_unverified_reuse_has_to_be_admitted():
    words = refused(assignments=[("conversations.verify", "off")], endpoints=ENGINE)
    assert "allow_wrong_answers: true" in words

    settings = load(
        assignments=[("conversations.verify", "off"), ("conversations.allow_wrong_answers", "true")], endpoints=ENGINE
    )
    assert settings.conversations.verify == "off"


@pytest.mark.parametrize(
    ("assignments", "words"),
    [
        ({"conversations.verify": "off"}, "conversations.verify: off needs allow_wrong_answers: true"),
        ({"signals.max_age_seconds": "0.1"}, "signals.max_age_seconds: must be above scrape_seconds"),
        (
            {"conversations.ttl_seconds": "10", "conversations.unnamed_ttl_seconds": "20"},
            "conversations.unnamed_ttl_seconds: must be at most ttl_seconds",
        ),
        ({"selective_kv.load_policy": "threshold"}, "selective_kv.min_external_reusable_tokens: load_policy threshold"),
        ({"endpoints": "[{url: http://a:1, kv_events_replay: tcp://a:2}]"}, "endpoints.0.kv_events_replay: needs"),
        (
            {"endpoints": "[{url: http://a:1, kv_events: 'tcp://*:2'}, {url: http://b:1, kv_events: tcp://a:2}]"},
            "endpoints.1.kv_events: tcp://a:2 is listed twice",
        ),
        (
            {
                "endpoints": "[{url: http://a:1, kv_events: 'tcp://*:2', data_parallel_size: 4}, "
                "{url: http://a:2, kv_events: 'tcp://*:5'}]"
            },
            "endpoints.1.kv_events: tcp://a:5 is listed twice",
        ),
    ],
)
def test_a_rule_of_a_section_names_the_setting_that_it_is_about(assignments, words):
    said = refused(assignments=list(assignments.items()), endpoints=() if "endpoints" in assignments else ENGINE)

    assert said.startswith(words)


def test_events_that_cannot_be_heard_name_the_setting(monkeypatch):
    monkeypatch.setattr("kvroute.config.settings.find_spec", lambda _: None)

    assert refused(assignments=[("signals.kv_events", "on")], endpoints=ENGINE).startswith("signals.kv_events: ")


def test_optional_sections_are_described_with_their_members():
    names = [name for name, _, _ in describe_settings()]

    assert {"selective_kv", "selective_kv.load_policy", "selective_kv.max_waiting_requests"} <= set(names)
    assert len(names) == len(set(names))


def test_keys_are_not_shown_by_settings_or_errors():
    settings = load(assignments=[("server.api_keys", "[CANARY]")], endpoints=ENGINE)
    assert "CANARY" not in repr(settings) + settings.model_dump_json()

    assert "CANARY" not in refused(assignments=[("server.api_keys", "['CANARY ']")], endpoints=ENGINE)


def test_every_setting_is_described():
    rows = list(describe_settings())

    assert ("server.port", "8000") in [row[:2] for row in rows]
    assert [name for name, _, meaning in rows if not meaning] == []


@pytest.mark.parametrize(
    "given",
    [
        {"assignments": [("routing.tier_weights", '{"CPU": 0.3}')]},
        {"assignments": [("routing.tier_weights.CPU", "0.3")]},
        {"environment": {"KVROUTE_ROUTING__TIER_WEIGHTS__CPU": "0.3"}},
    ],
)
@pytest.mark.parametrize("below", ["", "CPU: 0.6", "cpu: 0.6"])
def test_tiers_keep_their_weights_unless_they_are_set(tmp_path, given, below):
    file = tmp_path / "kvroute.yaml"
    file.write_text(f"routing: {{tier_weights: {{{below}}}}}\n")

    weights = load(file=file, endpoints=ENGINE, **given).routing.tier_weights
    assert weights == {"GPU": 1.0, "CPU": 0.3, "STORAGE": 0.5}


def test_a_tier_of_another_name_is_weighed_by_it():
    given = [("routing.tier_weights.STORAGE/REMOTE", "0.1"), ("routing.tier_weights.gpu", "0.9")]
    weights = load(endpoints=ENGINE, assignments=given).routing.tier_weights
    assert weights == {"GPU": 0.9, "CPU": 0.8, "STORAGE": 0.5, "STORAGE/REMOTE": 0.1}


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("routing.tier_weights", "GPU=1", "routing.tier_weights: must be a mapping, written {name: value, …}"),
        ("routing.tier_weights", "{cpu: 1, CPU: 1}", "routing.tier_weights: CPU is set twice, in two spellings"),
        ("routing.tier_weights.CPU", "2", "routing.tier_weights.CPU: Input should be less than or equal to 1"),
        ("routing.tier_weights.CPU.x", "1", "there is no setting routing.tier_weights.CPU.x"),
        ("server.api_keys", "k", "server.api_keys: must be a list, written [value, …]"),
        ("server", "3", "server: must be a mapping, written {name: value, …}"),
    ],
)
def test_a_value_of_the_wrong_shape_is_refused_with_how_to_write_it(name, value, words):
    assert words in refused(assignments=[(name, value)], endpoints=ENGINE)
