"""Folders of plain DeepSpeed scripts, read without deepspeed."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from mm_deepspeed.folders import DeepSpeedFolders, _by_group, _by_parameter

from mm_core.errors import CheckpointError
from mm_core.training.verify_resume import _tensors
from support.ranks import environment, run_ranks
from support.runs import VIDEO, config_of

CASES = ["0_fp32", "1_fp32", "2_fp32", "3_fp32", "1_bf16", "2_bf16", "3_bf16", "1_bf16_sums_fp32"]
CASES += ["3_fp32_small_groups", "2_fp32_round_robin"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """What folder_ranks.py saved on two ranks with the real DeepSpeed."""
    out = tmp_path_factory.mktemp("saved")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_ACCELERATOR", "cpu")
        run_ranks(Path(__file__).with_name("folder_ranks.py"), 2, out)
    return out


def read(path):
    stored = DeepSpeedFolders().open(path)
    return {n: stored.read(n, tuple(slice(0, s) for s in shape)) for n, shape in stored.shapes.items()}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_masters_are_those_that_were_trained(saved, case):
    """Bit for bit, from the folder and from its parent; boxes too; a shared weight under both names."""
    wanted = torch.load(saved / case / "whole.pt")
    found, again = read(saved / case / "global_step2"), read(saved / case)
    assert found.keys() == again.keys() == wanted.keys() | {"third.weight"}
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    assert all(found[name].dtype == tensor.dtype for name, tensor in wanted.items())
    assert torch.equal(found["third.weight"], wanted["first.weight"])
    stored = DeepSpeedFolders().open(saved / case)
    for name, box in (("second.weight", (slice(1, 4), slice(0, 2))), ("first.bias", (slice(2, 3),))):
        assert torch.equal(stored.read(name, box), wanted[name][box])


@pytest.mark.slow
@pytest.mark.parametrize("case", ["2_fp32", "3_fp32"])
def test_a_run_begins_with_a_folder_where_deepspeed_is_not_installed(saved, case, tmp_path):
    config_of(tmp_path, VIDEO)
    program = (
        "import sys; sys.modules['deepspeed'] = None\n"
        "from mm_core.cli.main import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )

    def mm(*words):
        command = [sys.executable, "-c", program, *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    folder = saved / "dit" / case
    assert "deepspeed/zero_folder" in mm("weights", "show", folder)
    text = mm("import", "--from", folder, "--config", tmp_path / "tuned.yaml")
    assert "tensors loaded (deepspeed/zero_folder)" in text
    wanted = torch.load(folder / "whole.pt")
    found = dict(_tensors(tmp_path / "runs/tuned/checkpoints/step_00000000"))
    named = {n.partition("predictor.")[2]: t for n, t in found.items() if n.startswith("model.predictor.")}
    assert named.keys() == wanted.keys()
    assert all(torch.equal(named[name], tensor) for name, tensor in wanted.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "harm", "text"),
    [
        ("2_fp32", lambda at: (at / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink(),
         "the optimizer states of rank 1 of 2 are missing"),
        ("3_fp32", lambda at: (at / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink(),
         "the model states of rank 1 of 2 are missing"),
        ("2_fp32", lambda at: [file.unlink() for file in at.glob("*optim*")],
         "the files of optimizer states are missing"),
        ("2_fp32", lambda at: (at / "mp_rank_01_model_states.pt").touch(),
         "the model is split by tensors, pipeline stages or experts: mp_rank_01_model_states.pt"),
        ("1_bf16", lambda at: os.truncate(at / "mp_rank_00_model_states.pt", 900),
         "was refused without loading"),
    ],
)  # fmt: skip
def test_a_folder_that_cannot_be_read_is_one_sentence(saved, case, harm, text, tmp_path):
    folder = shutil.copytree(saved / case / "global_step2", tmp_path / "global_step2")
    harm(folder)
    with pytest.raises(CheckpointError, match=text) as error:
        read(folder)
    assert str(folder) in str(error.value)


class Evil:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("save", [torch.save, lambda found, path: path.write_bytes(pickle.dumps(found))])
def test_a_pickle_that_would_run_code_is_refused(save, tmp_path):
    save(
        {"module": {"a": torch.zeros(2)}, "x": Evil(tmp_path / "ran")},
        tmp_path / "mp_rank_00_model_states.pt",
    )
    assert DeepSpeedFolders().recognises(tmp_path)
    with pytest.raises(CheckpointError, match="was refused without loading it"):
        read(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_other_contents_are_an_error_with_the_place(tmp_path):
    for found in ({"module": None}, [1], {"module": {}, "param_shapes": [{}]}):
        torch.save(found, tmp_path / "mp_rank_00_model_states.pt")
        with pytest.raises(CheckpointError, match=str(tmp_path)):
            read(tmp_path)


def test_a_latest_that_leads_elsewhere_is_not_followed(tmp_path):
    torch.save({"module": {"module.a": torch.zeros(2)}}, tmp_path / "mp_rank_00_model_states.pt")
    inner = tmp_path / "inner"
    inner.mkdir()
    for text in ("..", "../", str(tmp_path), ""):
        (inner / "latest").write_text(text)
        assert not DeepSpeedFolders().recognises(inner)
    assert list(read(tmp_path)) == ["a"]  # `module.` of a wrapper is removed


def test_names_below_a_prefix_fit(tmp_path):
    component = torch.nn.Linear(2, 3)
    state = {f"model.{name}": tensor for name, tensor in component.state_dict().items()}
    torch.save({"module": state}, tmp_path / "mp_rank_00_model_states.pt")
    form = DeepSpeedFolders()
    keys = form.layout("predictor", component).reading(form.open(tmp_path))
    assert keys.stored_shapes({"weight": (3, 2)}) == {"model.weight": (3, 2)}


def test_parts_of_ranks_join():
    """Worked by hand: 3 ranks; stage 2 pads the vector's end, stage 3 each parameter's."""
    shapes = [{"a": (2, 2), "b": (), "c": (3,)}]
    flat = torch.arange(9.0)
    found = _by_group(shapes, [[part] for part in flat.chunk(3)], None)
    assert found["a"].rows(1, 2).tolist() == [[2.0, 3.0]] and found["c"].rows(0, 3).tolist() == [5, 6, 7]
    ranks = [
        [torch.tensor([0.0, 1, 4, 5])],
        [torch.tensor([2.0, 3, -1, 6])],
        [torch.tensor([-1.0, -1, -1, 7])],
    ]
    found = _by_parameter(shapes, ranks)
    assert found["a"].rows(0, 2).tolist() == [[0, 1], [2, 3]] and found["c"].rows(0, 3).tolist() == [5, 6, 7]
