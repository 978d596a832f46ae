"""Folders of plain DeepSpeed scripts, read without deepspeed."""

from __future__ import annotations

import math
import os
import pickle
import re
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
OVERWRITTEN = ["1_bf16", "2_fp32", "3_fp32"]


def run(out, world, *cases):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_ACCELERATOR", "cpu")
        run_ranks(Path(__file__).with_name("folder_ranks.py"), world, out, *cases)
    return out


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """What folder_ranks.py saved on two ranks with the real DeepSpeed."""
    return run(tmp_path_factory.mktemp("saved"), 2)


@pytest.fixture(scope="module")
def saved_by_three(tmp_path_factory):
    """The same on three ranks, for some cases."""
    return run(tmp_path_factory.mktemp("three"), 3, *OVERWRITTEN)


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


@pytest.mark.slow
@pytest.mark.parametrize("case", OVERWRITTEN)
def test_files_of_further_ranks_that_an_earlier_save_left_are_not_read(saved, saved_by_three, case, tmp_path):
    """Two ranks save into a folder of three. With rank 1's files of three, nothing is read."""
    small, large = (each / case / "global_step2" for each in (saved, saved_by_three))
    folder = shutil.copytree(small, shutil.copytree(large, tmp_path / "global_step2"), dirs_exist_ok=True)
    wanted, found = torch.load(saved / case / "whole.pt"), read(folder)
    assert len(list(folder.glob("*rank_2_mp*"))) == (2 if case[0] == "3" else 1)
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    for file in large.glob("*rank_1_mp*"):
        shutil.copy(file, folder)
    with pytest.raises(CheckpointError, match=r"two saves are mixed: partition_count is 2 in .* 3 in"):
        read(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "files", "of"),
    [
        ("3_fp32", "zero_pp_rank_1*model*", "global_steps is 2 in .*rank_0.* and 1 in .*rank_1"),
        ("3_fp32", "zero_pp_rank_1*optim*", "step is 2.0 in .*rank_0.* and 1.0 in .*rank_1"),
        ("3_fp32", "*model*", "the model states are of step 1, but the optimizer states of step 2"),
        ("3_fp32", "*optim*", "the model states are of step 2, but the optimizer states of step 1"),
        ("2_fp32", "*rank_1_*", "step is 2.0 in .*rank_0.* and 1.0 in .*rank_1"),
        ("2_fp32", "*optim*", "first.weight in the optimizer states is not the one in the model states"),
        ("1_bf16", "*model*", "first.weight in the optimizer states is not the one in the model states"),
        ("../2_bf16", "*", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"),
        ("../3_fp32", "*", "mp_rank_00_model_states.pt and zero_pp_rank_0_mp_rank_00_model_states.pt"),
        ("../0_fp32", "*", "mp_rank_00_model_states.pt was saved without ZeRO, but zero_pp_rank_0"),
    ],
)  # fmt: skip
def test_files_of_two_saves_are_refused(saved, case, files, of, tmp_path):
    """Of steps 1 and 2 of a case, or of a case and case 2_fp32."""
    into = "2_fp32" if ".." in case else case
    folder = shutil.copytree(saved / into / "global_step2", tmp_path / "global_step2")
    other = saved / case.removeprefix("../") / f"global_step{1 if into == case else 2}"
    for file in other.glob(files):
        shutil.copy(file, folder)
    with pytest.raises(CheckpointError, match=of):
        read(folder)


@pytest.mark.slow
def test_weights_that_agree_are_read_whatever_the_optimizer_counts(saved, tmp_path):
    """A run that goes on without its optimizer's states counts from 0 in them, not in the model states."""
    for case in ("1_bf16", "2_fp32"):
        folder = shutil.copytree(saved / case / "global_step2", tmp_path / case)
        for path in folder.glob("*model_states.pt"):
            state = torch.load(path, weights_only=False)
            torch.save({**state, "global_steps": 1002}, path)
        assert read(folder).keys() == read(saved / case).keys()


