"""From facts written down to an argv: layouts, versions, wishes, flags, machines."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from launchfacts import AMX, GIB, GPUS, facts_for
from rawadapter import write_config
from waiting import wait_for

from ktbridge.adapter import engines
from ktbridge.adapter.manifest import MANIFEST_FILE
from ktbridge.errors import ProblemsError
from ktbridge.machine import Gpu, NumaNode
from ktbridge.serve.request import SglangRequest
from ktbridge.serve.sglang.adapters import Conversion, cached, convert, is_intact, read_sources
from ktbridge.serve.sglang.facts import Installed, LaunchFacts, Weights, parser_flags, stored_format
from ktbridge.serve.sglang.launch import Launch, plan_threads
from ktbridge.serve.sglang.logs import CAUSES, Pump, explain_failure, readable
from ktbridge.serve.sglang.preflight import plan_launch


@pytest.fixture
def facts_of(model: Path) -> Any:
    """facts_of(**changes): a good machine and a model, nothing read but config.json."""

    def facts_of(**changes: Any) -> LaunchFacts:
        return facts_for(model, **{"model_path": Path("/models/tiny")} | changes)

    return facts_of


@pytest.fixture
def make(model: Path, adapters: dict[str, Path], facts_of: Any) -> Any:
    """make(version, layouts, **request fields): the plan on a good machine, unless facts say else."""

    def make(version: str = "0.7.2", given: str = "raw", facts: dict | None = None, **fields: Any) -> Launch:
        options: dict[str, Any] = {"raw": {"adapters": {"neko": str(adapters["raw"])}}}
        options["expert"] = {"expert_adapter": str(adapters["expert"])}
        options["nonexpert"] = {"nonexpert_adapters": {"neko": str(adapters["nonexpert"])}}
        options["merged"] = {"merged_adapters": {"neko": str(adapters["merged"])}}
        for name in given.split():
            fields = {**options[name], **fields}
        request = SglangRequest(model=str(model), **fields)
        sources, problems = read_sources(request)
        found = facts_of(
            installed=Installed("/opt/engine/bin/python", version, version),
            model_path=model,
            sources=sources,
            source_problems=tuple(problems),
            **(facts or {}),
        )
        return plan_launch(request, found)

    return make


def after(argv: tuple[str, ...], flag: str) -> str:
    return argv[argv.index(flag) + 1]


def errors(made: Launch) -> list[str]:
    return [f"{p.code} {p}" for p in made.problems if p.severity == "error"]


@pytest.mark.parametrize(
    ("version", "given", "layout", "models", "made"),
    [
        ("0.6.4", "raw", "split", ["tiny", "tiny:neko"], ["expert", "nonexpert"]),
        ("0.6.4", "expert nonexpert", "split", ["tiny", "tiny:neko"], []),
        ("0.6.4", "merged", "split", ["tiny", "tiny:neko"], ["expert", "nonexpert"]),
        ("0.7.0.post3", "raw", "split", ["tiny", "tiny:neko"], ["expert", "nonexpert"]),
        ("0.7.0.post4", "raw", "merged", ["tiny:neko"], ["merged"]),
        ("0.7.2", "raw", "merged", ["tiny:neko"], ["merged"]),
        ("0.7.2", "expert nonexpert", "merged", ["tiny:neko"], ["merged"]),
        ("0.7.2", "merged", "merged", ["tiny:neko"], []),
        ("0.7.2", "expert", "expert", ["tiny"], []),
        ("0.7.2", "nonexpert", "nonexpert", ["tiny", "tiny:neko"], []),
        ("0.6.2", "nonexpert", "nonexpert", ["tiny", "tiny:neko"], []),
        ("0.7.2", "", "base", ["tiny"], []),
    ],
)
def test_each_version_gets_its_layout(make, version, given, layout, models, made) -> None:
    done = make(version, given)
    assert errors(done) == []
    assert (done.layout, list(done.models)) == (layout, models)
    assert [step.layout for step in done.conversions] == made
    argv = done.argv
    assert argv[:3] == ("/opt/engine/bin/python", "-m", "sglang.launch_server")
    assert ("--kt-expert-lora-path" in argv) == (layout in ("expert", "split"))
    assert ("--lora-paths" in argv) == (layout in ("nonexpert", "split", "merged"))
    assert ("SGLANG_KT_LORA_CACHE_DIR" in done.environment) == (layout == "merged")
    assert ("--disable-cuda-graph" in argv) == (layout in ("expert", "split", "merged"))
    assert after(argv, "--kt-num-gpu-experts") == "0"
    assert (after(argv, "--kt-cpuinfer"), after(argv, "--kt-threadpool-count")) == ("62", "2")
    assert done.ready.layers == ((0, 1) if "--disable-cuda-graph" in argv else ())
    assert done.ready.adapters == (("neko",) if "--lora-paths" in argv else ())
    if made:
        assert all(str(step.target).startswith("/cache/") for _, step in done.served)
    flags = [word for word in argv if word.startswith("--")]
    assert len(set(flags)) == len(flags)


@pytest.mark.parametrize(
    ("version", "given", "fields", "words"),
    [
        ("0.7.2", "raw", {"layout": "split"}, "expected sglang-kt 0.6.3 to 0.7.0.post3"),
        ("0.6.2", "raw", {}, "expected sglang-kt 0.6.3 to 0.7.0.post3, 0.7.0.post4, 0.7.2"),
        ("0.7.2", "expert", {"layout": "merged"}, "needs a non-expert LoRA"),
        ("0.7.2", "raw merged", {}, "both bring an expert LoRA"),
        ("0.6.4", "raw", {"facts": {"stored": "fp8"}}, "expected sglang-kt 0.7.0.post4, 0.7.2"),
        ("0.7.0.post4", "raw", {"facts": {"stored": "mxfp4"}}, "expected sglang-kt 0.7.2"),
        ("0.7.2", "raw", {"facts": {"stored": None}}, "--kt-method"),
    ],
)
def test_what_a_version_does_not_grant(make, version, given, fields, words) -> None:
    refused = [f"{p} {p.next_step}" for p in make(version, given, **fields).problems if p.code == "KTB952"]
    assert any(words in text for text in refused), refused


def test_a_new_version_with_another_flag_is_one_row(make, monkeypatch) -> None:
    flag, newest = "--kt-expert-lora-dir", engines.contracts_of(engines.ENGINE)[-1]
    row = replace(newest, first="0.7.3", last="0.7.3", flags={"--kt-expert-lora-path": flag})
    monkeypatch.setattr(engines, "CONTRACTS", (*engines.CONTRACTS, row))
    done = make("0.7.3", "expert")
    assert errors(done) == []
    assert after(done.argv, flag) == str(done.choice.expert.path)
    assert "--kt-expert-lora-path" not in done.argv
    assert done.as_dict()["contract"] == "0.7.3"
    assert flag not in make("0.7.2", "expert").argv


def test_several_nonexpert_adapters_need_the_split_contract(make, adapters) -> None:
    two = {"nonexpert_adapters": {name: str(adapters["nonexpert"]) for name in ("a", "b")}}
    fine = make("0.6.4", "expert", **two)
    assert errors(fine) == []
    assert fine.argv[fine.argv.index("--lora-paths") + 1 :][:2] == tuple(
        f"{name}={adapters['nonexpert']}" for name in ("a", "b")
    )
    assert after(fine.argv, "--max-loras-per-batch") == "3"
    assert "several non-expert adapters need both" in " ".join(errors(make("0.7.2", "expert", **two)))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--kt-num-gpu-experts 4", "CPU experts only"),
        ("--kt-gpu-experts-ratio=0.1", "CPU experts only"),
        ("--kt-gpu-prefill-token-threshold 400", "bypasses"),
        ("--kt-enable-dynamic-expert-update", "moves experts"),
        ("--max-running-requests 1", "no request ever"),
        ("--speculative-algorithm EAGLE", "NGRAM"),
        ("--pp-size 2", "tensor parallel only"),
        ("--node-rank 1", "the first node alone"),
        ("--lora-backend csgmv", "triton"),
        ("--log-level warning", "logged at level info"),
        ("--kt-method LLAMAFILE", "AMXBF16, BF16"),
        ("--config x.yaml", "can't be checked"),
        ("--encoder-only", "CVE-2026-3060"),
        ("--port 1", "use --port before --"),
        ("--tp-size 2", "use --tp-size before --"),
        ("--api-key x", "KTBRIDGE_API_KEY"),
        ("--lora-paths a=b", "--adapter NAME=DIR"),
        ("--kt-num-gpu 4", "is short for --kt-num-gpu-experts"),
        ("--context-length 1 --context-length 2", "given twice"),
        ("stray", "belongs to no flag"),
    ],
)
def test_flags_that_contradict(make, flags, words) -> None:
    found = [
        f"{p} {p.next_step}"
        for p in make(flags=tuple(flags.split())).problems
        if p.code in ("KTB953", "KTB954")
    ]
    assert len(found) == 1
    assert words in found[0]
    assert flags.split()[0].partition("=")[0] in found[0]


def test_flags_that_override(make) -> None:
    flags = "--max-running-requests 64 --kt-method bf16 --kt-gpu-prefill-token-threshold 0"
    done = make(flags=tuple(flags.split()))
    assert errors(done) == []
    assert " ".join(done.argv).endswith(flags)
    assert done.argv.count("--max-running-requests") == done.argv.count("--kt-method") == 1
    several = "--nnodes 2 --node-rank 0 --dist-init-addr 10.0.0.1:5000"
    assert errors(make(flags=tuple(several.split()))) == []
    # Without an expert LoRA nothing forbids experts on the GPU.
    assert errors(make(given="nonexpert", flags=("--kt-num-gpu-experts", "4"))) == []
    quantized = make(flags=("--kt-method", "AMXINT8"))
    assert "KTB953 --kt-weight-path" in errors(quantized)[0]
    weights = ("--kt-weight-path", "/weights")
    assert errors(make(flags=("--kt-method", "AMXINT8", *weights))) == []


def test_the_machine(facts_of) -> None:
    """No AMX, too little memory, no GPU: errors here, warnings where the plan is for elsewhere."""
    small = replace(AMX, isa=("avx2",), memory=8 * GIB, memory_available=GIB)
    bad = {"machine": small, "gpus": (), "weights": Weights(9 * GIB, GIB)}

    def codes(request: SglangRequest, facts: LaunchFacts) -> dict[str, str]:
        return {p.code: p.severity for p in plan_launch(request, facts).problems}

    request = SglangRequest(model="m")
    facts = facts_of(**bad)
    assert {"KTB956": "error", "KTB957": "error"}.items() <= codes(request, facts).items()
    ahead = codes(replace(request, engine_version="0.6.4"), facts)
    assert {"KTB956": "warning", "KTB957": "warning"}.items() <= ahead.items()
    allowed = codes(replace(request, allowed=frozenset({"KTB956"})), facts)
    assert (allowed["KTB956"], allowed["KTB957"]) == ("warning", "error")


def test_code_keys_and_public_addresses(facts_of) -> None:
    brings = replace(facts_of().model, auto_map=True)
    request = SglangRequest(model="m", host="0.0.0.0")
    found = plan_launch(request, facts_of(model=brings)).problems
    assert {"KTB960", "KTB961"} <= {p.code for p in found if p.severity == "error"}
    fine = plan_launch(replace(request, api_key="secret-1", trust_remote_code=True), facts_of(model=brings))
    assert fine.ok
    assert "--trust-remote-code" in fine.argv
    # What the engine leaves open though there is a key, and what is known against it, is said.
    told = [str(p) for p in fine.problems if p.code == "KTB959" and p.severity == "warning"]
    assert any("/health and /metrics" in text for text in told)
    assert any("CVE-2026-7301" in text for text in told)
    assert "secret-1" not in repr(request) + repr(fine) + json.dumps(fine.as_dict())
    assert fine.commands()[-1].endswith('--api-key "$KTBRIDGE_API_KEY"')
    assert not plan_launch(replace(request, api_key="-x"), facts_of()).ok


ADA = tuple(Gpu(index, "A GPU", 48 * GIB, "8.9") for index in range(4))


@pytest.mark.parametrize(
    ("version", "gpus", "flags", "wrong"),
    [
        ("0.6.4", GPUS, (), False),  # fa3 there
        ("0.6.4", ADA, (), True),
        ("0.6.4", (), (), True),
        ("0.6.4", GPUS, ("--attention-backend", "triton"), True),
        ("0.6.4", GPUS, ("--attention-backend=flashinfer",), True),
        ("0.6.4", ADA, ("--attention-backend", "torch_native"), False),
        ("0.6.4", ADA, ("--kv-cache-dtype", "fp8_e4m3"), False),
        ("0.6.4", GPUS, ("--prefill-attention-backend", "triton"), True),
        ("0.7.0", ADA, ("--attention-backend", "triton"), False),
        ("0.7.2", ADA, (), False),
    ],
)
def test_prompts_whose_keys_would_not_be_rotated(make, version, gpus, flags, wrong) -> None:
    found = errors(make(version, facts={"gpus": gpus}, flags=flags))
    assert any(one.startswith("KTB967") for one in found) == wrong


def test_compiled_kernels_do_not_outlive_an_upgrade(make) -> None:
    homes = {version: make(version).environment["TVM_FFI_CACHE_DIR"] for version in ("0.6.4", "0.7.2")}
    assert homes["0.6.4"] != homes["0.7.2"]
    own = make("0.7.2", facts={"environment": {"TVM_FFI_CACHE_DIR": "/mine"}})
    assert "TVM_FFI_CACHE_DIR" not in own.environment


@pytest.mark.parametrize(
    ("machine", "method", "inner", "expected"),
    [
        ({}, "BF16", 768, (62, 2, ())),
        ({"cpu_quota": 16.0}, "BF16", 768, (14, 2, ())),
        ({"cpu_quota": 2.5}, "BF16", 768, (1, 1, ())),
        ({"numa": (NumaNode(0, "0-31", None, 0), NumaNode(1, "32-63", None, 32)), "affinity": 32},
         "BF16", 768, (31, 1, (1,))),
        ({"numa": tuple(NumaNode(n, "", None, 32) for n in range(4))}, "BF16", 768, (60, 4, ())),
        ({"numa": tuple(NumaNode(n, "", None, 32) for n in range(4))}, "RAWINT4", 768, (62, 2, ())),
        ({}, "FP8", 384, (63, 1, ())),  # 384 / 2 is no multiple of 128
        ({}, "BF16", 7, (63, 1, ())),
        ({"numa": ()}, "BF16", 768, (63, 1, ())),
    ],
)  # fmt: skip
def test_threads_and_pools(facts_of, machine, method, inner, expected) -> None:
    model = replace(facts_of().model, intermediate_size=inner)
    threads = plan_threads(replace(AMX, **machine), method, model, None)
    assert (threads.cpuinfer, threads.pools, threads.nodes) == expected


def test_stored_formats() -> None:
    assert stored_format({}) == "bf16"
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    assert stored_format({"text_config": {"quantization_config": fp8}}) == "fp8"
    packed = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    assert stored_format({"quantization_config": packed}) == "rawint4"
    assert stored_format({"quantization_config": {"quant_method": "awq"}}) is None


def test_the_cache_is_keyed_by_content(adapters, tmp_path) -> None:
    """Rewritten in place with the same size and time, an adapter is another; a damaged copy is made anew."""

    raw = Path(shutil.copytree(adapters["raw"], tmp_path / "raw"))
    request = SglangRequest(model="", adapters={"neko": str(raw)})
    (source,), _ = read_sources(request)
    before = cached((source,), tmp_path)
    step = Conversion("merged", (raw,), before / "merged", "base")
    assert convert(step)
    assert not convert(step)
    weights = before / "merged" / "adapter_model.safetensors"
    for path, again in ((weights, True), (before / "merged" / "adapter_config.json", True)):
        data = bytearray(path.read_bytes())
        data[-2] ^= 1
        path.write_bytes(data)
        assert not is_intact(step.target, "merged")
        assert convert(step) is again
    file = raw / "fused_expert_lora.safetensors"
    status = file.stat()
    data = bytearray(file.read_bytes())
    data[-2] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    (rewritten,), _ = read_sources(request)
    assert cached((rewritten,), tmp_path) != before


def test_a_split_pair_is_joined_exactly(adapters, tmp_path) -> None:
    """Both halves converted apart and joined again are the merged directory, byte for byte."""
    step = Conversion("merged", (adapters["expert"], adapters["nonexpert"]), tmp_path / "m", "base")
    assert convert(step)
    name = "adapter_model.safetensors"
    assert (tmp_path / "m" / name).read_bytes() == (adapters["merged"] / name).read_bytes()
    assert os.listdir(tmp_path) == ["m"]
    of = [json.loads((path / MANIFEST_FILE).read_text()) for path in (adapters["raw"], step.target)]
    assert of[0]["base_fingerprint"] == of[1]["base_fingerprint"]  # not that of "base"

    damaged = Path(shutil.copytree(adapters["nonexpert"], tmp_path / "damaged"))
    data = bytearray((damaged / name).read_bytes())
    data[-2] ^= 1
    (damaged / name).write_bytes(data)
    with pytest.raises(ProblemsError) as refused:
        convert(Conversion("merged", (adapters["expert"], damaged), tmp_path / "other", "base"))
    assert [problem.code for problem in refused.value.problems] == ["KTB012"]
    assert not (tmp_path / "other").exists()


def test_causes() -> None:
    log = [
        "[2026-11-21 10:00:00 TP0] Scheduler hit an exception: Traceback (most recent call last):\n",
        '  File "a.py", line 3, in load\n',
        "    raise ValueError('something else')\n",
        "\x1b[31mValueError: Explicit --kt-expert-lora-path cannot be combined with --lora-paths.\x1b[0m\n",
        "[2026-11-21 10:00:00] Received sigquit from a child process.\n",
        "EOFError\n",
    ]
    told = explain_failure(log, 1)
    assert told.error.startswith("ValueError: Explicit")
    assert "--layout merged" in told.remedy
    assert explain_failure(["Killed\n"], -9).cause.startswith("the kernel killed it")
    assert explain_failure(["nothing of note\n"], 1) == ("", "", "")
    unknown = explain_failure(["sglang.Oops: x\n", "OSError: [Errno 5] odd\n", "EOFError\n"], 1)
    assert (unknown.error, unknown.cause) == ("OSError: [Errno 5] odd", "")
    assert [line for line in readable(log, 9) if "raise" in line or "File" in line] == []
    assert readable(["x\n", "x\n", "10%|##  | 1/10\r 50%|###\n", "y\n"], 9) == ["x", "y"]
    assert all(row.cause and row.remedy for row in CAUSES)


def test_parser_flags() -> None:
    text = """
        parser.add_argument("--a-b", type=str, help="see --not-this")
        group.add_argument(
            "--tensor-size",
            '--tp',
            "-t",
            default="--nor-this",
        )
    """
    assert parser_flags(text) == {"--a-b", "--tensor-size", "--tp"}


def test_planning_needs_no_torch() -> None:
    code = "import ktbridge.serve.sglang.launch, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


BASE = "--json-model-override-args"


@pytest.mark.parametrize(
    ("config", "told", "wrong"),
    [
        ({"rope_theta": 1000000}, 1e6, ""),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}, 1e5, ""),
        ({}, None, ""),  # the engine's class and transformers' have the same default then, or none
        ({"model_type": "made_up", "rope_theta": 5e5}, 5e5, ""),
        ({"model_type": "qwen3_vl_moe", "text_config": {"rope_theta": 5e6}}, None, "KTB968"),
        ({"model_type": "qwen3_vl_moe", "text_config": {"rope_theta": 1e4}}, None, ""),
        ({"model_type": "qwen3_5_moe", "text_config": {"rope_theta": 1e7}}, None, ""),
        # A base a kind of layer: none is told, not even an older one beside them.
        ({"rope_theta": 1e6, "rope_parameters": {"full_attention": {"rope_theta": 5e6}}}, None, ""),
    ],
)
def test_the_engine_is_told_the_base_of_positions(facts_of, tmp_path, config, told, wrong) -> None:
    if "text_config" in config:
        sizes = json.loads((write_config(tmp_path / "sizes") / "config.json").read_text())
        config = config | {"text_config": {**sizes, **config["text_config"]}}
    model = write_config(tmp_path / "base", **config)
    made = plan_launch(SglangRequest(model=str(model)), facts_for(model, "0.7.2"))
    assert [one[:6] for one in errors(made)] == ([wrong] if wrong else [])
    assert (json.loads(after(made.argv, BASE)) if BASE in made.argv else None) == (
        told and {"rope_theta": told}
    )


def test_an_override_of_ones_own_has_the_base_of_positions_too(tmp_path) -> None:
    model = write_config(tmp_path / "base", rope_theta=1e6)

    def made(words: Any, name: str = BASE) -> Launch:
        request = SglangRequest(model=str(model), flags=(name, json.dumps(words)))
        return plan_launch(request, facts_for(model, "0.7.2"))

    for words in (5, "rope_theta", None, {"rope_theta": None}):
        assert [one[:6] for one in errors(made(words))] == ["KTB968"]
    assert [one[:6] for one in errors(made({"rope_theta": 1e6}, BASE[:-3]))] == ["KTB953"]

    (found,) = errors(made({"num_hidden_layers": 2}))
    assert '{"num_hidden_layers": 2, "rope_theta": 1000000.0}' in found
    assert errors(made({"rope_theta": 1e6, "num_hidden_layers": 2})) == []


@pytest.mark.parametrize(
    ("model_type", "tied", "head", "wrong"),
    [
        ("mixtral", True, False, True),
        ("mixtral", True, True, False),
        ("mixtral", False, False, False),
        ("deepseek_v3", True, False, False),  # its class ties
    ],
)
def test_a_head_that_nobody_wrote(tmp_path, model_type, tied, head, wrong) -> None:
    model = write_config(tmp_path / "base", model_type, tie_word_embeddings=tied)
    facts = facts_for(model, "0.7.2", weights=Weights(GIB, GIB, head))
    found = errors(plan_launch(SglangRequest(model=str(model)), facts))
    assert [one[:6] for one in found] == (["KTB969"] if wrong else [])


def test_a_line_without_an_end_is_written_as_it_comes_and_without_the_key(tmp_path) -> None:
    reader, writer = os.pipe()
    seen: list[bytes] = []
    pump = Pump(os.fdopen(reader, "rb"), tmp_path / "log", seen.append, "hush-hush")
    line = b"x" * (2**16 - 4) + b"hush-hush" + b"y" * 2**16  # the key lies over two pieces
    os.write(writer, line)
    wait_for(lambda: (tmp_path / "log").stat().st_size > 2**16)
    os.close(writer)
    pump.join(10)
    assert (tmp_path / "log").read_bytes() == line.replace(b"hush-hush", b"***")
    assert max(map(len, seen)) <= 2**16
