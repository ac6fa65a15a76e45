"""SGLang's API to load adapters, out of a wheel's text: its routes, request types, handlers and registry.

They run as published. What loads tensors is a process of its own there (the scheduler); in its place requests
are noted and answered as done, or refused where their path is ``MISSING``.
"""

from __future__ import annotations

import ast
import asyncio
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import fastapi
import uvicorn
from fastapi.encoders import jsonable_encoder
from starlette.responses import JSONResponse

MISSING = "/nowhere"
_MANAGERS, _ENTRYPOINTS = "sglang/srt/managers/", "sglang/srt/entrypoints/"
# In the order in which they name each other: file -> what of it; a class's methods as CLASS.METHOD.
_DEFINITIONS = {
    "sglang/srt/utils/aio_rwlock.py": ("RWLock", "_ReaderLock", "_WriterLock"),
    "sglang/srt/utils/common.py": ("ConcurrentCounter",),
    "sglang/srt/lora/lora_registry.py": ("LoRARef", "LoRARegistry"),
    _MANAGERS + "io_struct.py": (
        "BaseReq", "GenerateReqInput", "LoadLoRAAdapterReqInput", "UnloadLoRAAdapterReqInput",
        "LoRAUpdateOutput", "LoadLoRAAdapterReqOutput",
    ),
    _MANAGERS + "tokenizer_communicator_mixin.py": (
        "get_static_kt_lora_ref", "TokenizerCommunicatorMixin.load_lora_adapter",
        "TokenizerCommunicatorMixin.unload_lora_adapter",
        "TokenizerCommunicatorMixin._unload_lora_adapter_locked",
    ),
    _ENTRYPOINTS + "openai/protocol.py": ("ModelCard", "ModelList"),
    _ENTRYPOINTS + "http_server.py": ("load_lora_adapter", "unload_lora_adapter", "available_models"),
}  # fmt: skip
_IMPORTED = """
import asyncio, fastapi, json, logging, time, uuid
from abc import ABC
from collections import OrderedDict
from dataclasses import dataclass, field, fields
from http import HTTPStatus
from typing import *
from uuid import uuid4
from fastapi import Request
from pydantic import BaseModel, Field
"""


class _Response(JSONResponse):
    """Write dataclasses, as orjson does."""

    def render(self, content: object) -> bytes:
        return super().render(jsonable_encoder(content))


class SglangApi:
    """The API of one version, with ``adapters`` (name -> path) loaded; ``static``: its KT adapter's name.

    ``text`` reads a file of the wheel. ``asked`` are the requests that reached what loads. ``names`` has the
    version's definitions.
    """

    def __init__(
        self, text: Callable[[str], str], adapters: dict[str, str], static: str | None = None
    ) -> None:
        self.app, self.asked = fastapi.FastAPI(), list[Any]()
        # Dataclasses look their annotations up in the module that they say they are of.
        module = sys.modules["sglangtext"] = ModuleType("sglangtext")
        self.names: dict[str, Any] = module.__dict__
        exec(_IMPORTED, self.names)
        self.names |= {
            "app": self.app,
            "ORJSONResponse": _Response,
            "AuthLevel": SimpleNamespace(ADMIN_OPTIONAL=None),
            "auth_level": lambda level: lambda route: route,
            "logger": SimpleNamespace(info=lambda *said: None),
            "MultimodalDataInputFormat": Any,  # of images, which we never send
        }
        manager = SimpleNamespace(served_model_name="tiny", model_config=SimpleNamespace(context_len=64))
        self.names["_global_state"] = SimpleNamespace(tokenizer_manager=manager)
        for file, wanted in _DEFINITIONS.items():
            self._define(file, text(file), wanted)
        references = [
            self.names["LoRARef"](lora_name=name, lora_path=path) for name, path in adapters.items()
        ]
        own = next((one for one in references if one.lora_name == static), None)
        manager.server_args = SimpleNamespace(
            enable_lora=True,
            dp_size=1,
            max_loaded_loras=None,
            lora_paths=references,
            kt_composite_lora_name=own and own.lora_name,
            kt_composite_lora_id=own and own.lora_id,
        )
        manager.lora_registry = self.names["LoRARegistry"](references)
        manager.lora_ref_cache, manager.lora_update_lock = {}, asyncio.Lock()
        manager.auto_create_handle_loop = lambda: None
        manager.update_lora_adapter_communicator = self._load
        for name in ("load_lora_adapter", "unload_lora_adapter", "_unload_lora_adapter_locked"):
            method = self.names[f"TokenizerCommunicatorMixin.{name}"]
            setattr(manager, name, method.__get__(manager))

    async def _load(self, request: Any) -> list[Any]:
        self.asked.append(request)
        output = self.names["LoRAUpdateOutput"]
        if getattr(request, "lora_path", "") == MISSING:
            return [output(success=False, error_message=f"Failed to load {MISSING}")]
        return [output(success=True, loaded_adapters={})]

    def _define(self, file: str, text: str, wanted: tuple[str, ...]) -> None:
        tree = ast.parse(text)
        # Routes need types, not their names; everything else was written for names.
        lazy = not file.endswith("http_server.py")
        for node, name in _definitions(tree):
            if name not in wanted:
                continue
            module = ast.Module([node], [])
            flags = annotations.compiler_flag if lazy else 0
            exec(compile(module, file, "exec", flags, dont_inherit=True), self.names)
            if "." in name:  # a route has the same name
                self.names[name] = self.names.pop(name.rpartition(".")[2])

    @contextmanager
    def served(self) -> Iterator[str]:
        """Context: the URL at which the API answers."""
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            config = uvicorn.Config(self.app, log_level="error", lifespan="off")
            server = uvicorn.Server(config)
            thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
            thread.start()
            until = time.monotonic() + 30
            while not server.started:
                assert time.monotonic() < until
                time.sleep(0.01)
            try:
                yield f"http://127.0.0.1:{listener.getsockname()[1]}"
            finally:
                server.should_exit = True
                thread.join(30)


def _definitions(tree: ast.Module) -> Iterator[tuple[ast.stmt, str]]:
    """Each definition of a module with its name; methods with their class's name before theirs."""
    for node in tree.body:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    yield node, target.id
        elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node, node.name
            if isinstance(node, ast.ClassDef):
                for part in node.body:
                    if isinstance(part, ast.AsyncFunctionDef):
                        yield part, f"{node.name}.{part.name}"
