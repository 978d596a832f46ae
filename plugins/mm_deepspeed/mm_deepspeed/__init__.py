"""DeepSpeed's ZeRO as an engine of mm_core."""
