"""Fixtures for the training core."""

from collections.abc import Iterator

import pytest

# Before torch, whose idle threads would keep the kernels from the CPUs: it doubles what these tests take.
import ktbridge.sft  # noqa: F401  isort: skip
import torch
from tinymoe import tiny_model, tiny_tokenizer
from trainrun import freeze_imports


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """torch's operations on tiny models take longer in two threads than in one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def base_dir(tmp_path_factory):
    freeze_imports()
    path = tmp_path_factory.mktemp("base") / "tiny"
    tiny_model().save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def make(run_dir, tmp_path):
    """Makes the trainer of a test's ``run_dir``, with keys overridden."""
    from ktbridge.sft import train
    from ktbridge.sft.config import load_config
    from ktbridge.sft.prepare import prepare

    def made(**overrides):
        config = load_config(run_dir / "run.yaml", [f"{k}={v}" for k, v in overrides.items()])
        ready = prepare(config)
        model = train.load_trainable(ready.config, ready.base)
        return train.make_trainer(ready.config, model, ready, str(tmp_path / "scratch"), [])

    return made
