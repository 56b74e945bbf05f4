"""The audit: were all groups of a run counted exactly once?

Three independent records must agree: the counters, which every move of a group changes; the groups still standing in a
stage and the stream entries that carry them; and the ledgers written beside the durable checkpoints.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from components.experience.experience import Experience
from components.storage.layout import RunLayout
from components.train.ledger import Ledger


class Audit(msgspec.Struct, kw_only=True):
    """What was counted, and what does not add up."""

    run: str
    groups_issued: int
    groups_durable: int
    """Trained in an update that a durable checkpoint covers."""
    groups_in_flight: int
    groups_dropped: int
    dropped_by_reason: dict[str, int]
    groups_reclaimed: int
    """Leases that lapsed and went to another worker."""
    duplicates_refused: int
    """Second copies of a group that were handed in and not counted."""
    durable_updates: int
    in_flight_by_stage: dict[str, int]
    findings: list[str]
    """One sentence for everything that does not balance; empty when the audit passes."""

    @property
    def balanced(self) -> bool:
        """Whether every group is accounted for exactly once."""
        return not self.findings


def audit(experience: Experience, layout: RunLayout) -> Audit:
    """Audit a run from its Redis and its ledgers."""
    counters, stages, lengths = experience.counters(), experience.stages(), experience.lengths()
    ledgers = [
        msgspec.json.decode(layout.store.read(key), type=Ledger)
        for key in layout.store.list("ledger/")
        if key.endswith(".json")
    ]
    result = Audit(
        run=layout.config.name,
        groups_issued=counters.get("issued", 0),
        groups_durable=counters.get("durable", 0),
        groups_in_flight=sum(stages.values()),
        groups_dropped=counters.get("dropped", 0),
        dropped_by_reason={key[8:]: value for key, value in sorted(counters.items()) if key.startswith("dropped:")},
        groups_reclaimed=counters.get("reclaimed", 0),
        duplicates_refused=counters.get("duplicates", 0),
        durable_updates=counters.get("durable_step", 0),
        in_flight_by_stage={stage: count for stage, count in stages.items() if count},
        findings=[],
    )
    result.findings += _counter_findings(result)
    for stream, standing in (
        ("tickets", stages["running"]),
        ("samples", stages["generated"]),
        ("scored", stages["scored"] + stages["trained"]),
    ):
        if lengths[stream] != standing:
            result.findings.append(
                f"{standing} groups stand before '{stream}', but the stream holds {lengths[stream]} entries"
            )
    result.findings += _ledger_findings(result, ledgers, layout.config.train.batch_groups)
    return result


def _counter_findings(result: Audit) -> list[str]:
    findings = []
    accounted = result.groups_durable + result.groups_in_flight + result.groups_dropped
    if result.groups_issued != accounted:
        findings.append(
            f"{result.groups_issued} groups were issued, but {accounted} are accounted for (durable + in flight + dropped)"
        )
    if sum(result.dropped_by_reason.values()) != result.groups_dropped:
        findings.append(f"{result.groups_dropped} groups were dropped, but the reasons add up to another number")
    return findings


def _ledger_findings(result: Audit, ledgers: list[Ledger], batch_groups: int) -> list[str]:
    findings = []
    trained = Counter(group for ledger in ledgers for groups in ledger.groups.values() for group in groups)
    steps = Counter(step for ledger in ledgers for step in ledger.groups)
    if repeated := [group for group, times in trained.items() if times > 1]:
        findings.append(f"{len(repeated)} groups stand in the ledgers more than once, first group {min(repeated)}")
    if len(trained) != result.groups_durable:
        findings.append(f"the ledgers hold {len(trained)} groups, the counters say {result.groups_durable} are durable")
    if sorted(steps) != list(range(1, result.durable_updates + 1)):
        findings.append(
            f"the ledgers cover {len(steps)} updates, the counters say {result.durable_updates} are durable"
        )
    if any(len(groups) != batch_groups for ledger in ledgers for groups in ledger.groups.values()):
        findings.append(f"an update in the ledgers has another number of groups than train.batch_groups {batch_groups}")
    return findings
