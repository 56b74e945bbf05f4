"""SGLang's HTTP interface: one coroutine a call, typed replies, a limit on each.

aiohttp, because a group is one connection and hundreds run at a time: at 256 of them httpx costs 20 to 40 times the
processor time. Nothing here is retried: a repeated `/generate` would do its work twice and on another version perhaps,
and a repeated update cannot be told from a half-done one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, TypeVar

import aiohttp
import msgspec

from components.broadcast.session import Described, Place

CONTROL_S = 30.0
"""Seconds a short control call may take."""
IDLE_S = 1.0
"""Seconds a connection may be idle before it is closed."""
LOOK_S = 3.0
"""Seconds a look at the server's state may take."""


class ServerError(Exception):
    """The server did not do what was asked.

    Attributes:
        status: HTTP status; 0 when no answer came.
        late: Whether there was none within the limit, which a busy server may miss.
    """

    def __init__(self, status: int, message: str, late: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.late = late


class VersionSpan(msgspec.Struct):
    """Tokens `start` to `end` were sampled with `version`."""

    version: str
    start: int
    end: int


class Finish(msgspec.Struct):
    """Why a completion ended."""

    type: str
    message: str = ""
    status_code: int | None = None


class Meta(msgspec.Struct):
    """`meta_info` of a completion."""

    id: str
    finish_reason: Finish | None
    completion_tokens: int
    output_token_logprobs: list[tuple[float, int, str | None]] = []
    weight_version: str = ""
    weight_versions: list[VersionSpan] | None = None
    routed_experts: str | None = None
    """Base64 of int32 [prompt + completion - 1, layers, top-k]."""
    cached_tokens: int = 0
    prompt_tokens: int = 0


class Chunk(msgspec.Struct):
    """A partial or whole completion; partial ones hold what is new, or all so far if the server was started that way."""

    output_ids: list[int]
    meta_info: Meta
    index: int = 0


class StreamError(msgspec.Struct):
    """An error in the middle of a stream."""

    error: dict[str, Any]


class Done(msgspec.Struct):
    """Answer of an update."""

    success: bool
    message: str = ""


class ModelInfo(msgspec.Struct):
    """What is served."""

    model_path: str
    weight_version: str = ""
    architectures: list[str] | None = None


class InternalState(msgspec.Struct):
    """What a scheduler says of itself."""

    weight_version: str = ""
    last_gen_throughput: float = 0.0


class ServerInfo(msgspec.Struct):
    """How the server was started, and that its scheduler answers."""

    version: str
    dtype: str = ""
    max_req_input_len: int = 0
    tp_size: int = 1
    incremental_streaming_output: bool = False
    enable_return_routed_experts: bool = False
    internal_states: list[InternalState] = []


class RankChecksums(msgspec.Struct):
    """Checksum of every parameter of one rank."""

    checksums: dict[str, str]


class Checksums(msgspec.Struct):
    """Answer of the weights checker."""

    success: bool
    message: str = ""
    ranks: list[RankChecksums] | None = None


T = TypeVar("T")
_chunk = msgspec.json.Decoder(Chunk)
_chunks = msgspec.json.Decoder(Chunk | list[Chunk])


class SGLangClient:
    """Calls to one server. Every method raises `ServerError` when the server refuses, fails, or does not answer."""

    def __init__(self, url: str, key: str = "") -> None:
        self.url = url
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        # The server closes a connection that was idle for 5 s; one that is used at that moment breaks.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S)
        self._http = aiohttp.ClientSession(
            url, headers=headers, connector=connector, timeout=aiohttp.ClientTimeout(None)
        )

    async def close(self) -> None:
        """Drop all connections; the server aborts what streams over them."""
        await self._http.close()

    async def generate(self, body: dict[str, Any]) -> AsyncIterator[Chunk]:
        """Chunks of all completions of a request, in the order they come; the caller limits the wait for each."""
        content = msgspec.json.encode(body)
        try:
            async with self._http.post("/generate", data=content, headers=_JSON) as reply:
                if reply.status != 200:
                    raise ServerError(reply.status, _message(await reply.read()))
                if body.get("stream"):
                    # An aiohttp line may have 128 KiB; the last chunk holds the experts of a whole completion.
                    async for line in _lines(reply.content):
                        if line.startswith(b"data: {"):
                            yield _decoded(line[6:])
                    return
                found = _chunks.decode(await reply.read())
                for index, chunk in enumerate(found if isinstance(found, list) else [found]):
                    chunk.index = index
                    yield chunk
        except (aiohttp.ClientError, OSError) as error:
            raise ServerError(0, f"the connection broke ({type(error).__name__}: {error})") from None
        except msgspec.MsgspecError as error:
            raise ServerError(200, f"/generate answered something else than expected ({error})") from None

    async def abort(self, rid: str = "") -> None:
        """End one request as aborted, or all without `rid`; an unknown one is not an error."""
        await self._call("/abort_request", {"rid": rid} if rid else {"abort_all": True}, None)

    async def pause(self, mode: str) -> None:
        """Stop sampling; `in_place` or `retract`."""
        await self._call("/pause_generation", {"mode": mode}, None)

    async def resume(self) -> None:
        """Go on sampling."""
        await self._call("/continue_generation", {"torch_empty_cache": False}, None)

    async def flush(self) -> None:
        """Forget all keys and values; refused while requests run."""
        await self._call("/flush_cache", {}, None)

    async def begin(self) -> None:
        """Open an update."""
        await self._update("/begin_weight_update", {})

    async def end(self) -> None:
        """Close an update."""
        await self._update("/end_weight_update", {})

    async def update_from_disk(self, folder: str, label: str, flush: bool, limit_s: float) -> None:
        """Read a Hugging Face folder."""
        body = {"model_path": folder, "weight_version": label, "flush_cache": flush, "abort_all_requests": False}
        await self._update("/update_weights_from_disk", body, limit_s)

    async def update_from_distributed(
        self, tensors: list[Described], group: str, label: str, flush: bool, limit_s: float
    ) -> None:
        """Receive tensors from rank 0 of a group, as one message of their bytes in order; a label names the version."""
        names, dtypes, shapes = (list(part) for part in zip(*tensors, strict=True))
        body = {"names": names, "dtypes": dtypes, "shapes": shapes, "group_name": group, "flush_cache": flush,
                "load_format": "flattened_bucket"}  # fmt: skip
        await self._update(
            "/update_weights_from_distributed", body | ({"weight_version": label} if label else {}), limit_s
        )

    async def join(self, address: str, port: int, place: Place, backend: str, limit_s: float) -> None:
        """Join a process group; returns when all its ranks have."""
        body = {"master_address": address, "master_port": port, "rank_offset": place.rank, "world_size": place.world,
                "group_name": place.group, "backend": backend}  # fmt: skip
        await self._update("/init_weights_update_group", body, limit_s)

    async def leave(self, name: str) -> None:
        """Leave a process group."""
        await self._update("/destroy_weights_update_group", {"group_name": name})

    async def checksums(self, limit_s: float) -> list[dict[str, str]]:
        """Checksum of every parameter, by rank."""
        found = await self._call("/weights_checker", {"action": "checksum"}, Checksums, limit_s)
        if not found.success or not found.ranks:
            raise ServerError(200, f"no checksums: {found.message}")
        return [rank.checksums for rank in found.ranks]

    async def model_info(self, limit_s: float = CONTROL_S) -> ModelInfo:
        """What is served, with which label."""
        return await self._call("/model_info", None, ModelInfo, limit_s)

    async def server_info(self, limit_s: float = CONTROL_S) -> ServerInfo:
        """How it was started; the scheduler takes part in the answer."""
        return await self._call("/server_info", None, ServerInfo, limit_s)

    async def accepts(self, limit_s: float = LOOK_S) -> bool | None:
        """Whether new requests are taken: not while paused, starting or ending. None where a version cannot tell."""
        try:
            await self._call("/ready", None, None, limit_s)
        except ServerError as error:
            if error.status in (503, 404):
                return False if error.status == 503 else None
            raise
        return True

    async def _update(self, path: str, body: dict[str, Any], limit_s: float = CONTROL_S) -> None:
        done = await self._call(path, body, Done, limit_s)
        if not done.success:
            raise ServerError(200, f"{path}: {done.message}")

    async def _call(
        self, path: str, body: dict[str, Any] | None, kind: type[T] | None, limit_s: float = CONTROL_S
    ) -> T:
        """One request; without a `kind` the answer's content is not looked at."""
        method, content = ("GET", None) if body is None else ("POST", msgspec.json.encode(body))
        timeout = aiohttp.ClientTimeout(limit_s)
        try:
            async with self._http.request(method, path, data=content, headers=_JSON, timeout=timeout) as reply:
                answer = await reply.read()
        except TimeoutError:
            raise ServerError(0, f"{path} did not answer within {limit_s:g} s", late=True) from None
        except (aiohttp.ClientError, OSError) as error:
            raise ServerError(0, f"{path}: no answer ({type(error).__name__}: {error})") from None
        if reply.status != 200:
            raise ServerError(reply.status, f"{path}: {_message(answer)} (HTTP {reply.status})")
        if kind is None:
            return None  # type: ignore[return-value]
        try:
            return msgspec.json.decode(answer, type=kind)
        except msgspec.MsgspecError as error:
            raise ServerError(200, f"{path} answered something else than expected ({error})") from None


_JSON = {"Content-Type": "application/json"}


async def _lines(stream: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Lines of any length."""
    rest = bytearray()
    async for part in stream.iter_any():
        rest += part
        if b"\n" in part:
            *whole, last = rest.split(b"\n")
            rest = bytearray(last)
            for line in whole:
                yield bytes(line)


def _decoded(line: bytes) -> Chunk:
    try:
        return _chunk.decode(line)
    except msgspec.MsgspecError:
        try:
            failure = msgspec.json.decode(line, type=StreamError)
        except msgspec.MsgspecError:
            raise ServerError(200, f"the stream held something else than expected: {line[:200]!r}") from None
        raise ServerError(
            int(failure.error.get("code") or 500), str(failure.error.get("message", failure.error))
        ) from None


def _message(answer: bytes) -> str:
    """What a refusal says, whatever its form."""
    try:
        found = msgspec.json.decode(answer)
    except msgspec.MsgspecError:
        return answer.decode(errors="replace").strip()[:500] or "no reason given"
    if isinstance(found, dict):
        error = found.get("error", found.get("message", found.get("detail", found)))
        found = error.get("message", error) if isinstance(error, dict) else error
    return str(found)[:500]
