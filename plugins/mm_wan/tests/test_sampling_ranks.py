"""`mm sample` over two ranks: a tiny image-to-video pipeline, its predictor and its encoders in shards."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import wan_frames
from PIL import Image

from mm_core.cli.main import main
from mm_core.interchange.import_weights import import_weights


@pytest.mark.slow
def test_two_ranks_write_the_clips_of_one_from_rows_with_images(tmp_path, monkeypatch):
    monkeypatch.setenv("MM_DEVICE", "cpu")
    folder = wan_frames.checkpoint_at(tmp_path / "i2v", "i2v")
    import_weights(wan_frames.config_at(tmp_path, folder, "i2v"), folder)
    images = wan_frames.images_at(tmp_path)
    rows = [{"prompt": f"a red circle {i}", "image": image.name} for i, image in enumerate(images)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    command = ["sample", "--run", str(tmp_path / "runs/i2v"), "--prompts", str(tmp_path / "rows.jsonl")]
    command += ["--guidance", "3", "--steps", "2", "task.sample.batch_size=1"]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as each of two ranks has: sums in another order change the last bit
    try:
        assert main([*command, "--out", str(tmp_path / "one")]) == 0
    finally:
        torch.set_num_threads(threads)
    shards = "engine.frozen={text_encoder: sharded, image_encoder: sharded}"
    assert main([*command, "--out", str(tmp_path / "two"), "--nproc", "2", shards]) == 0
    alone, shared = (sorted(file.name for file in (tmp_path / name).iterdir()) for name in ("one", "two"))
    assert shared == alone and len(alone) == 3 + 2
    # The sheet holds every frame without a loss.
    first, second = (np.asarray(Image.open(tmp_path / name / "contact_sheet.png")) for name in ("one", "two"))
    assert np.array_equal(first, second)
