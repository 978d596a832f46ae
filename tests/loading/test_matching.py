"""Initial weights: compared by name before they are read, and no code in them runs."""

from __future__ import annotations

import io
import json
import pickle
import re
import zipfile
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from mm_core.checkpoint.store import CheckpointStore
from mm_core.config.sections import InitFromSection
from mm_core.errors import CheckpointError, PlanError
from mm_core.loading import matching
from mm_core.loading.matching import WeightMatch
from mm_core.loading.mismatch import likely_prefix
from support import parts_ranks
from support.ranks import run_ranks

SCRIPT = parts_ranks.__file__


def weights(seed: int = 1) -> dict[str, torch.Tensor]:
    """The parts of the task in parts_ranks.py, and a scalar."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "first.weight": (7, 5),
        "first.bias": (7,),
        "norm.weight": (7,),
        "norm.bias": (7,),
        "last.weight": (3, 7),
        "last.bias": (3,),
    }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def task(seed: int = 2) -> dict[str, torch.Tensor]:
    return {f"predictor.{name}": tensor for name, tensor in weights(seed).items()}


def begin(path: Path, into: dict[str, torch.Tensor], **fields) -> WeightMatch:
    found = WeightMatch(InitFromSection(path=str(path), **fields), into)
    found.fill(into)
    return found


def fault(path: Path, into: dict[str, torch.Tensor], **fields) -> str:
    """The error text; no tensor may have changed."""
    before = {name: tensor.clone() for name, tensor in into.items()}
    with pytest.raises(CheckpointError) as caught:
        begin(path, into, **fields)
    assert all(torch.equal(before[name], tensor) for name, tensor in into.items())
    return str(caught.value)


def prefixed(stored: dict[str, torch.Tensor], start: str) -> dict[str, torch.Tensor]:
    return {f"{start}{name}": tensor for name, tensor in stored.items()}


def split_over(folder: Path, stored: dict[str, torch.Tensor], index: bool) -> Path:
    folder.mkdir()
    names = list(stored)
    files = {"a-00001-of-00002.safetensors": names[::2], "a-00002-of-00002.safetensors": names[1::2]}
    for file, held in files.items():
        save_file({name: stored[name] for name in held}, folder / file)
    if index:
        table = {name: file for file, held in files.items() for name in held}
        (folder / "a.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
        save_file({"unlisted": torch.ones(1)}, folder / "consolidated.safetensors")
    return folder


def stored_as(kind: str, folder: Path, stored: dict[str, torch.Tensor]) -> Path:
    if kind.startswith("folder"):
        return split_over(folder / "weights", stored, index="index" in kind)
    path = folder / f"weights.{kind.partition(' ')[0]}"
    if kind == "safetensors":
        save_file(stored, path)
    elif "nested" in kind:
        torch.save({"epoch": 3, "model": {"state_dict": stored}}, path)
    elif "old" in kind:
        torch.save(stored, path, _use_new_zipfile_serialization=False)
    else:
        torch.save(stored, path)
    return path


@pytest.mark.parametrize(
    "kind", ["safetensors", "folder", "folder with index", "pt", "pth nested", "bin", "pt old"]
)
def test_files_of_tensors_are_read_and_cast(tmp_path, kind):
    stored = {name: tensor.to(torch.bfloat16) for name, tensor in weights().items()}
    into = task()
    into["predictor.norm.bias"] = into["predictor.norm.bias"].double()
    report = begin(stored_as(kind, tmp_path, stored), into, prefixes={"": "predictor"})
    assert report.loaded == tuple(into) and not (report.missing + report.unexpected + report.skipped)
    for name, tensor in stored.items():
        own = into[f"predictor.{name}"]
        assert own.dtype in (torch.float32, torch.float64), "the dtype is the task's"
        assert torch.equal(own, tensor.to(own.dtype))


def test_scalars_and_single_files_by_their_index_are_read(tmp_path):
    stored = {"net.scale": torch.tensor(3.0), "net.count": torch.tensor(7)}
    folder = split_over(tmp_path / "weights", stored, index=True)
    into = {"net.scale": torch.tensor(0.0), "net.count": torch.tensor(0)}
    begin(folder / "a.safetensors.index.json", into)
    assert (float(into["net.scale"]), int(into["net.count"])) == (3.0, 7)


def run_with(folder: Path, model: dict, ema: dict | None = None) -> Path:
    parts = {"model": model, "optimizer": {"predictor.first.weight.step": torch.tensor(1.0)}}
    parts |= {"ema": ema} if ema else {}
    CheckpointStore(folder, keep=2).save(10, parts, {}, "x: 1\n")
    return folder


def test_a_run_or_a_checkpoint_gives_its_model_or_its_average(tmp_path):
    model, ema = task(3), task(4)
    for name in ("predictor.norm.weight", "predictor.norm.bias"):
        del ema[name]  # frozen parameters and buffers have no average
    run = run_with(tmp_path / "run", model, ema)
    into = task()
    begin(run, into)
    assert all(torch.equal(into[name], model[name]) for name in into)
    into = task()
    report = begin(run / "checkpoints" / "step_00000010", into, weights="ema")
    assert report.loaded == tuple(into)
    assert all(torch.equal(into[name], (model | ema)[name]) for name in into)


def test_weights_without_an_average_are_reported(tmp_path):
    run = run_with(tmp_path / "run", task(3))
    assert fault(run, task(), weights="ema") == (
        f"{run}/checkpoints/step_00000010: this checkpoint contains no average of the weights\n"
        "  hint: set init_from.weights to model, or choose a checkpoint of a run with `ema`"
    )
    path = stored_as("safetensors", tmp_path, weights())
    assert fault(path, task(), weights="ema") == (
        f"{path}: weights: ema needs a checkpoint of mm_core: other files contain no average\n"
        "  hint: leave out init_from.weights"
    )


def test_a_flipped_bit_of_a_checkpoint_is_noticed(tmp_path):
    run = run_with(tmp_path / "run", task(3))
    shard = next((run / "checkpoints" / "step_00000010").glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    assert "this checkpoint is damaged: __0_0.distcp does not match its checksum" in fault(run, task())


# -- names -------------------------------------------------------------------------------------


def test_patterns_choose_by_paths_in_the_task(tmp_path):
    path = stored_as("safetensors", tmp_path, prefixed(weights(), "predictor."))
    into, before = task(), task()
    report = begin(
        path, into, include=("predictor.first", "predictor.last"), exclude=("predictor.last.bias",)
    )
    assert report.loaded == ("predictor.first.weight", "predictor.first.bias", "predictor.last.weight")
    assert report.skipped == ("predictor.norm.weight", "predictor.norm.bias", "predictor.last.bias")
    assert all(torch.equal(into[name], before[name]) for name in report.skipped)
    assert str(report) == (
        "3 tensors loaded, 3 left out (predictor.norm.weight, predictor.norm.bias, predictor.last.bias)"
    )
    with pytest.raises(PlanError, match=r"init_from\.exclude: pattern 'predictor\.lst' matches no module"):
        begin(path, into, exclude=("predictor.lst",))
    with pytest.raises(PlanError, match="init_from: every parameter is left out"):
        begin(path, into, exclude=("predictor",))


def test_the_longest_start_of_a_name_is_replaced_and_only_whole_names_count(tmp_path):
    stored = {
        "model.dit.a": torch.tensor([1.0]),
        "model.b": torch.tensor([2.0]),
        "model_ema.c": torch.tensor([3.0]),
    }
    path = stored_as("safetensors", tmp_path, stored)
    into = {name: torch.zeros(1) for name in ("x.a", "y.b", "model_ema.c")}
    begin(path, into, prefixes={"model": "y", "model.dit.": "x."})
    assert [float(tensor) for tensor in into.values()] == [1.0, 2.0, 3.0]
    said = fault(path, into, prefixes={"model.dit": "", "model": "", "model_ema": "b"})
    assert "missing: x.a, y.b, model_ema.c" in said
    clash = fault(path, {"a": torch.zeros(1)}, prefixes={"model.dit.a": "a", "model.b": "a"})
    assert clash == (
        f"{path}: model.b and model.dit.a would both become a\n  hint: change init_from.prefixes"
    )


def test_every_name_that_does_not_fit_is_listed_with_the_prefix_that_would_help(tmp_path):
    path = stored_as("safetensors", tmp_path, prefixed(weights(), "net."))
    said = fault(path, task())
    assert said.startswith(f"{path}: these weights do not fit the task: 6 missing: predictor.first.weight")
    assert "6 unexpected: net.first.bias" in said
    assert said.endswith(
        "hint: set init_from.prefixes: {'net': 'predictor'}, which finds 6 of the missing names"
    )
    into = task()
    begin(path, into, prefixes={"net": "predictor"})
    bare = stored_as("pt", tmp_path, weights())
    assert "init_from.prefixes: {'': 'predictor'}, which finds 6" in fault(bare, task())


def test_a_misspelt_name_shows_the_near_one(tmp_path):
    stored = prefixed(weights(), "predictor.")
    stored["predictor.frist.weight"] = stored.pop("predictor.first.weight")
    assert fault(stored_as("safetensors", tmp_path, stored), task()).startswith(
        f"{tmp_path}/weights.safetensors: these weights do not fit the task: "
        "1 missing: predictor.first.weight (near: predictor.frist.weight); "
        "1 unexpected: predictor.frist.weight\n"
    )


def test_without_strict_what_is_missing_stays_and_what_is_left_is_listed(tmp_path):
    stored = prefixed(weights(), "predictor.")
    del stored["predictor.last.bias"]
    path = stored_as("safetensors", tmp_path, stored | {"extra": torch.ones(1)})
    assert "1 missing: predictor.last.bias; 1 unexpected: extra" in fault(path, task())
    into, before = task(), task()
    report = begin(path, into, strict=False)
    assert (report.missing, report.unexpected) == (("predictor.last.bias",), ("extra",))
    assert torch.equal(into["predictor.last.bias"], before["predictor.last.bias"])
    assert torch.equal(into["predictor.last.weight"], stored["predictor.last.weight"])
    nothing = stored_as("pt", tmp_path, {"elsewhere": torch.ones(1)})
    assert "6 missing" in fault(nothing, task(), strict=False), "a start with nothing is a mistake"


def test_another_shape_is_refused_unless_it_is_left_out(tmp_path):
    stored = prefixed(weights(), "predictor.") | {"predictor.last.bias": torch.ones(4)}
    path = stored_as("safetensors", tmp_path, stored)
    for strict in (True, False):
        assert fault(path, task(), strict=strict) == (
            f"{path}: these weights do not fit the task: "
            "1 misshapen: predictor.last.bias (4 in the file, 3 in the task)\n"
            "  hint: leave the misshapen ones out with init_from.exclude, or use the model's own options"
        )
    assert begin(path, task(), exclude=("predictor.last.bias",)).skipped == ("predictor.last.bias",)


@pytest.mark.parametrize(
    "scale",
    [
        "predictor.first.weight_scale",
        "predictor.first.weight_scale_inv",
        "predictor.first.weight_scale_2",
        "predictor.first.scale_weight",
        "predictor.first.scale_input",
        "predictor.first.input_scale",
        "predictor.first.comfy_quant",
        "scaled_fp8",
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_weights_beside_their_scales_are_refused_by_name(scale, strict, tmp_path):
    stored = prefixed(weights(), "predictor.")
    path = stored_as("safetensors", tmp_path, stored | {scale: torch.ones(1)})
    found = fault(path, task(), strict=strict)
    assert found.startswith(f"{path}: the weights here are quantised with scales ({scale}), so their numbers")
    path = stored_as("pt", tmp_path, stored | {"predictor.first.scale_weights": torch.ones(1)})
    assert begin(path, task(), strict=False).unexpected == ("predictor.first.scale_weights",)


def test_the_likely_prefix_is_the_one_that_fits_most_names():
    missing = ["net.blocks.0.w", "net.blocks.1.w", "net.head.w"]
    assert likely_prefix(missing, ["blocks.0.w", "blocks.1.w", "tail.w"]) == ("", "net", 2)
    assert likely_prefix(missing, ["other"]) is None


# -- damaged files -----------------------------------------------------------------------------


def test_a_path_that_holds_no_weights_has_a_hint_what_would(tmp_path):
    accepted = (
        "  accepted: a run or checkpoint folder, a .safetensors file or a folder of them, "
        "or a .pt, .pth or .bin file of tensors\n  hint: set init_from.path"
    )
    assert fault(tmp_path / "x.pt", task()) == f"{tmp_path}/x.pt: there is no such file or folder\n{accepted}"
    (tmp_path / "x.txt").write_text("no weights")
    assert fault(tmp_path / "x.txt", task()) == f"{tmp_path}/x.txt: this is not a weights file\n{accepted}"
    assert "neither a checkpoint nor a run" in fault(tmp_path, task())
    first = stored_as("pt", tmp_path, weights())
    hint = f"\n  hint: torch.save files are read one at a time: name {first}"
    assert fault(tmp_path, task()).endswith(hint)
    torch.save(weights(), first.with_name(f"{first.stem}-more.pth"))
    assert fault(tmp_path, task()).endswith(f"{first.stem}-more.pth, or another of the 2 here")


def test_a_torch_files_weights_may_lie_beside_other_tensors(tmp_path):
    """The deepest mapping with tensors is the model's; one that contains itself does not hang."""
    stored = prefixed(weights(), "predictor.")
    path = tmp_path / "x.pt"
    torch.save({"model": {"state_dict": stored, "scale": torch.ones(1)}, "step": torch.tensor(7)}, path)
    into = task()
    assert not begin(path, into).unexpected
    assert all(torch.equal(into[name], tensor) for name, tensor in stored.items())
    endless: dict = {"step": 3}
    endless["model"] = endless
    torch.save(endless, path)
    assert "this file contains no named tensors" in fault(path, task())


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (lambda t: t.to_sparse(), "is sparse (sparse_coo), as are 1 more"),
        (lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8), "is quantized (qint8), as are 1 more"),
        (lambda t: t.to("meta"), "is on the meta device, without numbers, as are 1 more"),
    ],
)
def test_a_torch_file_of_tensors_that_have_no_slices_is_refused_by_name(kind, says, tmp_path):
    stored = prefixed(weights(), "predictor.")
    odd = [name for name, tensor in stored.items() if tensor.dim() == 2][:2]
    torch.save({name: kind(t) if name in odd else t for name, t in stored.items()}, tmp_path / "x.pt")
    said = fault(tmp_path / "x.pt", task())
    assert said.startswith(f"{tmp_path}/x.pt: {odd[0]} {says}\n  accepted: dense tensors")


