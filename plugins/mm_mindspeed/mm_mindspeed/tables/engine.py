"""fsdp2_config.yaml, and LayerZeRO's zero_config.yaml."""

from __future__ import annotations

from mm_core.interchange import Differs, Drop, Key, Row
from mm_mindspeed.names import patterns
from mm_mindspeed.tables.converts import dtype, sharding

_FASTER = "it changes speed or memory, not what is computed"

ENGINE: tuple[Row, ...] = (
    Key("sharding_size", "engine.sharding_size", sharding),
    Key("zero3_size", "engine.sharding_size", sharding),
    Key("sub_modules_to_wrap", "engine.sub_modules_to_wrap", patterns),
    Key("recompute_modules", "engine.recompute_modules", patterns),
    Key(
        "ignored_modules", note="frozen components, which are never sharded here unless they are asked to be"
    ),
    Key("reshard_after_forward", "engine.reshard_after_forward"),
    Key("param_dtype", "engine.param_dtype", dtype),
    Key("reduce_dtype", "engine.reduce_dtype", dtype),
    Key("output_dtype", "engine.output_dtype", dtype),
    Key("cast_forward_inputs", "engine.cast_forward_inputs"),
    Key("use_reentrant", "engine.use_reentrant"),
    Key("num_to_forward_prefetch", "engine.num_to_forward_prefetch"),
    Key("num_to_backward_prefetch", "engine.num_to_backward_prefetch"),
    Key("offload_to_cpu", "engine.offload_to_cpu"),
    Key("pin_memory", "engine.pin_memory"),
    Drop("transformer_layers", "classes of LayerZeRO; the blocks of the model are wrapped"),
    Drop("align_fsdp_param_groups", _FASTER),
    Drop("backward_prefetch", _FASTER),
    Drop("forward_prefetch", _FASTER),
    Drop("limit_all_gathers", _FASTER),
    Drop("expert_parallel_size", "one rank holds all experts here too", only=(1,)),
    Drop("expert_parallel_size", "fully_shard spreads the experts here: the numbers are the same"),
    Drop("reshard_local_experts", _FASTER),
    Drop("moe_modules", _FASTER),
    Differs("fp8*", "there is no training in fp8 here"),
)
