"""build(): nested components first, calls that match the signature, and no hidden errors."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from mm_core.errors import ConfigError, ContractError, PluginError
from mm_core.plugin import ComponentConfig, Registry, build

PARTS = """
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from mm_core import Component, hookimpl
from mm_core.schema.fields import ComponentConfig, Kind, Range


@dataclass(frozen=True)
class LeafConfig:
    size: Annotated[int, Range(ge=1)] = 3

    def __post_init__(self):
        if self.size == 13:
            raise ValueError("size brings bad luck")


@dataclass(frozen=True)
class Section:
    leaf: Annotated[ComponentConfig, Kind("autoencoder")]
    gain: float = 1.0


@dataclass(frozen=True)
class TreeConfig:
    leaf: Annotated[ComponentConfig, Kind("autoencoder")]
    leaves: tuple[Annotated[ComponentConfig, Kind("autoencoder")], ...] = ()
    section: Section | None = None
    spare: Annotated[ComponentConfig, Kind("autoencoder")] = ComponentConfig("autoencoder", "parts/leaf")
    notes: tuple[str, ...] = field(default_factory=lambda: ("a",))


class Leaf:
    def __init__(self, size):
        self.size = size


class Tree:
    def __init__(self, leaf, leaves, section, spare, notes):
        self.parts = (leaf, leaves, section, spare, notes)


class Buggy:
    def __init__(self, size):
        raise TypeError("a bug in the component")


class Sized:
    def __init__(self, width):
        self.width = width


def optimizer(parameters, lr: float = 0.1, *, betas: tuple[float, float] = (0.9, 0.95), options=[1], **rest):
    return (parameters, lr, betas, options)


def by_position(a, /, b=1):
    return a


class Typed:
    def __init__(self, path: Absent, size: int = 1) -> None:
        self.size = size


@hookimpl
def mm_autoencoders():
    config = __name__ + ":LeafConfig"
    yield Component(name="leaf", target=__name__ + ":Leaf", config=config)
    yield Component(name="buggy", target=__name__ + ":Buggy", config=config)
    yield Component(name="width", target=__name__ + ":Sized", config=config)
    yield Component(name="typed", target=__name__ + ":Typed")
    yield Component(name="no_module", target="mm_parts.nowhere:Leaf")
    yield Component(name="needs", target="mm_parts.needy:Leaf")
    yield Component(name="no_name", target=__name__ + ":Leaff")
    yield Component(name="no_inner", target=__name__ + ":Leaf.Inner")
    yield Component(name="no_call", target=__name__ + ":__name__")
    yield Component(name="no_config", target=__name__ + ":Leaf", config=__name__ + ":Leaf")
    yield Component(name="positional", target=__name__ + ":by_position")


@hookimpl
def mm_predictors():
    yield Component(name="tree", target=__name__ + ":Tree", config=__name__ + ":TreeConfig")


@hookimpl
def mm_optimizers():
    yield Component(name="opt", target=__name__ + ":optimizer")
