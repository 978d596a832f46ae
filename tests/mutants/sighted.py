"""Faults of plugin authors, written to fill the table of kinds and faults."""

from __future__ import annotations

from support.mutants import Mutant


def _of(kind: str, *faults: tuple[str, str, str, str]) -> tuple[Mutant, ...]:
    """Mutants of a kind: name, what is replaced, what takes its place, what is wrong."""
    return tuple(Mutant(f"{kind}: {name}", kind, old, new, why) for name, old, new, why in faults)


_FORWARD = "def forward(self, latents, timestep, text, text_mask):"
_END = "        return x.contiguous()\n"

PREDICTORS = _of(
    "predictor",
    ("missing member", _FORWARD, "def predict(self, latents, timestep, text, text_mask):", "no forward"),
    ("wrong signature", _FORWARD, "def forward(self, latents, timestep, text):", "no text_mask"),
    ("wrong shape", _END, "        return x[:, :-1].contiguous()\n", "a channel is missing"),
    ("wrong dtype", _END, "        return x.half().contiguous()\n", "float16 for float32 latents"),
    (
        "unset tensor",
        "        self.norm, self.head = ",
        "        self.gain = nn.Parameter(torch.ones(1))\n        self.norm, self.head = ",
        "no layer fills the parameter",
    ),
    (
        "global random numbers",
        "        patch = in_channels",
        "        self.chance = __import__('random').random()\n        patch = in_channels",
        "the constructor draws from the process's generator",
    ),
    (
        "random output",
        "self.norm(x[:, length:])",
        "functional.dropout(self.norm(x[:, length:]), 0.1)",
        "dropout in evaluation mode",
    ),
    (
        "kept state",
        "        for block in self.blocks:",
        "        self.calls = getattr(self, 'calls', 0) + 1\n        x = x * self.calls\n"
        "        for block in self.blocks:",
        "the output depends on the number of calls",
    ),
    (
        "changed input",
        "        t, h, w = self.patch_size\n",
        "        t, h, w = self.patch_size\n        latents.clamp_(-1, 1)\n",
        "latents are changed in place",
    ),
    (
        "lying declaration",
        "self.patch_size = in_channels, text_dim, patch_size",
        "self.patch_size = in_channels, text_dim, tuple(patch_size)\n        self.out_channels = in_channels + 1",
        "out_channels is not that of the output",
    ),
    ("ignored input", "attn_mask=seen", "attn_mask=None", "the text mask is ignored"),
    (
        "device name",
        "torch.linspace(0, -9, width // 2, device=position.device)",
        "torch.linspace(0, -9, width // 2, device='cuda' if position.is_cuda else 'cpu')",
        "a device is named",
    ),
    ("mixed batch", "self.norm1(x) *", "(x - x.mean(0)) *", "samples see each other"),
    (
        "rounded timestep",
        "waves(timestep, self",
        "waves(timestep.to(torch.bfloat16).float(), self",
        "the timestep is rounded to bfloat16",
    ),
    ("lost gradient", "self.text(text), x]", "self.text(text).detach(), x]", "the text has no gradient"),
    (
        "odd sizes",
        "        grid = x.shape[1:4]\n",
        "        grid = x.shape[1:4]\n        assert grid[1] % 2 == 0\n",
        "only even heights work, and patch_size says otherwise",
    ),
    (
        "real tensor on meta",
        "        patch = in_channels",
        "        self.register_buffer('table', torch.ones(3, device='cpu'))\n        patch = in_channels",
        "the constructor gives memory to a buffer",
    ),
    (
        "unknown conditions swallowed",
        _FORWARD,
        "def forward(self, latents, timestep, text, text_mask, **more):",
        "misspelt conditions are ignored",
    ),
    (
        "float32 alone",
        "self.places(places.to(x.dtype))",
        "self.places(places)",
        "positions stay float32, so bf16 weights do not fit without casts",
    ),
)

