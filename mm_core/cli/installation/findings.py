"""What `mm doctor` has found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """One problem of an installation.

    Attributes:
        severity: error: a run fails or computes something wrong; warning: it may fail, or is slow.
        sentence: what is wrong, and where.
        fix: the command that fixes it, or what to change.
    """

    severity: Literal["error", "warning"]
    sentence: str
    fix: str


@dataclass
class Report:
    """The findings, and what is installed.

    Attributes:
        facts: subject -> what was found about it.
        findings: the problems.
    """

    facts: dict[str, str] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    def error(self, sentence: str, fix: str) -> None:
        """Adds a problem with which a run fails."""
        self.findings.append(Finding("error", sentence, fix))

    def warn(self, sentence: str, fix: str) -> None:
        """Adds a problem with which a run may fail, or is slow."""
        self.findings.append(Finding("warning", sentence, fix))

    @property
    def errors(self) -> int:
        """The number of problems with which a run fails."""
        return sum(finding.severity == "error" for finding in self.findings)
