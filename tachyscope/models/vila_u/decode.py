"""VILA-U's modules as the decode engine's `DecodeParts`."""

from __future__ import annotations

from typing import Any

from tachyscope.decode import DecodeParts, DepthParts, LayerParts
from tachyscope.models.token_model import Sampler
from tachyscope.models.vila_u.transformer import Vila


def decode_parts(model: Vila, sampler: Sampler) -> DecodeParts:
    """The model's own modules; nothing is copied."""
    # a ModuleList has no element type
    trunk: Any = model.trunk
    head: Any = model.head
    project: Any = model.mm_projector
    tables: Any = model.vae.quantizer.codebooks
    layers = [
        LayerParts(
            layer.input_layernorm,
            layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj,
            layer.self_attn.o_proj, layer.post_attention_layernorm,
            layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj,
        )
        for layer in trunk.layers
    ]  # fmt: skip
    blocks = [
        LayerParts(
            block.ln1, block.attn.query, block.attn.key, block.attn.value, block.attn.proj,
            block.ln2, None, block.mlp[0], block.mlp[2],
        )
        for block in head.head_transformer.blocks
    ]  # fmt: skip
    classifier = head.classifier_mlp
    books = [book.weight.detach() for book in tables]
    depth = DepthParts(
        head.in_mlp_2, head.in_mlp_1, head.pos_emb_d[0], blocks, head.head_transformer.heads,
        classifier.layer_norm, classifier.linear, len(books[0]) - 1, books,
    )  # fmt: skip
    table = project.action_embedding
    return DecodeParts(
        layers, trunk.norm, depth, (project.layers[0], project.layers[2]),
        None if table is None else table.weight.detach(),
        sampler.guided, sampler.cfg, sampler.temperature, sampler.top_k, sampler.top_p,
    )  # fmt: skip