def folder_of_zero_3(folder, **changes):
    """A folder as two ranks save it at ZeRO 3, made by hand, with changes to what each file contains."""
    folder.mkdir(exist_ok=True)
    for rank in range(2):
        name = folder / f"zero_pp_rank_{rank}_mp_rank_00"
        shapes = changes.get("param_shapes", [{"a": torch.Size([2, 3])}])
        model = {"module": {}, "buffer_names": [], "param_shapes": shapes, "mp_world_size": 1}
        torch.save(model | {key: changes[key] for key in model if key in changes}, f"{name}_model_states.pt")
        states = {
            "zero_stage": 3,
            "partition_count": 2,
            "fp32_flat_groups": [torch.arange(3.0) + 3 * rank],
        }
        states |= {key: changes[key] for key in states if key in changes}
        torch.save({"optimizer_state_dict": states}, f"{name}_optim_states.pt")
    return folder


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        *(
            ({"partition_count": count}, f"partition_count is {re.escape(repr(count))}, not a number")
            for count in (math.inf, -math.inf, math.nan, 0, -2, 2.5, True, None, "2", [], [2, math.inf], {})
        ),
        ({"partition_count": 10**9}, "the optimizer states of rank 2 of 1000000000 are missing"),
        ({"partition_count": 1}, "ValueError: 3 of 6 numbers are missing"),
        ({"partition_count": [2, 1]}, "split by tensors, pipeline stages or experts: partition_count is"),
        *(
            ({"zero_stage": stage}, f"zero_stage is {re.escape(repr(stage))}, not 1, 2 or 3")
            for stage in (math.inf, 0, 4, -3, "3", None, 3.0, [3])
        ),
        *(
            ({"param_shapes": [{"a": shape}]}, "the files are not as DeepSpeed writes them")
            for shape in (
                [math.inf], [1e9], [-2, -3], [2**62, 4], [10**30], ["6"], 6, None, [[6]], [7], [4], [3]
            )
        ),
        ({"fp32_flat_groups": [torch.zeros(3, device="meta")]}, "a tensor without dense numbers"),
        ({"fp32_flat_groups": [torch.zeros(3, 1).to_sparse()]}, "a tensor without dense numbers"),
        ({"fp32_flat_groups": []}, "numbers are missing"),
        ({"fp32_flat_groups": [torch.zeros(4)]}, "4 numbers where shapes make 3"),
        ({"mp_world_size": 2}, "zero_pp_rank_0_mp_rank_00_model_states.pt is one part of it"),
    ],
)  # fmt: skip
def test_a_damaged_number_or_size_is_one_sentence(changes, text, tmp_path):
    """Counts, stages and shapes in files of others are anything; none of them ends in a crash or a wait."""
    assert read(folder_of_zero_3(tmp_path / "good"))["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    folder = folder_of_zero_3(tmp_path / "folder", **changes)
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


def test_a_latest_whose_folder_is_not_here_is_one_sentence(tmp_path):
    """A step was copied, but not the one that `latest` names; files in the folder itself are read."""
    torch.save({"module": {"a": torch.zeros(2)}}, tmp_path / "mp_rank_00_model_states.pt")
    (tmp_path / "latest").write_bytes(b"global_step\xff")
    assert list(read(tmp_path)) == ["a"]
    inner = tmp_path / "global_step2"
    inner.mkdir()
    shutil.move(tmp_path / "mp_rank_00_model_states.pt", inner)
    (tmp_path / "latest").write_text("global_step4\n")
    assert DeepSpeedFolders().recognises(tmp_path)
    text = "`latest` names global_step4, which is not here, but global_step2 is"
    with pytest.raises(CheckpointError, match=text) as error:
        read(tmp_path)
    assert error.value.hint == "name the folder of a step"


@pytest.mark.parametrize("name", ["expert_0_mp_rank_00_model_states.pt", "layer_0_expert_1_mp_rank_00_x.pt"])
def test_experts_beside_the_model_are_refused(name, tmp_path):
    torch.save({"module": {"a": torch.zeros(2)}}, tmp_path / "mp_rank_00_model_states.pt")
    (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match="pipeline stages or experts: " + name):
        read(tmp_path)
    (tmp_path / name).unlink()  # what is left of them: only that there were some
    torch.save({"module": {"a": torch.zeros(2)}, "num_experts": [8]}, tmp_path / "mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match=r"experts: mp_rank_00_model_states.pt has no experts"):
        read(tmp_path)


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
