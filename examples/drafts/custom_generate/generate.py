"""`generate` with drafts, as a repository on the Hugging Face Hub has it."""

import tachyscope as ts


def generate(model, tokens_per_frame=256, places=32, **arguments):
    """The tokens of `model.generate(**arguments)`, several a pass.

    tokens_per_frame: of the model's video frames. places: drafts of one pass.
    """
    return model.generate(**arguments, custom_generate=ts.drafts(tokens_per_frame, places))
