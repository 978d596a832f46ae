"""Recording of a model's initialisation: made while its constructor runs, replayed for single tensors.

Parameters of a recorded model have no memory. Everything that constructors and initialisers do to them (to
all of it, to rows, through `.data`, from a parent module, twice) is recorded. Each parameter can then be
computed separately, on any rank, with the values it has in a model built normally.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from unittest.mock import patch

import torch
from torch import Tensor, UntypedStorage, nn
from torch._ops import OpOverload
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map_only, tree_unflatten

from mm_core.contracts import Randomness
from mm_core.device.torch_private import FakeTensor, FakeTensorMode, TorchDispatchMode, without_modes
from mm_core.modules.torch_calls import Args, Function, Kwargs

_UNFILLED = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty"}
_UNFILLED |= {"aten::new_empty_strided"}
_COPIES = {"aten::clone", "aten::_to_copy"}
_WHOLE = {"aten::fill_", "aten::zero_", "aten::copy_", "aten::normal_", "aten::uniform_"}
# Operations whose result leaves the recording: a Python number, or a shape that depends on values.
_LEAVES = {"aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero", "aten::nonzero"}
_LEAVES |= {"aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::item"}


@dataclass(frozen=True)
class Place:
    """The place of a tensor in the recorded initialisation of a task's model."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(eq=False)
class _Call:
    """One call of a model's initialiser for a module."""

    module: nn.Module


@dataclass(eq=False)
class _Storage:
    held: UntypedStorage  # kept alive so that its address is not reused
    home: nn.Module | None  # the module that owns it as a parameter
    writers: list[_Node] = field(default_factory=list)
    unread: list[_Node] = field(default_factory=list)  # writers since another storage last read it


@dataclass(eq=False)
class _Node:
    """One recorded operation."""

    order: int
    call: _Call | None
    function: Function
    leaves: list[object]  # arguments; tensors of the tape as `Place`
    spec: TreeSpec
    made: list[tuple[int, int]]  # (index of an output, new storage)
    uses: set[int]  # storages read or written
    group: Group | None = None  # random operations of a group share a generator, in order


Group = tuple[_Call | None, nn.Module | int]
"""Random draws that share a generator: those of one call for one module's parameters, or one operation."""


