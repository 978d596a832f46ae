"""Runs conformance checks: each compares what a small instance of a component does with its contract."""

from __future__ import annotations

import os
import pickle
import shutil
import sys
import tempfile
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from inspect import getattr_static, isfunction, signature
from pathlib import Path
from pkgutil import resolve_name
from types import MappingProxyType
from typing import Any, Literal
from unittest import SkipTest

from mm_core.errors import ContractError, MMError, PluginError, did_you_mean, first_line, foreign_code
from mm_core.plugin.authors import author_line
from mm_core.plugin.checks.locate import source_file
from mm_core.plugin.checks.places import place_of
from mm_core.plugin.hookspecs import COMPONENT_KINDS
from mm_core.plugin.records import Registered, one_line
from mm_core.plugin.registry import Registry
from mm_core.schema.checking import check_component
from mm_core.schema.fields import ComponentConfig

Status = Literal["passed", "failed", "expected", "not applicable"]
"""`expected`: the check failed as the component's `expected_failures` declare."""

_COMMON = "mm_core.testing.common:CHECKS"
"""The checks of every kind."""

_LIBRARIES = tuple(f"{Path(source_file(name) or name).parent}{os.sep}" for name in ("torch", "mm_core"))
"""The folders of torch and mm_core."""


class NotApplicable(SkipTest):
    """Raised by a conformance check that does not apply to a component, with the reason.

    A test that calls the check is skipped.
    """


@contextmanager
def if_installed() -> Iterator[None]:
    """Within the block, the error of a component that lacks an installed package becomes NotApplicable."""
    try:
        yield
    except MMError as error:
        if isinstance(error.__context__, ImportError):
            raise NotApplicable(error.what) from error
        raise


class Probe:
    """A component under test: builds new small instances of it.

    Args:
        registered: the component.
        registry: the plugins, for components in its fields.
        folder: an empty folder for the files of its small instance.
        fields: fields of the instance; None: those that the component declares (`tiny`).
    """

    def __init__(
        self,
        registered: Registered,
        registry: Registry,
        folder: Path,
        fields: Mapping[str, object] | None = None,
    ) -> None:
        self.registered = registered
        self.registry = registry
        self.folder = folder
        self._fields = fields
        self.first_changes: list[str] | None = None  # of this process, by the first build

    @cached_property
    def config(self) -> ComponentConfig:
        """The checked config of the component's small instance (`tiny` of its Component)."""
        kind, name = self.registered.kind, self.registered.qualified
        self.registered.config_class()  # its fault is none of the fields
        fields = self.registered.tiny_fields(self.folder) if self._fields is None else self._fields
        try:
            return check_component(kind, {"type": name, **fields}, self.registry, "tiny")
        except MMError as error:
            raise ContractError(
                f"the fields of the small instance are refused: {one_line(error)}",
                where=self.registered.short_place,
                hint="declare the fields of a small instance: Component(..., tiny={name: value})",
            ) from error

    def build(self, *args: object, **changes: object) -> Any:
        """Builds a new small instance.

        Args:
            args: what the core passes by position to targets of this kind.
            changes: fields that replace those of the small instance.

        Raises:
            NotApplicable: the component reports that it needs a package which is not installed.
        """
        options = {**self.config.options, **changes}
        config = ComponentConfig(self.config.kind, self.config.type, options)
        self.registered.load_target()  # a module that it imports and cannot is its fault
        with if_installed():
            return self.registry.build(self.config.kind, config, *args)

    def subject(self) -> Any:
        """Builds a new small instance, with what the core passes by position to targets of this kind."""
        return self.build(*kit_of(self.registered.kind).arguments(self))

    @cached_property
    def examples(self) -> Any:
        """What the author declares to test the component with (`examples` of its Component), or None."""
        try:
            return self.registered.load_examples(self.folder)
        except ModuleNotFoundError as error:
            raise NotApplicable(f"{error.name} is not installed, which its examples need") from error

    @cached_property
    def place(self) -> str:
        """The component, and the author's file and line that define it, for errors."""
        target = self.registered.load_target()
        return f"{self.registered.short_place}, {place_of(target, target)}"

    def expect(self, holds: object, what: str, accepted: str | None = None, hint: str | None = None) -> None:
        """Raises a ContractError that names the component's place unless `holds` is true.

        Args:
            holds: what is expected, taken as a bool.
            what: what is wrong otherwise.
            accepted: what would be right.
            hint: what to do next.
        """
        if not holds:
            raise ContractError(what, where=self.place, accepted=accepted, hint=hint)

    def expect_no_error(
        self,
        what: str,
        accepted: str,
        call: Callable[..., object],
        *given: object,
        allowed: tuple[type[Exception], ...] = (),
    ) -> Any:
        """Makes a call of the component, and returns what it returns; an exception becomes a ContractError.

        Args:
            what: the call, for the ContractError.
            accepted: what would be right.
            call: what is called.
            given: its arguments.
            allowed: exceptions that are right as well; they are returned.
        """
        try:
            return call(*given)
        except allowed as error:
            return error
        except NotApplicable:
            raise
        except Exception as error:
            came = f"{type(error).__name__}: {first_line(error)}"
            raise ContractError(f"{what} raises {came}", where=self.place, accepted=accepted) from error

    def expect_error(
        self, what: str, wanted: type[MMError], accepted: str, call: Callable[..., object], *given: object
    ) -> MMError:
        """As `expect_no_error`, of a call that must raise an error of the type `wanted`; returns it."""
        found: MMError = self.expect_no_error(what, accepted, call, *given, allowed=(wanted,))
        self.expect(isinstance(found, wanted), f"{what} raises no error", accepted)
        return found

    def require(self, found: object, capability: Any) -> None:
        """Raises NotApplicable for an object without a capability, a protocol of `mm_core.contracts`; a
        ContractError where a class method of the protocol is none of the object."""
        if not isinstance(found, capability):
            raise NotApplicable(f"it is no mm_core.contracts.{capability.__name__}")
        for name, member in vars(capability).items():
            of_class = isinstance(getattr_static(found, name, None), classmethod | staticmethod)
            self.expect(
                of_class or not isinstance(member, classmethod),
                f"{name} is not a class method, but the plan calls it before any file is opened",
                hint="decorate it with @classmethod",
            )

    def in_worker(self, what: str, sent: Any) -> Any:
        """What arrives when an object is sent to data workers.

        Args:
            what: the object, for the ContractError if it cannot be sent.
            sent: the object.
        """
        try:
            return pickle.loads(pickle.dumps(sent))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ContractError(
                f"{what} cannot be sent to data workers: {first_line(error)}",
                where=self.place,
                accepted="objects that pickle: of classes and functions of modules, without open files",
                hint="open files at first use, and leave them out in __getstate__",
            ) from error


