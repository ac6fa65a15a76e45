"""The embedded engine with a fault of other engines planted in it, and the API by which they load adapters.

A program: ``faultyserver.py BASE NAME=DIR …`` serves all adapters as the model "tiny" and writes its URL to
stdout. POST /fault ``{"name": FAULT, "engine": "vllm"}``, or another engine, plants another fault and puts
everything back. What computes is always the real engine: a fault is that another of its arms answers.

| fault | what is wrong |
| --- | --- |
| wrong | tiny:a answers as b |
| exchanged | tiny:a answers as b and tiny:b as a |
| base-after | the base has a's expert LoRA once an adapter was asked for |
| base-among | the same, only while other requests are computed |
| base-loaded | the same, as long as any adapter is loaded |
| mixed | tiny:b answers as a while other requests are computed |
| stale | a name answers as the first adapter that was loaded under it |
| stale-cache | the same, only for tokens that are generated |
| unloadable | only a name's first adapter can be loaded |
| dies | the process ends while it is asked |
| dies-loading | the process ends when an adapter is loaded |
"""

from __future__ import annotations

import json
import os
import sys

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

import ktbridge.serve.local.app as app_module
from ktbridge.serve.local.launch import serve
from ktbridge.serve.local.plan import plan_local
from ktbridge.serve.local.service import Service
from ktbridge.serve.request import ServeRequest
from ktbridge.server_api.served_names import ServedArm

BASE, FIRST, SECOND = "tiny:base", "tiny:a", "tiny:b"
DEADLY = 12  # requests after which "dies" does


class Faulty(Service):
    """The service, with the adapter of each name in a table, and a fault."""

    roots: dict[str, str]

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.plant("", "ktbridge")
        FOUND.append(self)

    def plant(self, fault: str, engine: str) -> None:
        self.fault, self.posing = fault, engine
        self.loaded = dict(self.roots)
        self.generating, self.was_asked, self.count = False, False, 0

    async def completions(self, body, request):
        self.generating = (body.max_tokens or 0) > 1
        return await super().completions(body, request)

    def find_arm(self, name: str) -> ServedArm:
        if self.posing == "sglang" and name == "tiny":
            name = BASE
        arm = super().find_arm(name)
        self.count += 1
        busy = self.worker.running + self.worker.waiting > 0
        if self.fault == "dies" and self.count > DEADLY:
            os._exit(1)
        if name == BASE:
            harmed = {"base-after": self.was_asked, "base-among": busy, "base-loaded": self.loaded}
            return ServedArm(BASE, True, None, "a") if harmed.get(self.fault) else arm
        self.was_asked = True
        if name not in self.loaded:
            raise app_module.ApiError(404, f"there is no model {name!r} here")
        root = self.loaded[name]
        if self.fault == "stale" or (self.fault == "stale-cache" and self.generating):
            root = self.roots[name]
        arms = {self.roots[each]: self.arms[each] for each in self.roots}
        if self.fault == "exchanged":
            arms[self.roots[FIRST]], arms[self.roots[SECOND]] = (
                arms[self.roots[SECOND]],
                arms[self.roots[FIRST]],
            )
        if (self.fault, name) == ("wrong", FIRST):
            return self.arms[SECOND]
        if (self.fault, name) == ("mixed", SECOND) and busy:
            return self.arms[FIRST]
        return arms[root]

    def describe(self, arm: ServedArm) -> dict[str, object]:
        told = super().describe(arm)
        if self.posing == "ktbridge":
            return told
        del told["description"], told["fingerprint"]
        told |= {"owned_by": self.posing, "root": self.loaded.get(arm.name, arm.name)}
        if self.posing == "sglang":  # lists NAME for what requests call S:NAME
            base = arm.name == BASE
            told["id"], told["parent"] = ("tiny", None) if base else (arm.name[5:], "tiny")
        return told

    def served_name(self, body: dict[str, str]) -> str:
        return ("tiny:" if self.posing == "sglang" else "") + body["lora_name"]

    def load(self, body: dict[str, str]) -> Response:
        name, path = self.served_name(body), body["lora_path"]
        if self.fault == "dies-loading":
            os._exit(1)
        if name in self.loaded or path not in self.roots.values():
            return JSONResponse({"error": {"message": f"{name} or {path} is wrong"}}, 400)
        if self.fault == "unloadable" and path != self.roots[name]:
            return JSONResponse({"error": {"message": f"no adapter in {path}"}}, 400)
        self.loaded[name] = path
        return self.said(f"Success: LoRA adapter '{name}' added successfully.")

    def unload(self, body: dict[str, str]) -> Response:
        if self.loaded.pop(self.served_name(body), None) is None:
            return JSONResponse({"error": {"message": "The lora adapter cannot be found."}}, 404)
        return self.said("Success: LoRA adapter removed successfully.")

    def said(self, text: str) -> Response:
        if self.posing == "vllm":
            return PlainTextResponse(text)
        return JSONResponse({"success": True, "loaded_adapters": self.loaded})


FOUND: list[Faulty] = []


def create_app(*args, **options) -> Starlette:
    app = make_app(*args, **options)
    (service,) = FOUND

    def route(path: str, act) -> None:
        async def answer(request: Request) -> Response:
            return act(await request.json())

        app.add_route(path, answer, methods=["POST"])

    def when(engine: str, act):
        def answer(body: dict[str, str]) -> Response:
            return act(body) if service.posing == engine else JSONResponse({}, 404)

        return answer

    for prefix, engine in (("/v1", "vllm"), ("", "sglang")):
        route(f"{prefix}/load_lora_adapter", when(engine, service.load))
        route(f"{prefix}/unload_lora_adapter", when(engine, service.unload))

    def plant(body: dict[str, str]) -> Response:
        service.plant(body["name"], body["engine"])
        return JSONResponse(service.loaded)

    route("/fault", plant)
    return app


if __name__ == "__main__":
    base, *given = sys.argv[1:]
    adapters = dict(each.split("=") for each in given)
    Faulty.roots = {f"tiny:{name}": path for name, path in adapters.items()}
    make_app, app_module.create_app, app_module.Service = app_module.create_app, create_app, Faulty
    plan = plan_local(ServeRequest(model=base, adapters=adapters, served_name="tiny", port=0, threads=1))

    def ready(url: str) -> None:
        print(json.dumps({"base_url": url}), flush=True)

    serve(plan, ready)
