"""The conformance kit of weight formats (`mm_core.weights.WeightFormat`)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from mm_core.contracts import Randomness
from mm_core.errors import ContractError, MMError, plural
from mm_core.interchange.export import write_part
from mm_core.interchange.export_plan import Part, Planner, own_state
from mm_core.loading.checkpoint_source import CheckpointSource
from mm_core.plugin.checks.values import returned
from mm_core.runtime.ranks import Ranks
from mm_core.testing.common import KindProbe
from mm_core.testing.kit import Kit, NotApplicable, Probe, checks_of
from mm_core.weights.fitting import Fit, candidate_layouts, formats_of
from mm_core.weights.formats.format import WeightFormat, Written, of_component
from mm_core.weights.streaming import stream

_NAME = "component"
"""The name of the model in its task."""


class _Stored:
    """Tensors in the place of a checkpoint's."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = {f"{_NAME}.{name}": tensor for name, tensor in tensors.items()}
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}
        self.dtypes = {name: tensor.dtype for name, tensor in self._tensors.items()}
        self.ranks = Ranks.current()

    def fill(self, targets: Mapping[str, Tensor]) -> None:
        for name, target in targets.items():
            target.copy_(self._tensors[name])


class FormatProbe(KindProbe):
    """A weight format under test, and a model that it can store."""

    @cached_property
    def model(self) -> nn.Module | None:
        """The model of the author, else the first predictor of the plugin that the format can store."""
        if self.probe.examples is not None:
            return cast(nn.Module, self.probe.examples)
        registered, registry = self.probe.registered, self.probe.registry
        for each in registry.components("predictor"):
            if each.namespace == registered.namespace:
                folder = self.probe.folder / each.component.name
                folder.mkdir()
                with torch.device("meta"):
                    model: nn.Module = Probe(each, registry, folder).build()
                if self.build().layout(_NAME, model):
                    return model
        return None

    @property
    def component(self) -> nn.Module:
        """As `model`; NotApplicable without one, which the check `layout` shows."""
        if self.model is None or not self.build().layout(_NAME, self.model):
            raise NotApplicable("there is no model to store: see the check `layout`")
        if not _stores(self.build(), self.model):
            raise NotApplicable("the format is only read: its author tests it with files of its kind")
        return self.model

    def tensors(self, dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Tensor]:
        """Random numbers for every tensor of the model, by name."""
        rng = Randomness(seed)
        found = {}
        for name, tensor in own_state(self.component).items():
            drawn = rng.normal(tuple(tensor.shape), "weights", name)
            found[name] = drawn.to(dtype) if tensor.is_floating_point() else (drawn * 100).to(tensor.dtype)
        return found

    def parts(self, tensors: Mapping[str, Tensor], form: Any = None, files: int = 1) -> list[Part]:
        """What an export of the model writes.

        Args:
            tensors: numbers of the model.
            form: the format; None: a new one.
            files: about how many files.
        """
        limit = 1 + sum(tensor.nbytes for tensor in tensors.values()) // files
        saved = cast(CheckpointSource, _Stored(tensors))
        label = self.probe.registered.qualified
        planner = Planner(self.probe.registry, label, form or self.build(), saved, None, limit)
        return planner.weights(_NAME, self.component)

    def write(self, name: str, tensors: Mapping[str, Tensor], form: Any = None, files: int = 1) -> Path:
        """Exports the model into a new folder, as `mm export` does, and returns the folder.

        Args:
            name: name of the folder.
            tensors: numbers of the model.
            form: the format; None: a new one.
            files: about how many files.
        """
        folder = self.probe.folder / "exports" / name
        folder.mkdir(parents=True)
        for part in self.parts(tensors, form, files):
            write_part(folder, part)
        return folder

    def ways(self, folder: Path, form: Any = None) -> list[Fit]:
        """How the format, or a new one, reads the model from a folder, best first."""
        shapes = {name: tensor.shape for name, tensor in own_state(self.component).items()}
        formats = {self.probe.registered.qualified: form or self.build()}
        return candidate_layouts(folder, _NAME, self.component, shapes, formats)

    def expect_same(self, folder: Path, wanted: Mapping[str, Tensor], what: str, form: Any = None) -> None:
        """Expects that an export is read as the same tensors, bit for bit.

        Args:
            folder: the export.
            wanted: the exported tensors, by name.
            what: how the tensors were exported, for the ContractError.
            form: the format to read with; None: a new one.
        """
        ways = self.ways(folder, form)
        self.expect(
            ways,
            f"{what}, the format does not recognise the files that it has written",
            accepted="recognises(path) is true for its own folders",
        )
        way = ways[0]
        hint = "the map of names in `layout` must take each tensor to one place, and all of it"
        misshapen, unexpected = (name for name, *_ in way.misshapen), (name for _, name in way.unexpected)
        apart = [*way.missing, *misshapen, *unexpected]
        self.expect(
            not apart, f"{what}, the files do not hold the tensors of the model: {_first(apart)}", hint=hint
        )
        found = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
        stream(found, way.pieces)
        wrong = [name for name, tensor in wanted.items() if not torch.equal(found[name], tensor)]
        self.expect(not wrong, f"{what}, {_first(wrong)} comes back with other numbers", hint=hint)

    def read_all(self, folder: Path, form: Any) -> None:
        """Opens and reads all that the format finds in a folder."""
        for part in form.folders(folder):
            stored = form.open(folder, part)
            for name, shape in stored.shapes.items():
                stored.read(name, tuple(slice(0, size) for size in shape)).sum()


