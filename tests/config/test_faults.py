"""Every error contains its place, what was found, what is accepted, and what was probably meant."""

from __future__ import annotations

import pytest

from mm_core.errors import ConfigError


def test_a_good_config_has_every_default_filled_and_qualified_types(place):
    config = place.load()
    toy = config.task.options["predictor"]
    assert (config.task.type, toy.type, config.engine.type) == (
        "core/text_to_video",
        "local/toy",
        "core/fsdp2",
    )
    assert toy.options["depth"] == 2 and toy.options["patch"] == (1, 2, 2)
    assert toy.options["reader"].type == "core/pyav"
    assert toy.options["reader"].options["max_pixels"] == 4096 * 4096
    assert config.engine.options["reduce_dtype"] == "fp32"
    assert config.optimizer.options["betas"] == (0.9, 0.999)
    assert config.task.options["autoencoder"].options == {"spatial": 2, "temporal": 1}


def test_five_planted_mistakes_are_all_reported_in_line_order_with_what_was_meant(place):
    place.edit(
        ("    depth: 2", "    depth: 2\n    patchs: [1, 2, 2]"),
        ("type: flow_match", "type: flow_mach"),
        ("num_frames: 8", "num_frames: eight"),
        ("steps: 10", "setps: 10"),
    )
    place.write("run.yaml", place.run.read_text().replace("height: 16", "height: 0"))
    assert place.faults() == [
        "run.yaml:8: task.predictor.patchs: predictor 'local/toy' has no key 'patchs'\n"
        "  accepted: depth, width, rate, name, bias, act, blocks, patch, sizes, scale, folder, extra, "
        "layers, inner, reader\n"
        "  hint: did you mean 'patch'?",
        "run.yaml:11: task.scheduler.type: no scheduler is named 'flow_mach'\n"
        "  accepted: core/flow_match, diffusers/schedule, wan/flow_match\n"
        "  hint: did you mean 'flow_match'?",
        "run.yaml:13: data.train.num_frames: found 'eight', a string\n  accepted: an integer >= 1",
        "run.yaml:13: data.train.height: found 0, an integer\n  accepted: an integer >= 1",
        "run.yaml:15: train.setps: unknown key 'setps'\n"
        "  accepted: steps, epochs, micro_batch_size, global_batch_size, clip_grad_norm, adapters,"
        " also_train, base_dtype, freeze, parameter_groups, decay_norms_and_biases, non_finite, spike,"
        " overfit_one_batch\n"
        "  hint: did you mean 'steps'?",
    ]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("width: 8.0", "width: found 8.0, a number\n  accepted: an integer"),
        ("width: true", "width: found True, a boolean\n  accepted: an integer"),
        ("width: '8'", "width: found '8', a string\n  accepted: an integer"),
        ("width: 1:30", "width: found '1:30', a string\n  accepted: an integer"),
        ("width: 010", "width: found '010', a string\n  accepted: an integer"),
        ("width:", "width: found nothing (null)\n  accepted: an integer"),
        ("width: {a: 1}", "width: found {'a': 1}, a mapping\n  accepted: an integer"),
        ("width: 7", "width: width 7 is odd"),
        ("depth: 65", "depth: found 65, an integer\n  accepted: an integer >= 1 and <= 64"),
        ("rate: fast", "rate: found 'fast', a string\n  accepted: a number"),
        ("rate: nan", "rate: found 'nan', a string\n  accepted: a number"),
        ("rate: true", "rate: found True, a boolean\n  accepted: a number"),
        ("bias: 1", "bias: found 1, an integer\n  accepted: true or false"),
        ("bias: 'no'", "bias: found 'no', a string\n  accepted: true or false"),
        ("name: 3", "name: found 3, an integer\n  accepted: a string\n  hint: put it in quotes"),
        ("name: [a]", "name: found ['a'], a list\n  accepted: a string"),
        ("act: glu", "act: found 'glu', a string\n  accepted: relu, gelu\n  hint: did you mean 'gelu'?"),
        ("act: 1", "act: found 1, an integer\n  accepted: relu, gelu"),
        (
            "blocks: atuo",
            "blocks: found 'atuo', a string\n  accepted: auto or a list, each a string\n"
            "  hint: did you mean 'auto'?",
        ),
        ("blocks: [a, 3]", "blocks.1: found 3, an integer\n  accepted: a string\n  hint: put it in quotes"),
        (
            "patch: [1, 2]",
            "patch: found 2 values: [1, 2], a list\n"
            "  accepted: a list of 3: an integer, an integer, an integer",
        ),
        (
            "patch: 2",
            "patch: found 2, an integer\n  accepted: a list of 3: an integer, an integer, an integer",
        ),
        ("patch: [1, 2, x]", "patch.2: found 'x', a string\n  accepted: an integer"),
        ("sizes: [1, [2]]", "sizes.1: found [2], a list\n  accepted: an integer"),
        ("scale: big", "scale: found 'big', a string\n  accepted: a number or null"),
        ("folder: 3", "folder: found 3, an integer\n  accepted: a path or null"),
        ("extra: 3", "extra: found 3, an integer\n  accepted: a mapping of keys to values"),
        ("layers: {a: 1}", "layers.a: found 'a', a string\n  accepted: an integer"),
        ("layers: {1: a}", "layers.1: found 'a', a string\n  accepted: a number"),
        ("inner: 3", "inner: found 3, an integer\n  accepted: a mapping of keys to values"),
        (
            "inner: {lft: 3}",
            "inner.lft: unknown key 'lft'\n  accepted: left, right\n  hint: did you mean 'left'?",
        ),
        ("inner: {left: x}", "inner.left: found 'x', a string\n  accepted: an integer"),
        (
            "reader: [pyav]",
            "reader: found ['pyav'], a list\n  accepted: a video_reader (a name, or a mapping with type:)",
        ),
        (
            "reader: {type: 3}",
            "reader.type: found 3, an integer as the type\n"
            "  accepted: type: core/decord, core/pyav, core/torchcodec",
        ),
        (
            "reader: {type: decord, max_pixel: 3}",
            "reader.max_pixel: video_reader 'core/decord' has no key 'max_pixel'\n"
            "  accepted: max_pixels\n  hint: did you mean 'max_pixels'?",
        ),
        (
            "reader: adamw",
            "reader: no video_reader is named 'adamw'\n  accepted: core/decord, core/pyav, core/torchcodec\n"
            "  hint: 'adamw' is an optimizer, not a video_reader",
        ),
    ],
)
def test_a_wrong_value_is_located_at_its_key_with_what_is_accepted(place, line, fault):
    place.edit(("    depth: 2", f"    {line}" if line.startswith("depth") else f"    depth: 2\n    {line}"))
    number = 7 if line.startswith("depth") else 8
    assert place.fault() == f"run.yaml:{number}: task.predictor.{fault}"


