"""What NCCL and aws-ofi-nccl say of the network in their log (NCCL_DEBUG=INFO), as typed findings.

Lines may come from many ranks at once, with or without time and host before them, in the words of old and new releases
and in either case. The network in use is read only from `Using network …` and `via NET/…`: an old NCCL writes
`NET/Socket` also when another one was chosen.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

KEPT_LINES = 24
"""Telling lines that are kept as evidence, at most."""
GDA = 5
"""NCCL_GIN_TYPE of GPU-initiated EFA; 2 is the CPU proxy."""


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """What the logs of one or more ranks tell; a field with two values means that ranks differ."""

    nccl: tuple[str, ...] = ()
    """Versions of NCCL."""
    plugin: tuple[str, ...] = ()
    """Versions of aws-ofi-nccl that were initialised."""
    plugin_missing: bool = False
    """Whether NCCL looked for a network plugin in vain."""
    no_provider: bool = False
    """Whether libfabric offered nothing that the plugin can use."""
    providers: tuple[str, ...] = ()
    """libfabric's providers, in lower case: `efa`, `tcp`, …"""
    fabrics: tuple[str, ...] = ()
    """Fabrics of the provider, in lower case: `efa-direct`, or `efa` (through the provider's own protocol)."""
    nics: tuple[int, ...] = ()
    """Interfaces found by a rank."""
    protocols: tuple[str, ...] = ()
    """The plugin's protocol, in upper case: `RDMA` or `SENDRECV`."""
    networks: tuple[str, ...] = ()
    """Networks in use: `Libfabric`, `Socket`, `IB`, …"""
    gdrdma: tuple[bool, ...] = ()
    """Whether channels over the network read and write GPU memory directly."""
    gin_types: tuple[int, ...] = ()
    """NCCL_GIN_TYPE as NCCL read it."""
    gin_skipped: tuple[int, ...] = ()
    """Types of GIN that NCCL passed over."""
    gda_context: bool = False
    """Whether a context of GPU-initiated EFA was created."""
    gin_unavailable: bool = False
    lines: tuple[str, ...] = ()
    """The lines that told this, without what comes before NCCL's own words."""


_NETWORKS = {"aws libfabric": "Libfabric", "libfabric": "Libfabric", "socket": "Socket", "ib": "IB"}
_VALUES: dict[str, re.Pattern[str]] = {
    name: re.compile(pattern, re.IGNORECASE)
    for name, pattern in {
        "nccl": r"\bNCCL version v?(\d[\w.+-]*)",
        "plugin": r"NET/OFI\s+(?:Initializing|Using) aws-ofi-nccl\s+v?(\S+)",
        "providers": r"NET/OFI\s+Selected provider is ([\w-]+)",
        "fabrics": r"\bfabric is ([\w-]+)",
        "nics": r"\(found (\d+) nics?\)",
        "protocols": r"NET/OFI\s+Using transport protocol (\w+)",
        "networks": r"\bUsing network ((?:AWS )?\w+)|\bvia NET/((?:AWS )?\w+)/\d",
        "gin_types": r"\bNCCL_GIN_TYPE set by environment to (\d+)",
        "gin_skipped": r"\bGIN/Plugin\s*:\s*Skipping plugin \S+ index \d+ type (\d+)",
    }.items()
}
_FLAGS: dict[str, re.Pattern[str]] = {
    name: re.compile(pattern, re.IGNORECASE)
    for name, pattern in {
        # Not `Failed to find ncclCollNetPlugin_v10 symbol` and the like: a plugin need not have every table.
        "plugin_missing": r"NET/Plugin\s*:\s*(?:Could not find|No plugin found|Failed to (?:load|open))(?!.*\bsymbol\b)",
        "no_provider": r"NET/OFI\s+No eligible providers were found",
        "gda_context": r"gin GDAKI\s*:\s*createContext done",
        "gin_unavailable": r"NCCL GIN is unavailable",
    }.items()
}
_CHANNEL = re.compile(r"\bvia NET/(?:AWS )?\w+/\d\S*", re.IGNORECASE)
_WORDS = re.compile(r"^.*?NCCL (?:INFO|WARN) ", re.IGNORECASE)


def parse_log(text: str) -> Findings:
    """Read one log, or several in any order."""
    values: dict[str, set[str]] = {name: set() for name in _VALUES}
    flags: set[str] = set()
    direct: set[bool] = set()
    kept: dict[str, None] = {}
    for line in text.splitlines():
        told = False
        for name, pattern in _VALUES.items():
            for match in pattern.finditer(line):
                values[name].add(next(filter(None, match.groups())))
                told = True
        for name, pattern in _FLAGS.items():
            if pattern.search(line):
                flags.add(name)
                told = True
        if channel := _CHANNEL.search(line):
            direct.add("/gdrdma" in channel[0].lower())
        if told:
            kept.setdefault(_WORDS.sub("", line).strip())
    return Findings(
        nccl=_sorted(values["nccl"]),
        plugin=_sorted(values["plugin"]),
        providers=_sorted(value.lower() for value in values["providers"]),
        fabrics=_sorted(value.lower() for value in values["fabrics"]),
        protocols=_sorted(value.upper() for value in values["protocols"]),
        networks=_sorted(_NETWORKS.get(value.lower(), value) for value in values["networks"]),
        nics=_numbers(values["nics"]),
        gin_types=_numbers(values["gin_types"]),
        gin_skipped=_numbers(values["gin_skipped"]),
        gdrdma=tuple(sorted(direct)),
        lines=tuple(kept)[:KEPT_LINES],
        **{name: name in flags for name in _FLAGS},
    )


def merge(findings: Iterable[Findings]) -> Findings:
    """What several ranks found, together."""
    each = list(findings)
    merged: dict[str, object] = {}
    for name in Findings.__struct_fields__:
        values = [getattr(one, name) for one in each]
        if name == "lines":
            merged[name] = tuple(dict.fromkeys(line for lines in values for line in lines))[:KEPT_LINES]
        elif name in _FLAGS:
            merged[name] = any(values)
        else:
            merged[name] = tuple(sorted({value for several in values for value in several}))
    return msgspec.convert(merged, Findings)


def _sorted(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(values)))


def _numbers(values: Iterable[str]) -> tuple[int, ...]:
    return tuple(sorted({int(value) for value in values}))
