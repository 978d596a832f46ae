"""Two recorded trainings: the module or the setting at which they begin to differ is named."""

from __future__ import annotations

import math
import re
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mm_core.errors import MMError
from mm_core.report.align import render
from mm_core.report.align.compare import TOLERANCES, Comparison, Pair, compare, difference
from mm_core.report.align.records import Names, Record, Row, names_by_order, read_record
from mm_core.report.align.render import chart, growth, page
from mm_core.telemetry.align import recorder
from mm_core.telemetry.align.recorder import Recorder, statistics

WIDTH, HEADS, TOKENS = 16, 2, 6


class Rotary(nn.Module):
    offset = 0

    def forward(self, tokens):
        places = torch.arange(len(tokens[0])) + self.offset
        return torch.stack([torch.cos(places * 0.3), torch.sin(places * 0.3)])


class Attention(nn.Module):
    scale = causal = None

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm_q = nn.RMSNorm(WIDTH, eps=1e-6)

    def forward(self, hidden, turns):
        def heads(x):
            return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)

        q, k, v = heads(self.norm_q(self.q(hidden))), heads(self.k(hidden)), heads(self.v(hidden))
        cos, sin = turns[..., None]
        q = torch.cat([q[..., ::2] * cos - q[..., 1::2] * sin, q[..., ::2] * sin + q[..., 1::2] * cos], -1)
        mixed = F.scaled_dot_product_attention(q, k, v, scale=self.scale, is_causal=bool(self.causal))
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    swap = stop = False

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH, eps=1e-6), nn.LayerNorm(WIDTH, eps=1e-6)
        self.attn, self.drop = Attention(), nn.Dropout(0.0)
        self.up, self.act, self.down = nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)

    def forward(self, hidden, turns):
        given = self.norm1(hidden)
        given = given.flip(1) if self.swap else given
        hidden = hidden + self.drop(self.attn(given, turns))
        kept = hidden.detach() if self.stop else hidden
        return kept + self.down(self.act(self.up(self.norm2(hidden))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.time, self.rope = nn.Linear(4, WIDTH), nn.Linear(1, WIDTH), Rotary()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, latents, timestep):
        hidden = self.embed(latents) + self.time(timestep[:, None])[:, None]
        turns = self.rope(hidden)
        for block in self.blocks:
            hidden = block(hidden, turns)
        return self.head(hidden)


@dataclass
class Setting:
    """A training that a test changes."""

    model: Model
    seed: int = 1
    shift: float = 3.0
    clip: float = 0.5
    mean_of_means: bool = False
    keep_gradients: bool = False
    roll: int = 0
    flip_target: bool = False
    weights: bool = False
    roots: dict = field(default_factory=dict)
    adam: dict = field(default_factory=lambda: {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.99)})


def train(out: Path, change=lambda setting: None, steps=2) -> Path:
    """Two steps of two micro-batches of 2 and 1 samples."""
    torch.manual_seed(3)
    setting = Setting(Model())
    change(setting)
    model = setting.model
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **setting.adam)
    recorder = Recorder(out, setting.roots or {"model": model}, weights=setting.weights)
    draw = torch.Generator().manual_seed(setting.seed)
    torch.manual_seed(5)
    for _ in range(steps):
        for rows in (2, 1):
            clean, noise = (torch.randn(rows, TOKENS, 4, generator=draw) for _ in range(2))
            sigma = torch.rand(rows, generator=draw)
            sigma = setting.shift * sigma / (1 + (setting.shift - 1) * sigma)
            mix = sigma[:, None, None]
            latents = ((1 - mix) * clean + mix * noise).roll(setting.roll, 1)
            target = clean - noise if setting.flip_target else noise - clean
            recorder.inputs(timestep=sigma, latents=latents, target=target)
            error = (model(latents, sigma) - target).square().mean((1, 2))
            loss = error.mean() / 2 if setting.mean_of_means else error.sum() / 3
            recorder.loss(loss)
            loss.backward()
        recorder.before_update(torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf))
        torch.nn.utils.clip_grad_norm_(model.parameters(), setting.clip)
        optimizer.step()
        recorder.after_update(optimizer)
        if not setting.keep_gradients:
            optimizer.zero_grad()
    recorder.close()
    return out


