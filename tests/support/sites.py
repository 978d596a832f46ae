"""Real distributions in a folder on sys.path: a dist-info with METADATA and entry points, and modules."""

from __future__ import annotations

import importlib
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from mm_core.plugin.manager import entry_point_records
from mm_core.plugin.registry import Registry, _warn, get_registry
from support import warm

HEAD = "from mm_core import Component, hookimpl\n\n"
PREDICTOR = HEAD + (
    "@hookimpl\ndef mm_predictors():\n"
    "    return [Component(name='dit', target='{package}.model:DiT', config='{package}.config:DiTConfig',\n"
    "                      summary='a transformer', aliases=('old_dit',), capabilities={{'video': True}},\n"
    "                      licence='Apache-2.0', paper='https://arxiv.org/abs/2212.09748')]\n"
)

MODEL = """
import torch


class DiT(torch.nn.Module):
    text_padding, patch_size = "masked", (1, 2, 2)
    in_channels = out_channels = text_dim = 4

    def __init__(self, depth):
        super().__init__()
        self.depth = depth

    def forward(self, latents, timestep, text, text_mask):
        return latents

    def init_weights(self): ...
"""


def clear_cache() -> None:
    """Forgets the list of installed plugins and the warnings already printed; imports stay."""
    _warn.cache_clear()
    entry_point_records.cache_clear()


class Site:
    """A site-packages of the test's own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(
        self,
        distribution: str,
        points: Mapping[str, str],
        modules: Mapping[str, str] | None = None,
        version: str = "1.0",
        requires: Sequence[str] = ("mm-core>=0.1,<0.2",),
    ) -> None:
        """Writes a distribution as pip would."""
        info = self.folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        lines = ["Metadata-Version: 2.4", f"Name: {distribution}", f"Version: {version}"]
        lines += [f"Requires-Dist: {requirement}" for requirement in requires]
        (info / "METADATA").write_text(
            "\n".join(lines) + "\n\nRequires-Dist: mm-core>=9 (words, no header)\n"
        )
        body = "".join(f"{name} = {value}\n" for name, value in points.items())
        (info / "entry_points.txt").write_text(f"[mm_core.plugins]\n{body}")
        for name, source in (modules or {}).items():
            self.module(name, source)

    def module(self, name: str, source: str) -> None:
        """Writes a module such as `a.b`, with its packages."""
        *packages, last = name.split(".")
        folder = self.folder
        for package in packages:
            folder = folder / package
            folder.mkdir(exist_ok=True)
            (folder / "__init__.py").touch()
        (folder / f"{last}.py").write_text(source)

    def plugin(self, name: str, source: str, **details: object) -> None:
        """Writes a distribution `mm-<name>` with the plugin module `mm_<name>.plugin`."""
        package = f"mm_{name}"
        modules = {f"{package}.plugin": source}
        self.add(f"mm-{name}", {name: f"{package}.plugin"}, modules, **details)  # type: ignore[arg-type]

    def good(self, name: str, **details: object) -> None:
        """Writes a correct plugin with the predictor `dit`, its model and its config."""
        self.plugin(name, PREDICTOR.format(package=f"mm_{name}"), **details)
        self.module(f"mm_{name}.model", MODEL)
        self.module(
            f"mm_{name}.config",
            "from dataclasses import dataclass\n\n@dataclass(frozen=True)\nclass DiTConfig:\n"
            "    depth: int = 12  # how many blocks\n",
        )

    def registry(self, *local: str) -> Registry:
        """The registry that a new process would build."""
        importlib.invalidate_caches()
        clear_cache()
        return get_registry(local)

    def run(self, *command: str, anew: bool = True, **environ: str) -> subprocess.CompletedProcess[str]:
        """Runs `python ...` in a new process with this site on its path."""
        path = os.pathsep.join(filter(None, [str(self.folder), os.environ.get("PYTHONPATH")]))
        return warm.run(command, env={**os.environ, "PYTHONPATH": path, **environ}, timeout=60, anew=anew)

    def mm(self, *arguments: str, anew: bool = False, **environ: str) -> subprocess.CompletedProcess[str]:
        """Runs `mm ...` in a new process with this site on its path."""
        return self.run("-m", "mm_core.cli.main", *arguments, anew=anew, **environ)
