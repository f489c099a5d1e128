"""Drafts for `generate` of transformers: several tokens a pass, the same as without drafts.

A video token's draft is the last frame's token at the same position, or the token that an earlier
pass drew there behind a wrong draft (Jacobi decoding). One pass over the drafts computes what plain
generation would draw at each position; drafts are accepted up to the first that differs. Sampled
tokens are the same too: torch.multinomial takes the argmax of probability over noise, and a
position's noise does not depend on its logits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tachyscope.core.errors import TachyscopeError, shown
from tachyscope.core.limits import ASKED, within
from tachyscope.integrations.versions import too_old
from tachyscope.passes.draft import Draft

CFG = "UnbatchedClassifierFreeGuidanceLogitsProcessor"
PLACES = Draft().places


def drafts(tokens_per_frame: int, places: int = PLACES) -> Drafts:
    """A decoding method for `generate` of transformers, for language models that emit video tokens.

        model.generate(ids, custom_generate=ts.drafts(tokens_per_frame=256), max_new_tokens=4096)

    The tokens are those of `generate` without it, greedy or sampled, with guidance and in batches.
    places: drafts of one pass; 0 drafts nothing. What is returned counts `passes` and `tokens`.
    """
    return Drafts(tokens_per_frame, places)


class Drafts:
    def __init__(self, tokens_per_frame: int, places: int = PLACES) -> None:
        bound = ASKED["tokens of a pass"]
        if not within(bound, tokens_per_frame):
            raise TachyscopeError(
                f"`tokens_per_frame` must be a whole number {bound}, got "
                f"{shown(tokens_per_frame)}: give the tokens of a video frame"
            )
        self.tokens_per_frame, self.places = tokens_per_frame, Draft(places=places).places
        self.passes = self.tokens = 0

    def __repr__(self) -> str:
        return f"drafts({self.tokens_per_frame}, {self.places}): {self.tokens} in {self.passes}"

    @torch.no_grad()
    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Any:
        _check(model, generation_config, model_kwargs)
        host = _Host(model, model_kwargs, input_ids)
        guided = [
            _Guided(one)
            for one in logits_processor
            if type(one).__name__ == CFG and one.guidance_scale != 1
        ]
        noise = _Noise(input_ids.shape[1]) if generation_config.do_sample else None
        ends = any(hasattr(one, "eos_token_id") for one in stopping_criteria)
        ids, unfinished = input_ids, torch.ones_like(input_ids[:, 0])
        kept: dict[str, list[Tensor]] = {"scores": [], "logits": []}
        drafted = input_ids[:, :0]
        logits = host.prefill(input_ids)
        self.passes += 1
        while True:
            at, right = ids.shape[1], 0
            for place in range(drafted.shape[1] + 1):
                for one in guided:
                    one.place(place)
                raw = logits[:, place].to(copy=True, dtype=torch.float32, device=ids.device)
                scores = logits_processor(ids, raw)
                token = _pick(scores, noise, ids.shape[1])
                if ends:
                    pad = generation_config._pad_token_tensor.to(ids.device)
                    token = torch.where(unfinished.bool(), token, pad)
                ids = torch.cat([ids, token[:, None]], 1)
                kept["scores"].append(scores)
                kept["logits"].append(raw)
                right = place
                unfinished = unfinished & ~stopping_criteria(ids, None)
                if not unfinished.any():
                    break
                if place < drafted.shape[1] and not _same(token, drafted[:, place], unfinished):
                    break
            if noise is not None:
                noise.forget(ids.shape[1])
            self.tokens += right + 1
            host.keep(right + 1)
            for one in guided:
                one.keep(right, drafted.shape[1])
            if not unfinished.any():
                break
            # what the pass drew behind the first wrong draft
            rest = range(right + 1, drafted.shape[1] + 1)
            guess = ids[:, :0]
            if len(rest):
                later = [_pick(logits[:, i].float(), noise, at + i) for i in rest]
                guess = torch.stack(later, 1).to(ids)
            drafted = self._drafts(ids, guess, stopping_criteria.max_length)
            logits = host.feed(ids, drafted)
            for one in guided:
                one.feed(ids, drafted)
            self.passes += 1
        for one in guided:
            one.release()
        if noise is not None:
            noise.give_back()
        return _output(generation_config, ids, host.cache, kept)

    def _drafts(self, ids: Tensor, guess: Tensor, most: int | None) -> Tensor:
        """Drafts [B, n] of the tokens behind ids: guesses, then the last frame's."""
        length = ids.shape[1]
        count = self.places if most is None else min(self.places, most - length - 1)
        start = length - self.tokens_per_frame
        last = ids[:, start : start + count] if start >= 0 else ids[:, :0]
        return torch.cat([guess, last[:, guess.shape[1] :]], 1)[:, : max(count, 0)]


