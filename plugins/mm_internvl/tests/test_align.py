"""`mm align` on a model of Transformers with a chunked loss: packed rows equal plain ones."""

from __future__ import annotations

import pytest
from internvl_runs import config_of
from mm_internvl.testing import make_tiny_checkpoint, make_tiny_conversations

from mm_core.report.align.compare import compare
from mm_core.report.align.records import read_record
from mm_core.report.align.render import text
from mm_core.training.optional.aligning import Recording, record

pytestmark = pytest.mark.slow


def test_packed_and_plain_rows_differ_in_nothing_and_other_settings_are_named(tmp_path):
    folder = make_tiny_checkpoint(tmp_path / "model")
    rows = make_tiny_conversations(tmp_path / "digits", rows=4)

    def recorded(name, packing, lr=1e-2):
        count = 1 if packing else 4
        train = {
            "type": "internvl/conversations",
            "processor": str(folder),
            "sources": [{"annotations": str(rows)}],
            "max_length": 512,
            "max_tiles": 2,
            "packing": packing,
        }
        config = config_of(
            tmp_path,
            folder,
            rows,
            name,
            task={"attn_implementation": "packed_sdpa", "loss": "chunked"},
            data={"train": train},
            train={"micro_batch_size": count, "global_batch_size": count},
            optimizer={"lr": lr},
        )
        record(config, Recording(tmp_path / name, 1))
        return read_record(tmp_path / name)

    plain, packed, faster = recorded("plain", False), recorded("packed", True), recorded("fast", True, 2e-2)
    assert {row.module for row in plain.rows} > {"model.model.vision_tower", "model.model.language_model"}
    same = compare(plain, packed)
    assert same.findings == [] and all(pair.agrees for pair in same.pairs) and len(same.pairs) > 400
    assert "rows of other shapes in 1 step" in text(same)
    found = compare(plain, faster).findings[0]
    assert found.what == "the weight differs after the update, and its gradient agrees"
