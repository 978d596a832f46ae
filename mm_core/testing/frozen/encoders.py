"""The conformance kits of text and image encoders (`mm_core.contracts.TextEncoder` and `ImageEncoder`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from mm_core.contracts import Randomness, SupportsCaptions, SupportsReads, Tokens
from mm_core.errors import plural
from mm_core.tasks.text_to_video.conditions import check_returned
from mm_core.tasks.text_to_video.returned_shapes import of_named
from mm_core.testing.data.reading import expect_no_weights
from mm_core.testing.frozen.components import FROZEN, FrozenProbe, check_pure
from mm_core.testing.kit import Kit, NotApplicable, by_name
from mm_core.testing.ranks import ComponentBuild, on_ranks
from mm_core.testing.tensors import distance, expect_close

_CAPTIONS = ("a red circle moves left", "", "a cat and a dog bake a cake together in a kitchen", "blue")
_LANGUAGES = (
    "日本の猫",
    "שלום עולם",
    "e\u0301a\u0308",
    "👩‍👩‍👧 smiles",
    "tab\tline\nend\u200b",
    "\ufeff\U0010ffff",
)
_HINT = "hand the mask to the model's attention"


# -- text encoders ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _WithPictures:
    """The tokenizer of an encoder that reads fields, with a picture for each caption.

    Attributes:
        tokenizer: of the encoder.
        reads: of the encoder.
        first: shifts the choice of pictures, which depends on the caption.
    """

    tokenizer: Callable[..., Any]
    reads: tuple[str, ...]
    first: int = 0

    def __call__(self, captions: Sequence[str]) -> Any:
        """The tokens of captions with their pictures."""
        images = _images()
        codes = [crc32(caption.encode(errors="surrogatepass")) + self.first for caption in captions]
        return self.tokenizer(
            captions, {n: [[images[code % len(images)]] for code in codes] for n in self.reads}
        )


class _Captions(list[str]):
    """Captions in the place of tokens, and the fields that the encoder reads."""

    def __init__(self, captions: Sequence[str], fields: Mapping[str, Any] | None = None) -> None:
        super().__init__(captions)
        self.read = {} if fields is None else {"fields": fields}


def tokenizer_of(component: Any) -> Callable[[Sequence[str]], Any]:
    """The tokenizer of a text encoder, called with captions alone; a list of them for `SupportsCaptions`."""
    tokenizer = _Captions if isinstance(component, SupportsCaptions) else component.tokenizer()
    reads = component.reads if isinstance(component, SupportsReads) else ()
    return _WithPictures(tokenizer, reads) if reads else tokenizer


def _own_tokenizer(component: Any) -> Callable[[Sequence[str]], Any]:
    """As `tokenizer_of`, for the checks of tokens."""
    if isinstance(component, SupportsCaptions):
        raise NotApplicable("the text encoder is given captions")
    return tokenizer_of(component)


def _encoded(probe: FrozenProbe, captions: Sequence[str]) -> tuple[Tensor, Tensor, Mapping[str, Tensor]]:
    """Hidden states, their mask, and extras of captions."""
    return _states(probe, tokenizer_of(probe.component)(captions))


def _states(probe: FrozenProbe, given: Tokens | _Captions) -> tuple[Tensor, Tensor, Mapping[str, Tensor]]:
    """Those of the tokens of captions: ids and mask, or named tensors; or of captions."""
    encode = probe.component.encode
    with torch.no_grad():
        if isinstance(given, _Captions):
            found = probe.component.encode_captions(given, torch.device("cpu"), **given.read)
        else:
            found = encode(**given) if isinstance(given, Mapping) else encode(*given)
    if isinstance(found, Mapping) and "text" in found:
        found = of_named(found)
    probe.expect(
        isinstance(found, tuple) and len(found) in (2, 3),
        f"encode returned a {type(found).__name__}{f' of {len(found)}' if isinstance(found, tuple) else ''}",
        accepted="(hidden[B,L,D], mask[B,L]), and perhaps a mapping of further tensors [B,...]; or named"
        " states, of which one is `text`",
    )
    return found[0], found[1], dict(found[2]) if len(found) == 3 else {}


def _same(one: Tokens | list[str], other: Tokens | list[str]) -> bool:
    """Whether the tokens of captions are equal."""
    if isinstance(one, list):
        return one == other
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    return isinstance(one, tuple) and isinstance(other, tuple) and all(map(torch.equal, one, other))


def tokens(probe: FrozenProbe) -> None:
    """The tokenizer returns ids and mask of the captions, at most max_length tokens, padded no further; or
    named tensors, a row for each caption."""
    tokenizer, most = _own_tokenizer(probe.build()), probe.component.max_length
    if isinstance(given := tokenizer(_CAPTIONS), Mapping):
        for name, tensor in given.items():
            probe.expect(
                isinstance(tensor, Tensor) and len(tensor) == len(_CAPTIONS),
                f"the tokenizer returned {name!r}, {_shown(tensor)}, for {plural(len(_CAPTIONS), 'caption')}",
                accepted=f"a tensor [{len(_CAPTIONS)},...]",
            )
        return
    ids, mask = tokenizer([*_CAPTIONS, "word " * 2000])
    _expect_tokens(probe, ids, mask, f"{plural(len(_CAPTIONS) + 1, 'caption')}", len(_CAPTIONS) + 1)
    probe.expect(
        ids.shape[1] <= most,
        f"the tokenizer returned {plural(ids.shape[1], 'token')} for a long caption, and max_length is"
        f" {most}",
        hint="cut captions to max_length tokens",
    )
    ids, mask = tokenizer(_CAPTIONS)
    longest = int(mask.sum(1).max())
    probe.expect(
        ids.shape[1] in (longest, most),
        f"rows are padded to {plural(ids.shape[1], 'token')}, and the longest of the batch has {longest}",
        accepted=f"{longest}, or max_length {most}",
        hint="the mask must be false for padding",
    )
    for row, caption in enumerate(_CAPTIONS):
        alone, own = tokenizer([caption])
        probe.expect(
            torch.equal(alone[own], ids[row][mask[row]]),
            f"the tokens of {caption!r} depend on the other captions of the batch",
            hint="the mask must be true for the caption's own tokens and false for padding",
        )


def _expect_tokens(probe: FrozenProbe, ids: Tensor, mask: Tensor, captions: str, rows: int) -> None:
    probe.expect(
        ids.dim() == 2 and len(ids) == rows and ids.dtype == torch.int64,
        f"the tokenizer returned ids {list(ids.shape)} of {ids.dtype} for {captions}",
        accepted=f"[{rows},L] torch.int64",
    )
    probe.expect(
        mask.shape == ids.shape and mask.dtype == torch.bool,
        f"the tokenizer returned a mask {list(mask.shape)} of {mask.dtype} for {captions}",
        accepted=f"{list(ids.shape)} torch.bool, false for padding",
    )


def picklable_tokenizer(probe: FrozenProbe) -> None:
    """The tokenizer goes to data workers: it pickles, carries no weights, and gives equal tokens there."""
    for component in (probe.component, probe.build()):
        tokenizer = _own_tokenizer(component)
        expected = tokenizer(_CAPTIONS)  # it may have opened its files by then
        again = probe.probe.in_worker("the tokenizer", tokenizer)
        expect_no_weights(
            probe.probe,
            "the tokenizer",
            tokenizer,
            "give the tokenizer its own files and settings, not the encoder",
        )
        same = _same(expected, again(_CAPTIONS))
        probe.expect(same, "the tokenizer gives other tokens after pickling")


def same_tokens_in_each_process(probe: FrozenProbe) -> None:
    """Another process gives the captions the same tokens: a data worker, a rank, a resumed run."""
    expected = _own_tokenizer(probe.build())(_CAPTIONS)
    (found,) = on_ranks(1, _tokens_of, ComponentBuild(probe.probe))
    probe.expect(
        _same(expected, found),
        "the tokenizer gives other tokens in another process",
        accepted="tokens that depend on the caption alone",
        hint="Python's `hash` of a string is another in each process: use zlib.crc32 or hashlib",
    )


def _tokens_of(build: ComponentBuild) -> Tokens:
    """Run in a process of its own."""
    with torch.device("meta"):
        tokenizer = tokenizer_of(build())
    found: Tokens = tokenizer(_CAPTIONS)
    return found


def hidden_states(probe: FrozenProbe) -> None:
    """encode returns finite hidden states of hidden_size, their mask, and extras, a row for each caption."""
    tokens = tokenizer_of(probe.component)(_CAPTIONS)
    hidden, mask, extras = _states(probe, tokens)
    rows, width = len(_CAPTIONS), probe.component.hidden_size
    probe.expect(
        hidden.dim() == 3 and hidden.shape[::2] == (rows, width) and hidden.is_floating_point(),
        f"encode returned hidden states {list(hidden.shape)} of {hidden.dtype}",
        accepted=f"[{rows}, L, {width}] of floating-point numbers: B captions, L tokens, hidden_size",
    )
    probe.expect(
        mask.shape == hidden.shape[:2] and mask.dtype == torch.bool,
        f"encode returned a mask {list(mask.shape)} of {mask.dtype}",
        accepted=f"{list(hidden.shape[:2])} bool",
    )
    probe.expect(bool(hidden[mask].isfinite().all()), "encode returned NaN or infinity")
    if isinstance(tokens, tuple):
        given = tokens[1]
        padding = mask & ~given if mask.shape == given.shape else mask.sum(1) > given.sum(1)
        probe.expect(not padding.any(), "the mask that encode returns is true for padding")
    filled = mask.any(1) | torch.tensor([not caption for caption in _CAPTIONS])
    probe.expect(filled.all(), "the mask that encode returns is false for all tokens of a caption")
    for name, extra in extras.items():
        probe.expect(
            isinstance(name, str) and isinstance(extra, Tensor) and len(extra) == rows,
            f"the extra {name!r} is {_shown(extra)}",
            accepted=f"a tensor [{rows},...] with a row for each caption",
        )
    check_returned(extras, probe.component, rows)


def captions_matter(probe: FrozenProbe) -> None:
    """Other tokens give other hidden states, and so do the same tokens in another order."""
    tokenizer = tokenizer_of(probe.component)
    for first, second in (("blue", "a red circle moves left"), ("a dog bakes a cake", "a cake bakes a dog")):
        rows = [tokenizer([caption]) for caption in (first, second)]
        if _same(*rows):
            continue  # a tiny vocabulary has one token for all unknown words
        (one, own, _), (other, others, _) = (_states(probe, row) for row in rows)
        probe.expect(
            distance(one[own], other[others]) > 1e-6, f"{first!r} and {second!r} have the same hidden states"
        )


def fields_matter(probe: FrozenProbe) -> None:
    """Other pictures give the same caption other hidden states, if the encoder reads any."""
    tokenizer = tokenizer_of(probe.component)
    if not isinstance(tokenizer, _WithPictures):
        raise NotApplicable("the text encoder reads no fields beside captions")
    (one, own, _), (other, others, _) = (
        _states(probe, replace(tokenizer, first=first)(_CAPTIONS[:1])) for first in range(2)
    )
    differ = one[own].shape != other[others].shape or distance(one[own], other[others]) > 1e-6
    names = ", ".join(tokenizer.reads)
    probe.expect(differ, f"other pictures ({names}) give the same hidden states")


def independence(probe: FrozenProbe) -> None:
    """A caption's hidden states and extras are the same alone and in a batch with longer captions."""
    hidden, mask, extras = _encoded(probe, _CAPTIONS)
    for row, caption in enumerate(_CAPTIONS):
        alone, own, others = _encoded(probe, [caption])
        pairs = {"hidden states": (alone[own], hidden[row][mask[row]])}
        pairs |= {
            f"extra {name!r}": (_own(others, name, 0), _own(extras, name, row))
            for name in extras
            if name.removesuffix("_mask") == name or name.removesuffix("_mask") not in extras
        }
        for what, (one, together) in pairs.items():
            words = f"the {what} of {caption!r} alone and in a batch differ"
            expect_close(probe, one, together, words, _HINT)


