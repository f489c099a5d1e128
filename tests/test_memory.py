"""What is predicted is what a session then holds, byte for byte."""

import json

import pytest
import torch
import toys
from faults import refused
from toys import open_session

import tachyscope as ts
from tachyscope.cli import main
from tachyscope.core.errors import TachyscopeError
from tachyscope.core.kv_allocation import cache_bytes
from tachyscope.core.plan import NAMES
from tachyscope.core.rollout import rollout
from tachyscope.io import machine
from tachyscope.memory.allocations import peak, tensor_bytes
from tachyscope.memory.choose import FP8, TINY, largest
from tachyscope.memory.fit import fit
from tachyscope.memory.lines import lines
from tachyscope.memory.predict import ROOM, need, sized
from tachyscope.memory.promise import promise
from tachyscope.models.diffusion import modules_of
from tachyscope.models.registry import load
from tachyscope.models.toys import toy_chunks
from tachyscope.models.wan.loading import save_wan
from tachyscope.models.wan.presets import SIZES
from tachyscope.models.wan.sizes import VaeSize
from tachyscope_lab.bench.stand_ins import random_vae

CUSTOM = {
    "toy-chunks": [
        "cache=window:budget=6f,positions=reindexed",
        "cache=merge:budget=200,match=key_value,heads=shared attention=ann:k=120,hash=lsh",
        "cache=merge:budget=8f,heads=each attention=ann:k=100,block=3 text=ann",
        "cache=bank:resident=8f,budget=30f,host=int4 attention=ann:k=60,block=4",
        "cache=bank:resident=8f,budget=30f store=fp8 attention=ann:k=60,block=4",
        "cache=dedup:budget=9f store=int4",
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
@pytest.mark.parametrize("plan, resident", [("balanced", 42), ("fast", 21)])
def test_the_named_plans_serve_five_chunks_under_way(plan, resident):
    shapes = sized("rolling-forcing")
    found = need(shapes, plan, frames=48)
    # 15 latent frames are under way, 12 of them beyond the chunk that others have
    shape = shapes.shape()
    assert shape.chunk + shape.rolling_frames == 15
    assert (
        found.cache["k"]
        == (resident + 12) * shape.tokens_per_frame * shape.width * shape.layers * 2
    )


@pytest.mark.slow
def test_the_cache_is_predicted_to_the_byte(models):
    model, shapes = models
    # as far as a cache that merges by threshold reserves: how it grows from there is data
    asked = {"frames": 8 * model.shape().chunk, "prompt": "a room"}
    for plan in (*NAMES, *CUSTOM[model.name], "dense store=int8"):
        found = need(shapes, plan, **asked)
        session = open_session(model, plan, **asked)
        assert sum(found.cache.values()) == cache_bytes(session.memory.layers), plan
        layer = session.memory.layers[0]
        assert found.cache.keys() == layer.tensors().keys() | layer.buffers().keys(), plan
        held = sum(x.nbytes for part in session.memory.layers for x in part.host_tensors().values())
        assert found.host == held, plan
        assert found.weights == sum(
            p.numel() * p.element_size() for p in model.transformer.parameters()
        )
        stored = {x.untyped_storage() for text in session.memory.texts for x in (text.k, text.v)}
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
    assert sum(found.cache.values()) == cache_bytes(session.memory.layers)


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
def test_a_tiny_decoder_and_float8_weights_are_counted():
    (vae,) = fit(sized("self-forcing"), "fast", frames=240, vram_gb=12)["rows"]
    model = sized("self-forcing", decoder="random-tiny")
    (tiny,) = fit(model, "fast", frames=240, vram_gb=12)["rows"]
    assert tiny["recipes"][0]["plan"] == "fast" and not tiny["recipes"][0]["weights"]
    assert (vae["decoder"], tiny["decoder"]) == ("wan_vae", "tiny_decoder")
    assert vae["recipes"][0]["peak_bytes"] > tiny["peak_bytes"]  # fits too, in bands
    same = {"weights_bytes", "cache_bytes", "host_bytes"}
    assert {key: tiny[key] for key in same} == {key: vae[key] for key in same}
    coded = need(sized("self-forcing", precision="fp8"), "fast", frames=240)
    assert coded.weights < 0.65 * vae["weights_bytes"] and coded.decoder == vae["decoder_bytes"]


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


def recipe(model, plan, **asked):
    (row,) = fit(model, plan, **asked)["rows"]
    (found,) = row["recipes"]
    return found


@pytest.mark.slow
def test_the_largest_budget_that_fits_is_told():
    model = load("toy-chunks").on_meta()
    asked = {"frames": 300}
    # one byte more, so that no rounding of gigabytes decides
    limit = (need(model, "cache=merge:budget=40f", **asked).peak + 1) / ROOM / 1e9
    for plan, spec in (
        ("dense", "cache=merge:budget=40f,"),
        ("cache=merge:budget=79f", "cache=merge:budget=40f,"),
        ("cache=window:budget=70f", "cache=window:budget="),
    ):
        found = recipe(model, plan, vram_gb=limit, **asked)
        assert found["fits"] and found["plan"].startswith(spec)
        assert found["peak_bytes"] <= ROOM * limit * 1e9
        again = recipe(model, found["plan"], vram_gb=limit, **asked)
        assert again["fits"] and again["plan"] == found["plan"] and not again["weights"]
    document = fit(model, "dense", vram_gb=1e-4, **asked)
    (found,) = document["rows"][0]["recipes"]
    assert not found["fits"] and found["missing_bytes"] > 0
    assert " GB of GPU memory are missing for the least, " in lines(document)[-1]


@pytest.mark.slow
def test_what_costs_least_is_given_up_first():
    """Decoding at once, then down to half of what is resident, then bfloat16, then the VAE."""
    model, banded = sized("self-forcing"), "decoder_bands=8"
    asked = {"frames": 240, "ram_gb": 64}
    found = {gb: recipe(model, "fast", vram_gb=gb, **asked) for gb in (24, 16, 12, 9.2, 7.6)}
    assert found[24]["plan"] == "fast" and not found[24]["weights"]
    assert found[16]["plan"] == "fast" and found[16]["weights"] == ["decoder_bands=2"]
    assert found[12]["plan"].startswith("fast cache=bank:resident=")
    assert found[12]["weights"] == [banded]
    assert found[9.2]["weights"] == [FP8, banded]
    assert found[7.6]["weights"][-1] == TINY[16]
    for gb, one in found.items():
        assert one["fits"] and one["peak_bytes"] <= ROOM * gb * 1e9


@pytest.mark.slow
def test_a_past_in_ram_is_coded_in_fewer_bits_where_it_is_short():
    model = sized("self-forcing")
    (row,) = fit(model, "fast", frames=1200, ram_gb=64)["rows"]
    assert row["recipes"][0]["plan"] == "fast" and row["recipes"][0]["ram_bytes"] <= 64e9
    short = recipe(model, "fast", frames=1200, ram_gb=30)
    assert short["fits"] and short["plan"] == "fast cache=bank:host=int4"
    assert short["ram_bytes"] <= 30e9 < row["kept_ram_bytes"]
    none = recipe(model, "fast", frames=1200, ram_gb=8)
    assert not none["fits"] and none["missing_ram_bytes"] == none["ram_bytes"] - 8e9


def test_a_past_whose_codes_are_resident_too_is_not_coded_again():
    plan = "fast cache=bank:host=native store=fp8"
    least = recipe(load("toy-chunks").on_meta(), plan, frames=300, vram_gb=1e-4)
    assert not least["fits"] and "host=int4" not in least["plan"]


@pytest.mark.slow
def test_the_least_is_told_where_nothing_fits():
    told = lines(fit(sized("krea"), "fast", frames=240, vram_gb=24))[-1]
    assert told.startswith("24 GB of GPU memory: ") and "are missing for the least" in told
    assert f"--weights {FP8} --weights {TINY[16]}" in told and "smaller --size" in told


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
    words = "fit toy-chunks --frames 300 --plan dense --vram 4MB --json -"
    assert main(words.split()) == 0
    out = capsys.readouterr().out
    found = json.loads(out.splitlines()[-1])
    (row,) = found["rows"]
    (one,) = row["recipes"]
    assert found["suite"] == "fit" and one["fits"] and one["plan"] != "dense"
    assert "cache: k " in out and f"--plan '{one['plan']}'" in out
    assert sum(row["cache_bytes"].values()) < row["peak_bytes"]
    model = load("toy-chunks", dtype="bfloat16")
    session = open_session(model, "dense", frames=300)
    assert sum(row["cache_bytes"].values()) == cache_bytes(session.memory.layers)
    # a checkpoint is read for its shapes
    save_wan(toy_chunks(), tmp_path / "model")
    words = ["fit", "wan_causal", "--weights", str(tmp_path / "model"), "--json", "-"]
    assert main([*words, "--plan", "dense", "--frames", "300"]) == 0
    (same,) = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert same["peak_bytes"] == row["peak_bytes"]
    assert [one["vram_gb"] for one in same["recipes"]] == [12, 16, 24]
    assert all(one["fits"] and one["plan"] == "dense" for one in same["recipes"])


@pytest.mark.parametrize(
    "words, message",
    [
        (["wan_9b"], "no model 'wan_9b'; there are: "),
        (["wan_1.3b", "--weights", "x"], "the size of wan_1.3b is known: leave --weights out"),
        (["toy-chunks", "--device", "tpu"], "--device is cuda or cpu here, got 'tpu'"),
        (["toy-chunks", "--device", "cpu", "--vram", "9GB"], "a cpu has no GPU memory, got --vram"),
        (["toy-chunks", "--weights", "decoder=x"], "model 'toy-chunks' takes no tiny decoder"),
        (["toy-chunks", "--frames", "0"], "--frames must be from 1 to 1,000,000, got 0"),
        (["toy-chunks", "--vram", "0"], "--vram must be over 0 and at most 1,000,000, got 0"),
        (["toy-chunks", "--ram", "much"], "--ram is memory as 16GB, got 'much': use GB, GiB or MB"),
        (["toy-chunks", "--plan", "magic"], "no plan 'magic'; there are: dense"),
        (["toy-chunks", "--size", "big"], "--size is HEIGHTxWIDTH, got 'big': try 480x832"),
        (["toy-chunks", "--plan", "cache=merge:budget=2f"], "cache policy 'merge': budget=2f holds 48"),
    ],
)  # fmt: skip
def test_a_fault_is_one_line(words, message, capsys):
    assert main(["fit", *words]) == 2
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


@pytest.mark.slow
@pytest.mark.parametrize("channels", [16, 48])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_vaes_size_is_that_of_the_published_one_to_the_byte(channels, dtype):
    pytest.importorskip("diffusers")
    with torch.device("meta"):
        published = random_vae(channels, dtype)
    size = VaeSize(channels, dtype)
    held = [sum(tensor_bytes(x.parameters()) for x in modules_of(vae)) for vae in (published, size)]
    assert held[0] == held[1]
    sides = 6 * published.stride[1], 10 * published.stride[2]
    assert size.encoder_state(sides) == published.encoder_state(sides) > 0
    for frames in (1, 2, 3, 5):
        x = torch.empty(1, channels, frames, 6, 10, device="meta")
        found = []
        for vae in (published, size):
            features = {}
            most = max(peak(lambda vae=vae, x=x, f=features: vae(x, f)) for _ in range(2))
            found.append((most, tensor_bytes(features.values())))
        assert found[0] == found[1], frames


def test_a_cpu_has_all_in_ram(monkeypatch, capsys):
    # not this process's, which earlier tests have grown
    monkeypatch.setattr("tachyscope.memory.promise.ram", lambda most=False: 500_000_000)
    wanted = ["--frames", "300", "--device", "cpu", "--ram", "4GB", "--json", "-"]
    assert main(["fit", "toy-chunks", *wanted]) == 0
    out = capsys.readouterr().out
    (row,) = json.loads(out.splitlines()[-1])["rows"]
    assert row["on_cpu"] and row["peak_bytes"] == 0 and row["dtype"] == "float32"
    assert "GPU memory" not in out and "4 GB of RAM: fits as it is: " in out
    least = sum(row["cache_bytes"].values()) + row["weights_bytes"] + row["host_bytes"]
    assert 500_000_000 + least < row["ram_bytes"] < 1e9


def test_a_run_tells_what_it_will_take_first(tmp_path, capsys):
    assert main(["generate", "toy-chunks", "--frames", "9", "--out", str(tmp_path)]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    (row,) = json.loads((tmp_path / "generate.json").read_text())["rows"]
    told = row["promised_ram_gb"]
    assert first == f"toy-chunks by fast: predicted peak {told:.2f} GB of RAM" and row["ram_gb"] > 0
    assert row["promised_gb"] == 0


def test_more_than_the_machine_has_is_refused_before_it_is_made(monkeypatch):
    model = toys.load("toy-chunks")
    told = promise(model, "fast", frames=30)
    told.check(model)
    monkeypatch.setattr("tachyscope.memory.promise.memory_of", lambda device: told.kept - 1)
    refused(lambda: told.check(model), "GB of RAM", "--vram and --ram shows what fits")


def test_a_model_that_does_not_tell_is_promised_nothing():
    class Silent(ts.VideoModel):
        pass

    Silent.__abstractmethods__ = frozenset()
    assert promise(Silent(), "fast", frames=30) is None


def test_as_many_sessions_are_told_as_a_server_has_room_for():
    model, plan, gb = load("toy-chunks").on_meta(), "live", 0.1
    document = fit(model, plan, frames=300, vram_gb=gb)
    (row,) = document["rows"]
    taken = need(model, plan, frames=300)
    assert row["session_bytes"] == taken.of_session == taken.of_video + taken.making
    # what the server's own sum leaves once the weights are in memory
    free = ROOM * gb * 1e9 - taken.weights - taken.decoder - taken.beside_sessions
    count = row["recipes"][0]["sessions"]
    assert count > 1 and lines(document)[-1].endswith(f", serves {count} sessions")
    assert 0 <= free - count * taken.of_session < taken.of_session


@pytest.mark.parametrize(
    "line, top, name",
    [
        ("0::/user.slice/app.scope", "", "memory.max"),
        ("4:cpu,memory:/user.slice/app.scope", "memory", "memory.limit_in_bytes"),
    ],
)
def test_the_limit_of_a_group_holds_for_those_within_it(line, top, name, tmp_path, monkeypatch):
    limits = machine._group_limits
    monkeypatch.setattr(machine, "_group_limits", lambda: limits(tmp_path))
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"1:cpu:/other\n{line}\n")
    inner = tmp_path / "sys/fs/cgroup" / top / "user.slice/app.scope"
    inner.mkdir(parents=True)
    cpu = torch.device("cpu")
    whole = machine.memory_of(cpu)
    (inner / name).write_text("2000000\n")
    assert machine.memory_of(cpu) == 2_000_000 < whole
    (inner.parent / name).write_text("1000000\n")
    assert machine.memory_of(cpu) == 1_000_000
    (inner.parent / name).write_text("max\n")
    assert machine.memory_of(cpu) == 2_000_000
