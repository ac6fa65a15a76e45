"""URLs of servers: one spelling for all that mean the same, a reason for what is none."""

import pytest

from ktbridge.eval.arms import parse_arm
from ktbridge.server_api.hosts import api_url, url_from_here


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000/v1"),
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000/v1"),
        ("http://127.0.0.1:8000/v1", "http://127.0.0.1:8000/v1"),
        (" https://h/v1/ ", "https://h/v1"),
        ("https://user:key@h/proxy", "https://user:key@h/proxy/v1"),
        ("http://[::1]:8000", "http://[::1]:8000/v1"),
        ("http://h/v12", "http://h/v12/v1"),
    ],
)
def test_with_or_without_v1(text, url):
    assert api_url(text) == url
    if "@" not in text:  # in an arm the URL follows the last one
        assert parse_arm(f"a=m@{text}").url == url


@pytest.mark.parametrize(
    "text", ["", "127.0.0.1:8000", "ftp://h", "http://", "http://h:0", "http://h:x", "http://[::1",
             "http://h?key=1", "http://h#x"]
)  # fmt: skip
def test_what_is_no_url_is_refused_with_a_reason(text):
    with pytest.raises(ValueError, match=r"\w"):
        api_url(text)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://[::1]:8000"),
        ("::1", "http://[::1]:8000"),
        ("gpu1", "http://gpu1:8000"),
    ],
)
def test_a_server_on_every_address_is_reached_on_this_machine(host, url):
    assert url_from_here(host, 8000) == url