def set_on(path: str, name: str, value):
    """A change of an attribute of a module, or of the setting."""

    def change(setting: Setting) -> None:
        setattr(setting.model.get_submodule(path) if path else setting, name, value)

    return change


def on_weight(path: str, edit):
    def change(setting: Setting) -> None:
        with torch.no_grad():
            edit(setting.model.get_parameter(path))

    return change


def in_bf16(setting: Setting) -> None:
    class Rough(nn.LayerNorm):
        def forward(self, hidden):
            return super().forward(hidden).bfloat16().float()

    setting.model.blocks[1].norm2.__class__ = Rough


transpose = on_weight("blocks.0.attn.k.weight", lambda weight: weight.copy_(weight.T.clone()))

PLANTED = {
    "eps": (set_on("blocks.1.norm1", "eps", 1e-3), "out", "model.blocks.1.norm1"),
    "eps of queries": (set_on("blocks.0.attn.norm_q", "eps", 1e-4), "out", "model.blocks.0.attn.norm_q"),
    "transposed weight": (transpose, "parameter", "model.blocks.0.attn.k.weight"),
    "stale weight": (on_weight("head.weight", lambda w: w.mul_(1.00001)), "parameter", "model.head.weight"),
    "one element": (on_weight("embed.bias", lambda w: w[2].add_(1e-3)), "parameter", "model.embed.bias"),
    "dropout on": (set_on("blocks.0.drop", "p", 0.1), "out", "model.blocks.0.drop"),
    "bf16 in one norm": (in_bf16, "out", "model.blocks.1.norm2"),
    "tanh in the activation": (set_on("blocks.1.act", "approximate", "tanh"), "out", "model.blocks.1.act"),
    "scale of attention": (set_on("blocks.1.attn", "scale", 0.3), "out", "model.blocks.1.attn"),
    "causal attention": (set_on("blocks.0.attn", "causal", True), "out", "model.blocks.0.attn"),
    "rope off by one": (set_on("rope", "offset", 1), "out", "model.rope"),
    "swapped tokens in a block": (set_on("blocks.1", "swap", True), "out", "model.blocks.1"),
    "swapped tokens in the data": (set_on("", "roll", 1), "input", "latents"),
    "wrong shift": (set_on("", "shift", 5.0), "input", "timestep"),
    "seed": (set_on("", "seed", 2), "input", "timestep"),
    "sign of the target": (set_on("", "flip_target", True), "input", "target"),
    "mean of means": (set_on("", "mean_of_means", True), "loss", "loss"),
    "a residual without gradient": (set_on("blocks.1", "stop", True), "grad_in", "model.blocks.1"),
    "gradients not cleared": (set_on("", "keep_gradients", True), "gradient", "model.embed.weight"),
    "learning rate": (lambda s: s.adam.update(lr=1.1e-2), "updated", "model.embed.weight"),
    "weight decay": (lambda s: s.adam.update(weight_decay=0.0), "updated", "model.embed.weight"),
    "betas": (lambda s: s.adam.update(betas=(0.9, 0.95)), "optimizer", "model.embed.weight.exp_avg_sq"),
    "a frozen weight": (lambda s: s.model.head.bias.requires_grad_(False), "gradient", "model.head.bias"),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    return train(tmp_path_factory.mktemp("records") / "plain")


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_difference_is_named_first(planted, plain, tmp_path):
    change, kind, where = PLANTED[planted]
    found = compare(read_record(plain), read_record(train(tmp_path / "changed", change))).findings
    assert (found[0].row.kind, found[0].where) == (kind, where)


def test_the_same_training_has_the_same_bits(plain, tmp_path):
    result = compare(read_record(plain), read_record(train(tmp_path / "again")), tolerance=0)
    assert not result.findings and {pair.error for pair in result.pairs} == {0.0}
    assert {pair.row.kind for pair in result.pairs} == {
        *("parameter", "input", "in", "out", "loss", "grad_in", "grad_out", "gradient", "grad_norm"),
        *("updated", "optimizer"),
    }


def other_names(setting: Setting) -> None:
    """The same model in a script that calls its parts otherwise."""

    class Theirs(nn.Module):
        def __init__(self, model):
            super().__init__()
            # In the model's own order: the norm of all gradients is a sum, whose rounding depends on it.
            self.x_in, self.t_in, self.turn = model.embed, model.time, model.rope
            self.layers, self.proj = model.blocks, model.head

        def forward(self, x, t):
            hidden = self.x_in(x) + self.t_in(t[:, None])[:, None]
            turns = self.turn(hidden)
            for layer in self.layers:
                hidden = layer(hidden, turns)
            return self.proj(hidden)

    setting.model = Theirs(setting.model)
    setting.roots = {"net": setting.model}


RULES = (
    *("net.x_in=model.embed", "net.t_in=model.time", "net.turn=model.rope", "net.proj=model.head"),
    *("net.layers.*=model.blocks.*", "net=model"),
)


def test_names_of_another_script_are_mapped(plain, tmp_path):
    theirs = train(tmp_path / "theirs", other_names)
    ours, names = read_record(plain), Names.parse(RULES)
    result = compare(ours, read_record(theirs, names), tolerance=0)
    assert (result.findings, result.unmatched) == ([], ([], []))
    assert {pair.row.kind for pair in result.pairs} >= {"parameter", "updated", "grad_in", "optimizer"}


def test_modules_are_matched_by_order_and_shape(plain, tmp_path):
    def change(setting: Setting) -> None:
        PLANTED["eps"][0](setting)
        other_names(setting)

    theirs, ours = train(tmp_path / "theirs", change), read_record(plain)
    names = names_by_order(ours, read_record(theirs), Names())
    found = compare(ours, read_record(theirs, names)).findings
    assert names.ours("net.layers.1.attn.q.weight") == "model.blocks.1.attn.q.weight"
    assert found[0].where == "model.blocks.1.norm1"


@pytest.mark.parametrize("rule", ["blocks", "a.*=b"])
def test_a_map_that_is_none_is_refused(rule):
    with pytest.raises(MMError, match="is not a map of names"):
        Names.parse([rule])


def test_a_folder_without_a_record_is_refused(tmp_path):
    with pytest.raises(MMError, match="no record that is complete"):
        read_record(tmp_path)


def test_statistics_are_those_of_the_tensor_and_its_bits():
    tensor = torch.randn(3, 70, generator=torch.Generator().manual_seed(0))
    values, hashed = statistics(tensor)
    expected = torch.stack([tensor.min(), tensor.max(), tensor.mean(), tensor.norm()])
    torch.testing.assert_close(values[:4], expected)
    swapped = tensor[[1, 0, 2]]
    assert statistics(swapped)[1] != hashed and statistics(tensor.clone())[1] == hashed
    torch.testing.assert_close(statistics(swapped)[0][:4], expected)  # only the sketch has an order
    tensor[0, 3] = math.nan
    values, _ = statistics(tensor)
    assert values.isfinite().all() and values[4] == pytest.approx(1 / 210)


def test_what_shares_elements_is_measured_once_and_anew_after_a_change_in_place(tmp_path, monkeypatch):
    measured = []
    monkeypatch.setattr(recorder, "statistics", lambda tensor: measured.append(tensor) or statistics(tensor))
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4))
    record = Recorder(tmp_path, {"model": model})
    del measured[:]
    latents = torch.randn(3, 4)
    record.inputs(latents=latents)
    loss = model(latents).square().mean()
    record.loss(loss)
    assert len(measured) == 5  # the input, three outputs and the loss
    loss.backward()
    assert len(measured) == 8  # and the gradients of the outputs
    record.close()
    rows = {(row.kind, row.module): row.facts for row in read_record(tmp_path).rows}
    assert rows["in", "model.1"]["hash"] == rows["out", "model.0"]["hash"] != rows["out", "model.1"]["hash"]
    assert rows["out", "model.1"]["min"] == 0 == rows["in", "model.2"]["min"] > rows["in", "model.1"]["min"]


