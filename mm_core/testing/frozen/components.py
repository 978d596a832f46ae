"""The conformance checks of every frozen component: autoencoders, text encoders and image encoders."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from mm_core.contracts import Streamed, SupportsFiles, WeightsFrom
from mm_core.errors import ContractError, MMError, first_line
from mm_core.loading.frozen import load_frozen
from mm_core.testing.common import KindProbe, state_changes
from mm_core.testing.tensors import tensors_of

_IN_LOAD = (
    "the constructor runs on the meta device: make tensors with values (position tables, statistics) in load,"
    " or in build_empty within mm_core.contracts.empty_parameters()"
)


class FrozenProbe(KindProbe):
    """A frozen component under test, loaded once for all checks."""

    def build(self, **changes: object) -> Any:
        """Builds a new instance without weights, on the meta device as the core does."""
        _ = self.probe.config  # its files are made with memory
        with torch.device("meta"):
            return self.probe.build(**changes)

    @cached_property
    def component(self) -> Any:
        """The small instance with its weights, on the CPU. A check leaves it as it is."""
        return self.loaded()

    def loaded(self, folder: Path | None = None, changes: Mapping[str, object] = MappingProxyType({})) -> Any:
        """Builds a new instance with its weights.

        Args:
            folder: a copy of the small instance's folder, to read its files from there.
            changes: fields that replace those of the small instance.
        """
        component = self.build(**{**self.moved(folder), **changes})
        try:
            return load_frozen(component, "cpu", self.probe.registry)
        except NotImplementedError as error:  # torch's, for copies of tensors that have no values
            what = f"loading uses tensors that the constructor has made without values: {first_line(error)}"
            raise ContractError(what, where=self.probe.place, hint=_IN_LOAD) from error

    def moved(self, folder: Path | None) -> dict[str, object]:
        """The fields of the small instance with paths into another folder, if they contain any."""
        own = str(self.probe.folder)
        if folder is None:
            return {}
        options = self.probe.config.options.items()
        return {n: v.replace(own, str(folder)) for n, v in options if isinstance(v, str) and own in v}


def check_pure(probe: FrozenProbe, what: str, call: Callable[[], Any], given: Sequence[Tensor]) -> None:
    """Checks that equal calls return equal tensors, and change no inputs.

    Args:
        probe: the component under test.
        what: the called method, for the ContractError.
        call: makes the call; the tensors in what it returns are compared.
        given: the tensors that the call gets.
    """
    kept = [each.clone() for each in given]
    first = _tensors_in(call())
    probe.expect(all(map(torch.equal, kept, given)), f"{what} changes tensors that it is given")
    second = _tensors_in(call())
    same = len(first) == len(second) and all(map(torch.equal, first, second))
    probe.expect(
        same, f"equal calls of {what} return different results", hint="keep no state from call to call"
    )


def _tensors_in(value: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def loads(probe: FrozenProbe) -> None:
    """Weights are loaded once, are finite and not drawn at random; modules are in evaluation mode."""
    found: list[Any] = []
    changed = state_changes(lambda: found.append(probe.loaded()))
    probe.expect(
        not changed,
        f"loading the component changes {', '.join(changed[:4])}",
        accepted="equal weights on every rank and in every run",
        hint="read weights from files; draw tables from `mm_core.contracts.Randomness(seed)`",
    )
    component = found[0]
    module: nn.Module = component if isinstance(component, nn.Module) else nn.Module()
    tensors = tensors_of(module)
    for name, tensor in tensors.items():
        probe.expect(not tensor.is_meta, f"the tensor {name} has no values after loading", hint=_IN_LOAD)
        finite = not tensor.is_floating_point() or bool(tensor.isfinite().all())
        probe.expect(finite, f"the tensor {name} contains NaN or infinity after loading")
    if isinstance(component, Streamed):
        method, second = "build_empty", component.build_empty
    else:
        method, second = "load", partial(component.load, torch.device("cpu"))
    second()
    again = tensors_of(module)
    probe.expect(
        again.keys() == tensors.keys() and all(again[name] is tensors[name] for name in tensors),
        f"a second {method} makes new tensors",
        hint=f"return from {method} at once if the component has its weights",
    )
    training = [type(each).__name__ for each in module.modules() if each.training and each is not module]
    probe.expect(
        not training,
        f"{' and '.join(dict.fromkeys(training))} is in training mode, so that dropout is active",
        hint="call eval() on the modules in build_empty or load",
    )


def streamed(probe: FrozenProbe) -> None:
    """build_empty makes parameters without memory and computes buffers; entry points are methods."""
    component = probe.build()
    probe.require(component, Streamed)
    component.build_empty()
    module: Any = component
    memory = [name for name, parameter in module.named_parameters() if not parameter.is_meta]
    probe.expect(
        not memory,
        f"build_empty gives memory to {', '.join(memory[:4])}",
        accepted="parameters on the meta device; mm_core fills them",
        hint="build the modules within mm_core.contracts.empty_parameters()",
    )
    empty = [name for name, buffer in module.named_buffers() if buffer.is_meta]
    probe.expect(
        not empty,
        f"build_empty leaves {', '.join(empty[:4])} without values: files of weights seldom contain buffers",
        hint="build the modules within mm_core.contracts.empty_parameters(), which computes buffers",
    )
    source = component.weights_from
    probe.expect(
        source is None or isinstance(source, WeightsFrom),
        f"weights_from is {source!r}",
        accepted="a WeightsFrom",
    )
    wrong = [name for name in component.entry_points if not callable(getattr(component, name, None))]
    probe.expect(
        not wrong,
        f"entry_points is {component.entry_points!r}",
        accepted="a tuple of names of the component's methods",
    )


def missing_files(probe: FrozenProbe) -> None:
    """The constructor reads no file, and missing_files names what loading would miss."""
    found = probe.build().missing_files()
    probe.expect(found == [], f"missing_files returned {found!r}, though the component loads", accepted="[]")
    component = probe.build()
    if isinstance(component, SupportsFiles):
        files = component.files()
        probe.expect(
            bool(files) and all(isinstance(file, Path) and file.is_file() for file in files),
            f"files returned {files!r}"[:200],
            accepted="the Paths of all files that its results depend on",
        )
    if not probe.moved(probe.probe.folder):
        return  # it needs no files
    absent = probe.probe.folder.parent / f"{probe.probe.folder.name}-absent"
    accepted = "files that are read at first use: missing_files lists those that do not exist"
    build = partial(probe.build, **probe.moved(absent))
    found = probe.expect_no_error("without files, the constructor", accepted, build).missing_files()
    probe.expect(
        isinstance(found, list) and found and all(isinstance(p, str) and not Path(p).exists() for p in found),
        f"missing_files returned {found!r} where none of the files exist",
        accepted="a list of the paths that the component needs and that do not exist",
    )
    for name, copy in _without_each(probe):
        if probe.build(**probe.moved(copy)).missing_files():
            continue
        try:
            probe.loaded(copy)
        except Exception as error:
            # Tokenizers store their words in one of several files: only opening them shows which.
            always = name.name == "config.json" or name.suffix == ".safetensors"
            probe.expect(
                isinstance(error, MMError) and not always,
                f"missing_files does not name {name}, without which loading raises {type(error).__name__}: "
                f"{first_line(error)}",
                accepted="its path among the missing ones; for other files than config.json and weights, "
                "a CheckpointError when they are read",
            )


FROZEN = (loads, streamed, missing_files)
"""The conformance checks of every frozen component."""


def _without_each(probe: FrozenProbe) -> Iterator[tuple[Path, Path]]:
    """Each file of the small instance, and a copy of the folder without it."""
    folder = probe.probe.folder
    copy = folder.parent / f"{folder.name}-copy"
    shutil.copytree(folder, copy)
    try:
        for name in sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file()):
            kept = (copy / name).rename(copy / f"{name}.kept")
            yield name, copy
            kept.rename(copy / name)
    finally:
        shutil.rmtree(copy)