def _own(extras: Mapping[str, Tensor], name: str, row: int) -> Tensor:
    """An extra of a caption: of states with a mask, those of its own tokens."""
    mask = extras.get(f"{name}_mask")
    return extras[name][row] if mask is None else extras[name][row][mask[row]]


def padding(probe: FrozenProbe) -> None:
    """Padded tokens change nothing: neither what is in them nor how many there are."""
    short, long = (tokenizer_of(probe.component)([caption]) for caption in _CAPTIONS[:3:2])
    if not isinstance(short, tuple):
        raise NotApplicable("no ids and mask reach `encode`: only it knows what is padding")
    ids, mask = short[0][short[1]][None], short[1][short[1]][None]
    garbage = long[0][long[1]][None].flip(1)
    room = min(garbage.shape[1], probe.component.max_length - ids.shape[1])
    if room < 1:
        raise NotApplicable(f"max_length {probe.component.max_length} leaves no room for padding")
    expected, own, extras = _states(probe, (ids, mask))
    longer = torch.cat([mask, torch.zeros(1, room, dtype=torch.bool)], dim=1)
    found, kept, others = _states(probe, (torch.cat([ids, garbage[:, :room]], dim=1), longer))
    pairs = [(found[kept], expected[own]), *((others[name], extra) for name, extra in extras.items())]
    for pair in pairs:
        expect_close(probe, *pair, "padding changes the hidden states of a caption,", _HINT)


