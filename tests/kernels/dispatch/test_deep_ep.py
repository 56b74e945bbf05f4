"""The DeepEP adapter: the contract over a double that moves tokens as DeepEP does, and the rules of where it may run."""

from __future__ import annotations

import os
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from configs.failure import BadConfig
from configs.kernels import DeepEPConfig, KernelsConfig
from kernels.dispatch import choose
from kernels.dispatch.contract import Dispatcher
from kernels.dispatch.deep_ep import DeepEP, why_not
from kernels.dispatch.deep_ep_environment import (
    Around,
    Library,
    can_size_itself,
    choose_api,
    describe,
    load,
    make_ready,
    mapped_nccl,
    objections,
    prepare,
)
from kernels.dispatch.topology import Topology
from tests.kernels.dispatch import deep_ep_double as double
from tests.kernels.dispatch.deep_ep_suite import check
from tests.kernels.dispatch.fleet import Fleet, Member
from tests.kernels.dispatch.suite import Case, cases, go


def opened(topology: Topology, num_experts: int, wire: str = "same", **deep_ep: Any) -> Dispatcher:
    kernels = KernelsConfig(dispatch="deep_ep", wire=wire, deep_ep=DeepEPConfig(**deep_ep))  # type: ignore[arg-type]
    return DeepEP(topology, num_experts, kernels, library=double)


CASE = Case(seed=5, tokens=(7, 0, 3, 40), experts=16, top=3)
SPECIAL = {
    "even": {},
    "skewed": {"routing": "one_expert"},
    "duplicates": {"routing": "duplicates", "top": 8},
    "one rank": {"routing": "one_rank"},
    "dropped": {"dropped": 0.5},
    "all dropped": {"routing": "none"},
    "no tokens": {"tokens": (0, 0, 0, 0)},
    "odd width": {"hidden": 130},
    "wide": {"hidden": 512, "dtype": torch.bfloat16},
}


@pytest.mark.parametrize("api", ["elastic", "legacy"])
@pytest.mark.parametrize("name", SPECIAL)
def test_the_contract(name: str, api: str, fleet: Callable[[int], Fleet]) -> None:
    case = Case(**{**CASE.__dict__, **SPECIAL[name]})
    check(fleet(4), partial(opened, api=api), 2, case)


@pytest.mark.parametrize("api", ["elastic", "legacy"])
@pytest.mark.parametrize("name", ["even", "odd width", "duplicates", "no tokens"])
def test_the_contract_with_fp8(name: str, api: str, fleet: Callable[[int], Fleet]) -> None:
    case = Case(**{**CASE.__dict__, **SPECIAL[name]})
    check(fleet(4), partial(opened, wire="fp8", api=api), 2, case, "fp8")


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(case=cases(2))
def test_the_contract_on_any_case(case: Case, fleet: Callable[[int], Fleet]) -> None:
    check(fleet(2), opened, 1, case)


def _calls(member: Member, api: str) -> tuple[list[str], int, int]:
    double.calls.clear()
    factory = partial(opened, api=api, num_qps=2)
    go(member, factory, 1, Case(seed=1, tokens=(5, 9), experts=4, top=2))
    go(member, factory, 1, Case(seed=2, tokens=(300, 1), experts=4, top=2))
    backend = member.dispatcher(factory, 1, 4)
    bytes_sent = backend.inter_node_bytes, backend.intra_node_bytes
    backend.close()
    return list(double.calls), *bytes_sent


def test_calls_come_in_order_and_a_buffer_grows(fleet: Callable[[int], Fleet]) -> None:
    once = ["dispatch", "combine", "dispatch again", "combine"]
    for calls, inter, intra in fleet(2).run(_calls, "elastic"):
        assert calls == ["elastic", *once, "elastic", *once, "destroy", "destroy"]
        # Rows of 16 values in bfloat16, four times: there and back, forward and backward.
        assert inter % (16 * 2 * 4) == 0 and inter > 0 and intra == 0
    for calls, _, _ in fleet(2).run(_calls, "legacy"):
        assert calls == ["legacy", "layout", *once, "layout", *once, "destroy"]


def _buffers(member: Member) -> list[tuple[int, int, int]]:
    double.made.clear()
    backend = opened(member.topology(1), 4, num_qps=7, hybrid=False)
    for tokens in (5, 100, 129, 130, 600):
        idx = torch.zeros((tokens, 1), dtype=torch.int64)
        backend.dispatch(torch.zeros(tokens, 300), idx, torch.ones(tokens, 1))
    backend.close()
    assert all(one["num_allocated_qps"] == 7 and not one["allow_hybrid_mode"] for one in double.made)
    return [(one["num_max_tokens_per_rank"], one["hidden"], one["num_topk"]) for one in double.made]


