"""What is predicted is what a session then holds, byte for byte."""

import json

import pytest
import torch
import toys
from toys import open_session

import tachyscope as ts
from tachyscope.cli import main
from tachyscope.errors import TachyscopeError
from tachyscope.layers import cache_bytes
from tachyscope.memory import ROOM, fit, largest, lines, need, sized
from tachyscope.models.registry import load
from tachyscope.models.wan.loading import save_wan
from tachyscope.models.wan.presets import SIZES
from tachyscope.models.wan.toy import toy_chunks
from tachyscope.peak_memory import peak
from tachyscope.plan import NAMES
from tachyscope.rollout import rollout

CUSTOM = {
    "toy-chunks": [
        "cache=window:budget=6f,positions=reindexed",
        "cache=merge:budget=200,match=key_value,heads=shared attention=ann:k=120,hash=lsh",
        "cache=merge:budget=8f,heads=each attention=ann:top_p=0.9,block=3 text=ann",
        "cache=bank:resident=8f,budget=30f,host=int4 attention=ann:k=60,block=4",
        "cache=worldkv:retrieve=6,budget=30f",
        "cache=memrope:budget=9f,sink=1 store=int2",
        "cache=window:budget=8f attention=radial:block=2",
        "cache=window:budget=8f attention=svg",
        "cache=dedup:budget=8f attention=svg2",
        "cache=dedup:budget=9f store=int4",
        "cache=deep_forcing:budget=9f,keep=7,sink=2",
        "replay=attentive:threshold=0.5",
        "replay=random:share=0.5",
    ],
    "toy-tokens": [
        "cache=window:budget=6f,sink=2",
        "cache=merge:budget=8f attention=ann:read=0.9 replay=attentive:share=0.5,drift=true",
        "replay=every_k",
    ],
}


@pytest.fixture(scope="module", params=CUSTOM)
def models(request):
    model = load(request.param)
    return model, model.on_meta()


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["balanced", "fast"])
def test_the_named_plans_serve_five_chunks_under_way(plan):
    shapes = sized("rolling-forcing")
    found = need(shapes, plan, frames=48)
    # 15 latent frames are under way, 18 are held behind them: as in other models
    shape = shapes.shape()
    assert shape.chunk + shape.rolling_frames == 15
    assert found.cache["k"] == 33 * shape.tokens_per_frame * shape.width * shape.layers * 2


@pytest.mark.slow
def test_the_cache_is_predicted_to_the_byte(models):
    model, shapes = models
    # as far as a cache that merges by threshold reserves: how it grows from there is data
    asked = {"frames": 8 * model.shape().chunk, "prompt": "a room"}
    for plan in (*NAMES, *CUSTOM[model.name], "dense store=int8"):
        found = need(shapes, plan, **asked)
        session = open_session(model, plan, **asked)
        assert sum(found.cache.values()) == cache_bytes(session.layers), plan
        layer = session.layers[0]
        assert found.cache.keys() == layer.tensors().keys() | layer.buffers().keys(), plan
        held = sum(x.nbytes for part in session.layers for x in part.host_tensors().values())
        assert found.host == held, plan
        assert found.weights == sum(
            p.numel() * p.element_size() for p in model.transformer.parameters()
        )
        stored = {x.untyped_storage() for text in session.texts for x in (text.k, text.v)}
        assert found.prompt == sum(len(storage) for storage in stored)
        assert found.activations > 0 and found.decoding > 0
        assert found.peak > found.stays > sum(found.cache.values())


@pytest.mark.parametrize(
    "plan, name, frames",
    [
        ("dense", "toy-chunks", 36),
        ("cache=merge:threshold=1", "toy-chunks", 36),
        ("cache=window:budget=6f", "toy-tokens", 8),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                ("dense", "toy-tokens", 12),
                ("cache=merge:threshold=1", "toy-tokens", 12),
                ("cache=window:budget=6f", "toy-chunks", 36),
            )
        ),
    ],
)
def test_it_is_what_a_rollout_ends_with(plan, name, frames):
    model = toys.load(name)
    session = open_session(model, plan, prompt="a", frames=frames)
    for _ in rollout(model, frames=frames, stream=ts.Stream(model, session)):
        pass
    found = need(model.on_meta(), plan, frames=frames, prompt="a")
    assert sum(found.cache.values()) == cache_bytes(session.layers)


