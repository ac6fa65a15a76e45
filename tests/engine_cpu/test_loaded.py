"""What `ktbridge serve` plans, through the engine's own parser, validators and adapter loaders."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
from realengine import FIRST_MERGED, MERGED, SPLIT, Pairs, trained, wheel_path

from ktbridge.adapter import convert_adapter, read_adapter, validate_adapter
from ktbridge.serve.sglang.facts import ENGINE_CACHE
from ktbridge.serve.sglang.logs import explain_failure
from ktbridge.serve.sglang.processes import engine_place

pytestmark = pytest.mark.timeout(600)  # the first test of a version starts its engine


def same(pairs: Pairs, expected: Pairs) -> None:
    """A bit by bit, B times the scale exactly: nothing more, nothing less, nothing elsewhere."""
    assert pairs.keys() == expected.keys()
    for path, (a, b) in expected.items():
        np.testing.assert_array_equal(pairs[path][0], a, err_msg=path)
        np.testing.assert_array_equal(pairs[path][1], b, err_msg=path)


@pytest.mark.quick(r"plain|0\.7\.2")
@pytest.mark.parametrize(
    ("version", "wish", "layout"),
    [
        (SPLIT, "auto", "split"),
        (SPLIT, "merged", "merged"),
        (FIRST_MERGED, "auto", "merged"),
        (MERGED, "auto", "merged"),
    ],
)
@pytest.mark.parametrize(
    "kind",
    [{}, {"other_alpha": 16.0}, {"rslora": True, "other_alpha": 4.0}, {"dtype": "F32"}],
    ids=["plain", "two-alphas", "rslora", "float32"],
)
def test_every_tensor_arrives(
    engines, make_plan, make_raw, tmp_path, model, version, wish, layout, kind
) -> None:
    raw = make_raw(tmp_path / "raw", version, **kind)
    made = make_plan(version, adapters={"neko": str(raw)}, layout=wish)
    assert made.ok
    assert made.layout == layout
    engine = f"sglang-kt=={version}"
    assert validate_adapter([*made.directories], base_model=model, engine=engine).ok
    loaded = engines(version).run(made)
    assert (loaded.error, loaded.stage) == ("", "done")
    same(loaded.pairs, trained(read_adapter(raw)))


@pytest.mark.parametrize("version", [SPLIT, MERGED])
def test_a_half_alone(engines, make_plan, raws, as_trained, tmp_path, version) -> None:
    convert_adapter(raws[version], expert_output_dir=tmp_path / "e", nonexpert_output_dir=tmp_path / "n")
    halves = {
        True: make_plan(version, expert_adapter=str(tmp_path / "e")),
        False: make_plan(version, nonexpert_adapters={"neko": str(tmp_path / "n")}),
    }
    for expert, made in halves.items():
        loaded = engines(version).run(made)
        assert (loaded.error, loaded.stage) == ("", "done")
        half = {path: pair for path, pair in as_trained[version].items() if (".experts." in path) == expert}
        same(loaded.pairs, half)


def test_two_nonexpert_adapters_stay_apart(engines, make_plan, make_raw, tmp_path) -> None:
    for name, alpha in (("one", 8.0), ("two", 32.0)):
        raw = make_raw(tmp_path / f"raw-{name}", SPLIT, other_alpha=alpha)
        convert_adapter(raw, nonexpert_output_dir=tmp_path / name)
    names = {name: str(tmp_path / name) for name in ("one", "two")}
    made = make_plan(SPLIT, nonexpert_adapters=names)
    loaded = engines(SPLIT).run(made)
    assert loaded.error == ""
    assert loaded.arguments["lora_paths"] == [[name, names[name]] for name in names]
    assert loaded.arguments["max_loras_per_batch"] >= 3  # both and the base in one batch


MEANT = {
    "--kt-method": "kt_method", "--kt-weight-path": "kt_weight_path", "--model-path": "model_path",
    "--kt-cpuinfer": "kt_cpuinfer", "--kt-threadpool-count": "kt_threadpool_count",
    "--kt-num-gpu-experts": "kt_num_gpu_experts", "--lora-backend": "lora_backend",
    "--max-loras-per-batch": "max_loras_per_batch", "--host": "host", "--port": "port",
    "--max-running-requests": "max_running_requests", "--served-model-name": "served_model_name",
    "--tp-size": "tp_size", "--nnodes": "nnodes", "--node-rank": "node_rank",
    "--dist-init-addr": "dist_init_addr",
}  # fmt: skip
SEVERAL = ("--nnodes", "2", "--node-rank", "0", "--dist-init-addr", "10.0.0.1:5000")
WISHES = {
    "one-gpu": {},
    "four-gpus": {"tp_size": 4},
    "memory-nodes": {"flags": ("--kt-numa-nodes", "1", "0")},
    "two-machines": {"tp_size": 8, "flags": SEVERAL},
}


@pytest.mark.quick(r"one-gpu|0\.7\.2")
@pytest.mark.parametrize("version", [SPLIT, MERGED])
@pytest.mark.parametrize("wish", WISHES)
def test_the_engine_understands_each_flag_as_we_do(engines, make_plan, raws, version, wish) -> None:
    made = make_plan(version, adapters={"neko": str(raws[version])}, **WISHES[wish])
    assert made.ok
    loaded = engines(version).run(made, load=False)
    assert loaded.error == ""
    understood, argv = loaded.arguments, made.argv
    for flag, field in MEANT.items():
        if flag in argv:
            assert str(understood[field]) == argv[argv.index(flag) + 1], flag
    if "--kt-numa-nodes" in argv:
        assert len(understood["kt_numa_nodes"]) == understood["kt_threadpool_count"]
    assert understood["disable_cuda_graph"] is True
    assert understood["enable_lora"] is True
    assert [name for name, _ in understood["lora_paths"]] == ["neko"]
    assert understood["kt_expert_lora_path"]
    unknown = {word for word in argv if word.startswith("--")} - MEANT.keys()
    assert unknown <= {"--kt-expert-lora-path", "--lora-paths", "--enable-lora",
                       "--disable-cuda-graph", "--kt-numa-nodes"}  # fmt: skip


@pytest.mark.parametrize("version", [SPLIT, MERGED])
def test_the_api_key_arrives_through_its_file(engines, make_plan, raws, version) -> None:
    made = make_plan(version, adapters={"neko": str(raws[version])}, api_key="s3cret: #'\"x")
    with engine_place() as home, home.key_file("s3cret: #'\"x") as words:
        link = Path(words[-1])
        link.unlink()  # the process that is asked was begun before, and has no such descriptor
        link.symlink_to(f"/proc/{os.getpid()}/fd/{home.inherited[0]}")
        loaded = engines(version).run(made, load=False, argv=(*made.argv, *words))
    assert loaded.error == ""
    assert loaded.arguments["api_key"] == "s3cret: #'\"x"
    assert loaded.arguments["port"] == 8000


def test_the_engines_own_copy_lands_in_our_cache(engines, make_plan, raws, tmp_path) -> None:
    made = make_plan(MERGED, adapters={"neko": str(raws[MERGED])})
    loaded = engines(MERGED).run(made, load=False)
    (_, path), *_ = loaded.arguments["lora_paths"]
    root = Path(made.environment[ENGINE_CACHE])
    assert tmp_path in root.parents
    assert root in Path(path).parents
    assert root in Path(loaded.arguments["kt_expert_lora_path"]).parents


REFUSED = [
    # flags after --, what the engine says by itself at start-up
    ((MERGED, SPLIT), ["--max-running-requests", "1"], "--max-running-requests >= 2"),
    ((MERGED, SPLIT), ["--speculative-algorithm", "EAGLE"], ""),
    ((MERGED,), ["--pp-size", "2"], ""),
]


@pytest.mark.parametrize(("versions", "flags", "words"), REFUSED, ids=lambda x: str(x))
def test_what_we_refuse_the_engine_refuses(engines, make_plan, raws, versions, flags, words) -> None:
    for version in versions:
        made = make_plan(version, adapters={"neko": str(raws[version])}, flags=tuple(flags))
        assert {"KTB953"} == {found.code for found in made.problems if found.severity == "error"}
        loaded = engines(version).run(made, load=False)
        assert loaded.error
        assert words in loaded.error


def test_the_merged_contract_refuses_a_pair(engines, make_plan, raws) -> None:
    made = make_plan(SPLIT, adapters={"neko": str(raws[SPLIT])})
    loaded = engines(MERGED).run(made, load=False)
    assert "cannot be combined" in loaded.error
    wished = make_plan(MERGED, adapters={"neko": str(raws[MERGED])}, layout="split")
    assert "KTB952" in {found.code for found in wished.problems if found.severity == "error"}


def test_a_routers_lora_is_for_the_merged_contract(engines, make_plan, raws, model, tmp_path) -> None:
    convert_adapter(raws[MERGED], nonexpert_output_dir=tmp_path / "rest")
    made = make_plan(SPLIT, nonexpert_adapters={"neko": str(tmp_path / "rest")})
    loaded = engines(SPLIT).run(made)
    assert "not implemented for gate" in loaded.error
    assert "0.7.2" in explain_failure([f"{loaded.error}\n"], 1).remedy
    report = validate_adapter([tmp_path / "rest"], base_model=model, engine=f"sglang-kt=={SPLIT}")
    assert {found.code for found in report.problems if found.severity == "error"} == {"KTB903"}


@pytest.mark.parametrize("layout", ["raw", "expert"])
def test_a_directory_of_the_wrong_kind_is_refused(engines, make_plan, raws, tmp_path, layout) -> None:
    convert_adapter(raws[MERGED], expert_output_dir=tmp_path / "expert")
    made = make_plan(MERGED, adapters={"neko": str(raws[MERGED])})
    wrong = {"raw": raws[MERGED], "expert": tmp_path / "expert"}[layout]
    argv = tuple(f"neko={wrong}" if word.startswith("neko=") else word for word in made.argv)
    assert "ValueError" in engines(MERGED).run(made, load=False, argv=argv).error


LOADERS = ("lora.py", "lora_config.py", "lora_manager.py", "mem_pool.py", "utils.py")
WRAPPER = "sglang/srt/layers/moe/kt_ep_wrapper.py"


@pytest.mark.parametrize("version", ["0.6.3", "0.6.3.post1", "0.7.0", "0.7.0.post3"])
def test_the_other_versions_of_the_split_contract_load_alike(version) -> None:
    """Their loaders are, byte by byte, those that the tests above have run."""
    with zipfile.ZipFile(wheel_path(version)) as one, zipfile.ZipFile(wheel_path(SPLIT)) as other:
        for name in LOADERS:
            path = f"sglang/srt/lora/{name}"
            assert one.read(path) == other.read(path), path
        experts = [
            wheel.read(WRAPPER).partition(b"def _load_adapter_config")[2].partition(b"_SHARED")[0]
            for wheel in (one, other)
        ]
        assert experts[0]
        assert experts[0] == experts[1]
