"""The parallel layouts that a backend claims, as a product of the kinds of parallelism. Never imports torch."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

KINDS = ("dp", "tp", "sp", "pp", "cp", "ep")
"""Kinds of parallelism that the suite judges."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How many ranks each kind of parallelism has.

    `sp` is sequence parallelism over the tensor-parallel ranks. `ep` ranks share the experts; they are some of the
    ranks of one pipeline stage, so they do not add to the number of ranks.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    sp: bool = False

    @property
    def ranks(self) -> int:
        """Number of processes."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def label(self) -> str:
        """Short name, for example "dp2-tp2-sp"; "single" for one rank."""
        sizes = [f"{kind}{size}" for kind in ("dp", "tp", "pp", "cp") if (size := getattr(self, kind)) > 1]
        return "-".join(sizes + ["sp"] * self.sp + [f"ep{self.ep}"] * (self.ep > 1)) or "single"

    @property
    def options(self) -> dict[str, Any]:
        """The options that ask a backend for this layout, under Megatron's names; data parallelism is what is left."""
        options: dict[str, Any] = {
            f"{name}_model_parallel_size" if name != "context" else "context_parallel_size": size
            for name, size in (("tensor", self.tp), ("pipeline", self.pp), ("context", self.cp), ("expert", self.ep))
            if size > 1
        }
        return options | ({"sequence_parallel": True} if self.sp else {})


def claimed_layouts(parallelism: Sequence[str], ranks: int) -> list[Layout]:
    """List every layout of so many ranks whose kinds are all claimed; one rank is always claimed."""
    sizes = [one for one in range(1, ranks + 1) if ranks % one == 0]
    found = []
    for dp, tp, pp, cp in itertools.product(sizes, repeat=4):
        layout = Layout(dp=dp, tp=tp, pp=pp, cp=cp)
        needed = {kind for kind in ("dp", "tp", "pp", "cp") if getattr(layout, kind) > 1}
        possible = 4 % tp == 0 and 4 % pp == 0  # the tiny models have four groups of heads and four blocks
        if layout.ranks != ranks or not needed <= set(parallelism) or not possible:
            continue
        found.append(layout)
        if tp > 1 and "sp" in parallelism:
            found.append(Layout(dp=dp, tp=tp, pp=pp, cp=cp, sp=True))
    return found


def claimed_expert_layouts(parallelism: Sequence[str], ranks: int) -> list[Layout]:
    """List the layouts of so many ranks for a mixture of experts: none unless expert parallelism is claimed.

    Tensor-parallel ranks that hold other experts must hold other tokens too: they are sequence parallel.
    """
    if "ep" not in parallelism:
        return []
    return [
        replace(one, ep=ep)
        for one in claimed_layouts(parallelism, ranks)
        if one.sp or one.tp == 1
        for ep in range(1, ranks + 1)
        if ranks // one.pp % ep == 0 and 8 % ep == 0  # the tiny mixtures have eight experts
    ]
