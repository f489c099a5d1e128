"""The toys as tests play them: toy-tokens with fewer codes a place, at half the time."""

import dataclasses

import torch
import torch.nn.functional as F

import tachyscope as ts
from tachyscope.io.torch_defaults import own_numerics
from tachyscope.models.atrium.autoencoder import Autoencoder, AutoencoderDecoder
from tachyscope.models.cosmos_ar.config import CosmosConfig
from tachyscope.models.cosmos_ar.model import Cosmos, CosmosModel
from tachyscope.models.token_model import Sampler
from tachyscope.models.vila_u.model import Vila, VilaModel
from tachyscope.models.wan.config import WanConfig
from tachyscope.models.wan.random import random_wan


def load(name, **asked):
    """A toy by its name; of toy-tokens one with every part, but fewer codes and layers for them."""
    model = ts.load(name, **asked)
    if name != "toy-tokens":
        return model
    head = dataclasses.replace(model.config.head, layers=1)
    config = dataclasses.replace(model.config, depth=2, head=head)
    with own_numerics(0):
        small = Vila(config).eval().to(model.device, model.dtype)
    return VilaModel(small, config, model.tokenizer, name=name)


def wide_chunks(**options):
    """A model of chunks whose heads have 64 channels, as kernels for a GPU take them."""
    config = WanConfig(
        dim=128, ffn_dim=192, layers=2, heads=2, text_dim=8, text_len=6, size=(16, 32),
        stride=(1, 8, 8), steps=(1000, 500), stock="dense", actions=".wsa",
    )  # fmt: skip
    return random_wan(config, **options)


def narrow_chunks():
    """toy-chunks with fewer places, channels and layers, at a third of the time."""
    config = WanConfig(
        dim=48, ffn_dim=64, layers=2, heads=2, text_dim=16, text_len=16, actions=".wsadqe",
        size=(4, 6), stride=(1, 8, 8),
    )  # fmt: skip
    return random_wan(config, name="toy-chunks")


def toy_cosmos(device="cpu"):
    """A tiny random model: 16x16 pixels of 4x4 places, 2 frames a latent one."""
    config = CosmosConfig(
        hidden=64,
        intermediate=96,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=16,
        yarn=2.0,
        trained=(3, 4),
        grid=(4, 4),
        levels=(4, 4, 4),
        stride=(2, 4, 4),
        sampler=Sampler(cfg=1.0, top_k=64, top_p=0.8),
    )
    # drawn on the CPU, so that it is the same model on every device
    with own_numerics(0):
        model = Cosmos(config).eval().to(device)
    return CosmosModel(model, config, name="toy-cosmos")


def open_session(*args, **asked):
    """The session of a stream that is opened so."""
    return ts.open(*args, **asked).session


def encoding_chunks(dtype=torch.float32, **changes):
    """narrow_chunks with a picture's own autoencoder, of random weights, which encodes too."""
    config = dataclasses.replace(narrow_chunks().config, **changes)
    made = random_wan(config, dtype=dtype, name="toy-chunks")
    with own_numerics(1):
        made.decoder = AutoencoderDecoder(Autoencoder(config.in_channels))
    return made


class WholeSession:
    """Stands in for a session: all frames in one pass, nothing kept, the shortest true attention.

    With `chunk`, a latent frame sees its own chunk of so many frames, and those before.
    """

    def __init__(self, adapter, frames, context, chunk=None):
        self.shape = adapter.shape()
        self.rope, self.mask = adapter.rope(self.shape), None
        self.pos = self.shape.positions(0, frames)[None, None]
        self.keys, self.values = adapter.transformer.keys_values(context)
        if chunk:
            index = self.pos[0, 0, :, 0] // chunk
            self.mask = index[:, None] >= index[None, :]

    def attend(self, layer, q, k, v):
        q, k = (self.rope.rotate(x, self.pos) for x in (q, k))
        return F.scaled_dot_product_attention(q, k, v, self.mask)

    def cross(self, layer, q):
        return F.scaled_dot_product_attention(q, self.keys[layer], self.values[layer])

    def mlp(self, layer, x, fn):
        return fn(x)
