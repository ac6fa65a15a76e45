"""`ktbridge verify --adapter NAME=DIR …` against the embedded engine with several adapters, right and faulty.

All over HTTP, to a process of its own (``faultyserver.py``).
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest
from findings import codes, placed
from tinyserver import ASCII, ready_document, run_verify, save_adapter, save_model

from ktbridge.adapter import open_adapter
from ktbridge.errors import KtbridgeError, ProblemsError, UsageError
from ktbridge.server_api.client import OpenAIClient
from ktbridge.server_api.served_names import read_models
from ktbridge.verify.logprobs import LogprobClient
from ktbridge.verify.reload import AdapterLoader
from ktbridge.verify.run import verify
from ktbridge.verify.several import find_base, find_names, verify_several

SCRIPT = Path(__file__).with_name("faultyserver.py")
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def lettered(tmp_path_factory):
    """A base whose tokens are all whole characters, so that texts give ids of generated tokens away."""
    return save_model(tmp_path_factory.mktemp("several") / "base", 0, ASCII)


@pytest.fixture(scope="module")
def pair(lettered):
    root = lettered.parent
    return {n: save_adapter(root / n, lettered, seed=7 + i) for i, n in enumerate("ab")}


class Served:
    """A server process; ``verify`` plants a fault in it first."""

    def __init__(self, warm, base: Path, pair: dict[str, Path]) -> None:
        self._warm, self._base, self._pair = warm, base, pair
        self.start()

    def start(self) -> None:
        named = [f"{name}={path}" for name, path in self._pair.items()]
        self.process = self._warm.start(str(SCRIPT), self._base, *named, OMP_NUM_THREADS="1")
        self.url = ready_document(self.process)["base_url"]

    def end(self) -> None:
        self.process.kill()
        self.process.communicate(20)

    def wait_for_end(self) -> None:
        while self.process.poll() is None:  # its socket goes before it does
            time.sleep(0.05)

    def plant(self, fault: str, engine: str = "ktbridge") -> None:
        if self.process.poll() is not None:
            self.end()
            self.start()
        OpenAIClient(self.url).ask("/fault", {"name": fault, "engine": engine}, native=True)

    def verify(self, fault: str = "", engine: str = "ktbridge", **options):
        self.plant(fault, engine)
        adapters = {n: open_adapter(path, base_model=self._base) for n, path in self._pair.items()}
        return verify_several(LogprobClient(self.url), adapters, str(self._base), **options)

    def roots(self) -> dict[str, str]:
        """Where the server has each name's adapter from."""
        return {name: one["root"] for name, one in OpenAIClient(self.url).entries().items()}


@pytest.fixture(scope="module")
def served(warm, lettered, pair):
    server = Served(warm, lettered, pair)
    yield server
    server.end()


def wrong(result) -> dict[str, set[str]]:
    """Names that were not as expected, by stage."""
    found: dict[str, set[str]] = {}
    for row in result.rows:
        if not row.as_expected:
            found.setdefault(row.stage, set()).add(row.model)
    return found


@pytest.mark.slow
def test_each_name_is_its_own_adapter(served):
    result = served.verify(repeat=2)
    assert (result.ok, result.problems) == (True, ())
    assert {n.model: n.verdict for n in result.names} == dict.fromkeys(("tiny:a", "tiny:b"), "applied")
    assert result.columns == ("base", "a", "b")
    stages = [
        ("before", ["base"]), ("alone", "ab"), ("together", ["base", *"ab"]),
        ("generating together", ["base", *"ab"]), ("after", ["base"]),
    ]  # fmt: skip
    assert [(r.stage, r.model, r.answers_as) for r in result.rows] == [
        (stage, f"tiny:{name}", name) for stage, names in stages for name in names
    ]
    for row in result.rows:
        others = [away for column, away in row.distances.items() if column != row.expected]
        assert row.distances[row.expected] < 0.1 * min(others)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "code", "verdicts", "where"),
    [
        ("wrong", "KTV020", {"a": "another adapter", "b": "applied"}, {"alone": {"tiny:a"}}),
        ("exchanged", "KTV020", {"a": "another adapter", "b": "another adapter"},
         {"alone": {"tiny:a", "tiny:b"}}),
        ("base-after", "KTV021", {"a": "applied", "b": "applied"}, {"after": {"tiny:base"}}),
        ("base-among", "KTV021", {"a": "applied", "b": "applied"}, {"together": {"tiny:base"}}),
        ("mixed", "KTV022", {"a": "applied", "b": "applied"}, {"together": {"tiny:b"}}),
    ],
)  # fmt: skip
def test_faults_are_named(served, fault, code, verdicts, where):
    result = served.verify(fault)
    assert not result.ok
    assert codes(result) == {code}
    assert {n.name: n.verdict for n in result.names} == verdicts
    found = wrong(result)
    assert where.items() <= found.items()
    assert "before" not in found
    if fault == "exchanged":
        reasons = " ".join(name.reason for name in result.names)
        assert reasons.count("the two are exchanged") == 2
    if fault.startswith("base") or fault == "mixed":
        assert "alone" not in found


