"""Fixtures for the training core."""

import pytest
from tinymoe import tiny_model, tiny_tokenizer


@pytest.fixture(scope="session")
def base_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("base") / "tiny"
    tiny_model().save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path
