"""`tandem bench rollout --engine sglang`: the sglang engine beside SGLang's own benchmark, on one server."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from components.experience.deliveries import Target
from components.rollout.engine import Completion, Pull, Request
from components.rollout.sglang_engine import SGLangEngine
from components.rollout.sglang_server import SGLangServer, find_python
from components.rollout.torch_policy import TorchPolicy
from components.warm_start.tokenizer import character_tokenizer
from components.weights.policy import new_policy, save_policy
from configs.failure import ServiceGone
from configs.run import ModelConfig, RunConfig

TOKENIZER = character_tokenizer("abcdefghijklmnopqrstuvwxyz0123456789")
PROMPT_TOKENS = 32
IN_FLIGHT = 64
"""Requests at a time, on both sides."""
CHECKED = 4
"""Groups whose first completion is compared with the project's own forward pass."""


def measure(prompts: int, group_size: int, max_new_tokens: int, rounds: int) -> dict[str, Any]:
    """Tokens a second of both, in turn; each asks for the same number of completions and tokens, with log-probabilities.

    SGLang's benchmark knows no groups of token ids: it gets `prompts * group_size` random prompts of the same length. So
    with a group size above 1 the engine may gain by the shared prompt; with 1 both do the same work. The server also makes
    text here, because that benchmark counts nothing without; a worker's server does not.

    Args:
        prompts: Groups.
        group_size: Completions a prompt.
        max_new_tokens: Tokens of a completion; the end-of-sequence token does not end it.
        rounds: Times each is measured; the median counts.
    """
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as folder:
        start = Path(folder) / "policy"
        geometry = ModelConfig(context_length=max(256, PROMPT_TOKENS + max_new_tokens + 16))
        save_policy(new_policy(geometry, TOKENIZER.get_vocab_size(), seed=0), TOKENIZER, start)
        config = RunConfig.model_validate({"sglang": {"requests_in_flight": IN_FLIGHT}})
        engine = SGLangEngine(config, start, Path(folder) / "sglang.log", "rollout-0", tokenizer=True)
        return asyncio.run(_measure(engine, start, (prompts, group_size, max_new_tokens), rounds))


async def _measure(engine: SGLangEngine, start: Path, shape: tuple[int, int, int], rounds: int) -> dict[str, Any]:
    prompts, group_size, max_new_tokens = shape
    policy, random = TorchPolicy.from_folder(start), np.random.default_rng(0)
    ours: list[float] = []
    theirs: list[float] = []
    gap = 0.0
    await engine.open()
    try:
        await engine.load(Target(0, "bench"), Pull(start), "retract")
        await engine.resume()
        engine.sampling = {"ignore_eos": True}
        for number in range(rounds + 1):
            asked = random.integers(3, TOKENIZER.get_vocab_size(), (prompts, PROMPT_TOKENS)).tolist()
            began = time.perf_counter()
            made = await asyncio.gather(
                *(_complete(engine, *item, group_size, max_new_tokens) for item in enumerate(asked))
            )
            seconds = time.perf_counter() - began
            reference = await asyncio.to_thread(_reference, engine, start, shape, number)
            if number:  # the first round warms both up
                ours.append(sum(len(one.tokens) for group in made for one in group) / seconds)
                theirs.append(reference)
            for prompt, group in list(zip(asked, made, strict=True))[:CHECKED]:
                gap = max(gap, float(np.abs(group[0].logprobs - _logprobs(policy, prompt, group[0].tokens)).max()))
    finally:
        await engine.close()
    return {
        "tokens_per_s": statistics.median(ours),
        "reference_tokens_per_s": statistics.median(theirs),
        "max_logprob_gap": gap,
        "prompts": prompts,
        "group_size": group_size,
        "prompt_tokens": PROMPT_TOKENS,
        "max_new_tokens": max_new_tokens,
        "rounds": rounds,
    }


async def _complete(
    engine: SGLangEngine, number: int, prompt: list[int], group_size: int, tokens: int
) -> list[Completion]:
    request = Request(number, prompt, [Completion.empty() for _ in range(group_size)], tokens)
    return [found async for found in engine.generate(request)][-1]


def _reference(engine: SGLangEngine, start: Path, shape: tuple[int, int, int], seed: int) -> float:
    """Tokens a second as SGLang's benchmark tells them."""
    requests, max_new_tokens = shape[0] * shape[1], shape[2]
    assert isinstance(engine.server, SGLangServer)
    result = start.parent / f"reference-{seed}.jsonl"
    done = subprocess.run(
        [find_python(RunConfig().sglang), "-m", "sglang.bench_serving", "--backend", "sglang", "--base-url",
         engine.server.url, "--model", start, "--tokenizer", start, "--dataset-name", "random-ids", "--tokenize-prompt",
         "--random-input-len", str(PROMPT_TOKENS), "--random-output-len", str(max_new_tokens), "--random-range-ratio", "1",
         "--num-prompts", str(requests), "--max-concurrency", str(IN_FLIGHT), "--return-logprob", "--disable-stream",
         "--disable-tqdm", "--warmup-requests", "0", "--seed", str(seed), "--output-file", result],
        env=os.environ | {"OPENAI_API_KEY": engine.server.key, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode or not result.exists():
        last = " | ".join((done.stderr or done.stdout).strip().splitlines()[-2:])
        raise ServiceGone(f"sglang.bench_serving failed: {last}")
    found = json.loads(result.read_text().splitlines()[-1])
    if found["completed"] != requests:
        raise ServiceGone(f"sglang.bench_serving completed {found['completed']} of {requests} requests")
    return float(found["output_throughput"])


@torch.inference_mode()
def _logprobs(policy: TorchPolicy, prompt: list[int], tokens: np.ndarray) -> np.ndarray:
    """The project's own forward pass, float32 [T]."""
    ids = [*prompt, *tokens.tolist()]
    cache = policy.new_cache(1, len(ids))
    logits = [policy.forward(torch.tensor([prompt]), cache, 0)]
    for column, token in enumerate(ids[len(prompt) : -1], len(prompt)):
        logits.append(policy.forward(torch.tensor([[token]]), cache, column))
    return torch.log_softmax(torch.cat(logits), -1)[range(len(tokens)), tokens.tolist()].numpy()
