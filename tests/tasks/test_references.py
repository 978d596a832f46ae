"""Inputs of several pictures of their own size, and text encoders that read them beside captions."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
import torch

from mm_core.contracts import (
    DictBatch,
    FeatureBatch,
    Input,
    PredictorInputs,
    Ragged,
    Randomness,
    SampleRequest,
)
from mm_core.data.cache.samples import stacked
from mm_core.data.loading.loader import AuthorCode, CodeError
from mm_core.diffusion.encoders.text import ByteTextEncoder, ByteTokenizer
from mm_core.errors import ContractError
from support.text_to_video import CPU, RNG, SmallPredictor, make_batch, make_task

SIZES = ((), ((8, 6),), ((4, 10), (12, 4)))


def bytes_of(*name: object, shape: tuple[int, ...]) -> torch.Tensor:
    return (RNG.normal(shape, *name) * 60 + 128).clamp(0, 255).byte()


PICTURES = Ragged(
    tuple(tuple(bytes_of(*side, shape=(3, 1, *side)) for side in own) for own in SIZES)  # [3,1,Y,X]
)


class Referred(SmallPredictor):
    """Adds the mean of each row's references to its latents; notes what it gets."""

    inputs = (Input("references", encoder="autoencoder", most=2, unconditional="zeros"),)

    def with_inputs(self, latents, timestep, given):
        return PredictorInputs(latents, timestep, given)

    def forward(self, latents, timestep, text, text_mask, references, references_sizes):
        self.given = references, references_sizes
        areas = references_sizes.prod(-1).clamp(min=1)[..., None]
        means = (references.sum((3, 4, 5)) / areas).sum(1)
        return super().forward(latents + means[..., None, None, None], timestep, text, text_mask)


def look(captions, fields):
    ids, mask = ByteTokenizer(32)(captions)
    seen = [sum((one.float().mean() for one in own), torch.zeros(())) for own in fields["references"]]
    return {"ids": ids, "mask": mask, "seen": torch.stack(seen)}


class Seeing(ByteTextEncoder):
    """States depend on caption and pictures."""

    reads = ("references",)

    def tokenizer(self):
        return look

    def encode(self, ids, mask, seen):
        hidden, mask = super().encode(ids, mask)
        return hidden * (1 + seen[:, None, None] / 128), mask


def task_of(encoder=None, **fields):
    task = make_task(Referred(), **fields)
    seeing = encoder or Seeing(8, 32)
    seeing.load(CPU)
    return type(task)(
        task.predictor, task.autoencoder, seeing, task.scheduler, sample=task.sample_defaults, **fields
    )


def batch_of(task=None, pictures: Ragged = PICTURES):
    batch = replace(make_batch(), fields={"references": pictures})
    return task.batch_transform()(batch) if task else batch


def alone(task, row: int, pictures: Ragged = PICTURES):
    batch = batch_of(None, Ragged(pictures.rows[row : row + 1]))
    one = replace(
        batch,
        keys=batch.keys[row : row + 1],
        sample_weights=batch.sample_weights[row : row + 1],
        ids=batch.ids[row : row + 1],
        pixels=batch.pixels[row : row + 1],
        captions=batch.captions[row : row + 1],
    )
    return task.batch_transform()(one)


def test_conditions_have_each_picture_with_zeros_behind_it_and_its_size():
    task = make_task(Referred())
    task.loss(task.prepare(batch_of(task), RNG))
    values, sizes = task.predictor.given
    assert values.shape == (3, 2, 12, 1, 6, 5)
    assert sizes.tolist() == [[[0] * 3] * 2, [[1, 4, 3], [0] * 3], [[1, 2, 5], [1, 6, 2]]]
    picture = PICTURES.rows[2][1][None].float() / 127.5 - 1
    assert torch.equal(values[2, 1, :, :, :6, :2], task.autoencoder.encode(picture).mode()[0])
    assert not values[2, 1, ..., 2:].any() and not values[:2, 1].any() and not values[0].any()


@pytest.mark.parametrize("made", [make_task, lambda predictor, **fields: task_of(**fields)])
def test_rows_alone_train_as_in_a_batch(made):
    task = made(Referred(), caption_dropout=0.5)
    whole = task.encode(batch_of(task))
    losses = [task.loss(task.prepare(alone(task, row), RNG)).total for row in range(3)]
    torch.testing.assert_close(task.loss(task.draw(whole, RNG)).total, sum(losses))


def test_the_encoder_is_called_equally_often_whatever_a_row_has():
    task, calls = make_task(Referred()), []
    encode = task.autoencoder.encode
    task.autoencoder.encode = lambda pixels: calls.append(pixels.shape) or encode(pixels)
    counts = []
    for pictures in (PICTURES, Ragged(((), (), ())), Ragged((PICTURES.rows[2],) * 3)):
        calls.clear()
        task.encode(batch_of(task, pictures))
        counts.append(len(calls))
    assert counts == [7, 7, 7]  # the clips, and two for each row


