"""Names of a Wan model's tensors: original and diffusers'."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

from tachyscope.core.errors import TachyscopeError

# diffusers' names of a Wan model's parts, and the original ones; a block's without "blocks.N."
DIFFUSERS = {
    "condition_embedder.time_embedder.linear_1": "time_embedding.0",
    "condition_embedder.time_embedder.linear_2": "time_embedding.2",
    "condition_embedder.time_proj": "time_projection.1",
    "condition_embedder.text_embedder.linear_1": "text_embedding.0",
    "condition_embedder.text_embedder.linear_2": "text_embedding.2",
    "scale_shift_table": "head.modulation",
    "proj_out": "head.head",
}
DIFFUSERS_BLOCK = {
    "scale_shift_table": "modulation",
    "norm2": "norm3",
    "ffn.net.0.proj": "ffn.0",
    "ffn.net.2": "ffn.2",
    "attn1.to_q": "self_attn.q",
    "attn1.to_k": "self_attn.k",
    "attn1.to_v": "self_attn.v",
    "attn1.to_out.0": "self_attn.o",
    "attn1": "self_attn",
    "attn2.to_q": "cross_attn.q",
    "attn2.to_k": "cross_attn.k",
    "attn2.to_v": "cross_attn.v",
    "attn2.to_out.0": "cross_attn.o",
    "attn2": "cross_attn",
}


def wan_names(tensors: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
    """A Wan model's tensors under their original names; raises if one has both."""
    renamed: dict[str, Tensor] = {}
    sources: dict[str, str] = {}
    for name, tensor in tensors.items():
        ours = wan_name(name)
        if ours in renamed:
            raise TachyscopeError(
                f"{where} must name each tensor once, got {sources[ours]!r} and {name!r}, which "
                f"are Wan's and diffusers' names of one: remove one of them"
            )
        renamed[ours], sources[ours] = tensor, name
    return renamed


def wan_name(name: str) -> str:
    """The original name of a Wan model's tensor or layer, from that or diffusers'."""
    block = re.match(r"blocks\.\d+\.|", name)
    assert block is not None
    part = name[block.end() :]
    for theirs, ours in (DIFFUSERS_BLOCK if block[0] else DIFFUSERS).items():
        if part == theirs or part.startswith(f"{theirs}."):
            return block[0] + ours + part[len(theirs) :]
    return name
