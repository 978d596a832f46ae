"""What the base class of tasks does for an author, and its error where a loss is not one a sample."""

from __future__ import annotations

import inspect
import pickle

import pytest
import torch
from torch import Tensor, nn

from mm_core.contracts import DictBatch, Loss, Randomness, SampleKey, SampleRequest, TaskModule
from mm_core.contracts.bases.task_module import loss_of
from mm_core.diffusion.encoders.pixel import PixelAutoencoder
from mm_core.errors import ContractError

RNG = Randomness(7)


def batch(rows: int = 4, weights: list[float] | None = None) -> DictBatch:
    return DictBatch(
        keys=[SampleKey(2, index) for index in range(rows)],
        sample_weights=torch.tensor(weights or [1.0] * rows),
        ids=[str(index) for index in range(rows)],
        values={"x": torch.arange(3.0 * rows).reshape(rows, 3)},
    )


class Squares(TaskModule):
    """The squared output of a linear layer for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 1)

    def losses(self, batch: DictBatch) -> Tensor:
        return self.net(batch["x"])[:, 0].square()


class Noisy(Squares):
    def losses(self, batch: DictBatch, rng: Randomness) -> Tensor:
        noise = torch.stack([rng.normal((3,), "noise", *key) for key in batch.keys])
        return self.net(batch["x"] + noise)[:, 0].square() + torch.rand(len(batch))


def test_a_loss_is_the_weighted_sum_with_its_weight() -> None:
    task, given = Squares(), batch(weights=[1.0, 0.0, 0.5, 2.0])
    found = task.loss(task.prepare(given, RNG))
    rows = task.losses(given).detach()
    assert float(found.total.detach()) == pytest.approx(float(rows[0] + 0.5 * rows[2] + 2 * rows[3]))
    assert found.weight == task.weight(given) == 3.5
    found.total.backward()
    assert task.net.weight.grad is not None


def test_random_numbers_are_those_of_the_sample() -> None:
    task, given = Noisy(), batch()
    rows = task.evaluate(given, RNG, ()).sums["loss"]
    assert torch.equal(rows, task.evaluate(given, RNG, (0.5,)).sums["loss"]), "the same in every evaluation"
    noise = RNG.at("evaluation").normal((3,), "noise", 2, 2)
    alone = task.net(given["x"][2] + noise)[0].square().detach()
    assert 0 <= float(rows[2] - alone) <= 1, "the rest is drawn from the process's generator"
    torch.manual_seed(0)
    whole = task.loss(task.prepare(given, RNG)).total
    torch.manual_seed(0)
    assert torch.equal(whole, task.loss(task.prepare(given, RNG)).total)


def test_an_evaluation_has_the_mean_of_the_training_loss_and_leaves_the_generators_alone() -> None:
    task, given = Squares(), batch(weights=[1.0, 0.0, 0.5, 2.0])
    before = torch.get_rng_state()
    held_out = task.evaluate(given, RNG, ())
    assert torch.equal(before, torch.get_rng_state())
    trained = task.loss(task.prepare(given, RNG))
    mean = held_out.sums["loss"].sum() / held_out.weights.sum()
    assert float(mean) == pytest.approx(float(trained.total.detach()) / trained.weight)
    assert not held_out.sums["loss"].requires_grad


def test_a_loss_of_the_whole_batch_is_evaluated_as_its_mean() -> None:
    class Whole(Squares):
        def loss(self, inputs):
            values = self.net(inputs.batch["x"])[:, 0] @ inputs.batch.sample_weights
            return Loss(values.square(), self.weight(inputs.batch))

    task, given = Whole(), batch(weights=[1.0, 0.0, 1.0, 2.0])
    held_out = task.evaluate(given, RNG, ())
    total = task.loss(task.prepare(given, RNG)).total.detach()
    assert float(held_out.sums["loss"].sum()) == pytest.approx(float(total))
    assert held_out.weights.tolist() == [1.0, 0.0, 1.0, 2.0]
    empty = task.evaluate(batch(weights=[0.0] * 4), RNG, ())
    assert empty.sums["loss"].tolist() == [0.0] * 4


def test_prepare_may_change_the_batch_for_training_and_evaluation() -> None:
    class Blank(Squares):
        def prepare(self, batch, rng):
            batch.values["x"] = batch.values["x"] * 0
            return super().prepare(batch, rng)

    task = Blank()
    trained = task.loss(task.prepare(batch(), RNG)).total
    for total in (trained, task.evaluate(batch(), RNG, ()).sums["loss"].sum()):
        assert float(total.detach()) == pytest.approx(4 * float(task.net.bias.detach()) ** 2)

    class Other(Squares):
        def prepare(self, batch, rng):
            return batch["x"]

    with pytest.raises(ContractError, match="prepare returned a Tensor, which the loss of") as caught:
        Other().loss(Other().prepare(batch(), RNG))
    assert caught.value.where == place(Other.prepare) and "super().prepare" in str(caught.value.hint)


# -- which modules are trained -------------------------------------------------------------------


def test_what_is_assigned_is_trained_but_for_frozen_components() -> None:
    class Mixed(Squares):
        def __init__(self) -> None:
            super().__init__()
            self.autoencoder = PixelAutoencoder()
            self.held = nn.Linear(2, 2).requires_grad_(False)
            self.distance = nn.MSELoss()

    task = Mixed()
    assert (task.trainable, task.frozen) == (("net", "held"), ("autoencoder",))
    for parameter in task.parameters():
        parameter.requires_grad_(False)
    assert task.trainable == ("net", "held"), "train.freeze and adapters change parameters, not names"
    task.trainable, task.frozen = ("net",), (*task.frozen, "held")
    assert (task.trainable, task.frozen) == (("net",), ("autoencoder", "held"))


def test_a_class_may_name_its_modules() -> None:
    class Named(Squares):
        trainable = ("net",)
        frozen: tuple[str, ...] = ()

        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(2, 2)
            self.frozen = (*self.frozen, "other")

    assert (Named().trainable, Named().frozen) == (("net",), ("other",))


def place(found: object) -> str:
    return f"{__file__}, line {inspect.getsourcelines(found)[1]}"


class Scaled(Squares):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(()))


class Listed(Squares):
    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList([nn.Linear(2, 2)])


class Nothing(TaskModule):
    def losses(self, batch: DictBatch) -> Tensor:
        return batch["x"]


@pytest.mark.parametrize(
    ("made", "what", "hint"),
    [
        (Scaled, "scale belongs to the task itself, and only modules are trained", "self.net.scale = nn.Par"),
        (Listed, "towers is a ModuleList without a forward: it is never called as a whole", "one by one"),
        (
            Nothing,
            "the task has nothing to train: no module with parameters was assigned to it",
            "self.net = ...",
        ),
    ],
)
def test_what_cannot_be_trained_is_a_readable_error(made: type[TaskModule], what: str, hint: str) -> None:
    with pytest.raises(ContractError) as caught:
        _ = made().trainable
    assert (caught.value.what, caught.value.where) == (what, place(made))
    assert hint in str(caught.value.hint)


# -- what losses may return ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        (lambda rows: float(rows.detach().sum()), "losses returned a float, not a tensor"),
        (lambda rows: None, "losses returned a NoneType, not a tensor"),
        (lambda rows: rows.mean(), "losses returned a tensor of the shape [] for 4 samples"),
        (lambda rows: rows[:3], "losses returned a tensor of the shape [3] for 4 samples"),
        (lambda rows: rows[:, None], "losses returned a tensor of the shape [4, 1] for 4 samples"),
        (lambda rows: rows.long(), "losses returned a tensor of the dtype torch.int64"),
        (lambda rows: rows.detach(), "losses returned a tensor without a gradient"),
    ],
)
def test_what_is_not_one_loss_a_sample_is_a_readable_error(wrong, what: str) -> None:
    class Wrong(Squares):
        def losses(self, batch):
            return wrong(super().losses(batch))

    task = Wrong()
    with pytest.raises(ContractError) as caught:
        task.loss(task.prepare(batch(), RNG))
    assert (caught.value.what, caught.value.where) == (what, place(Wrong.losses))
    if "gradient" in what:
        task.evaluate(batch(), RNG, ())
        return
    assert caught.value.accepted == "one loss a sample: a floating-point tensor of the shape [4]"
    assert "take no mean or sum over the samples" in str(caught.value.hint)
    with pytest.raises(ContractError, match="losses returned"):
        task.evaluate(batch(), RNG, ())


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        (lambda total: total, "a Tensor, not a Loss"),
        (lambda total: Loss(2.0, 1.0), "a Loss whose total is not a floating-point scalar, but float"),
        (lambda total: Loss(total[None], 1.0), "a Loss whose total is not a floating-point scalar, but [1]"),
        (lambda total: Loss(total.detach(), 1.0), "a Loss whose total has no gradient"),
        (lambda total: Loss(total, -1.0), "a Loss with the weight -1.0"),
        (lambda total: Loss(total, float("nan")), "a Loss with the weight nan"),
    ],
)
def test_what_is_no_sum_with_its_weight_is_a_readable_error(wrong, what: str) -> None:
    class Wrong(Squares):
        def loss(self, inputs):
            return wrong(super().loss(inputs).total)

    task = Wrong()
    with pytest.raises(ContractError) as caught:
        loss_of(task, task.prepare(batch(), RNG))
    assert (caught.value.what, caught.value.where) == (f"loss returned {what}", place(Wrong.loss))
    assert str(caught.value.accepted).startswith("Loss(total, weight): ")
    right = Squares()
    assert loss_of(right, right.prepare(batch(), RNG)).weight == 4.0


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_a_weight_that_is_no_weight_is_a_readable_error(weight: float) -> None:
    with pytest.raises(ContractError) as caught:
        Squares().weight(batch(weights=[1.0, weight, 1.0, 1.0]))
    assert caught.value.what == f"the batch has the sample weights [1.0, {weight}, 1.0, 1.0]"
    assert caught.value.where == place(Squares)
    assert caught.value.accepted == "finite weights of 0 or more"


def test_a_task_without_clips_is_reported_and_one_with_clips_is_not() -> None:
    for ask in (Squares().check_request, Squares().sample):
        with pytest.raises(ContractError, match="the task Squares makes no clips") as caught:
            ask(SampleRequest(prompts=("a",)))
        assert caught.value.where == place(Squares) and "validation.samples" in str(caught.value.hint)

    class Clips(Squares):
        def sample(self, request):
            return []

    Clips().check_request(SampleRequest(prompts=("a",)))


def test_the_defaults_change_nothing_and_reach_data_workers() -> None:
    task, given = Squares(), batch()
    transform = pickle.loads(pickle.dumps(task.batch_transform()))
    assert transform(given) is given
    assert task.bins is None
    task.check({})
