"""`Component`, which a plugin's hooks return: the description of one component, with nothing imported."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from mm_core.errors import PluginError

_NAME = re.compile(r"[a-z0-9][a-z0-9_.\-]*\Z")
_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*\Z")


@dataclass(frozen=True)
class Component:
    """The description of one component that a plugin provides.

    Args:
        name: bare name; the qualified name is `<plugin namespace>/<name>`.
        target: `package.module:Callable`, imported only when the component is built, and called with the
            config's fields as keyword arguments.
        config: `package.module:Dataclass`, a dataclass that does not import torch; its fields are the keys
            a YAML may set. None: the target's signature is used (checking then imports the target).
        summary: one line for `mm plugins list`.
        aliases: further bare names, e.g. former names in users' configs.
        capabilities: facts about the component that are available before anything is imported.
        licence: SPDX identifier of the weights or code behind the component.
        paper: address of the paper or code that the component implements.
        tiny: fields of an instance that is small enough to be tested in milliseconds, for `mm plugins test`:
            a mapping, or `package.module:function`, called with an empty folder, which creates the files
            that the component needs there and returns the fields.
        expected_failures: name of a conformance check -> why the component fails it.
        examples: `package.module:function`, called with an empty folder; it returns what the component is
            tested with where the core cannot know it: for a weight format a model that it can store, for a
            metric pairs of a batch and its evaluation.
        check: `package.module:function`, called with the checked options by `mm validate` and before a run
            is planned; it imports nothing heavy, and yields an MMError for each fault outside the YAML that
            shows within a second, such as a file that is missing.
    """

    name: str
    target: str
    config: str | None = None
    summary: str = ""
    aliases: tuple[str, ...] = ()
    capabilities: Mapping[str, object] = field(default_factory=dict)
    licence: str | None = None
    paper: str | None = None
    tiny: Mapping[str, object] | str = field(default_factory=dict)
    expected_failures: Mapping[str, str] = field(default_factory=dict)
    examples: str | None = None
    check: str | None = None

    def __post_init__(self) -> None:
        for name in (self.name, *self.aliases):
            if not _NAME.match(name.lower()) or "/" in name:
                raise PluginError(
                    f"the component name {name!r} is not valid",
                    accepted="letters, digits, '_', '-', '.' (the core adds the namespace)",
                )
        tiny = self.tiny if isinstance(self.tiny, str) else None
        for role, target in (
            ("target", self.target),
            ("config", self.config),
            ("tiny", tiny),
            ("examples", self.examples),
            ("check", self.check),
        ):
            if target is not None and not _TARGET.match(target):
                raise PluginError(
                    f"component {self.name!r}: {role} {target!r} is not an import path",
                    accepted="'package.module:Name'",
                )
