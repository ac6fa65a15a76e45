"""Fixtures for the training core."""

import importlib.util
import sys
from pathlib import Path

import pytest

# Before torch, whose idle threads would keep the kernels from the CPUs: it doubles what these tests take.
import ktbridge.sft  # noqa: F401  isort: skip
from tinymoe import tiny_model, tiny_tokenizer


def _beside(name):
    """A module in this directory, which is not on the path."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def base_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("base") / "tiny"
    tiny_model().save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def warm(tmp_path_factory):
    """Starts Python processes that need not import torch and transformers (``warm.py``)."""
    made = _beside("warm").WarmPython(tmp_path_factory.mktemp("warm"))
    yield made
    made.close()
