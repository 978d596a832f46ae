"""A component's class is held against its contract by its source, without an import."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.utils.data import Dataset

from mm_core.cli.main import main
from mm_core.plugin.checks.contract import members_of
from mm_core.plugin.checks.inspection import file_fault
from mm_core.plugin.checks.source import PLAIN_BASES, source_faults, source_members
from mm_core.plugin.hookspecs import COMPONENT_KINDS
from mm_core.plugin.kinds import Contract
from mm_core.plugin.registry import survey
from support.sites import MODEL

SHORT = (
    "it lacks 1 method: init_weights()",
    "it lacks 3 attributes: text_padding (Literal['masked'] | tuple[Literal['fixed'], int]), "
    "out_channels (int), text_dim (int)",
)
LACKS = """
import torch.nn as nn


class Blocks(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.in_channels = channels


class DiT(Blocks):
    patch_size = (1, 2, 2)

    def forward(self, latents, timestep, text, text_mask):
        return latents
"""


@pytest.fixture
def faults(site: Any) -> Any:
    """Writes a module and returns the faults of its class, by the file alone."""

    def found(source: str, kind: str = "predictor", name: str = "DiT") -> list[str]:
        site.module("mm_alpha.model", source)
        place, faults = source_faults(kind, "mm_alpha.model", name)
        line = next(
            (n for n, text in enumerate(source.splitlines(), 1) if text.startswith(f"class {name}")), 0
        )
        assert not faults or place == f"{site.folder / 'mm_alpha/model.py'}, line {line}"
        assert "mm_alpha" not in sys.modules
        return faults

    return found


BASED = """
from mm_core.contracts import PredictorModule


class DiT(PredictorModule):
    patch_size = (1, 2, 2)
    text_dim: int

    def __init__(self, channels):
        super().__init__()
        self.in_channels = channels

    def init_weight(self):
        pass

    def helper(self):
        pass

    def forward(self, latents, timestep, text, text_mask):
        return latents
"""


def test_a_type_alone_sets_no_attribute(faults: Any) -> None:
    """Also in the base class, which declares what its authors set."""
    found = faults(BASED)
    assert found[0] == "it lacks 1 attribute: text_dim (int)"
    assert faults(BASED.replace("text_dim: int", "text_dim: int = 8"))[:1] == found[1:]
    assert not any("attribute" in each for each in faults(BASED.replace("text_dim: int", "text_dim = 8")))


def test_a_method_that_resembles_one_of_the_base_class_is_never_called(faults: Any) -> None:
    assert faults(BASED)[1:] == [
        "its method init_weight (line 13) is never called: did you mean init_weights?"
    ]
    calls = BASED.replace(
        "        super().__init__()", "        super().__init__()\n        self.init_weight()"
    )
    assert len(faults(calls)) == 1, "the author calls it"
    both = BASED + "\n    def init_weights(self):\n        pass\n"
    assert len(faults(both)) == 1, "the author has both"
    helper = BASED.replace("def init_weight(self)", "def init_weight(self, layer)")
    assert len(faults(helper)) == 1, "a helper with other arguments"


def test_misspelt_and_half_capabilities_are_found_by_the_file(faults: Any) -> None:
    optional = BASED.replace("init_weight(", "shard_plane(").replace("helper(self)", "complete(self, device)")
    optional = optional.replace("text_dim: int", "text_dim: int = 8\n    max_framed = 4")
    assert faults(optional) == [
        "its method shard_plane (line 14) is never used: did you mean shard_plan? Else begin its name with _",
        "its attribute max_framed is never used: did you mean max_frames? Else begin its name with _",
        "its complete is never used: SupportsExperts also needs experts (Sequence[Expert])",
    ]
    used = "self.in_channels = channels, self.shard_plane(), self.complete(0), self.max_framed"
    assert faults(optional.replace("self.in_channels = channels", used)) == []


def test_the_members_in_the_source_are_those_of_the_contract() -> None:
    for kind, contract in COMPONENT_KINDS.items():
        for each in (contract, *(Contract(path) for path in contract.optional)):
            read, imported = source_members(each), members_of(each)
            assert read.keys() == imported.keys(), kind
            for name, member in imported.items():
                assert (member.signature is None) == (read[name].signature is None), (kind, name)
                assert member.signature is None or str(member) == str(read[name])


def test_no_component_that_is_installed_here_is_found_faulty_by_its_source() -> None:
    components = survey().components()
    assert len(components) > 40
    assert [fault for each in components if (fault := file_fault(each))] == []


@pytest.mark.parametrize(
    ("base", "name", "only_raise"),
    [(nn.Module, "torch.nn.Module", set()), (Dataset, "torch.utils.data.Dataset", {"__getitem__"})],
)
def test_what_plain_bases_have_of_the_contracts_is_known(base: type, name: str, only_raise: set[str]) -> None:
    asked = {member for each in COMPONENT_KINDS.values() for member in members_of(each)}
    own = {member for cls in base.__mro__ if cls is not object for member in vars(cls)}
    assert (asked & own) - only_raise == PLAIN_BASES[name]


def test_a_class_whose_bases_are_in_view_names_all_that_it_lacks(faults: Any) -> None:
    assert faults(MODEL) == []
    assert faults(LACKS) == [*SHORT]


@pytest.mark.parametrize(
    "change",
    [
        ("class Blocks(nn.Module)", "from elsewhere import Model\n\nclass Blocks(Model)"),
        ("class Blocks(nn.Module)", "class Blocks(nn.Module, metaclass=Meta)"),
        ("super().__init__()", "super().__init__(); fill(self)"),
        ("super().__init__()", "super().__init__(); self.__dict__.update(text_dim=3)"),
        ("self.in_channels = channels", "vars(self).update(channels)"),
        ("class DiT(Blocks)", "@register\nclass DiT(Blocks)"),
        ("def forward", "def __getattr__(self, name): ...\n\n    def forward"),
        ("class Blocks(nn.Module)", "class Blocks: ...\n\n\nclass Blocks(nn.Module)"),
        ("return latents\n", "return latents\n\nDiT.init_weights = lambda self: None\n"),
        ("return latents\n", "return latents\n\nDiT = wrapped(DiT)\n"),
    ],
)
def test_what_is_not_in_view_is_no_fault(faults: Any, change: tuple[str, str]) -> None:
    old, new = change
    source = LACKS.replace(old, new, 1)
    assert source != LACKS
    assert faults(source) == []


def test_names_given_by_strings_and_dataclass_fields_count(faults: Any) -> None:
    given = 'setattr(model, "init_weights", 1), "text_padding", "out_channels", "text_dim"'
    assert faults(LACKS.replace("return latents", f"return {given}")) == []
    scheduler = "from dataclasses import dataclass\n\n@dataclass\nclass DiT:\n    prediction: str\n"
    assert not any("prediction" in fault for fault in faults(scheduler, "scheduler"))


@pytest.mark.parametrize(
    ("source", "kind", "expected"),
    [
        ("class DiT:\n    ...\n", "predictor", ["it does not derive from torch.nn.Module"]),
        (
            MODEL.replace("timestep, text, text_mask", "timestep"),
            "predictor",
            [
                "its method forward(latents, timestep) (line 13) cannot be called as "
                "forward(latents=, timestep=, text=, text_mask=), as the core calls it"
            ],
        ),
        (
            "from library import Base\n\nclass DiT(Base):\n    def log(self, values): ...\n",
            "tracker",
            ["its method log(values) (line 4) cannot be called as log(step, metrics), as the core calls it"],
        ),
        (
            "from mm_core.contracts import Callback\n\nclass DiT(Callback):\n    def step_endd(self): ...\n",
            "callback",
            ["its method step_endd (line 4) is not an event and is never called: did you mean step_ended?"],
        ),
        (
            "from mm_core.contracts import Callback\n\nclass DiT(Callback):\n    ...\n",
            "callback",
            [
                "none of its methods is an event: the events are run_started, step_ended, validated, sampled,"
                " saved, run_ended"
            ],
        ),
        ("from library import Watching\n\nclass DiT(Watching):\n    ...\n", "callback", []),
        ("def DiT(depth): ...\n", "predictor", []),
        ("class DiT(DiT): ...\n", "predictor", []),
    ],
)
def test_faults_of_classes(faults: Any, source: str, kind: str, expected: list[str]) -> None:
    assert faults(source, kind) == expected


def test_members_of_a_base_of_the_core_count(faults: Any) -> None:
    derived = MODEL.replace("import torch\n", "from mm_core.contracts import PredictorModule\n")
    derived = derived.replace("(torch.nn.Module)", "(PredictorModule)")
    derived = derived.replace("    def init_weights(self): ...\n", "")
    assert faults(derived) == []


def test_a_base_in_another_module_of_the_package_is_in_view(site: Any, faults: Any) -> None:
    site.module("mm_alpha.blocks", LACKS.partition("class DiT")[0])
    assert faults("from .blocks import Blocks\n\n\nclass DiT" + LACKS.partition("class DiT")[2]) == [*SHORT]


def test_validate_reports_what_the_files_show_without_torch(
    site: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site.good("alpha")
    site.module("mm_alpha.model", LACKS)
    quickstart = Path(__file__).parents[2] / "plugins/mm_custom_dit/mm_custom_dit/configs/quickstart.yaml"
    config = tmp_path / "x.yaml"
    lines = quickstart.read_text().splitlines(keepends=True)
    start = lines.index("  predictor:\n")
    end = next(n for n, line in enumerate(lines) if n > start and not line.startswith("    "))
    config.write_text("".join([*lines[:start], "  predictor: {type: alpha/dit}\n", *lines[end:]]))
    assert main(["validate", str(config), "--json"]) == 1
    (fault,) = json.loads(capsys.readouterr().out)["faults"]
    assert fault["what"] == f"DiT does not keep its contract: {'; '.join(SHORT)}"
    assert fault["where"] == (
        f"plugin 'alpha', predictor 'alpha/dit', {site.folder / 'mm_alpha/model.py'}, line 11"
    )
    assert fault["hint"].endswith('the page "Predictor" explains each member')
    site.module("mm_alpha.model", LACKS.replace("class DiT", "class Dit"))
    assert main(["validate", str(config)]) == 1
    assert "the target 'mm_alpha.model:DiT' does not exist" in capsys.readouterr().err
    assert "mm_alpha.model" not in sys.modules