def test_damaged_files_are_refused_by_name(tmp_path):
    path = stored_as("safetensors", tmp_path, weights())
    path.write_bytes(path.read_bytes()[:-8])
    assert fault(path, task()) == (
        f"{path}: this is not a complete safetensors file: it is truncated, or longer than its header"
        " declares\n"
        "  hint: download or copy it again"
    )
    torn = stored_as("pt", tmp_path, weights())
    torn.write_bytes(torn.read_bytes()[:-40])
    assert fault(torn, task()).startswith(f"{torn}: this file was refused without loading it: RuntimeError: ")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"<!DOCTYPE html><html><body>404</body></html>", "it begins with the text b'<!DOCTYPE html><'"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "it is a pointer of Git LFS: "),
    ],
)
def test_a_file_that_only_has_the_name_of_safetensors_is_described(tmp_path, content, says):
    path = tmp_path / "weights.safetensors"
    path.write_bytes(content)
    assert fault(path, task()).startswith(f"{path}: this is not a complete safetensors file: {says}")


def test_an_index_may_not_lead_elsewhere_nor_name_what_is_not_there(tmp_path):
    folder = split_over(tmp_path / "weights", weights(), index=True)
    index = folder / "a.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "../secret.safetensors"}}))
    assert fault(folder, task()) == (
        f"{index}: this index lists '../secret.safetensors', which is outside its folder\n"
        "  accepted: names of files in the same folder"
    )
    index.write_text(json.dumps({"weight_map": {"w": "b.safetensors"}}))
    assert fault(folder, task()).startswith(f"{index}: files listed in this index are missing: b.safetensors")
    index.write_text("[]")
    assert fault(folder, task()).startswith(f"{index}: this index cannot be read (TypeError)\n")
    (folder / "b.safetensors.index.json").write_text("{}")
    assert "this folder has several indexes: a.safetensors.index.json, b.saf" in fault(folder, task())


