"""Commands as they are typed in a shell, those that import torch without the cost of it (see warm.py)."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from support import warm

_CLIENT = Path(__file__).with_name("warm_client.py")
_HEAVY = (
    "train*|sample*|chat*|eval*|import*|export*|weights*|launch*|migrate*|cache*|align*|data*"
    "|'plugins test'*|'plugins check --import'*"
)
"""Commands of `mm` that import torch. The others are run as they are installed."""

_WHEN = {
    "mm": f'case "$*" in {_HEAVY}) warm=1;; esac',
    "mm-train": "warm=1",
    "python": 'case "$1" in *.py | -c) warm=1;; esac',
}


def environment(folder: Path, **more: str) -> dict[str, str]:
    """Variables of a shell that finds this environment's programs first, and in `folder`, which is made, what
    stands before them: `folder` lies as a virtual environment does, for Makefiles that name one."""
    here = Path(sys.executable).parent
    programs = folder / "bin"
    if not programs.is_dir():
        programs.mkdir(parents=True)
        (folder / ".installed").touch()
        for name, condition in _WHEN.items():
            script = programs / name
            script.write_text(
                f"#!/bin/sh\nwarm=\n{condition}\n"
                f'[ -z "$warm" ] || exec {sys.executable} -IS {_CLIENT} {here / name} "$@"\n'
                f'exec {here / name} "$@"\n'
            )
            script.chmod(0o755)
    path = os.pathsep.join([str(programs), str(here), os.environ["PATH"]])
    found = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", **more}
    assert warm.is_warm(found), "what the libraries read at import is changed"
    return {**found, warm.ADDRESS: warm.address()}
