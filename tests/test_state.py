"""A state that does not fit is refused in one line, and the session goes on unharmed."""

import json

import numpy as np
import pytest
import torch
import toys
from faults import refused
from safetensors.torch import load, save

import tachyscope as ts
from tachyscope.core.session_state import SessionSpec
from tachyscope.models.toys import toy_chunks, toy_tokens

PLANS = {
    "toy-chunks": "cache=merge:budget=8f attention=ann:read=0.5 text=pads replay=attentive:share=0.5",
    "toy-tokens": "cache=merge:budget=5f attention=ann:read=0.8 replay=attentive:share=0.5,drift=true",
}  # fmt: skip
PROMPT = "a red room"
NAN_MEANS_UNSET = ("recent_scores",)
COUNTS = (
    "chunk", "latent_frame", "past", "total_entries", "made", "text_tokens", "latent_frames", "texts",
)  # fmt: skip


def _open(model, **asked):
    return toys.open_session(model, **{"plan": PLANS[model.name], "prompt": PROMPT} | asked)


def _video(model, session, frames=None):
    """Two chunks, or so many frames."""
    frames = frames or 2 * session.shape.chunk
    return np.concatenate(
        [c.frames for c in ts.rollout(model, frames=frames, stream=ts.Stream(model, session))]
    )


def _meta(state):
    return json.loads(bytes(state["meta"].tolist()))


def _with_meta(state, change):
    meta = _meta(state)
    change(meta)
    return state | {"meta": _packed(json.dumps(meta))}


def _packed(text):
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def _forged(state, name, tensor):
    """The state with another tensor, which its list of tensors knows of."""

    def change(meta):
        meta["tensors"][name] = [str(tensor.dtype), list(tensor.shape)]

    return _with_meta(state, change) | {name: tensor}


def _without(state, name):
    return {key: x for key, x in state.items() if key != name}


def _kinds(state):
    """One tensor of every kind: of the layers and the prompt those of the second layer."""
    return [name for name in state if not name.startswith(("layers.0", "layers.2", "texts.0", "texts.2"))
            and name != "meta"]  # fmt: skip


def _broken_tensors(state):
    for name in _kinds(state):
        x, last = state[name], name.rsplit(".", 1)[-1]
        yield f"without {name}", _without(state, name)
        yield f"{name} is a list", state | {name: x.tolist()}
        yield f"{name} is None", state | {name: None}
        yield f"{name} is shorter", state | {name: x[..., :-1].clone()}
        if x.numel() > 1:
            one = x.flatten()[:1].clone()
            yield f"{name} could be broadcast", state | {name: one}
            yield f"{name} is one number spread", state | {name: one.expand(x.shape)}
        yield f"{name} is complex", state | {name: torch.zeros(x.shape, dtype=torch.complex64)}
        yield f"{name} is float16", state | {name: x.to(torch.float16)}
        yield f"{name} has no memory", state | {name: x.to("meta")}
        yield f"{name} is sparse", state | {name: torch.zeros(3, 3).to_sparse()}
        ours = name.startswith(("layers", "texts", "gen", "policy_rng"))
        if ours:
            yield f"{name} is forged shorter", _forged(state, name, x[..., :-1].clone())
            yield f"{name} is forged float16", _forged(state, name, x.to(torch.float16))
        if x.is_floating_point() and last not in NAN_MEANS_UNSET:
            for value in (torch.nan, torch.inf):
                bad = x.clone()
                bad.view(-1)[-1] = value
                yield f"{value} in {name}", state | {name: bad}
            if last in ("k", "v", "pos", "unrotated", "latents", "hidden", "output"):
                yield f"-inf in {name}", state | {name: torch.full_like(x, -torch.inf)}
        elif x.dtype in (torch.int32, torch.int64) and name.startswith("layers"):
            yield f"{name} below", state | {name: torch.full_like(x, -2)}
            if last != "age":
                yield f"{name} beyond", state | {name: torch.full_like(x, 2**20)}


