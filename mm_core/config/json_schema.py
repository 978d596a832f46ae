"""The JSON Schema of a run's YAML, with the components that are installed."""

from __future__ import annotations

from typing import Any

from mm_core.config.former import FORMER_WRITERS
from mm_core.config.sections import CheckpointSection, RunConfig
from mm_core.config.shipped import INCLUDING
from mm_core.errors import MMError
from mm_core.plugin.registry import Registry
from mm_core.schema.json_schema import TEXTS, SchemaWriter

DRAFT = "https://json-schema.org/draft/2020-12/schema"

_INCLUDE = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
    "description": "other files, relative to this one, or `config:NAME` of a plugin, that are merged first",
}

_ONE_FILE_PLUGINS = {"required": ["path"], "properties": {"path": {"minItems": 1}}}


def run_schema(registry: Registry) -> tuple[dict[str, Any], list[MMError]]:
    """Writes the JSON Schema (draft 2020-12) of a run's YAML.

    It refuses nothing that `mm validate` accepts. A file with `include` or `plugins.path` gets keys and
    components from other files: there, no key is required, and a `type` may be any name. A section with
    `include` may have any keys. Former values, which only the config of a stored run may have, are accepted
    and marked as deprecated.

    Args:
        registry: the plugins that provide components.

    Returns:
        The schema, and an error for each component whose keys cannot be read; these are not checked.
    """
    definitions: dict[str, Any] = dict(TEXTS)
    whole, partial = SchemaWriter(registry, definitions), SchemaWriter(registry, definitions, partial=True)
    definitions["run"] = whole.mapping(RunConfig)
    definitions["partial.run"] = partial.mapping(RunConfig, {"include": _INCLUDE})
    of_section = {"type": "object", "required": ["include"], "properties": {"include": _INCLUDE}}
    sections = definitions["partial.run"]["properties"]
    sections |= {name: {"anyOf": [sections[name], of_section]} for name in INCLUDING}
    for prefix in ("", "partial."):
        section = definitions[f"{prefix}{CheckpointSection.__module__}.{CheckpointSection.__name__}"]
        former = {"enum": list(FORMER_WRITERS), "deprecated": True}
        section["properties"]["async"]["anyOf"].append(former)
    plugins = ", ".join(f"{p.namespace} {p.version}" for p in registry.plugins if p.status == "ok")
    schema = {
        "$schema": DRAFT,
        "title": "The config of a run of mm_core",
        "description": f"With the plugins {plugins}",
        "type": "object",
        "if": {
            "anyOf": [
                {"required": ["include"]},
                *({"required": [name], "properties": {name: of_section}} for name in INCLUDING),
                {"required": ["plugins"], "properties": {"plugins": _ONE_FILE_PLUGINS}},
            ]
        },
        "then": {"$ref": "#/$defs/partial.run"},
        "else": {"$ref": "#/$defs/run"},
        "$defs": definitions,
    }
    return schema, whole.faults
