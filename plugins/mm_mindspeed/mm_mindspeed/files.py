"""The files of a MindSpeed-MM run: which there are, and where a path in one of them leads."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mm_core.errors import MMError
from mm_core.interchange import Node, Program, Script, place_of, read_script, read_source
from mm_core.interchange import value_at as of_node

_TRAINS = re.compile(r"(?:.*/)?(?:pretrain_\w+|posttrain_\w+|trainer|train)\.py\Z")
_YAML = (".yaml", ".yml")
_MARKS = re.compile(rb"--mm-model|mindspeed_mm/fsdp|pretrain_transformers\.py")
_KEYS: tuple[set[str], ...] = (
    {"dataset_param"},
    {"predictor", "diffusion"},
    {"model_id", "text_decoder"},
    {"gpt_args"},
    {"parallel", "training", "model"},
    {"sharding_size", "param_dtype"},
    {"zero3_size", "transformer_layers"},
)
"""Keys of the tool's files; a file with all of one set is one of them."""
PARTS = {
    "--mm-model": "model",
    "--mm-data": "data",
    "--fsdp2-config-path": "engine",
    "--layerzero-config": "engine",
}
"""Flag that names a file -> what of `Files` it is."""
SECTIONS = ("parallel", "model", "features", "training", "tools")
"""Of the one YAML of a newer run, beside data."""


@dataclass
class Files:
    """The files of one run, read.

    Attributes:
        name: of the run.
        main: the script or YAML that starts it.
        flags: of the program, as `--name`.
        script: the script, if one is there.
        program: what it starts.
        model: model.json, or `model` of a YAML.
        data: data.json, or `data` of a YAML.
        engine: the YAML of FSDP2 or LayerZeRO.
        one_file: the YAML of a newer FSDP2 run.
        rest: keys of a YAML that belong to no section.
        missing: files that are named and not there.
        read: files that the run is read from.
    """

    name: str
    main: Path
    flags: Node
    script: Script | None = None
    program: Program | None = None
    model: Node | None = None
    data: Node | None = None
    engine: Node | None = None
    one_file: Node | None = None
    rest: tuple[Node, ...] = ()
    missing: list[str] = field(default_factory=list)
    read: list[Path] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.read.append(self.main.resolve())
        for flag, part in PARTS.items():
            named = self.flags.at(flag)
            if named is None or not isinstance(named.value, str):
                continue
            if (place := resolve(named.value, self.main)) is None:
                self.missing.append(named.value)
            else:
                setattr(self, part, read_source(place))
                self.read.append(place.resolve())


def is_of_tool(path: Path) -> bool:
    """Whether a file, or one in a folder, is of MindSpeed-MM; raises nothing."""
    try:
        if path.is_dir():
            return any(is_of_tool(file) for file in sorted(path.iterdir()) if file.is_file())
        if path.suffix == ".sh":
            return _MARKS.search(path.read_bytes()) is not None
        keys = set(read_source(path).value) if path.suffix in (".json", *_YAML) else set()
        return any(wanted <= keys for wanted in _KEYS)
    except (OSError, ValueError):
        return False


def find_runs(paths: Sequence[Path]) -> list[Files]:
    """The training runs that files or folders describe, `pretrain` first.

    Raises:
        MMError: there is none.
    """
    found: list[Files] = []
    for path in sorted(paths, key=lambda path: path.suffix != ".sh"):  # a script names the other files
        if path.resolve() in {file for run in found for file in run.read}:
            continue
        inside = sorted(path.iterdir()) if path.is_dir() else [path]
        if path.is_file() and path.suffix != ".sh":  # the scripts that name it
            scripts = sorted(path.parent.glob("*.sh"))
            inside += [file for file in scripts if path.name in file.read_text(errors="replace")]
        scripts = [file for file in inside if file.suffix == ".sh" and _MARKS.search(file.read_bytes())]
        runs = [run for file in scripts for run in _of_script(file)]
        read = {file for run in runs for file in run.read}
        for file in inside:
            if file.suffix in _YAML and file.resolve() not in read:
                runs += _of_yaml(file)
        found += [run for run in runs if path.is_dir() or path.resolve() in run.read]
    if not found:
        accepted = "a folder with a launch script, the script itself, or the YAML of a run"
        where = ", ".join(map(str, paths))
        raise MMError("there is no launch script or YAML of a training here", where=where, accepted=accepted)
    return sorted(found, key=lambda run: not run.main.stem.startswith("pretrain"))


def resolve(text: str, near: Path) -> Path | None:
    """The file or folder that a path leads to: from here, or from a folder above a file of the run."""
    parts = Path(text)
    for start in (Path(), *near.resolve().parents):
        if (start / parts).exists():
            return start / parts
    return None


def _of_script(file: Path) -> Iterator[Files]:
    script = read_script(file)
    for program in script.programs():
        if not _TRAINS.match(program.name.text):
            continue
        yamls = [word.text for word in program.arguments if word.text.endswith(_YAML)]
        place = resolve(yamls[0], file) if yamls else None
        runs = (
            [Files(_name(file), file, program.flags, missing=yamls[:1])] if place is None else _of_yaml(place)
        )
        for run in runs:
            run.name, run.script, run.program = _name(file), script, program
            run.read.append(file.resolve())
            yield run


def _of_yaml(file: Path) -> Iterator[Files]:
    root = read_source(file)
    known = {*SECTIONS, "data", "gpt_args", "lora_args"}
    rest = tuple(node for key, node in root.value.items() if key not in known)
    model, data = (rooted(node) if (node := root.at(key)) else None for key in ("model", "data"))
    if {"parallel", "training"} <= root.value.keys():
        yield Files(_name(file), file, root.holding({}), one_file=root, data=data, rest=rest)
    elif "gpt_args" in root.value:
        flags = {
            name: replace(node, path=name)
            for section in ("gpt_args", "lora_args")
            for key, node in getattr(root.at(section), "value", {}).items()
            if node.value is not False and (name := f"--{key.replace('_', '-')}")
        }
        yield Files(_name(file), file, root.holding(flags), model=model, data=data, rest=rest)


def _name(file: Path) -> str:
    """Of a run: the folders below `examples`, and the file."""
    parts = file.resolve().parts
    after = parts[parts.index("examples") + 1 :] if "examples" in parts[:-1] else parts[-2:]
    return re.sub(r"[^\w.-]+", "_", "_".join((*after[:-1], file.stem))).strip("._") or "run"


def rooted(node: Node, start: str = "") -> Node:
    """A tree whose paths begin at a node."""
    start = start or f"{node.path}."
    return replace(node, path=f"{node.path}.".removeprefix(start).rstrip(".")).mapped(
        lambda child: rooted(child, start)
    )


def value_at(node: Node | None, path: str, default: Any = None) -> Any:
    """The plain value at a dotted path below a node."""
    return default if node is None else of_node(node, path, default)


def place_at(node: Node, path: str) -> str:
    """Where the value at a dotted path was written, or that it is the tool's default."""
    found = node.at(*path.split("."))
    return place_of(found) if found is not None else f"default of the tool for {path}"