def _first(names: list[str]) -> str:
    return f"{', '.join(names[:3])}{' ...' if len(names) > 3 else ''}"


def layout(probe: FormatProbe) -> None:
    """layout describes a model from its names and sizes alone, and answers for any other module."""
    probe.expect(
        probe.model is not None,
        "no predictor of the plugin can be stored in the format",
        hint="name a model for tests: Component(..., examples='package.module:function')",
    )
    form = probe.build()
    found = form.layout(_NAME, probe.model)
    probe.expect(found, f"layout returned {found!r} for {type(probe.model).__name__}", accepted="a Layout")
    for each in of_component(found):
        refusal = each.refusal() if each.refusal is not None else ""
        probe.expect(not refusal, f"the model for tests is refused: {refusal}")
    with torch.device("meta"):
        others: list[nn.Module] = [nn.Linear(2, 3), nn.Sequential(nn.LayerNorm(2)), nn.ReLU()]
    for other in others:
        for name in ("layout", "adapter"):
            what, accepted = f"{name} of a module of torch", "a Layout, or None where it cannot"
            call = getattr(form, name)
            probe.expect_no_error(what, accepted, call, "model", other, allowed=(ContractError,))


def round_trip(probe: FormatProbe) -> None:
    """What is exported is read again as the same tensors, bit for bit, in float32 and bfloat16."""
    for dtype in (torch.float32, torch.bfloat16):
        tensors, what = probe.tensors(dtype), str(dtype).removeprefix("torch.")
        probe.expect_same(probe.write(what, tensors), tensors, f"exported in {what}")


def shards(probe: FormatProbe) -> None:
    """An export in several files with an index is read again as the same tensors."""
    tensors = probe.tensors()
    folder = probe.write("shards", tensors, files=4)
    count = len(list(folder.rglob("*.safetensors")))
    probe.expect_same(folder, tensors, f"exported in {plural(count, 'file')}")


def others(probe: FormatProbe) -> None:
    """Files that another installed format has written are read as the same tensors, or not at all."""
    tensors = probe.tensors()
    for label, form in formats_of(probe.probe.registry).items():
        if label == probe.probe.registered.qualified or not _stores(form, probe.component):
            continue
        folder = probe.write(f"by_{label.replace('/', '_')}", tensors, form)
        ways = probe.ways(folder)
        if ways and ways[0].whole:
            probe.expect_same(folder, tensors, f"written by {label}")


def _stores(form: Any, model: nn.Module) -> bool:
    try:
        layouts = of_component(form.layout(_NAME, model))
        return bool(layouts) and not any(layout.read_only for layout in layouts)
    except ContractError:  # it has no map for this model
        return False


def no_state(probe: FormatProbe) -> None:
    """One instance writes and reads several folders, each with its own numbers."""
    form = probe.build()
    for seed in range(2):
        tensors = probe.tensors(seed=seed)
        folder = probe.write(f"state_{seed}", tensors, form)
        probe.expect_same(folder, tensors, f"with the numbers of model {seed + 1}", form)