def test_dropped_references_and_those_of_the_unconditional_pass_are_none():
    task = make_task(Referred())
    task.predictor.inputs = (replace(Referred.inputs[0], dropout=0.7),)
    batch = batch_of(task, Ragged((PICTURES.rows[2],) * 3))
    task.loss(task.prepare(batch, RNG))
    out = [RNG.uniform("input dropout", "references", *key) < 0.7 for key in batch.keys]
    values, sizes = task.predictor.given
    assert any(out) and not all(out)
    for row, dropped in enumerate(out):
        assert dropped == (not sizes[row].any()) == (not values[row].any())
    pictures = tuple(one[:, 0] for one in PICTURES.rows[2])
    clips = task.sample(SampleRequest(("a", "b"), inputs={"references": ((), pictures)}))
    values, sizes = task.predictor.given
    assert sizes[:, :, 0].tolist() == [[0, 0], [1, 1], [0, 0], [0, 0]] and not values[2:].any()
    (bare, _) = task.sample(SampleRequest(("a", "b")))
    assert torch.equal(bare.pixels, clips[0].pixels)


def test_dropped_captions_keep_the_pictures_of_their_sample():
    task = task_of(caption_dropout=0.5)
    batch = batch_of(task)
    assert {len(tensor) for tensor in batch.tokens.values()} == {6}
    own, empty = task.captions.encoded(batch, empty=True)
    bare = task.text_encoder.encode(**look([""] * 3, {"references": [list(one) for one in PICTURES.rows]}))
    assert torch.equal(empty[0][:, : bare[0].shape[1]], bare[0]) and len({*map(str, empty[0].tolist())}) == 3
    out = [RNG.uniform("caption_dropout", *key) < 0.5 for key in batch.keys]
    text = task.prepare(batch, RNG).text
    assert any(out) and not all(out)
    for row, dropped in enumerate(out):
        assert torch.equal(text[row], (empty if dropped else own)[0][row])
    late = task.prepare(batch_of(), RNG)  # not tokenized in a worker
    assert torch.equal(late.text, text)
    assert task.evaluate(batch, RNG, [0.5]).sums["loss"].isfinite().all()


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_features_of_the_cache_give_what_the_batch_does(dropout):
    task = task_of(caption_dropout=dropout)
    parts = {part.name: part for part in task.cache_parts()}
    assert parts["text states"].of == "media" and parts["text states"].caption
    assert parts["text states"].fields == parts["input references"].fields == ("references",)
    rows = [{} for _ in range(3)]
    for name in parts:
        for row, found in zip(rows, task.features(name, batch_of()), strict=True):
            row[name] = found
    batch = batch_of(task)
    for chosen in ((0, 1, 2), (0,), (2, 1)):
        cached = FeatureBatch(
            [batch.keys[n] for n in chosen],
            batch.sample_weights[: len(chosen)],
            [""] * len(chosen),
            stacked([rows[n] for n in chosen]),
            {},
        )
        found = task.loss(task.prepare(cached, RNG)).total
        wanted = sum(task.loss(task.prepare(alone(task, n), RNG)).total for n in chosen)
        torch.testing.assert_close(found, wanted)
    whole = FeatureBatch(batch.keys, batch.sample_weights, batch.ids, stacked(rows), {})
    one, other = task.prepare(batch, RNG), task.prepare(whole, RNG)
    assert all(torch.equal(t, other.given.conditions[n]) for n, t in one.given.conditions.items())
    assert torch.equal(task.loss(one).total, task.loss(other).total)


class PairSeeing(ByteTextEncoder):
    """States depend on caption and pictures, whose level is the first token of an unnamed pair."""

    reads = ("references",)

    def tokenizer(self):
        return Pairs()


class Pairs:
    max_length = 32

    def __call__(self, captions, fields):
        found = look(captions, fields)
        found["ids"][:, 0] = found["seen"].int() % 256
        return found["ids"], found["mask"]

    def token_counts(self, captions):
        return [len(caption.encode()) + 1 for caption in captions]


def test_a_tokenizer_that_reads_pictures_may_return_ids_and_mask():
    task = task_of(caption_dropout=0.5, encoder=PairSeeing(8, 32))
    batch, late = batch_of(task), batch_of()
    assert len(batch.text_ids) == 6
    assert torch.equal(task.prepare(batch, RNG).text, task.prepare(late, RNG).text)
    own, none = task.captions.encoded(batch, empty=False)
    assert none is None and torch.equal(own[0], task.captions.encoded(batch, empty=True)[0][0])
    assert task.evaluate(batch, RNG, [0.5]).sums["loss"].shape == (3,)
    long = replace(late, captions=["a" * 40, "b", "c" * 31])
    assert task.batch_transform()(long).cut == [41]