def test_sizes_are_rounded_and_double(fleet: Callable[[int], Fleet]) -> None:
    assert fleet(2).run(_buffers) == [[(128, 512, 1), (256, 512, 1), (640, 512, 1)]] * 2


def _limited(member: Member) -> list[str]:
    backend = opened(member.topology(1), 4, max_tokens=8)

    def words(tokens: int, idx: list[int]) -> str:
        try:
            backend.dispatch(torch.zeros(tokens, 16), torch.tensor(idx).expand(tokens, 2), torch.ones(tokens, 2))
        except BadConfig as failure:
            return failure.sentence
        return ""

    return [words(8, [0, 0]), words(9, [0, 1]), words(8, [0, 1]), words(9, [0, 1]), words(0, [0, 1])]


def test_a_fixed_number_of_tokens_is_kept_to(fleet: Callable[[int], Fleet]) -> None:
    too_many = "a rank dispatches 9 tokens, more than kernels.deep_ep.max_tokens 8; raise it, or set 0"
    twice = "a token names an expert twice, which needs kernels.deep_ep.max_tokens 0; set it"
    assert fleet(2).run(_limited) == [[twice, too_many, "", too_many, ""]] * 2


def test_it_is_not_for_one_rank_nor_for_many_experts_a_token() -> None:
    alone = Topology(None, 0, ((0,),))  # type: ignore[arg-type]
    with pytest.raises(BadConfig, match="nothing to do for one rank"):
        opened(alone, 4)
    pair = Topology(None, 0, ((0, 1),))  # type: ignore[arg-type]
    with pytest.raises(BadConfig, match="at most 32 experts a token, not 33"):
        opened(pair, 64).dispatch(torch.zeros(1, 8), torch.arange(33)[None], torch.ones(1, 33))


def _experts(member: Member) -> str:
    """A token that names an expert 9 times, of 256: 9 copies of each are too many."""
    backend = opened(member.topology(1), 256)
    try:
        backend.dispatch(torch.zeros(1, 16), torch.zeros((1, 9), dtype=torch.int64), torch.ones(1, 9))
    except BadConfig as failure:
        return failure.sentence
    return ""


def test_more_experts_than_it_has_room_for_are_told(fleet: Callable[[int], Fleet]) -> None:
    words = "deep_ep has room for 2048 experts and 256 a rank, not 2304 and 1152 (9 copies of each,"
    assert all(sentence.startswith(words) for sentence in fleet(2).run(_experts))


def _strided(member: Member) -> bool:
    """Experts and weights as slices of wider tables."""
    idx, weights = torch.tensor([[0, 9, 3, 9], [2, 9, 1, 9]])[:, ::2], torch.rand(2, 4)[:, ::2]
    for api in ("elastic", "legacy"):
        backend = opened(member.topology(1), 4, api=api)
        there = backend.dispatch(torch.ones(2, 16), idx, weights)
        backend.combine(there.x, there.route)
        backend.close()
    return True


def test_tables_may_be_slices(fleet: Callable[[int], Fleet]) -> None:
    assert fleet(2).run(_strided) == [True, True]


PAIR = Topology(None, 0, ((0, 1),))  # type: ignore[arg-type]


def test_it_is_not_available_without_a_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert why_not(KernelsConfig(), PAIR) == "there is no GPU"


def _left_out(member: Member, package: str, gin: str) -> tuple[list[str], str]:
    """What `auto` would choose among if this rank had a GPU, and a deep_ep without ElasticBuffer."""
    kernels = KernelsConfig(deep_ep=DeepEPConfig(api="elastic", gin=gin))  # type: ignore[arg-type]
    before = os.environ.get("NCCL_GIN_TYPE")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.cuda.is_available", lambda: True)
        patch.setattr("kernels.dispatch.deep_ep_environment.mapped_nccl", lambda: ())
        patch.setenv("EP_REUSE_NCCL_COMM", "0")
        patch.setenv("NCCL_GIN_TYPE", "2" if member.rank else "5")
        patch.syspath_prepend(package)
        made = choose._possible(kernels, member.topology(2), torch.device("cuda"))
    assert os.environ.get("NCCL_GIN_TYPE") == before
    return made


