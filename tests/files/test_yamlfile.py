"""YAML that people write: whatever stands in it, a dictionary or one sentence, soon and in little memory."""

import os
import tracemalloc
from pathlib import Path

import pytest
import yaml

from ktbridge.errors import KtbridgeError, UsageError
from ktbridge.eval.bench import load_bench
from ktbridge.files.yamlfile import load_yaml, read_yaml
from ktbridge.predict.inference import load_inference
from ktbridge.sft.config import load_config

BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10))
MERGES = "a0: &a0 {k: 1}\n" + "".join(
    f"a{n}: &a{n}\n  <<: [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10)
)
UNFIT = {
    "aliases that stand for a thousand million": BOMB,
    "merges that stand for a thousand million": MERGES,
    "a list in itself": "a: &a [*a]\n",
    "a mapping in itself": "a: &a {<<: *a}\n",
    "lists in lists": "a: " + "[" * 1000,
    "lists in lists, by lines": "a:\n" + "- " * 1000,
    "a date that is none": "a: 2001-99-99\n",
    "a number that is none": "a: !!int base\n",
    "an empty number": "a: !!int ''\n",
    "a time that is none": "a: !!timestamp x\n",
    "a number of 5,000 digits": f"a: {'9' * 5000}\n",
    "a number of 5,000 hexadecimal digits": f"a: 0x{'f' * 5000}\n",
    "half a character": 'a: "\\ud800"\n',
    "a document of a million lines": "a: 1\n" + "#\n" * 1_000_000,
    "an object of Python": "a: !!python/object/apply:os.system [true]\n",
}


@pytest.mark.parametrize("what", UNFIT)
def test_yaml_that_is_no_plain_data_is_a_sentence(tmp_path: Path, what: str) -> None:
    path = tmp_path / "train.yaml"
    path.write_text(UNFIT[what])
    with pytest.raises(UsageError) as caught:
        read_yaml(path)
    assert len(caught.value.sentence) < 500


@pytest.mark.parametrize("text", [BOMB, MERGES])
def test_bombs_cost_little(tmp_path: Path, text: str) -> None:
    path = tmp_path / "train.yaml"
    path.write_text(text)
    tracemalloc.start()
    try:
        with pytest.raises(UsageError):
            load_config(path)
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


def test_aliases_and_merges_within_reason_are_read() -> None:
    text = "a: &a {k: 1, l: [1, 2]}\nb: {<<: *a, k: 2}\nc: [*a, *a]\n"
    one = {"k": 1, "l": [1, 2]}
    assert load_yaml(text) == {"a": one, "b": {"k": 2, "l": [1, 2]}, "c": [one, one]}
    assert load_yaml("") is None


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "train.yaml")
    with pytest.raises(UsageError):
        read_yaml(tmp_path / "train.yaml")


def test_an_override_that_is_no_plain_data_is_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text("model_name_or_path: m\n")
    for value in ("2001-99-99", "!!int ''", "[" * 1000):
        with pytest.raises(UsageError, match="not valid YAML"):
            load_config(path, [f"lora_rank={value}"])


@pytest.mark.parametrize("text", [BOMB, MERGES, "tics: !!timestamp x\n", "a: &a [*a]\n"])
def test_a_bench_of_aliases_is_a_sentence(tmp_path: Path, text: str) -> None:
    for name in ("bench.yaml", "persona.yaml", "items.jsonl"):
        (tmp_path / name).write_text(text)
    with pytest.raises(Exception, match="the bench has"):
        load_bench(tmp_path)


def test_only_yaml_errors_are_raised() -> None:
    for text in UNFIT.values():
        with pytest.raises(yaml.YAMLError):
            load_yaml(text)


@pytest.mark.parametrize("name", ["~nobodyatall/x", "~!!x", "x" * 5000])
def test_names_that_no_file_can_have(tmp_path: Path, name: str) -> None:
    """Tracebacks before: a home that isn't there, a name too long for the file system."""
    path = tmp_path / "train.yaml"
    path.write_text(f"model_name_or_path: {name}\ndataset: d\noutput_dir: o\n")
    with pytest.raises(KtbridgeError):
        load_config(path)
    path.write_text(f"model_name_or_path: base\nadapter_name_or_path: {name}\n")
    with pytest.raises(KtbridgeError):
        load_inference(path)
