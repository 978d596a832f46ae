"""Context parallelism: the ranks of a context group compute parts of the same samples' tokens."""

from mm_core.parallel.context.exchange import Peers
from mm_core.parallel.context.layout import ContextLayout, decide_context
from mm_core.parallel.context.spreading import Spreading

__all__ = ["ContextLayout", "Peers", "Spreading", "decide_context"]