@pytest.mark.slow
def test_only_a_cache_without_a_bound_grows_with_the_video():
    model = sized("toy-chunks")
    for plan in ("dense", "fast-ar"):
        sizes = [need(model, plan, frames=n).peak for n in (30, 60)]
        assert sizes[0] < sizes[1]
    # a bank's index is of as much as it may hold, 240 latent frames
    for plan, lengths in {"live": (60, 90), "stock": (60, 90), "fast": (240, 900)}.items():
        sizes = {sum(need(model, plan, frames=n).cache.values()) for n in lengths}
        assert len(sizes) == 1


def test_half_precision_takes_half():
    whole, half = (
        need(sized("toy-chunks", None, d), "dense", frames=30) for d in ("float32", "bfloat16")
    )
    assert whole.cache["k"] == 2 * half.cache["k"] and whole.prompt == 2 * half.prompt
    assert whole.cache["pos"] == half.cache["pos"]
    assert half.activations < whole.activations


def test_a_peak_counts_what_lives_together():
    x = torch.empty(1000, device="meta")  # 4,000 bytes
    assert peak(lambda: None) == 0
    assert peak(lambda: x.add_(1)) == 0  # it was there before
    assert peak(lambda: x + 1) == 4000
    assert peak(lambda: (x + 1) + 1) == 8000
    assert peak(lambda: [x + 1 for _ in range(3)][0]) == 12000

    def by_turns():
        for _ in range(3):
            y = x + 1
            del y

    assert peak(by_turns) == 4000
    assert peak(lambda: (x + 1).sum().item()) >= 4000  # up to where data is asked for
    q = torch.empty(1, 2, 100, 8, device="meta")
    assert peak(lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q)) == 6400
    with pytest.raises(ZeroDivisionError):
        peak(lambda: 1 / 0)


@pytest.mark.slow
def test_published_sizes_are_known_without_weights():
    found = need(sized("wan_1.3b"), "stock", frames=81, size=(480, 832))
    # 30 layers of 21 latent frames of 1,560 places, 12 heads of 128, two bytes
    assert found.cache["k"] == 30 * 21 * 1560 * 12 * 128 * 2
    # of 1,418,996,800 weights some small ones are kept in four bytes
    assert 2 * 1_418_996_800 < found.weights < 2.02 * 1_418_996_800
    # the VAE's 127 million; beside them two frames of what each of its convolutions saw
    assert 2 * 126_892_531 <= found.decoder < 2.01 * 126_892_531
    assert 1.8e9 < found.decoder_state < 2e9
    assert found.of_video == sum(found.cache.values()) + found.decoder_state + found.prompt
    assert found.prompt == 30 * 2 * 512 * 1536 * 2
    assert sized("self-forcing").config == SIZES["wan_1.3b"]


@pytest.mark.slow
def test_what_is_decoded_beside_the_next_chunk_comes_on_top_of_it():
    for name, beside in (("self-forcing", True), ("krea", False)):
        model = sized(name)
        found = need(model, "stock", frames=81)
        making = max(found.activations + found.attention, found.committing)
        assert found.decoding > 0 and found.beside == beside == model.overlaps_decode
        together = making + found.decoding if beside else max(making, found.decoding)
        assert found.peak == found.stays + together
        document = fit(model, "stock", frames=81)
        (row,) = document["rows"]
        assert row["peak_bytes"] == found.peak and row["decoding_beside"] == beside
        words = "beside, decoding" if beside else "or decoding"
        assert any(line.startswith(f"{words}  ") for line in lines(document))


