"""Compares `packed_sdpa` with `sdpa`: time and memory of a decoder's forward and backward on packed rows.

    python benchmarks/packed_attention.py [--tokens 8192] [--layers 2] [--rounds 2]

Layers are those of Qwen3-0.6B (the language model of InternVL 3.5 1B), in fp32 on one thread, with a small
vocabulary. Conversations have lognormal lengths (median 400 tokens) and are packed by best fit. Each round
takes another row, spread evenly from rows with few long conversations to rows with many short ones, and
computes it with both kinds of attention. Time is the process's CPU time; memory is its anonymous memory
(RssAnon, every 5 ms) above its start value. The remaining share of a forward's FLOPs is printed as well,
for the measured layers and for those of InternVL 3.5 8B with rows of 16384 tokens.

torch 2.7 has no fused kernel on CPU for keys that several query heads share (on CUDA it has): there the
layers get one head of keys for each head of queries.
"""

from __future__ import annotations

import argparse
import ctypes
import time
import warnings
from functools import cache

import torch
from chunked_loss import Peak
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers import Qwen3Config, Qwen3ForCausalLM

from mm_core.contracts import Randomness
from mm_core.tasks.conversations.packing import Packs, positions
from mm_core.tasks.pretrained import packed_attention

KINDS = ("sdpa", "packed_sdpa")
TIME_BAR, MEMORY_BAR, GRADIENT_BAR = 0.6, 1.0, 1e-5
"""Bars relative to sdpa (most of the memory belongs to the layers, which are the same); gradients in fp32."""
# hidden size, size of the MLP, heads, heads of keys and values, size of a head
SMALL, LARGE = (1024, 3072, 16, 8, 128), (4096, 12288, 32, 8, 128)


def main() -> int:
    """Runs both kinds of attention in turn, row by row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192, help="tokens in a packed row")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2, help="number of rows, each computed with both kinds")
    args = parser.parse_args()
    torch.set_num_threads(1)
    packs = Packs(lognormal(5000, args.tokens), args.tokens)
    models = {kind: model_of(kind, args.layers) for kind in KINDS}
    warm_up = torch.full((3,), 64)
    for model in models.values():
        step(model, warm_up)
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    peaks: dict[str, list[int]] = {kind: [] for kind in KINDS}
    gap = 0.0
    print(f"rows of {args.tokens} tokens, {args.layers} layers of width {SMALL[0]}, fp32, 1 thread")
    if not shares_keys():
        print("as many heads of keys as of queries: this torch has no fused kernel on CPU for shared keys")
    print("pieces   attention     seconds   peak, MB   share of a forward's FLOPs (8B at 16384)")
    for number in range(args.rounds):
        row = (2 * number + 1) * len(packs) // (2 * args.rounds)
        lengths = packs.lengths[packs.members(row, seed=0, epoch=0)]
        gradients = {}
        for kind in KINDS[:: 1 if number % 2 else -1]:
            seconds, peak, gradients[kind] = step(models[kind], lengths)
            times[kind].append(seconds)
            peaks[kind].append(peak)
            longer = 16384 / args.tokens
            shares = [share(sizes, lengths, kind, scale) for sizes, scale in ((SMALL, 1), (LARGE, longer))]
            print(
                f"{len(lengths):6d}   {kind:11s} {seconds:9.2f} {peak / 1e6:10.0f}"
                f"   {shares[0]:.3f} ({shares[1]:.3f})",
                flush=True,
            )
        gap = max(gap, difference(gradients))
        gradients.clear()
    ratio = sum(times["packed_sdpa"]) / sum(times["sdpa"])
    memory = max(peaks["packed_sdpa"]) / max(peaks["sdpa"])
    figures = [("time", ratio, TIME_BAR, ".3f"), ("memory", memory, MEMORY_BAR, ".3f")]
    figures.append(("gradients", gap, GRADIENT_BAR, ".1e"))
    for name, found, bar, form in figures:
        print(f"RESULT packed_attention_{name} {found:{form}} {bar} {'ok' if found <= bar else 'short'}")
    return 0 if all(found <= bar for _, found, bar, _ in figures) else 1


def lognormal(count: int, longest: int) -> torch.Tensor:
    """Typical lengths of conversations: a median of 400 tokens, with a long tail."""
    drawn = (Randomness(0).normal((count,), "lengths") + 6.0).exp()
    return drawn.long().clamp(1, longest)


def model_of(kind: str, layers: int) -> Qwen3ForCausalLM:
    """Builds the decoder with one kind of attention; the weights are the same for both."""
    packed_attention.register()
    hidden, inner, heads, groups, width = SMALL
    groups = groups if shares_keys() else heads
    config = Qwen3Config(
        vocab_size=1024,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=width,
    )
    torch.manual_seed(0)
    return Qwen3ForCausalLM._from_config(config, attn_implementation=kind)


@cache
def shares_keys() -> bool:
    """Whether torch has a fused kernel on CPU for keys that several query heads share."""
    query, key = torch.zeros(1, 2, 1, 8), torch.zeros(1, 1, 1, 8)
    try:
        with warnings.catch_warnings(action="ignore"), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            scaled_dot_product_attention(query, key, key, enable_gqa=True)
    except RuntimeError:
        return False
    return True


def step(model: Qwen3ForCausalLM, lengths: torch.Tensor) -> tuple[float, int, dict[str, torch.Tensor]]:
    """Runs forward and backward of a packed row; returns CPU seconds, peak bytes and gradients."""
    count = int(lengths.sum())
    ids = torch.randint(0, 1024, (1, count), generator=torch.Generator().manual_seed(count))
    given = {"input_ids": ids, "labels": ids, "position_ids": positions(lengths.tolist())[None]}
    model.zero_grad()
    ctypes.CDLL(None).malloc_trim(0)  # returns free memory to the system: its reuse would not be measured
    with Peak(ids.device) as peak:
        began = time.process_time()
        model(**given, use_cache=False).loss.backward()
        seconds = time.process_time() - began
    return seconds, peak.bytes, {name: p.grad for name, p in model.named_parameters()}


def share(sizes: tuple[int, ...], lengths: torch.Tensor, kind: str, scale: float) -> float:
    """Share of the FLOPs of a layer's forward, relative to sdpa.

    Args:
        sizes: hidden size, inner size, query heads, key heads and head width of the layer.
        lengths: int64 [N], tokens of each conversation of the row.
        kind: the attention.
        scale: factor for the row's length and its number of conversations.
    """
    hidden, inner, heads, groups, width = sizes
    count = scale * int(lengths.sum())
    linear = count * hidden * (2 * heads * width + 2 * groups * width + 3 * inner)
    dense = 2 * count**2 * heads * width
    causal = scale * int((lengths**2).sum()) * heads * width  # a causal mask needs half of a piece's products
    return 1.0 if kind == "sdpa" else (linear + causal) / (linear + dense)


def difference(gradients: dict[str, dict[str, torch.Tensor]]) -> float:
    """Largest norm of a difference of gradients, relative to those of sdpa."""
    dense, packed = (gradients[kind] for kind in KINDS)
    return max(float((packed[name] - dense[name]).norm() / dense[name].norm()) for name in dense)


if __name__ == "__main__":
    raise SystemExit(main())
