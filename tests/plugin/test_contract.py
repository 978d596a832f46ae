"""Components that lack members of their contract: one error names all, with the author's file and line."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from mm_core import contracts
from mm_core.contracts import Callback, DatasetBase, PredictorModule, Task, TaskModule, Tracker
from mm_core.diffusion.flow_match import FlowMatch
from mm_core.errors import ContractError
from mm_core.plugin.checks.contract import check_object, class_faults, members_of, object_faults
from mm_core.plugin.checks.optional import uses
from mm_core.plugin.hookspecs import COMPONENT_KINDS
from mm_core.plugin.registry import survey

CONV = """
import torch

from mm_core import Component, hookimpl


class ConvPredictor(torch.nn.Module):
    def __init__(self, channels: int = 12) -> None:
        super().__init__()
        self.in_channels = channels
        self.patch_size = [1, 2, 2]
        self.conv = torch.nn.Conv3d(channels, channels, 3, padding=1)

    def forward(self, latents, timestep):
        return self.conv(latents)


@hookimpl
def mm_predictors():
    return [Component(name="conv", target="conv:ConvPredictor")]
"""


PADDING = "Literal['masked'] | tuple[Literal['fixed'], int]"


class Good(nn.Module):
    text_padding = "masked"
    patch_size = (1, 2, 2)
    in_channels = out_channels = 4
    text_dim = 8

    def forward(self, latents, timestep, text, text_mask, **conditions):
        return latents

    def init_weights(self) -> None:
        """Nothing to initialise."""


def without_lines(faults: list[str]) -> list[str]:
    """Faults without the places of methods: classes made by `type` and lambdas have no lines of their own."""
    return [re.sub(r" \(([^()]*, )?line \d+\)", "", fault) for fault in faults]


def like(**changes: object) -> type:
    """A class as `Good` with other members; None takes one away."""
    members = {name: value for name, value in vars(Good).items() if not name.startswith("__")} | changes
    return type("Mine", (nn.Module,), {name: value for name, value in members.items() if value is not None})


def test_every_kind_has_a_contract_whose_protocol_is_there() -> None:
    for kind, contract in COMPONENT_KINDS.items():
        assert members_of(contract) or contract.base == contract.protocol, kind
        assert (Path(__file__).parents[2] / f"docs/kinds/{kind}.md").is_file()


def test_no_component_that_is_installed_here_is_found_faulty() -> None:
    checked = 0
    for registered in survey().components():
        target = registered.load_target()
        if isinstance(target, type):
            assert class_faults(registered.kind, target) == [], registered.qualified
            checked += 1
    assert checked > 30
    assert object_faults("predictor", Good()) == []


@pytest.mark.parametrize(
    ("changes", "faults"),
    [
        ({"init_weights": None}, ["it lacks 1 method: init_weights()"]),
        (
            {"text_padding": None, "text_dim": None},
            [f"it lacks 2 attributes: text_padding ({PADDING}), text_dim (int)"],
        ),
        ({"patch_size": (2, 2)}, ["its patch_size is (2, 2), not tuple[int, int, int]"]),
        ({"patch_size": [1, 2, 2]}, ["its patch_size is [1, 2, 2], not tuple[int, int, int]"]),
        ({"in_channels": True}, ["its in_channels is True, not int"]),
        (
            {"text_padding": ("fixed", "n")},
            [f"its text_padding is ('fixed', 'n'), not {PADDING}"],
        ),
        ({"text_padding": ("fixed", 512)}, []),
        ({"text_padding": "mask"}, [f"its text_padding is 'mask', not {PADDING}"]),
        (
            {"forward": lambda self, x, timestep, text, text_mask: x},
            [
                "its method forward(x, timestep, text, text_mask) cannot be called as"
                " forward(latents=, timestep=, text=, text_mask=), as the core calls it"
            ],
        ),
        (
            {"forward": lambda self, latents: latents},
            [
                "its method forward(latents) cannot be called as"
                " forward(latents=, timestep=, text=, text_mask=), as the core calls it"
            ],
        ),
        (
            {"init_weights": lambda self, std: None},
            ["its method init_weights(std) cannot be called as init_weights(), as the core calls it"],
        ),
        ({"init_weights": 3}, ["it lacks 1 method: init_weights()"]),
        ({"forward": lambda self, latents, timestep, text, text_mask, pooled, *, fps: latents}, []),
    ],
)
def test_what_a_predictor_lacks_is_named(changes: dict[str, object], faults: list[str]) -> None:
    assert without_lines(object_faults("predictor", like(**changes)())) == faults


def test_an_object_of_another_base_is_that_alone() -> None:
    assert object_faults("predictor", object()) == ["it does not derive from torch.nn.Module"]
    assert object_faults("optimizer", (1, 2)) == ["it does not derive from torch.optim.Optimizer"]
    assert object_faults("optimizer", torch.optim.SGD([torch.ones(1)])) == []


def test_an_optimizer_needs_a_step_of_its_own_also_after_torch_has_wrapped_its_class() -> None:
    class Mine(torch.optim.Optimizer):
        def update(self): ...

    assert class_faults("optimizer", Mine) == ["it lacks 1 method: step()"]
    made = Mine([torch.ones(1)], {})
    assert object_faults("optimizer", made) == ["it lacks 1 method: step()"]


def test_a_length_that_is_no_whole_number_is_a_fault() -> None:
    class Long:
        def __len__(self):
            return 2.0

        def __getitem__(self, index):
            return {}

        def collate(self, samples): ...

    assert object_faults("dataset", Long()) == [
        "its length is no whole number of 0 or more: 'float' object cannot be interpreted as an integer"
    ]


def test_methods_that_are_only_the_protocol_s_own_are_missing() -> None:
    """A class that derives from a protocol inherits methods that return None."""

    class Mine(Tracker):
        def log(self, step, metrics): ...

    assert class_faults("tracker", Mine) == ["it lacks 2 methods: clips(step, clips, folder), close(ending)"]

    class Half(nn.Module, Task):
        trainable, frozen = ("net",), ()

    (fault,) = class_faults("task", Half)
    assert fault.startswith("it lacks 7 methods: weight(batch), ")
    methods = [name for name, value in vars(Task).items() if inspect.isfunction(value) and name[0] != "_"]
    assert len(methods) == 7


@pytest.mark.parametrize(
    ("members", "faults"),
    [
        ({}, ["it has neither losses(batch) nor loss(inputs): write one of them"]),
        ({"losses": lambda self, batch: None}, []),
        ({"losses": lambda self, batch, rng: None}, []),
        ({"losses": lambda self, batch, *, rng=None: None}, []),
        ({"loss": lambda self, inputs: None}, []),
        (
            {"losses": lambda self: None},
            ["its method losses() cannot be called as losses(batch), as the core calls it"],
        ),
        (
            {"losses": lambda self, batch, noise, rng: None},
            [
                "its method losses(batch, noise, rng) cannot be called as losses(batch, rng=),"
                " as the core calls it"
            ],
        ),
        (
            {"losses": lambda self, batch: None, "weight": lambda self: 1.0},
            ["its method weight() cannot be called as weight(batch), as the core calls it"],
        ),
    ],
)
def test_a_base_class_leaves_the_loss_to_the_author_alone(members: dict[str, Any], faults: list[str]) -> None:
    assert without_lines(class_faults("task", type("Mine", (TaskModule,), members))) == faults


def test_a_dataset_has_one_way_to_read_a_sample() -> None:
    length = {"__len__": lambda self: 1}
    for way in ("__getitem__", "sample_at"):
        assert class_faults("dataset", type("Mine", (DatasetBase,), {**length, way: lambda *_: {}})) == []
    assert class_faults("dataset", type("Mine", (DatasetBase,), {})) == [
        "it lacks 1 method: __len__()",
        "it has neither __getitem__(index) nor sample_at(index, rng): write one of them",
    ]


def test_a_base_class_has_honest_defaults_of_a_predictor() -> None:
    class Mine(PredictorModule):
        def forward(self, latents, timestep, text, text_mask): ...

    assert object_faults("predictor", Mine()) == ["it lacks 2 attributes: in_channels (int), text_dim (int)"]
    made = Mine()
    made.in_channels, made.text_dim = 4, 8
    assert object_faults("predictor", made) == []
    assert (made.out_channels, made.text_padding, made.patch_size) == (4, "masked", (1, 1, 1))
    made.out_channels = 5
    assert made.out_channels == 5


class Rows:
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, object]:
        return {}

    def collate(self, samples):
        return samples


def rows(**members: object) -> type:
    return type("Mine", (Rows,), {**members, "__module__": "alone"})  # whose code uses none of them


def never(name: str, meant: str) -> str:
    return f"its method {name} is never used: did you mean {meant}? Else begin its name with _"


@pytest.mark.parametrize(
    ("kind", "cls", "found"),
    [
        ("dataset", rows(lenghts=lambda self: None), [never("lenghts", "lengths")]),
        ("dataset", rows(class_name=lambda self: ()), [never("class_name", "class_names")]),
        ("dataset", rows(sample_ad=lambda self, index, rng: {}), [never("sample_ad", "sample_at")]),
        ("dataset", rows(lenght=lambda self, index: 3), []),  # a helper with other arguments
        ("dataset", rows(size=lambda self: 3, columns=lambda self: ()), []),
        (
            "dataset",
            rows(source_of=lambda self, row, size, rng: None),
            ["its source_of is never used: SupportsSources also needs num_sources()"],
        ),
        (
            "dataset",
            rows(row_sizes=lambda self: None, epoch_rows=lambda self, epoch: None),
            [
                "its row_sizes and epoch_rows are never used:"
                " SupportsRowSizes also needs sample_of(row, size, rng)"
            ],
        ),
        ("predictor", like(shard_plans=lambda self: None), [never("shard_plans", "shard_plan")]),
        (
            "predictor",
            like(max_frame=8),
            ["its attribute max_frame is never used: did you mean max_frames? Else begin its name with _"],
        ),
        ("predictor", like(max_frame="8"), []),  # another type
        ("predictor", like(_max_frame=8), []),
        (
            "predictor",
            like(image_dim=16),
            ["its image_dim is never used: SupportsFrames also needs frame_choices"],
        ),
    ],
)
def test_what_resembles_a_capability_or_is_half_of_one_is_never_used(kind, cls, found) -> None:
    """Where it switches the capability off in silence."""
    faults = without_lines(object_faults(kind, cls()))
    assert faults == [] if not found else faults[0].startswith(found[0]) and len(faults) == 1, faults


def test_an_authors_own_members_are_not_held_against_the_capabilities() -> None:
    class Mine(Rows):
        def lengt(self):
            return 3

        def num_sources(self):
            return 2

        def __getitem__(self, index):
            return {"length": self.lengt(), "sources": self.num_sources()}

    assert class_faults("dataset", Mine) == object_faults("dataset", Mine()) == []


def test_code_anywhere_in_its_package_uses_a_member_also_by_its_class(tmp_path) -> None:
    (tmp_path / "mine" / "tools").mkdir(parents=True)
    (path := tmp_path / "mine" / "data" / "rows.py").parent.mkdir()
    path.write_text("class Mine:\n    ...\n")
    (tmp_path / "mine" / "tools" / "stats.py").write_text("print(data.rows.Mine.most)\n")
    assert uses(str(path), "mine.data.rows", "most")
    assert not uses(str(path), "rows", "most") and not uses(str(path), "mine.data.rows", "mos")


def test_names_that_resemble_an_event_are_misspelt() -> None:
    class Mine(Callback):
        def step_end(self, step, metrics): ...

        def sum_of(self, rows): ...

    line = inspect.getsourcelines(Mine.step_end)[1]
    assert class_faults("callback", Mine) == [
        f"its method step_end (line {line}) is not an event and is never called: did you mean step_ended?"
    ]

    class Foreign(Callback):
        def on_steps_end(self, step, metrics): ...

        def on_log(self, metrics): ...

    assert without_lines(class_faults("callback", Foreign)) == [
        "its method on_log is not an event and is never called: the events are run_started, step_ended,"
        " validated, sampled, saved, run_ended",
        "its method on_steps_end is not an event and is never called: did you mean step_ended?",
    ]

    class Wrong(Callback):
        def saved(self, step): ...

    (fault,) = without_lines(class_faults("callback", Wrong))
    assert fault == "its method saved(step) cannot be called as saved(step, path), as the core calls it"


def test_a_callback_without_any_event_does_nothing() -> None:
    class Mine(Callback):
        def after_validation(self, step, metrics): ...

    fault = (
        "none of its methods is an event: the events are run_started, step_ended, validated, sampled, saved,"
        " run_ended"
    )
    assert class_faults("callback", Mine) == object_faults("callback", Mine()) == [fault]

    class Derived(Mine):
        def saved(self, step, path): ...

    class Again(Derived):
        def other(self): ...

    assert class_faults("callback", Derived) == class_faults("callback", Again) == []


def test_a_module_without_a_forward_lacks_it() -> None:
    (fault,) = object_faults("predictor", like(forward=None)())
    assert fault == "it lacks 1 method: forward(latents, timestep, text, text_mask, conditions)"


def test_methods_may_be_static_or_a_class_s_or_an_object_s_own() -> None:
    class Static:
        @staticmethod
        def factor(step): ...

    class OfClass:
        @classmethod
        def factor(cls, step): ...

    class Own:
        def __init__(self) -> None:
            self.factor = lambda step: 1.0

    class Wrapper:
        def __getattr__(self, name: str) -> Any:
            return getattr(Static(), name)

    for made in (Static(), OfClass(), Own(), Wrapper()):
        assert object_faults("lr_schedule", made) == []
    assert class_faults("lr_schedule", Static) == class_faults("lr_schedule", OfClass) == []

    class Short:
        @staticmethod
        def factor(): ...

    for found in (class_faults("lr_schedule", Short), object_faults("lr_schedule", Short())):
        assert without_lines(found) == [
            "its method factor() cannot be called as factor(step), as the core calls it"
        ]


def test_a_compiled_model_is_no_other_than_the_model() -> None:
    assert object_faults("predictor", torch.compile(Good())) == []


def test_properties_are_not_asked_before_a_run_begins() -> None:
    def early(self):
        raise RuntimeError("there is no optimizer yet")

    assert object_faults("predictor", like(text_dim=property(early))()) == []


@pytest.fixture
def conv(tmp_path: Path, tiny: Path) -> Iterator[Path]:
    """A YAML with the predictor of CONV, which lacks half of what it must have."""
    (tmp_path / "conv.py").write_text(CONV)
    config: dict[str, Any] = yaml.safe_load(tiny.read_text())
    config["plugins"] = {"path": ["conv.py"]}
    config["task"]["predictor"] = {"type": "local/conv"}
    config["run"]["dir"] = str(tmp_path / "runs")
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(config))
    yield tmp_path / "x.yaml"


def test_a_dry_run_names_all_that_is_missing_at_once(conv: Path, tmp_path: Path, mm: Any) -> None:
    done = mm("train", "--config", conv, "--dry-run")
    assert done.code == 1 and "Traceback" not in done.err
    words = [line.strip() for line in done.err.splitlines()]
    assert words == [
        f"mm: error: plugin 'local', predictor 'local/conv', {tmp_path}/conv.py, line 7: "
        "ConvPredictor does not keep its contract: it lacks 1 method: init_weights(); "
        "its method forward(latents, timestep) (line 14) cannot be called as "
        "forward(latents=, timestep=, text=, text_mask=), as the core calls it; "
        f"it lacks 3 attributes: text_padding ({PADDING}), out_channels (int), text_dim (int); "
        "its patch_size is [1, 2, 2], not tuple[int, int, int]",
        "accepted: mm_core.contracts.Predictor",
        'hint: `python -m pydoc mm_core.contracts.Predictor` or the page "Predictor" explains each member',
    ]


def test_check_holds_classes_against_their_contract(conv: Path, tmp_path: Path, mm: Any) -> None:
    done = mm("plugins", "check", "--import", "--path", tmp_path / "conv.py")
    assert done.code == 1
    (line,) = [line for line in done.out.splitlines() if line.startswith("error")]
    assert "ConvPredictor does not keep its contract: it lacks 1 method: init_weights(); " in line
    assert f"{tmp_path}/conv.py, line 7: " in line and 'the page "Predictor" explains each' in line


def test_every_capability_belongs_to_a_kind() -> None:
    """A component is checked against those that it has, and the page of its kind lists them."""
    known = {path for contract in COMPONENT_KINDS.values() for path in contract.optional}
    public = {f"mm_core.contracts:{name}" for name in contracts.__all__ if name.startswith("Supports")}
    assert len(public) > 15 and public <= known


def test_import_finds_all_that_the_files_show(conv: Path, tmp_path: Path, mm: Any) -> None:
    done = mm("plugins", "check", "--path", tmp_path / "conv.py")
    imported = mm("plugins", "check", "--import", "--path", tmp_path / "conv.py")
    (line,) = [line for line in done.out.splitlines() if line.startswith("error")]
    assert line in imported.out.splitlines() and "attributes" in line


CALLBACKS = """
from mm_core import Component, hookimpl
from mm_core.contracts import Callback