def test_auto_leaves_it_out_by_the_configuration_and_says_why(fleet: Callable[[int], Fleet], tmp_path: Path) -> None:
    package(tmp_path, elastic=False)
    told = fleet(2).run(_left_out, str(tmp_path), "environment")
    words = "; without deep_ep, as rank 0 says: deep_ep at "
    assert all(names == ["all_to_all"] and why.startswith(words) and "no ElasticBuffer" in why for names, why in told)
    # Only one rank objects, and all leave it out alike.
    told = fleet(2).run(_left_out, str(tmp_path), "efa-gda")
    assert told[0] == told[1] and "rank 0 says" in told[0][1]
    told = fleet(2).run(_left_out, str(tmp_path), "proxy")
    assert told[0] == told[1] and "rank 0 says: kernels.deep_ep.gin is proxy (NCCL_GIN_TYPE=2), but" in told[0][1]


def test_a_rank_gets_ready_before_its_first_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    def variables(kernels: KernelsConfig, given: str = "") -> dict[str, str]:
        with monkeypatch.context() as patch:
            environment = {"NCCL_GIN_TYPE": given} if given else {}
            patch.setattr("os.environ", environment)
            patch.setattr("kernels.dispatch.deep_ep_environment.prepare.__defaults__", (environment,))
            make_ready(kernels)
            return environment

    gda = DeepEPConfig(gin="efa-gda")
    assert variables(KernelsConfig(dispatch="hierarchical", deep_ep=gda)) == {}
    for dispatch in ("auto", "deep_ep"):
        made = variables(KernelsConfig(dispatch=dispatch, deep_ep=gda))  # type: ignore[arg-type]
        assert made == {"EP_REUSE_NCCL_COMM": "0", **GDA}
    # What `auto` may leave out does not end the run.
    assert variables(KernelsConfig(deep_ep=gda), given="2")["NCCL_GIN_TYPE"] == "2"
    with pytest.raises(BadConfig, match="kernels.deep_ep.gin is efa-gda"):
        variables(KernelsConfig(dispatch="deep_ep", deep_ep=gda), given="2")


