"""The conformance kits of text and image encoders: shipped ones pass, and each check refuses a faulty one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mm_core.diffusion.encoders.text import ByteTextEncoder, ByteTokenizer, HFTextEncoder
from mm_core.plugin.registry import get_registry
from mm_core.testing.frozen.encoders import IMAGE, TEXT
from mm_core.testing.kit import Examination
from mm_core.testing.suite import find_components
from support.conformance import examined, refusal, shortcomings


@pytest.mark.parametrize("name", ["core/bytes", "core/hf_text", "wan/umt5", "wan/clip_vision"])
def test_shipped_encoders_keep_their_contract(name: str) -> None:
    assert shortcomings(name, ranks=False) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["core/bytes", "core/hf_text", "wan/umt5"])
def test_shipped_text_encoders_give_the_same_tokens_in_each_process(name: str) -> None:
    outcome = examined(name).run("same_tokens_in_each_process")
    assert outcome.status == "passed", outcome.reason


class Pooled(ByteTextEncoder):
    """An encoder that also returns a vector for each caption."""

    @property
    def condition_shapes(self):
        return {"pooled": (self.hidden_size,)}

    def encode(self, ids, mask):
        hidden, mask = super().encode(ids, mask)
        return hidden, mask, {"pooled": (hidden * mask[..., None]).sum(1)}


def test_an_encoder_with_extras_passes() -> None:
    assert [o.reason for o in examined("core/bytes", Pooled) if o.status == "failed"] == []


@dataclass
class NamedTokens:
    """Tokens of two tokenizers by name."""

    faulty: bool = False

    def __call__(self, captions):
        ids, mask = ByteTokenizer(64)(captions)
        letters = torch.tensor([[caption.count(letter) for letter in "aeiou"] for caption in captions])
        return {"ids": ids, "own_mask": mask, "letters": letters[:-1] if self.faulty else letters}


class Named(ByteTextEncoder):
    """An encoder whose tokens and states have names; the states of its second stream have a mask."""

    faulty_tokens = faulty_batch = False

    @property
    def condition_shapes(self):
        return {"vowels": (5,), "second": (None, self.hidden_size), "second_mask": (None,)}

    def tokenizer(self):
        return NamedTokens(self.faulty_tokens)

    def encode(self, ids, own_mask, letters):
        hidden, mask = super().encode(ids, own_mask)
        vowels = letters.float()
        if self.faulty_batch:
            vowels = vowels - vowels.mean(0)
        return {"text": (hidden, mask), "second": (hidden * 2, mask), "vowels": vowels}


def test_an_encoder_of_named_tokens_and_states_passes_and_faulty_ones_are_refused() -> None:
    outcomes = examined("core/bytes", Named, ranks=False)
    assert [o.reason for o in outcomes if o.status == "failed"] == []
    passed = {o.check for o in outcomes if o.status == "passed"}
    assert {"tokens", "picklable_tokenizer", "hidden_states", "captions_matter", "independence"} <= passed
    short = type("Faulty", (Named,), {"faulty_tokens": True})
    mixed_rows = type("Faulty", (Named,), {"faulty_batch": True})
    assert "the tokenizer returned 'letters'" in refusal("core/bytes", "tokens", short)
    found = refusal("core/bytes", "independence", mixed_rows)
    assert "the extra 'vowels' of 'a red circle moves left' alone and in a batch differ" in found


@dataclass
class Seeing:
    """A tokenizer that reads a picture for each caption."""

    def __call__(self, captions, fields):
        ids, mask = ByteTokenizer(64)(captions)
        brightness = [pictures[0].float().mean() for pictures in fields["first"]]
        return {"ids": ids, "mask": mask, "brightness": torch.stack(brightness)}


class Looking(ByteTextEncoder):
    """An encoder whose states depend on a picture."""

    reads, blind = ("first",), False

    def tokenizer(self):
        return Seeing()

    def encode(self, ids, mask, brightness):
        hidden, mask = super().encode(ids, mask)
        return hidden * (1 if self.blind else brightness[:, None, None]), mask


def test_an_encoder_that_reads_pictures_passes() -> None:
    outcomes = examined("core/bytes", Looking, ranks=False)
    assert [o.reason for o in outcomes if o.status == "failed"] == []
    assert "fields_matter" in {o.check for o in outcomes if o.status == "passed"}


class Strings(ByteTextEncoder):
    """An encoder that is given captions; a faulty one has other states in a batch."""

    faulty = False

    def encode_captions(self, captions, device):
        hidden, mask = self.encode(*self.tokenizer()(captions))
        return hidden - hidden.mean(0) if self.faulty else hidden, mask


def test_an_encoder_that_is_given_captions_passes_and_a_faulty_one_is_refused() -> None:
    outcomes = examined("core/bytes", Strings, ranks=False)
    assert [o.reason for o in outcomes if o.status == "failed"] == []
    by_name = {o.check: o.status for o in outcomes}
    assert by_name["independence"] == by_name["languages"] == "passed" and by_name["tokens"] != "passed"
    faulty = type("Faulty", (Strings,), {"faulty": True})
    assert "alone and in a batch differ" in refusal("core/bytes", "independence", faulty)


class Told(Looking):
    """As `Looking`, given captions and their pictures."""

    def encode_captions(self, captions, device, fields):
        return self.encode(**Seeing()(captions, fields))


def test_an_encoder_that_is_given_captions_and_reads_pictures_passes_and_a_blind_one_is_refused() -> None:
    outcomes = examined("core/bytes", Told, ranks=False)
    assert [o.reason for o in outcomes if o.status == "failed"] == []
    assert "fields_matter" in {o.check for o in outcomes if o.status == "passed"}
    blind = type("Faulty", (Told,), {"blind": True})
    assert "give the same hidden states" in refusal("core/bytes", "fields_matter", blind)


@dataclass
class Tokens:
    """A tokenizer of bytes with one fault."""

    fault: Any = None
    held: Any = None

    def __call__(self, captions):
        if self.fault == "ascii":
            [caption.encode("latin-1") for caption in captions]
        if self.fault == "empty":
            assert all(captions), "an empty caption"
        rows = ByteTokenizer(4096 if self.fault == "long" else 64)
        ids, mask = rows(captions)
        if self.fault == "int32":
            return ids.int(), mask
        if self.fault == "mask":
            return ids, mask | True
        if self.fault == "numbers":
            return ids, mask.long()
        if self.fault == "wide":
            return tuple(nn.functional.pad(each, (0, 1))[:, :64] for each in (ids, mask))
        return ids, mask


def with_tokens(fault: str | None, held: Any = None) -> type:
    return type("Faulty", (ByteTextEncoder,), {"tokenizer": lambda self: Tokens(fault, held)})


class Carrying(ByteTextEncoder):
    def tokenizer(self):
        return Tokens(held=self)


def encoding(change) -> type:
    """A class whose encode changes what the true one returns."""

    def encode(self, ids, mask):
        return change(*ByteTextEncoder.encode(self, ids, mask), ids)

    return type("Faulty", (ByteTextEncoder,), {"encode": encode})


def mixed(hidden, mask, ids):
    """Attention that ignores the mask."""
    return hidden + hidden.mean(1, keepdim=True), mask


def dropped_out(hidden, mask, ids):
    return nn.functional.dropout(hidden), mask


TEXT_FAULTS = [
    ("tokens", with_tokens("int32"), "the tokenizer returned ids [5, 64] of torch.int32 for 5 captions"),
    ("tokens", with_tokens("numbers"), "the tokenizer returned a mask [5, 64] of torch.int64"),
    (
        "tokens",
        with_tokens("long"),
        "the tokenizer returned 4,096 tokens for a long caption, and max_length is 64",
    ),
    ("tokens", with_tokens("wide"), "tokens, and the longest of the batch has "),
    ("tokens", with_tokens("mask"), "depend on the other captions of the batch"),
    ("picklable_tokenizer", with_tokens(None, lambda: 0), "the tokenizer cannot be sent to data workers: "),
    ("picklable_tokenizer", Carrying, "the tokenizer carries weights to data workers: Carrying"),
    ("hidden_states", encoding(lambda h, m, i: h), "encode returned a Tensor"),
    (
        "hidden_states",
        encoding(lambda h, m, i: (h[..., :-1], m)),
        "encode returned hidden states [4, 50, 15]",
    ),
    (
        "hidden_states",
        encoding(lambda h, m, i: (h, m.long())),
        "encode returned a mask [4, 50] of torch.int64",
    ),
    ("hidden_states", encoding(lambda h, m, i: (h / 0, m)), "encode returned NaN or infinity"),
    (
        "hidden_states",
        encoding(lambda h, m, i: (h, m | True)),
        "the mask that encode returns is true for padding",
    ),
    (
        "hidden_states",
        encoding(lambda h, m, i: (h, m & False)),
        "the mask that encode returns is false for all tokens of a caption",
    ),
    (
        "hidden_states",
        encoding(lambda h, m, i: (h, m, {"pooled": h.sum((0, 1))[None]})),
        "the extra 'pooled' is a tensor [1, 16]",
    ),
    (
        "hidden_states",
        encoding(lambda h, m, i: (h, m, {"pooled": h.sum(1)})),
        "encode returned `pooled`, but condition_shapes declares no condition",
    ),
    ("captions_matter", encoding(lambda h, m, i: (h * 0, m)), "have the same hidden states"),
    (
        "fields_matter",
        type("Faulty", (Looking,), {"blind": True}),
        "other pictures (first) give the same hidden states",
    ),
    ("independence", encoding(mixed), "of 'a red circle moves left' alone and in a batch differ by "),
    (
        "independence",
        encoding(lambda h, m, i: (h, m, {"pooled": h.sum(1)})),
        "the extra 'pooled' of 'a red circle moves left' alone and in a batch differ by ",
    ),
    ("padding", encoding(mixed), "padding changes the hidden states of a caption, by "),
    ("empty_caption", with_tokens("empty"), "AssertionError: an empty caption"),
    (
        "empty_caption",
        encoding(lambda h, m, i: (h / (m.sum(1) > 1)[:, None, None], m)),
        "the hidden states of an empty caption are NaN or infinite",
    ),
    ("languages", with_tokens("ascii"), "the caption '日本の猫' raises UnicodeEncodeError"),
    ("pure", encoding(dropped_out), "equal calls of encode return different results"),
    ("pure", encoding(lambda h, m, i: (h * i.mul_(0).add_(1)[..., None], m)), "encode changes tensors"),
]


@pytest.mark.parametrize(("check", "faulty", "sentence"), TEXT_FAULTS)
def test_a_faulty_text_encoder_is_refused(check: str, faulty: type, sentence: str) -> None:
    assert sentence in refusal("core/bytes", check, faulty)


class Reading(HFTextEncoder):
    """Its constructor opens files."""

    def __init__(self, from_pretrained: str, **others: Any) -> None:
        super().__init__(from_pretrained, **others)
        Path(from_pretrained, "config.json").read_text()


class WithMemory(HFTextEncoder):
    def build_empty(self) -> None:
        super().build_empty()
        if any(parameter.is_meta for parameter in self.parameters()):
            self.model.to_empty(device="cpu")


class WithoutTables(HFTextEncoder):
    def build_empty(self) -> None:
        super().build_empty()
        self.register_buffer("table", torch.empty(2, device="meta"))


class OtherEntry(HFTextEncoder):
    entry_points = ("encode", "encode_all")


class OtherBlocks(HFTextEncoder):
    block_patterns = "model.block"  # type: ignore[assignment]


class OtherSource(HFTextEncoder):
    def build_empty(self) -> None:
        super().build_empty()
        self.weights_from = str(self.folder)  # type: ignore[assignment]


class BuiltTwice(HFTextEncoder):
    def build_empty(self) -> None:
        self.model = None
        super().build_empty()


STREAMED_FAULTS = [
    ("streamed", WithMemory, "build_empty gives memory to model."),
    ("streamed", WithoutTables, "build_empty leaves table without values"),
    ("streamed", OtherEntry, "entry_points is ('encode', 'encode_all')"),
    ("streamed", OtherBlocks, "block_patterns is 'model.block'"),
    ("streamed", OtherSource, "weights_from is '/"),
    ("loads", BuiltTwice, "a second build_empty makes new tensors"),
    ("missing_files", Reading, "without files, the constructor raises FileNotFoundError: "),
    (
        "missing_files",
        type("Faulty", (HFTextEncoder,), {"missing_files": lambda self: []}),
        "missing_files returned [] where none of the files exist",
    ),
    (
        "missing_files",
        type(
            "Faulty",
            (HFTextEncoder,),
            {
                "missing_files": lambda self: [
                    p for p in HFTextEncoder.missing_files(self) if "model." not in p
                ]
            },
        ),
        "missing_files does not name model.safetensors, without which loading raises CheckpointError",
    ),
]


@pytest.mark.parametrize(("check", "faulty", "sentence"), STREAMED_FAULTS)
def test_a_faulty_frozen_component_is_refused(check: str, faulty: type, sentence: str) -> None:
    reason = refusal("core/hf_text", check, faulty)
    assert sentence in reason


class Images(nn.Module):
    """An image encoder without weights: mean colours of two halves."""

    hidden_size, tokens = 3, 2

    def load(self, device):
        """Does nothing: there are no weights."""

    def missing_files(self):
        return []

    def encode(self, images):
        halves = [[half.float().mean((1, 2)) for half in image.chunk(2, dim=1)] for image in images]
        return torch.stack([torch.stack(row) for row in halves]) / 255


def images_with(**members: object) -> type:
    return type("Faulty", (Images,), members)


def changed(change) -> type:
    return images_with(encode=lambda self, images: change(Images.encode(self, images), images))


def windows(images):
    """Means of windows of four rows: an image of three has none."""
    return [image.float().unfold(1, 4, 4).mean((2, 3)) for image in images]


IMAGE_FAULTS = [
    (
        "features",
        images_with(encode=lambda self, images: windows(images)),
        "an image [3, 3, 5] raises Runtime",
    ),
    ("features", images_with(tokens=3), "encode returned [4, 2, 3] of torch.float32 for 4 images"),
    ("features", images_with(hidden_size=4), "encode returned [4, 2, 3] of torch.float32 for 4 images"),
    ("features", changed(lambda found, _: found / 0), "encode returned NaN or infinity"),
    ("each_image", changed(lambda found, _: found - found.mean(0)), "alone and in a batch differ by "),
    ("each_image", changed(lambda found, _: found * 0), "different images have the same hidden states"),
    ("pure_images", changed(lambda found, _: found + torch.rand(3)), "return different results"),
    ("pure_images", changed(lambda found, images: (images[0].zero_(), found)[1]), "encode changes tensors"),
]


@pytest.mark.parametrize(("check", "faulty", "sentence"), IMAGE_FAULTS)
def test_a_faulty_image_encoder_is_refused(check: str, faulty: type, sentence: str) -> None:
    assert sentence in refusal("wan/clip_vision", check, faulty, tiny={}, config=None)


def test_an_image_encoder_without_weights_passes() -> None:
    found = [o for o in examined("wan/clip_vision", Images, tiny={}, config=None) if o.status == "failed"]
    assert [o.reason for o in found] == []


SALTED = """
import torch
from mm_core import Component, hookimpl
from mm_core.diffusion.encoders.text import ByteTextEncoder

class Tokens:
    def __call__(self, captions):
        ids = torch.tensor([[hash(caption) % 256] for caption in captions])
        return ids, torch.ones_like(ids, dtype=torch.bool)

class Salted(ByteTextEncoder):
    def tokenizer(self):
        return Tokens()

@hookimpl
def mm_text_encoders():
    return [Component("salted", "salted:Salted")]
"""


@pytest.mark.slow
def test_tokens_that_differ_between_processes_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "salted.py"
    file.write_text(SALTED)
    registry = get_registry((str(file),))
    (registered,) = find_components(registry, "local/salted", "text_encoder")
    reason = Examination(registered, registry).run("same_tokens_in_each_process").reason
    assert f"{file}, line 11: the tokenizer gives other tokens in another process; accepted: " in reason
    assert "hint: Python's `hash` of a string is another in each process" in reason


def test_each_check_has_a_fault() -> None:
    frozen = {check for check, *_ in STREAMED_FAULTS}
    assert {check for check, *_ in TEXT_FAULTS} | frozen | {*TEXT.ranks} == set(TEXT.checks)
    assert {check for check, *_ in IMAGE_FAULTS} | frozen == set(IMAGE.checks)
