"""The `torch` engine behind the engine contract: groups that are asked for together are generated as one batch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import numpy as np
import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file

from components.experience.deliveries import Target
from components.experience.group import FinishReason, Span
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
    extended,
)
from components.rollout.torch_engine import Batch, Generation, Sampling, check_prompts
from components.rollout.torch_policy import TorchPolicy
from components.weights.store import digest_of, fingerprint
from configs.failure import BadData

TOKENS_A_LOOK = 16
"""Tokens between looks at unfinished completions."""


class Asked:
    """A request on its way through a batch."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.completions = [msgspec.structs.replace(one) for one in request.begun]
        self.rows = [index for index, one in enumerate(request.begun) if one.finish is None]
        self.ended = False
        self.changed = asyncio.Event()

    @property
    def sampling(self) -> tuple[float, bool, int]:
        """What requests of one batch must have in common."""
        return self.request.temperature, self.request.greedy, self.request.seed

    @property
    def fresh(self) -> bool:
        """Whether no completion has a token yet, so that the prompt is computed once for all."""
        return len(self.rows) == len(self.request.begun) and not any(one.tokens.size for one in self.request.begun)


class InProcessEngine:
    """Generates with a `TorchPolicy` in the worker's own process and event loop."""

    def __init__(self, policy: TorchPolicy) -> None:
        self.policy = policy
        self._label = ""
        self._version = -1
        self._going = asyncio.Event()
        self._going.set()
        self._retracted = False
        self._queue: list[Asked] = []
        self._batch: list[Asked] = []
        self._made: tuple[Batch, list[int]] | None = None
        self._driver: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Nothing is started: the policy is there."""

    async def close(self) -> None:
        """End the batch that runs."""
        if self._driver is not None:
            self._driver.cancel()

    async def generate(self, request: Request) -> AsyncIterator[list[Completion]]:
        """See `Engine.generate`; all groups of a batch end together."""
        asked = Asked(request)
        if not asked.rows:
            yield asked.completions
            return
        self._check(asked)
        self._queue.append(asked)
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._drive())
        try:
            while not asked.ended:
                await self._wait(asked)
                yield list(asked.completions)
        finally:
            self._end(asked)

    async def abort(self, group: int | None = None) -> None:
        """See `Engine.abort`."""
        chosen = [one for one in (*self._queue, *self._batch) if group in (None, one.request.group)]
        if self._made is not None and self._made[0].columns:
            self._tell(*self._made)
        for asked in chosen:
            self._end(asked)

    async def pause(self, mode: UpdateMode) -> None:
        """See `Engine.pause`."""
        self._going.clear()
        if mode == "abort":
            await self.abort()
        elif mode == "retract":
            self._retracted = True

    async def resume(self) -> None:
        """See `Engine.resume`."""
        self._going.set()

    async def load(self, target: Target, source: Pull | Collective, mode: UpdateMode) -> None:
        """Copy a version's tensors into the policy; one that does not fit leaves the policy as it was.

        Raises:
            BadData: the folder cannot be read, or holds other tensors.
        """
        if not isinstance(source, Pull):
            raise EngineBroken("the torch engine is in no process group; set weights.transfer to pull")
        tensors: dict[str, torch.Tensor] = {}
        for file in sorted(source.folder.glob("*.safetensors")):
            try:
                tensors |= load_file(file)
            except (OSError, SafetensorError) as error:
                raise BadData(f"{file}: version {target.version} cannot be read ({error})") from None
        self.policy.load(tensors, str(source.folder))
        self._label, self._version = target.label, target.version

    async def held(self) -> Held:
        """The digest of the policy's own memory."""
        return Held(self._label, digest_of(fingerprint(self.policy.stored())))

    async def health(self) -> Health:
        """Always alive while the process is."""
        return Health(State.READY if self._going.is_set() else State.PAUSED)

    async def _wait(self, asked: Asked) -> None:
        """Until there is something new; a driver that fell takes its requests along."""
        assert self._driver is not None
        changed = asyncio.create_task(asked.changed.wait())
        await asyncio.wait((changed, self._driver), return_when=asyncio.FIRST_COMPLETED)
        changed.cancel()
        asked.changed.clear()
        if not asked.ended and self._driver.done():
            self._driver.result()

    def _check(self, asked: Asked) -> None:
        request = asked.request
        for row in asked.rows:
            begun = request.begun[row].tokens
            check_prompts(self.policy.geometry, [request.prompt + begun.tolist()], request.max_new_tokens - len(begun))

    async def _drive(self) -> None:
        """Generate what was asked, batch after batch."""
        while self._queue:
            await self._going.wait()
            waiting = [asked for asked in self._queue if not asked.ended]
            # What is sampled and what is greedy cannot be one batch.
            self._batch = [asked for asked in waiting if asked.sampling == waiting[0].sampling]
            self._queue = [asked for asked in waiting if asked not in self._batch]
            try:
                if self._batch:
                    await self._generate()
            finally:
                self._batch, self._made = [], None

    async def _generate(self) -> None:
        """Generate one batch to its end, or until everything in it was aborted."""
        self._retracted = False
        batch, versions = self._made = self._begin(self._batch), []
        # The next token is drawn from what the weights of this version said.
        version = self._version
        while batch.running and not all(one.ended for one in self._batch):
            await self._going.wait()
            if self._retracted:
                self._retracted = False
                batch.refill()
                version = self._version
            versions.append(version)
            batch.step()
            version = self._version
            if batch.columns % TOKENS_A_LOOK == 0 or not batch.running:
                self._tell(batch, versions)
            await asyncio.sleep(0)

    def _begin(self, asked: list[Asked]) -> Batch:
        first = asked[0].request
        groups = ",".join(str(one.request.group) for one in asked)
        seed = xxhash.xxh3_64_intdigest(f"{first.seed}/{self._version}/{groups}".encode()) & (2**63 - 1)
        sampling = Sampling(first.temperature, first.greedy, seed)
        begun = [one.request.begun[row].tokens for one in asked for row in one.rows]
        limits = [one.request.max_new_tokens for one in asked for _ in one.rows]
        left = [limit - len(tokens) for limit, tokens in zip(limits, begun, strict=True)]
        if all(one.fresh for one in asked) and len({len(one.rows) for one in asked}) == 1:
            return Batch(self.policy, [one.request.prompt for one in asked], len(asked[0].rows), left, sampling)
        prompts = [one.request.prompt for one in asked for _ in one.rows]
        rows = [prompt + tokens.tolist() for prompt, tokens in zip(prompts, begun, strict=True)]
        return Batch(self.policy, rows, 1, left, sampling)

    def _tell(self, batch: Batch, versions: list[int]) -> None:
        """Pass on what the batch has, and which completions are done."""
        made, number = batch.result(), 0
        for one in self._batch:
            for row in one.rows:
                if not one.ended:
                    one.completions[row] = _continued(one.request, row, made, number, versions)
                number += 1
            one.ended = one.ended or all(completion.finish is not None for completion in one.completions)
            one.changed.set()

    def _end(self, asked: Asked) -> None:
        """End what still runs of a request as aborted."""
        for row in asked.rows:
            if not asked.ended and asked.completions[row].finish is None:
                asked.completions[row].finish = "abort"
        asked.ended = True
        asked.changed.set()


def _continued(request: Request, row: int, made: Generation, number: int, versions: list[int]) -> Completion:
    """A completion of a request with the tokens that row `number` of a batch has made."""
    begun, length = request.begun[row], int(made.lengths[number])
    full = len(begun.tokens) + length >= request.max_new_tokens
    finish: FinishReason | None = "stop" if made.finished[number] else "length" if full else None
    tokens, logprobs = made.tokens[number, :length], made.logprobs[number, :length]
    return extended(begun, tokens, logprobs, spans_of(versions[:length]), finish)


def spans_of(versions: list[int]) -> list[Span]:
    """Runs of equal versions, one entry a token."""
    changes = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)] if versions else []
    return [Span(versions[start], start, end) for start, end in zip(changes, changes[1:], strict=False)]
