"""Plans of the evaluation's trade-off tables."""

from __future__ import annotations

from tachyscope.core.errors import TachyscopeError

TABLES = {
    "readme": [
        "cache=window:budget=21f",
        "balanced",
        "fast",
        "live",
        "lossless cache=dedup:budget=21f,newest=3",
        "lossless attention=ann:k=640",
        "lossless attention=ann:k=1280",
        "lossless attention=ann:k=640,tile=64,block=1",
        # from here on rows of FAST-AR's Table 1
        "passes=teacache:threshold=0.15",
        "passes=flowcache:threshold=0.2",
        "cache=merge:threshold=0.95",
        "cache=merge:budget=21f,newest=3",
        "attention=svg",
        "attention=svg2",
        "attention=radial",
        "attention=ann:read=0.28,hash=lsh",
        "attention=ann:read=0.3",
        "text=ann:hash=lsh",
        "text=ann:hash=int8",
        "attention=radial passes=flowcache:threshold=0.2",
        "fast-ar",
        "fast-ar attention=ann:hash=int8 text=ann:hash=int8",
    ],
    "papers": [
        "fast-ar",
        *[f"passes=teacache:threshold={x}" for x in (0.107, 0.15, 0.25)],
        "passes=flowcache:threshold=0.2",
        "live passes=teacache:threshold=0.25",
    ],
    "memory": [
        "cache=window:budget=21f",
        "lossless cache=frames:budget=21f",
        "lossless cache=dedup:budget=21f,newest=3",
        "lossless attention=ann:k=1280",
        *[
            f"lossless cache=bank:{where} attention=ann:{read}"
            for where, read in (
                *((f"resident=21f,host={host}", f"read={read}")
                  for read in (0.555, 1) for host in ("native", "int8", "int4")),
                ("resident=42f", "k=1280"),
            )
        ],
    ],
    "budgets": [
        f"cache={cache}:budget={frames}f{more}"
        for frames in (9, 13, 17, 21, 25, 33)
        for cache, more in (("window", ""), ("merge", ",heads=shared"), ("merge", ""))
    ],
    "matching": ["cache=window:budget=12f"]
    + [
        f"cache=merge:budget=12f,match={match},keep={keep},heads={heads}"
        for match in ("rotated", "unrotated", "key_value")
        for keep in ("partner", "newest")
        for heads in ("shared", "each")
    ],
    "long": ["balanced", "fast", "live", "cache=window:budget=21f"]
    + [
        f"cache=merge:budget=21f,newest=3,keep={keep}" for keep in ("partner", "newest")
    ]
    + ["cache=dedup:budget=21f,newest=3"],
    "methods": [
        "lossless",
        "cache=merge:threshold=0.95",
        "cache=merge:threshold=0.9",
        *[
            f"{cache}attention=ann:read={read},block=4,tile=8"
            for cache, reads in (
                ("", (0.1, 0.2, 0.3, 0.5)),
                ("cache=merge:budget=21f ", (0.3, 0.5)),
                ("cache=merge:budget=33f ", (0.2, 0.3)),
            )
            for read in reads
        ],
        "attention=ann:read=0.3,block=16,tile=64",
        "text=ann:hash=lsh",
        *[
            f"replay={name}:share={share}{drift}"
            for share in (0.25, 0.5, 0.75)
            for name, drift in (("attentive", ""), ("attentive", ",drift=true"))
        ],
        "replay=random:share=0.5,drift=true",
        "replay=every_k:k=2,drift=true",
    ],
}  # fmt: skip


def table(name: str) -> list[str]:
    """Plans of a trade-off table, beside dense.

    readme: the plans of README's table, and every row of FAST-AR's Table 1. papers: FAST-AR's plan,
    and passes skipped by TeaCache and FlowCache. memory: what is kept, at 21 resident latent
    frames. budgets: window and merge at equal budgets. matching: on what merge compares, whom it
    keeps, by head or for all. long: what lasts over hundreds of frames. methods: all the others.
    """
    if name not in TABLES:
        raise TachyscopeError(f"no table {name!r}; there are: {', '.join(TABLES)}")
    return ["dense", *TABLES[name]]
