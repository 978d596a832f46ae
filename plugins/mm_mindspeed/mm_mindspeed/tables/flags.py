"""Flags of pretrain_*.py, which are Megatron's and MindSpeed's; YAML files write them under `gpt_args`."""

from __future__ import annotations

from dataclasses import replace

from mm_core.interchange import Differs, Drop, Key
from mm_mindspeed.names import lora_targets
from mm_mindspeed.tables.converts import FASTER, always, drops, notes, one_of, training, under

_SPREADING = (
    "how tensors are spread over devices: fully_shard spreads them here, and the global batch stays the same"
)
_CONTEXT = {"ulysses_cp_algo": "ulysses", "megatron_cp_algo": "ring"}
_SHARDED = "fully_shard always works so"
_CHECK = "Megatron checks it; the model comes from its own files"
_LORA = "--lora-target-modules!=none||true"

FLAGS = under(
    "--",
    *(replace(row, theirs=row.theirs.replace("_", "-")) for row in training(0.01, "linear", 1234)),
    Key("seq-length", "data.train.max_length", note="of conversations; longer ones are cut"),
    Key("global-batch-size", "train.global_batch_size", note="over all ranks"),
    Key("min-lr", "lr_schedule.min_lr", float),
    Key("lr-warmup-iters", "lr_schedule.warmup_steps"),
    Key("lr-warmup-fraction", "lr_schedule.warmup_fraction", float),
    Key("lr-warmup-init", "lr_schedule.warmup_init", float, "of the first step; 0 changes no weight"),
    Key("num-workers", "data.loader.workers", absent=2),
    Key("load", note="task.predictor.from_pretrained, init_from, or a model's folder, with its name"),
    Key("bf16", "engine.param_dtype", always("bf16")),
    Key("fp16", "engine.param_dtype", always("fp16")),
    Drop("lora-register-forward-hook", _SHARDED),
    Drop("lora-target-modules", "an empty variable: no adapter is trained", only=("", True)),
    Key("lora-target-modules", "train.adapters.0.targets", lora_targets),
    Key("lora-r", "train.adapters.0.rank", absent=8, given=_LORA),
    Key("lora-alpha", "train.adapters.0.alpha", float, absent=16.0, given=_LORA),
    Key("lora-dropout", "train.adapters.0.dropout", float, given=_LORA),
    Drop("lora-*", "no adapter is trained: --lora-target-modules names no layers here"),
    Drop("context-parallel-size", _SPREADING, only=(1,)),
    Key("context-parallel-size", "engine.context_parallel.size"),
    Drop("context-parallel-algo", "each rank has its own samples", given="--context-parallel-size=none|1"),
    Key("context-parallel-algo", "engine.context_parallel.kind", one_of(_CONTEXT)),
    *notes("recompute-granularity recompute-method recompute-num-layers", "engine.recompute_modules"),
    Key("distributed-timeout-minutes", "run.stuck_after", lambda minutes: 60.0 * minutes),
    *notes("fsdp2-config-path layerzero-config mm-data mm-model", "a file whose keys are below"),
    Drop("use-flash-attn", "a kernel: set task.attn_implementation where it is installed"),
    Drop("mm-tool", "profiling: set `profile` where it is wanted"),
    *drops("eval-interval eval-iters", "no held-out data: set data.validation and validation.every"),
    *drops("tensor-model-parallel-size pipeline-model-parallel-size sequence-parallel", _SPREADING),
    *drops("virtual-pipeline-model-parallel-size expert-model-parallel-size", _SPREADING),
    *drops("use-multiparameter-pipeline-model-parallel num-layers-per-virtual-*", _SPREADING),
    *drops("overlap-* use-fused-* no-gradient-accumulation-fusion no-masked-softmax-fusion", FASTER),
    *drops("swap-attention moe-grouped-gemm optimization-level moe-perm* reuse-fp32-param", FASTER),
    *drops("moe-token-dispatcher-type recompute-*skip-core-attention recompute-in-*", FASTER),
    *drops("use-distributed-optimizer use-torch-fsdp2 layerzero optimizer-selection", _SHARDED),
    *drops("init-model-with-meta-device use-cpu-initialization downcast-to-bf16", _SHARDED),
    *drops("ckpt-format distributed-backend", _SHARDED),
    *drops("vocab-size make-vocab-size-divisible-by normalization swiglu tokenizer-type", _CHECK),
    *drops("untie-embeddings-and-output-weights position-embedding-type rotary-base", _CHECK),
    *drops("attention-mask-type use-mcore-models max-position-embeddings", _CHECK),
    *drops("num-layers hidden-size num-attention-heads variable-seq-lengths no-initialization", _CHECK),
    *drops("ai-framework log-* timing-*", "a setting of Megatron's own code"),
    Differs("moe-aux-loss-coeff", "the router has no loss of its own here"),
    Differs("lr-decay-iters", "a schedule always ends with the run"),
    Differs("rampup-batch-size", "the batch has one size"),
)

LAUNCHER = under(
    "--",
    *notes("nproc_per_node nproc-per-node nnodes local_worker_num worker_num", "mm-train --nproc, --nnodes"),
    *notes("node_rank node-rank master_addr master-addr master_port master-port", "of several nodes"),
    Drop("*", "how the launcher of theirs works: `mm-train` starts the ranks"),
)