@pytest.mark.slow
def test_a_scale_that_is_a_tenth_off_is_not_applied(served, pair, lettered, tmp_path):
    """One served name is held against an adapter of another alpha."""
    served.plant("")
    shutil.copytree(pair["a"], tmp_path / "a")
    config, manifest = (tmp_path / "a" / f"{name}.json" for name in ("adapter_config", "kt_adapter_manifest"))
    told = json.loads(config.read_text())
    config.write_text(json.dumps({**told, "lora_alpha": told["lora_alpha"] / 1.1}))
    told = json.loads(manifest.read_text())
    told["lora"]["alpha"] /= 1.1
    manifest.write_text(json.dumps(told))
    adapters = {n: open_adapter(p, base_model=lettered) for n, p in {**pair, "a": tmp_path / "a"}.items()}
    result = verify_several(LogprobClient(served.url), adapters, str(lettered))
    assert {n.name: n.verdict for n in result.names} == {"a": "wrong scale", "b": "applied"}
    assert codes(result, "error") == {"KTV020"}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_names_are_exchanged_and_put_back(served, engine):
    result = served.verify("", engine, reload=True)
    assert result.ok, result.problems
    assert result.reloaded
    again = {(r.stage, r.model, r.generated): r.answers_as for r in result.rows}
    base = {"vllm": "tiny:base", "sglang": "tiny"}[engine]
    assert again["adapters unloaded", base, False] == "base"
    for generated in (True, False):
        assert again["names exchanged", "tiny:a", generated] == "b"
        assert again["names exchanged", "tiny:b", generated] == "a"
        assert again["put back", "tiny:a", generated] == "a"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "where"),
    [
        ("stale", {"names exchanged": {"tiny:a", "tiny:b"}}),
        ("stale-cache", {"names exchanged": {"tiny:a", "tiny:b"}}),
        ("base-loaded", {"before": {"tiny:base"}, "put back": {"tiny:base"}}),
    ],
)
def test_faults_of_loading_are_named(served, fault, where):
    result = served.verify(fault, "vllm", reload=True)
    found = wrong(result)
    assert where.items() <= found.items()
    assert "adapters unloaded" not in found
    if fault == "base-loaded":
        steps = {item.next_step for item in result.problems if item.code == "KTV021"}
        assert steps == {"serve the base alone: it is right only while no adapter is loaded"}
    else:
        assert codes(result) == {"KTV023"}
        stale = [r for r in result.rows if r.stage == "names exchanged" and not r.as_expected]
        assert {(r.model, r.answers_as) for r in stale} == {("tiny:a", "a"), ("tiny:b", "b")}
        assert {r.generated for r in stale} == ({True} if fault == "stale-cache" else {True, False})


def own_adapters(served, pair) -> bool:
    """Whether each name has its own adapter, and the base is there."""
    roots = {f"tiny:{name}": str(path) for name, path in pair.items()}
    return served.roots() == roots | {"tiny:base": "tiny:base"}


@pytest.mark.slow
def test_adapters_come_back_from_a_failed_exchange(served, pair):
    with pytest.raises(KtbridgeError, match="no adapter in"):
        served.verify("unloadable", "vllm", reload=True)
    assert own_adapters(served, pair)


def test_whatever_a_loader_took_away_comes_back(served, pair):
    """The same without references: what verify exchanges adapters by, against the server itself."""
    served.plant("unloadable", "vllm")
    client = OpenAIClient(served.url)
    loader = AdapterLoader(client, client.entries(), ["tiny:a", "tiny:b"])

    def exchange():
        with loader.restoring():
            loader.unload("tiny:a")
            loader.unload("tiny:b")
            assert not own_adapters(served, pair)
            loader.load("tiny:a", str(pair["b"]))

    with pytest.raises(KtbridgeError, match="no adapter in"):
        exchange()
    assert own_adapters(served, pair)


def test_a_server_that_cannot_load(served):
    with pytest.raises(KtbridgeError, match="has no API to load adapters"):
        served.verify(reload=True)


@pytest.mark.slow
def test_a_server_that_dies(served):
    with pytest.raises(KtbridgeError, match="does not answer"):
        served.verify("dies")
    served.wait_for_end()
    with pytest.raises(ProblemsError, match="does not answer") as caught:
        served.verify("dies-loading", "sglang", reload=True)
    assert placed(caught) == [("KTV026", "tiny:a"), ("KTV026", "tiny:b")]
    served.wait_for_end()


