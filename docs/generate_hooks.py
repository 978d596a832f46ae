"""Writes docs/hooks.md from mm_core/plugin/hookspecs.py and the built-in plugin.

python docs/generate_hooks.py            writes the page
python docs/generate_hooks.py --check    exits 1 when the page is not what would be written
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from textwrap import fill

from generated_page import main

from mm_core.builtin import plugin as builtin
from mm_core.plugin import KINDS, hookspecs

PAGE = Path(__file__).with_name("hooks.md")

_HEAD = """\
# Hooks

<!-- Made by docs/generate_hooks.py from mm_core/plugin/hookspecs.py: do not edit. -->

A plugin is a module with functions of these names, marked `@hookimpl`. Each takes no arguments and returns a
list of `Component`; a YAML can name each component as `type:`, wherever this kind is expected.

```python
from mm_core import Component, hookimpl


@hookimpl
def mm_predictors():
    return [Component(name="my_dit", target="my_package.model:MyDiT", config="my_package.config:MyDiTConfig")]
```

`fields` are the component's settings: one keyword argument per field of its `config` dataclass.
Protocols are in `mm_core.contracts`; their docstrings state shapes and units.
"""

_TAIL = """
## A new kind

A kind of component that mm_core lacks opens five of its files:

| file | what it gets |
|---|---|
| `mm_core/contracts/<subject>.py` | the protocol |
| `mm_core/contracts/__init__.py` | its name |
| `mm_core/plugin/hookspecs.py` | the hook, under the kind's record: contract, checks, the example's run |
| `mm_core/plugin/scaffold/templates/kinds/<kind>.py.txt` | the example of `mm plugins new` |
| `mm_core/testing/<subject>.py` | its conformance checks, a `Kit` |

`make pages` writes its pages and their place in the navigation. What the checks find is tested in
`tests/testing` (`examined.toml`) and `tests/mutants`.

## Where to go next

- [Plugins](plugins.md): package components, or keep them in one file.
- [Write a DiT](writing-a-dit.md): a predictor, step by step.
- [Write a task](writing-a-task.md): a task and a dataset, step by step.
- [API](api/index.md): the names that a plugin imports.
- [Validation](validation.md#metrics): a metric of your own.
"""


def render() -> str:
    """The page as Markdown."""
    parts = [_HEAD]
    for kind, hook in KINDS.items():
        doc = inspect.cleandoc(getattr(hookspecs, hook).__doc__)
        paragraphs = f"Kind [`{kind}`](kinds/{kind}.md). {doc}".split("\n\n")
        text = "\n\n".join(fill(each, 120, break_on_hyphens=False) for each in paragraphs)
        parts.append(f"\n## `{hook}`\n\n{text}\n")
        if hook in vars(builtin):
            parts.append("\n| the core ships | |\n|---|---|\n")
            for component in getattr(builtin, hook)():
                paper = f" ([paper]({component.paper}))" if component.paper else ""
                parts.append(f"| `core/{component.name}` | {component.summary}{paper} |\n")
    return "".join([*parts, _TAIL])


if __name__ == "__main__":
    sys.exit(main(lambda: {PAGE: render()}, "generate_hooks.py", __doc__))
