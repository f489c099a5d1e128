"""The command `tachyscope-lab`: every verb has help, runs, and tells a fault in one line."""

import json

import pytest

import tachyscope as ts
from tachyscope.cli.verb import options_of
from tachyscope.core.plan import NAMES
from tachyscope_lab.cli.app import BENCH, VERBS, main

ALL = {**VERBS, **{f"bench {name}": verb for name, verb in BENCH.items()}}
# a short run of every verb that has one; the others' runs stand in tests of their own
QUICK = {
    "tables": ["tables", "--check"],
    "bench wan": [*["bench", "wan", "--model", "toy-chunks", "--device", "cpu", "--dtype", "float32", "--size", "64x96"],
                  *["--rows", "window21", "--lengths", "6", "--rounds", "2"]],
    "eval": ["eval", "atrium", "--only", "views", "--worlds", "2"],
}  # fmt: skip


@pytest.mark.parametrize("verb", ALL)
def test_every_option_has_help(verb, capsys):
    assert main([*verb.split(), "--help"]) == 0
    shown = capsys.readouterr().out
    for one in options_of(ALL[verb]):
        assert (one.name.upper() if one.positional else one.flag) in shown
        assert one.help and one.help.split()[0] in shown


@pytest.mark.parametrize(
    "verb",
    [pytest.param(verb, marks=[pytest.mark.slow] if verb == "eval" else []) for verb in QUICK],
)
def test_a_verb_runs(verb):
    assert main(QUICK[verb]) == 0


@pytest.mark.parametrize(
    "words, message",
    [
        (["conjure"], "has no verb 'conjure'; there are: eval, calibrate, tables,"),
        (["bench", "fit"], "has no verb 'fit'; there are: wan, tokens,"),
        (["eval", "moon"], "eval takes atrium"),
        (["eval", "atrium", "--only", "moon"], "no --only 'moon'; there are: both, world, tokens,"),
        (["eval", "atrium", "--worlds", "0"], "--worlds must be from 1 to 10,000, got 0"),
        (["eval", "atrium", "--plan", "magic"], f"no plan 'magic'; there are: {', '.join(NAMES)}"),
    ],
)
def test_a_fault_is_one_line(words, message, capsys):
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said.startswith("tachyscope: ") and said.count("\n") == 1 and message in said


def test_eval_has_both_models_in_one_document(monkeypatch, tmp_path, capsys):
    from tachyscope_lab.evaluation import atrium

    def document(suite):
        return {"schema": 1, "suite": suite, "rows": [{"suite": suite}], "given": "", "walk": ""}

    asked = []

    def world(plans, **options):
        asked.append((plans, options))
        options["watch"](1)
        return document("atrium") | {"world": {"revisit_db": 1.0}}

    def tokens(**options):
        asked.append(options)
        return document("atrium-tokens") | {"tokens": {"kl_random": 2.0}, "clips": {}}

    monkeypatch.setattr(atrium.world_rows, "evaluate_world", world)
    monkeypatch.setattr(atrium.tokens, "evaluate_tokens", tokens)
    words = ["eval", "atrium", "--quick", "--seed", "3", "--plan", "dense", "--plan", "fast"]
    assert main([*words, "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["world"] == {"revisit_db": 1.0} and found["tokens"] == {"kl_random": 2.0}
    assert found["rows"] == [{"suite": "atrium"}]
    assert found["token_rows"] == [{"suite": "atrium-tokens"}]
    plans, options = asked[0]
    assert tuple(plans) == ("dense", "fast")
    for given in (options, asked[1]):
        assert (given["seed"], given["quick"], given["worlds"]) == (3, True, 4)
    assert options["command"].startswith("tachyscope-lab eval atrium --quick")


@pytest.mark.slow
def test_calibrate_writes_a_file_that_a_plan_can_name(tmp_path, capsys):
    out = tmp_path / "toy.safetensors"
    words = ["calibrate", "toy-tokens", "--clips", "1", "--share", "0.5", "--out", str(out)]
    assert main(words) == 0
    assert "80 of 160" in capsys.readouterr().out
    with ts.open(ts.load("toy-tokens"), f"replay=prune:file={out},share=0.5") as stream:
        assert stream.step().stats["rows_replayed"] > 0
    assert main([*words[:-1], "toy.txt"]) == 2
    assert "--out is a .safetensors file" in capsys.readouterr().err
    assert main([*words, "--clips", "0"]) == 2