AUTOENCODERS = _of(
    "autoencoder",
    ("missing member", "def decode(self, latents):", "def decoded(self, latents):", "no decode"),
    (
        "wrong signature",
        "def latent_shape(self, num_frames, height, width):",
        "def latent_shape(self, num_frames, size):\n        height = width = size",
        "latent_shape takes one size",
    ),
    (
        "wrong shape",
        "b (c k) t h w -> b c t h w k",
        "b (c k) t h w -> b c t w h k",
        "rows and columns are swapped",
    ),
    ("wrong dtype", ".clamp(-1, 1)", ".clamp(-1, 1).double()", "float64 pixels"),
    (
        "unset tensor",
        '"signs", None, persistent',
        '"signs", torch.ones(4, 4), persistent',
        "the table is made in the constructor, which has no memory",
    ),
    (
        "global random numbers",
        "        return self.moments\n\n    def mode",
        "        return self.moments + 0.01 * torch.randn_like(self.moments)\n\n    def mode",
        "the posterior does not draw from the given generators",
    ),
    (
        "kept state",
        "        self.latent_shape(*pixels.shape[2:])\n",
        "        self.latent_shape(*pixels.shape[2:])\n        self.scale *= 1.01\n",
        "each call has another scale",
    ),
    (
        "changed input",
        "        self.latent_shape(*pixels.shape[2:])\n",
        "        self.latent_shape(*pixels.shape[2:])\n        pixels.sub_(0.1)\n",
        "pixels are changed in place",
    ),
    ("lying declaration", "height // 2, width // 2\n", "height // 2, width // 4\n", "latent_shape lies"),
    ("lying stride", "stride = (1, 2, 2)", "stride = (1, 4, 4)", "stride is not that of the latents"),
    ("lying channels", "latent_channels = 12", "latent_channels = 16", "latent_channels is not theirs"),
    (
        "odd sizes",
        "if height % 2 or width % 2 or min(",
        "if height % 2 or min(",
        "odd widths are not refused",
    ),
    ("unclamped", ".clamp(-1, 1)", "* 1.5", "pixels beyond [-1, 1]"),
    (
        "mixed batch",
        "Latents(self.scale * rearrange",
        "Latents(self.scale / pixels.std() * rearrange",
        "a clip's latents depend on the others",
    ),
    (
        "plain error",
        "            raise ContractError(\n",
        "            raise ValueError(\n",
        "sizes are refused by ValueError, without what is accepted",
    ),
    ("device name", ".signs = self.signs.to(device)", ".signs = self.signs.to('cpu')", "a device is named"),
)

TEXT_ENCODERS = _of(
    "text_encoder",
    ("missing member", "def tokenizer(self):", "def make_tokenizer(self):", "no tokenizer"),
    (
        "wrong signature",
        "def encode(self, ids, mask):",
        "def encode(self, ids):\n        mask = ids > 0",
        "no mask",
    ),
    (
        "wrong shape",
        "/ 2**0.5, mask\n",
        "/ 2**0.5)[:, :-1], mask\n".replace(")[:", ")[:"),
        "one token fewer than in the mask",
    ),
    ("wrong dtype", "return ids, ids != PADDING", "return ids, (ids != PADDING).long()", "the mask is int64"),
    (
        "unset tensor",
        '"places", None, persistent=False)',
        '"places", torch.zeros(max_length, hidden_size), persistent=False)',
        "a table of the constructor is read",
    ),
    (
        "kept state",
        "        return (self.table[ids]",
        "        self.table = self.table * 1.01\n        return (self.table[ids]",
        "each call gives other states",
    ),
    (
        "changed input",
        "        return (self.table[ids]",
        "        ids[:] = ids.clamp_(max=9)\n        return (self.table[ids]",
        "ids are changed in place",
    ),
    (
        "lying declaration",
        "self.hidden_size, self.max_length, self.words = hidden_size,",
        "self.hidden_size, self.max_length, self.words = 8 + hidden_size - 8 + 0 * words,",
        "nothing",
    ),
    ("inverted mask", "return ids, ids != PADDING", "return ids, ids == PADDING", "the mask is inverted"),
    (
        "empty caption",
        "[[*row, END] for row in rows]",
        "[list(row) for row in rows]",
        "no token for an empty caption",
    ),
    ("too long", "[: self.max_length - 1]", "", "captions longer than max_length"),
    (
        "padding leaks",
        "/ 2**0.5, mask\n",
        "/ 2**0.5 + ids.shape[1] / 100, mask\n",
        "states depend on the length of the batch",
    ),
    (
        "unpicklable",
        "return Tokenizer(self.words, self.max_length)",
        "return lambda captions: Tokenizer(self.words, self.max_length)(captions)",
        "the tokenizer does not pickle",
    ),
    ("captions ignored", "crc32(word.encode()) % self.words", "0", "all words are one"),
    ("ascii alone", "word.encode()", "word.encode('ascii')", "other letters raise an error"),
)