Check = Callable[[Any], None]
"""A conformance check of a probe. It raises ContractError if it fails, or NotApplicable."""


def by_name(*checks: Check) -> Mapping[str, Check]:
    """Checks by the names of their functions."""
    return MappingProxyType({check.__name__: check for check in checks})


def checks_of(*modules: str) -> Mapping[str, Check]:
    """The checks in modules: public functions with the one parameter `probe`, in the order of the file."""
    checks = []
    for module in modules:
        for found in vars(sys.modules[module]).values():
            own = isfunction(found) and found.__module__ == module and not found.__name__.startswith("_")
            if own and [*signature(found).parameters] == ["probe"]:
                checks.append(found)
    return by_name(*checks)


@dataclass(frozen=True)
class Kit:
    """The conformance checks of a kind of component.

    Attributes:
        checks: the checks, by name.
        probe: makes what the checks are called with.
        arguments: what the core passes by position to targets of this kind.
        release: closes what a new instance has opened.
        ranks: names of the checks that start several processes.
        first: names of checks after whose failure the kind's others would only meet the same fault again.
    """

    checks: Mapping[str, Check]
    probe: Callable[[Probe], Any] = lambda probe: probe
    arguments: Callable[[Probe], tuple[object, ...]] = lambda _: ()
    release: Callable[[Any], object] = lambda _: None
    ranks: Sequence[str] = ()
    first: Sequence[str] = ()


@dataclass(frozen=True)
class Outcome:
    """What came of one check of one component.

    Attributes:
        component: qualified name of the component.
        kind: its kind.
        check: name of the check.
        status: what came of it.
        reason: why it failed, or does not apply.
        seconds: how long it took.
    """

    component: str
    kind: str
    check: str
    status: Status
    reason: str = ""
    seconds: float = 0.0


