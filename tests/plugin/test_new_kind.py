"""A new kind of component opens the five files that docs/hooks.md names; its commands and pages follow."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROTOCOL = '''"""Gauges."""

from typing import Protocol, runtime_checkable


@runtime_checkable
class Gauge(Protocol):
    """A gauge of something."""

    def read(self, scale: float) -> float:
        """What it shows on a scale."""
'''
HOOK = '''@ComponentKind(
    "mm_core.contracts:Gauge",
    kit="mm_core.testing.gauges:KIT",
    target="Half",
    run={"task.predictor": "{type: $type}"},
    leading=1,
)
def mm_gauges() -> Iterable[Component]:
    """Gauges: `target(limit, **fields)` -> `mm_core.contracts.Gauge`.

    See [Config](config.md): what a run has.
    """


COMPONENT_KINDS: '''
EXAMPLE = '''"""A gauge that shows the half."""


class Half:
    def __init__(self, limit, share: float = 0.5) -> None:
        self.share = share

    def read(self, scale):
        """The half of a scale."""
        return self.share * scale
'''
KIT = '''"""The conformance checks of gauges."""

from mm_core.testing.kit import Kit, Probe, checks_of


def half(probe: Probe) -> None:
    """A gauge shows half of its scale."""
    probe.expect(probe.build(9.0).read(2.0) == 1.0, "it shows another share")


KIT = Kit(checks_of(__name__), arguments=lambda _: (9.0,))
"""The conformance checks of gauges."""
'''
FILES: dict[str, Callable[[str], str]] = {
    "mm_core/contracts/gauges.py": lambda _: PROTOCOL,
    "mm_core/contracts/__init__.py": lambda text: text.replace(
        "\n__all__ = [", '\nfrom mm_core.contracts.gauges import Gauge\n\n__all__ = [\n    "Gauge",'
    ),
    "mm_core/plugin/hookspecs.py": lambda text: text.replace("COMPONENT_KINDS: ", HOOK, 1),
    "mm_core/plugin/scaffold/templates/kinds/gauge.py.txt": lambda _: EXAMPLE,
    "mm_core/testing/gauges.py": lambda _: KIT,
}


@pytest.mark.slow
def test_a_new_kind_opens_five_files_and_its_commands_and_pages_follow(tmp_path: Path) -> None:
    named = re.findall(r"^\| `(mm_core/.*?)` \|", (ROOT / "docs/hooks.md").read_text(), re.M)
    assert [re.sub("gauges?", "<>", file) for file in FILES] == [
        re.sub("<.*?>", "<>", each) for each in named
    ]
    for folder in ("mm_core", "docs"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    for file, changed in FILES.items():
        place = tmp_path / file
        place.write_text(changed(place.read_text() if place.exists() else ""))

    def run(*words: str) -> str:
        path = os.environ | {
            "PYTHONPATH": str(tmp_path),
            "MM_PLUGINS_DISABLE": "custom_dit,deepspeed,internvl,wan",
        }
        done = subprocess.run(
            [sys.executable, *words], cwd=tmp_path, env=path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    mm = ("-m", "mm_core.cli.main", "plugins")
    assert "my-half: 8 files" in run(*mm, "new", "my-half", "--kind", "gauge")
    mine = tmp_path / "mine.py"
    hook = (tmp_path / "my-half/my_half/plugin.py").read_text().replace("my_half.gauge:", "mine:")
    mine.write_text(f"{hook}\n{(tmp_path / 'my-half/my_half/gauge.py').read_text()}")
    tested = run(*mm, "test", "local/my_half", "--path", str(mine))
    assert "local/my_half  (gauge)" in tested and ", 0 failures" in tested, tested
    for script in ("generate_kinds.py", "generate_hooks.py"):
        run(f"docs/{script}")
    page = (tmp_path / "docs/kinds/gauge.md").read_text()
    assert "| `half` | A gauge shows half of its scale. |" in page and "- [Config](../config.md)" in page
    assert "## `mm_gauges`" in (tmp_path / "docs/hooks.md").read_text()
    assert "- Gauge: kinds/gauge.md" in (tmp_path / "mkdocs.yml").read_text()