IMAGE_ENCODERS = _of(
    "image_encoder",
    ("missing member", "def encode(self, images):", "def encoded(self, images):", "no encode"),
    (
        "wrong signature",
        "def encode(self, images):",
        "def encode(self, images, sizes):",
        "a further argument",
    ),
    ("wrong shape", ".transpose(1, 2) @ self.table", ".transpose(1, 2).mean(1) @ self.table", "[B,D]"),
    ("unset tensor", '"table", None,', '"table", torch.ones(3, hidden_size),', "a table of the constructor"),
    ("lying declaration", "hidden_size, side, side * side", "hidden_size, side, side", "tokens lies"),
    (
        "mixed batch",
        "return torch.stack(places)",
        "places = [each - places[0] for each in places]\n        return torch.stack(places)",
        "states depend on the first image",
    ),
    (
        "changed input",
        "image.to(self.table.device)",
        "image.clamp_(1, 254).to(self.table.device)",
        "in place",
    ),
    (
        "kept state",
        "        places = [\n",
        "        self.table = self.table * 1.01\n        places = [\n",
        "each call gives other states",
    ),
)

SCHEDULERS = _of(
    "scheduler",
    ("missing member", "def loss_weight(self, timestep):", "def weight(self, timestep):", "no loss_weight"),
    (
        "wrong signature",
        "def integrate(self, velocity, noise, steps):",
        "def integrate(self, velocity, noise):\n        steps = 20",
        "no steps",
    ),
    (
        "wrong shape",
        "torch.linspace(1, 0, steps + 1,",
        "torch.linspace(1, 0, steps,",
        "one noise level too few",
    ),
    ("wrong dtype", "self._sigma(u.double())).float()", "self._sigma(u.double()))", "float64 timesteps"),
    (
        "global random numbers",
        "torch.rand((), generator=each)",
        "torch.rand(())",
        "the generators are ignored",
    ),
    (
        "kept state",
        "        return noise - latents\n",
        "        object.__setattr__(self, 'a', self.a * 1.01)\n        return noise - latents\n",
        "each call has another density",
    ),
    ("changed input", "x = x + (there - here) *", "x += (there - here) *", "the noise is changed in place"),
    (
        "lying declaration",
        "self._sigma(u.double())",
        "self._sigma(u.double() ** 2)",
        "quantiles of another density",
    ),
    (
        "ignored input",
        "torch.linspace(1, 0, steps + 1,",
        "torch.linspace(1, 0.02, steps + 1,",
        "noise is left",
    ),
    ("inverted target", "return noise - latents", "return latents - noise", "the target's sign"),
    (
        "rounded timestep",
        "        return timestep\n",
        "        return timestep.bfloat16().float()\n",
        "998.7 becomes 1000",
    ),
    (
        "not linear",
        "(1 - sigma) * latents + sigma * noise",
        "(1 - sigma) * latents.clamp(-1, 1) + sigma * noise",
        "add_noise is not linear",
    ),
    (
        "scalar weight",
        "torch.ones_like(timestep, dtype=torch.float32)",
        "torch.ones((), dtype=torch.float32)",
        "no weight a row",
    ),
)

