"""Clips from a trained run: one process, weights from a checkpoint, mp4 files and a contact sheet."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mm_core.config.load import load_config
from mm_core.config.schema import RunConfig
from mm_core.contracts import Clip, Randomness, SampleRequest
from mm_core.device import current_device
from mm_core.errors import CheckpointError, DataError, MMError
from mm_core.parallel.initialise import initialise
from mm_core.plan import build_task
from mm_core.train.checkpoint import find_checkpoint, load_model_only

if TYPE_CHECKING:
    from torch import nn

PLAYBACK_FPS = 16.0
"""Frames a second of written files where neither the config nor the data names a rate."""


def sample(
    run: str | Path,
    prompt: str | None = None,
    *,
    prompts: Sequence[str] = (),
    negative_prompt: str = "",
    seed: int = 0,
    steps: int | None = None,
    guidance: float | None = None,
    num_frames: int | None = None,
    height: int | None = None,
    width: int | None = None,
    fps: float | None = None,
    out: str | Path | None = None,
) -> list[Clip]:
    """Generates one clip a prompt from a run's newest complete checkpoint.

    Args:
        run: a run's folder, or one of its checkpoints.
        prompt, prompts: what to show; `prompt` comes first when both are given.
        negative_prompt: what guidance leads away from.
        seed: clip i's noise comes from (seed, i).
        steps: solver steps. guidance: classifier-free guidance scale, 1 switches it off.
        num_frames, height, width, fps: size in pixels and frames, and frames a second; None takes
            the task's `sample` defaults, then what the run was trained on.
        out: folder for mp4 files and a contact sheet; None writes nothing.

    Raises:
        MMError: no prompt, no checkpoint, a size that the model can not make.
    """
    texts = [*([prompt] if prompt is not None else []), *prompts]
    if not texts:
        raise MMError("there is no prompt", accepted="prompt='...' or prompts=[...]")
    checkpoint = find_checkpoint(Path(run))
    config = load_config(checkpoint / "config.yaml")
    request = SampleRequest(
        prompts=tuple(texts),
        negative_prompt=negative_prompt,
        seed=seed,
        steps=steps,
        guidance=guidance,
        num_frames=num_frames,
        height=height,
        width=width,
        fps=fps,
    )
    request = with_trained_size(request, config)
    task = load_task(config, checkpoint)
    with torch.no_grad():
        clips: list[Clip] = task.sample(request)  # type: ignore[operator]
    if out is not None:
        write_clips(clips, Path(out))
    return clips


def load_task(config: RunConfig, checkpoint: Path) -> nn.Module:
    """The run's task on this process's device, in evaluation mode, with the checkpoint's weights."""
    task, device = build_task(config), current_device()
    for name in (*task.frozen, *task.trainable):  # type: ignore[misc]
        module = getattr(task, name)
        if name in task.frozen:  # type: ignore[operator]
            module.load(device)
            continue
        module.to_empty(device=device)
        # Fills tables that no checkpoint holds; the parameters are overwritten below.
        initialise(module, name, Randomness(config.run.seed))
    state = {
        f"{name}.{key}": tensor
        for name in task.trainable  # type: ignore[union-attr]
        for key, tensor in getattr(task, name).state_dict().items()
    }
    load_model_only(checkpoint, state)
    return task.eval()


def with_trained_size(request: SampleRequest, config: RunConfig) -> SampleRequest:
    """Sizes that neither the request nor the task's `sample` sets: those of the training data."""
    defaults: Any = config.task.options.get("sample")
    trained = config.data.train.options
    filled: dict[str, Any] = {}
    for name in ("num_frames", "height", "width", "fps"):
        if getattr(request, name) is None and (defaults is None or getattr(defaults, name) is None):
            filled[name] = trained.get(name) or (PLAYBACK_FPS if name == "fps" else None)
    return dataclasses.replace(request, **filled)


