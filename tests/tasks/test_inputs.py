"""A predictor's table of inputs: what each row is given in training, evaluation, sampling and the cache."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mm_core.contracts import DictBatch, FeatureBatch, Input, PredictorInputs, SampleRequest
from mm_core.data.cache.samples import stacked
from mm_core.errors import ContractError
from mm_core.tasks.text_to_video import inputs
from support.text_to_video import RNG, SmallPredictor, make_batch, make_task


def folded(fields, size):
    """The mask of a clip, folded to its latents [B,4,F,Y/2,X/2]; no autoencoder sees it."""
    mask = fields["mask"][:, :1]
    batch, _, frames, height, width = mask.shape
    blocks = mask.view(batch, frames, height // 2, 2, width // 2, 2)
    return blocks.permute(0, 3, 5, 1, 2, 4).flatten(1, 2)


class Conditioned(SmallPredictor):
    """Takes a control clip and a mask in the shape of latents, and a number; notes what it gets."""

    inputs = (
        Input("control", encoder="autoencoder", unconditional="zeros", dropout=0.5),
        Input("folded", ("mask",), make=folded),
        Input("motion"),
    )

    def with_inputs(self, latents, timestep, given):
        return PredictorInputs(latents, timestep, given)

    def forward(self, latents, timestep, text, text_mask, control, folded, motion):
        self.given = {"control": control, "folded": folded, "motion": motion}
        pushed = control + folded.mean(1, keepdim=True) + motion.view(-1, 1, 1, 1, 1)
        return super().forward(latents + pushed, timestep, text, text_mask)


def fields_of(rows: int = 3) -> dict[str, torch.Tensor]:
    pixels = {
        name: torch.stack([RNG.normal((3, 2, 8, 8), name, row).clamp(-1, 1) for row in range(rows)])
        for name in ("control", "mask")
    }
    return {**pixels, "motion": torch.tensor([1.0, 2.0, 3.0])[:rows]}


def batch_of(task, rows: int = 3):
    return replace(make_batch(task), fields=fields_of(rows))


def test_rows_are_encoded_made_or_passed_on_and_dropped_rows_are_zeros():
    task = make_task(Conditioned())
    batch = batch_of(task)
    inputs = task.prepare(batch, RNG)
    encoded = task.autoencoder.encode(batch.fields["control"]).mode()
    dropped = [RNG.uniform("input dropout", "control", *key) < 0.5 for key in batch.keys]
    assert any(dropped) and not all(dropped)
    for row, out in enumerate(dropped):
        wanted = torch.zeros_like(encoded[row]) if out else encoded[row]
        assert torch.equal(inputs.given.conditions["control"][row], wanted)
    assert inputs.given.conditions["folded"].shape == (3, 4, 2, 4, 4)
    assert inputs.given.conditions["motion"].tolist() == [1.0, 2.0, 3.0]
    evaluated = task.evaluate(batch, RNG, [0.5])
    assert torch.equal(task.predictor.given["control"], encoded)  # nothing is dropped
    assert evaluated.sums["loss"].isfinite().all()


def test_uint8_pixels_of_a_field_become_what_those_of_a_clip_become():
    batch = make_batch()
    levels = ((batch.pixels + 1) * 127.5).round().to(torch.uint8)
    table = torch.linspace(-2, 2, 256).expand(3, 256).contiguous()
    for own in (None, table):
        moved = replace(batch, pixels=levels, fields={"control": levels}, levels=own).to(torch.device("cpu"))
        assert torch.equal(moved.fields["control"], moved.pixels) and moved.pixels.dtype == torch.float32
    floats = replace(batch, fields={"control": levels}, levels=None).to(torch.device("cpu"))
    assert torch.equal(floats.pixels, batch.pixels) and floats.fields["control"].dtype == torch.float32


def test_features_of_the_cache_give_the_inputs_of_the_batch():
    task = make_task(Conditioned())
    batch = batch_of(task)
    parts = task.cache_parts()
    assert [part.name for part in parts] == [
        *("latents", "input control", "input folded", "input motion", "text states")
    ]
    assert [part.components for part in parts[1:4]] == [("autoencoder",), (), ()]
    assert [part.fields for part in parts[1:4]] == [("control",), ("mask",), ("motion",)]
    rows = [{} for _ in range(3)]
    for part in parts:
        given = batch.captions if part.of == "text" else batch
        for row, found in zip(rows, task.features(part.name, given), strict=True):
            row[part.name] = found
    cached = FeatureBatch(batch.keys, batch.sample_weights, batch.ids, stacked(rows), {})
    one, other = task.prepare(batch, RNG), task.prepare(cached, RNG)
    for name in ("control", "folded", "motion"):
        assert torch.equal(one.given.conditions[name], other.given.conditions[name])
    assert torch.equal(task.loss(one).total, task.loss(other).total)


def request(**inputs) -> SampleRequest:
    clip = torch.full((3, 4, 9, 7), 200, dtype=torch.uint8)
    given = {"control": (clip, clip), "mask": (clip, clip), "motion": (2.0, 3.0), **inputs}
    return SampleRequest(("a", "b"), inputs={name: value for name, value in given.items() if value})


def test_sampling_fits_what_a_request_gives_and_leaves_out_the_unconditional_control():
    task = make_task(Conditioned())
    (one, two) = task.sample(request())
    assert one.pixels.shape == (3, 2, 8, 8) and not torch.equal(one.pixels, two.pixels)
    given = task.predictor.given
    assert given["motion"].tolist() == [2.0, 3.0, 2.0, 3.0]
    level = torch.tensor(200 / 127.5 - 1)
    torch.testing.assert_close(given["control"][:2], level.expand_as(given["control"][:2]))
    assert not given["control"][2:].any()  # the unconditional pass
    assert given["folded"][2:].any()


def test_a_picture_in_the_place_of_a_clip_stands_for_all_its_frames():
    task = make_task(Conditioned())
    clip = request().inputs["mask"][0]
    (one, other) = task.sample(request(mask=(clip[:, 0], clip)))
    assert task.predictor.given["folded"].shape == (4, 4, 2, 4, 4)
    (same, _) = task.sample(request())
    assert torch.equal(one.pixels, same.pixels) and not torch.equal(one.pixels, other.pixels)


def message(call) -> str:
    with pytest.raises(ContractError) as raised:
        call()
    return raised.value.render()


def test_a_request_that_does_not_fit_the_table_is_refused_before_any_work():
    task = make_task(Conditioned())
    short = torch.zeros(3, 1, 9, 7, dtype=torch.uint8)
    found = [
        message(lambda: task.check_request(request(motion=()))),
        message(lambda: task.check_request(request(moton=(1.0, 1.0)))),
        message(lambda: task.check_request(request(motion=(1.0,)))),
        message(lambda: task.check_request(request(control=(short, short)))),
        message(lambda: make_task().check_request(request())),
    ]
    assert "the predictor needs the input `motion`, which the request does not give" in found[0]
    assert "`moton`, which the predictor does not take" in found[1] and "did you mean 'motion'" in found[1]
    assert "there are 2 prompts, but 1 value of `motion`" in found[2]
    assert "the clip of `control` has 1 frame, but a clip to sample has 2" in found[3]
    assert "the request gives `control`, which the predictor does not take" in found[4]


def test_a_value_of_another_kind_is_refused_before_any_work():
    class Shown(Conditioned):
        inputs = (Input("first", encoder="autoencoder"), *Conditioned.inputs)

    task, clip = make_task(Conditioned()), request().inputs["control"][0]
    found = [
        message(lambda: task.check_request(request(control=(1.0, clip)))),
        message(lambda: task.check_request(request(mask=(1.0, clip)))),
        message(lambda: task.check_request(request(motion=((2.0,), (3.0,))))),
        message(lambda: make_task(Shown()).check_request(request(first=(clip, clip)))),
        message(lambda: task.check_request(request(motion=(), moton=(1.0, 2.0)))),
        message(lambda: task.check_request(request(control=(clip, ())))),
        message(lambda: make_task(Shown()).check_request(replace(request(), images=((clip[:, 0],),) * 2))),
    ]
    assert "the input `control` is the number 1" in found[0] and "a picture or a clip" in found[0]
    assert "the input `mask` is a picture or clip for one prompt, and a number for another" in found[1]
    assert "a prompt has a list of 1 picture of `motion`" in found[2]
    assert "the input `first`, a frame of the clip, is a clip" in found[3]
    assert "the request gives `moton`" in found[4] and "did you mean 'motion'" in found[4]
    assert "takes frames by its table of inputs" in found[6] and "hint: set --input first=FILE" in found[6]
    assert "the prompt 'b' has no input `control`, which others have" in found[5]


def test_fields_that_the_data_do_not_give_are_an_error_of_the_plan_and_of_a_batch():
    task = make_task(Conditioned())
    spec = {"num_frames": 2, "height": 8, "width": 8}
    task.check(spec)  # a dataset of which nothing is known
    task.check({**spec, "fields": ["control", "mask", "motion"]})
    fault = message(lambda: task.check({**spec, "fields": ["control", "masks", "motion"]}))
    assert "the predictor needs the field `mask` of each sample, which the dataset does not give" in fault
    assert "did you mean 'masks'" in fault
    fault = message(lambda: task.encode(make_batch(task)))
    assert "the input `control` of the predictor reads the field `control`, which is not given" in fault
    assert "accepted: video, first, last" in fault


def test_a_row_may_read_the_clip_itself():
    class Shown(Conditioned):
        inputs = (Input("control", ("first",), encoder="autoencoder"), *Conditioned.inputs[1:])

    task = make_task(Shown())
    batch = batch_of(task)
    wanted = task.autoencoder.encode(batch.pixels[:, :, :1]).mode()
    assert torch.equal(task.encode(batch).given["control"], wanted)
    given = {**request().inputs, "first": (torch.zeros(3, 5, 6, dtype=torch.uint8),) * 2}
    del given["control"]
    clips = task.sample(SampleRequest(("a", "b"), inputs=given))
    assert len(clips) == 2 and task.predictor.given["control"].shape == (4, 12, 1, 4, 4)


def test_plain_dicts_keep_the_fields_of_the_table_alone():
    task = make_task(Conditioned())
    batch = make_batch()
    values = {"video": batch.pixels, "caption": batch.captions, **fields_of(), "audio": torch.zeros(3, 9)}
    clips = task.batch_transform()(DictBatch(batch.keys, batch.sample_weights, batch.ids, values))
    assert clips.fields.keys() == {"control", "mask", "motion"}
    one, other = task.prepare(clips, RNG), task.prepare(batch_of(task), RNG)
    assert torch.equal(task.loss(one).total, task.loss(other).total)


def test_a_whole_number_is_one_in_the_cache_too(monkeypatch):
    class Classed(SmallPredictor):
        inputs = (Input("kind"),)

        def with_inputs(self, latents, timestep, given):
            return PredictorInputs(latents, timestep, given)

        def forward(self, latents, timestep, text, text_mask, kind):
            self.kind = kind
            return super().forward(latents, timestep, text, text_mask)

    task = make_task(Classed())
    batch = replace(make_batch(task), fields={"kind": torch.tensor([4, 5, 6])})
    rows = [{} for _ in range(3)]
    for part in task.cache_parts():
        given = batch.captions if part.of == "text" else batch
        for row, found in zip(rows, task.features(part.name, given), strict=True):
            row[part.name] = found
    cached = FeatureBatch(batch.keys, batch.sample_weights, batch.ids, stacked(rows), {})
    sent = []  # without a wait for the device: page-locked
    monkeypatch.setattr(inputs, "copied_to", lambda device, one: sent.append(one.tolist()) or one.to(device))
    for each in (batch, cached):
        task.loss(task.prepare(each, RNG))
        assert task.predictor.kind.dtype == torch.int64 and task.predictor.kind.tolist() == [4, 5, 6]
    assert sent == [[4, 5, 6]]


def test_the_plan_knows_the_shapes_of_inputs():
    task = make_task(Conditioned())
    _, arguments = task.sample_forward({"num_frames": 2, "height": 8, "width": 8})
    shapes = {name: tuple(arguments[name].shape) for name in ("control", "folded", "motion")}
    assert shapes == {"control": (1, 12, 2, 4, 4), "folded": (1, 4, 2, 4, 4), "motion": (1,)}


def test_each_row_may_have_its_own_latents_that_count():
    class Partly(Conditioned):
        """Rows with an odd motion are shown their first latent frame, which does not count."""

        def with_inputs(self, latents, timestep, given):
            counts = torch.ones(len(latents), 1, *latents.shape[2:], dtype=torch.bool)
            counts[:, :, 0] = (given["motion"] % 2 == 0).view(-1, 1, 1, 1)
            return PredictorInputs(latents, timestep, given, counts)

    task = make_task(Partly())
    task.predictor.inputs = tuple(replace(row, dropout=0.0) for row in Conditioned.inputs)
    whole = task.loss(task.prepare(batch_of(task), RNG)).total
    plain = make_task(Conditioned())
    plain.predictor.inputs = task.predictor.inputs
    inputs = plain.prepare(batch_of(plain), RNG)
    predicted = plain.predict(inputs.given, inputs.text, inputs.text_mask, None)
    squares = (predicted - inputs.target).square()
    rows = [squares[0, :, 1:].mean(), squares[1].mean(), squares[2, :, 1:].mean()]  # motion is 1, 2, 3
    torch.testing.assert_close(whole, (torch.stack(rows) * inputs.factors).sum())
    assert task.evaluate(batch_of(task), RNG, [0.5]).sums["loss"].shape == (3,)


def part_of(task, name: str):
    return next(part for part in task.cache_parts() if part.name == f"input {name}")


TWO_FIELDS = """
import test_inputs as here
from mm_core.contracts import Input
task = here.make_task(here.Conditioned())
names = ("edge", "mask", "depth", "pose")
task.predictor.inputs = (Input("both", names, lambda fields, size: fields["edge"] * 2),)
print(here.part_of(task, "both").fields)
"""


def test_fields_of_a_cached_input_keep_their_order_in_every_process():
    folders = os.pathsep.join(path for path in [str(Path(__file__).parent), *sys.path] if path)
    for seed in ("1", "2"):
        found = subprocess.run(
            [sys.executable, "-c", TWO_FIELDS],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": folders},
            capture_output=True,
            text=True,
            check=True,
        )
        assert found.stdout.strip() == "('edge', 'mask', 'depth', 'pose')"


def returning(change) -> str:
    """The error of a step of training whose `with_inputs` returns something else."""

    class Changed(Conditioned):
        def with_inputs(self, latents, timestep, given):
            return change(super().with_inputs(latents, timestep, given))

    task = make_task(Changed())
    return message(lambda: task.prepare(batch_of(task), RNG))


def test_what_with_inputs_returns_is_checked_in_training():
    def counts(shape, dtype=torch.bool):
        return lambda found: replace(found, counts=torch.ones(shape, dtype=dtype))

    def joined_channels(found):
        return replace(found, latents=torch.cat([found.latents, found.conditions["control"]], 1))

    fault = returning(joined_channels)
    assert "with_inputs returned latents [3, 24, 2, 4, 4]" in fault and "test_inputs.py, line" in fault
    assert "accepted: [3, 12, 2, 4, 4]: further channels are a condition" in fault
    assert "latents [1, 12, 2, 4, 4]" in returning(lambda found: replace(found, latents=found.latents[:1]))
    fault = returning(lambda found: replace(found, timestep=found.timestep[:1]))
    assert "a timestep [1]" in fault and "accepted: [3], or one for each token: [3, N]" in fault
    for shape in ((3, 12, 2, 4, 4), (1, 1, 2, 4), (2, 1, 2, 4, 4)):
        fault = returning(counts(shape))
        assert f"with_inputs returned counts {[*shape]}" in fault
        assert "accepted: bool [1 or B, 1, 2, 4, 4]" in fault
    assert "of torch.float32" in returning(counts((1, 1, 2, 4, 4), torch.float32))
    assert "with_inputs returned a dict" in returning(vars)
    fault = returning(lambda found: replace(found, conditions={**found.conditions, "contrl": torch.ones(3)}))
    assert "the condition `contrl`, which forward does not take" in fault
    assert "accepted: control, folded, motion" in fault


def test_a_make_gets_a_number_for_a_number_in_the_plan_and_in_the_key_of_the_cache():
    def scale(by):
        return lambda fields, size: fields["motion"][:, None] / by

    def both(fields, size):
        return torch.stack([fields["motion"], fields["mask"].mean((1, 2, 3, 4))], 1)

    def one_hot(fields, size):
        return torch.nn.functional.one_hot(fields["motion"].long(), 4).bfloat16()

    def pushed(fields, size):
        return fields["control"] * fields["motion"].view(-1, 1, 1, 1, 1)

    task = make_task(Conditioned())

    def with_row(row):
        task.predictor.inputs = (*(r for r in Conditioned.inputs if r.name != row.name), row)
        _, arguments = task.sample_forward({"num_frames": 2, "height": 8, "width": 8})
        return tuple(arguments[row.name].shape), part_of(task, row.name).settings["clip"]

    shape, ten = with_row(Input("motion", make=scale(10)))
    assert shape == (1, 1) and ten != with_row(Input("motion", make=scale(20)))[1]
    assert with_row(Input("motion", make=one_hot))[0] == (1, 4)
    assert with_row(Input("motion", ("motion", "mask"), both))[0] == (1, 2)
    assert with_row(Input("control", ("control", "motion"), pushed, "autoencoder"))[0] == (1, 12, 2, 4, 4)


def test_the_key_of_the_cache_sees_the_order_of_frames():
    task = make_task(Conditioned())

    def key(make) -> str:
        task.predictor.inputs = (Input("control", make=make, encoder="autoencoder"),)
        return part_of(task, "control").settings["clip"]

    forward, halves = key(lambda fields, size: fields["control"]), []
    assert forward != key(lambda fields, size: fields["control"].flip(2))
    for start in (0, 1):
        halves.append(key(lambda fields, size, start=start: fields["control"][:, :, start::2]))
    assert len({forward, *halves}) == 3


def test_the_keys_of_pictures_stay_as_they_were():
    """Of mm_core before the frames of clips became different: the first and last frames of image-to-video."""
    task = make_task(Conditioned())

    def key(row) -> str:
        task.predictor.inputs = (row,)
        return part_of(task, row.name).settings["clip"]

    def ends(fields, size):
        return torch.cat([fields["first"], fields["last"]], 2)

    assert key(Input("ends", ("first", "last"), ends, "autoencoder")) == "5d68f199b9b69e7f"
    assert key(Input("shown", make=lambda fields, size: fields["shown"] * 2, most=2)) == "1be45dcc7e4ad50c"


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"name": "timestep"}, "name of the input timestep is 'timestep'; accepted: none of latents, "),
        ({"fields": "edge"}, "fields of the input a is 'edge'; accepted: a tuple"),
        ({"encoder": "vae"}, "encoder of the input a is 'vae'; accepted: autoencoder, image_encoder"),
        ({"make": folded, "encoder": "image_encoder"}, "make of the input a is "),
        ({"dropout": 1.5}, "dropout of the input a is 1.5; accepted: 0 to 1"),
        ({"dropout": float("nan")}, "dropout of the input a is nan"),
        ({"unconditional": "zero"}, "unconditional of the input a is 'zero'; accepted: same, zeros"),
        ({"most": -1}, "most of the input a is -1; accepted: 0 or more"),
    ],
)
def test_a_row_of_the_table_refuses_values_that_mean_nothing(fields, part):
    with pytest.raises(ValueError) as raised:
        Input(**{"name": "a", **fields})
    assert part in str(raised.value)


def test_two_rows_that_make_one_condition_are_an_error_of_the_plan():
    task = make_task(Conditioned())
    task.predictor.inputs = (*Conditioned.inputs, Input("motion", ("speed",)))
    fault = message(lambda: task.check({"num_frames": 2, "height": 8, "width": 8}))
    assert "two rows of `inputs` make the condition `motion`" in fault


class Eye:
    """An image encoder of 5 tokens a picture."""

    hidden_size, tokens = 7, 5

    def missing_files(self):
        return []

    def load(self, device):
        pass

    def encode(self, images):
        return torch.stack([image.float().mean().expand(5, 7) for image in images])


def test_the_plan_knows_the_width_of_the_features_of_pictures():
    class Styled(Conditioned):
        inputs = (*Conditioned.inputs, Input("style", ("control", "mask"), encoder="image_encoder"))

        def forward(self, latents, timestep, text, text_mask, control, folded, motion, style):
            return super().forward(latents, timestep, text, text_mask, control, folded, motion)

    task = make_task(Styled(), image_encoder=Eye())
    _, arguments = task.sample_forward({"num_frames": 2, "height": 8, "width": 8})
    assert arguments["style"].shape == (1, 10, 7) == task.encode(batch_of(task)).given["style"][:1].shape
