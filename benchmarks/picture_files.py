"""Pixels of all files below folders of strangers' pictures, against a straight use of Pillow.

    python benchmarks/picture_files.py pillow-13.0.0/Tests/images pillow_heif-1.8.1/tests/images

Each file is read as a picture. It is right where its pixels and the size in its header are those of Pillow,
and refused where the error is a DataError. Anything else is printed, and the exit status is 1, as it is where
a stand-in `gs` is called.
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from collections import Counter
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image, ImageCms, ImageFile, ImageOps

from mm_core.data.media.image_headers import image_size
from mm_core.data.media.images import read_photo
from mm_core.errors import DataError

MOST = 8192 * 8192
LEVELS = 2  # profiles of sRGB are not converted


def by_pillow(path: Path) -> np.ndarray:
    """uint8 [Y,X,3], upright, in sRGB, over white."""
    with Image.open(path) as opened:
        image = ImageOps.exif_transpose(opened)
        profile = opened.info.get("icc_profile")
        if image.mode.startswith("I"):
            image = Image.fromarray((np.asarray(image.convert("I")) >> 8).astype(np.uint8))
        alpha = image.convert("RGBA").getchannel("A") if image.has_transparency_data else None
        grey = image.mode in ("1", "L", "LA")
        mode = "CMYK" if image.mode == "CMYK" else "L" if grey else "RGB"
        plain = image.convert("RGBA").convert(mode) if alpha is not None else image.convert(mode)
        image = plain.convert("RGB")
        if profile:
            try:
                own = ImageCms.ImageCmsProfile(BytesIO(profile))
                srgb = ImageCms.createProfile("sRGB")
                image = ImageCms.profileToProfile(plain, own, srgb, outputMode="RGB")
            except (ImageCms.PyCMSError, OSError):
                pass  # damaged, or of other colours
        if alpha is not None:
            white = Image.new("RGB", image.size, "white")
            white.paste(image, mask=alpha)
            image = white
        return np.array(image)


def judged(path: Path) -> tuple[str, str]:
    """(right, refused or wrong, why)."""
    try:
        found = read_photo(path, MOST).permute(1, 2, 0).numpy()
        size = image_size(path, MOST)
    except DataError as fault:
        return "refused", fault.what
    except Exception as fault:
        return "wrong", f"{type(fault).__name__}: {fault}"
    if size != found.shape[:2]:
        return "wrong", f"the header has {size}, the pixels {found.shape[:2]}"
    expected = by_pillow(path)
    if found.shape != expected.shape:
        return "wrong", f"{found.shape}, not {expected.shape}"
    most = int(np.abs(found.astype(int) - expected).max())
    return ("right", "") if most <= LEVELS else ("wrong", f"{most} levels from Pillow")


def main(folders: list[str]) -> int:
    warnings.simplefilter("ignore")
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as place:
        mark, script = Path(place) / "called", Path(place) / "gs"
        script.write_text(f"#!/bin/sh\ntouch {mark}\nexit 1\n")
        script.chmod(0o755)
        os.environ["PATH"] = f"{place}:{os.environ['PATH']}"
        for path in sorted(each for folder in folders for each in Path(folder).rglob("*") if each.is_file()):
            verdict, why = judged(path)
            counts[verdict] += 1
            if verdict == "wrong" or "--all" in sys.argv:
                print(f"{verdict}: {path}: {why}")
        called = mark.exists()
    print(
        ", ".join(f"{counts[each]} {each}" for each in ("right", "refused", "wrong")),
        f"; gs called: {called}",
    )
    return int(bool(counts["wrong"] or called))


if __name__ == "__main__":
    sys.exit(main([each for each in sys.argv[1:] if each != "--all"]))
