"""What `verify` sends to SGLang, against the request types, routes and registry of its wheels themselves.

Wheels are read wherever they are at hand; `make test-engine` fetches them.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator

import fastapi
import pytest
from realengine import FIRST_MERGED, MERGED, SPLIT, wheel_path
from sglangapi import MISSING, SglangApi

from ktbridge.errors import KtbridgeError
from ktbridge.server_api.client import Refused
from ktbridge.server_api.served_names import read_models
from ktbridge.verify.logprobs import LogprobClient
from ktbridge.verify.protocols import SglangGenerate
from ktbridge.verify.reload import AdapterLoader
from ktbridge.verify.several import find_base, find_names

ADAPTERS = {"a": "/adapters/a", "b": "/adapters/b"}
Read = Callable[[str], str]


@pytest.fixture(scope="module", params=["0.5.3", SPLIT, FIRST_MERGED, MERGED])
def read(request: pytest.FixtureRequest) -> Iterator[Read]:
    with zipfile.ZipFile(wheel_path(request.param)) as archive:
        yield lambda name: archive.read(name).decode()


def test_adapters_are_exchanged_and_put_back(read: Read) -> None:
    api = SglangApi(read, ADAPTERS)
    with api.served() as url:
        client = LogprobClient(url)
        entries = client.entries()
        models = read_models(entries)
        names = find_names(ADAPTERS, entries, models)
        assert names == {"a": "tiny:a", "b": "tiny:b"}
        assert find_base(list(names.values()), models) == "tiny"
        loader = AdapterLoader(client, entries, list(names.values()))
        assert loader.roots == {"tiny:a": "/adapters/a", "tiny:b": "/adapters/b"}
        with loader.restoring():
            for model in names.values():
                loader.unload(model)
            assert list(client.entries()) == ["tiny"]
            loader.load("tiny:a", "/adapters/b")
            loader.load("tiny:b", "/adapters/a")
            assert {n: e["root"] for n, e in client.entries().items()} == {
                "tiny": "tiny",
                "a": "/adapters/b",
                "b": "/adapters/a",
            }
        assert {n: e["root"] for n, e in client.entries().items()} == {"tiny": "tiny", **ADAPTERS}
    loads = [one for one in api.asked if hasattr(one, "lora_path")]
    assert {(one.lora_name, one.lora_path) for one in loads} == {
        (name, path) for name in ADAPTERS for path in ADAPTERS.values()
    }
    # Prefixes of a former adapter aren't taken for the new one's: each loading has an id of its own.
    assert len({one.lora_id for one in loads}) == len(loads) == 4


def test_a_refusal_is_told_and_undone(read: Read) -> None:
    def fail(loader: AdapterLoader) -> None:
        with loader.restoring():
            loader.unload("tiny:a")
            loader.load("tiny:a", MISSING)

    with SglangApi(read, ADAPTERS).served() as url:
        client = LogprobClient(url)
        loader = AdapterLoader(client, client.entries(), ["tiny:a"])
        with pytest.raises(Refused) as caught:
            fail(loader)
        assert (caught.value.status, caught.value.reason) == (400, f"Failed to load {MISSING}")
        assert client.entries()["a"]["root"] == "/adapters/a"


def test_a_static_adapter_is_never_touched(read: Read) -> None:
    """With an expert LoRA of KTransformers in it, the engine lets nobody load or unload."""
    api = SglangApi(read, {"a": "/adapters/a"}, static="a")
    if "get_static_kt_lora_ref" not in api.names:
        pytest.skip("this version has no adapter of both halves")
    with api.served() as url:
        client = LogprobClient(url)
        loader = AdapterLoader(client, client.entries(), ["tiny:a"])
        with pytest.raises(KtbridgeError) as caught, loader.restoring():
            loader.unload("tiny:a")
        assert "statically paired with adapter 'a'" in caught.value.sentence
        assert "leave out --reload" in (caught.value.next_step or "")
    assert api.asked == []


def test_logprobs_are_asked_for_in_its_words(read: Read) -> None:
    api = SglangApi(read, ADAPTERS)
    asked_type = api.names["GenerateReqInput"]

    async def generate(obj: object, request: fastapi.Request) -> dict[str, object]:
        api.asked.append((obj, await request.json()))
        return {}

    generate.__annotations__["obj"] = asked_type
    api.app.add_api_route("/generate", generate, methods=["POST"])
    protocol = SglangGenerate(str, 9)
    with api.served() as url:
        body = protocol.request("tiny:b", [3, 4, 5])
        LogprobClient(url).ask(protocol.path, body, native=protocol.native)
    ((asked, given),) = api.asked
    assert asked_type.__dataclass_fields__.keys() >= given.keys()
    assert {name: getattr(asked, name) for name in given} == given
    assert (asked.input_ids, asked.lora_path) == ([3, 4, 5], "b")
    assert (asked.return_logprob, asked.logprob_start_len) == (True, 0)
