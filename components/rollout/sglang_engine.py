"""The `sglang` engine: one SGLang server, started by its worker or joined, behind the engine contract.

Prefixes are shared through the server's radix cache. SGLang does not tell the versions of its entries apart, and under
an in-place pause the cache cannot be flushed, so every load gives the requests after it a new extra key: keys and
values of older weights are never found by a new prompt.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import suppress
from pathlib import Path
from typing import Any

from components.experience.deliveries import Target
from components.rollout.engine import (
    Collective,
    Completion,
    EngineBroken,
    Health,
    Held,
    Pull,
    Request,
    State,
    UpdateMode,
)
from components.rollout.sglang_client import LOOK_S, ServerError, SGLangClient
from components.rollout.sglang_expectation import Expectation
from components.rollout.sglang_flags import render
from components.rollout.sglang_flight import Flight, Room
from components.rollout.sglang_joined import JoinedServer
from components.rollout.sglang_server import SGLangServer, find_python
from components.rollout.sglang_update import receive
from configs.failure import Failure, ServiceGone
from configs.hardware import load_hardware
from configs.run import RunConfig
from configs.stack import load_stack

PARTIAL_S = 0.25
"""Seconds between two partial results of a group, at least."""
WATCH_S = 0.5
"""Seconds between looks whether the server still makes tokens."""
DRAIN_S = 10.0
"""Seconds aborted requests may take to end."""


class SGLangEngine:
    """Generates with one SGLang server.

    Attributes:
        notes: Sentences on what the server's options cost.
        ranks: Processes of the server that take part in a collective transfer.
        sampling: Sampling parameters beside those of a request (for measurements).
    """

    def __init__(self, config: RunConfig, start: Path, log: Path, worker: str, tokenizer: bool = False) -> None:
        """
        Args:
            start: Hugging Face folder of the policy the run starts from.
            log: File that takes the output of a server that is started here.
            worker: Name of the worker, `rollout-<number>`.
            tokenizer: Whether a server that is started here also makes text (for measurements).

        Raises:
            BadConfig: the configuration asks for what the stack's SGLang or the hardware does not have.
        """
        stack = load_stack(config.stack)
        self.notes: list[str] = []
        self.ranks = config.sglang.tensor_parallel
        self.sampling: dict[str, Any] = {}
        self._config = config.sglang
        self._weights = config.weights
        self._worker = worker
        self._expected = Expectation(config, stack, start)
        self._server: SGLangServer | JoinedServer
        if config.sglang.urls or config.sglang.service:
            self._server = JoinedServer(config.sglang, worker)
        else:
            launch = render(config.sglang, config.weights, load_hardware(config.hardware), stack, start, tokenizer)
            self.notes = launch.notes
            self._server = SGLangServer(config.sglang, launch, find_python(config.sglang), log)
        self._client: SGLangClient | None = None
        self._room = Room(config.sglang.requests_in_flight)
        self._flights: set[Flight] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._serial = 0
        self._session = ""
        self._refused = False
        self._vain = 0
        self._opening = False
        self._trouble = "it is not open"
        self._forget()

    def _forget(self) -> None:
        """What is known of a server that has just been opened: nothing."""
        self._paused: UpdateMode | None = None
        self._going = asyncio.Event()
        self._held = Target(-1, "")
        self._labels: set[str] = set()
        self._extra_key = secrets.token_hex(8)
        self._session = ""
        self._progress = time.monotonic()

    @property
    def server(self) -> SGLangServer | JoinedServer:
        """The server it generates with."""
        return self._server

    async def open(self) -> None:
        """See `Engine.open`; opening it again restarts an own server, or waits for a joined one.

        Raises:
            BadConfig: the server is not what the run needs.
            ServiceGone: it does not answer within its limits.
        """
        self._opening = True
        self._vain += 1
        try:
            if self._vain > self._config.max_restarts + 1:
                raise ServiceGone(
                    f"{self._worker}: its SGLang server was taken up {self._vain - 1} times and finished no completion since;"
                    f" the last time {self._trouble}"
                )
            await self._drop("the server is opened anew")
            self._forget()
            self._client = await self._reached()
            try:
                # An update that broke off is still open, and would refuse the next one.
                with suppress(ServerError):
                    await self._client.end()
                self._expected.check(
                    self._client.url, await self._client.server_info(), await self._client.model_info()
                )
                self.ranks = self._expected.ranks
                await self._client.pause("retract")
            except ServerError as error:
                raise ServiceGone(f"the SGLang server at {self._client.url}: {error}") from None
            except Failure:
                await self.close()
                raise
            self._paused = "retract"
            self._trouble = ""
            self._spawn(self._look_after())
        finally:
            self._opening = False

    def _own_state(self) -> State:
        return State.READY if self._paused is None else State.PAUSED

    async def _reached(self) -> SGLangClient:
        """A connection to the server; one that lives and only refused a load is not started anew."""
        kept, self._refused = self._refused, False
        if kept and isinstance(self._server, SGLangServer) and self._server.alive:
            client = SGLangClient(self._server.url, self._server.key)
            try:
                await client.server_info(LOOK_S)
                await client.abort()
                return client
            except ServerError:
                await client.close()
        self._session = ""
        return await self._server.connect()

    async def close(self) -> None:
        """See `Engine.close`; a joined server goes on, without the requests of this worker."""
        if isinstance(self._server, JoinedServer) and self._client is not None and not self._trouble:
            with suppress(ServerError):
                await self._abort(self._running())
        await self._drop("the engine was closed")
        if isinstance(self._server, SGLangServer):
            await self._server.stop()

    async def _drop(self, reason: str) -> None:
        """Let go of all requests and connections."""
        self._trouble = self._trouble or reason
        for flight in self._flights:
            flight.fail(EngineBroken(reason))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._client is not None:
            await self._client.close()
            self._client = None

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _sound(self) -> SGLangClient:
        if self._trouble or self._client is None:
            raise EngineBroken(f"{self._worker}: {self._trouble}")
        return self._client

    async def _control(self, call: Awaitable[Any]) -> Any:
        """A call that has to succeed."""
        try:
            return await call
        except ServerError as error:
            raise await self._broken(str(error)) from None

    async def _broken(self, reason: str) -> EngineBroken:
        """Serve nothing any more; an own server that died tells why."""
        if isinstance(self._server, SGLangServer) and not self._trouble:
            reason = await self._server.explain(reason)
        self._trouble = self._trouble or reason
        failure = EngineBroken(f"{self._worker}: {self._trouble}")
        for flight in self._flights:
            flight.fail(failure)
        return failure

    async def generate(self, request: Request) -> AsyncIterator[list[Completion]]:
        """See `Engine.generate`."""
        self._sound()
        self._expected.check_request(request)
        self._serial += 1
        flight = Flight(request, self._serial, self._held.version, self._expected.ends)
        self._flights.add(flight)
        reading = self._spawn(self._read(flight))
        try:
            while not flight.ended:
                await flight.changed.wait()
                flight.changed.clear()
                if flight.failure is not None:
                    raise flight.failure
                if not flight.ended:
                    yield flight.completions()
                    await asyncio.wait((reading,), timeout=PARTIAL_S)
            yield flight.completions()
        finally:
            self._flights.discard(flight)
            if not flight.ended:
                reading.cancel()
                if flight.sent and not self._trouble:
                    with suppress(ServerError):
                        await self._abort([flight])

    async def _read(self, flight: Flight) -> None:
        """Send a group and take in what comes back."""
        try:
            async with self._room.take(len(flight.rids)):
                await self._going.wait()
                if flight.ended:
                    return
                client, shape = self._sound(), self._expected.expert_shape
                flight.sent = True
                flight.holds(self._held.version)
                async for chunk in client.generate(
                    flight.body(self._extra_key, self.sampling, self._config.routed_experts)
                ):
                    self._progress = time.monotonic()
                    flight.add(chunk, self._held.version, shape, self._labels)
            if flight.ended:
                self._vain = 1
                if isinstance(self._server, SGLangServer):
                    self._server.settled()
            else:
                raise ServerError(0, "the connection ended before the completions did")
        except ServerError as error:
            await self._broken(f"group {flight.request.group}: {error}")
        except EngineBroken as broken:
            await self._broken(broken.sentence)

    async def _look_after(self) -> None:
        """Notice a server that died or makes no more tokens."""
        while not self._trouble:
            await asyncio.sleep(WATCH_S)
            if isinstance(self._server, SGLangServer) and not self._server.alive:
                await self._broken("the SGLang server died")
            now = time.monotonic()
            if self._paused is not None or not self._running():
                self._progress = now
            elif now - self._progress > self._config.request_s:
                health = await self.health()
                why = f" ({health.sentence})" if health.sentence else ""
                await self._broken(f"the SGLang server made no token for {self._config.request_s:g} s{why}")

    def _running(self) -> list[Flight]:
        return [flight for flight in self._flights if flight.sent and not flight.ended]

    async def abort(self, group: int | None = None) -> None:
        """See `Engine.abort`. Under an `in_place` pause, those of a single group end with the resume."""
        client = self._sound()
        for flight in self._flights:
            if group in (None, flight.request.group) and not flight.sent:
                flight.abort()
        running = [flight for flight in self._running() if group in (None, flight.request.group)]
        if running and group is None and self._paused == "in_place":
            # Marked while it stands still, a request would yet take the next step, with the next weights perhaps.
            await self._control(client.pause("retract"))
            self._paused = "retract"
        await self._control(self._abort(running))

    async def _abort(self, flights: list[Flight]) -> None:
        assert self._client is not None
        await asyncio.gather(*(self._client.abort(rid) for flight in flights for rid in flight.rids))

    async def pause(self, mode: UpdateMode) -> None:
        """See `Engine.pause`."""
        client = self._sound()
        self._going.clear()
        if mode == "abort" and self._paused is None:
            # SGLang's own `abort` takes a second. Aborted while they run, requests give all tokens they have.
            await self.abort()
            end = time.monotonic() + DRAIN_S
            while self._running() and not self._trouble and time.monotonic() < end:
                await asyncio.sleep(0.002)
        await self._control(client.pause("in_place" if mode == "in_place" else "retract"))
        self._paused = mode
        if mode == "abort":
            await self.abort()

    async def resume(self) -> None:
        """See `Engine.resume`."""
        await self._control(self._sound().resume())
        self._paused = None
        self._progress = time.monotonic()
        self._going.set()

    async def load(self, target: Target, source: Pull | Collective, mode: UpdateMode) -> None:
        """See `Engine.load`."""
        client = self._sound()
        if self._paused is None:
            raise ValueError("an engine is loaded only while it is paused")
        # Requests that stand still hold keys and values, so that SGLang refuses to flush the cache.
        flush = mode != "in_place"
        try:
            if isinstance(source, Pull):
                folder = str(source.folder.absolute())
                await client.update_from_disk(folder, target.label, flush, self._weights.verify_timeout_s)
            else:
                limit = self._weights.transfer_timeout_s
                self._session = await receive(client, source, target, self._worker, self._session, flush, limit)
        except ServerError as error:
            self._refused = error.status == 400
            raise await self._broken(f"version {target.version} was not loaded: {error}") from None
        except asyncio.CancelledError:
            self._trouble = self._trouble or f"the load of version {target.version} was interrupted"
            raise
        self._held = target
        self._labels.add(target.label)
        self._extra_key = f"{secrets.token_hex(8)}:{target.label}"

    async def held(self) -> Held:
        """See `Engine.held`; with several ranks a parameter's name is preceded by `<rank>/`."""
        client = self._sound()
        ranks = await self._control(client.checksums(self._weights.verify_timeout_s))
        label = (await self._control(client.model_info())).weight_version
        if len(ranks) == 1:
            return Held(label, checksums=ranks[0])
        named = {f"{rank}/{name}": value for rank, found in enumerate(ranks) for name, value in found.items()}
        return Held(label, checksums=named)

    async def health(self) -> Health:
        """See `Engine.health`; a pause by somebody else is told from one of this worker."""
        if self._opening:
            return Health(State.STARTING)
        if self._trouble or self._client is None:
            return Health(State.BROKEN, self._trouble)
        if isinstance(self._server, SGLangServer) and not self._server.alive:
            return Health(State.BROKEN, await self._server.explain("the SGLang server died"))
        ours = self._paused
        try:
            # Its scheduler takes part in this answer, so a hung one is noticed.
            await self._client.server_info(LOOK_S)
            accepts = await self._client.accepts()
        except ServerError as error:
            busy = error.late and time.monotonic() - self._progress <= self._config.request_s
            return Health(self._own_state(), str(error)) if busy else Health(State.BROKEN, str(error))
        if ours != self._paused or accepts is None:
            return Health(self._own_state())
        if ours is not None:
            return Health(State.BROKEN, "somebody else resumed the server") if accepts else Health(State.PAUSED)
        return Health(State.READY) if accepts else Health(State.PAUSED, "somebody else paused the server")