def test_a_name_in_two_files_is_refused(tmp_path):
    folder = split_over(tmp_path / "weights", weights(), index=False)
    save_file(weights(), folder / "b.safetensors")
    assert "first.bias is in a-00002-of-00002.safetensors and in b.safetensors" in fault(folder, task())


class Runs:
    """Unpickling this calls `function(argument)`."""

    def __init__(self, function, argument) -> None:
        self.call = (function, (argument,))

    def __reduce__(self):
        return self.call


def hostile(kind: str, mark: Path) -> bytes:
    """Files that would create `mark` if any code in them ran."""
    command = f"open({str(mark)!r}, 'w').close()"
    payload = Runs(exec, command) if kind != "system" else Runs(__import__("os").system, f"touch {mark}")
    if kind == "bare pickle":
        return pickle.dumps({"predictor.first.weight": payload}, protocol=2)
    buffer = io.BytesIO()
    if kind == "whole module":
        torch.save(nn.Linear(2, 2), buffer)
    elif kind == "in legacy format":
        torch.save({"w": torch.ones(1), "x": payload}, buffer, _use_new_zipfile_serialization=False)
    elif kind == "torchscript":
        torch.jit.save(torch.jit.script(nn.Linear(2, 2)), buffer)
    elif kind == "zip with another pickle":
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr("archive/data.pkl", pickle.dumps(payload, protocol=2))
            archive.writestr("archive/version", "3\n")
    else:
        torch.save({"predictor.first.weight": torch.ones(7, 5), "x": payload}, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("exec", "exec"),
        ("system", "posix.system"),
        ("bare pickle", "exec"),
        ("in legacy format", "exec"),
        ("zip with another pickle", "exec"),
        ("whole module", "torch.nn.modules.linear.Linear"),
        ("torchscript", "TorchScript"),
    ],
)
@pytest.mark.parametrize("ending", ["pt", "bin"])
@pytest.mark.filterwarnings("error::UserWarning")
def test_hostile_files_run_no_code(tmp_path, kind, named, ending):
    mark, path = tmp_path / "ran", tmp_path / f"weights.{ending}"
    path.write_bytes(hostile(kind, mark))
    said = fault(path, task())
    assert not mark.exists()
    reason = said.partition("this file was refused without loading it: ")[2].partition("\n")[0]
    if kind == "torchscript":
        assert reason == "it is a TorchScript archive, which is a program"
    else:
        # torch's versions call the same function exec, builtins.exec or __builtin__.exec.
        assert re.fullmatch(
            rf"it would import (\w+\.)?{re.escape(named)}, which a file of tensors never needs", reason
        )
    assert said.endswith(
        "  accepted: a file that contains only tensors\n"
        "  hint: get the weights as safetensors; load only files that you trust"
    )