class _Host:
    """The model as its own `generate` drives it."""

    def __init__(self, model: Any, kwargs: dict[str, Any], ids: Tensor) -> None:
        self.model, self.kwargs = model, kwargs
        self.outputs: Any = None
        self.fed = 0  # drafts of the last pass

    @property
    def cache(self) -> Any:
        return self.kwargs["past_key_values"]

    def prefill(self, ids: Tensor) -> Tensor:
        given = self.kwargs.get("past_key_values")
        known = given.get_seq_length() if given is not None else 0
        more = ids.shape[1] - known if known else None
        logits = self._run(ids, more, self.kwargs, is_first_iteration=True)[:, -1:]
        if not self.cache.is_croppable:
            raise TachyscopeError(
                "drafts take back entries of the cache, and this model's cache has layers that "
                "cannot (a recurrent state): leave custom_generate out"
            )
        self.cache.activate_past_recording()
        return logits

    def feed(self, ids: Tensor, drafts: Tensor) -> Tensor:
        """Logits [B, n + 1, V] behind the last token and behind each of n drafts."""
        self.fed = drafts.shape[1]
        kwargs = dict(self.kwargs)
        if self.fed:
            kwargs = self._updated(kwargs, self.fed)
        if "logits_to_keep" in kwargs:
            kwargs["logits_to_keep"] = self.fed + 1
        return self._run(torch.cat([ids, drafts], 1), self.fed + 1, kwargs)[:, -self.fed - 1 :]

    def keep(self, tokens: int) -> None:
        """Accept this many tokens of the last pass, and crop the cache behind them."""
        self.kwargs = self._updated(self.kwargs, tokens)
        self.cache.crop(-(self.fed + 1 - tokens))

    def _run(self, ids: Tensor, more: int | None, kwargs: dict[str, Any], **options: Any) -> Tensor:
        inputs = self.model.prepare_inputs_for_generation(
            ids, next_sequence_length=more, **options, **kwargs
        )
        self.outputs = self.model(**inputs, return_dict=True)
        self.kwargs["past_key_values"] = self.outputs.past_key_values
        logits: Tensor = self.outputs.logits
        return logits

    def _updated(self, kwargs: dict[str, Any], tokens: int) -> dict[str, Any]:
        updated: dict[str, Any] = self.model._update_model_kwargs_for_generation(
            self.outputs, kwargs, num_new_tokens=tokens
        )
        return updated


class _Guided:
    """A guidance processor's second pass, over the drafts as the first one is."""

    def __init__(self, processor: Any) -> None:
        self.processor, self.context = processor, processor.unconditional_context
        self.logits: Tensor | None = None

    def place(self, place: int) -> None:
        if self.logits is not None:
            here = self.logits[:, place : place + 1]
            self.processor.get_unconditional_logits = lambda _: here

    def feed(self, ids: Tensor, drafts: Tensor) -> None:
        context = self.context
        if not context["use_cache"]:
            return  # the processor runs all tokens for each new one, as without drafts
        fed = torch.cat([ids[:, -1:], drafts], 1)
        mask = torch.cat([context["attention_mask"], torch.ones_like(fed)], 1)
        out = self.processor.model(
            fed, attention_mask=mask, use_cache=True, past_key_values=context["past_key_values"]
        )
        self.logits, context["past_key_values"] = out.logits, out.past_key_values
        context["attention_mask"], context["input_ids"] = mask, fed[:, -1:]

    def keep(self, right: int, drafted: int) -> None:
        """Keep the first `right` of the drafts, and crop the cache behind them."""
        if self.logits is not None:
            wrong = drafted - right
            self.context["past_key_values"].crop(-wrong)
            mask = self.context["attention_mask"]
            self.context["attention_mask"] = mask[:, : mask.shape[1] - wrong]
        elif self.context["past_key_values"] is not None:
            self.context["past_key_values"].activate_past_recording()

    def release(self) -> None:
        vars(self.processor).pop("get_unconditional_logits", None)


class _Noise:
    """The noise that torch.multinomial divides probabilities by, kept by position."""

    def __init__(self, length: int) -> None:
        self.first = length  # position of the first that is kept
        self.drawn: list[tuple[Tensor, Tensor]] = []  # the generator before, and the noise

    def at(self, position: int, probabilities: Tensor) -> Tensor:
        self.device = probabilities.device
        while len(self.drawn) <= position - self.first:
            state = self._generator.get_state()
            self.drawn.append((state, torch.empty_like(probabilities).exponential_(1)))
        return self.drawn[position - self.first][1]

    def forget(self, length: int) -> None:
        """Drop the noise of positions before `length`, whose tokens are final."""
        self.drawn[: length - self.first] = []
        self.first = length

    @property
    def _generator(self) -> torch.Generator:
        if self.device.type == "cuda":
            torch.cuda.init()
            return torch.cuda.default_generators[self.device.index or 0]
        return torch.default_generator

    def give_back(self) -> None:
        """Rewind the generator past the noise drawn ahead, to where plain generation leaves it."""
        if self.drawn:
            self._generator.set_state(self.drawn[0][0])


def _pick(scores: Tensor, noise: _Noise | None, position: int) -> Tensor:
    if noise is None:
        return scores.argmax(-1)
    probabilities = torch.softmax(scores, dim=-1)
    return (probabilities / noise.at(position, probabilities)).argmax(-1)


def _same(token: Tensor, draft: Tensor, unfinished: Tensor) -> bool:
    return bool(((token == draft) | ~unfinished.bool()).all())


def _check(model: Any, config: Any, kwargs: dict[str, Any]) -> None:
    if old := too_old("transformers"):
        raise TachyscopeError(old)
    cache = kwargs.get("past_key_values")
    faults = {
        "beam search": (config.num_beams or 1) > 1,
        "an encoder beside the decoder": model.config.is_encoder_decoder,
        "use_cache=False": not kwargs.get("use_cache", True),
        "a static cache": cache is not None and cache.is_compileable,
        "output_attentions or output_hidden_states": config.output_attentions
        or config.output_hidden_states,
    }
    for what, there in faults.items():
        if there:
            raise TachyscopeError(f"drafts do not go with {what}: leave it or custom_generate out")


def _output(config: Any, ids: Tensor, cache: Any, kept: dict[str, list[Tensor]]) -> Any:
    if not config.return_dict_in_generate:
        return ids
    import transformers.generation as theirs

    output: Any = theirs
    return output.GenerateDecoderOnlyOutput(
        sequences=ids,
        scores=tuple(kept["scores"]) if config.output_scores else None,
        logits=tuple(kept["logits"]) if config.output_logits else None,
        past_key_values=cache,
    )
