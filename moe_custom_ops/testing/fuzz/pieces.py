"""What the strategies of several ops draw: sizes, dtypes, layouts, values, workspaces."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st

from .properties import INTERPRETED

Draw = Callable[[st.SearchStrategy[Any]], Any]

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INDICES = (torch.int32, torch.int64)
COUNTS = (torch.int32, torch.int64, torch.float32, torch.float64)
MOVED = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
)


def sizes(few: Sequence[Any], more: Sequence[Any]) -> st.SearchStrategy[Any]:
    """``more`` too, but under the interpreter, where a program takes milliseconds."""
    return st.sampled_from(few if INTERPRETED else [*few, *more])


SEED = st.integers(0, 9999)
HIDDEN = sizes([1, 2, 3, 8, 16, 33, 0, 7, 130], [520, 1030])
EXPERTS = sizes([1, 2, 3, 4, 7, 8, 16, 33], [64, 130])
TOPK = sizes([1, 2, 3], [4, 6, 8, 9])
TOKENS = sizes(range(6), range(6, 21))
OFTEN = st.sampled_from([True, True, True, False])
RARELY = st.sampled_from([False, False, False, True])
SELDOM = st.sampled_from([False] * 11 + [True])
EITHER = st.booleans()


def draw_layout(draw: Draw, source: str, shape: Sequence[int], expandable: bool = False) -> str:
    """The source of a tensor, at strides of any kind."""
    kind = draw(st.sampled_from(["contiguous", "strided", "strided", "expanded"]))
    if kind == "contiguous" or not shape:
        return source
    if kind == "expanded" and expandable:
        return f"t.expanded({source}, {draw(st.integers(0, len(shape) - 1))})"
    axes = tuple(draw(st.permutations(range(len(shape)))))
    steps = tuple(draw(st.sampled_from([1, 1, 2, 3])) for _ in shape)
    offset = draw(st.sampled_from([0, 1, 3, 4]))
    options = [
        f", axes={axes}" if axes != tuple(range(len(shape))) else "",
        f", steps={steps}" if max(steps) > 1 else "",
        f", offset={offset}" if offset else "",
    ]
    return f"t.laid_out({source}{''.join(options)})" if any(options) else source


def draw_normal(draw: Draw, shape: Sequence[int], dtype: torch.dtype, special: bool = True) -> str:
    options = f", seed={draw(SEED)}"
    scale = draw(st.sampled_from([1.0, 8.0, 2.0**-20]))
    options += f", scale={scale}" if scale != 1.0 else ""
    options += ", special=0.05" if special and draw(RARELY) else ""
    return f"t.normal({tuple(shape)}, {dtype}{options})"


def draw_workspace(draw: Draw, size: str) -> str | None:
    """None, or the source of a workspace of ``size`` bytes or more that holds something."""
    kind = draw(st.sampled_from(["none", "exact", "larger", "made"]))
    if kind == "none":
        return None
    if kind == "made":
        return f"moe_custom_ops.make_workspace({size})"
    more = " + 48" if kind == "larger" else ""
    return f"t.scratch({size}{more}, fill={draw(st.sampled_from([255, 0, 127]))})"


def add(sources: dict[str, str], **more: str | None) -> None:
    sources.update({name: source for name, source in more.items() if source is not None})


def draw_leaves(draw: Draw, *names: str) -> tuple[str, ...]:
    return tuple(name for name in names if draw(OFTEN))