def test_things_that_are_no_tensors_are_unexpected(tmp_path):
    stored = prefixed(weights(), "predictor.")
    path = tmp_path / "weights.pt"
    torch.save(stored | {"step": 3}, path)
    assert "1 unexpected: step" in fault(path, task())
    assert begin(path, task(), strict=False).unexpected == ("step",)
    torch.save({"state_dict": {"lr": 0.1}}, path)
    assert fault(path, task()) == (
        f"{path}: this file contains no named tensors\n"
        "  accepted: a state dict, also below 'state_dict', 'model' or 'module'"
    )


# -- over ranks --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["safetensors", "pt", "run"])
def test_each_of_two_ranks_reads_its_shard(tmp_path, kind):
    stored = prefixed(weights(), "net.")
    source = run_with(tmp_path / "run", stored) if kind == "run" else stored_as(kind, tmp_path, stored)
    run_ranks(SCRIPT, 2, tmp_path / "2.pt", "match", source)
    found = torch.load(tmp_path / "2.pt")
    assert {name.replace("predictor.", "net.") for name in found} == set(stored)
    for name, tensor in found.items():
        assert torch.equal(tensor, stored[name.replace("predictor.", "net.")]), name


def test_the_bar_counts_the_bytes_of_the_file_and_is_shown_for_more_than_one_tensor(tmp_path, monkeypatch):
    stored = {name: tensor.bfloat16() for name, tensor in weights().items()}
    save_file(stored, tmp_path / "model.safetensors")
    bars = []

    @contextmanager
    def noted(title, total, shown):
        counted = []
        yield counted.append
        bars.append((title, total, shown, sum(counted)))

    monkeypatch.setattr(matching, "byte_bar", noted)
    begin(tmp_path, task(), prefixes={"": "predictor"})
    begin(tmp_path, task(), prefixes={"": "predictor"}, include=["predictor.first.bias"])
    total = sum(2 * tensor.numel() for tensor in stored.values())
    title = f"reading {tmp_path}"
    assert bars == [(title, total, True, total), (title, 14, False, 14)]


def test_a_fingerprint_is_that_of_the_named_tensors(tmp_path):
    def of(stored: dict[str, torch.Tensor], *names: str) -> str:
        save_file(stored, tmp_path / "model.safetensors")
        init = InitFromSection(path=str(tmp_path), prefixes={"": "predictor"})
        return WeightMatch(init, task()).fingerprint(names)

    first, last = "predictor.first.bias", "predictor.last.bias"
    changed = weights() | {"last.bias": torch.zeros(3)}
    assert of(weights(), first) == of(changed, first) != of(changed, last)
    assert of(weights(), last) != of(changed, last)
    assert of(weights(), first, last) not in (of(weights(), first), of(weights(), last))