def strangers(probe: FormatProbe) -> None:
    """Folders without weights, or with hostile files, are not recognised, and raise no error."""
    form = probe.build()
    for what, path in _strangers(probe.probe.folder / "strangers"):
        accepted, call = "False, never an error", form.recognises
        found = probe.expect_no_error(f"recognises of {what}", accepted, call, path)
        probe.expect(found is False, f"recognises of {what} returned {found!r}", accepted="False")


def _strangers(top: Path) -> Iterator[tuple[str, Path]]:
    yield "a path that does not exist", top / "nothing"
    contents = {
        "an empty folder": b"",
        "a config that is not JSON": b"{'_class_name': ",
        "a config that is not text": bytes(range(256)),
        "a config that is a list": b"[1, 2, 3]",
    }
    for number, (what, content) in enumerate(contents.items()):
        folder = top / str(number)
        folder.mkdir(parents=True)
        for name in ("config.json", "model_index.json") * bool(content):
            (folder / name).write_bytes(content)
        yield what, folder
    yield "a text file", top / "1" / "config.json"


def damaged(probe: FormatProbe) -> None:
    """Truncated, foreign and missing weights files are errors with the file's place, not of a library."""
    whole = probe.write("whole", probe.tensors(), files=3)
    harms: dict[str, Callable[[Path], object]] = {
        "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
        "empty": lambda path: os.truncate(path, 0),
        "a text": lambda path: path.write_text("<html>404 Not Found</html>" * 20, encoding="utf-8"),
        "missing": lambda path: path.unlink(),
    }
    for what, harm in harms.items():
        folder = shutil.copytree(whole, whole.with_name(f"damaged_{what.replace(' ', '_')}"))
        harm(min(folder.rglob("*.safetensors")))
        case, accepted = f"reading, where a weights file is {what},", "CheckpointError with the path"
        error = probe.expect_error(case, MMError, accepted, probe.read_all, folder, probe.build())
        named = str(folder) in str(error)
        probe.expect(named, f"{case} raises an error without the path: {error}", accepted=accepted)


class _Touch:
    """An object whose pickle creates a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


def no_code(probe: FormatProbe) -> None:
    """Reading weights runs no code: a pickle is refused, whatever its file is called."""
    whole = probe.write("code", probe.tensors())
    for kind in (".safetensors", ".bin", ".pt"):
        folder = shutil.copytree(whole, whole.with_name(f"code_{kind[1:]}"))
        mark = folder / "the code was run"
        for path in list(folder.rglob("*.safetensors")):
            path.unlink()
            for stem in (path.stem, "pytorch_model", "model"):
                torch.save({"weight": torch.zeros(2), "_": _Touch(mark)}, path.with_name(stem + kind))
        with suppress(Exception):
            probe.read_all(folder, probe.build())
        probe.expect(
            not mark.exists(),
            f"reading a {kind} file runs the code of a pickle in it",
            accepted="only tensors: safetensors, or torch.load(..., weights_only=True)",
            hint="read files with `mm_core.weights.open_stored`",
        )


def companions(probe: FormatProbe) -> None:
    """companions answers for a run that began at random, and for one whose files are gone."""
    form, task = probe.build(), nn.ModuleDict({_NAME: probe.component})
    vars(task).update(trainable=(_NAME,), frozen=())
    for sources in ((), (probe.probe.folder / "gone",)):
        parts = probe.parts(probe.tensors(), form)
        written = [Written(_NAME, p.layout.part, p.layout.folder, p.layout.texts, sources) for p in parts]
        found = returned(WeightFormat.companions, form.companions(task, written), form)
        names = [*found.texts, *found.copies, *found.places.values()]
        outside = [name for name in names if Path(name).is_absolute() or ".." in Path(name).parts]
        probe.expect(not outside, f"companions writes outside of the export: {', '.join(outside)}")
        absent = [str(path) for path in found.copies.values() if not Path(path).exists()]
        probe.expect(not absent, f"companions copies files that do not exist: {', '.join(absent[:3])}")


KIT = Kit(checks_of(__name__), probe=FormatProbe)
"""The conformance checks of weight formats."""
