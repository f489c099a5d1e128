"""The least and the most of every size that a user or a file can give.

They are checked before memory is taken or a loop begins. Each is far beyond what is published or
was tried, and low enough that what is within it ends, or is refused by the machine's memory, in
plain words. docs/cli.md lists those that a command line takes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from numbers import Integral, Real
from typing import NamedTuple, TypeVar

from tachyscope.errors import TachyscopeError, shown

N = TypeVar("N", int, float)


class Bound(NamedTuple):
    """From `low` to `high`, both allowed; whole numbers, unless they are given as floats."""

    low: float
    high: float

    @property
    def whole(self) -> bool:
        return isinstance(self.low, int)

    def __str__(self) -> str:
        if self.low == TINY:
            return f"over 0 and at most {_spelled(self.high)}"
        return f"from {_spelled(self.low)} to {_spelled(self.high)}"

    def rule(self, value: object) -> str:
        """What a value must be, and is not."""
        kind = "a whole number " if self.whole and isinstance(value, NOT_WHOLE) else ""
        return f"must be {kind}{self}, got {describe(value)}"


NOT_WHOLE = (float, str, bool, type(None))
TINY = 1e-12  # what "over 0" means
SHARE = Bound(0.0, 1.0)
PART = Bound(TINY, 1.0)  # a share that is not nothing
WIDTH = Bound(1, 65_536)  # channels
LAYERS = Bound(1, 256)
ENTRIES = Bound(1, 100_000_000)
LATENTS = Bound(0, 1_000_000)  # latent frames
EPS = Bound(1e-30, 0.1)

# what a command or a function is asked for
ASKED = {
    "frames": Bound(1, 1_000_000),
    "seed": Bound(0, 2**63 - 1),
    "world": Bound(0, 1_294_967_295),
    "worlds": Bound(1, 10_000),
    "clips": Bound(1, 1_000),
    "given": Bound(1, 2_000),
    "pace": Bound(1 / 30, 1.0),  # of a step
    "rounds": Bound(1, 1_000),
    "runs": Bound(1, 100),
    "at": Bound(1, 10_000),
    "lengths": Bound(1, 10_000),
    "rollout": Bound(1, 1_000_000),
    "gpu_gb": Bound(TINY, 1e6),
    "lora_alpha": Bound(TINY, 1e6),
    "queries": Bound(1, 4_096),
    "places": Bound(2, 65_536),
    "height": Bound(1, 16_384),
    "width": Bound(1, 16_384),
    # not options, but what they come to
    "prompt characters": Bound(0, 100_000),
    "prompt tokens": Bound(0, 2_048),  # that a token model's cache holds
    "tokens of a pass": Bound(1, 1_000_000),
    "plans": Bound(1, 100),  # or lengths
    "fps": Bound(0.001, 1_000.0),
    "port": Bound(0, 65_535),
    "clients": Bound(1, 10_000),
    "minutes": Bound(TINY, 10_000.0),
    "scale": Bound(1, 64),
    "speed": Bound(0.01, 10_000.0),
}

# what a policy is set to, by its parameters' names; a policy's own go before
SETTINGS = {
    "budget": ENTRIES,
    "resident": ENTRIES,
    "view": ENTRIES,
    "tokens": ENTRIES,
    "sink": LATENTS,
    "newest": LATENTS,
    "cache worldkv.retrieve": LATENTS,
    "cache worldkv.keep": PART,
    "cache deep_forcing.keep": LATENTS,
    "max_distance": Bound(1, 1_000_000),
    "fold": SHARE,
    "long": SHARE,
    "short": SHARE,
    "share": SHARE,
    "dense_passes": SHARE,
    "dense_layers": SHARE,
    "read": PART,
    "top_p": PART,
    "k": Bound(1, 100_000_000),
    "block": Bound(1, 4_096),
    "tile": Bound(1, 4_096),
    "bits": Bound(1, 256),
    "decay": Bound(TINY, 1e6),
    "min_ratio": SHARE,
    "q_clusters": Bound(1, 100_000),
    "k_clusters": Bound(1, 100_000),
    "text ann.keep": Bound(1, 100_000),
    "age": Bound(0, 1_000_000),
    "text ann.bits": Bound(1, 32),  # a bucket is one number
    "cache merge.threshold": Bound(-1.0, 1.0),  # a cosine
    "warmup": Bound(1, 1_000),
    "places": Bound(0, 1_024),
    "passes teacache.threshold": Bound(0.0, 1e6),
    "passes flowcache.threshold": Bound(0.0, 1e6),
    "replay attentive.threshold": Bound(-1e12, 1e12),
    "replay input.threshold": Bound(0.0, 1e6),
    "replay input.budget": Bound(0.0, 1e6),
    "replay input.loss": Bound(0.0, 100.0),
}

# what a config.json says of a Wan-type model, by our names
WAN = {
    "dim": WIDTH,
    "ffn_dim": Bound(1, 1_048_576),
    "layers": LAYERS,
    "heads": Bound(1, 1_024),
    "in_channels": Bound(1, 1_024),
    "text_dim": Bound(1, 16_384),
    "text_len": Bound(1, 4_096),
    "freq_dim": Bound(2, 8_192),
    "eps": EPS,
    "patch": Bound(1, 64),
    "chunk": Bound(1, 256),
    "actions": Bound(0, 256),
    "steps": Bound(0, 1_000),
    "first_steps": Bound(0, 1_000),
    "shift": Bound(1e-6, 1e6),
    "size": Bound(1, 4_096),
    "stride": Bound(1, 64),
    "fps": Bound(1, 1_000),
    "stock": Bound(0, 1_000),
}

# what the config files say of a VILA-U model, by their names
VILA = {
    "hidden_size": WIDTH,
    "intermediate_size": Bound(1, 1_048_576),
    "num_hidden_layers": LAYERS,
    "num_attention_heads": Bound(1, 1_024),
    "num_key_value_heads": Bound(1, 1_024),
    "head_dim": Bound(2, 8_192),
    "vocab_size": Bound(1, 10_000_000),
    "rms_norm_eps": EPS,
    "rope_theta": Bound(1e-6, 1e12),
    "factor": Bound(1e-6, 1e6),
    "code_shape": Bound(1, 1_024),
    "embed_dim": WIDTH,
    "n_embed": Bound(1, 10_000_000),
    "n_layer": LAYERS,
    "n_head": Bound(1, 1_024),
    "ch": Bound(1, 8_192),
    "ch_mult": Bound(1, 64),
    "num_res_blocks": Bound(1, 64),
    "attn_resolutions": Bound(1, 65_536),
    "z_channels": Bound(1, 8_192),
    "resolution": Bound(1, 65_536),
    "decoder_latent_shape": Bound(1, 1_024),
    "groups": Bound(1, 8_192),
    "fps": Bound(1, 1_000),
    "clip": Bound(1, 1_000_000),
    "actions": Bound(0, 256),
    "cfg": Bound(0.0, 1e3),
    "temperature": Bound(1e-6, 1e3),
    "top_k": Bound(1, 10_000_000),
    "top_p": PART,
    "list": Bound(0, 16),  # numbers in a list
}

# what a config.json says of a Cosmos model, by our names
COSMOS = {
    "hidden": WIDTH,
    "intermediate": Bound(1, 1_048_576),
    "layers": LAYERS,
    "heads": Bound(1, 1_024),
    "kv_heads": Bound(1, 1_024),
    "head_dim": Bound(6, 8_192),
    "eps": EPS,
    "theta": Bound(1e-6, 1e12),
    "yarn": Bound(1.0, 1e3),
    "trained": Bound(1, 1_024),
    "grid": Bound(1, 1_024),
    "levels": Bound(1, 1_024),
    "stride": Bound(1, 64),
    "fps": Bound(1, 1_000),
    "temperature": Bound(1e-6, 1e3),
    "top_k": Bound(1, 10_000_000),
    "top_p": PART,
}

# what config files say of Wan's text encoder (transformers) and VAE (diffusers), by their names
PARTS = {
    "vocab_size": Bound(1, 10_000_000),
    "d_model": WIDTH,
    "d_kv": Bound(1, 8_192),
    "d_ff": Bound(1, 1_048_576),
    "num_layers": LAYERS,
    "num_decoder_layers": LAYERS,
    "num_heads": Bound(1, 1_024),
    "relative_attention_num_buckets": Bound(1, 4_096),
    "relative_attention_max_distance": Bound(1, 1_000_000),
    "base_dim": Bound(1, 4_096),
    "decoder_base_dim": Bound(1, 4_096),
    "z_dim": Bound(1, 1_024),
    "num_res_blocks": Bound(1, 64),
    "in_channels": Bound(1, 1_024),
    "out_channels": Bound(1, 1_024),
    "patch_size": Bound(1, 64),
    "dim_mult": Bound(1, 64),
    "list": Bound(0, 1_024),
}

# of files as such
JSON_BYTES = 64 * 2**20


def check(name: str, value: N, what: str = "", advice: str = "") -> N:
    """The value, after a check against the bound of that name in ASKED.

    An error calls it `what` unless that is its name, and ends with the advice, if there is any.
    """
    bound = ASKED[name]
    if not within(bound, value):
        then = f": {advice}" if advice else ""
        raise TachyscopeError(f"{what or f'`{name}`'} {bound.rule(value)}{then}")
    return value


def within(bound: Bound, value: object) -> bool:
    """Whether a value is a number of the bound's kind, and inside it."""
    kind = Integral if bound.whole else Real
    # to Python True is a number; and what is not a number is inside nothing
    return (
        isinstance(value, kind)
        and not isinstance(value, bool)
        and bool(bound.low <= value <= bound.high)  # type: ignore[operator]
    )


