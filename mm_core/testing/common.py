"""Conformance checks of every kind of component: what holds of its files, its config and its constructor."""

from __future__ import annotations

import ast
import builtins
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from mm_core.config.dump import plain
from mm_core.device import ACCELERATOR_NAMES
from mm_core.errors import ContractError
from mm_core.plugin.checks.effects import effects_of_import, named_devices
from mm_core.plugin.checks.inspection import component_faults
from mm_core.plugin.checks.locate import find_module, source_file
from mm_core.schema.checking import check_component
from mm_core.testing.kit import NotApplicable, Probe, checks_of, kit_of

_WATCHED = (torch, torch.nn, torch.nn.functional, torch.Tensor, torch.nn.Module, builtins, os, random, np)
"""Namespaces in which a component may replace nothing."""

_HEAVY = 33
"""Exit code of a process in which torch was imported."""

_ON_META = ("predictor", "autoencoder", "text_encoder", "image_encoder", "scheduler", "task")
"""Kinds of a task and its parts, which are built without memory."""


def light_description(probe: Probe) -> None:
    """The plugin's module and the component's config are imported without torch."""
    registered = probe.registered
    if registered.modules:
        raise NotApplicable("a one-file plugin has no module of its own for its hooks")
    config = registered.component.config
    plugin = next(p for p in probe.registry.plugins if p.namespace == registered.namespace)
    modules = [plugin.module, *([config.partition(":")[0]] if config else [])]
    imports = "; ".join(f"import {module}" for module in modules)
    program = f"import sys; {imports}; sys.exit({_HEAVY} * ('torch' in sys.modules))"
    path = {"PYTHONPATH": os.pathsep.join(folder for folder in sys.path if folder)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, check=False, env=os.environ | path)
    named, lines = " and ".join(modules), done.stderr.decode(errors="replace").strip().splitlines()
    probe.expect(
        done.returncode in (0, _HEAVY), f"{named} cannot be imported in a new process: {lines and lines[-1]}"
    )
    probe.expect(
        done.returncode == 0,
        f"importing {named} imports torch, which makes every command slow",
        hint="import torch only in the target's module",
    )


def resolves(probe: Probe) -> None:
    """The target exists, accepts the config's fields, and its class keeps the contract of its kind."""
    if faults := component_faults(probe.registered, import_targets=True):
        raise ContractError("; ".join(faults))  # each names the component's place


def builds(probe: Probe) -> None:
    """The small instance is built, and keeps the contract of its kind."""
    _ = probe.config  # its files are made with memory
    _changes_of_building(probe)


def _changes_of_building(probe: Probe) -> list[str]:
    """What the first build of the component under test changes in this process."""
    if probe.first_changes is not None:
        return probe.first_changes
    import_module("torch._dynamo")  # optimizers and operations on meta import it; it wraps functions of torch
    known, before = set(sys.modules), list(_global_state())
    changes = state_changes(lambda: _build(probe))
    if changes and not known.issuperset(sys.modules):  # a library that was imported late may have made them
        for *_, restore in before:
            restore()
        changes = state_changes(lambda: _build(probe))
    probe.first_changes = changes
    return changes


def _build(probe: Probe) -> None:
    with torch.device("meta" if probe.registered.kind in _ON_META else "cpu"):
        kit_of(probe.registered.kind).release(probe.subject())


def config_round_trip(probe: Probe) -> None:
    """The config is written as YAML and read back as an equal config."""
    written = plain(probe.config)
    assert isinstance(written, dict)
    again = check_component(probe.registered.kind, written, probe.registry, "tiny")
    probe.expect(
        again == probe.config,
        "the config that is read back is a different one",
        accepted=f"{probe.config.options}",
        hint="__post_init__ must accept the values that it has set",
    )


def picklable_config(probe: Probe) -> None:
    """The config goes to another process and comes back equal."""
    again = pickle.loads(pickle.dumps(probe.config))
    probe.expect(again == probe.config, "the config is a different one after pickling")


def no_side_effects(probe: Probe) -> None:
    """Importing and building leave random numbers, defaults, environment and libraries as they were."""
    for path in _files(probe):
        for line, text in effects_of_import(ast.parse(path.read_bytes())):
            probe.expect(False, f"importing {path} changes the process (line {line}): {text}")
    changed = _changes_of_building(probe)
    probe.expect(
        not changed,
        f"building the component changes {', '.join(changed[:4])}",
        hint="draw from generators of your own, and restore what you change before the constructor returns",
    )


def no_device_names(probe: Probe) -> None:
    """The author's files name no device: the engine chooses it."""
    for path in _files(probe):
        for line, name in named_devices(ast.parse(path.read_bytes()), ACCELERATOR_NAMES):
            probe.expect(
                False,
                f"the code names the device {name!r} ({path}, line {line})",
                hint="use the device of a tensor that is given: `torch.zeros(n, device=latents.device)`",
            )


