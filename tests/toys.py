"""The toys as tests play them: toy-tokens with fewer codes a place, at half the time."""

import dataclasses

import tachyscope as ts
from tachyscope.models.vila_u.model import Vila, VilaModel
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


def open_session(*args, **asked):
    """The session of a stream that is opened so."""
    return ts.open(*args, **asked).session
