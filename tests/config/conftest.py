"""A valid YAML of a run, and a one-file plugin whose config has a field of every type."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from mm_core.config.load import load_config
from mm_core.config.sections import RunConfig
from mm_core.errors import ConfigError
from support.sites import clear_cache

TOY = '''
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from mm_core import Component, hookimpl
from mm_core.plugin import ComponentConfig, Kind, Range


@dataclass(frozen=True)
class Inner:
    left: int = 1
    right: float = 2.0


@dataclass(frozen=True)
class ToyConfig:
    depth: Annotated[int, Range(ge=1, le=64)]
    width: int = 8
    rate: float = 0.5
    name: str = "toy"
    bias: bool = True
    act: Literal["relu", "gelu"] = "relu"
    blocks: Literal["auto"] | tuple[str, ...] = "auto"
    patch: tuple[int, int, int] = (1, 2, 2)
    sizes: list[int] = field(default_factory=list)
    scale: float | None = None
    folder: Path | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    layers: dict[int, float] = field(default_factory=dict)
    inner: Inner = field(default_factory=Inner)
    reader: Annotated[ComponentConfig, Kind("video_reader")] = ComponentConfig("video_reader", "core/pyav")

    def __post_init__(self):
        if self.width % 2:
            raise ValueError(f"width {self.width} is odd")
        if self.name == "bug":
            raise KeyError("lost")


@hookimpl
def mm_predictors():
    return [
        Component(name="toy", target="toy:Toy", config="toy:ToyConfig", aliases=("old_toy",)),
        Component(name="other", target="toy:Toy", config="toy:Inner"),
        Component(name="bare", target="toy:bare"),
    ]


def bare(depth: int, act=ToyConfig, rate=0.5):
    """No config=: the signature serves."""


def Toy(**fields):
    """Is never called."""
'''

RUN = """\
run: {name: small}
plugins: {path: [toy.py]}
task:
  type: text_to_video
  predictor:
    type: toy
    depth: 2
  autoencoder: pixel
  text_encoder: {type: bytes}
  scheduler: {type: flow_match, shift: 5}
data:
  train: {type: video_text, annotations: a.json, num_frames: 8, height: 16, width: 16}
train:
  steps: 10
  micro_batch_size: 2
  global_batch_size: 8
"""


class Workplace:
    """A folder with `run.yaml` and `toy.py`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = folder / "run.yaml"
        self.write("toy.py", TOY)
        self.write("run.yaml", RUN)

    def write(self, name: str, text: str | bytes) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    def edit(self, *changes: tuple[str, str]) -> None:
        """Replaces texts of run.yaml, each of which must be there once."""
        text = RUN
        for old, new in changes:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        self.write("run.yaml", text)

    def load(self, *overrides: str, name: str = "run.yaml") -> RunConfig:
        return load_config(self.folder / name, overrides)

    def faults(self, *overrides: str, name: str = "run.yaml") -> list[str]:
        """The errors as printed, with paths relative to the folder."""
        with pytest.raises(ConfigError) as caught:
            self.load(*overrides, name=name)
        found: Sequence[Exception] = caught.value.faults or (caught.value,)
        return [str(fault).replace(f"{self.folder}/", "") for fault in found]

    def fault(self, *overrides: str, name: str = "run.yaml") -> str:
        """The only error."""
        (only,) = self.faults(*overrides, name=name)
        return only


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workplace]:
    for variable in ("MM_PLUGINS", "MM_PLUGINS_DISABLE", "MM_PLUGINS_STRICT"):
        monkeypatch.delenv(variable, raising=False)
    yield Workplace(tmp_path)
    clear_cache()


@pytest.fixture
def predictor(place: Workplace) -> Callable[..., object]:
    """The predictor's checked options, after overrides of it."""

    def load(*overrides: str) -> object:
        return place.load(*(f"task.predictor.{text}" for text in overrides)).task.options["predictor"].options

    return load