"""


@pytest.fixture
def parts(site: Any) -> Registry:
    site.plugin("parts", PARTS)
    site.module("mm_parts.needy", "import no_such_library")
    return site.registry()  # type: ignore[no-any-return]


def leaf(size: int) -> ComponentConfig:
    return ComponentConfig("autoencoder", "parts/leaf", {"size": size})


@pytest.mark.usefixtures("toys")
def test_nested_components_are_built_wherever_they_stand(parts: Registry) -> None:
    section = parts.resolve("predictor", "tree").config_class().__init__.__globals__["Section"]
    options = {
        "leaf": leaf(1),
        "leaves": (leaf(2), leaf(3)),
        "section": section(leaf(4), gain=2.0),
        "spare": leaf(5),
        "notes": ("x",),
    }
    tree = build("predictor", ComponentConfig("predictor", "parts/tree", options))
    one, (two, three), built_section, five, notes = tree.parts
    assert [part.size for part in (one, two, three, built_section.leaf, five)] == [1, 2, 3, 4, 5]
    assert (built_section.gain, notes) == (2.0, ("x",))
    assert options["section"].leaf == leaf(4)  # the config itself is left as it was


@pytest.mark.usefixtures("toys")
def test_left_out_options_take_their_defaults_and_nested_defaults_are_built(parts: Registry) -> None:
    tree = build("predictor", ComponentConfig("predictor", "tree", {"leaf": leaf(1)}))
    assert tree.parts[3].size == 3
    assert tree.parts[1:3] == ((), None)
    assert tree.parts[4] == ("a",)


@pytest.mark.parametrize(("options", "named"), [({"leef": 1}, "'leef'"), ({}, "'leaf'")])
def test_missing_and_unknown_options_are_named(parts: Registry, options: Any, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build("predictor", ComponentConfig("predictor", "parts/tree", options))
    text = str(caught.value)
    assert text.startswith("predictor 'parts/tree': ") and named in text
    assert "  accepted: leaf, leaves, section, spare, notes\n" in text


def test_a_reference_of_another_kind_is_refused(parts: Registry) -> None:
    with pytest.raises(PluginError, match="'parts/leaf' is an autoencoder, but a predictor is needed here"):
        build("predictor", leaf(1))


def test_a_call_that_does_not_fit_names_the_component_and_the_signature(parts: Registry) -> None:
    with pytest.raises(ContractError) as caught:
        build("autoencoder", ComponentConfig("autoencoder", "parts/width"))
    assert str(caught.value) == (
        "plugin 'parts', autoencoder 'parts/width': the target cannot be called with its config's fields: "
        "missing a required argument: 'width'\n"
        "  accepted: Sized(width)\n"
        "  hint: the fields of config= and the parameters of target= must have the same names"
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [({"size": 13}, "size brings bad luck"), ({"width": 1}, "unexpected keyword argument 'width'")],
)
def test_options_of_a_reference_in_python_that_its_config_refuses(parts: Registry, options, words) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        build("autoencoder", ComponentConfig("autoencoder", "parts/leaf", options))
    assert "autoencoder 'parts/leaf'" in str(caught.value) and "accepted: size" in str(caught.value)


def test_a_bug_inside_a_component_stays_visible(parts: Registry) -> None:
    with pytest.raises(TypeError, match="a bug in the component") as caught:
        build("autoencoder", ComponentConfig("autoencoder", "parts/buggy"))
    assert type(caught.value) is TypeError


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "no_module",
            "the target 'mm_parts.nowhere:Leaf' does not exist: there is no module 'mm_parts.nowhere'",
        ),
        ("no_name", "/mm_parts/plugin.py has no 'Leaff'"),
        (
            "no_inner",
            "'mm_parts.plugin:Leaf.Inner' does not exist: type object 'Leaf' has no attribute 'Inner'",
        ),
        ("no_call", "the target 'mm_parts.plugin:__name__' is not callable: it is str"),
        ("no_config", "the config 'mm_parts.plugin:Leaf' is not a dataclass"),
        ("needs", "ModuleNotFoundError: No module named 'no_such_library'"),
        ("positional", "cannot be used as its config: parameter 'a' cannot be passed by keyword"),
    ],
)
def test_what_a_component_lacks_is_reported_with_its_plugin(
    parts: Registry, name: str, sentence: str
) -> None:
    registered = parts.resolve("autoencoder", name)
    with pytest.raises(PluginError) as caught:
        registered.config_class()
        registered.load_target()
    assert sentence in str(caught.value)
    assert "plugin 'parts'" in str(caught.value)
    assert f"autoencoder 'parts/{name}'" in str(caught.value)


def test_hints_of_missing_names_and_missing_packages(parts: Registry) -> None:
    with pytest.raises(PluginError, match="did you mean 'Leaf'"):
        parts.resolve("autoencoder", "no_name").load_target()
    with pytest.raises(PluginError, match="is the package of 'no_such_library' installed"):
        parts.resolve("autoencoder", "needs").load_target()


def test_without_a_config_the_signature_serves(parts: Registry) -> None:
    cls = parts.resolve("optimizer", "opt").config_class()
    fields = {f.name: f for f in dataclasses.fields(cls)}
    assert list(fields) == ["lr", "betas", "options"]  # `parameters` is the core's to pass
    assert fields["lr"].type is float
    assert fields["betas"].type == tuple[float, float]
    assert fields["options"].type is Any
    assert cls() == cls(lr=0.1, betas=(0.9, 0.95), options=[1])
    assert cls().options is not cls().options
    assert parts.resolve("optimizer", "opt").config_class() is cls


def test_an_annotation_for_type_checkers_only_counts_as_any(parts: Registry) -> None:
    fields = dataclasses.fields(parts.resolve("autoencoder", "typed").config_class())
    assert [(f.name, f.type) for f in fields] == [("path", Any), ("size", Any)]


@pytest.mark.usefixtures("toys")
def test_arguments_of_the_core_go_before_the_fields(parts: Registry) -> None:
    reference = ComponentConfig("optimizer", "parts/opt", {"lr": 0.5})
    assert build("optimizer", reference, ["p"]) == (["p"], 0.5, (0.9, 0.95), [1])


@pytest.mark.usefixtures("toys")
def test_a_mapping_and_a_name_are_checked_and_built(parts: Registry) -> None:
    assert build("autoencoder", {"type": "parts/leaf", "size": 9}).size == 9
    assert build("autoencoder", "leaf").size == 3
    tree = build("predictor", {"type": "tree", "leaf": {"type": "leaf", "size": 2}})
    assert tree.parts[0].size == 2
    with pytest.raises(ConfigError) as caught:
        build("autoencoder", {"type": "leaf", "size": 0, "colour": "red"})
    assert len(caught.value.faults) == 2


def test_the_public_name_is_the_same_function() -> None:
    import mm_core

    assert mm_core.build is build
    assert Path(build.__code__.co_filename).name == "registry.py"
