"""S, S:NAME and S:base: how names are made, read and found in a server's list."""

import pytest

from ktbridge.errors import UsageError
from ktbridge.served_names import (
    ServedArm,
    adapters_of,
    base_name,
    check_adapter_name,
    check_served_name,
    described_halves,
    list_arms,
    listed_as,
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