class Misspelt(Callback):
    def validate(self, step, metrics):
        raise AssertionError


class Short(Callback):
    def validated(self, metrics):
        raise AssertionError


@hookimpl
def mm_callbacks():
    return [Component("misspelt", "watching:Misspelt"), Component("short", "watching:Short")]
"""


def test_a_dry_run_checks_components_that_a_plan_does_not_build(tiny: Path, tmp_path: Path, mm: Any) -> None:
    (tmp_path / "watching.py").write_text(CALLBACKS)
    config: dict[str, Any] = yaml.safe_load(tiny.read_text())
    config["plugins"] = {"path": ["watching.py"]}
    config["callbacks"] = [{"type": "local/misspelt"}, {"type": "local/short"}]
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(config))
    done = mm("train", "--config", tmp_path / "x.yaml", "--dry-run")
    assert done.code == 1 and "Traceback" not in done.err
    texts = {
        6: "its method validate (line 7) is not an event",
        11: "its method validated(metrics) (line 12) cannot be called as validated(step, metrics)",
    }
    for number, words in texts.items():
        assert f"{tmp_path}/watching.py, line {number}: " in done.err and words in done.err


def test_a_class_of_a_library_is_placed_where_it_was_made() -> None:
    def make() -> nn.Module:
        return nn.Linear(2, 2)

    with pytest.raises(ContractError) as caught:
        check_object("predictor", make(), make, "plugin 'x', predictor 'x/y'")
    line = inspect.getsourcelines(make)[1]
    assert caught.value.where == f"plugin 'x', predictor 'x/y', {__file__}, line {line}"
    assert caught.value.what.startswith(
        "Linear does not keep its contract: it lacks 1 method: init_weights()"
    )


class Tokens(FlowMatch):
    def for_tokens(self) -> FlowMatch:
        return self


def test_a_capability_is_held_against_its_protocol_where_a_component_has_it() -> None:
    assert object_faults("predictor", like(condition_shapes={"pooled": (8,)}, max_frames=1)()) == []
    assert object_faults("predictor", like(condition_shapes=["pooled"], max_frames="one")()) == [
        "its condition_shapes is ['pooled'], not Mapping[str, tuple[int | None, ...]]",
        "its max_frames is 'one', not int",
    ]
    line = inspect.getsourcelines(Tokens.for_tokens)[1]
    fault = (
        f"its method for_tokens() (line {line}) cannot be called as for_tokens(tokens), as the core calls it"
    )
    assert object_faults("scheduler", Tokens()) == class_faults("scheduler", Tokens) == [fault]
    assert object_faults("scheduler", FlowMatch()) == []


def test_conditions_that_a_forward_needs_are_no_fault_of_its_class() -> None:
    def forward(self, latents, timestep, text, text_mask, pooled, *, guidance): ...

    assert class_faults("predictor", like(forward=forward)) == []


def test_half_a_capability_is_no_fault() -> None:
    """`experts` or `truncated` alone may mean something else: the core does not use them."""

    class Half(FlowMatch):
        def truncated(self) -> None: ...

    assert object_faults("scheduler", Half()) == []


FLOPS = (
    "its method module_flops(x, timestep, text) cannot be called as module_flops(latents=, timestep=, text=),"
    " as the core calls it"
)


@pytest.mark.parametrize(
    ("changes", "faults"),
    [
        ({"module_flops": lambda self, latents, timestep, text: ()}, []),
        ({"module_flops": lambda self, latents, timestep, text, pooled: ()}, []),
        ({"module_flops": lambda self, x, timestep, text: ()}, [FLOPS]),
        (
            {"shard_plan": lambda self, world: None},
            ["its method shard_plan(world) cannot be called as shard_plan(), as the core calls it"],
        ),
        ({"experts": nn.Linear(2, 2)}, []),  # experts of a block, which no timestep chooses
        (
            {"experts": (), "complete": lambda self: None, "forward": lambda self, expert=None, **_: None},
            ["its method complete() cannot be called as complete(device), as the core calls it"],
        ),
        (
            {
                "experts": (),
                "complete": lambda self, device: None,
                "forward": lambda self, latents, timestep, text, text_mask: latents,
            },
            [
                "its method forward(latents, timestep, text, text_mask) cannot be called as"
                " forward(latents=, timestep=, text=, text_mask=, expert=), as the core calls it"
            ],
        ),
        ({"weights_from": "model.pt"}, ["its weights_from is 'model.pt', not mm_core.contracts"]),
    ],
)
def test_a_predictor_s_capabilities_are_held_against_their_protocols(
    changes: dict[str, object], faults: list[str]
) -> None:
    found = without_lines(object_faults("predictor", like(**changes)()))
    assert len(found) == len(faults)
    for sentence, wanted in zip(found, faults, strict=True):
        assert sentence.startswith(wanted)
