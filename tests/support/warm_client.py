"""`warm_client.py PROGRAM [ARGUMENT ...]`: an installed program, its process forked by the server of warm.py.

Shells find it under the program's name (see shells.py). It imports little, so that it starts at once.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path


def main(program: str, arguments: list[str]) -> int:
    address = os.environ["MM_TESTS_WARM"]
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(address)
        socket.send_fds(line, [b"."], [0, 1, 2])
        environment = dict(os.environ)
        words = arguments if Path(program).name.startswith("python") else [program, *arguments]
        request = {"args": words, "environment": environment, "cwd": str(Path.cwd())}
        request |= {"session": False, "interruptible": False}
        line.sendall(json.dumps(request).encode() + b"\n")
        answers = line.makefile("r")
        answers.readline()  # its process id
        code = int(answers.readline() or -9)
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
