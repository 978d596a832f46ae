"""Initial weights of a Transformers model, those of the library's own `from_config`, one tensor at a time."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING
from unittest.mock import patch

import torch
from torch import Tensor, nn

from mm_core.contracts import Randomness
from mm_core.errors import ContractError, plural
from mm_core.modules.initialise import fill_whole
from mm_core.tasks.pretrained.init_tape import Group, Tape

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SEED = "mm_seed"


@contextmanager
def recorded() -> Iterator[Tape]:
    """A context to build a task's Transformers model without memory, while a tape records its
    initialisation."""
    from transformers import PreTrainedModel

    before, tape = PreTrainedModel._initialize_weights, Tape()

    @functools.wraps(before)
    def initialise_recorded(
        self: PreTrainedModel, module: nn.Module, *args: object, **kwargs: object
    ) -> None:
        with tape.initialising(module):
            before(self, module, *args, **kwargs)

    with patch.object(PreTrainedModel, "_initialize_weights", initialise_recorded), tape.recording():
        yield tape


def prepare_initialisation(model: PreTrainedModel, make: Callable[[], PreTrainedModel]) -> None:
    """Gives a task's Transformers model an `init_weights` that fills it as its authors do.

    Args:
        model: the model, with parameters on the meta device.
        make: builds the model again, to record its initialisation; not called if files contain all weights.
    """
    tables = {name: buffer.clone() for name, buffer in model.named_buffers()}
    # The engine seeds this buffer like any other tensor; all other draws derive from it.
    model.register_buffer(_SEED, torch.zeros(1, device="cpu"), persistent=False)

    @functools.cache
    def recipe() -> Recipe:
        with recorded() as tape:
            model = make()
        return Recipe(tape, model)

    def init_weights() -> None:
        seed = nn.init.uniform_(getattr(model, _SEED))
        rng = Randomness(int(float(seed) * 2**24))
        drawn: dict[str, Tensor] = {}  # the complete parameters of one module

        def whole(name: str, unset: list[str]) -> Tensor | None:
            if name not in drawn:
                drawn.clear()
                drawn.update(recipe().draw(recipe().unit(name), rng))
            if name not in drawn:
                unset.append(name)
            return drawn.get(name)

        unset: list[str] = []
        # Buffers on the meta device are made of parameters.
        made = [(name, model.get_buffer(name)) for name, table in tables.items() if table.is_meta]
        for name, parameter in [*model.named_parameters(), *made]:
            fill_whole(parameter, functools.partial(whole, name, unset if parameter.numel() else []))
        if unset:
            raise ContractError(
                f"{recipe().model} does not initialise "
                f"{plural(len(unset), 'parameter')}: {', '.join(unset[:8])}",
                accepted="parameters that the constructor or _init_weights of the model fills",
                hint="use files that contain them (task.weights: files), or fill them in _init_weights",
            )
        for name, table in tables.items():
            if not table.is_meta:
                model.get_buffer(name).copy_(table)

    model.init_weights = init_weights


class Recipe:
    """Computes the initial parameters of a task's Transformers model from its recorded initialisation.

    Args:
        tape: the recording of the model's constructor.
        model: the recorded model.
    """

    def __init__(self, tape: Tape, model: nn.Module) -> None:
        self.model = type(model).__name__
        self._tape = tape
        self._places = tape.places(model)
        paths = {id(module): path for path, module in model.named_modules()}
        self._units: dict[int, list[str]] = {}
        for name, place in self._places.items():
            self._units.setdefault(id(tape.home(place)), []).append(name)
        self._keys: dict[Group, tuple[str | int, ...]] = {}
        counts: Counter[tuple[str | int, ...]] = Counter()
        for group in tape.groups():
            key = _key(group, paths)
            counts[key] += 1
            self._keys[group] = key if counts[key] == 1 else (*key, counts[key])

    def unit(self, name: str) -> list[str]:
        """Names of all parameters in the same module, which share a generator; [] for a parameter that the
        model never initialises."""
        place = self._places.get(name)
        return self._units[id(self._tape.home(place))] if place is not None else []

    def draw(self, names: Iterable[str], rng: Randomness) -> dict[str, Tensor]:
        """Draws complete initial parameters on the CPU; they depend on the seed and the model alone."""
        places = {name: self._places[name] for name in names}
        return self._tape.play(places, lambda group: rng.seed32(*self._keys[group]))


def _key(group: Group, paths: Mapping[int, str]) -> tuple[str | int, ...]:
    call, home = group
    at = home if isinstance(home, int) else paths.get(id(home), "")
    if call is None:
        return (at, "made")
    by = paths.get(id(call.module), "")
    return (by,) if at == by else (by, at)