def check_parts(values: Mapping[str, object], where: str) -> None:
    """Raise where a number in a part's config file is out of its bounds in PARTS."""
    for name, bound in PARTS.items():
        value = values.get(name)
        numbers = value if isinstance(value, list | tuple) else [value]
        if value is None:
            continue
        if not within(PARTS["list"], len(numbers)) or not all(within(bound, n) for n in numbers):
            raise TachyscopeError(f"{where}: {name} {bound.rule(value)}: mend it")


def demand(right: bool, whose: str, rule: str, got: object) -> None:
    """Raise unless a configuration is as the rule says."""
    if not right:
        raise TachyscopeError(f"{whose} {rule}, got {got}: change it")


def has_type(value: object, kind: type) -> bool:
    """As JSON has types: 10000 may stand for 10000.0, and true is no number."""
    return type(value) is kind or (kind is float and type(value) is int)


def bound_fault(bound: Bound, value: float | str) -> str | None:
    """What a number must be, or a text by its length; None where it is."""
    if isinstance(value, str):
        return None if within(bound, len(value)) else f"at most {bound.high:,} letters"
    return None if within(bound, value) else str(bound)


def check_prompt(prompt: str) -> str:
    """The prompt, after a check that it is text, and of what length."""
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise TachyscopeError(
            f"a prompt is text in UTF-8, got bytes that are none, {shown(prompt)}: write it anew"
        ) from None
    check("prompt characters", len(prompt), "a prompt's length")
    return prompt


def whole(text: str, what: str) -> int:
    """The whole number that a text spells in digits, and in nothing else."""
    if not re.fullmatch(r"[+-]?[0-9]{1,100}", text):
        raise TachyscopeError(f"{what} must be a whole number, got {shown(text)}: give its digits")
    return int(text)


def number(text: str, what: str) -> float:
    """The number that a text spells; nan and inf are none."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise TachyscopeError(f"{what} must be a number, got {shown(text)}: give its digits")
    return value


def _spelled(edge: float) -> str:
    if edge == 2**63 - 1:
        return "2**63 - 1"
    return f"{int(edge):,}" if float(edge).is_integer() else f"{edge:g}"


def describe(value: object) -> str:
    """A value that was given, as an error tells it."""
    # Python refuses to write a number of more than some thousand digits
    if isinstance(value, int) and abs(value) > 10**30:
        return "a number of more than 30 digits"
    return shown(value) if isinstance(value, str) else str(value)[:200]
