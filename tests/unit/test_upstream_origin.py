from __future__ import annotations

import pytest

from kvroute.upstream import Origin, Timeouts, forward_headers
from kvroute.upstream.headers import request_head


@pytest.mark.parametrize(
    ("url", "origin", "authority"),
    [
        ("http://10.0.0.1:8100", Origin("10.0.0.1", 8100), "10.0.0.1:8100"),
        ("http://engine-0.pods.svc.cluster.local", Origin("engine-0.pods.svc.cluster.local", 80), None),
        ("https://engine/", Origin("engine", 443, tls=True), "engine"),
        ("https://engine:8443/a/b/", Origin("engine", 8443, True, "/a/b"), "engine:8443"),
        ("http://[fe80::1]:8000", Origin("fe80::1", 8000), "[fe80::1]:8000"),
        ("HTTP://Engine:80", Origin("engine", 80), "engine"),
    ],
)
def test_urls_of_engines(url: str, origin: Origin, authority: str | None) -> None:
    assert Origin.parse(url) == origin
    assert origin.authority == (authority or origin.host)
    assert Origin.parse(origin.url) == origin


@pytest.mark.parametrize(
    "url",
    [
        "",
        "engine:8000",
        "ftp://engine",
        "http://",
        "http://:8000",
        "http://user:secret@engine",
        "http://engine:0",
        "http://engine:65536",
        "http://engine:x",
        "http://engine/?a=1",
        "http://engine/#f",
        "http://engine/a b",
        "http://engine\r\nX: y",
        "http://-bad-",
        "http://[fe80::zz]",
        "http://a..b",
    ],
)
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(ValueError, match=r"engine's URL|port 0") as caught:
        Origin.parse(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("name", ["connect", "first_byte", "idle"])
def test_times_must_be_positive(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        Timeouts(**{name: 0.0})


def test_the_head_of_a_request() -> None:
    origin = Origin.parse("http://e:81/prefix")
    assert request_head(origin, "POST", "/v1/x?a=b", [(b"A", b"\xe9")], 0) == (
        b"POST /prefix/v1/x?a=b HTTP/1.1\r\nHost: e:81\r\nA: \xe9\r\nContent-Length: 0\r\n\r\n"
    )
    assert b"Content-Length" not in request_head(origin, "GET", "/", [], 0)


@pytest.mark.parametrize(
    ("target", "field"),
    [
        ("/a b", (b"A", b"")),
        ("/a\r\n", (b"A", b"")),
        ("x", (b"A", b"")),
        ("/\u00e9", (b"A", b"")),
        ("/", (b"A\r", b"")),
        ("/", (b"", b"")),
        ("/", (b"A b", b"")),
        ("/", (b"A", b"1\r\nB: 2")),
    ],
)
def test_nothing_leaves_its_line(target: str, field: tuple[bytes, bytes]) -> None:
    with pytest.raises(ValueError, match=r"request target|a header field"):
        request_head(Origin("e", 80), "GET", target, [field], 0)


def test_the_fields_that_go_on() -> None:
    fields = [
        (b"Host", b"public"),
        (b"Connection", b"X-Hop , close"),
        (b"x-hop", b"1"),
        (b"Content-Length", b"3"),
        (b"Expect", b"100-continue"),
        (b"Authorization", b"Bearer s"),
        (b"X-KV-Cache-Source-Host-Port", b"h:1"),
        (b"X-Gateway-Destination-Endpoint", b"h:1"),
        (b"X-A", b"1"),
        (b"x-a", b"1"),
        (b"X-A", b"2"),
    ]
    kept = [(b"X-A", b"1"), (b"X-A", b"2"), (b"Accept-Encoding", b"identity")]
    assert forward_headers(fields) == [(b"Authorization", b"Bearer s"), *kept]
    assert forward_headers(fields, drop={b"authorization"}) == kept
