"""VILA-U's modules: a LLaMA trunk over a frame's tokens, a depth transformer over their codes.

Modules and parameters have the published names.
"""

from __future__ import annotations

from torch import Tensor, nn

from tachyscope.models.llama import Trunk
from tachyscope.models.vila_u.config import VilaConfig
from tachyscope.models.vila_u.depth import DepthTransformer
from tachyscope.models.vila_u.vqgan import RqVae


class Llm(nn.Module):
    """The folder `llm`."""

    def __init__(self, config: VilaConfig) -> None:
        super().__init__()
        self.model = Trunk(config)
        # not used here, but part of the published files
        self.lm_head = nn.Linear(config.hidden, config.vocab, bias=False)


class VisionTower(nn.Module):
    """The folder `vision_tower`."""

    def __init__(self, config: VilaConfig) -> None:
        super().__init__()
        books = config.depth, config.codes, config.code_dim
        self.rqvaesiglip = RqVae(config.pixels, *books, config.shared_codebook)
        self.rqtransformer = DepthTransformer(config.head, *books, config.hidden)


class Projector(nn.Module):
    """The folder `mm_projector`: from code sums and a frame's action to the trunk's inputs."""

    def __init__(self, config: VilaConfig) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(config.code_dim, config.hidden),
            nn.GELU(),
            nn.Linear(config.hidden, config.hidden),
        )
        count = len(config.actions)
        self.action_embedding = nn.Embedding(count, config.hidden) if count else None

    def forward(self, sums: Tensor, actions: Tensor | int | None = None) -> Tensor:
        """Inputs [..., W] of code sums [..., dim]; actions [...], or one for all."""
        x = self.layers(sums)
        return x if self.action_embedding is None else x + self.action_embedding.weight[actions]


class Vila(nn.Module):
    """The three folders' modules."""

    def __init__(self, config: VilaConfig) -> None:
        super().__init__()
        self.llm = Llm(config)
        self.vision_tower = VisionTower(config)
        self.mm_projector = Projector(config)

    @property
    def trunk(self) -> Trunk:
        return self.llm.model

    @property
    def head(self) -> DepthTransformer:
        return self.vision_tower.rqtransformer

    @property
    def vae(self) -> RqVae:
        return self.vision_tower.rqvaesiglip

    def embed(self, codes: Tensor, actions: Tensor | int | None = None) -> Tensor:
        """The trunk's inputs [..., W] for codes [..., D]."""
        return self.mm_projector(self.vae.quantizer.sum(codes), actions)
