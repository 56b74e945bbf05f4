"""Length of prompts and answers in tokens, against the context and the longest completion."""

from __future__ import annotations

from collections.abc import Callable

from tokenizers import Tokenizer

from components.stage_data.rows import SourceRow
from components.storage.store import open_store
from configs.failure import BadData
from configs.run import RunConfig

_BATCH_ROWS = 4096


def check_lengths(rows: list[SourceRow], config: RunConfig) -> None:
    """Refuse what the policy can never read or never say.

    A prompt and the longest completion must fit `model.context_length`. Tokens are those of the checkpoint's
    tokenizer; a new model's has one token a character after the beginning-of-sequence token. Where tokens are
    characters and the verifier is `exact_match`, an answer must also fit `rollout.max_new_tokens` with the
    end-of-sequence token, and use characters that the tokenizer knows.

    Raises:
        BadData: with the first row that does not fit.
    """
    tokenizer = _tokenizer(config) if config.model.checkpoint else None
    _check_context(rows, config, tokenizer)
    if config.reward.verifier == "exact_match" and (tokenizer is None or is_character_level(tokenizer)):
        _check_answers(rows, config)
    if tokenizer is not None and is_character_level(tokenizer):
        _check_characters(rows, config, set(tokenizer.get_vocab()))


def is_character_level(tokenizer: Tokenizer) -> bool:
    """Whether every token is one character, special tokens aside."""
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    return all(len(token) == 1 or token in special or token.startswith("<") for token in tokenizer.get_vocab())


def _tokenizer(config: RunConfig) -> Tokenizer:
    uri = config.model.checkpoint
    content = open_store(uri, config.storage).read("tokenizer.json")
    try:
        return Tokenizer.from_str(content.decode(errors="replace"))
    except Exception as error:
        raise BadData(f"{uri}/tokenizer.json: cannot be read as a tokenizer ({error}); mend the checkpoint") from None


def _check_context(rows: list[SourceRow], config: RunConfig, tokenizer: Tokenizer | None) -> None:
    limit = config.model.context_length - config.rollout.max_new_tokens
    for start in range(0, len(rows), _BATCH_ROWS):
        batch = rows[start : start + _BATCH_ROWS]
        for source, tokens in zip(batch, _counts(tokenizer)([each.row.prompt for each in batch]), strict=True):
            if tokens > limit:
                raise BadData(
                    f"{config.data.uri} {source.place}: the prompt has {tokens} tokens, but model.context_length"
                    f" {config.model.context_length} less rollout.max_new_tokens {config.rollout.max_new_tokens} leaves"
                    f" {limit}; shorten the prompt or raise model.context_length"
                )


def _counts(tokenizer: Tokenizer | None) -> Callable[[list[str]], list[int]]:
    if tokenizer is None:
        return lambda prompts: [1 + len(prompt) for prompt in prompts]
    return lambda prompts: [len(encoding) for encoding in tokenizer.encode_batch_fast(prompts)]


def _check_answers(rows: list[SourceRow], config: RunConfig) -> None:
    longest = config.rollout.max_new_tokens - 1
    for source in rows:
        if len(source.row.answer) > longest:
            raise BadData(
                f"{config.data.uri} {source.place}: the answer has {len(source.row.answer)} characters, but completions"
                f" end after {longest} and the end-of-sequence token, so exact_match can never be met; set"
                f" rollout.max_new_tokens to {len(source.row.answer) + 1} or more"
            )


def _check_characters(rows: list[SourceRow], config: RunConfig, known: set[str]) -> None:
    for source in rows:
        unknown = set(source.row.prompt + source.row.answer) - known
        if unknown:
            raise BadData(
                f"{config.data.uri} {source.place}: has the character {min(unknown)!r}, which the tokenizer of"
                f" {config.model.checkpoint} does not know; drop the row or start from another checkpoint"
            )
