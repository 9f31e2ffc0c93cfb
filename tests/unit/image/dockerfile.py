"""Reads the Dockerfile as far as the tests of the image want it: stages, their instructions and their arguments."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[3]


@dataclass
class Stage:
    """What stands between one FROM and the next."""

    name: str
    base: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def values(self, instruction: str) -> list[str]:
        """The values of all instructions of one kind, in order."""
        return [value for name, value in self.instructions if name == instruction]

    @property
    def arguments(self) -> dict[str, str]:
        """The build arguments that the stage declares, with their defaults."""
        pairs = (value.partition("=") for value in self.values("ARG"))
        return {name: "".join(shlex.split(default)) for name, _, default in pairs}


def read_stages(file: Path = ROOT / "Dockerfile") -> list[Stage]:
    """All stages; the last one has no name."""
    text = re.sub(r"(?m)^\s*#.*\n", "", file.read_text())
    stages: list[Stage] = []
    for line in text.replace("\\\n", " ").splitlines():
        if not line.strip():
            continue
        instruction, _, value = line.partition(" ")
        if instruction == "FROM":
            base, _, name = value.partition(" AS ")
            stages.append(Stage(name.strip(), base.strip()))
        elif stages:
            stages[-1].instructions.append((instruction, value.strip()))
    return stages


def stage_named(name: str) -> Stage:
    """The stage of this name."""
    return next(stage for stage in read_stages() if stage.name == name)
