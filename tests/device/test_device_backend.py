"""A torch backend that is installed but cannot be loaded is one error, and none where it is not used."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture
def mock_torch_npu_without_cann(tmp_path) -> Path:
    """A mock (no Ascend host is here): torch_npu as pip installs it, without CANN's libraries."""
    info = tmp_path / "torch_npu-2.7.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.7.1\n")
    (info / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    (tmp_path / "torch_npu.py").write_text(
        "raise ImportError('libascendcl.so: cannot open shared object file: No such file or directory')\n"
    )
    return tmp_path


@pytest.mark.parametrize(("wanted", "ranks"), [("", 1), ("cpu", 1), ("cpu", 2)])
def test_mock_torch_npu_that_does_not_load_is_one_error_and_nothing_on_cpu(
    mm, tiny, mock_torch_npu_without_cann, wanted, ranks
):
    path = os.pathsep.join([str(mock_torch_npu_without_cann), os.environ.get("PYTHONPATH", "")])
    arguments = ["train", "--config", tiny, f"run.dir={mock_torch_npu_without_cann}", "train.steps=2"]
    more = ["data.loader.workers=1", "--nproc", ranks] if wanted else []
    done = mm(*arguments, *more, anew=True, PYTHONPATH=path, MM_DEVICE=wanted)
    if wanted:
        assert done.code == 0, done.err
        assert "done: step 2 of 2" in done.out and "libascendcl" not in done.err
    else:
        assert (done.code, done.out) == (1, "")
        assert done.err == (
            "mm: error: environment: torch_npu is installed but cannot be imported: libascendcl.so: cannot"
            " open shared object file: No such file or directory\n"
            "  hint: load the CANN environment of this host, or set MM_DEVICE=cpu\n"
        )