@pytest.mark.parametrize("count", [500, 3_000_000])
def test_sketches_estimate_how_far_tensors_are_apart(count):
    draw = torch.Generator().manual_seed(0)
    tensor, noise = torch.randn(count, generator=draw), torch.randn(count, generator=draw)
    one, other = (statistics(each)[0][5:].double() for each in (tensor, tensor + 1e-3 * noise))
    assert 0.4 < (one - other).norm() / (1e-3 * noise.norm()) < 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.bool, torch.int64, torch.uint8])
def test_tensors_of_every_dtype_have_statistics(dtype):
    tensor = torch.tensor([[0, 1], [1, 1]]).to(dtype)
    values, _ = statistics(tensor)
    assert values[:3].tolist() == [0, 1, 0.75]
    assert statistics(torch.empty(0, 4, dtype=dtype))[0].tolist()[:2] == [0, 0]


def test_the_drawing_marks_the_first_module_that_differs(plain, tmp_path):
    change, _, where = PLANTED["eps"]
    result = compare(read_record(plain), read_record(train(tmp_path / "changed", change, steps=1)))
    drawn = chart(growth(result))
    colours = re.findall(r'fill="(#\w+)"><title>([\w.]+) \(', drawn)
    assert [name for _, name in colours] == [pair.row.module for pair in growth(result)]
    assert next(name for colour, name in colours if colour == "#c62828") == where
    assert f"first: {where}<" in drawn and drawn in page(result, ["A", "B"])
    equal = chart(growth(compare(read_record(plain), read_record(plain))))
    assert "#c62828" not in equal and "first:" not in equal