DATASETS = _of(
    "dataset",
    ("missing member", "def __len__(self):", "def length(self):", "no __len__"),
    (
        "wrong signature",
        "def sample_at(self, index, rng):",
        "def sample_at(self, index, rng, epoch):",
        "a further argument",
    ),
    ("wrong shape", ".expand(3, frames, height, width)", ".expand(1, frames, height, width)", "one colour"),
    ("wrong dtype", ".clone(),  # in [-1, 1]", ".double(),", "float64 pixels"),
    ("wrong range", "waves[None, :, None]", "(127.5 + 127.5 * waves[None, :, None])", "pixels from 0 to 255"),
    ("global random numbers", 'rng.uniform("phase")', "torch.rand(()).item()", "rng is not used"),
    (
        "kept state",
        "        direction = 1 if index % 2 else -1\n",
        "        self.reads = getattr(self, 'reads', 0) + 1\n        direction = 1 if self.reads % 2 else -1\n",
        "a sample depends on how many were read",
    ),
    (
        "unpicklable",
        "        self.sizes, self.clips =",
        "        self.draw = lambda: 0\n        self.sizes, self.clips =",
        "cannot go to data workers",
    ),
    ("missing key", '            "fps": 8.0,\n', "", "a sample lacks fps"),
    ("wrong ids", '"id": f"stripes {index}"', '"id": index', "ids are numbers"),
    (
        "weights ignored",
        "        return collate_clips(samples)",
        "        return collate_clips([{**sample, 'weight': 1.0} for sample in samples])",
        "samples that only fill a batch count",
    ),
    (
        "lost key",
        "        return collate_clips(samples)",
        "        return collate_clips([{**s, 'key': type(s['key'])(0, 0)} for s in samples])",
        "samples lose their keys",
    ),
    (
        "taken key",
        '            "fps": 8.0,\n',
        '            "fps": 8.0,\n            "weight": 2.0,\n',
        "a key of the loader's",
    ),
)

VIDEO_READERS = _of(
    "video_reader",
    ("missing member", "def probe(self, path):", "def header(self, path):", "no probe"),
    (
        "wrong signature",
        "def read(self, path, seconds):",
        "def read(self, path):\n        seconds = [0]",
        "no times",
    ),
    (
        "wrong shape",
        "self.reader.read(path, seconds))",
        "self.reader.read(path, seconds).movedim(3, 1))",
        "[F,3,Y,X]",
    ),
    (
        "wrong dtype",
        "self.reader.read(path, seconds))",
        "self.reader.read(path, seconds).float())",
        "float32",
    ),
    (
        "ignored input",
        "self.reader.read(path, seconds))",
        "self.reader.read(path, sorted(seconds)))",
        "the order of the times",
    ),
    (
        "frames too few",
        "self.reader.read(path, seconds))",
        "self.reader.read(path, list(dict.fromkeys(seconds))))",
        "repeated times",
    ),
    (
        "plain error",
        "except DataError:\n                time.sleep(self.pause)",
        "except DataError as error:\n                raise ValueError('bad file') from error",
        "damaged files raise ValueError",
    ),
    (
        "swallowed error",
        "        return call()\n",
        "        try:\n            return call()\n        except DataError:\n            return self.reader.read.__self__ and __import__('torch').zeros(1, 8, 8, 3, dtype=__import__('torch').uint8)\n",
        "damaged files are black",
    ),
    (
        "kept state",
        "self.reader.read(path, seconds))",
        "self._last(path, seconds))\n\n    def _last(self, path, seconds):\n        self.frames = getattr(self, 'frames', None)\n        self.frames = self.reader.read(path, seconds) if self.frames is None else self.frames\n        return self.frames[: len(seconds)]",
        "the first file's frames are returned for all",
    ),
    (
        "lying declaration",
        "self.reader.probe(path))",
        "__import__('dataclasses').replace(self.reader.probe(path), fps=1.0))",
        "the frame rate lies",
    ),
)

