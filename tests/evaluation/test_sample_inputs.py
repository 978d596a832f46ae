"""What the inputs of prompts become: files of control clips, at which rate they are read."""

from __future__ import annotations

import pytest
import torch

from mm_core.builtin.configs.text_to_video import SampleConfig
from mm_core.contracts import Clip, SampleRequest
from mm_core.data.media.video_files import write_video
from mm_core.data.rows.prompts import Prompt, read_prompts
from mm_core.errors import DataError
from mm_core.evaluation.sample_inputs import read_inputs
from mm_core.evaluation.sampled_clips import PLAYBACK_FPS, complete_request
from mm_core.schema.fields import ComponentConfig


@pytest.fixture
def control(tmp_path):
    """A clip of 12 frames, 8 per second; frame i has the level 20 i."""
    levels = torch.arange(12) * 20 / 127.5 - 1
    write_video(Clip(levels.view(1, 12, 1, 1).expand(3, 12, 16, 16), 8.0, ""), tmp_path / "control.mp4")
    return [Prompt("a", inputs={"control": tmp_path / "control.mp4"})]


def read(control, data, request=None, **sample):
    """The request, and the numbers of the frames that are read for four."""
    request = SampleRequest(("a",), **(request or {}))
    task = ComponentConfig("task", "core/text_to_video", {"sample": SampleConfig(**sample)})
    data = ComponentConfig("dataset", "core/media_text", {"num_frames": 4, "fps": None, **data})
    found = complete_request(request, task, data, control)
    return found, (found.inputs["control"][0].float().mean((0, 2, 3)) / 20).round().int().tolist()


def test_a_control_clip_is_read_at_its_own_rate_where_nothing_sets_one_as_in_training(control):
    request, frames = read(control, {})
    assert frames == [0, 1, 2, 3] and request.fps == PLAYBACK_FPS
    assert read(control, {"fps": 4.0})[1] == [0, 2, 4, 6]
    assert read(control, {"fps": 8.0}, fps=4.0)[1] == [0, 2, 4, 6]
    assert read(control, {"fps": 8.0}, {"fps": 4.0}, fps=8.0)[1] == [0, 2, 4, 6]


def test_a_control_clip_that_is_too_short_names_the_option_of_sampling(control):
    with pytest.raises(DataError, match="it has 12 frames, but a clip needs 13") as raised:
        read(control, {"num_frames": 13})
    assert "or lower --num-frames" in raised.value.render()


def test_a_row_of_a_prompts_file_without_a_field_has_no_picture_of_it(control, tmp_path):
    rows = tmp_path / "prompts.jsonl"
    rows.write_text(
        '{"prompt": "a", "inputs": {"references": ["control.mp4"], "n": 2}}\n{"prompt": "b"}\n"c"'
    )
    found = read_inputs(read_prompts(rows), 1, None)
    assert found["n"] == (2.0, (), ()) and found["references"][1:] == ((), ())
    assert found["references"][0][0].shape == (3, 1, 16, 16)
