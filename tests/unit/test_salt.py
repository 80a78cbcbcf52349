import pytest

from kvroute._core import Body
from kvroute.kv.salt import SaltError, cache_salt


@pytest.mark.parametrize(
    ("raw", "salt"),
    [
        (b"{}", None),
        (b'{"cache_salt": null}', None),
        (b'{"cache_salt": "a\\u00e9"}', "aé"),
        (b'{"cache_salt": ""}', ""),
    ],
)
def test_a_salt_is_a_text_or_not_there(raw, salt):
    assert cache_salt(Body.scan(raw)) == salt


@pytest.mark.parametrize("value", [b'"\\ud83d"', b"7", b"true", b'["s"]', b"1e999"])
def test_any_other_is_not_known(value):
    with pytest.raises(SaltError):
        cache_salt(Body.scan(b'{"cache_salt": %b}' % value))