def test_a_missing_component_name_lists_the_components_and_the_key_that_was_meant(place):
    place.edit(("type: bytes", "tpye: bytes"))
    assert place.fault() == (
        "run.yaml:9: task.text_encoder: the key 'type' is missing\n"
        "  accepted: type: core/bytes, core/hf_text, diffusers/text, wan/umt5\n"
        "  hint: is 'tpye' a misspelt 'type'?"
    )


@pytest.mark.parametrize(
    ("old", "new", "hint"),
    [
        ("type: bytes", "name: bytes", "'name': this key is 'type' here"),
        ("type: bytes", "model_id: a/b", "'model_id': this key is 'from_pretrained' here"),
        ("type: bytes", "model_id: t5", "'model_id': this key is 'type' here"),
        ("type: bytes", "type: hf_text, model_id: a/b", "this key is 'from_pretrained' here"),
        ("micro_batch_size: ", "batch_size: ", "this key is 'micro_batch_size' here"),
    ],
)
def test_a_key_that_other_tools_have_gets_its_name_here(place, old, new, hint):
    place.edit((old, new))
    assert any(fault.endswith(f"\n  hint: {hint}") for fault in place.faults())


def test_missing_sections_are_faults_of_the_file(place):
    place.write("run.yaml", "run: {name: x}\ninculde: [a.yaml]\n")
    assert place.faults() == [
        "run.yaml:1: the key 'task' is missing\n  accepted: task: a task (a name, or a mapping with type:)",
        "run.yaml:1: the key 'data' is missing\n  accepted: data: a mapping of keys to values",
        "run.yaml:1: the key 'train' is missing\n  accepted: train: a mapping of keys to values",
        "run.yaml:2: inculde: unknown key 'inculde'\n"
        "  accepted: run, task, data, train, engine, optimizer, lr_schedule, init_from, ema, validation,"
        " checkpoint, log, profile, callbacks, plugins\n"
        "  hint: did you mean 'include'?",
    ]


def test_a_batch_that_does_not_divide_is_a_fault_at_its_key(place):
    assert place.fault("train.micro_batch_size=3") == (
        "run.yaml:16: train.global_batch_size: global_batch_size 8 is not a multiple of micro_batch_size 3"
    )


def test_a_bug_in_a_plugins_own_check_is_a_fault_and_not_a_traceback(place):
    fault = place.fault("task.predictor.name=bug")
    assert fault.startswith("run.yaml:5: task.predictor: mm_local_")
    assert "ToyConfig cannot be created: KeyError: 'lost'\n  hint: this is a bug in the plugin" in fault