@pytest.mark.slow
def test_the_largest_budget_that_fits_is_told():
    model = load("toy-chunks").on_meta()
    asked = {"frames": 300}
    # one byte more, so that no rounding of gigabytes decides
    limit = need(model, "cache=merge:budget=40f", **asked).peak + 1
    for plan, spec in (
        ("dense", "merge:budget=40f,"),
        ("cache=merge:budget=90f", "merge:budget=40f,"),
        ("cache=window:budget=90f", "window:budget="),
    ):
        (row,) = fit(model, plan, gpu_gb=limit / ROOM / 1e9, **asked)["rows"]
        assert not row["fits"] and row["largest_budget"].startswith(spec)
        advised = f"cache={row['largest_budget']}"
        (again,) = fit(model, advised, gpu_gb=limit / ROOM / 1e9, **asked)["rows"]
        assert again["fits"] and "largest_budget" not in again
    (row,) = fit(model, "dense", gpu_gb=1e-4, **asked)["rows"]
    assert row["largest_budget"] is None
    told = lines(fit(model, "dense", gpu_gb=1e-4, **asked))[-1]
    assert told.endswith("no budget of the cache would: shrink the size")


def test_the_largest_number_is_found():
    def fits(count):
        if count < 5:
            raise TachyscopeError("too few")
        return count <= 17

    assert largest(fits, 100) == 17
    assert largest(fits, 9) == 9
    assert largest(lambda n: n <= 0, 100) is None

    def never(count):
        raise TachyscopeError("never")

    assert largest(never, 10) is None


def test_the_command_line_tells_it(tmp_path, capsys):
    words = "bench fit toy-chunks --frames 300 --plan dense --gpu-gb 0.004 --json -"
    assert main(words.split()) == 0
    out = capsys.readouterr().out
    found = json.loads(out.splitlines()[-1])
    (row,) = found["rows"]
    assert found["suite"] == "bench-fit" and not row["fits"]
    assert "cache: k " in out and f"use cache={row['largest_budget']}" in out
    assert sum(row["cache_bytes"].values()) < row["peak_bytes"]
    model = load("toy-chunks", dtype="bfloat16")
    session = open_session(model, "dense", frames=300)
    assert sum(row["cache_bytes"].values()) == cache_bytes(session.layers)
    # a checkpoint is read for its shapes
    save_wan(toy_chunks(), tmp_path / "model")
    words = ["bench", "fit", "wan_causal", "--weights", str(tmp_path / "model"), "--json", "-"]
    assert main([*words, "--plan", "dense", "--frames", "300"]) == 0
    (same,) = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert same["peak_bytes"] == row["peak_bytes"] and "fits" not in same


@pytest.mark.parametrize(
    "words, message",
    [
        (["wan_9b"], "no model 'wan_9b'; there are: "),
        (["wan_1.3b", "--weights", "x"], "the size of wan_1.3b is known: leave --weights out"),
        (["toy-chunks", "--dtype", "float8"], "no dtype 'float8'; there are: float32"),
        (["toy-chunks", "--frames", "0"], "--frames must be from 1 to 1,000,000, got 0"),
        (["toy-chunks", "--gpu-gb", "0"], "--gpu-gb must be over 0 and at most 1,000,000, got 0"),
        (["toy-chunks", "--plan", "magic"], "no plan 'magic'; there are: dense"),
        (["toy-chunks", "--size", "big"], "--size is HEIGHTxWIDTH, got 'big': try 480x832"),
        (["toy-chunks", "--plan", "cache=merge:budget=2f"], "cache policy 'merge': budget=2f holds 48"),
    ],
)  # fmt: skip
def test_a_fault_is_one_line(words, message, capsys):
    assert main(["bench", "fit", *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"tachyscope: {message}") and err.count("\n") == 1


@pytest.mark.slow
def test_a_rolling_model_needs_room_for_all_that_is_under_way():
    """Five chunks share a pass: its activations are five times those of one."""
    plain, rolling = (
        need(sized(name), "stock", frames=120) for name in ("self-forcing", "rolling-forcing")
    )
    assert 4.5 < rolling.activations / plain.activations < 5.5
    assert rolling.decoding == plain.decoding
    assert rolling.cache["k"] / plain.cache["k"] == pytest.approx(36 / 21)