def read_prompts(path: Path) -> list[str]:
    """Prompts from a JSON list (texts, or objects with `prompt` or `cap`), JSONL, or one a line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"the prompts can not be read: {error}", where=str(path)) from None
    if path.suffix in (".json", ".jsonl"):
        try:
            lines = [line for line in text.splitlines() if line.strip()]
            rows = json.loads(text) if path.suffix == ".json" else [json.loads(line) for line in lines]
        except ValueError as error:
            raise DataError(f"this is not JSON: {error}", where=str(path)) from None
        prompts = [_prompt_of(row, path) for row in (rows if isinstance(rows, list) else [rows])]
    else:
        prompts = [line.strip() for line in text.splitlines() if line.strip()]
    if not prompts:
        raise DataError("the file holds no prompt", where=str(path), accepted="one prompt a line, or JSON")
    return prompts


def _prompt_of(row: Any, path: Path) -> str:
    if isinstance(row, str):
        return row
    if isinstance(row, dict):
        for key in ("prompt", "cap"):
            if isinstance(row.get(key), str):
                return str(row[key])
    raise DataError(
        f"a row is no prompt: {row!r}"[:200],
        where=str(path),
        accepted="texts, or objects with 'prompt' or 'cap'",
    )


def write_clips(clips: Sequence[Clip], folder: Path) -> Path:
    """One H.264 mp4 a clip, `prompts.json`, and a contact sheet whose path is returned."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"the folder can not be made: {error.strerror}", where=str(folder)) from None
    rows = []
    for index, clip in enumerate(clips):
        name = f"{index:03d}-{re.sub(r'[^a-z0-9]+', '-', clip.prompt.lower())[:60].strip('-')}.mp4"
        write_video(clip, folder / name)
        rows.append({"path": name, "cap": clip.prompt})
    (folder / "prompts.json").write_text(json.dumps(rows, indent=1, ensure_ascii=False), encoding="utf-8")
    return write_contact_sheet(clips, folder / "contact_sheet.png")


def write_video(clip: Clip, path: Path) -> None:
    """H.264 with full chroma, so that small clips keep their colours; a single frame is one too."""
    from fractions import Fraction

    import av

    frames = to_bytes(clip)
    with av.open(str(path), "w") as container:
        rate = Fraction(clip.fps).limit_denominator(1001)
        stream = container.add_stream("libx264", rate=rate, options={"crf": "12"})
        height, width = frames.shape[1:3]
        even = height % 2 == 0 and width % 2 == 0
        stream.width, stream.height = width, height
        stream.pix_fmt = "yuv420p" if even and min(height, width) >= 128 else "yuv444p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())


def to_bytes(clip: Clip) -> Any:
    """uint8 array [F,Y,X,3] of a clip."""
    return ((clip.pixels.clamp(-1, 1) + 1) * 127.5).round().byte().permute(1, 2, 3, 0).contiguous().numpy()


def write_contact_sheet(clips: Sequence[Clip], path: Path, most_frames: int = 8, least: int = 64) -> Path:
    """A row a clip: its prompt and up to `most_frames` frames over its length, each at least `least`
    pixels high."""
    from PIL import Image, ImageDraw

    label = 16
    tiles = []
    for clip in clips:
        frames = to_bytes(clip)
        count = min(most_frames, len(frames))
        chosen = [round(i * (len(frames) - 1) / max(1, count - 1)) for i in range(count)]
        scale = max(1, math.ceil(least / frames.shape[1]))
        size = (frames.shape[2] * scale, frames.shape[1] * scale)
        tiles.append([Image.fromarray(frames[i]).resize(size, Image.Resampling.NEAREST) for i in chosen])
    columns = 2 if len(tiles) > 8 else 1
    row_width = max(sum(tile.width + 2 for tile in row) for row in tiles)
    row_height = max(row[0].height for row in tiles) + label + 4
    rows = math.ceil(len(tiles) / columns)
    sheet = Image.new("RGB", (columns * (row_width + 8), rows * row_height), "white")
    draw = ImageDraw.Draw(sheet)
    for index, (row, clip) in enumerate(zip(tiles, clips, strict=True)):
        x, y = index // rows * (row_width + 8), index % rows * row_height
        draw.text((x + 2, y + 2), clip.prompt[:100].encode("latin-1", "replace").decode("latin-1"), "black")
        for tile in row:
            sheet.paste(tile, (x, y + label))
            x += tile.width + 2
    sheet.save(path)
    return path
