"""A Containerfile read into its stages, for the checks of this folder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from dockerfile_parse import DockerfileParser

VARIABLE = re.compile(r"(?<!\\)\$(?:\{(\w+)[^}]*\}|(\w+))")


class Instruction(NamedTuple):
    """One instruction, its continuation lines joined."""

    word: str
    value: str


class Stage(NamedTuple):
    """One stage: what it starts from and what it does."""

    name: str
    parent: str
    instructions: list[Instruction]

    def values(self, word: str) -> list[str]:
        """The values of all instructions `word`, in order."""
        return [instruction.value for instruction in self.instructions if instruction.word == word]

    @property
    def arguments(self) -> dict[str, str | None]:
        """Default of each ARG; None without one."""
        pairs = (value.partition("=") for value in self.values("ARG"))
        return {name: default if equals else None for name, equals, default in pairs}

    @property
    def sources(self) -> set[str]:
        """Stages and named contexts that it copies or mounts from."""
        return {name for _, value in self.instructions for name in re.findall(r"\bfrom=([\w-]+)", value)}


class Containerfile(NamedTuple):
    """The stages by name, and the arguments that FROM may use."""

    arguments: dict[str, str | None]
    stages: dict[str, Stage]

    def ancestors(self, name: str) -> list[Stage]:
        """The stage and what it starts from, up to the base image."""
        line = []
        while name in self.stages:
            line.append(self.stages[name])
            name = self.stages[name].parent
        return line

    def reachable(self, name: str) -> set[str]:
        """Names of all stages that building `name` builds."""
        found: set[str] = set()
        waiting = [name]
        while waiting:
            stage = self.stages.get(waiting.pop())
            if stage is not None and stage.name not in found:
                found.add(stage.name)
                waiting += [stage.parent, *stage.sources]
        return found


def read(path: Path, tmp_path: Path) -> Containerfile:
    """Parse a Containerfile (the parser wants one of that name in a folder of its own)."""
    copy = tmp_path / path.name / "Dockerfile"
    copy.parent.mkdir(exist_ok=True)
    copy.write_text(path.read_text())
    head: list[Instruction] = []
    stages: dict[str, Stage] = {}
    into = head
    for entry in DockerfileParser(str(copy)).structure:
        instruction = Instruction(entry["instruction"], entry["value"])
        if instruction.word == "COMMENT":
            continue
        if instruction.word == "FROM":
            parent, name = re.fullmatch(r"(\S+) AS (\S+)", instruction.value).groups()
            into = []
            stages[name] = Stage(name, parent, into)
        else:
            into.append(instruction)
    return Containerfile(Stage("", "", head).arguments, stages)
