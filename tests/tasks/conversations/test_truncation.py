"""Conversations that are too long: where they are cut, and what is right then."""

from __future__ import annotations

import pytest
import torch

from mm_core.contracts import IGNORED_LABEL
from mm_core.errors import DataError
from support import conversation_sets as sets

data, dataset, loaded, place, said = sets.data, sets.dataset, sets.loaded, sets.place, sets.said


def test_what_is_too_long_is_cut_but_never_in_an_image(place):
    long = data.asked("what?", "the number", "<image>\nand this?", "a digit", image="b.png")
    whole = dataset(place, [long])[0]["pieces"][0]
    context = whole.of("input_ids") == dataset(place).chat.processor.tokenizer.context_image_token_id
    start, end = int(context.nonzero()[0]) - 1, int(context.nonzero()[-1]) + 2
    for limit in range(8, len(whole.of("input_ids")) + 1):
        found = dataset(place, [long], max_length=limit)
        limit = start if start < limit < end else limit
        if not bool((whole.of("labels")[:limit] != IGNORED_LABEL).any()):
            with pytest.raises(DataError, match=f"the first {limit} tokens contain no text of the assist"):
                found[0]
        else:
            sample = found[0]
            assert torch.equal(sample["pieces"][0].of("input_ids"), whole.of("input_ids")[:limit])
            assert torch.equal(sample["pieces"][0].of("labels"), whole.of("labels")[:limit])
            assert len(sets.pixels_of(sample)) == (1 if limit >= end else 0)