class Told(Seeing):
    """As `Seeing`, given captions and their pictures."""

    def tokenizer(self):
        raise AssertionError("never called")

    def encode_captions(self, captions, device, fields):
        return self.encode(**look(captions, fields))


def test_an_encoder_that_is_given_captions_gets_their_pictures_too():
    told, task = (task_of(caption_dropout=0.5, encoder=kind(8, 32)) for kind in (Told, Seeing))
    found, wanted = (own.prepare(batch_of(own), RNG) for own in (told, task))
    assert torch.equal(found.text, wanted.text)
    for one, other in zip(*(own.features("text states", batch_of()) for own in (told, task)), strict=True):
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    request = SampleRequest(("a", "b"), inputs={"references": ((PICTURES.rows[1][0][:, 0],), ())})
    (clip, _), (same, _) = (own.sample(request) for own in (told, task))
    assert torch.equal(clip.pixels, same.pixels)


def test_a_negative_prompt_is_encoded_with_the_pictures_of_its_clip():
    task, seen = task_of(), []
    encode = task.text_encoder.encode
    task.text_encoder.encode = lambda **tokens: seen.append(tokens["seen"].tolist()) or encode(**tokens)
    pictures = tuple(one[:, 0] for one in PICTURES.rows[2])
    task.sample(SampleRequest(("a", "b"), inputs={"references": (pictures, pictures[0])}))
    (given,) = seen
    assert given[:2] == given[2:] and given[0] > given[1] > 0


def test_a_batch_with_pictures_of_their_own_size_is_sent_moved_and_pinned():
    batch = pickle.loads(pickle.dumps(batch_of()))
    assert all(map(torch.equal, batch.fields["references"].rows[2], PICTURES.rows[2]))
    moved = batch.to(torch.device("meta"))
    assert {one.device.type for row in moved.fields["references"].rows for one in row} == {"meta"}
    floats = batch.to(CPU).fields["references"].rows
    assert torch.equal(floats[1][0], PICTURES.rows[1][0].float() / 127.5 - 1)
    levels = torch.zeros(3, 256)  # of the clips' transform, which has not made these pictures
    assert torch.equal(replace(batch, levels=levels).to(CPU).fields["references"].rows[1][0], floats[1][0])
    pinned = []
    batch._changed(lambda tensor: pinned.append(tensor.shape) or tensor)
    assert pinned.count((3, 1, 8, 6)) == 1


def test_pictures_out_of_range_are_refused_in_the_worker_like_clips():
    code = AuthorCode(object(), None, Randomness(0))
    wrong = Ragged(((), (PICTURES.rows[1][0].float(),), ()))
    for fields, name in (
        ({"references": wrong}, "references"),
        ({"control": make_batch().pixels * 9}, "control"),
    ):
        with pytest.raises(CodeError) as raised:
            code.finished(replace(make_batch(), fields=fields), [0], "collate")
        assert f"the {name} of sample" in str(raised.value)
    assert code.finished(batch_of(), [0], "collate").fields["references"] is not None


def test_plain_dicts_have_lists_of_pictures():
    task = task_of()
    batch = make_batch()
    values = {"video": batch.pixels, "caption": batch.captions}
    values["references"] = [[one[:, 0] for one in row] for row in PICTURES.rows]
    found = task.batch_transform()(DictBatch(batch.keys, batch.sample_weights, batch.ids, values))
    one, other = task.prepare(found, RNG), task.prepare(batch_of(task), RNG)
    assert torch.equal(task.loss(one).total, task.loss(other).total)


def message(call) -> str:
    with pytest.raises(ContractError) as raised:
        call()
    return raised.value.render()


def test_too_many_pictures_and_missing_fields_are_named():
    task = make_task(Referred())
    many = Ragged((PICTURES.rows[2] * 2, (), ()))
    assert "a sample has 4 pictures in the field `references`" in message(
        lambda: task.encode(batch_of(task, many))
    )
    reading = task_of()
    fault = message(lambda: reading.batch_transform()(make_batch()))
    assert "the text encoder reads the field `references`, which is not given" in fault
    with pytest.raises(ValueError, match="it reads one field"):
        Input("a", ("b", "c"), most=2)
    reading.predictor.inputs = ()
    fault = message(lambda: reading.check({"num_frames": 2, "height": 8, "width": 8, "fields": {}}))
    assert "needs the field `references` of each sample, which the dataset does not give" in fault


def test_the_plan_takes_references_as_large_as_the_clip():
    _, arguments = make_task(Referred()).sample_forward({"num_frames": 2, "height": 8, "width": 8})
    assert arguments["references"].shape == (1, 2, 12, 1, 4, 4) and arguments["references_sizes"].shape == (
        1,
        2,
        3,
    )
