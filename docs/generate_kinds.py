"""Writes docs/kinds: a page for each kind of component, from its contract, template and conformance checks.

The pages' place in the navigation, in mkdocs.yml, is written too.

python docs/generate_kinds.py            writes the pages
python docs/generate_kinds.py --check    exits 1 when a page is not what would be written
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from string import Template
from textwrap import wrap
from typing import Any

from generated_page import main

from mm_core.plugin import KINDS, hookspecs
from mm_core.plugin.checks.contract import Member, members_of
from mm_core.plugin.hookspecs import COMPONENT_KINDS
from mm_core.plugin.kinds import Contract, title_of
from mm_core.plugin.scaffold.new_plugin import config_of, template_of
from mm_core.testing.common import CHECKS
from mm_core.testing.kit import kit_of

FOLDER = Path(__file__).with_name("kinds")
NAVIGATION = FOLDER.parents[1] / "mkdocs.yml"
PACKAGE = "my_plugin"


def render(kind: str) -> str:
    """The page of a kind as Markdown."""
    contract = COMPONENT_KINDS[kind]
    hook, protocol = KINDS[kind], _load(contract.protocol)
    called, _, more = _doc(getattr(hookspecs, hook)).rpartition("\n\nSee ")
    parts = [
        f"# {title_of(kind)}",
        "<!-- Made by docs/generate_kinds.py from contract, template and checks: do not edit. -->",
        _prose(protocol) or f"It is a `{contract.protocol.replace(':', '.')}`.",
        f"```bash\nmm plugins new my-plugin --kind {kind}\n```",
        f"writes the example below, with a config, a test and a package around it. The hook is `{hook}`:",
        called,
        "## What it must have",
        f"The contract is [`{contract.protocol.replace(':', '.')}`]({_reference(contract)}).",
        "\n".join(_members(contract, protocol)),
        *_capabilities(contract),
        "## Example",
        f"`{PACKAGE}/{kind}.py`:",
        "```python\n" + Template(template_of(kind)).substitute(package=PACKAGE) + "```",
        f"`{PACKAGE}/configs/{kind}.yaml`, a run with it:",
        "```yaml\n" + config_of(kind, PACKAGE, {kind: contract}) + "```",
        "## What its tests check",
        f"```bash\nmm plugins test my-plugin --kind {kind}\n```",
        "\n".join(_wrapped(_tested(kind))),
        "\n".join(_checks(kind)),
        "## Where to go next",
        f"- {more.replace('](', '](../')}\n- [Plugins](../plugins.md): package components, and test them.",
    ]
    return "\n\n".join(parts) + "\n"


def _reference(contract: Contract) -> str:
    module, _, name = contract.protocol.partition(":")
    if not module.startswith("mm_core"):
        return "https://docs.pytorch.org/docs/stable/optim.html"
    return f"../api/{module}.md#{module}.{name}"


def _prose(found: Any) -> str:
    """The docstring before its sections; "" for a class of another library."""
    if not found.__module__.startswith("mm_core"):
        return ""
    return re.split(r"\n(?:Attributes|Args|Returns|Raises):\n", _doc(found))[0].strip()


def _doc(found: Any) -> str:
    return inspect.cleandoc(found.__doc__ or "")


def _members(contract: Contract, protocol: Any) -> Iterator[str]:
    members = members_of(contract)
    if contract.base:
        yield f"It derives from `{contract.base.replace(':', '.')}`.\n"
    if contract.events:
        yield "Each method may be absent; the core calls those that there are.\n"
    if not members:
        return
    described = _attributes(protocol)
    yield "| member | |\n|---|---|"
    for member in members.values():
        yield f"| {_signature(member)} | {described.get(member.name) or _first(protocol, member.name)} |"


def _capabilities(contract: Contract) -> Iterator[str]:
    """The optional members, by the protocol that describes them."""
    rows = []
    for path in contract.optional:
        protocol = _load(path)
        own = [m for name, m in members_of(Contract(path)).items() if name not in members_of(contract)]
        shown = ", ".join(_signature(member) for member in own)
        rows.append(f"| `{protocol.__name__}` | {shown} | {_sentence(_doc(protocol))} |")
    if rows:
        yield "A component with all members of one of these has the capability:"
        yield "\n".join(["| capability | members | |", "|---|---|---|", *rows])


def _signature(member: Member) -> str:
    return f"`{member}`".replace("|", "\\|")


def _attributes(protocol: Any) -> dict[str, str]:
    """The descriptions under `Attributes:` of a docstring, by name."""
    section = re.search(r"Attributes:\n((?:[ ]{4}.*\n?)+)", _doc(protocol))
    entries = re.split(r"\n(?=[ ]{4}\w)", section[1]) if section else []
    return {name.strip(): " ".join(text.split()) for name, _, text in (e.partition(":") for e in entries)}


def _first(protocol: Any, name: str) -> str:
    return _sentence(_doc(getattr(protocol, name, None)))


def _sentence(text: str) -> str:
    """The first sentence of a docstring, on one line."""
    line = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=\.)\s", line)[0].replace("|", "\\|")


def _tested(kind: str) -> str:
    tiny = ", ".join(f"{name}: {value}" for name, value in COMPONENT_KINDS[kind].tiny.items())
    small = f", here with `tiny` `{{{tiny}}}`" if tiny else ""
    count = f"The first {len(CHECKS)} are those of every kind."
    return f"builds a small instance{small}, and runs these checks. {count}"


def _wrapped(text: str) -> list[str]:
    return wrap(text, 120, break_long_words=False, break_on_hyphens=False)


def _checks(kind: str) -> Iterator[str]:
    kit = kit_of(kind)
    yield "| check | |\n|---|---|"
    for name, check in {**CHECKS, **kit.checks}.items():
        more = " It starts several processes." if name in kit.ranks else ""
        yield f"| `{name}` | {_sentence(_doc(check)).removeprefix('Conformance check: ')}{more} |"


def _load(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def pages() -> dict[Path, str]:
    """Every page of a kind, and the site's navigation with them, by their files."""
    entries = "".join(f"          - {title_of(kind)}: kinds/{kind}.md\n" for kind in KINDS)
    navigation = re.sub(r"(?: +- .+: kinds/.+\n)+", entries, NAVIGATION.read_text(encoding="utf-8"))
    return {NAVIGATION: navigation} | {FOLDER / f"{kind}.md": render(kind) for kind in KINDS}


if __name__ == "__main__":
    sys.exit(main(pages, "generate_kinds.py", __doc__, made=FOLDER.glob("*.md")))