def empty_caption(probe: FrozenProbe) -> None:
    """A batch of empty captions is encoded without NaN: it is what dropped captions become."""
    tokens = tokenizer_of(probe.component)(["", ""])
    if isinstance(tokens, tuple):
        _expect_tokens(probe, tokens[0], tokens[1], "two empty captions", 2)
    hidden, mask, _ = _states(probe, tokens)
    probe.expect(
        bool(hidden[mask].isfinite().all()), "the hidden states of an empty caption are NaN or infinite"
    )


def languages(probe: FrozenProbe) -> None:
    """Captions in any script, with emoji, combining and control characters, are encoded."""
    for caption in _LANGUAGES:
        what = f"the caption {caption!r}"
        hidden, mask, _ = probe.expect_no_error(what, "any text", _encoded, probe, [caption])
        probe.expect(bool(hidden[mask].isfinite().all()), f"the hidden states of {caption!r} are not finite")


def pure(probe: FrozenProbe) -> None:
    """Equal calls return equal results: nothing is kept from call to call, and inputs stay unchanged."""
    given = tokenizer_of(probe.component)(_CAPTIONS)
    tensors = (*given.values(),) if isinstance(given, Mapping) else given if isinstance(given, tuple) else ()
    check_pure(probe, "encode", lambda: _states(probe, given), tensors)


