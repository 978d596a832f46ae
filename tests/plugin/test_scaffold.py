"""`mm plugins new`: its files, its names, and that what it writes is good as it stands."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import sys
import tomllib
from pathlib import Path

import diffusers
import pytest
import torch
import yaml

from mm_core.cli.main import main
from mm_core.config.load import load_config
from mm_core.plugin.hookspecs import COMPONENT_KINDS, KINDS
from mm_core.plugin.registry import Registry, get_registry
from mm_core.plugin.scaffold.new_plugin import new_plugin, template_of
from mm_core.testing.kit import Examination, kit_of
from support.sites import Site, clear_cache

DIFFUSERS = (
    *("SD3Transformer2DModel", "FluxTransformer2DModel", "LTXVideoTransformer3DModel"),
    *("HunyuanVideoTransformer3DModel", "CogVideoXTransformer3DModel", "WanTransformer3DModel"),
    *("Lumina2Transformer2DModel", "SanaTransformer2DModel"),
)


def new(*arguments: str) -> int:
    return main(["plugins", "new", *arguments])


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def installed(site: Site, folder: Path, name: str) -> Registry:
    """The plugins with a new one, as after `pip install -e`."""
    package = name.replace("-", "_")
    (site.folder / package).symlink_to(folder / name / package)
    site.add(name, {package: f"{package}.plugin"})
    clear_cache()
    return get_registry()


def test_every_kind_has_a_template_a_kit_and_a_class() -> None:
    for kind, template in COMPONENT_KINDS.items():
        assert kit_of(kind).checks, kind
        tree = ast.parse(template_of(kind).replace("$package", "a_plugin"))
        assert template.target in {node.name for node in tree.body if isinstance(node, ast.ClassDef)}, kind
        assert ast.get_docstring(tree), kind


def test_one_kind_is_8_files_and_each_further_one_2(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert new("my-dit") == 0
    out = capsys.readouterr().out.splitlines()
    files = sorted(str(path.relative_to(here)) for path in here.rglob("*") if path.is_file())
    assert files == sorted(line.strip() for line in out[1:9])
    assert len(files) == 8 and out[0] == "my-dit: 8 files"
    assert out[9:] == [
        "next:",
        "  cd my-dit && pip install -e '.[dev]'",
        "  pytest",
        "  mm-train --config my_dit/configs/predictor.yaml",
    ]
    assert len((here / "my-dit/my_dit/plugin.py").read_text().splitlines()) <= 12
    for kind in KINDS:
        name = f"one-{kind.replace('_', '-')}"
        assert new(name, "--kind", kind) == 0
        made = [path for path in (here / name).rglob("*") if path.is_file()]
        assert len(made) == 8, kind
        assert len((here / name / name.replace("-", "_") / "plugin.py").read_text().splitlines()) <= 12, kind
    all_kinds = [word for kind in KINDS for word in ("--kind", kind)]
    assert new("all-kinds", *all_kinds) == 0
    assert len([p for p in (here / "all-kinds").rglob("*") if p.is_file()]) == 6 + 2 * len(KINDS)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["My DiT"], ["'My DiT' cannot be the name of a plugin", "my-dit", "`mm plugins new my-dit`"]),
        (["class"], ["'class' cannot be the name of a plugin"]),
        (["9-lives"], ["'9-lives' cannot be the name of a plugin", "beginning with a letter"]),
        (["custom-dit"], ["the name 'custom_dit' is taken by plugin 'custom_dit'", "choose another name"]),
        (["adamw", "--kind", "optimizer"], ["the name 'adamw' is taken by the optimizer core/adamw"]),
        (["json"], ["a Python module named 'json' is installed already"]),
        (["a-b", "--kind", "predictr"], ["invalid choice: 'predictr'", "did you mean 'predictor'"]),
        (["there"], ["there exists already", "nothing is replaced"]),
        (["a-b", "--from-diffusers", "FluxTransformer"], ["no transformer named 'FluxTransformer'", "65"]),
    ],
)
def test_what_cannot_be_made_is_a_readable_error_and_leaves_nothing(
    arguments: list[str], words: list[str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "there").mkdir()
    try:
        code = new(*arguments)
    except SystemExit as usage:  # argparse
        code = int(usage.code or 0)
    error = capsys.readouterr().err
    assert code != 0 and all(word in error for word in words), error
    assert [path.name for path in here.iterdir()] == ["there"]


def test_configs_are_valid_and_carried_by_the_wheel(here: Path, site: Site) -> None:
    new_plugin("all-kinds", COMPONENT_KINDS, get_registry(), here)
    installed(site, here, "all-kinds")
    for kind in KINDS:
        file = here / f"all-kinds/all_kinds/configs/{kind}.yaml"
        load_config(file, ["train.steps=5"])
        used = "type: all_kinds" in file.read_text()
        assert used or kind in ("weight_format", "migration"), kind  # `mm export` and `mm migrate` use them
    project = tomllib.loads((here / "all-kinds/pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["package-data"] == {"all_kinds": ["configs/*.yaml"]}


def test_each_field_of_what_is_written_is_explained(here: Path, site: Site) -> None:
    new_plugin("all-kinds", COMPONENT_KINDS, get_registry(), here)
    registry = installed(site, here, "all-kinds")
    components = [each for each in registry.components() if each.namespace == "all_kinds"]
    fields = [(each.kind, field) for each in components for field in dataclasses.fields(each.config_class())]
    assert len(components) == len(KINDS) and len(fields) > 20
    assert [(kind, field.name) for kind, field in fields if not field.metadata["doc"]] == []


@pytest.mark.slow
def test_what_is_written_keeps_the_contract_of_every_kind(here: Path, site: Site) -> None:
    new_plugin("all-kinds", COMPONENT_KINDS, get_registry(), here)
    registry = installed(site, here, "all-kinds")
    for registered in registry.components():
        if registered.namespace == "all_kinds":
            outcomes = list(Examination(registered, registry, ranks=False))
            assert [(o.check, o.reason) for o in outcomes if o.status == "failed"] == [], registered.kind


@pytest.mark.parametrize("name", DIFFUSERS)
def test_a_frame_has_the_fields_and_arguments_of_the_library_s_class(
    name: str, here: Path, site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    assert new("my-wrap", "--from-diffusers", name) == 0
    text = (here / "my-wrap/my_wrap/predictor.py").read_text()
    config = yaml.safe_load((here / "my-wrap/my_wrap/configs/predictor.yaml").read_text())
    given = config["task"]["predictor"]
    library = getattr(diffusers, name)
    fields = [p for p in inspect.signature(library.__init__).parameters if p != "self"]
    assert [*given] == ["type", *fields]
    for argument in inspect.signature(library.forward).parameters:
        assert argument == "self" or f"{argument}=" in text, argument
    assert "TODO" in text and len(text.splitlines()) <= 65
    assert "self.text_dim = self.config." in text
    assert ("max_frames = 1" in text) == ("2D" in name) == (config["data"]["train"]["num_frames"] == 1)
    installed(site, here, "my-wrap")
    capsys.readouterr()
    assert main(["plugins", "check", "--import"]) == 0, capsys.readouterr().out
    assert main(["validate", str(here / "my-wrap/my_wrap/configs/predictor.yaml")]) == 0
    small = importlib.import_module("my_wrap.predictor")
    (wrapped,) = (each for each in vars(small).values() if getattr(each, "__module__", "") == small.__name__)
    (component,) = (each for each in get_registry().components("predictor") if each.namespace == "my_wrap")
    model = wrapped(**component.component.tiny)
    assert sum(parameter.numel() for parameter in model.parameters()) < 3_000_000
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(torch.nan) if tensor.is_floating_point() else None
    model.init_weights()
    if name == "Lumina2Transformer2DModel":
        assert "self.rope_embedder.freqs_cis = tables.rope_embedder.freqs_cis" in text
    tensors = [*model.named_parameters(), *model.named_buffers()]
    assert [name for name, tensor in tensors if tensor.isnan().any()] == []


@pytest.mark.parametrize(
    ("name", "small"), [("ZImageTransformer2DModel", True), ("ChromaTransformer2DModel", False)]
)
def test_a_class_that_no_usual_fields_make_small_is_never_built_large(
    name: str, small: bool, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Z-Image has 6 billion parameters, and other names for its sizes; Chroma has one more for its width."""
    assert new("my-wrap", "--from-diffusers", name) == 0
    declared, config = (here / "my-wrap/my_wrap" / each for each in ("plugin.py", "configs/predictor.yaml"))
    assert ('tiny={"TODO": "fields of a small instance"}' in declared.read_text()) != small
    assert ("TODO: with small values" in config.read_text()) != small
    assert ('"dim": 32' in declared.read_text()) == small


def test_a_full_disk_leaves_no_part_of_a_plugin_and_the_next_try_works(here, monkeypatch, capsys):
    import resource
    import signal

    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # the limit would cut off compiled modules too
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))  # files end after 64 bytes, as on a full disk
    try:
        assert new("my-dit") == 1
        assert main(["config", "copy", "internvl/1b", "1b.yaml"]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert "mm: error: " in capsys.readouterr().err
    assert list(here.iterdir()) == []
    assert new("my-dit") == 0 and main(["config", "copy", "internvl/1b", "1b.yaml"]) == 0


def test_the_name_of_one_file_plugins_is_refused(here, capsys):
    assert new("local") == 1
    assert "reserved" in capsys.readouterr().err
    assert list(here.iterdir()) == []


def test_a_kind_is_taken_with_hyphens_too(here):
    assert new("my-text", "--kind", "text-encoder") == 0
    assert (here / "my-text/my_text/text_encoder.py").exists()
    assert main(["plugins", "list", "--kind", "text-encoder"]) == 0
