"""Fixtures for the training core."""

import pytest

# Before torch, whose idle threads would keep the kernels from the CPUs: it doubles what these tests take.
import ktbridge.sft  # noqa: F401  isort: skip
from tinymoe import tiny_model, tiny_tokenizer


@pytest.fixture(scope="session")
def base_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("base") / "tiny"
    tiny_model().save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path
