"""S, S:NAME and S:base: how names are made, read and found in a server's list."""

import pytest

from ktbridge.errors import UsageError
from ktbridge.server_api.served_names import (
    ServedArm,
    adapters_of,
    applied_adapter,
    base_name,
    check_adapter_name,
    check_served_name,
    described_halves,
    find_served_model,
    list_arms,
    listed_as,
    plain_name_warning,
    read_models,
    served_by,
    split_name,
)


def test_arms_exist_only_where_adapters_make_them():
    def names(**made):
        return [arm.name for arm in list_arms("s", **made)]

    assert names(expert=False) == ["s", "s:base"]
    assert names(expert=True) == ["s", "s:base"]
    assert names(expert=True, nonexpert=["a", "b"]) == ["s", "s:a", "s:b", "s:base"]
    # Without an expert LoRA nothing may answer as "base + expert LoRA".
    assert names(expert=False, nonexpert=["a"]) == ["s:a", "s:base"]
    assert names(expert=True, whole=["a"]) == ["s", "s:a", "s:base"]


@pytest.mark.parametrize("name", ["a:b", "", " x", "x\n"])
def test_unusable_served_names(name):
    with pytest.raises(UsageError):
        check_served_name(name)


@pytest.mark.parametrize("name", ["base", "", "a:b", "a b"])
def test_unusable_adapter_names(name):
    with pytest.raises(UsageError):
        check_adapter_name(name)


def test_names_are_read_as_they_are_made():
    assert [split_name(name) for name in ("s", "s:a", "s:a:b", "s:")] == [
        ("s", None), ("s", "a"), ("s", "a:b"), ("s", "")
    ]  # fmt: skip
    assert (served_by(base_name("s")), served_by("s:a"), served_by("base")) == ("s", None, None)
    assert adapters_of("s", ["s", "s:a", "t:b", "s:base", "a"]) == ["s:a"]


def test_a_name_in_the_lists_of_both_engines():
    assert listed_as("s:a", ["s", "s:a"]) == "s:a"
    assert listed_as("s:a", ["s", "a"]) == "a"
    for name, listed in (("s:a", ["a"]), ("s:a", ["s"]), ("a", ["s", "s:a"]), ("", ["s"])):
        assert listed_as(name, listed) is None


@pytest.mark.parametrize("expert", [True, False])
@pytest.mark.parametrize("nonexpert", [None, "a"])
def test_descriptions_are_read_as_they_are_written(expert, nonexpert):
    arm = ServedArm("s", expert, nonexpert)
    assert described_halves(arm.description) == (expert, nonexpert is not None)
    assert described_halves("a model of somebody else's") == (True, True)


OURS = {
    arm.name: {"owned_by": "ktbridge", "description": arm.description, "fingerprint": arm.name}
    for arm in list_arms("s", expert=True, nonexpert=["a"])
}
VLLM = {
    "m": {"owned_by": "vllm", "root": "org/m", "parent": None},
    "a": {"owned_by": "vllm", "root": "dir/a", "parent": "m"},
}
SGLANG = {
    "s": {"owned_by": "sglang", "root": "s", "parent": None},
    "a": {"owned_by": "sglang", "root": "dir/a", "parent": "s"},
}


@pytest.mark.parametrize(
    ("entries", "applied", "variants"),
    [
        (OURS, "", {"s": ("expert", "s:base"), "s:a": ("full", "s:base"), "s:base": ("base", "s:base")}),
        (VLLM, "", {"m": ("base", "m"), "a": ("adapter", "m")}),
        # SGLang is asked for S:NAME; with an expert LoRA it has no base.
        (SGLANG, "", {"s": ("base", "s"), "s:a": ("adapter", "s")}),
        (SGLANG, "dir/experts", {"s": ("expert", None), "s:a": ("full", None)}),
        ({"m.gguf": {"owned_by": "llamacpp"}}, "a.gguf", {"m.gguf": ("adapter", None)}),
        ({"gpt": {"owned_by": "x"}, "llama:8b": {}}, "", dict.fromkeys(("gpt", "llama:8b"), (None, None))),
    ],
)  # fmt: skip
def test_what_servers_say_of_their_models(entries, applied, variants):
    models = read_models(entries, applied)
    assert {name: (one.variant, one.base) for name, one in models.items()} == variants
    assert all(one.says for one in models.values() if one.variant not in (None, "base"))
    for name in models:
        assert find_served_model(name, entries, models) is models[name]


def test_a_name_that_requests_cannot_use_is_no_model():
    for name, entries in (("a", SGLANG), ("m:a", VLLM), ("s:b", SGLANG), ("t:a", SGLANG)):
        assert find_served_model(name, entries, read_models(entries)) is None


def test_adapters_that_are_applied_to_every_request():
    assert applied_adapter("sglang", {"kt_expert_lora_path": "dir/experts"}) == "dir/experts"
    assert applied_adapter("sglang", {"kt_expert_lora_path": None, "tp_size": 1}) == ""
    rows = [{"id": 0, "path": "a.gguf", "scale": 1.0}, {"id": 1, "path": "b.gguf", "scale": 0.0}]
    assert applied_adapter("llamacpp", rows) == "a.gguf"
    for engine, document in (
        ("sglang", None),
        ("llamacpp", {}),
        ("vllm", {"kt_expert_lora_path": "x"}),
    ):
        assert applied_adapter(engine, document) == ""


def test_the_plain_name_is_warned_about_where_it_is_not_the_base():
    def warning(**made):
        return plain_name_warning({arm.name: arm.description for arm in list_arms("base", **made)})

    assert warning(expert=False) == warning(expert=False, nonexpert=["a"]) == ""
    half = warning(expert=True, nonexpert=["a"])
    assert 'WARNING: the name "base" is not the base model' in half
    assert "half of the adapter. Base model: base:base. Whole adapter: base:a." in half
    assert "half" not in warning(expert=True, whole=["a"])
    assert "no base model" in plain_name_warning({"s": "base + expert LoRA"})
