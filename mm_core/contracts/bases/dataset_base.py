"""The base class of datasets: an author writes samples as plain dicts, which it collates into batches."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mm_core.contracts.batch import Batch
from mm_core.contracts.randomness import Randomness
from mm_core.errors import ContractError, did_you_mean
from mm_core.plugin.checks.places import place_of

_LOADERS = ("key", "weight", "id")
"""Entries of a sample that become attributes of its batch."""

_NUMBERS = (Tensor, np.ndarray, np.number, np.bool_, bool, int, float)
"""Types of values that are stacked into a tensor."""


@dataclass
class DictBatch(Batch):
    """A micro-batch of plain dicts: `batch["audio"]` is what the samples have under `audio`.

    Attributes:
        values: by the names in the samples, tensors [B,...], or lists of B other values such as strings.
    """

    values: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        """The samples' values of this name.

        Raises:
            ContractError: the samples have no value of this name.
        """
        if name not in self.values:
            raise ContractError(
                f"the samples have no {name!r}",
                where=f"{(caller := sys._getframe(1)).f_code.co_filename}, line {caller.f_lineno}",
                accepted=", ".join(self.values) or "nothing",
                hint=did_you_mean(name, self.values) or "add it to the dicts that the dataset returns",
            )
        return self.values[name]


class DatasetBase:
    """A base class of datasets: write `__len__`, and `__getitem__(index)` or `sample_at(index, rng)`.

    A sample is a plain dict, the same names in each: tensors and NumPy arrays of equal shapes, numbers,
    strings, or anything else. An `id` names it in reports. `sample_at` is for random samples: it takes all
    random numbers from `rng`, a `Randomness` of (seed, epoch, index), so that a sample depends on no worker
    and no other sample. A sample that cannot be read raises `DataError`: it is skipped, counted and listed.
    A dataset need not derive from this class.
    """

    def __getitem__(self, index: int) -> dict[str, Any]:
        """The sample of a dataset with `sample_at`, with the random numbers of an evaluation."""
        drawn = getattr(self, "sample_at", None)
        if drawn is None:
            raise NotImplementedError(f"{type(self).__name__} has no method __getitem__")
        sample: dict[str, Any] = drawn(index, Randomness(0).at("data", 0, index))
        return sample

    def collate(self, samples: Sequence[dict[str, Any]]) -> Batch:
        """Builds a batch: tensors, arrays and numbers are stacked, everything else becomes a list.

        Args:
            samples: plain dicts, to which the loader has added `key` and `weight`.

        Returns:
            A `DictBatch`.

        Raises:
            ContractError: the samples differ in their names, or a tensor in its shape or dtype.
        """
        keys = [sample["key"] for sample in samples]
        names = [name for name in samples[0] if name not in _LOADERS]
        for sample in samples:
            if {*sample} - {*_LOADERS} != {*names}:
                differing = {*sample} - {*_LOADERS} ^ {*names}
                numbers = f"samples {keys[0].index} and {sample['key'].index}"
                raise self._fault(
                    f"{numbers} differ in their names: only one has {', '.join(sorted(differing))}",
                    accepted="the same names in every sample",
                )
        return DictBatch(
            keys=keys,
            sample_weights=torch.tensor([sample["weight"] for sample in samples], dtype=torch.float32),
            ids=[str(sample.get("id", key.index)) for sample, key in zip(samples, keys, strict=True)],
            values={name: self._column(name, samples) for name in names},
        )

    def _column(self, name: str, samples: Sequence[dict[str, Any]]) -> Any:
        """The values of one name: a tensor [B,...], or a list."""
        values = [sample[name] for sample in samples]
        if not any(isinstance(value, _NUMBERS) for value in values):
            return values
        forms = [_form(value) for value in values]
        for sample, form in zip(samples, forms, strict=True):
            if form != forms[0]:
                first, other = (each["key"].index for each in (samples[0], sample))
                raise self._fault(
                    f"{name} is {forms[0]} in sample {first}, and {form} in sample {other}",
                    accepted="tensors of one shape and dtype",
                    hint="cut or pad it in __getitem__ or sample_at, or override collate",
                )
        return torch.stack([torch.as_tensor(value) for value in values])

    @classmethod
    def author_faults(cls) -> list[str]:
        """Members that a subclass lacks; each derived dataset is checked."""
        written = cls.__getitem__ is not DatasetBase.__getitem__ or hasattr(cls, "sample_at")
        text = "it has neither __getitem__(index) nor sample_at(index, rng): write one of them"
        return [] if written else [text]

    def _fault(self, what: str, *, accepted: str, hint: str | None = None) -> ContractError:
        return ContractError(what, where=place_of(type(self), type(self)), accepted=accepted, hint=hint)


def _form(value: object) -> str:
    """Shape and dtype of what becomes a tensor; the type of anything else."""
    if not isinstance(value, _NUMBERS):
        return f"a {type(value).__name__}"
    tensor = torch.as_tensor(value)
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
