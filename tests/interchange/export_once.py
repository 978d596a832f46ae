"""One export in its own process, to be killed or measured.

Arguments: run, out, and a format (safetensors). Prints its anonymous memory at the start and at most, bytes.
"""

import json
import sys
import threading
from pathlib import Path

from mm_core.interchange.export import export


def anonymous() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("this kernel does not tell anonymous memory")


def main(run: str, out: str, form: str = "safetensors") -> None:
    ready = Path(out).parent / f"{Path(out).name}.ready"
    before = peak = anonymous()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    ready.touch()
    export(run, out, form, dtype="bf16", max_shard="200MB")
    done.set()
    watcher.join()
    print(json.dumps({"before": before, "peak": peak}))


if __name__ == "__main__":
    main(*sys.argv[1:])
