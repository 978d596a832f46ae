"""Stored runs of somebody else: their code leaves a mark when it runs."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from mm_core.checkpoint.store import CheckpointStore
from mm_core.config.dump import to_yaml
from mm_core.config.load import load_config
from mm_core.config.sections import RunConfig
from mm_core.config.stored import remember
from mm_core.contracts import Randomness
from mm_core.modules.initialise import initialise
from mm_core.plan import build_task
from support.sites import clear_cache
from support.tiny_models import ONE_BLOCK

PLUGIN = """
from pathlib import Path

with Path({mark!r}).open("a") as file:
    file.write("ran\\n")
{more}
from mm_core import Component, hookimpl


@hookimpl
def mm_predictors():
    target, config = "mm_custom_dit.model:CustomDiT", "mm_custom_dit.config:CustomDiTConfig"
    return [Component(name="theirs", target=target, config=config)]
"""

CONFIG = {
    "run": {"name": "theirs"},
    "task": {
        **ONE_BLOCK,
        "predictor": {**ONE_BLOCK["predictor"], "type": "local/theirs"},
        "sample": {"steps": 1},
    },
    "data": {
        "train": {"type": "video_text", "annotations": "data.json", "num_frames": 4, "height": 8, "width": 8}
    },
    "train": {"steps": 1},
}


class Stranger:
    """A run in `folder/run`, with a checkpoint, and the plugin that its config names in `folder/code`."""

    settings = CONFIG

    def __init__(self, folder: Path) -> None:
        self.folder, self.mark = folder, folder / "mark"
        self.run, self.plugin = folder / "run", folder / "code" / "theirs.py"
        self.yaml = folder / "own" / "train.yaml"
        self.plugin.parent.mkdir(parents=True)
        self.yaml.parent.mkdir()
        self.write()

    def write(self, more: str = "") -> None:
        self.plugin.write_text(PLUGIN.format(mark=str(self.mark), more=more))

    def config(self, **sections: object) -> Path:
        """The YAML that was trained with."""
        whole = {**CONFIG, "plugins": {"path": [str(self.plugin)]}, **sections}
        self.yaml.write_text(yaml.safe_dump(whole))
        return self.yaml

    def train(self, *, known: bool = False, weights: bool = False, **sections: object) -> Path:
        """Makes the run's folder, as its author did. Nothing of it is left in this process.

        Args:
            known: whether this user is the author.
            weights: whether its checkpoint holds weights; without them it is a mere shell.
            sections: further sections of the config.
        """
        config = load_config(self.config(**sections))
        if known:
            assert remember(config) is None
        text = to_yaml(config)
        self.checkpoint.parent.mkdir(parents=True)
        if weights:
            self.store(config, text)
        else:
            self.checkpoint.mkdir()
            (self.checkpoint / "config.yaml").write_text(text)
            (self.checkpoint / "checksums.json").write_text("{}")
        (self.run / "config.yaml").write_text(text)
        (self.run / "manifest.json").write_text(json.dumps({}))
        self.forget()
        return self.run

    def store(self, config: RunConfig, text: str) -> None:
        task = build_task(config)
        model = {}
        for root in task.trainable:
            module = task.get_submodule(root)
            module.to_empty(device="cpu")
            initialise(module, root, Randomness(0))
            model |= {f"{root}.{name}": tensor for name, tensor in module.state_dict().items()}
        CheckpointStore(self.run, 1).save(1, {"model": model, "optimizer": {}}, {}, text)

    def forget(self) -> None:
        clear_cache()
        forget_modules()
        self.mark.unlink(missing_ok=True)

    @property
    def checkpoint(self) -> Path:
        return self.run / "checkpoints" / "step_00000001"

    @property
    def ran(self) -> bool:
        return self.mark.exists()


def forget_modules() -> None:
    """The state of a new process: no plugin imported, none watched."""
    import sys

    from mm_core.plugin.local import _Finder

    for name in [name for name in sys.modules if name.startswith(("mm_local_", "beside_"))]:
        del sys.modules[name]
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the list of trusted code."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "mm_core" / "trusted_code"


@pytest.fixture
def stranger(tmp_path: Path, home: Path) -> Iterator[Stranger]:
    import sys

    path = [*sys.path]
    made = Stranger(tmp_path / "stranger")
    made.forget()
    yield made
    sys.path[:] = path
    made.forget()


@pytest.fixture
def moved() -> Callable[[Path, Path], Path]:
    def move(folder: Path, to: Path) -> Path:
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(os.fspath(folder), to)
        return to

    return move