TASKS = _of(
    "task",
    ("missing member", "def losses(self, batch):", "def row_losses(self, batch):", "no losses"),
    ("wrong signature", "def losses(self, batch):", "def losses(self, batch, scale):", "a further argument"),
    ("mean for a sum", ".square().flatten(1).mean(1)", ".square().mean()", "one number for the batch"),
    ("wrong shape", ".square().flatten(1).mean(1)", ".square().flatten(2).mean(2)", "a loss for each frame"),
    ("wrong dtype", ".square().flatten(1).mean(1)", ".square().flatten(1).mean(1).long()", "int64"),
    (
        "lost gradient",
        "predicted = self.net(before.flatten(0, 1))",
        "predicted = self.net(before.flatten(0, 1)).detach()",
        "no gradient",
    ),
    (
        "global random numbers",
        "self.net(before.flatten(0, 1))",
        "self.net(before.flatten(0, 1) + __import__('torch').rand(()))",
        "noise depends on the micro-batches",
    ),
    (
        "kept state",
        "        before, after =",
        "        self.seen = getattr(self, 'seen', 0) + 1\n        frames = frames * self.seen\n        before, after =",
        "losses depend on the number of calls",
    ),
    (
        "changed input",
        "        before, after =",
        "        frames.mul_(0.5)\n        before, after =",
        "pixels are changed in place",
    ),
    ("mixed batch", "(predicted - after)", "(predicted - after.mean(0))", "samples see each other"),
    ("unset tensor", "nn.GELU()", "nn.ParameterList()", "not used"),
    (
        "own parameter",
        "        self.net = nn.Sequential(",
        "        self.scale = nn.Parameter(__import__('torch').ones(3))\n        self.net = nn.Sequential(",
        "a parameter of the task itself",
    ),
    (
        "unused parameter",
        "        self.net = nn.Sequential(",
        "        self.spare = nn.Linear(2, 2)\n        self.net = nn.Sequential(",
        "a trained module that the loss does not use",
    ),
    (
        "weights ignored",
        "    def losses(self, batch):",
        "    def weight(self, batch):\n        return float(len(batch))\n\n    def losses(self, batch):",
        "samples of weight 0 count",
    ),
    (
        "lying declaration",
        "        super().__init__()\n",
        "        super().__init__()\n        self.trainable = ('net', 'head')\n",
        "trainable names what is not there",
    ),
)

_STEP = "        super().step(norm, clip_grad_norm)\n"
_ENGINE = "    def step(self, norm, clip_grad_norm):\n"

ENGINES = _of(
    "engine",
    (
        "wrong signature",
        _ENGINE,
        "    def step(self, norm):\n        clip_grad_norm = None\n",
        "no clip_grad_norm",
    ),
    ("no update", _STEP, "        self._optimizer.zero_grad()\n", "nothing is updated"),
    ("two updates", _STEP, "        self._optimizer.step()\n" + _STEP, "each step updates twice"),
    ("ignored input", _STEP, "        super().step(norm, None)\n", "gradients are not clipped"),
    ("kept gradients", _STEP, "        self._optimizer.step()\n", "gradients are not cleared, nor clipped"),
    (
        "wrong norm",
        _ENGINE,
        "    def grad_norm(self):\n        return 2 * super().grad_norm()\n\n" + _ENGINE,
        "the norm is doubled",
    ),
    (
        "ignored rate",
        _ENGINE,
        "    def scale_lr(self, factor):\n        return self.base_lr * factor\n\n" + _ENGINE,
        "the learning rate is not set",
    ),
    (
        "update of what is refused",
        _ENGINE,
        "    def discard(self):\n        super().step(1.0, None)\n\n" + _ENGINE,
        "a refused step updates",
    ),
    (
        "lost state",
        _ENGINE,
        "    def state_dict(self):\n        return {**super().state_dict(), 'optimizer': {}}\n\n" + _ENGINE,
        "the optimizer's state is not saved",
    ),
    (
        "mean for a sum",
        _ENGINE,
        "    def micro_step(self, compute, *, last, scale):\n        return super().micro_step(compute, last=last, scale=1.0)\n\n"
        + _ENGINE,
        "the scale is ignored",
    ),
    (
        "lying declaration",
        _ENGINE,
        "    def plan(self, task, world, optimizer_state_tensors):\n        from dataclasses import replace\n        return replace(super().plan(task, world, optimizer_state_tensors), parameter_bytes=0)\n\n"
        + _ENGINE,
        "the plan's bytes",
    ),
)

