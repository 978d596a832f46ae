"""A one-file plugin of datasets as users of torch write them: the clips of `shapes`, and broken ones."""

from __future__ import annotations

import random

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from mm_core import Component, hookimpl
from mm_core.data.datasets.shapes import ShapesDataset


class Clips(Dataset):
    def __init__(self, clips: int = 20, num_frames: int = 8, noise: float = 0.0) -> None:
        self.inner, self.noise = ShapesDataset(num_frames, 16, 16, clips=clips), noise

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> dict:
        sample = self.inner[index]
        drawn = self.noise * (torch.rand(()) + random.random())
        return {"video": (sample["pixels"] + drawn).clamp(-1, 1), "caption": sample["caption"]}


class Tutorial(Clips):
    """As the tutorial's: tokens in place of captions."""

    def __getitem__(self, index: int) -> dict:
        ids = torch.tensor([*b"a shape"]) + 3
        return {
            "video": super().__getitem__(index)["video"],
            "prompt_ids": ids,
            "prompt_mask": torch.ones_like(ids),
        }


class Stream(IterableDataset):
    def __init__(self, clips: int = 20, noise: float = 0.0) -> None:
        self.clips = Clips(clips, noise=noise)

    def __iter__(self):
        return (self.clips[index] for index in range(len(self.clips)))


class Divided(Stream):
    """Takes its share of the rows; `uneven` gives rank 0 fewer."""

    def __init__(self, clips: int = 20, uneven: int = 0, rank: int = 0, world: int = 1) -> None:
        super().__init__(clips)
        self.rows = range(rank, clips - uneven * (rank == 0), world)

    def __iter__(self):
        return (self.clips[index] for index in self.rows)


def loader(clips: int = 20, batch_size: int = 2, shuffle: bool = False, noise: float = 0.0, workers: int = 0):
    return DataLoader(Clips(clips, noise=noise), batch_size, shuffle, num_workers=workers)


def distributed(clips: int = 20, rank: int = 0, world_size: int = 1):
    data = Clips(clips)
    return DataLoader(data, 2, sampler=DistributedSampler(data, world_size, rank))


def renamed(clips: int = 20):
    """Its own collate_fn names what the dataset does not."""

    def collate(samples: list) -> dict:
        return {
            "pixels": torch.stack([sample["video"] for sample in samples]),
            "captions": [f"own {sample['caption']}" for sample in samples],
            "id": ["x", "y"],
        }

    return DataLoader(Clips(clips), 2, collate_fn=collate)


def of_tuples(clips: int = 20):
    return DataLoader(Clips(clips), 2, collate_fn=tuple)


def of_uneven_columns(clips: int = 20):
    return DataLoader(Clips(clips), 2, collate_fn=lambda rows: {"a": torch.zeros(2), "b": torch.zeros(3)})


class Uncaptioned(Clips):
    def __getitem__(self, index: int) -> dict:
        return {"video": super().__getitem__(index)["video"]}


class Numbered(Clips):
    def __getitem__(self, index: int) -> dict:
        return {**super().__getitem__(index), "caption": index}


class Shapeless(Clips):
    def __getitem__(self, index: int) -> dict:
        return {"video": torch.zeros(3, 8, 16, 16 + index % 2), "caption": ""}


class Flat(Clips):
    def __getitem__(self, index: int) -> dict:
        return {"video": torch.zeros(8, 16, 16), "caption": ""}


class Unmasked(Tutorial):
    def __getitem__(self, index: int) -> dict:
        return {name: value for name, value in super().__getitem__(index).items() if name != "prompt_mask"}


class FramesFirst(Clips):
    def __getitem__(self, index: int) -> dict:
        return {"video": super().__getitem__(index)["video"].movedim(0, 1), "caption": ""}


class ChannelsLast(Clips):
    def __getitem__(self, index: int) -> dict:
        return {"video": super().__getitem__(index)["video"].movedim(0, 3), "caption": ""}


class Picture(Clips):
    def __getitem__(self, index: int) -> dict:
        return {"video": super().__getitem__(index)["video"][:, 0], "caption": ""}


class Pairs(Clips):
    def __getitem__(self, index: int) -> tuple:
        return tuple(super().__getitem__(index).values())


class ShapelessStream(Stream):
    def __init__(self) -> None:
        self.clips = Shapeless()


class Failing(Stream):
    def __iter__(self):
        yield self.clips[0]
        raise KeyError("caption")


class Endless:
    def __iter__(self):
        return iter(())


class SharedSamples(Clips):
    def __init__(self, rank: int = 0, world: int = 1) -> None:
        super().__init__()


@hookimpl
def mm_datasets() -> list[Component]:
    classes = (Clips, Tutorial, Stream, Divided, Uncaptioned, Shapeless, Flat, ShapelessStream, Failing)
    made = (
        *classes,
        Numbered,
        Unmasked,
        FramesFirst,
        ChannelsLast,
        Picture,
        Pairs,
        Endless,
        SharedSamples,
        loader,
        distributed,
        renamed,
        of_tuples,
        of_uneven_columns,
    )
    return [Component(name=one.__name__.lower(), target=f"plain_sets:{one.__name__}") for one in made]