def test_the_page_begins_with_the_first_difference(plain, tmp_path):
    change, _, where = PLANTED["eps"]
    result = compare(read_record(plain), read_record(train(tmp_path / "changed", change, steps=1)))
    text = page(result, ["A", "<B>"], "3 elements differ")
    head, rest = text.partition("</section>")[::2]
    assert f'<p class="remark">{where} (' in head and "3 elements differ" in head and "compared:" not in head
    red = re.findall('<tr class="remark"><td>(.*?)</td>', rest)
    assert red == [pair.row.module for pair in growth(result) if not pair.agrees]
    shown, folded = rest.split("<details>")
    assert "without a difference</summary>" in folded and "<td>embed</td>" not in shown
    assert len(re.findall("<tr><td>", folded)) == sum(pair.error == 0 for pair in growth(result)) > 0
    assert "<h1>A and &lt;B&gt;</h1>" in text and "style-src" in text and " style=" not in text
    equal = page(compare(read_record(plain), read_record(plain)), ["A", "B"])
    assert "First difference" not in equal and "0 different" in equal


def test_the_settings_that_differ_are_directly_below_the_first_difference(plain, tmp_path):
    change, *_ = PLANTED["eps"]
    result = compare(read_record(plain), read_record(train(tmp_path / "changed", change, steps=1)))
    text = page(replace(result, settings={"config.optimizer.lr": (0.005, 0.004)}), ["A", "B"])
    below = text.partition("</section>")[2]
    assert below.startswith("<h2>Settings that differ</h2>") and "<td>config.optimizer.lr</td>" in below


@pytest.mark.parametrize(
    ("modules", "labels"),
    [
        ("net.embed net.0.up net.1.up net", "embed 0 1 net"),
        ("net.dit.embed net.dit.blocks.0.up net.dit.blocks.1 net.dit net", "embed blocks.0 blocks.1 dit net"),
        ("net.blocks.0.up net.blocks.1.up net", "blocks.0 blocks.1 net"),
        ("net.dit.embed net.dit.norm net.head", "embed norm head"),
        ("net.a_long_name.blocks.0.up net.b.0.up net.c net.d net.e net.f", "blocks.0 b.0 c d e f"),
        ("one.embed other.embed", "embed"),
        ("net.up", "up"),
    ],
)
def test_the_labels_of_the_drawing_leave_out_what_all_names_begin_with(modules, labels):
    rows = [Row("out", 0, 0, module, 0, "0", "Linear", {}) for module in modules.split()]
    drawn = chart([Pair(row, row, 0.0, 1e-6) for row in rows])
    assert re.findall('y="267.0" text-anchor="middle" fill="#1c2733">(.*?)<', drawn) == labels.split()


