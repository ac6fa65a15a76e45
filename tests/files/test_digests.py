"""Values of fingerprints that are stored: runs, caches and evaluations of earlier versions go on only
while each of them stays what it was."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rawadapter import write_base, write_raw

from ktbridge.adapter import opening
from ktbridge.demo.smollm2 import Copying
from ktbridge.eval.arms import arm_card, parse_arm
from ktbridge.eval.store import request_key
from ktbridge.model.hub import Repository
from ktbridge.model.identity import fingerprint
from ktbridge.recipe import state
from ktbridge.serve.local.plan import fingerprints
from ktbridge.serve.sglang import adapters
from ktbridge.sft.data import cache, records, stream
from ktbridge.sft.resume import _hashes

STORED = {
    "of an arm": "22a33f4fd556ba3f0245ae7c38a3d1f221cd4a64516d9850b0086964c90f8309",
    "of an answer": "6ce53524aa703e9767df4dbac2b645bddaef1a065f9588b5afba0117e8f8cd97",
    "of a repeated answer": "810ce8c4ad2bccf65b759d6b9d13a29d000cdaf49d1f721db0391785140708f0",
    "of what a step wrote": "b9ace300dbc3a2000385d830adbcc27211f93750193324ad2a56689be9c69117",
    "of served models": "a25ae5131d6da7b39e83fbf477bf490a69868f1bd7eec775a2a3ba09cf32e66e",
    "of a served adapter": "207832f4e960be978618567e84eeb387ceef0e0f3c5247eafd6db70fee1741fb",
    "of its conversion": "a1a8f2eca21d6ed22dd17cf2",
    "of an opened adapter": "c8b0cdf3938ee2d68840e6ab",
    "of a streamed file": "c495b2d60ad41e5f38a66fa66a2cd6d557fc31de773b97afc79d8d4ea6c0f8bc",
    "of kept rows": "92486982ba765035458141283b27f0b180613eab95b1b8af8a398cbc00fcf737",
    "of the Hub's rows": "e8eb1b46cb3916742640e05f6180413449d7956208dc48d11eacfa4745c148ab",
    "of a mixture": "b1ae1a7ab2620d4f23ef725ba2f68516ac42ecc97f7d9d1f1c58f1aedfe76998",
    "of a base's files": "a2a8cf74bc1b618849dd9bdf7fd01ff4a472fd1c2d908ea77d0b5e2dde823806",
    "of a base's tensors": "bdcfad84781bfbcb37655b49f0788b8c8bab31907520f55a745753efa5c66227",
    "of a base's values": "3bff4639db902c76093396a9f7859eebaa0da2a9007afcd786cda45237b51f1f",
}


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A base model, an adapter and other files whose bytes never change."""
    monkeypatch.chdir(tmp_path)
    write_base(Path("base"))
    write_raw(Path("raw"), layers=(0, 1), base_model="org/base")
    Path("tree/inner").mkdir(parents=True)
    Path("tree/inner/small.txt").write_text("é\n")
    Path("tree/.hidden").write_text("not counted")
    Path("tree/large.bin").write_bytes(bytes(range(256)) * 12_000)
    return tmp_path


def values(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    arm = parse_arm("full=S:neko@http://host:1")
    request: Any = {"messages": [{"role": "user", "content": "Größe?"}], "seed": 1}
    monkeypatch.setattr(state, "__version__", "1")
    plan = SimpleNamespace(
        model=Path("base"),
        expert=Path("raw"),
        nonexpert=(("raw", Path("raw")),),
        experts=(),
        bf16=False,
        arms=(SimpleNamespace(name="full", expert=True, expert_of=None, nonexpert="raw"),),
    )
    source = adapters.AdapterSource("full", Path("raw"), "raw", (0, 1), True, None, "d" * 64)  # type: ignore[arg-type]
    rows = records.HubRows(Repository("org/rows", None, "dataset"), folder="é")
    base = fingerprint("base")
    return {
        "of an arm": arm_card(arm, {"id": "S:neko", "root": "é"}, {"temperature": 0})["fingerprint"],
        "of an answer": request_key("f", request),
        "of a repeated answer": request_key("f", request, 1),
        "of what a step wrote": state.digest_inputs(["a", "é"], [Path("tree"), Path("base/config.json")]),
        "of served models": fingerprints(cast(Any, plan))["full"],
        "of a served adapter": adapters._content_digest(Path("raw")),
        "of its conversion": adapters.cached([source], Path()).name,
        "of an opened adapter": opening._key(Path("raw"), "peft", Path("base")),
        "of a streamed file": stream._digest_samples(Path("tree/large.bin")),
        "of kept rows": cache._hash_files([("é", Path("tree/inner/small.txt"))]),
        "of the Hub's rows": rows._record.stem,
        "of a mixture": Copying().digest(),
        "of a base's files": _hashes(Path("base"), ("config.json", "none.json"))["config.json"],
        "of a base's tensors": str(base.tensors_sha256),
        "of a base's values": str(base.values_sha256),
    }


def test_stored_fingerprints_keep_their_values(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert values(monkeypatch) == STORED