STOCK = Library("/x/deep_ep", elastic=True, ibgda=True, unordered=False)
FORK = STOCK._replace(unordered=True)
ONE = Around({}, nodes=1, ranks=8, efa=True, nccl=("/a/libnccl.so.2",))
TWO = ONE._replace(nodes=2, ranks=16)
GDA = {"NCCL_GIN_TYPE": "5", "NCCL_SYM_GIN_KERNELS_ENABLE": "0"}
RULES: dict[str, tuple[str, Library, Around, str]] = {
    "two copies of NCCL": (
        "elastic",
        STOCK,
        ONE._replace(nccl=("/a", "/b")),
        "two copies of NCCL are mapped (/a and /b)",
    ),
    "V1 alone": ("elastic", STOCK._replace(elastic=False), ONE, "deep_ep at /x/deep_ep has no ElasticBuffer"),
    "V1 on EFA": ("legacy", STOCK, TWO, "which EFA does not have"),
    "V1 for odd groups": ("legacy", STOCK, ONE._replace(ranks=6), "no settings for 6 ranks"),
    "no GIN": ("elastic", STOCK, TWO._replace(variables={"EP_DISABLE_GIN": "1"}), "EP_DISABLE_GIN is set"),
    "upstream, GDA": ("elastic", STOCK, TWO._replace(variables=GDA), "rely on order and would be silently wrong"),
    "ordered kernels": (
        "elastic",
        FORK,
        TWO._replace(variables={**GDA, "EP_HYBRID_KERNEL": "ordered"}),
        "EP_HYBRID_KERNEL is ordered",
    ),
    "NCCL's kernels": (
        "elastic",
        FORK,
        TWO._replace(variables={"NCCL_GIN_TYPE": "5"}),
        "NCCL_SYM_GIN_KERNELS_ENABLE is not 0",
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_what_cannot_work_is_told(name: str) -> None:
    api, library, around, words = RULES[name]
    found = list(objections(api, library, around))  # type: ignore[arg-type]
    assert len(found) == 1 and words in found[0]


@pytest.mark.parametrize(
    ("api", "library", "around"),
    [
        ("elastic", STOCK, ONE._replace(variables=GDA)),  # inside a node nothing is out of order
        ("elastic", STOCK, TWO),
        ("elastic", STOCK, TWO._replace(variables={"NCCL_GIN_TYPE": "2"})),
        ("elastic", FORK, TWO._replace(variables=GDA)),
        ("legacy", STOCK, ONE),
        ("legacy", STOCK, TWO._replace(efa=False)),
        ("legacy", STOCK._replace(ibgda=False, elastic=False), TWO),  # UCCL's wrapper
    ],
)
def test_what_works_is_let_through(api: str, library: Library, around: Around) -> None:
    assert list(objections(api, library, around)) == []  # type: ignore[arg-type]


def test_the_environment_is_prepared_once() -> None:
    variables: dict[str, str] = {}
    prepare(DeepEPConfig(), variables)
    assert variables == {"EP_REUSE_NCCL_COMM": "0"}
    prepare(DeepEPConfig(gin="efa-gda"), variables)
    assert variables == {"EP_REUSE_NCCL_COMM": "0", **GDA}
    with pytest.raises(BadConfig, match="kernels.deep_ep.gin is proxy .*but NCCL_GIN_TYPE is 5"):
        prepare(DeepEPConfig(gin="proxy"), variables)


def test_the_interface_follows_the_package() -> None:
    assert choose_api(DeepEPConfig(), STOCK) == "elastic"
    assert choose_api(DeepEPConfig(), STOCK._replace(elastic=False)) == "legacy"
    assert choose_api(DeepEPConfig(api="legacy"), STOCK) == "legacy"


@pytest.mark.parametrize(
    ("rdma", "nvlink", "across_nodes", "can"),
    [
        (50.0, 450.0, True, True),
        (0, 450.0, True, False),
        (50.0, 0, True, False),
        (0, 450.0, False, True),
        (0, 0, False, False),
    ],
)
def test_sizing_needs_the_speeds_it_divides_by(rdma: float, nvlink: float, across_nodes: bool, can: bool) -> None:
    envs = types.SimpleNamespace(get_rdma_gbs=lambda: rdma, get_nvlink_gbs=lambda: nvlink)
    library = types.ModuleType("deep_ep")
    assert not can_size_itself(library, across_nodes)
    library.utils = types.SimpleNamespace(envs=envs)  # type: ignore[attr-defined]
    assert can_size_itself(library, across_nodes) == can


def test_copies_of_nccl_are_counted_by_file(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    lines = ["7f-80 r-xp 0 08:01 5    /a/libnccl.so.2", "80-81 r--p 0 08:01 5    /a/libnccl.so.2"]
    lines += ["81-82 r-xp 0 08:01 6    /b/libnccl-net-ofi.so"]
    maps.write_text("\n".join(lines))
    assert mapped_nccl(maps) == ("/a/libnccl.so.2",)


def package(folder: Path, *, elastic: bool, binary: bytes = b"") -> Path:
    where = folder / "deep_ep"
    (where / "buffers").mkdir(parents=True)
    (where / "__init__.py").write_text("raise AssertionError('Duplicate NCCL\\nruntime')\n")
    (where / "buffers" / "legacy.py").write_text("os.environ['NVSHMEM_IB_ENABLE_IBGDA'] = '1'")
    (where / "_C.cpython-311-x86_64-linux-gnu.so").write_bytes(binary)
    if elastic:
        (where / "buffers" / "elastic.py").write_text("")
    return where


def test_a_package_is_told_by_its_files(tmp_path: Path) -> None:
    fork = package(tmp_path / "fork", elastic=True, binary=b"\0EP_HYBRID_KERNEL\0")
    assert describe(fork) == Library(str(fork), elastic=True, ibgda=True, unordered=True)
    older = package(tmp_path / "older", elastic=False)
    assert describe(older) == Library(str(older), elastic=False, ibgda=True, unordered=False)


def test_a_package_that_does_not_start_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EP_REUSE_NCCL_COMM", "0")
    monkeypatch.setattr("kernels.dispatch.deep_ep_environment.mapped_nccl", lambda: ())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BadConfig, match="package deep_ep is not installed"):
        load(DeepEPConfig(), 1, 8)
    monkeypatch.undo()
    monkeypatch.setenv("EP_REUSE_NCCL_COMM", "0")
    monkeypatch.setattr("kernels.dispatch.deep_ep_environment.mapped_nccl", lambda: ())
    package(tmp_path, elastic=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(BadConfig, match=r"deep_ep at .* does not start \(Duplicate NCCL runtime\)") as caught:
        load(DeepEPConfig(), 1, 8)
    assert "\n" not in caught.value.sentence
    assert isinstance(double, types.ModuleType)