def test_records_without_modules_in_common_have_no_drawing():
    with pytest.raises(MMError, match="there is nothing to draw"):
        chart([])
    assert "<svg" not in page(Comparison(), ["A", "B"])


def test_steps_that_one_record_lacks_are_named_and_not_compared(plain, tmp_path):
    short = read_record(train(tmp_path / "short", steps=1))
    result = compare(read_record(plain), short, tolerance=0)
    assert result.findings == [] and result.whole and len(result.pairs) > 100
    assert result.notes == ["only the first record has 1 step, not compared: 2"]
    assert result.notes[0] in render.text(result)


@pytest.mark.parametrize("side", [0, 1])
def test_gradients_that_one_record_lacks_altogether_are_not_compared(side, plain, tmp_path):
    """Engines may keep gradients to themselves: what is a row of theirs is compared."""
    records = [read_record(plain), read_record(train(tmp_path / "other", PLANTED["weight decay"][0]))]
    records[side] = replace(records[side], rows=[r for r in records[side].rows if r.kind != "gradient"])
    result = compare(*records)
    assert result.notes == [f"the {('first', 'second')[side]} record has no gradients: not compared"]
    assert result.findings[0].row.kind == "updated"


def test_a_record_that_was_cut_is_compared_as_far_as_it_goes(plain, tmp_path):
    rows = (plain / "rows_0.jsonl").read_text().splitlines(keepends=True)
    gradients = [at for at, row in enumerate(rows) if '"kind": "gradient"' in row and '"step": 1' in row]
    for end in (gradients[0], gradients[3], len(rows) - 1):
        for rest in ("", '{"kind": "gra'):
            cut = shutil.copytree(plain, tmp_path / f"{end}{len(rest)}")
            (cut / "rows_0.jsonl").write_text("".join(rows[:end]) + rest)
            result = compare(read_record(plain), read_record(cut), tolerance=0)
            assert result.findings == [] and not result.whole
            assert result.notes[0].startswith("the second record was not closed")


def test_a_record_without_the_rows_of_a_rank_is_refused(plain, tmp_path):
    other = shutil.copytree(plain, tmp_path / "record")
    (other / "record.json").write_text('{"world": 2}')
    with pytest.raises(MMError, match="the rows of rank 1 are missing"):
        read_record(other)


def test_of_several_frozen_weights_the_first_is_named(plain, tmp_path):
    def change(setting: Setting) -> None:
        setting.model.blocks.requires_grad_(False)

    found = compare(read_record(plain), read_record(train(tmp_path / "frozen", change))).findings
    alone = [each.where for each in found if each.row.kind == "gradient"]
    assert alone == [f"model.{name}" for name, _ in Model().named_parameters() if "blocks" in name]


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_imaginary_parts_count(dtype):
    angles = torch.outer(torch.arange(6.0), torch.linspace(0.1, 0.9, 4))
    turns = torch.polar(torch.ones(6, 4), angles).to(dtype)
    (values, _), (other, _) = statistics(turns), statistics(turns.conj())
    assert values[0] == torch.view_as_real(turns).min() and values[1] == 1
    assert values[3] == pytest.approx(24**0.5)
    assert (values[5:] - other[5:]).norm() > 1
    torch.testing.assert_close(statistics(turns.conj().imag)[0], statistics(-turns.imag)[0])