def test_a_component_of_a_plugin_that_failed_to_load_carries_the_plugins_error(place):
    place.write("toy.py", "import nothing_of_this_name\n")
    broken, unknown = place.faults()
    assert broken.startswith(
        "run.yaml:2: plugins.path: import of toy.py failed: ModuleNotFoundError: "
        "No module named 'nothing_of_this_name'"
    )
    assert unknown.startswith("run.yaml:6: task.predictor.type: no predictor is named 'toy'")


def test_a_config_class_that_cannot_be_imported_names_its_plugin(place):
    place.write("toy.py", (place.folder / "toy.py").read_text().replace("toy:ToyConfig", "toy:ToyConfg"))
    fault = place.fault()
    assert fault.startswith("run.yaml:6: task.predictor.type: plugin 'local' (toy.py sha256:")
    assert "predictor 'local/toy': the config 'toy:ToyConfg' does not exist" in fault
    assert "has no 'ToyConfg': did you mean 'ToyConfig'?" in fault
    assert fault.endswith("hint: correct config= of the component")


def test_annotations_that_do_not_resolve_are_a_fault(place):
    text = (place.folder / "toy.py").read_text().replace("left: int = 1", "left: 'Nowhere' = 1")
    place.write("toy.py", text)
    fault = place.fault("task.predictor.inner={left: 2}")
    assert fault.startswith(
        "override 'task.predictor.inner={left: 2}': task.predictor.inner: the annotations of"
    )
    assert "Inner cannot be resolved: name 'Nowhere' is not defined" in fault


def test_a_list_of_components_is_checked_one_by_one(place):
    place.edit(
        (
            "train:\n  steps",
            "log: {trackers: [tensorboard, {type: jsonl, x: 1}, tenserboard]}\ntrain:\n  steps",
        )
    )
    first, second = place.faults()
    assert first.startswith(
        "run.yaml:13: log.trackers.1.x: tracker 'core/jsonl' has no key 'x'\n  accepted: no keys"
    )
    assert second.startswith("run.yaml:13: log.trackers.2: no tracker is named 'tenserboard'")
    assert "did you mean 'tensorboard'" in second


def test_numbers_are_read_as_numbers(predictor):
    options = predictor("rate=1e-5", "scale=3", "width=1_000", "layers={1: 2, 16: .5}")
    assert (options["rate"], options["scale"], options["width"]) == (1e-5, 3.0, 1000)
    assert type(options["scale"]) is float and options["layers"] == {1: 2.0, 16: 0.5}
    assert predictor("rate='1e-3'")["rate"] == 1e-3


def test_an_alias_and_a_qualified_name_are_the_same_component(place):
    plain = place.load().task
    for name in ("old_toy", "local/toy", "local/old_toy"):
        place.edit(("    type: toy", f"    type: {name}"))
        assert place.load().task == plain


def test_a_component_without_config_is_checked_against_its_signature(place):
    place.edit(("    type: toy", "    type: bare"))
    bare = place.load().task.options["predictor"]
    assert bare.options == {"depth": 2, "rate": 0.5}  # `act` defaults to what no YAML can hold
    assert "task.predictor.rte: predictor 'local/bare' has no key 'rte'" in place.fault(
        "task.predictor.rte=3"
    )
    assert "task.predictor.depth: found 'x'" in place.fault("task.predictor.depth=x")


def test_leaving_out_the_type_of_a_field_with_a_default_component_means_that_one(place):
    place.edit(("train:\n  steps", "optimizer: {lr: 0.5}\ntrain:\n  steps"))
    optimizer = place.load().optimizer
    assert (optimizer.type, optimizer.options["lr"], optimizer.options["eps"]) == ("core/adamw", 0.5, 1e-8)
    assert place.load("engine.param_dtype=bf16").engine.options["param_dtype"] == "bf16"


def test_the_error_of_several_faults_counts_and_lists_them(place):
    with pytest.raises(ConfigError) as caught:
        place.load("train.setps=1", "run.nam=x")
    lines = str(caught.value).splitlines()
    assert lines[0] == f"{place.run}: 2 errors in the config"
    assert sum("unknown key" in line for line in lines) == 2


FP16 = "fp16 is not supported here"


@pytest.mark.parametrize(
    ("dtype", "hint"),
    [
        ("fp16", FP16),
        ("float16", FP16),
        ("half", FP16),
        ("torch.float16", FP16),
        ("bfloat16", "did you mean 'bf16'?"),
        ("torch.float32", "did you mean 'fp32'?"),
        ("bf61", "did you mean 'bf16'?"),
    ],
)
def test_a_dtype_is_not_taken_for_another_that_looks_like_it(place, dtype, hint):
    found = place.fault(f"engine.reduce_dtype={dtype}")
    assert f"engine.reduce_dtype: found '{dtype}', a string" in found
    assert found.endswith(f"  accepted: fp32, bf16 or null\n  hint: {hint}")
