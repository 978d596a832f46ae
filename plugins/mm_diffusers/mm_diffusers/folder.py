"""The folder of a pipeline: its class, its parts and their configs, without torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mm_core.errors import CheckpointError, MMError
from mm_diffusers.families import FAMILIES, PAGE, Family

INDEX = "model_index.json"
NEEDED = ("transformer", "vae", "scheduler")
HOW = "a folder that Diffusers' save_pretrained or `hf download` wrote for a whole pipeline"


@dataclass(frozen=True)
class PipelineFolder:
    """A pipeline of Diffusers on disk.

    Attributes:
        path: its folder, with model_index.json.
        recipe: of the pipeline; None: that of `FAMILIES`.
    """

    path: Path
    recipe: Family | None = None

    @property
    def exists(self) -> bool:
        """Whether there is a pipeline."""
        return (self.path / INDEX).is_file()

    @cached_property
    def index(self) -> Mapping[str, Any]:
        """Content of model_index.json.

        Raises:
            CheckpointError: it is missing, damaged, or of a pipeline without a recipe.
        """
        found = self._json(self.path / INDEX)
        kind = found.get("_class_name")
        if self.recipe is None and kind not in FAMILIES:
            raise CheckpointError(
                f"{INDEX} is of the pipeline {kind!r}, which has no recipe",
                where=str(self.path / INDEX),
                accepted=", ".join(sorted(FAMILIES)),
                hint=f"write a recipe ({PAGE}), and set task.predictor.type to its name, such as local/NAME",
            )
        return found

    def has(self, part: str) -> bool:
        """Whether the pipeline is there, is of a known family, and has a part."""
        try:
            return self.exists and part in self.parts
        except CheckpointError:
            return False

    @property
    def kind(self) -> str:
        """Class of the pipeline."""
        return str(self.index["_class_name"])

    @property
    def family(self) -> Family:
        """Recipe of the pipeline."""
        return self.recipe or FAMILIES[self.kind]

    @cached_property
    def parts(self) -> Mapping[str, tuple[str, str]]:
        """The parts of the pipeline that are there: name -> library and class."""
        return {
            name: (value[0], value[1])
            for name, value in self.index.items()
            if isinstance(value, list) and len(value) == 2 and all(isinstance(each, str) for each in value)
        }

    @property
    def settings(self) -> Mapping[str, Any]:
        """Settings of the pipeline itself, such as `is_distilled`."""
        return {
            name: value
            for name, value in self.index.items()
            if not name.startswith("_") and name not in self.parts and value != [None, None]
        }

    def config(self, part: str) -> Mapping[str, Any]:
        """Content of a part's config.json.

        Raises:
            CheckpointError: it is missing or damaged.
        """
        return self._json(self.path / part / "config.json")

    def faults(self) -> Iterator[MMError]:
        """What is wrong with the folder, by its small files."""
        try:
            whole = True
            for name, (library, _) in {**dict.fromkeys(NEEDED, ("diffusers", "")), **self.parts}.items():
                listed = name in self.parts
                if listed and (self.path / name).is_dir():
                    continue
                whole = False
                found = (
                    f"lists the part `{name}`, but there is no such folder" if listed else f"lists no {name}"
                )
                yield CheckpointError(
                    f"{INDEX} {found}",
                    where=str(self.path),
                    accepted=HOW,
                    hint=f"copy or download the folder {name}/ ({library})",
                )
            if whole:
                self._json(self.path / "scheduler/scheduler_config.json")
                self.config("vae")
                config = self.config("transformer")
                self.family.text_width(config)
                self.family.condition_shapes(config)
        except MMError as fault:
            yield fault

    def _json(self, path: Path) -> Mapping[str, Any]:
        hint = "download the pipeline, or correct task.pipeline"
        if not self.path.exists():
            from mm_core.weights import no_folder  # which imports torch

            raise no_folder(self.path, HOW, hint)
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as fault:
            raise CheckpointError(
                f"{path.name} is missing" if not path.exists() else f"{path.name} cannot be read: {fault}",
                where=str(path.parent),
                accepted=HOW,
                hint=hint,
            ) from None
        return found if isinstance(found, dict) else {}