def _broken_meta(state):
    meta = _meta(state)
    text = json.dumps(meta)
    for name, other in {
        "empty": "", "null": "null", "a list": "[]", "a number": "3", "text": '"x"', "cut": text[:-9],
        "deep": "[" * 100_000, "deep object": '{"a":' * 100_000, "a long number": "9" * 5000,
        "NaN": text.replace('"past": ', '"past": NaN, "x": '), "no object": "{}",
    }.items():  # fmt: skip
        yield f"meta is {name}", state | {"meta": _packed(other)}
    yield "meta is garbled", state | {"meta": state["meta"] ^ 0x5A}
    yield "meta is float", state | {"meta": state["meta"].float()}
    yield "meta has two dimensions", state | {"meta": state["meta"][None]}
    yield "meta is huge", state | {"meta": torch.zeros(2**22 + 1, dtype=torch.uint8)}
    yield "without meta", _without(state, "meta")
    for key in meta:
        yield f"meta without {key}", _with_meta(state, lambda m, key=key: m.pop(key))
        nothing = None if key != "latent_frames" else [None]
        yield f"{key} is null", _with_meta(state, lambda m, k=key, x=nothing: m.update({k: x}))
        yield f"{key} is a list", _with_meta(state, lambda m, k=key: m.update({k: [[]]}))
    yield "unknown key", _with_meta(state, lambda m: m.update(more=1))
    values = [("version", x) for x in (0, 1, 3, 5, "4", True, 4.0)]
    values += [(key, x) for key in COUNTS for x in (-1, 10**15, 1.5, "3", True)]
    values += [
        (key, meta[key] + 10**6)
        for key in ("chunk", "latent_frame", "past", "total_entries", "text_tokens")
    ]
    values += [("seeds", [2**64]), ("seeds", [-(2**63) - 1]), ("seeds", ["0"]), ("seeds", 0)]
    values += [("seeds", []), ("seeds", [0, 0]), ("first", 3)]
    values += [("ready", x) for x in ([99], [-1], "x", [True], {"0": 1})]
    values += [("plan", "cache=keep_all"), ("dtype", "torch.float64"), ("lengths", [3])]
    values += [
        ("weights", "0" * 32),
        ("prompt", ""),
        ("noise", "x"),
        ("decoder", "x"),
        ("shape", {}),
        ("shape", 3),
    ]
    values += [("tensors", {}), ("tensors", [])]
    for key, value in values:
        yield f"{key}={value!r}", _with_meta(state, lambda m, k=key, x=value: m.update({k: x}))
    for key in meta["shape"]:
        change = {**meta["shape"], key: 77}
        yield f"shape with another {key}", _with_meta(state, lambda m, x=change: m.update(shape=x))


def _others(model):
    """States of sessions that are not this one."""
    other = {"toy-chunks": toy_chunks, "toy-tokens": toy_tokens}[model.name](seed=1)
    yield "other weights", _open(other).state()
    yield "other prompt", _open(model, prompt="a new room").state()
    yield "other prompt of another length", _open(model, prompt="a room").state()
    yield "other plan", _open(model, plan="dense").state()
    yield "other dtype", _open(ts.load(model.name, dtype="float64")).state()
    kind = next(name for name in PLANS if name != model.name)
    yield "other kind of model", _open(ts.load(kind)).state()
    if model.draws:
        noise = torch.zeros(1, 3, *model.latent_size(model.shape(), 1)[1:2], 8, 12)
        yield "other size", _open(model, size=(32, 64)).state()
        yield "with noise", _open(model, noise=noise).state()
    for wrong in (None, [], "state", {}, {3: torch.zeros(1)}, {"a": 3}):
        yield f"{wrong!r}", wrong


