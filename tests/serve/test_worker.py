"""The queue in front of the model: bounded, and nothing that goes wrong in it is lost."""

from __future__ import annotations

import asyncio
import threading

import pytest

from ktbridge.serve.local.decode import Cancelled, Delta, Finish
from ktbridge.serve.local.worker import Job, QueueFull, ServerStopping, Worker


async def read(job: Job) -> list:
    return [event async for event in job]


def test_order_limit_and_end():
    async def scenario() -> None:
        worker, release = Worker(max_waiting=2), threading.Event()

        def slow(cancelled):
            release.wait(10)
            yield Delta("slow")
            if cancelled():
                raise Cancelled
            yield Finish("stop", 1)

        def broken(_):
            yield Delta("half")
            raise ZeroDivisionError

        running = Job(slow)
        worker.submit(running)
        while worker.waiting:
            await asyncio.sleep(0.01)
        failing, waiting = Job(broken), Job(slow)
        worker.submit(failing)
        worker.submit(waiting)
        with pytest.raises(QueueFull):
            worker.submit(Job(slow))
        release.set()
        assert await read(running) == [Delta("slow"), Finish("stop", 1)]
        with pytest.raises(ZeroDivisionError):
            await read(failing)
        assert await read(waiting) == [Delta("slow"), Finish("stop", 1)]

        release.clear()
        under_way, behind = Job(slow), Job(slow)
        worker.submit(under_way)
        worker.submit(behind)
        while worker.waiting > 1:
            await asyncio.sleep(0.01)
        worker.close()
        release.set()
        for job in (under_way, behind):
            with pytest.raises(ServerStopping):
                await read(job)
        with pytest.raises(ServerStopping):
            worker.submit(Job(slow))
        worker.join(5)

    asyncio.run(scenario())
