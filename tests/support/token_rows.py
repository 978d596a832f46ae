"""A one-file plugin for tests of the task `pretrained`: rows of token ids of uneven lengths."""

from mm_core import Component, hookimpl

WORDS = range(3, 40)


@hookimpl
def mm_datasets():
    return [Component(name="token_rows", target="token_rows:TokenRows")]


class TokenRows:
    """A dataset of token ids for the task `pretrained`.

    Args:
        kind: `tokens` (labels are the ids, without the first third), `classes`, `numbers`, `marks`
        (several yes or
            no) or `images` (tokens with two small images per row, in the format of Qwen-VL's processor).
        segments: inputs added to batches whose first row has an odd number.
        broken: number of a row that cannot be read.
    """

    def __init__(
        self,
        kind: str = "tokens",
        rows: int = 24,
        seed: int = 0,
        segments: bool = False,
        broken: int | None = None,
    ) -> None:
        self.kind, self.rows, self.seed, self.segments = kind, rows, seed, segments
        self.broken = broken

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int):
        import torch

        from mm_core.errors import DataError

        if index == self.broken:
            raise DataError("the row is damaged", where=f"row {index}")
        rng = torch.Generator().manual_seed(1000 * self.seed + index)
        length = int(torch.randint(4, 14, (1,), generator=rng))
        return {"ids": torch.randint(3, 40, (length,), generator=rng), "index": index}

    def collate(self, samples):
        import torch

        from mm_core.contracts import TextBatch

        rows = [sample["ids"] for sample in samples]
        if self.kind == "images":
            rows = [torch.cat([torch.tensor([40, 42, 41] * 2), row]) for row in rows]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        inputs = {"input_ids": ids, "attention_mask": mask}
        if self.segments and samples[0]["index"] % 2:
            inputs["token_type_ids"] = torch.zeros_like(ids)
        if self.kind in ("tokens", "images"):
            labels = ids.masked_fill(mask == 0, -100)
            for row, known in enumerate(rows):
                labels[row, : max(1, len(known) // 3)] = -100
        elif self.kind == "classes":
            labels = torch.tensor([int(row.sum()) % 3 for row in rows])
        elif self.kind == "numbers":
            labels = torch.tensor([float(row.sum()) / 100 for row in rows])
        else:
            labels = torch.stack([torch.tensor([float(w in row) for w in (5, 7, 9)]) for row in rows])
        inputs["labels"] = labels
        if self.kind == "images":
            inputs["labels"] = labels.masked_fill((ids >= 40) & (ids <= 42), -100)
            images = 2 * len(rows)
            noise = torch.Generator().manual_seed(samples[0]["index"])
            pixels = [torch.randn(8, 96, generator=noise.manual_seed(s["index"])) for s in samples]
            inputs["pixel_values"] = torch.cat(pixels)
            inputs["image_grid_thw"] = torch.tensor([[1, 2, 2]] * images)
            inputs["mm_token_type_ids"] = (ids == 42).int()
        return TextBatch(
            [sample["key"] for sample in samples],
            torch.tensor([sample["weight"] for sample in samples]),
            [str(sample["index"]) for sample in samples],
            inputs=inputs,
        )
