"""A task that fills in what is hidden of small pictures, with a frozen part, bins, clips and answers."""

import torch
from torch import nn

from mm_core import Component, hookimpl
from mm_core.contracts import (
    Bins,
    CachePart,
    Clip,
    DatasetBase,
    DictBatch,
    Evaluation,
    FeatureBatch,
    Loss,
    Randomness,
    StepFlops,
    TaskModule,
)
from mm_core.errors import ContractError

EDGES = (0.0, 0.25, 0.5, 0.75, 1.0)


class Pictures(DatasetBase):
    def __init__(self, size: int = 6) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index):
        values = torch.arange(12.0).view(3, 2, 2) * (index + 1)
        return {"picture": values.sin(), "words": f"picture {index}"}

    @classmethod
    def conversing(cls, size: int = 6):
        return Letters()


class Letters:
    """Questions as the codes of their letters."""

    def prompt(self, turns):
        return {"codes": torch.tensor([[ord(letter) for letter in turns[-1].text]])}


class Lengths:
    """A frozen component: the number of letters of a caption."""

    def __init__(self) -> None:
        self.unit = None

    def missing_files(self):
        return []

    def load(self, device):
        self.unit = torch.full((1,), 0.1, device=device)

    def __call__(self, words):
        return torch.tensor([[float(len(each))] for each in words]) * self.unit


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(13, width), nn.Linear(width, 12)
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("scale", torch.empty(1))

    def init_weights(self):
        self.first.reset_parameters()
        self.last.reset_parameters()
        nn.init.ones_(self.scale)

    def forward(self, pictures, length):
        hidden = self.first(torch.cat([pictures.flatten(1), length], 1)).relu()
        return self.last(self.dropout(hidden) * self.scale).view_as(pictures).clone()


def count_letters(batch):
    batch.values["letters"] = torch.tensor([len(words) for words in batch["words"]])
    return batch


class Good(TaskModule):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.net = Net(width)
        self.lengths = Lengths()

    @property
    def bins(self):
        return Bins("hidden", EDGES, (0.25,) * 4)

    def batch_transform(self):
        return count_letters

    def check(self, batch_spec):
        if batch_spec["size"] < 1:
            raise ContractError("more than 9 pictures are needed")

    def hidden(self, batch, rng):
        return torch.stack([torch.tensor(rng.uniform("hidden", *key)) for key in batch.keys])

    def cache_parts(self):
        return (CachePart("parts", ("lengths",), "media"),)

    def features(self, part, given):
        rows = zip(given["picture"], self.lengths(given["words"]), strict=True)
        return [{"picture": picture, "length": length} for picture, length in rows]

    def use_texts(self, find):
        """It samples from noise and the lengths of prompts."""

    def prepare(self, batch, rng):
        if isinstance(batch, FeatureBatch):
            values = {name.removeprefix("parts."): value for name, value in batch.features.items()}
            batch = DictBatch(batch.keys, batch.sample_weights, batch.ids, values)
        return super().prepare(batch, rng)

    def losses(self, batch, rng):
        pictures, share = batch["picture"], self.hidden(batch, rng)
        noise = torch.stack([rng.normal((3, 2, 2), "noise", *key) for key in batch.keys])
        mixed = pictures + share.view(-1, 1, 1, 1) * noise
        with torch.no_grad():
            length = batch["length"] if "length" in batch.values else self.lengths(batch["words"])
        return (self.net(mixed, length) - pictures).square().flatten(1).mean(1)

    def loss(self, inputs):
        batch, rng = inputs.batch, inputs.rng
        losses = self.losses(batch, rng) * batch.sample_weights
        places = torch.bucketize(self.hidden(batch, rng), torch.tensor(EDGES[1:-1]))
        bins = torch.zeros(2, 4).index_add(1, places, torch.stack([losses.detach(), batch.sample_weights]))
        return Loss(losses.sum(), self.weight(batch), bins=bins, flops=100.0 * len(batch))

    def sample_flops(self, batch_spec, recomputed):
        return StepFlops(40.0, 60.0, 40.0 if recomputed else 0.0)

    def sample_forward(self, batch_spec):
        with torch.device("meta"):
            return "net", {"pictures": torch.empty(1, 3, 2, 2), "length": torch.empty(1, 1)}

    def notes(self):
        return ["pictures are small"]

    def evaluate(self, batch, rng, quantiles):
        losses = self.losses(batch, rng.at("evaluation"))
        return Evaluation({"loss": losses}, torch.ones(len(batch)))

    def check_answers(self):
        """Any model counts letters."""

    def check_question(self, question):
        assert question["codes"].numel()

    def answer(self, questions, decoding, numbers, on_text=None, stopped=None):
        found = []
        for place, (question, number) in enumerate(zip(questions, numbers, strict=True)):
            rng, words = Randomness(decoding.seed).at("answer", number), ""
            for step in range(decoding.max_new_tokens):
                drawn = rng.uniform(step) if decoding.temperature else 0.5
                words += (piece := chr(97 + int(question["codes"].sum() * drawn) % 26))
                if on_text and place == 0:
                    on_text(piece)
                if stopped and stopped():
                    break
            found.append(words)
        return found

    def check_request(self, request):
        assert request.prompts

    def sample(self, request):
        rows = range(request.first, request.first + len(request.prompts))
        noise = torch.stack([Randomness(request.seed).normal((3, 2, 2), "clip", row) for row in rows])
        pictures = self.net(noise, self.lengths(request.prompts)).clamp(-1, 1)
        return [
            Clip(picture[:, None], 8.0, prompt)
            for picture, prompt in zip(pictures, request.prompts, strict=True)
        ]


@hookimpl
def mm_datasets():
    return [Component("pictures", "good_task:Pictures")]


@hookimpl
def mm_tasks():
    return [Component("good", "good_task:Good")]
