"""Records the numbers of a PyTorch training loop for `mm align compare`. Needs torch and nothing else.

recorder = Recorder("A", {"predictor": model})  # the name that the model has in the other run
for ...:
    recorder.inputs(latents=noisy, timestep=timestep, text=states, target=target)  # then the forward
    recorder.loss(loss)  # then loss.backward()
    recorder.before_update(grad_norm)  # then optimizer.step()
    recorder.after_update(optimizer)
recorder.close()
"""

import inspect
import json
import weakref
from collections.abc import Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

WIDTH, SKETCH, ROWS = 4096, 8, 1 << 20


@cache
def _tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """Fixed random signs and odd factors of rows, and from the end of columns; the same on every machine."""
    factors = torch.randint(-(1 << 62), 1 << 62, (ROWS,), generator=torch.Generator().manual_seed(20)) * 2 + 1
    return factors.sign().float().to(device), factors.to(device)


def statistics(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Minimum, maximum, mean and L2 norm of the finite elements, share of the others, and SKETCH sums with
    random signs, whose distance estimates that of two tensors; second, an int64 hash of the bits."""
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor.resolve_neg()
    flat = (tensor.byte() if tensor.dtype == torch.bool else tensor).detach().reshape(-1)
    flat = flat.clone() if flat.storage_offset() % 8 else flat
    values, count = flat if flat.dtype == torch.float64 else flat.float(), max(1, flat.numel())
    norm, wrong = torch.linalg.vector_norm(values), values.new_zeros(())
    if not (norm.is_cpu and norm.item() < float("inf")):  # elsewhere, asking would wait for the device
        wrong = (~torch.isfinite(values)).to(values.dtype).sum() / count
        values = torch.nan_to_num(values, 0.0, 0.0, 0.0)
        norm = torch.linalg.vector_norm(values)
    edges = (values.amin(), values.amax()) if flat.numel() else (wrong, wrong)
    figures = torch.stack([*edges, values.sum() / count, norm, wrong])
    width, size = min(WIDTH, max(8, count // 8 * 8)) * (1 + count // (WIDTH * ROWS)), flat.element_size()
    rows, (signs, factors) = flat.numel() // width, _tables(flat.device)
    grid, rest = values[: rows * width].view(rows, width), values[rows * width :]
    columns = signs[:rows].to(values.dtype) @ grid
    columns[: len(rest)] += rest * signs[rows]
    bits = flat[: rows * width].view(torch.int64).view(rows, width * size // 8)  # 64 at once are added fast
    rest = flat[rows * width :].view(getattr(torch, f"int{8 * size}"))
    hashed = (bits.sum(1) * factors[:rows]).sum() * 3 + (rest * factors[: len(rest)]).sum() * 5
    sketch = (columns * signs[-width:]).view(-1, SKETCH).sum(0)
    return torch.cat([figures, sketch]), hashed + (bits.sum(0) * factors[-bits.shape[1] :]).sum()


def flatten(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors in nested lists, tuples, mappings and dataclasses, with their paths."""
    if isinstance(value, Tensor):
        if type(value).__torch_dispatch__ == Tensor.__torch_dispatch__ or hasattr(value, "full_tensor"):
            yield path or "0", value  # others may hold no numbers
    elif hasattr(value, "__dataclass_fields__"):
        value = {name: getattr(value, name) for name in value.__dataclass_fields__}
    listed = enumerate(value) if isinstance(value, list | tuple) else ()
    for key, each in value.items() if isinstance(value, Mapping) else listed:
        yield from flatten(each, f"{path}.{key}" if path else str(key))


class Recorder:
    """Records the models of a training loop into a new folder.

    Args:
        out: the folder.
        roots: the models, by the name that their modules' names begin with.
        rank: of this process. Rank 0 writes parameters and optimizer states, which all ranks gather.
        step: number of the first step.
        facts: settings and seeds, for `mm align checklist`.
        weights: whether to store the initial weights, for `mm align record --like`.
    """

    def __init__(
        self, out: str | Path, roots: Mapping[str, nn.Module], *, rank: int = 0, step: int = 0,
        facts: Mapping[str, Any] | None = None, weights: bool = False,
    ) -> None:  # fmt: skip
        self.out, self.rank, self.roots = Path(out), rank, roots
        self.step, self.micro, self.grad_scale, self._forward = step, -1, 1.0, False
        self._rows, self._values = list[dict[str, Any]](), list[tuple[Tensor, Tensor]]()
        self._seen, self._calls = dict[Any, tuple[Any, int]](), dict[str, int]()
        self.out.mkdir(parents=True, exist_ok=True)
        self._file = (self.out / f"rows_{rank}.jsonl").open("w")
        self._hooks = [hook for root in roots for hook in self._watch(root, roots[root])]
        known = json.dumps({"versions": {"torch": torch.__version__}} | dict(facts or {}), default=str)
        (self.out / "record.json").write_text(known) if rank == 0 else None
        self._named("parameter", self.parameters())
        held = {n: self.gather(p).cpu() for n, p in self.parameters().items()} if weights else {}
        torch.save(held, self.out / "weights.pt") if weights and rank == 0 else None
        self._flush()

    def parameters(self) -> Mapping[str, Tensor]:
        """The parameters by name."""
        return {f"{root}.{n}": p for root, model in self.roots.items() for n, p in model.named_parameters()}

    def gather(self, tensor: Any) -> Any:
        """The unsharded tensor of a parameter; a collective if it is sharded."""
        return tensor.detach().full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach()

    def inputs(self, micro: int | None = None, /, **tensors: Any) -> None:
        """Begins a micro-batch: the tensors that it computes from, by name. They are stored whole."""
        self._flush()
        self._calls, self._forward, self.micro = {}, True, self.micro + 1 if micro is None else micro
        held = {name: tensor.detach() for name, tensor in flatten(tensors)}
        for name, tensor in held.items():
            self._row("input", tensor, micro=self.micro, name=name)
        torch.save({n: t.cpu() for n, t in held.items()}, self.out / f"inputs_{self.step}_{self.micro}.pt")

    def loss(self, loss: Tensor) -> None:
        """Ends a forward: the scalar that backward begins with. A recomputed forward is not recorded."""
        self._forward = False
        self._row("loss", loss, micro=self.micro, name="loss")

    def before_update(self, grad_norm: float | Tensor) -> None:
        """Records the gradients before they are clipped, and their L2 norm."""
        self._named("gradient", {n: p.grad for n, p in self.parameters().items() if p.grad is not None})
        self._named("grad_norm", {"grad_norm": torch.as_tensor(grad_norm)})

    def after_update(self, optimizer: torch.optim.Optimizer | Mapping[str, Tensor]) -> None:
        """Records the parameters and the optimizer's state (or one that is given), and ends the step."""
        if isinstance(optimizer, torch.optim.Optimizer):
            held = [(name, optimizer.state[p]) for name, p in self.parameters().items()]
            optimizer = {f"{n}.{k}": v for n, of in held for k, v in of.items() if isinstance(v, Tensor)}
        self._named("updated", self.parameters())
        self._named("optimizer", optimizer)
        self._flush()
        self.step, self.micro = self.step + 1, -1

    def close(self) -> None:
        """Removes the hooks and closes the files."""
        self._flush()
        self._file.write('{"kind": "end"}\n')  # rows without it may be cut
        self._file.close()
        for hook in self._hooks:
            hook.remove()

    def _watch(self, root: str, model: nn.Module) -> Iterator[Any]:
        seen = ((p, m) for p, m in model.named_modules() if not isinstance(m, torch.jit.ScriptModule))
        for path, module in seen:  # a scripted module accepts no hooks
            name, known = f"{root}.{path}".rstrip("."), inspect.signature(type(module).forward).parameters
            names = [p.name for p in known.values() if p.kind == p.POSITIONAL_OR_KEYWORD][1:]
            yield module.register_forward_pre_hook(partial(self._before, name, names), with_kwargs=True)
            yield module.register_forward_hook(partial(self._io, "out", name))

    def _before(self, name: str, names: list[str], module: nn.Module, args: Any, kwargs: Any) -> Any:
        self._calls[name] = self._calls.get(name, -1) + 1
        views: dict[int, Tensor] = {}

        def view(value: Any) -> Any:  # it has the gradient of this call alone; equal arguments stay equal
            graded = isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled()
            return views.setdefault(id(value), value.view_as(value)) if graded else value

        args, kwargs = tuple(map(view, args)), {key: view(arg) for key, arg in kwargs.items()}
        given = {names[i] if i < len(names) else str(i): arg for i, arg in enumerate(args)}
        self._io("in", name, module, args, {**given, **kwargs})
        return args, kwargs

    def _io(self, kind: str, module: str, own: nn.Module, _: Any, value: Any) -> None:
        of = {"micro": self.micro, "module": module, "call": self._calls[module], "class": type(own).__name__}
        for name, tensor in flatten(value) if self._forward else ():
            self._row(kind, tensor, name=name, **of)
            if tensor.requires_grad and torch.is_grad_enabled():
                arrived = partial(self._gradient, f"grad_{kind}", {**of, "name": name})
                tensor.register_hook(arrived)  # type: ignore[no-untyped-call]

    def _gradient(self, kind: str, facts: dict[str, Any], grad: Tensor) -> None:
        self._row(kind, grad if self.grad_scale == 1 else grad * self.grad_scale, **facts)

    def _named(self, kind: str, named: Mapping[str, Tensor]) -> None:
        self._seen = {}  # engines may write weights without a new version
        for name, tensor in named.items():
            full = self.gather(tensor)
            self._row(kind, full.to_dense(), name=name) if self.rank == 0 else None  # it may be sparse

    def _row(self, kind: str, tensor: Tensor, **facts: Any) -> None:
        storage, version = tensor.untyped_storage(), 0 if tensor.is_inference() else tensor._version
        place = tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor.is_neg()
        known = self._seen.get(key := (id(storage), version, place, tensor.is_conj()))  # views count once
        if known is None or known[0]() is not storage:
            known = self._seen[key] = (weakref.ref(storage), len(self._values))
            self._values.append(statistics(tensor))
        form = {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
        self._rows.append({"kind": kind, "step": self.step, **facts, **form, "at": known[1]})

    def _flush(self) -> None:
        measured = [(values.double().tolist(), int(hashed)) for values, hashed in self._values]
        for row in self._rows:
            (low, high, mean, norm, wrong, *sketch), hashed = measured[row.pop("at")]
            row |= {"min": low, "max": high, "mean": mean, "l2": norm, "bad": wrong, "sketch": sketch}
            self._file.write(json.dumps(row | {"hash": f"{hashed % (1 << 64):016x}"}) + "\n")
        self._rows, self._values, self._seen = [], [], {}
