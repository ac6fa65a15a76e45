"""Exchange a running server's adapters by name, through the API that vLLM and SGLang have for it.

vLLM: POST /v1/load_lora_adapter and /v1/unload_lora_adapter, where it runs with
VLLM_ALLOW_RUNTIME_LORA_UPDATING=1; it answers with a sentence. SGLang: the same paths without /v1, answered
with JSON. Both take ``lora_name`` and ``lora_path``, a path of the server's own machine, which their lists of
models have as ``root``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from ktbridge.codes import problem
from ktbridge.errors import KtbridgeError, Problem, ProblemsError
from ktbridge.server_api.client import OpenAIClient, Refused
from ktbridge.server_api.served_names import ModelEntry, engine_of, listed_as

NATIVE = {"vllm": False, "sglang": True}
"""Engines with this API -> whether its paths stand beside /v1."""
_STEP = (
    "start vLLM with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, or leave out --reload: SGLang and vLLM alone can "
    "load adapters while they run"
)


class AdapterLoader:
    """Loads and unloads the adapters of one server; ``roots``: served name -> the server's path of it.

    Raises KtbridgeError for a server that has no API for it, or doesn't say where its adapters lie.
    """

    def __init__(
        self, server: OpenAIClient, entries: Mapping[str, ModelEntry], models: Sequence[str]
    ) -> None:
        engine = engine_of(entries)
        if engine not in NATIVE:
            raise KtbridgeError(
                f"{server.url} is served by {engine or 'an engine that it does not name'}, which has no API "
                "to load adapters.",
                _STEP,
            )
        self._server, self._native = server, NATIVE[engine]
        self._listed = {model: listed_as(model, entries) or model for model in models}
        self.roots = {m: str(entries[listed].get("root") or "") for m, listed in self._listed.items()}
        if unknown := [model for model, root in self.roots.items() if not root]:
            raise KtbridgeError(
                f"{server.url} does not say from where it loaded {', '.join(unknown)}.", "leave out --reload"
            )
        self._loaded: dict[str, str | None] = dict(self.roots)

    def unload(self, model: str) -> None:
        """Unload the adapter of a served name. Raises KtbridgeError if the server refuses."""
        self._send("unload_lora_adapter", {"lora_name": self._listed[model]})
        self._loaded[model] = None

    def load(self, model: str, root: str) -> None:
        """Load the adapter in ``root`` under a served name. Raises KtbridgeError if the server refuses."""
        self._send("load_lora_adapter", {"lora_name": self._listed[model], "lora_path": root})
        self._loaded[model] = root

    def _send(self, path: str, body: Mapping[str, object]) -> None:
        try:
            self._server.send(f"/{path}", body, native=self._native)
        except Refused as refused:
            if self._loaded != self.roots:
                raise
            # Nothing was changed: this server lets nobody exchange its adapters.
            if refused.status in (404, 405):
                said = f"{self._server.url} has no API to load adapters ({refused.reason})."
                raise KtbridgeError(said, _STEP) from refused
            said = f"{self._server.url} lets no adapter be loaded ({refused.reason.rstrip('.')})."
            raise KtbridgeError(said, "leave out --reload") from refused

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """Context: whatever happens in it, each name gets its own adapter back.

        Raises ProblemsError (KTV026) for names that don't.
        """
        try:
            yield
        except BaseException as error:
            failed = list(self._put_back())
            if not failed:
                raise
            sentence = error.sentence if isinstance(error, KtbridgeError) else "the check was interrupted."
            raise ProblemsError(sentence, failed) from error
        if failed := list(self._put_back()):
            raise ProblemsError("the check has left the server's adapters otherwise.", failed)

    def _put_back(self) -> Iterator[Problem]:
        for model, root in self.roots.items():
            if self._loaded[model] == root:
                continue
            try:
                if self._loaded[model] is not None:
                    self.unload(model)
                self.load(model, root)
            except KtbridgeError as error:
                found = f"{root} could not be loaded again: {error.sentence}"
                yield problem("KTV026", model, found, root)