class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records how a task's Transformers model initialises its parameters, while it is built in `recording`.

    Numbers that control a constructor's flow are computed at once. Random values drawn for such numbers, for
    buffers, or by a constructor outside of parameters are the same for every seed.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._order = count()
        self._storages: dict[int, _Storage] = {}
        self._numbers: dict[int, int] = {}  # address of a storage -> its number
        self._unfilled: dict[int, UntypedStorage] = {}  # real memory not yet written, by address
        self._groups: dict[Group, list[_Node]] = {}
        self._settled: dict[Group, int] = {}  # groups drawn during the recording
        self._call: _Call | None = None

    # -- recording -------------------------------------------------------------------------------

    @contextmanager
    def recording(self) -> Iterator[None]:
        """A context to build a task's model in: its parameters are recorded from their registration on."""
        register = nn.Module.register_parameter
        truncated: Function = nn.init._no_grad_trunc_normal_

        def register_recorded(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
            register(module, name, param)
            if param is not None and not isinstance(param, FakeTensor):
                module._parameters[name] = self._adopt(param, module)

        def draw_truncated(tensor: Tensor, *args: object, **kwargs: object) -> object:
            # It reads the values it draws, and draws again: recorded as one operation.
            if not isinstance(tensor, FakeTensor):
                return truncated(tensor, *args, **kwargs)
            self._record(truncated, (tensor, *args), kwargs, [tensor], None, random=True, whole=True)
            return tensor

        with (
            torch.random.fork_rng(devices=[]),
            torch.device("cpu"),
            patch.object(nn.Module, "register_parameter", register_recorded),
            patch.object(nn.init, "_no_grad_trunc_normal_", draw_truncated),
        ):
            torch.default_generator.manual_seed(0)
            with self:
                yield
        self._unfilled.clear()

    @contextmanager
    def initialising(self, module: nn.Module) -> Iterator[None]:
        """A context for the initialiser of a module: new tensors made in it are recorded as well."""
        before, self._call = self._call, _Call(module)
        try:
            yield
        finally:
            self._call = before

    def __torch_dispatch__(
        self, func: OpOverload[..., object], types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        recorded = [tensor for tensor in tensors if isinstance(tensor, FakeTensor)]
        written = _written(func, args, kwargs)
        name = func._schema.name
        if self._call is not None and name == "aten::lift_fresh":
            return self._constant(args[0], self._call.module)
        if not recorded and (tensors or self._call is None):
            found = func(*args, **kwargs)
            self._follow(name, tensors, written, found)
            return found
        real = [tensor for tensor in written if not isinstance(tensor, FakeTensor)]
        if real or name in _LEAVES:
            args, kwargs = tree_map_only(FakeTensor, self.value, (args, kwargs))
            found = func(*args, **kwargs)
            self._follow(name, [], real, found)
            return found
        with self._fake:
            found = func(*args, **kwargs)
        random = torch.Tag.nondeterministic_seeded in func.tags
        self._record(func, args, kwargs, written, found, random, whole=name in _WHOLE)
        return found

    def _follow(self, name: str, inputs: list[Tensor], written: list[Tensor], found: object) -> None:
        """Updates the table of memory that is not yet written."""
        empty = name in _UNFILLED or (
            name in _COPIES and any(_address(tensor) in self._unfilled for tensor in inputs)
        )
        if empty and isinstance(found, Tensor):
            self._unfilled[_address(found)] = found.untyped_storage()
        for tensor in written:
            self._unfilled.pop(_address(tensor), None)

    def _record(
        self,
        function: Function,
        args: Args,
        kwargs: Kwargs,
        written: list[Tensor],
        found: object,
        random: bool = False,
        whole: bool = False,
    ) -> None:
        leaves, spec = tree_flatten((args, kwargs))
        leaves = [self._place(leaf) if isinstance(leaf, FakeTensor) else leaf for leaf in leaves]
        uses = {leaf.storage for leaf in leaves if isinstance(leaf, Place)}
        outputs = [(i, t) for i, t in enumerate(tree_flatten(found)[0]) if isinstance(t, FakeTensor)]
        new = [(i, t) for i, t in outputs if _address(t) not in self._numbers]
        if not written and not new:
            return  # a view
        home = self._call.module if self._call else None
        made = [(i, self._keep(t, home)) for i, t in new]
        node = _Node(next(self._order), self._call, function, leaves, spec, made, uses)
        changed = [self._place(tensor) for tensor in written]
        sources = [leaf for leaf in leaves if isinstance(leaf, Place) and leaf not in changed]
        for place in changed:
            storage = self._storages[place.storage]
            covers = torch.Size(place.size).numel() * place.dtype.itemsize == storage.held.nbytes()
            if whole and covers and all(source.storage != place.storage for source in sources):
                self._forget(storage)
            storage.writers.append(node)
            storage.unread.append(node)
        for source in sources:
            self._storages[source.storage].unread.clear()
        for _, number in made:
            self._storages[number].writers.append(node)
        if random:
            first = changed[0].storage if changed else made[0][1]
            node.group = (self._call, self._storages[first].home or node.order)
            self._groups.setdefault(node.group, []).append(node)

    def _forget(self, storage: _Storage) -> None:
        """Drops earlier calls' writes to a storage that was never read and is now overwritten completely."""
        for node in storage.unread:
            if node.call is not self._call:
                storage.writers.remove(node)
                if node.group is not None:
                    self._groups[node.group].remove(node)
        storage.unread = [node for node in storage.unread if node.call is self._call]

    def _keep(self, tensor: Tensor, home: nn.Module | None) -> int:
        number = len(self._storages)
        self._storages[number] = _Storage(tensor.untyped_storage(), home)
        self._numbers[_address(tensor)] = number
        return number

    def _place(self, tensor: Tensor) -> Place:
        number = self._numbers[_address(tensor)]
        size, stride = tuple(tensor.shape), tuple(tensor.stride())
        return Place(number, tensor.dtype, size, stride, int(tensor.storage_offset()))

    def _empty(self, like: Tensor) -> Tensor:
        with without_modes(), self._fake:
            return torch.empty(like.shape, dtype=like.dtype, device="cpu")

    def _constant(self, value: Tensor, home: nn.Module | None) -> Tensor:
        """A recorded tensor that starts with a value."""
        tensor = self._empty(value)
        self._keep(tensor, home)
        self._record(Tensor.copy_, (tensor, value), {}, [tensor], None, whole=True)
        return tensor

    def _adopt(self, param: nn.Parameter, module: nn.Module) -> nn.Parameter:
        value = param.detach()
        if _address(value) in self._unfilled:
            del self._unfilled[_address(value)]
            tensor = self._empty(value)
            self._keep(tensor, module)
        else:
            flat = value.flatten()
            if len(flat) > 1 and bool((flat == flat[0]).all()):
                value = flat[:1].clone().expand(value.shape)
            tensor = self._constant(value, module)
        adopted = nn.Parameter(tensor, requires_grad=param.requires_grad)
        vars(adopted).update(vars(param))
        return adopted

    # -- playing ---------------------------------------------------------------------------------

    def value(self, tensor: Tensor) -> Tensor:
        """The current values of a recorded parameter or buffer."""
        with without_modes():
            place = self._place(tensor)
            for storage in self._needed([place.storage])[1]:
                self._storages[storage].unread.clear()
            return _at(place, self._play([place.storage], self._settle))

    def _settle(self, group: Group) -> int:
        return Randomness(0).seed32("settled", self._settled.setdefault(group, len(self._settled)))

    def _needed(self, numbers: Iterable[int]) -> tuple[list[_Node], set[int]]:
        """(the operations that the storages depend on, all storages used by these operations)."""
        todo, known, nodes = list(numbers), set(numbers), set()
        while todo:
            new: list[_Node] = []
            for node in self._storages[todo.pop()].writers:
                new += [node] if node.group is None else self._groups[node.group]
            for node in new:
                if node not in nodes:
                    nodes.add(node)
                    further = (node.uses | {number for _, number in node.made}) - known
                    known |= further
                    todo += further
        return sorted(nodes, key=lambda node: node.order), known

    def _play(self, numbers: Iterable[int], seed: Callable[[Group], int]) -> dict[int, Tensor]:
        """Replays the storages and everything they depend on, each as a flat tensor that owns its memory."""
        nodes, known = self._needed(numbers)
        made = {number for node in nodes for _, number in node.made}
        sizes = {number: self._storages[number].held.nbytes() for number in known - made}
        found = {n: torch.empty(size, dtype=torch.uint8, device="cpu") for n, size in sizes.items()}
        states: dict[Group, Tensor] = {}
        with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("cpu"):
            for node in nodes:
                leaves = [_at(leaf, found) if isinstance(leaf, Place) else leaf for leaf in node.leaves]
                args, kwargs = tree_unflatten(leaves, node.spec)
                if node.group is None:
                    result = node.function(*args, **kwargs)
                else:
                    kwargs.pop("generator", None)
                    if node.group in states:
                        torch.default_generator.set_state(states[node.group])
                    else:
                        torch.default_generator.manual_seed(seed(node.group))
                    result = node.function(*args, **kwargs)
                    states[node.group] = torch.default_generator.get_state()
                outputs = tree_flatten(result)[0]
                found |= {number: outputs[index] for index, number in node.made}
        return found

    # -- the model --------------------------------------------------------------------------------

    def places(self, model: nn.Module) -> dict[str, Place]:
        """The places of parameters in the recorded initialisation of a task's model, by all their names.

        Includes buffers made of parameters; leaves out tensors that nothing wrote to.
        """
        for module in model.modules():
            for name, param in module._parameters.items():
                if param is not None and not isinstance(param, FakeTensor):  # not added by registration
                    module._parameters[name] = self._adopt(param, module)
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
        found = {name: self._place(tensor) for name, tensor in named if isinstance(tensor, FakeTensor)}
        return {name: place for name, place in found.items() if self._storages[place.storage].writers}

    def home(self, place: Place) -> nn.Module | None:
        """The module of a task's model that owns a recorded parameter."""
        return self._storages[place.storage].home

    def play(self, places: Mapping[str, Place], seed: Callable[[Group], int]) -> dict[str, Tensor]:
        """Computes parameters of a task's model by replaying their recorded initialisation.

        Args:
            places: the tensors to compute, by name.
            seed: returns the seed of a group of draws.
        """

        def of_group(group: Group) -> int:
            return self._settle(group) if group in self._settled else seed(group)

        found = self._play([place.storage for place in places.values()], of_group)
        return {name: _at(place, found) for name, place in places.items()}

    def groups(self) -> list[Group]:
        """All groups of random draws in the initialisation of a task's model, in order."""
        return [group for group, nodes in self._groups.items() if nodes]


def _address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _at(place: Place, found: Mapping[int, Tensor]) -> Tensor:
    memory = found[place.storage].untyped_storage()
    empty = torch.empty(0, dtype=place.dtype, device="cpu")
    return empty.set_(memory, place.offset, place.size, place.stride)


def _written(func: OpOverload[..., object], args: Args, kwargs: Kwargs) -> list[Tensor]:
    """The arguments that an operation writes to."""
    found: list[Tensor] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            found += [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]
    return found
