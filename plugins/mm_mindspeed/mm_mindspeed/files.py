"""The files of a MindSpeed-MM run: which there are, and where a path in one of them leads."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mm_core.errors import MMError
from mm_core.interchange import Node, Program, Script, read_script, read_source, to_python

_TRAINS = re.compile(r"(?:.*/)?(?:pretrain_\w+|posttrain_\w+|trainer|train)\.py\Z")
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


@dataclass
class Files:
    """The files of one run, read.

    Attributes:
        name: of the run.
        main: the script or YAML that starts it.
        flags: of the program, as `--name`.
        launcher: flags of torchrun, if a script is there.
        script: the script, if one is there.
        program: what it starts.
        model: model.json, or `model` of a YAML.
        data: data.json, or `data` of a YAML.
        engine: the YAML of FSDP2 or LayerZeRO.
        one_file: the YAML of a newer FSDP2 run.
        rest: keys of a YAML that belong to no section.
        missing: files that are named and not there.
    """

    name: str
    main: Path
    flags: Node
    launcher: Node | None = None
    script: Script | None = None
    program: Program | None = None
    model: Node | None = None
    data: Node | None = None
    engine: Node | None = None
    one_file: Node | None = None
    rest: tuple[Node, ...] = ()
    missing: tuple[str, ...] = ()


def is_of_tool(path: Path) -> bool:
    """Whether a file, or one in a folder, is of MindSpeed-MM; raises nothing."""
    try:
        if path.is_dir():
            return any(is_of_tool(file) for file in sorted(path.iterdir()) if file.is_file())
        if path.suffix == ".sh":
            return _MARKS.search(path.read_bytes()) is not None
        keys = set(read_source(path).value) if path.suffix in (".json", ".yaml", ".yml") else set()
        return any(wanted <= keys for wanted in _KEYS)
    except (OSError, ValueError):
        return False


def find_runs(paths: Sequence[Path]) -> list[Files]:
    """The training runs that files or folders describe, `pretrain` first.

    Raises:
        MMError: there is none.
    """
    found = []
    for path in paths:
        part = path.is_file() and path.suffix != ".sh"
        starts = part and _starts(path)
        folder = path if path.is_dir() else path.parent
        inside = sorted(folder.iterdir()) if path.is_dir() or part else [path]
        if part:  # the scripts that name it
            inside = [
                file
                for file in inside
                if file.suffix == ".sh" and path.name in file.read_text(errors="replace")
            ]
        scripts = [file for file in inside if file.suffix == ".sh" and _MARKS.search(file.read_bytes())]
        runs = [run for file in scripts for run in _of_script(file)]
        named = {run.main.name for run in runs} | {p.name for run in runs for p in _yaml_of(run)}
        for file in inside:
            if file.suffix in (".yaml", ".yml") and file.name not in named:
                runs += _of_yaml(file, _node(file))
        if starts:
            runs = [run for run in runs if run.main.samefile(path)] or list(_of_yaml(path, _node(path)))
        found += runs
    if not found:
        accepted = "a folder with a launch script, the script itself, or the YAML of a run"
        where = ", ".join(map(str, paths))
        raise MMError("there is no launch script or YAML of a training here", where=where, accepted=accepted)
    return sorted(found, key=lambda run: not run.main.stem.startswith("pretrain"))


def _starts(file: Path) -> bool:
    keys = read_source(file).value.keys()
    return "gpt_args" in keys or {"parallel", "training"} <= keys


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
        yamls = [word.text for word in program.arguments if word.text.endswith((".yaml", ".yml"))]
        run = Files(_name(file), file, program.flags)
        if yamls:
            place = resolve(yamls[0], file)
            if place is None:
                yield _given(replace(run, missing=(yamls[0],)), script, program)
            else:
                yield from (_given(each, script, program, run.name) for each in _of_yaml(place, _node(place)))
            continue
        parts: dict[str, Any] = {}
        missing: list[str] = []
        for name, flag in (
            *(("model", "--mm-model"), ("data", "--mm-data")),
            *(("engine", "--fsdp2-config-path"), ("engine", "--layerzero-config")),
        ):
            node = program.flags.at(flag)
            if node is not None and isinstance(node.value, str):
                place = resolve(node.value, file)
                missing += [node.value] if place is None else []
                parts |= {name: _node(place)} if place is not None else {}
        yield _given(replace(run, missing=tuple(missing), **parts), script, program)


def _given(run: Files, script: Script, program: Program, name: str | None = None) -> Files:
    return replace(run, script=script, program=program, launcher=program.launcher, name=name or run.name)


SECTIONS = ("parallel", "model", "features", "training", "tools")
"""Of the one YAML of a newer run, beside data."""


def _of_yaml(file: Path, root: Node) -> Iterator[Files]:
    known = {*SECTIONS, "data", "gpt_args", "lora_args"}
    rest = tuple(node for key, node in root.value.items() if key not in known)
    if {"parallel", "training"} <= root.value.keys():
        data = root.at("data")
        yield Files(_name(file), file, _empty(file), one_file=root, data=data and rooted(data), rest=rest)
    elif "gpt_args" in root.value:
        given = [root.at("gpt_args"), root.at("lora_args")]
        flags = {
            f"--{key.replace('_', '-')}": replace(node, path=f"--{key.replace('_', '-')}")
            for section in given
            if section is not None
            for key, node in section.value.items()
            if node.value is not False
        }
        config = flags.get("--fsdp2-config-path")
        place = resolve(str(config.value), file) if config is not None else None
        missing = (str(config.value),) if config is not None and place is None else ()
        model, data = (root.at("model"), root.at("data"))
        yield Files(
            name=_name(file),
            main=file,
            flags=Node(flags, str(file), ""),
            model=model and rooted(model),
            data=data and rooted(data),
            engine=None if place is None else _node(place),
            rest=rest,
            missing=missing,
        )


def _yaml_of(run: Files) -> list[Path]:
    found = [run.engine, run.one_file]
    return [Path(node.where.rpartition(":")[0]) for node in found if node is not None]


def _node(file: Path) -> Node:
    return read_source(file)


def _empty(file: Path) -> Node:
    return Node({}, str(file), "")


def _name(file: Path) -> str:
    """Of a run: the folders below `examples`, and the file."""
    parts = file.resolve().parts
    after = parts[parts.index("examples") + 1 :] if "examples" in parts[:-1] else parts[-2:]
    return re.sub(r"[^\w.-]+", "_", "_".join((*after[:-1], file.stem))).strip("._") or "run"


def rooted(node: Node, path: str = "") -> Node:
    """A tree whose paths begin at a node."""
    if isinstance(node.value, dict):
        inner = {key: rooted(child, f"{path}.{key}" if path else key) for key, child in node.value.items()}
        return replace(node, value=inner, path=path)
    if isinstance(node.value, list):
        items = [rooted(child, f"{path}.{index}") for index, child in enumerate(node.value)]
        return replace(node, value=items, path=path)
    return replace(node, path=path)


def value_at(node: Node | None, path: str, default: Any = None) -> Any:
    """The plain value at a dotted path below a node."""
    found = node.at(*path.split(".")) if node is not None else None
    return default if found is None else to_python(found)
