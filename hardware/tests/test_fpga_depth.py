"""The depth transformer and the projector in integers, beside the float model's."""

import numpy as np
import pytest
import torch
from torch import nn

from tachyscope.models.token_model import Sampler as FloatSampler
from tachyscope.models.token_model import draw_noise
from tachyscope.models.vila_u.depth import DepthConfig, DepthTransformer
from tachyscope.models.vila_u.vqgan import Codebooks
from tachyscope_fpga.decoder.depth_model import DepthModel, Sampler, gelu
from tachyscope_fpga.parts.vector import from_wide, to_wide

DEPTH, CODES, DIM, HIDDEN, WIDTH = 3, 16, 4, 8, 16


def test_gelu_is_near_the_real_one():
    x = np.linspace(-6, 6, 2001)
    real = nn.functional.gelu(torch.from_numpy(x)).numpy()
    assert np.abs(from_wide(gelu(to_wide(x))) - real).max() < 0.01


@pytest.mark.parametrize(("top_k", "top_p"), [(CODES, 1.0), (5, 1.0), (CODES, 0.6), (1, 0.5)])
def test_codes_are_drawn_as_by_the_float_sampler(top_k, top_p):
    ours = Sampler(0.8, top_k, top_p)
    theirs = FloatSampler(1.0, 0.8, top_k, top_p)
    logits = 2 * torch.randn(200, CODES, generator=torch.Generator().manual_seed(0))
    noise = draw_noise(torch.Generator().manual_seed(1), logits.shape, torch.device("cpu"))
    pairs = zip(logits.double().numpy(), noise.double().numpy(), strict=True)
    assert [ours.pick(*pair) for pair in pairs] == theirs.pick(logits, noise).tolist()


def test_codes_and_inputs_are_near_the_float_models():
    torch.manual_seed(0)
    head = DepthTransformer(DepthConfig(WIDTH, 2, 2), DEPTH, CODES, DIM, HIDDEN)
    books = Codebooks(DEPTH, CODES, DIM, shared=False)
    projector = nn.Sequential(nn.Linear(DIM, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, HIDDEN))
    with torch.no_grad():  # logits far apart, so that few codes depend on a rounding
        head.classifier_mlp.linear.weight.mul_(8)
        for book in books.codebooks:
            book.weight.normal_()
    gain, actions = torch.rand(HIDDEN) + 0.5, torch.randn(2, HIDDEN)
    arrays = {
        "codebooks": torch.stack([book.weight[:CODES] for book in books.codebooks]),
        "norm.weight": gain,
        "embed_tokens": torch.zeros(1, HIDDEN),
        "pos_emb_d": head.pos_emb_d[0],
        "actions": actions,
        **{f"projector.{name}": value for name, value in projector.state_dict().items()},
        **{f"in_mlp_{n}.{k}": v for n in (1, 2) for k, v in getattr(head, f"in_mlp_{n}").state_dict().items()},
        **head.head_transformer.state_dict(),
        **{f"classifier.{k}": v for k, v in head.classifier_mlp.state_dict().items()},
    }  # fmt: skip
    model = DepthModel({k: v.detach().numpy() for k, v in arrays.items()}, 2, Sampler(1.0, 99, 1.0))
    states = torch.randn(40, HIDDEN)
    noise = draw_noise(torch.Generator().manual_seed(1), (40, DEPTH, CODES), torch.device("cpu"))
    with torch.no_grad():
        want = head.generate(states * gain, books, FloatSampler(1.0, 1.0, CODES, 1.0), noise)
        real = projector(books.sum(want)) + actions[1]
    pairs = zip(to_wide(states.numpy()), noise.numpy(), strict=True)
    got = np.array([model.generate(state, luck) for state, luck in pairs])
    assert (got == want.numpy()).mean() > 0.9
    inputs = from_wide(np.stack([model.embed(codes, 1) for codes in want.numpy()]))
    assert np.abs(inputs - real.numpy()).max() < 0.05 * np.abs(real.numpy()).max()