def test_a_conjugate_is_not_taken_for_what_it_shares_elements_with(tmp_path):
    turns = torch.view_as_complex(torch.randn(6, 4, 2))
    record = Recorder(tmp_path, {})
    record.inputs(turns=turns, swapped=turns.conj())
    record.close()
    one, other = read_record(tmp_path).rows
    assert difference(one, other) > 0.1
    assert difference(one, replace(other, facts=one.facts)) == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_other_signs_are_a_difference(dtype, tmp_path):
    tensor = torch.randn(64, 2, generator=torch.Generator().manual_seed(0)).to(dtype)
    record = Recorder(tmp_path, {})
    record.inputs(one=tensor, other=tensor * torch.tensor([1, -1], dtype=dtype))
    record.close()
    assert difference(*read_record(tmp_path).rows) > 0.1


def test_sparse_gradients_are_recorded_as_dense_ones_and_scripted_modules_left_out(tmp_path):
    def recorded(name: str, sparse: bool) -> Record:
        torch.manual_seed(0)
        part = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
        model = nn.Sequential(nn.Embedding(5, 4, sparse=sparse), part)
        record = Recorder(tmp_path / name, {"model": model})
        record.inputs(tokens=(tokens := torch.tensor([[0, 1, 1]])))
        loss = model(tokens).square().mean()
        record.loss(loss)
        loss.backward()
        record.before_update(0.0)
        record.close()
        return read_record(tmp_path / name)

    result = compare(recorded("sparse", True), recorded("dense", False), tolerance=0)
    assert result.findings == []
    assert "model.0.weight" in {pair.row.name for pair in result.pairs if pair.row.kind == "gradient"}
    assert {pair.row.module for pair in result.pairs} == {"", "model", "model.0"}


def test_a_tensor_of_more_elements_than_the_tables_have_signs_has_statistics(monkeypatch):
    monkeypatch.setattr(recorder, "WIDTH", 8)
    monkeypatch.setattr(recorder, "ROWS", 64)
    monkeypatch.setattr(recorder, "_tables", recorder._tables.__wrapped__)
    for count in (8 * 64 - 1, 8 * 64, 8 * 64 + 5, 8 * 64 * 3 - 1):
        values, hashed = statistics(tensor := torch.arange(count, dtype=torch.float32))
        tensor[-1] += 1
        assert statistics(tensor)[1] != hashed and values[1] == count - 1


def measured(tmp_path: Path, *tensors: torch.Tensor) -> list[Row]:
    record = Recorder(tmp_path, {})
    record.inputs(**{f"t{at}": tensor for at, tensor in enumerate(tensors)})
    record.close()
    return list(read_record(tmp_path).rows)


@pytest.mark.parametrize(("dtype", "bits"), [(torch.bfloat16, 7), (torch.float16, 10)])
def test_the_largest_element_may_be_the_next_number_of_its_dtype(dtype, bits, tmp_path):
    tensor = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype).clamp(-3, 3)
    one, other, beyond = (tensor.clone() for _ in range(3))
    one[5], other[5], beyond[5] = 4, 4 + 4 * 2**-bits, 4 + 12 * 2**-bits
    rows = measured(tmp_path, one, other, beyond)
    tolerance = TOLERANCES[str(dtype).removeprefix("torch.")]
    assert 0 < difference(rows[0], rows[1]) < 2 * 4 * 2**-bits / tensor.float().norm() < tolerance
    assert difference(rows[0], rows[2]) > tolerance


def test_the_count_of_steps_does_not_hide_small_state_of_the_optimizer(tmp_path):
    """Small losses have squares of gradients far below 1."""

    def recorded(beta: float) -> Record:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, beta))
        record = Recorder(tmp_path / str(beta), {"model": model})
        record.inputs(latents=(latents := torch.randn(3, 4)))
        (model(latents).square().mean() * 1e-3).backward()
        record.before_update(0.0)
        optimizer.step()
        record.after_update(optimizer)
        record.close()
        return read_record(tmp_path / str(beta))

    found = [each.where for each in compare(recorded(0.99), recorded(0.95)).findings]
    assert found == ["model.weight.exp_avg_sq", "model.bias.exp_avg_sq"]
