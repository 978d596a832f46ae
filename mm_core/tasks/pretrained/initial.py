"""The weights with which a model of Transformers begins: those of the library's own `from_config`."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING
from unittest.mock import patch

import torch
from torch import Tensor, nn

from mm_core.contracts import Randomness
from mm_core.errors import ContractError
from mm_core.modules.initialise import fill_whole
from mm_core.tasks.pretrained.init_tape import Group, Tape

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SEED = "mm_seed"


@contextmanager
def recorded() -> Iterator[Tape]:
    """Within it, models of Transformers are built without memory for their parameters, and the tape knows how
    they begin."""
    from transformers import PreTrainedModel

    before, tape, thread = PreTrainedModel._initialize_weights, Tape(), threading.get_ident()

    @functools.wraps(before)
    def initialise_recorded(
        self: PreTrainedModel, module: nn.Module, *args: object, **kwargs: object
    ) -> None:
        own = threading.get_ident() == thread  # others build models of their own meanwhile
        with tape.initialising(module) if own else nullcontext():
            before(self, module, *args, **kwargs)

    with patch.object(PreTrainedModel, "_initialize_weights", initialise_recorded), tape.recording():
        yield tape


def prepare_initialisation(model: PreTrainedModel, make: Callable[[], PreTrainedModel]) -> None:
    """Has the engine fill the model as its authors do: tables as computed, weights as they draw them.

    Args:
        make: builds the model again, to see how it begins; not called where files hold all weights.
    """
    tables = {name: buffer.clone() for name, buffer in model.named_buffers()}
    # A buffer that the engine seeds as it seeds any other tensor: the rest is drawn from it.
    model.register_buffer(_SEED, torch.zeros(1, device="cpu"), persistent=False)

    @functools.cache
    def recipe() -> Recipe:
        with recorded() as tape:
            model = make()
        return Recipe(tape, model)

    def init_weights() -> None:
        seed = nn.init.uniform_(getattr(model, _SEED))
        rng = Randomness(int(float(seed) * 2**24))
        drawn: dict[str, Tensor] = {}  # the parameters of one module, each whole

        def whole(name: str, unset: list[str]) -> Tensor | None:
            if name not in drawn:
                drawn.clear()
                drawn.update(recipe().draw(recipe().unit(name), rng))
            if name not in drawn:
                unset.append(name)
            return drawn.get(name)

        unset: list[str] = []
        # Buffers without a value are made of parameters.
        made = [(name, model.get_buffer(name)) for name, table in tables.items() if table.is_meta]
        for name, parameter in [*model.named_parameters(), *made]:
            fill_whole(parameter, functools.partial(whole, name, unset if parameter.numel() else []))
        if unset:
            raise ContractError(
                f"{recipe().model} leaves {len(unset)} parameters unset: {', '.join(unset[:8])}",
                accepted="what its constructor or its _init_weights gives values to",
                hint="take weights that hold them (task.weights: files), or have _init_weights fill them",
            )
        for name, table in tables.items():
            if not table.is_meta:
                model.get_buffer(name).copy_(table)

    model.init_weights = init_weights


class Recipe:
    """How the parameters of a model begin.

    Args:
        tape: of its constructor.
        model: it, as recorded.
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
        """Names of the parameters of the same module, which are drawn by one generator; [] for one that
        nothing sets."""
        place = self._places.get(name)
        return self._units[id(self._tape.home(place))] if place is not None else []

    def draw(self, names: Iterable[str], rng: Randomness) -> dict[str, Tensor]:
        """These parameters, whole, on the CPU: a function of the seed and the model alone."""
        places = {name: self._places[name] for name in names}
        return self._tape.play(places, lambda group: rng.seed32(*self._keys[group]))


def _key(group: Group, paths: Mapping[int, str]) -> tuple[str | int, ...]:
    call, home = group
    at = home if isinstance(home, int) else paths.get(id(home), "")
    if call is None:
        return (at, "made")
    by = paths.get(id(call.module), "")
    return (by,) if at == by else (by, at)