OPTIMIZERS = _of(
    "optimizer",
    ("missing member", "def step(self, closure=None):", "def update(self, closure=None):", "no step"),
    ("ignored rate", 'alpha=-group["lr"])', "alpha=-1e-4)", "the engine's rate is ignored"),
    (
        "ignored input",
        '                parameter.mul_(1 - group["lr"] * group["weight_decay"])\n',
        "",
        "weight decay is ignored",
    ),
    (
        "decay without rate",
        '1 - group["lr"] * group["weight_decay"]',
        '1 - group["weight_decay"]',
        "decay at rate 0",
    ),
    (
        "kept state",
        "                state = self.state[parameter]\n",
        "                self.held = getattr(self, 'held', {})\n                state = self.held.setdefault(parameter, {})\n",
        "state outside of self.state",
    ),
    (
        "lying declaration",
        'state["momentum"] = torch.zeros_like(parameter)\n',
        'state["momentum"] = torch.zeros_like(parameter)\n                    state["second"] = torch.zeros_like(parameter)\n',
        "two tensors of state",
    ),
    ("ascent", 'alpha=-group["lr"])', 'alpha=group["lr"])', "it maximises"),
    (
        "scaled twice",
        'alpha=-group["lr"])',
        'alpha=-group["lr"] * group.get("lr_scale", 1.0))',
        "lr_scale is applied twice",
    ),
    (
        "count in Python",
        "        for group in self.param_groups:\n",
        "        self.count = getattr(self, 'count', 0) + 1\n        for group in self.param_groups:\n            group = {**group, 'lr': group['lr'] / self.count}\n",
        "the count is lost at a resume",
    ),
    (
        "lost groups",
        "super().__init__(groups, {",
        "super().__init__([p for g in groups for p in g['params']], {",
        "the groups' settings are lost",
    ),
    (
        "random update",
        'momentum = state["momentum"]\n',
        "momentum = state[\"momentum\"]\n                parameter.add_(torch.rand(()), alpha=group['lr'] * self.__dict__.setdefault('n', 0))\n                self.n += 1\n",
        "noise that grows with a count",
    ),
    (
        "wrong dtype",
        'state["momentum"] = torch.zeros_like(parameter)',
        'state["momentum"] = [torch.zeros_like(parameter)]',
        "state that is no tensor",
    ),
)

LR_SCHEDULES = _of(
    "lr_schedule",
    ("missing member", "def factor(self, step):", "def rate(self, step):", "no factor"),
    ("wrong signature", "def factor(self, step):", "def factor(self, step, total):", "a further argument"),
    (
        "division by zero",
        "if step < self.warmup_steps:",
        "if 0 < step < self.warmup_steps:",
        "step 0 divides by zero",
    ),
    (
        "kept state",
        "        if step < self.warmup_steps:\n",
        "        self.steps = step = getattr(self, 'steps', -1) + 1\n        if step < self.warmup_steps:\n",
        "calls are counted",
    ),
    (
        "falling warm-up",
        "return step / self.warmup_steps",
        "return 1 - step / self.warmup_steps",
        "the warm-up falls",
    ),
    (
        "negative",
        "(self.warmup_steps / step) ** 0.5",
        "-((self.warmup_steps / step) ** 0.5)",
        "negative rates",
    ),
    ("wrong dtype", "(self.warmup_steps / step) ** 0.5", "str((self.warmup_steps / step) ** 0.5)", "a text"),
)

TRACKERS = _of(
    "tracker",
    ("missing member", "def close(self, ending):", "def end(self, ending):", "no close"),
    (
        "wrong signature",
        "def log(self, step, metrics):",
        "def log(self, metrics):\n        step = 0",
        "no step",
    ),
    ("lost points", 'path.open("a",', 'path.open("w",', "a resume loses what was written"),
    ("unflushed", ", buffering=1)  # each line is written at once", ")", "lines wait in a buffer"),
    ("not closed", "        self.file.close()", "        pass", "the file stays open"),
    ("finite alone", "(step, name, value) for", "(step, name, round(value)) for", "NaN raises an error"),
    ("foreign folder", "Path(run_dir) / name", "Path(run_dir).parent / name", "it writes outside of the run"),
    (
        "no folder",
        "        path.parent.mkdir(parents=True, exist_ok=True)\n",
        "",
        "the run's folder may not exist",
    ),
    (
        "ascii alone",
        'newline="", buffering',
        'newline="", encoding="ascii", buffering',
        "other letters raise an error",
    ),
    (
        "changed input",
        "        self.rows.writerows(",
        "        metrics.clear()\n        self.rows.writerows(",
        "metrics are changed",
    ),
)

