"""Scores generated groups with the run's verifier."""

from __future__ import annotations

from tokenizers import Tokenizer

from components.experience.experience import Delivered
from components.reward.pool import Job, Verdict, VerifierPool
from components.reward.verifiers import Completion
from components.role import Role, run_role
from components.weights.policy import policy_tokenizer
from configs.failure import BadConfig

IDLE_S = 0.01
GROUPS_A_TASK = 16
"""Groups a process verifies in one go: enough to be cheap, few enough that a slow verifier shows progress."""
SHOWN = 4
"""Groups shown at each look at samples."""


def reward(role: Role) -> None:
    """Score groups until told to leave."""
    role.experience.release_samples(role.worker)
    tokenizer = policy_tokenizer(role.start)
    pool = VerifierPool(role.config.reward)
    failed_in_a_row = 0
    shown = -1
    try:
        while True:
            role.check_leaving()
            delivered = role.experience.deliver(role.worker, GROUPS_A_TASK * role.config.reward.processes)
            if not delivered:
                role.pause(IDLE_S)
                continue
            jobs = [_job(item, tokenizer) for item in delivered]
            with role.span("reward", groups=len(jobs)):
                verdicts = pool.verify(jobs)
                failed_in_a_row = _pass_on(role, delivered, verdicts, failed_in_a_row)
            version = delivered[0].group.oldest_version // role.config.evaluate.every
            if version > shown:
                shown = version
                _show(role, delivered[:SHOWN], jobs, tokenizer)
    finally:
        pool.close()
        role.experience.release_samples(role.worker)


def _job(item: Delivered, tokenizer: Tokenizer) -> Job:
    texts = tokenizer.decode_batch([sample.token_ids.tolist() for sample in item.group.samples])
    completions = [Completion(text, sample.finish) for text, sample in zip(texts, item.group.samples, strict=True)]
    return Job(completions, item.group.answer)


def _pass_on(role: Role, delivered: list[Delivered], verdicts: list[Verdict], failed_in_a_row: int) -> int:
    """Hand scored groups to training, drop the others; returns how many have failed in a row.

    Raises:
        BadConfig: a whole batch of groups failed in a row, so the verifier and not a group is at fault.
    """
    scored: list[Delivered] = []
    dropped: dict[str, list[Delivered]] = {}
    for item, verdict in zip(delivered, verdicts, strict=True):
        if verdict.failed:
            failed_in_a_row += 1
            dropped.setdefault(verdict.failed, []).append(item)
            role.emit("reward_failed", group=item.group.id, reason=verdict.failed, sentence=verdict.sentence)
            if failed_in_a_row >= role.config.train.batch_groups:
                raise BadConfig(
                    f"reward.verifier {role.config.reward.verifier}: {failed_in_a_row} groups in a row got no reward;"
                    f" the last because {verdict.sentence}; mend the verifier"
                )
        else:
            failed_in_a_row = 0
            for sample, value in zip(item.group.samples, verdict.rewards, strict=True):
                sample.reward = value
            scored.append(item)
    if scored:
        role.experience.score(scored)
    for reason, items in dropped.items():
        role.experience.drop_generated(items, reason)
    return failed_in_a_row


def _show(role: Role, delivered: list[Delivered], jobs: list[Job], tokenizer: Tokenizer) -> None:
    rows = [
        {
            "prompt": tokenizer.decode(item.group.prompt_ids.tolist()),
            "completion": job.completions[0].text,
            "answer": job.answer,
            "reward": item.group.samples[0].reward,
        }
        for item, job in zip(delivered, jobs, strict=False)
    ]
    role.emit("samples", delivered[0].group.oldest_version, stage="during", rows=rows)


if __name__ == "__main__":
    run_role("reward", reward)
