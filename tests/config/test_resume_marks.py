"""The marks of a plugin's config fields decide whether a run with another value of the key resumes."""

from __future__ import annotations

from pathlib import Path

import pytest

from mm_core.checkpoint.resume_check import check_resume, differences_of
from mm_core.config.components import resume_marks
from mm_core.config.dump import to_mapping, to_yaml
from mm_core.config.explain import explain
from mm_core.config.load import load_config, load_with_places
from mm_core.errors import CheckpointError, PluginError
from mm_core.schema.fields import Resume

PLUGIN = """
from mm_core import Component, hookimpl


@hookimpl
def mm_engines():
    return [Component(name="pairs", target="mm_own.code:never", config="mm_own.config:PairsConfig")]


@hookimpl
def mm_datasets():
    return [Component(name="rows", target="mm_own.code:never", config="mm_own.config:RowsConfig")]


@hookimpl
def mm_video_readers():
    return [Component(name="reader", target="mm_own.code:reader")]


@hookimpl
def mm_predictors():
    return [Component(name="net", target="mm_own.code:never", config="mm_own.config:Bases")]
"""
CONFIG = """
from dataclasses import dataclass, field
from typing import Annotated, Literal

from mm_core.plugin import ComponentConfig, Kind, Range, Resume


@dataclass(frozen=True)
class Bases:
    cached: Annotated[bool, Resume("safe", "changes the speed")] | None = False
    depth: int = 2


@dataclass(frozen=True)
class PairsConfig:
    group: Annotated[Annotated[int, Range(ge=1)] | None, Resume("safe", "is another layout")] = 2
    layout: Annotated[tuple[str, ...] | Literal["auto"], Resume("refused", "the state does not fit")] = "auto"
    scale: float = 1.0
    inner: Bases | None = field(default_factory=Bases)
    frozen: Annotated[dict[str, str], Resume("safe", "places weights")] = field(default_factory=dict)
    async_: Annotated[bool, Resume("safe", "changes the speed")] = False


@dataclass(frozen=True)
class RowsConfig(Bases):
    annotations: Annotated[str, Resume("allow", "has no fingerprint")] = "a.json"
    folder: str = "videos"
    reader: Annotated[ComponentConfig, Kind("video_reader")] = ComponentConfig("video_reader", "own/reader")
"""
CODE = """
from typing import Annotated

from mm_core.plugin import Resume


def reader(threads: Annotated[int, Resume("refused", "counts here")] = 2, size: int = 3):
    ...
"""
RUN = """
run: {name: small}
task:
  type: text_to_video
  predictor: net
  autoencoder: pixel
  text_encoder: bytes
  scheduler: flow_match
data: {train: {type: rows}}
engine: {type: pairs, frozen: {vae: replicated}}
train: {steps: 10, global_batch_size: 8}
"""


@pytest.fixture
def yaml(site, tmp_path) -> Path:
    """A run of an installed plugin's components."""
    site.plugin("own", PLUGIN)
    site.module("mm_own.config", CONFIG)
    site.module("mm_own.code", CODE)
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    return path


def checked(yaml: Path, *overrides: str, allow: tuple[str, ...] = ()) -> list[str]:
    """What a resume prints after these changes."""
    before, now = load_config(yaml), load_config(yaml, overrides)
    manifests = [{"config": to_mapping(config)} for config in (before, now)]
    return check_resume(*manifests, allow, marks=resume_marks(now))


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("engine.group=4", "is another layout"),
        ("engine.async=true", "changes the speed"),
        ("engine.inner.cached=true", "changes the speed"),
        ("engine.frozen.vae=sharded", "places weights"),
        ("task.predictor.cached=true", "changes the speed"),
        ("data.train.cached=true", "changes the speed"),
        ("data.train.folder=elsewhere", "a path; the videos are assumed to be the same"),
        ("data.train.reader.size=4", "changes pixels by rounding alone"),
    ],
)
def test_a_change_that_is_marked_safe_or_safe_by_the_rule_of_its_section_is_a_line(yaml, override, why):
    (_, line) = checked(yaml, override)
    assert line.startswith(f"  {override.partition('=')[0]} ") and line.endswith(f"  safe  {why}")


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("engine.scale=2.0", "changes what is learned"),
        ("engine.inner.depth=3", "changes what is learned"),
        ("task.predictor.depth=3", "changes what is learned"),
        ("data.train.depth=3", "changes which samples come when"),
        ("data.train.annotations=b.json", "has no fingerprint"),
    ],
)
def test_a_change_without_a_mark_or_marked_so_needs_allow(yaml, override, why):
    key = override.partition("=")[0]
    with pytest.raises(CheckpointError, match=f"needs --allow  {why}\n  hint: .* --allow {key}$"):
        checked(yaml, override)
    assert len(checked(yaml, override, allow=(key,))) == 2


@pytest.mark.parametrize("override", ["engine.layout=[blocks]", "data.train.reader.threads=4"])
def test_a_change_that_is_marked_refused_is_refused_whatever_is_allowed(yaml, override):
    with pytest.raises(CheckpointError, match=r"refused  (the state does not fit|counts here)"):
        checked(yaml, override, allow=("all",))


def test_a_key_whose_value_comes_from_the_environment_has_its_mark():
    marks = {"engine.group": Resume("refused", "is another layout")}
    manifests = [{"config": {}, "environment": {"engine.group": trace}} for trace in ("12ab", "34cd")]
    (found,) = differences_of(*manifests, marks)
    assert (found.key, found.verdict, found.why) == ("engine.group", "refused", "is another layout")


def test_marks_are_read_without_torch(yaml, site):
    (site.folder.parent / "a.py").write_text(
        "import sys\nfrom mm_core.config.load import load_config\n"
        "from mm_core.config.components import resume_marks\n"
        f"marks = resume_marks(load_config({str(yaml)!r}))\n"
        "print(marks['engine.inner.cached'], 'torch' in sys.modules)\n"
    )
    done = site.run(str(site.folder.parent / "a.py"))
    assert done.stdout == "Resume(verdict='safe', why='changes the speed') False\n", done.stderr


def test_a_marked_key_is_described_as_it_would_be_without_the_mark(yaml):
    loaded = load_with_places(yaml, ["engine.layout=[blocks]"])
    (found,) = explain("engine.layout", loaded[0].registry, loaded)
    assert found.type == "list of str or 'auto'" and found.accepted == "a list, each a string or auto"
    (found,) = explain("engine.layout.0", loaded[0].registry, loaded)
    assert found.value == "blocks"


def test_a_verdict_that_does_not_exist_is_an_error_that_lists_them():
    with pytest.raises(PluginError, match="has the verdict 'save'") as caught:
        Resume("save", "it is quick")  # type: ignore[arg-type]
    assert caught.value.accepted == "safe, allow, refused"


def test_a_key_named_as_a_word_of_python_is_stored_as_it_is_written(yaml, tmp_path):
    config = load_config(yaml, ["engine.async=true"])
    again = tmp_path / "again.yaml"
    again.write_text(to_yaml(config))
    assert load_config(again).engine == config.engine
