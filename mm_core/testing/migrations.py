"""The conformance kit of migrations (`mm_core.interchange.Migration`)."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mm_core.config.load import load_config
from mm_core.errors import MMError
from mm_core.interchange import Key, Migrated, Node, Row, SupportsKeys, read_script, read_source, to_yaml
from mm_core.plugin.records import one_line
from mm_core.testing.kit import Kit, Probe, by_name

_STRANGERS = {
    "nothing.json": "",
    "list.json": "[1, 2, 3]",
    "broken.json": '{"a": ',
    "broken.yaml": "a: [1, 2",
    "other.yaml": "colour: blue\nsizes: {small: 1}\n",
    "other.toml": "colour = 'blue'\n",
    "broken.toml": "colour = \n",
    "other.sh": "echo 'hello\n",
    "bytes.json": "\udcff\udcfe",
    "ours.yaml": "run: {name: x}\ntask: {type: text_to_video}\ndata: {}\ntrain: {steps: 1}\n",
}
"""Files of no tool: their names and contents."""


def strangers(probe: Probe) -> None:
    """Files and folders of no tool are not recognised, and raise no error."""
    folder = Path(tempfile.mkdtemp(dir=probe.folder))
    (folder / "empty").mkdir()
    for name, text in _STRANGERS.items():
        (folder / name).write_bytes(text.encode(errors="surrogateescape"))
    migration = probe.build()
    for path in (folder, *sorted(folder.iterdir()), folder / "absent"):
        accepted, call = "False, never an error", migration.recognise
        found = probe.expect_no_error(f"recognise of {path.name}", accepted, call, [path])
        probe.expect(found is False, f"recognise of {path.name} returned {found!r}", accepted="False")


def migrates(probe: Probe) -> None:
    """The author's example is recognised, and becomes valid configs whose every line has its place."""
    hint = "name files for tests: Component(..., examples='package.module:function') returns their paths"
    probe.expect(probe.examples, "there is no example of the tool's files", hint=hint)
    migration: Any = probe.build()
    paths = [Path(path) for path in probe.examples]
    probe.expect(migration.recognise(paths) is True, f"recognise of {paths} did not return True")
    runs = [*migration.migrate(paths)]
    probe.expect(runs, "the example describes no run")
    for number, run in enumerate(runs):
        probe.expect(isinstance(run, Migrated), f"migrate returned {run!r}", accepted="a list of Migrated")
        unplaced = [key for key, line in run.lines.items() if not line.place]
        probe.expect(not unplaced, f"{', '.join(unplaced[:3])} came from nowhere", accepted="a place")
        without_reason = [left.key for left in (*run.dropped, *run.differs) if not left.why]
        probe.expect(not without_reason, f"{', '.join(without_reason[:3])} is left out without a reason")
        file = Path(tempfile.mkdtemp(dir=probe.folder)) / f"migrated_{number}.yaml"
        file.write_text(to_yaml(run), encoding="utf-8")
        try:
            load_config(file)
        except MMError as error:
            probe.expect(
                False, f"the migrated config is not valid: {one_line(error)}", accepted="a valid one"
            )


def named(probe: Probe) -> None:
    """Optional: the rows of `keys` are rows, of which some become keys of ours."""
    migration = probe.build()
    if not isinstance(migration, SupportsKeys):
        return
    rows = [*migration.keys]
    probe.expect(all(isinstance(row, Row) for row in rows), f"keys has {rows!r:.80}", accepted="rows")
    probe.expect(any(isinstance(row, Key) and row.ours for row in rows), "no row of keys has a key of ours")


def accounts(probe: Probe) -> None:
    """Each key of the author's example is the place of a line, or is in a list or a note: none is lost."""
    migration: Any = probe.build()
    paths = [Path(path) for path in probe.examples or ()]
    runs = [*migration.migrate(paths)]
    lines = [line for run in runs for line in run.lines.values()]
    left = [each for run in runs for each in (*run.dropped, *run.differs)]
    places = [each.place.rpartition(" ") for each in (*lines, *left)]
    texts = [*(line.note for line in lines), *(text for run in runs for text in (*run.todo, run.launch))]
    words = {word for text in texts for word in re.split(r"[\s,:;()]+", text)}
    whole = {Path(line.value).name for line in lines if isinstance(line.value, str)}
    lost = [
        f"{file.name} {leaf.path}"
        for file, root in _sources(paths)
        for leaf in root.leaves()
        if file.name not in whole and leaf.path not in words
        if not any(f".{key}." in f".{leaf.path}." for at, _, key in places if at.split(":")[0] == file.name)
    ]
    what = f"{', '.join(lost[:5])}: in no list, and no line came from it"
    probe.expect(not lost, what, hint="give it a row that is a Drop or a Differs, or name it as a place")


def _sources(paths: Sequence[Path]) -> Iterator[tuple[Path, Node]]:
    for path in paths:
        for file in sorted(path.iterdir()) if path.is_dir() else [path]:
            with suppress(MMError):  # another file of the run, such as rows
                if file.suffix == ".sh":
                    for program in read_script(file).programs():
                        yield from ((file, flags) for flags in (program.launcher, program.flags))
                elif file.suffix in (".json", ".yaml", ".yml", ".toml"):
                    yield file, read_source(file)


KIT = Kit(by_name(strangers, migrates, accounts, named))
"""The conformance checks of migrations."""
