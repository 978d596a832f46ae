"""The conformance kit of weight formats: shipped ones pass, and each check refuses a faulty one."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
import torch

from mm_core.plugin.registry import get_registry
from mm_core.testing.outputs.weight_formats import KIT
from mm_core.weights import Companions, KeyMap, Layout, Rename, Safetensors
from support.conformance import examined, refusal, shortcomings

SHIPPED = [each.qualified for each in get_registry().components("weight_format")]


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_formats_keep_their_contract(name: str) -> None:
    assert shortcomings(name) == []


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_format_has_a_model_for_its_checks(name: str) -> None:
    reasons = [o.reason for o in examined(name) if o.status == "not applicable"]
    assert [reason for reason in reasons if not reason.startswith("the format is only read")] == []


def test_a_library_that_is_missing_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)
    outcome = examined("core/diffusers").run("round_trip")
    assert outcome.status == "not applicable"
    assert outcome.reason == "diffusers is not installed, which its examples need"


def laid(**changes: object) -> type:
    """Plain files in another layout."""

    def layout(self, name, component):
        return replace(Layout(), **changes)

    return type("Faulty", (Safetensors,), {"layout": layout})


class Nothing(Safetensors):
    def layout(self, name, component):
        return None


class Curious(Safetensors):
    """It computes with the numbers of a model, which has none yet."""

    def layout(self, name, component):
        return Layout(texts={"norm.txt": str(float(next(component.parameters()).norm()))})


class Narrow(Safetensors):
    """It takes every module for its own."""

    def layout(self, name, component):
        return Layout(texts={"scale.txt": str(component.logit_scale.shape)})


class Strict(Safetensors):
    """It reads another folder than it writes."""

    def folders(self, path):
        return ["weights"] if (path / "weights").is_dir() else [""]

    def recognises(self, path):
        return (path / "weights").is_dir()


class Stored:
    """Tensors of a file, with a change."""

    def __init__(self, stored):
        self.stored = stored
        self.where, self.others, self.shapes = stored.where, stored.others, stored.shapes
        self.dtypes = stored.dtypes

    def read(self, name, box):
        return self.stored.read(name, box)


class Rounded(Stored):
    def read(self, name, box):
        return super().read(name, box).bfloat16().float()


def opening(change) -> type:
    """Plain files that are opened in another way."""

    def open(self, path, folder=""):
        return change(path / folder, lambda place: Safetensors.open(self, place))

    return type("Faulty", (Safetensors,), {"open": open})


class FirstFile(Safetensors):
    """It ignores the index."""

    def open(self, path, folder=""):
        return super().open(min((path / folder).glob("*.safetensors")) if path.is_dir() else path)


class Remembering(Safetensors):
    """It keeps the files that it has opened first."""

    def open(self, path, folder=""):
        self.opened = getattr(self, "opened", None) or super().open(path, folder)
        return self.opened


class Trusting(Safetensors):
    def recognises(self, path):
        return path.is_dir()


class Parsing(Safetensors):
    def recognises(self, path):
        config = path / "config.json"
        return super().recognises(path) or (config.exists() and "mine" in json.loads(config.read_text()))


def unsafe(path, open):
    for found in path.glob("*.bin"):
        return torch.load(found, weights_only=False)
    return open(path)


def bare(path, open):
    from safetensors import safe_open

    for found in path.glob("*.safetensors"):
        with safe_open(str(found), "pt"):
            pass
    return open(path)


def lenient(path, open):
    """It leaves out what it cannot read."""
    try:
        return open(path)
    except ValueError:
        return type("Empty", (), {"shapes": {}})()


class Copying(Safetensors):
    def companions(self, task, written):
        found = [path / "tokenizer.json" for each in written for path in each.sources]
        return Companions(copies={path.name: path for path in found})


class Above(Safetensors):
    def companions(self, task, written):
        return Companions(texts={"../index.json": "{}"})


class Beginning(Safetensors):
    def companions(self, task, written):
        return Companions(texts={"origin.txt": str(written[0].sources[0])})


_LAYER = "encoder.block.{i}.layer.0.SelfAttention"


class Swapped(Safetensors):
    """Two matrices change places; it recognises the files of others, too."""

    def layout(self, name, component):
        query, key = f"{_LAYER}.q.weight", f"{_LAYER}.k.weight"
        return Layout(KeyMap((Rename(query, key), Rename(key, query))))


FAULTS = [
    ("layout", Nothing, "no predictor of the plugin|layout returned None for Sequential"),
    ("layout", Curious, "Tensor.item() cannot be called on meta tensors"),
    ("layout", Narrow, "layout of a module of torch raises AttributeError: 'Linear' object has no attribute"),
    (
        "round_trip",
        Strict,
        "exported in float32, the format does not recognise the files that it has written",
    ),
    ("round_trip", opening(lambda path, open: Rounded(open(path))), "comes back with other numbers"),
    ("round_trip", laid(reading=None, folder="../outside"), "which is outside the exported folder"),
    ("shards", FirstFile, "files, the files do not hold the tensors of the model: "),
    ("others", Swapped, "written by core/safetensors, encoder.block.0.layer.0.SelfAttention.q.weight, "),
    ("no_state", Remembering, "with the numbers of model 2, "),
    ("strangers", Trusting, "recognises of an empty folder returned True; accepted: False"),
    ("strangers", Parsing, "recognises of a config that is not JSON raises JSONDecodeError"),
    ("damaged", opening(bare), "where a weights file is truncated, raises SafetensorError"),
    ("damaged", opening(lenient), "where a weights file is truncated, raises no error"),
    ("no_code", opening(unsafe), "reading a .bin file runs the code of a pickle in it"),
    ("companions", Copying, "companions copies files that do not exist: "),
    ("companions", Above, "companions writes outside of the export: ../index.json"),
    ("companions", Beginning, "IndexError: tuple index out of range"),
]


@pytest.mark.filterwarnings("ignore:Converting a tensor")
@pytest.mark.parametrize(("check", "faulty", "sentence"), FAULTS)
def test_a_faulty_one_is_refused(check: str, faulty: type, sentence: str) -> None:
    shipped = "core/transformers" if faulty is Swapped else "core/safetensors"
    reason = refusal(shipped, check, faulty)
    assert any(part in reason for part in sentence.split("|")), reason


def test_each_check_has_a_fault() -> None:
    assert {check for check, *_ in FAULTS} == set(KIT.checks)
