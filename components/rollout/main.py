"""Generates groups: holds a proven version of the policy, leases tickets, samples, hands in."""

from __future__ import annotations

import os
import time

import torch
import xxhash
from tokenizers import Tokenizer

from components.experience.experience import Target, Ticket
from components.experience.group import Group, Sample
from components.role import Role, run_role
from components.rollout.greedy import GreedyScorer
from components.rollout.prompts import PromptOrder
from components.rollout.torch_engine import Generation, TorchEngine
from components.rollout.torch_policy import TorchPolicy
from components.stage_data.rows import Row
from components.stage_data.split import read_split
from components.weights.geometry import read_geometry
from components.weights.policy import policy_tokenizer
from components.weights.store import digest_of, fingerprint, open_weights
from configs.failure import BadData, Failure

IDLE_S = 0.01
"""Seconds between looks for work when the staleness bound leaves none."""
REPORT_AGAIN_S = 3.0
"""Seconds after which a report without a verdict is sent again."""


class Worker:
    """One rollout process."""

    def __init__(self, role: Role) -> None:
        self.role = role
        config = role.config
        # A process of this name that came before is gone, and with it what it held.
        role.experience.hand_back(role.worker)
        start = role.start
        self.tokenizer: Tokenizer = policy_tokenizer(start)
        self.engine = TorchEngine(TorchPolicy.empty(read_geometry(start / "config.json", str(start / "config.json"))))
        self.store = open_weights(role.layout)
        data = role.data
        self.order = PromptOrder(read_split(data, "train", config.storage), config.seed)
        self.held_out = read_split(data, "eval", config.storage)[: config.evaluate.rows]
        # The first worker also looks how good the policy is by now.
        self.scorer = GreedyScorer(self.tokenizer, config) if role.worker == "rollout-0" else None
        self.held = Target(-1, "")
        self.evaluated = -1

    def run(self) -> None:
        """Work until told to leave."""
        role = self.role
        try:
            while True:
                role.check_leaving()
                if not self._hold_target():
                    role.pause(IDLE_S)
                    continue
                self._evaluate_when_due()
                tickets = role.experience.lease(role.worker, self.held, role.config.rollout.groups_per_call)
                if tickets:
                    self._generate(tickets)
                else:
                    role.pause(IDLE_S)
        finally:
            role.experience.hand_back(role.worker)
            if self.scorer is not None:
                self.scorer.close()

    def _hold_target(self) -> bool:
        """Load the target version if another is held, and wait until broadcast has verified it."""
        experience = self.role.experience
        target = experience.target()
        if target is None:
            return False
        if target == self.held:
            return True
        start = time.time()
        try:
            self.engine.policy.load(self.store.load(target.version), str(self.store.path(target.version)))
        except BadData:
            if target.version not in self.store.versions() or experience.target() != target:
                return False  # training is further and has pruned it: a newer target comes
            raise
        self.held = Target(target.version, digest_of(fingerprint(self.engine.policy.tensors)))
        if not self._proven(time.time() - start):
            return False
        self.role.emit("span", self.held.version, kind="load", start=start, end=time.time())
        return True

    def _proven(self, seconds: float) -> bool:
        """Report what the engine holds and wait for the verdict; False if another version is wanted meanwhile."""
        experience, limit, held = self.role.experience, self.role.config.weights.verify_timeout_s, self.held
        start = time.monotonic()
        reported = float("-inf")
        while experience.verified(self.role.worker) != held:
            self.role.check_leaving()
            if experience.target() != held:
                self.held = Target(-1, "")
                return False
            if time.monotonic() - reported > REPORT_AGAIN_S:
                # A broadcast that died took the report with it.
                reported = time.monotonic()
                experience.report(self.role.worker, held, seconds)
            if reason := experience.quarantined(self.role.worker):
                raise Failure(f"quarantined: {reason}")
            if time.monotonic() - start > limit:
                raise Failure(f"broadcast did not verify version {held.version} within {limit:.0f} s")
            time.sleep(0.002)
        return True

    def _generate(self, tickets: list[Ticket]) -> None:
        config, role = self.role.config, self.role
        rows = [self.order.row(ticket.group) for ticket in tickets]
        prompts = [self.tokenizer.encode(row.prompt).ids for row in rows]
        with role.span("generate", self.held.version, groups=len(tickets)) as span:
            generation = self.engine.generate(
                prompts,
                group_size=config.rollout.group_size,
                max_new_tokens=config.rollout.max_new_tokens,
                temperature=config.rollout.temperature,
                seed=_seed(config.seed, self.held.version, tickets),
            )
            span["tokens"] = int(generation.lengths.sum())
        groups = [
            self._group(*item, generation, number)
            for number, item in enumerate(zip(tickets, rows, prompts, strict=True))
        ]
        role.experience.hand_in(list(zip(tickets, groups, strict=True)))

    def _group(self, ticket: Ticket, row: Row, prompt: list[int], generation: Generation, number: int) -> Group:
        size = self.role.config.rollout.group_size
        samples = []
        for index in range(number * size, (number + 1) * size):
            length = int(generation.lengths[index])
            samples.append(
                Sample.of(
                    generation.tokens[index, :length],
                    generation.logprobs[index, :length],
                    self.held.version,
                    "stop" if generation.finished[index] else "length",
                )
            )
        return Group(ticket.group, row.id, _int32(prompt), row.answer, samples)

    def _evaluate_when_due(self) -> None:
        """Greedy exact match on the held-out prompts, every so many versions, by the first worker."""
        every, version = self.role.config.evaluate.every, self.held.version
        if self.scorer is None or version // every == self.evaluated // every:
            return
        self.evaluated = version
        with self.role.span("evaluate", version):
            rewards = self.scorer.score(self.engine, self.held_out).rewards
        self.role.emit("evaluation", version, exact_match=float(rewards.mean()), rows=len(rewards))


def _seed(seed: int, version: int, tickets: list[Ticket]) -> int:
    """A sampling seed that repeats for the same groups and version."""
    groups = ",".join(str(ticket.group) for ticket in tickets)
    return xxhash.xxh3_64_intdigest(f"{seed}/{version}/{groups}".encode()) & (2**63 - 1)


def _int32(ids: list[int]) -> bytes:
    return torch.tensor(ids, dtype=torch.int32).numpy().astype("<i4").tobytes()


def rollout(role: Role) -> None:
    """Generate groups until told to leave."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    Worker(role).run()


if __name__ == "__main__":
    run_role("rollout", rollout)