class Examination:
    """The conformance checks of one component, over one small instance's files.

    Args:
        registered: the component.
        registry: the plugins.
        ranks: also run the checks that start several processes.

    Attributes:
        checks: the checks of the component: those of every kind, then those of its own.
    """

    def __init__(self, registered: Registered, registry: Registry, ranks: bool = True) -> None:
        self.registered, self.registry = registered, registry
        self._kit = kit_of(registered.kind)
        own = {
            name: check for name, check in self._kit.checks.items() if ranks or name not in self._kit.ranks
        }
        self.checks: Mapping[str, Check] = MappingProxyType({**resolve_name(_COMMON), **own})
        self._expected = registered.component.expected_failures
        for unknown in self._expected.keys() - self.checks.keys():
            raise PluginError(
                f"expected_failures names {unknown!r}, which is not a check of this kind of component",
                where=registered.place,
                accepted=", ".join(self.checks),
                hint=did_you_mean(unknown, self.checks),
            )
        self._probe = Probe(registered, registry, Path(tempfile.mkdtemp(prefix="mm-conformance-")))
        weakref.finalize(self, shutil.rmtree, self._probe.folder, ignore_errors=True)
        self._failed: list[str] = []

    @cached_property
    def _kind_probe(self) -> Any:
        return self._kit.probe(self._probe)

    def run(self, name: str) -> Outcome:
        """Runs one check, and compares what comes of it with the component's `expected_failures`.

        A check on several processes does not apply once another has failed, nor the kind's after a `first`.
        """
        started = time.perf_counter()
        status, reason = self._result(name)
        if name in self._expected and status == "failed":
            status, reason = "expected", f"{self._expected[name]} ({reason})"
        elif name in self._expected and status == "passed":
            status, reason = "failed", f"it passes now: take {name!r} out of the expected_failures"
        if status == "failed":
            self._failed.append(name)
        seconds = time.perf_counter() - started
        return Outcome(self.registered.qualified, self.registered.kind, name, status, reason, seconds)

    def _result(self, name: str) -> tuple[Status, str]:
        own, first = name in self._kit.checks, self._kit.first
        if own and name not in first and (before := [each for each in self._failed if each in first]):
            return "not applicable", f"not run, because {before[0]} has failed"
        if name in self._kit.ranks and self._failed:
            return "not applicable", f"not run on several processes, because {self._failed[0]} has failed"
        try:
            with foreign_code():
                self.checks[name](self._kind_probe if own else self._probe)
        except NotApplicable as reason:
            return "not applicable", str(reason)
        except MMError as error:
            what, line = one_line(error), self._own_line(error)
            named = line is None or line.partition(",")[0] in what
            return "failed", what if named else f"{what} ({line})"
        except Exception as error:
            place = self._own_line(error) or author_line(error) or self._probe.place
            return "failed", sentence_of(error, place)
        return "passed", ""

    def _own_line(self, error: Exception) -> str | None:
        """The innermost line of the component's package that an exception passed; None if it passed none."""
        module = self.registered.module_of(self.registered.component.target)
        folder = str(Path(source_file(module.partition(".")[0]) or source_file(module) or "").parent)
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if folder != "." and frame.filename.startswith(folder)]
        return f"{own[-1].filename}, line {own[-1].lineno}" if own else None

    def __iter__(self) -> Iterator[Outcome]:
        """Runs every check. Nothing more is run for a component that cannot be built."""
        for name in self.checks:
            yield (outcome := self.run(name))
            if name == "builds" and outcome.status == "failed":
                return


def sentence_of(error: BaseException, place: str | None = None) -> str:
    """An exception of an author's code: its type, its message, and where it was raised.

    Args:
        error: the exception.
        place: None: the last line outside torch and mm_core.
    """
    if place is None:
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if not frame.filename.startswith((*_LIBRARIES, "<"))]
        place = f"{own[-1].filename}, line {own[-1].lineno}" if own else None
    return f"{type(error).__name__}: {' '.join(str(error).split())}" + (f" ({place})" if place else "")


def kit_of(kind: str) -> Kit:
    """The conformance checks of a kind of component."""
    kit: Kit = resolve_name(COMPONENT_KINDS[kind].kit)
    return kit
