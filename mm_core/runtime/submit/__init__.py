"""Files for the schedulers of clusters, from templates that read as those: jobs of Slurm and Kubernetes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files

from mm_core.config.sections import RunConfig


@dataclass(frozen=True)
class Submission:
    """A run on hosts of a cluster.

    Attributes:
        config: the run's checked config.
        command: the command that makes the file, for its first line.
        nodes: hosts.
        nproc: ranks of each host.
        device: kind of device, a key of `RESOURCES`.
        grace: seconds for a save, from the warning to the end.
        max_restarts: as `mm-train` takes it.
    """

    config: RunConfig
    command: str
    nodes: int
    nproc: int
    device: str
    grace: int
    max_restarts: int = 0

    @property
    def name(self) -> str:
        """The run's name, as schedulers and DNS take names: small letters, digits, dashes; a letter first."""
        name = re.sub(r"[^a-z0-9]+", "-", self.config.run.name.lower()).strip("-")
        return (name if name[:1].isalpha() else f"run-{name}")[:50].strip("-")

    @property
    def restarts(self) -> list[str]:
        """The option of `mm-train` for restarts, where there are any."""
        return [f"--max-restarts={self.max_restarts}"] if self.max_restarts else []


def filled(template: str, words: Mapping[str, str | Sequence[str]]) -> str:
    """A template's text with `@name@` replaced. A line of its own takes lines, each indented as it is."""

    def text(found: re.Match[str]) -> str:
        indent, alone, within = found.groups()
        if within is not None:
            return str(words[within])
        value = words[alone]
        rows = value.splitlines() if isinstance(value, str) else value
        return "".join(f"{indent}{row}\n" if row else "\n" for row in rows)

    source = (files(__package__) / "templates" / template).read_text(encoding="utf-8")
    return re.sub(r"^([ \t]*)@(\w+)@\n|@(\w+)@", text, source, flags=re.MULTILINE)
