"""Layer sizes of published models, as their configs on the model hubs give them."""

from typing import NamedTuple


class Model(NamedTuple):
    """Width of the tokens and of an expert, routed experts, and experts per token."""

    name: str
    hidden: int
    intermediate: int
    experts: int
    topk: int


MODELS = (
    Model("Mixtral-8x7B", 4096, 14336, 8, 2),
    Model("Qwen3-30B-A3B", 2048, 768, 128, 8),
    Model("DeepSeek-V3", 7168, 2048, 256, 8),
    Model("GPT-OSS-120B", 2880, 2880, 128, 4),
    Model("OLMoE-1B-7B", 2048, 1024, 64, 8),
    Model("Kimi-K2", 7168, 2048, 384, 8),
)