TEXT = Kit(
    by_name(
        *(*FROZEN, tokens, picklable_tokenizer, hidden_states, captions_matter, independence),
        fields_matter,
        *(padding, empty_caption, languages, pure, same_tokens_in_each_process),
    ),
    probe=FrozenProbe,
    ranks=(same_tokens_in_each_process.__name__,),
)
"""The conformance checks of text encoders."""


# -- image encoders -----------------------------------------------------------------------------


def _images() -> list[Tensor]:
    """Images uint8 [3,Y,X] of different sizes, one of them tiny."""
    sizes = ((24, 40), (33, 17), (64, 64), (3, 5))
    drawn = (Randomness(0).normal((3, *size), number) for number, size in enumerate(sizes))
    return [(each * 60 + 128).clamp(0, 255).byte() for each in drawn]


def _features(probe: FrozenProbe, images: Sequence[Tensor]) -> Tensor:
    with torch.no_grad():
        found: Tensor = probe.component.encode(images)
    return found


def features(probe: FrozenProbe) -> None:
    """Images of any size become finite hidden states of hidden_size, as many as `tokens` declares."""
    images = _images()
    for image in images:
        what, accepted = f"an image {list(image.shape)}", "any size: resize images to what the model takes"
        probe.expect_no_error(what, accepted, _features, probe, [image])
    found, width, count = _features(probe, images), probe.component.hidden_size, probe.component.tokens
    fits = found.dim() == 3 and found.shape[::2] == (len(images), width) and found.is_floating_point()
    probe.expect(
        fits and count in (None, found.shape[1]),
        f"encode returned {list(found.shape)} of {found.dtype} for {plural(len(images), 'image')}",
        accepted=f"[{len(images)}, {count or 'K'}, {width}] of floating-point numbers",
        hint="hidden_size and tokens must be those of the hidden states",
    )
    probe.expect(bool(found.isfinite().all()), "encode returned NaN or infinity")


def each_image(probe: FrozenProbe) -> None:
    """Hidden states of an image are the same alone and in a batch, and different for other images."""
    images = _images()
    together = _features(probe, images)
    for row, image in enumerate(images):
        what = "the hidden states of an image alone and in a batch differ"
        expect_close(probe, _features(probe, [image]), together[row : row + 1], what)
    probe.expect(distance(together[:1], together[1:2]) > 1e-6, "different images have the same hidden states")


def pure_images(probe: FrozenProbe) -> None:
    """Equal calls return equal results, and images stay unchanged."""
    images = _images()
    check_pure(probe, "encode", lambda: _features(probe, images), images)


IMAGE = Kit(by_name(*FROZEN, features, each_image, pure_images), probe=FrozenProbe)
"""The conformance checks of image encoders."""


def _shown(value: object) -> str:
    return f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