CHECKS = checks_of(__name__)
"""The conformance checks of every kind, by name."""


class KindProbe:
    """What the checks of a kind are called with: builds new small instances, and whatever they share.

    Args:
        probe: the component.
    """

    def __init__(self, probe: Probe) -> None:
        self.probe = probe
        self.expect = probe.expect
        self.expect_no_error = probe.expect_no_error
        self.expect_error = probe.expect_error
        self.require = probe.require

    def build(self, **changes: object) -> Any:
        """As `Probe.build`."""
        return self.probe.build(**changes)


def expect_tensor(probe: Any, what: str, found: object, dtype: torch.dtype, *shape: int | None) -> None:
    """Expects a tensor on the CPU that needs no gradients.

    Args:
        probe: of the component.
        what: what has returned it, for the ContractError.
        found: what is expected to be the tensor.
        dtype: its dtype.
        shape: its shape; None: any size.
    """
    shown, right = f"a {type(found).__name__}", False
    if isinstance(found, torch.Tensor):
        shown = f"{[*found.shape]} of {found.dtype} on {found.device}"
        pairs = zip(shape, found.shape, strict=False)
        sized = len(shape) == found.dim() and all(wanted in (None, size) for wanted, size in pairs)
        right = sized and found.dtype == dtype and found.device.type == "cpu" and not found.requires_grad
    sizes = ", ".join("n" if size is None else str(size) for size in shape)
    accepted = f"[{sizes}] of {dtype} on the CPU, without gradients"
    probe.expect(right, f"{what} returned {shown}", accepted=accepted)


def contents(folder: Path) -> dict[str, bytes]:
    """What the files below a folder contain, by their paths in it."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def state_changes(call: Callable[[], object]) -> list[str]:
    """What a call changes of the state that components must leave unchanged in a process."""
    before = {name: value for name, value, _ in _global_state()}
    call()
    after = {name: value for name, value, _ in _global_state()}
    return [name for name in before if before[name] != after.get(name)]


def _global_state() -> Iterator[tuple[str, object, Callable[[], object]]]:
    """What components must leave unchanged in a process: a name that a message can show, a value to compare,
    and what restores it."""
    generator, drawn, numbers = torch.get_rng_state(), random.getstate(), np.random.get_state()
    deterministic = torch.are_deterministic_algorithms_enabled()
    # Those that begin with "_" are a library's own, as MLflow's.
    variables = {name: text for name, text in os.environ.items() if name[:1] != "_"}
    yield "torch's default generator", generator.numpy().tobytes(), partial(torch.set_rng_state, generator)
    yield "the generator of `random`", drawn, partial(random.setstate, drawn)
    yield "NumPy's global generator", repr(numbers), partial(np.random.set_state, numbers)
    settings: tuple[tuple[str, Any, Callable[[Any], object]], ...] = (
        ("torch's default dtype", torch.get_default_dtype(), torch.set_default_dtype),
        ("torch's deterministic algorithms", deterministic, torch.use_deterministic_algorithms),
        ("torch's number of threads", torch.get_num_threads(), torch.set_num_threads),
        ("whether gradients are recorded", torch.is_grad_enabled(), torch.set_grad_enabled),
        ("the working folder", Path.cwd(), os.chdir),
        ("NumPy's error handling", np.geterr(), lambda found: np.seterr(**found)),
        ("the number of environment variables", len(variables), lambda _: _set_variables(variables)),
    )
    for setting, now, restore in settings:
        yield setting, now, partial(restore, now)
    for name, value in variables.items():
        yield f"the environment variable {name}", value, lambda: None
    for space in _WATCHED:
        for name, value in vars(space).items():
            if not isinstance(value, ModuleType) and not name.startswith("_") and callable(value):
                yield f"{space.__name__}.{name}", id(value), partial(_set_member, space, name, value)


def _set_variables(values: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(values)


def _set_member(space: object, name: str, value: object) -> None:
    if getattr(space, name, None) is not value:
        setattr(space, name, value)


def _files(probe: Probe) -> Iterator[Path]:
    """The Python files of the author's package; the file of the target where it is not a package."""
    registered = probe.registered
    module = registered.module_of(registered.component.target)
    package = module.partition(".")[0]
    top = None if package == "mm_core" else find_module(package)  # the core is not one author's
    folders = list(top.submodule_search_locations or ()) if top else []
    for folder in folders:
        for path in sorted(Path(folder).rglob("*.py")):
            if "tests" not in path.relative_to(folder).parts:
                yield path
    if not folders and (origin := source_file(module)):
        yield Path(origin)
