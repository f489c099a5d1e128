"""The toys as tests play them: toy-tokens with fewer codes a place, at half the time."""

import dataclasses

import tachyscope as ts
from tachyscope.models.vila_u.model import Vila, VilaModel
from tachyscope.models.wan.config import WanConfig
from tachyscope.models.wan.toy import random_wan
from tachyscope.numerics import own_numerics


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


def open_session(*args, **asked):
    """The session of a stream that is opened so."""
    return ts.open(*args, **asked).session
