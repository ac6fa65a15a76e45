"""KTBRIDGE_LLAMA_PYTHON names an interpreter that has llama_cpp (`make test-llama` makes one); without it
these tests skip. KTBRIDGE_LLAMA_SERVER names a llama-server, for the tests of that server.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys

import pytest
import realllama

PYTHON = "KTBRIDGE_LLAMA_PYTHON"


@pytest.fixture(scope="session")
def llama_python():
    pytest.importorskip("gguf")
    here = sys.executable if importlib.util.find_spec("llama_cpp") else ""
    python = os.environ.get(PYTHON) or here
    if not python:
        pytest.skip(f"no llama_cpp: `make test-llama` builds it, or name its Python as {PYTHON}")
    return python


@pytest.fixture(scope="session")
def run_llama(llama_python):
    return functools.partial(realllama.run_llama, llama_python)


@pytest.fixture(scope="session")
def case(llama_python, tmp_path_factory):
    return functools.cache(lambda family: realllama.Case(family, tmp_path_factory.mktemp(family)))
