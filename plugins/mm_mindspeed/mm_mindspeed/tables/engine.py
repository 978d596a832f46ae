"""fsdp2_config.yaml, and LayerZeRO's zero_config.yaml."""

from __future__ import annotations

from mm_core.interchange import Differs, Drop, Key, Row
from mm_mindspeed.names import patterns
from mm_mindspeed.tables.converts import FASTER, drops, dtype, same, sharding

PLAIN = (
    "cast_forward_inputs reshard_after_forward num_to_forward_prefetch num_to_backward_prefetch"
    " use_reentrant offload_to_cpu pin_memory"
)
"""Keys of fully_shard that are the same here."""
DTYPES = tuple(Key(f"{name}_dtype", f"engine.{name}_dtype", dtype) for name in ("param", "reduce", "output"))

ENGINE: tuple[Row, ...] = (
    Key("sharding_size", "engine.sharding_size", sharding),
    Key("zero3_size", "engine.sharding_size", sharding),
    Key("sub_modules_to_wrap", "engine.sub_modules_to_wrap", patterns),
    Key("recompute_modules", "engine.recompute_modules", patterns),
    Key("ignored_modules", note="frozen components, which are not sharded here unless they are asked to be"),
    *DTYPES,
    *same(PLAIN, "engine"),
    Drop("transformer_layers", "classes of LayerZeRO; the blocks of the model are wrapped"),
    Drop("expert_parallel_size", "one rank holds all experts here too", only=(1,)),
    Drop("expert_parallel_size", "fully_shard spreads the experts here: the numbers are the same"),
    *drops("align_fsdp_param_groups backward_prefetch forward_prefetch limit_all_gathers", FASTER),
    *drops("reshard_local_experts moe_modules", FASTER),
    Differs("fp8*", "there is no training in fp8 here"),
)
