"""Flags of pretrain_*.py, which are Megatron's and MindSpeed's; YAML files write them under `gpt_args`."""

from __future__ import annotations

from mm_core.interchange import Default, Differs, Drop, Key
from mm_mindspeed.names import lora_targets
from mm_mindspeed.tables.converts import always, drops, norm, one_of, path, under

_SPREADING = (
    "how tensors are spread over devices: fully_shard spreads them here, and the global batch stays the same"
)
_CONTEXT = {"ulysses_cp_algo": "ulysses", "megatron_cp_algo": "ring"}
_FASTER = "it changes speed or memory, not what is computed"
_SHARDED = "fully_shard always works so"
_CHECK = "Megatron checks it; the model comes from its own files"
_STATE = "checkpoints always hold everything; weights alone are loaded without the rest"

STYLES = one_of({each: each for each in ("constant", "linear", "cosine")})
"""Styles of the learning rate that are schedules here."""

FLAGS = under(
    "--",
    Key(
        "seq-length",
        "data.train.max_length",
        note="of conversations; longer ones are cut",
    ),
    Key("micro-batch-size", "train.micro_batch_size"),
    Key("global-batch-size", "train.global_batch_size", note="over all ranks"),
    Key("train-iters", "train.steps"),
    Key("lr", "optimizer.lr", float),
    Key("weight-decay", "optimizer.weight_decay", float),
    Default("weight-decay", "optimizer.weight_decay", 0.01),
    Key("adam-beta1", "optimizer.betas.0", float),
    Default("adam-beta1", "optimizer.betas.0", 0.9),
    Key("adam-beta2", "optimizer.betas.1", float),
    Default("adam-beta2", "optimizer.betas.1", 0.999),
    Key("adam-eps", "optimizer.eps", float),
    Default("adam-eps", "optimizer.eps", 1e-8),
    Key("lr-decay-style", "lr_schedule.type", STYLES),
    Default("lr-decay-style", "lr_schedule.type", "linear"),
    Key("min-lr", "lr_schedule.min_lr", float),
    Key("lr-warmup-iters", "lr_schedule.warmup_steps"),
    Key("lr-warmup-fraction", "lr_schedule.warmup_fraction", float),
    Key("lr-warmup-init", "lr_schedule.warmup_init", float, "of the first step; 0 changes no weight"),
    Key("clip-grad", "train.clip_grad_norm", norm, "0 is off, which is null here"),
    Default("clip-grad", "train.clip_grad_norm", 1.0),
    Key("seed", "run.seed", note="other random numbers than theirs"),
    Default("seed", "run.seed", 1234),
    Key("num-workers", "data.loader.workers"),
    Default("num-workers", "data.loader.workers", 2),
    Key("save", "run.dir", path),
    Key("save-interval", "checkpoint.every"),
    Key("log-interval", "log.every"),
    Key("load", note="task.predictor.from_pretrained, init_from, or a model's folder, with its name"),
    Key("bf16", "engine.param_dtype", always("bf16")),
    Key("fp16", "engine.param_dtype", always("fp16")),
    Key("lora-r", "train.adapters.0.rank"),
    Key("lora-alpha", "train.adapters.0.alpha", float),
    Key("lora-dropout", "train.adapters.0.dropout", float),
    Key("lora-target-modules", "train.adapters.0.targets", lora_targets),
    Drop("context-parallel-size", _SPREADING, only=(1,)),
    Key("context-parallel-size", "engine.context_parallel.size"),
    Key("context-parallel-algo", "engine.context_parallel.kind", one_of(_CONTEXT)),
    Key("recompute-granularity", note="with the next two: engine.recompute_modules"),
    Key("recompute-method", note="see recompute-granularity"),
    Key("recompute-num-layers", note="see recompute-granularity"),
    Key("distributed-timeout-minutes", "run.stuck_after", lambda minutes: 60.0 * minutes),
    Key("fsdp2-config-path", note="the file of the engine, below"),
    Key("layerzero-config", note="the file of the engine, below"),
    Key("mm-data", note="data.json, below"),
    Key("mm-model", note="model.json, below"),
    Drop("use-flash-attn", "a kernel: set task.attn_implementation where it is installed"),
    Drop("mm-tool", "profiling: set `profile` where it is wanted"),
    *drops("eval-interval eval-iters", "no held-out data: set data.validation and validation.every"),
    *drops("no-load-optim no-load-rng no-save-optim no-save-rng", _STATE),
    *drops("tensor-model-parallel-size pipeline-model-parallel-size sequence-parallel", _SPREADING),
    *drops("virtual-pipeline-model-parallel-size expert-model-parallel-size", _SPREADING),
    *drops("use-multiparameter-pipeline-model-parallel num-layers-per-virtual-*", _SPREADING),
    *drops("overlap-* use-fused-* no-gradient-accumulation-fusion no-masked-softmax-fusion", _FASTER),
    *drops("swap-attention moe-grouped-gemm optimization-level moe-perm* reuse-fp32-param", _FASTER),
    *drops("moe-token-dispatcher-type recompute-*skip-core-attention recompute-in-*", _FASTER),
    *drops("use-distributed-optimizer use-torch-fsdp2 layerzero optimizer-selection", _SHARDED),
    *drops("init-model-with-meta-device use-cpu-initialization downcast-to-bf16", _SHARDED),
    *drops("ckpt-format lora-register-forward-hook distributed-backend", _SHARDED),
    *drops("vocab-size make-vocab-size-divisible-by normalization swiglu tokenizer-type", _CHECK),
    *drops("untie-embeddings-and-output-weights position-embedding-type rotary-base", _CHECK),
    *drops("attention-mask-type use-mcore-models max-position-embeddings", _CHECK),
    *drops("num-layers hidden-size num-attention-heads variable-seq-lengths no-initialization", _CHECK),
    *drops("ai-framework log-* timing-*", "a setting of Megatron's own code"),
    Differs("moe-aux-loss-coeff", "the router has no loss of its own here"),
    Differs("lr-decay-iters", "a schedule always ends with the run"),
    Differs("rampup-batch-size", "the batch has one size"),
)