@pytest.mark.slow
@pytest.mark.parametrize("name", ["toy-chunks", "toy-tokens"])
def test_a_damaged_state_is_refused_and_the_session_goes_on_unharmed(name):
    model = ts.load(name)
    session, control = _open(model), _open(model)
    assert np.array_equal(_video(model, session), _video(model, control))
    state = session.state()
    damaged = [*_broken_tensors(state), *_broken_meta(state), *_others(model)]
    names = [name for name, _ in damaged]
    assert len(set(names)) == len(names) > 300
    for what, broken in damaged:
        message = refused(lambda broken=broken: session.restore(broken), "this state")
        assert len(message) < 300, f"{what}: {message}"
        after = session.state()
        assert after.keys() == state.keys(), what
        for key, x in state.items():
            assert torch.equal(x.nan_to_num(), after[key].nan_to_num()), f"{what}: {key}"
    assert np.array_equal(_video(model, session), _video(model, control))
    # and what was not damaged is taken
    session.restore(state)
    control.restore(load(save(state)))
    assert np.array_equal(_video(model, session), _video(model, control))


@pytest.mark.parametrize("name", PLANS)
def test_a_session_that_went_on_comes_back(name):
    model = ts.load(name)
    session = _open(model)
    _video(model, session)
    state = session.state()
    want = _video(model, session)
    session.restore(state)
    assert np.array_equal(_video(model, session), want)
    again = session.state()
    session.restore(again)
    assert all(
        torch.equal(x.nan_to_num(), again[key].nan_to_num()) for key, x in session.state().items()
    )


def test_a_restore_that_runs_out_of_memory_changes_nothing(monkeypatch):
    model = ts.load("toy-chunks")
    session, control = _open(model), _open(model)
    state, made = session.state(), []
    _video(model, session), _video(model, control)
    empty = SessionSpec.empty_layer

    def full(self, slots, *more):
        made.append(slots)
        if len(made) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return empty(self, slots, *more)

    with monkeypatch.context() as patch:
        patch.setattr(SessionSpec, "empty_layer", full)
        with pytest.raises(torch.OutOfMemoryError):
            session.restore(state)
    assert np.array_equal(_video(model, session), _video(model, control))


def test_messages_name_what_differs():
    model = ts.load("toy-chunks")
    session = _open(model)
    state = session.state()
    small = _open(model, size=(32, 64))
    assert refused(lambda: small.restore(state)) == (
        "this state was taken with grid=[4, 6], the session has [2, 4]: open the session with the "
        "same model and size, on the same rank of as many"
    )
    other = _open(model, prompt="a blue room")
    assert refused(lambda: other.restore(state)) == (
        "this state was taken with another prompt: open the session with its newest prompt"
    )
    other = _open(toy_chunks(seed=1))
    assert refused(lambda: other.restore(state)) == (
        "this state was taken with other weights: load the weights that it was taken with"
    )
    refused(lambda: session.restore(state, [{}]), "without a bank", "leave them out")
    banked = "cache=bank:resident=12f attention=ann:read=0.9"
    held = _open(model, plan=banked)
    for segments in (3, [3]):
        refused(lambda x=segments: held.restore(held.state(host=False), x), "as segments: give")


def test_the_prompt_of_a_state_is_the_one_it_was_last_told():
    model = ts.load("toy-chunks")
    session = _open(model)
    list(ts.rollout(model, frames=6, then=[(3, "a blue room")], stream=ts.Stream(model, session)))
    state = session.state()
    refused(lambda: _open(model).restore(state), "another prompt")
    fresh = _open(model, prompt="a blue room")
    fresh.restore(state)
    assert np.array_equal(_video(model, fresh), _video(model, session))


def test_a_fingerprint_tells_weights_apart_and_is_the_same_for_the_same():
    one = ts.load("toy-chunks")
    assert one.fingerprint == ts.load("toy-chunks").fingerprint
    changed = ts.load("toy-chunks")
    name, weight = next(iter(changed.transformer.named_parameters()))
    weight.data.view(-1)[0] += 1
    prints = {m.fingerprint for m in (one, changed, toy_chunks(seed=1), toy_tokens())}
    assert len(prints | {ts.load("toy-chunks", dtype="bfloat16").fingerprint}) == 5
    fused = ts.load("toy-chunks")
    fused.transformer.fuse()
    assert fused.fingerprint == one.fingerprint
