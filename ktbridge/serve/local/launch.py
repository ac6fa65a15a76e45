"""One server process: bind the port, load, serve until a signal, clean up."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from ktbridge.errors import KtbridgeError
from ktbridge.serve.local.plan import ServePlan, fingerprints
from ktbridge.server_api import hosts

if TYPE_CHECKING:
    from ktbridge.serve.local.batch import Worker

GRACE_SECONDS = 5  # for what is left after aborting everything


def serve(
    plan: ServePlan, on_ready: Callable[[str], None], on_loading: Callable[[], None] = lambda: None
) -> None:
    """Serve ``plan`` until SIGINT or SIGTERM; ``on_ready(base_url)`` when requests are answered.

    ``on_loading`` is called once the port is bound.

    Raises KtbridgeError when the port is taken (before the model is loaded) or the model or an
    adapter does not load, or the thread that computes dies.
    """
    listener = hosts.bind(plan.host, plan.port)
    try:
        on_loading()
        from ktbridge.serve.local.app import create_app
        from ktbridge.serve.local.loading import load_engine

        engine = load_engine(plan)
        app = create_app(engine, plan.arms, fingerprints(plan), api_key=plan.api_key, limits=plan.limits)
        try:
            listener.listen(128)
        except OSError as error:
            raise hosts.listen_error(plan.host, plan.port, error) from error
        config = uvicorn.Config(
            app,
            http="h11",
            ws="none",
            log_level="error",  # a broken request is a warning: its client is told, not the log
            access_log=False,
            timeout_graceful_shutdown=int(plan.limits.drain_seconds) + GRACE_SECONDS,
            server_header=False,
        )
        worker = app.state.worker
        url = f"{hosts.url_from_here(*listener.getsockname()[:2])}/v1"
        server = _Server(config, worker, plan.limits.drain_seconds, lambda: on_ready(url))
        worker.on_failure = server.stop
        gc.freeze()  # a collection among all that was imported and loaded stops everyone for half a second
        try:
            asyncio.run(server.serve(sockets=[listener]))
        finally:
            gc.unfreeze()
        if worker.failure is not None:
            raise KtbridgeError(
                f"the thread that computes has died: {type(worker.failure).__name__}: {worker.failure}.",
                "start the server again; the lines above say where it was",
            )
    finally:
        listener.close()


class _Server(uvicorn.Server):
    """uvicorn that says when it is ready, ended by signals in two steps.

    The first signal lets answers in progress finish, for ``seconds`` at most; the second aborts them.
    """

    def __init__(
        self, config: uvicorn.Config, worker: Worker, seconds: float, on_ready: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._worker, self._seconds, self._on_ready = worker, seconds, on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Have the event loop handle signals: a handler might interrupt a holder of the queue's lock.

        uvicorn's own method raises them once more at the end, which would kill whoever called us.
        """
        loop, wanted = asyncio.get_running_loop(), (signal.SIGINT, signal.SIGTERM)
        for number in wanted:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in wanted:
                loop.remove_signal_handler(number)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self._worker.close()
            return
        self.should_exit = True
        self._worker.drain()
        # Answers that take too long end with an error that states the reason.
        asyncio.get_running_loop().call_later(self._seconds, self._worker.close)

    def stop(self) -> None:
        """End without a signal; from any thread."""
        self.should_exit = True