CALLBACKS = _of(
    "callback",
    (
        "misspelt method",
        "def validated(self, step, metrics):",
        "def on_validation_end(self, step, metrics):",
        "never called",
    ),
    (
        "wrong signature",
        "def run_started(self, run_dir, step, last_step):",
        "def run_started(self, run_dir, step):",
        "no last_step",
    ),
    (
        "plain error",
        "metrics.get(self.metric, math.inf)",
        "metrics[self.metric]",
        "KeyError where the metric is missing",
    ),
    (
        "changed input",
        "metrics.get(self.metric, math.inf)",
        "metrics.pop(self.metric, math.inf)",
        "metrics are changed",
    ),
    (
        "global random numbers",
        "        value = metrics",
        "        __import__('random').random()\n        value = metrics",
        "random numbers are drawn",
    ),
    ("missing base", "class BestLoss(Callback):", "class BestLoss:", "not a Callback"),
)

METRICS = _of(
    "metric",
    ("missing member", "def result(self, sums):", "def compute(self, sums):", "no result"),
    (
        "wrong signature",
        "def batch(self, batch, evaluation):",
        "def batch(self, evaluation):\n        batch = evaluation",
        "no batch",
    ),
    (
        "weights ignored",
        "batch.sample_weights > 0",
        "batch.sample_weights >= 0",
        "rows that fill a batch count",
    ),
    (
        "mean of means",
        "torch.tensor([len(losses), float((losses > self.limit).sum())], dtype=torch.float64)",
        "torch.tensor([1, float((losses > self.limit).double().mean())], dtype=torch.float64)",
        "averages of averages",
    ),
    ("wrong dtype", "torch.zeros(2, dtype=torch.float64)  # rows", "torch.zeros(2)  # rows", "float32 sums"),
    (
        "kept state",
        "self.found = torch.zeros(2, dtype=torch.float64)  # rows",
        "self.found = getattr(self, 'found', torch.zeros(2, dtype=torch.float64))  # rows",
        "reset does not reset",
    ),
    ("plain error", " if rows else {}", "", "no rows divide by zero"),
    ("wrong shape", "return self.found.clone()", "return self.found[None].clone()", "[1, n]"),
    (
        "changed input",
        "        counts = batch",
        "        evaluation.sums['loss'].clamp_(max=1)\n        counts = batch",
        "losses are changed in place",
    ),
    ("not a number", '{"outliers": above / rows}', '{"outliers": sums[1:] / rows}', "a tensor"),
    (
        "local result",
        "        rows, above = sums.tolist()",
        "        rows, above = self.found.tolist()",
        "this rank's sums alone",
    ),
)

WEIGHT_FORMATS = _of(
    "weight_format",
    (
        "wrong signature",
        "def layout(self, name: str, component: nn.Module):",
        "def layout(self, component: nn.Module):",
        "no name",
    ),
    (
        "foreign files",
        '        return any(path.glob(f"{MARK}*.safetensors*"))',
        "        return True",
        "every folder is its own",
    ),
    ("own files", "path.name.startswith(MARK)", "path.name.startswith('net')", "its own file is foreign"),
    ("lost tensors", '"net.{rest...}"', '"net.weight"', "all tensors get one name"),
    ("wrong name", "stem=MARK)", 'stem="model")', "it does not recognise what it writes"),
    (
        "kept state",
        "        return Layout(",
        "        self.calls = getattr(self, 'calls', 0) + 1\n        return Layout(",
        "nothing depends on it",
    ),
    (
        "changing names",
        '"net.{rest...}"',
        'f"net{id(self) * 0 + self.__dict__.setdefault(chr(110), 0)}.{{rest...}}"',
        "names are other ones",
    ),
    (
        "plain error",
        "        if path.is_file():\n",
        "        path.read_bytes()\n        if path.is_file():\n",
        "a folder raises an error",
    ),
)

SIGHTED: tuple[Mutant, ...] = (
    *(*PREDICTORS, *AUTOENCODERS, *TEXT_ENCODERS, *IMAGE_ENCODERS, *SCHEDULERS, *DATASETS, *VIDEO_READERS),
    *(*TASKS, *ENGINES, *OPTIMIZERS, *LR_SCHEDULES, *TRACKERS, *CALLBACKS, *METRICS, *WEIGHT_FORMATS),
)
