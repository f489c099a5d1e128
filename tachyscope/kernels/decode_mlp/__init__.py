"""An MLP for the tokens of a decode step in one launch, which a flag on the device skips."""

from tachyscope.kernels.decode_mlp import torch as stock
from tachyscope.kernels.decode_mlp.mlp import COPIES, Error, Kept, MlpWeights
from tachyscope.kernels.decode_mlp.torch import run_mlp
from tachyscope.kernels.dispatch import dispatch

__all__ = ["COPIES", "Error", "Kept", "MlpWeights", "decode_mlp", "run_mlp"]

decode_mlp = dispatch(stock.decode_mlp)