def test_the_command_prints_the_matrix(served, lettered, pair):
    served.plant("wrong")
    args = [part for name, path in pair.items() for part in ("--adapter", f"{name}={path}")]
    done = run_verify("--server", served.url, *args, "--base-model", str(lettered))
    assert done.exit_code == 1
    assert done.stdout.startswith("tiny:a not as its own adapter\ntiny:a: another adapter - it answers as b")
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["served", "model", "base", "a", "b", "tokens", "should", "be"] in rows
    (alone, together) = [row for row in rows if row[:1] == ["tiny:a"] and len(row) > 6][:2]
    assert alone[5:] == together[5:] == ["a", "(it", "is", "b)"]
    assert done.stderr.count("error KTV020  tiny:a\n") == 1
    served.plant("")
    done = run_verify("--server", served.url, *args, "--base-model", str(lettered), "--json")
    assert done.exit_code == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["ok"], document["base"]) == (True, "tiny:base")
    assert document["columns"] == ["base", "a", "b"]
    assert document["names"][0]["verification"]["verdict"] == "applied"
    assert all(row["as_expected"] for row in document["rows"])


@pytest.mark.slow
def test_mistakes(served, lettered, pair, tmp_path):
    served.plant("")
    narrow = save_adapter(tmp_path / "narrow", lettered, hidden=32)
    a, b = pair.values()
    cases = [
        (2, "the name 'a' is given twice", (f"a={a}", f"a={b}")),
        (2, "is not NAME=DIR", (str(a),)),
        (2, "can't be named 'base'", (f"base={a}",)),
        (2, "two names are the same served model, tiny:a", (f"a={a}", f"tiny:a={b}")),
        (2, "--reload goes with --server URL --adapter NAME=DIR", (str(a), "--model", "tiny:a", "--reload")),
        (2, "several adapters go with", (str(a), "--model", "tiny:a", "--adapter", str(b))),
        (1, "does not list 'c', 'd'; it lists tiny:a, tiny:b, tiny:base", (f"c={a}", f"d={b}")),
        (1, "nowhere", (f"a={a}", f"b={tmp_path / 'nowhere'}")),
        (1, "does not fit the base model", (f"a={a}", f"b={narrow}")),
    ]  # fmt: skip
    for code, words, given in cases:
        args = [part for each in given for part in (["--adapter", each] if "=" in each else [each])]
        if args[0] != "--adapter":
            args = ["--adapter", *args]
        done = run_verify("--server", served.url, *args, "--base-model", str(lettered))
        assert done.exit_code == code, (words, done.stderr)
        assert words in done.stderr
        assert "Traceback" not in done.stderr
        assert done.stdout == ""


@pytest.mark.slow
def test_adapters_that_cannot_be_told_apart(served, lettered, pair):
    """The same adapter under two names: each answers rightly, and that proves nothing."""
    served.plant("wrong")
    twice = {name: open_adapter(pair["b"], base_model=lettered) for name in "ab"}
    result = verify_several(LogprobClient(served.url), twice, str(lettered))
    assert not result.ok
    assert {*placed(result)} == {("KTV024", "a and b")}


def test_damaged_adapters_are_no_reference(lettered, pair, tmp_path):
    """Before a server is asked."""
    nobody = "http://127.0.0.1:9"
    for name, path in pair.items():
        file = shutil.copytree(path, tmp_path / name) / "fused_expert_lora.safetensors"
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    with pytest.raises(ProblemsError, match="does not match its manifest") as caught:
        verify(nobody, "m", str(tmp_path / "a"), str(lettered))
    assert codes(caught) == {"KTB012"}
    adapters = {name: open_adapter(tmp_path / name, base_model=lettered) for name in pair}
    with pytest.raises(ProblemsError, match="do not match their manifests") as caught:
        verify_several(LogprobClient(nobody), adapters, str(lettered))
    assert len(placed(caught)) == 2


def test_names_and_base_in_the_lists_of_engines():
    def listed(engine, base):
        return {
            base: {"owned_by": engine, "root": base, "parent": None},
            "a": {"owned_by": engine, "root": "d/a", "parent": base},
        }

    for engine, served in (("vllm", "a"), ("sglang", "m:a")):
        entries = listed(engine, "m")
        models = read_models(entries)
        assert find_names({"a": 0}, entries, models) == {"a": served}
        assert find_base([served], models) == "m"
    assert find_names({"m:a": 0}, entries, models) == {"m:a": "m:a"}
    # With an expert LoRA in every request SGLang-KT has no base.
    assert find_base(["m:a"], read_models(entries, "expert")) is None
    assert find_base(["x"], read_models({name: {"owned_by": "other"} for name in "xy"})) is None
    with pytest.raises(UsageError):
        find_names({"a": 0, "m:a": 0}, entries, models)
