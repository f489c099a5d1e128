"""As much of Prometheus' query language as the Grafana board uses, over two scrapes of /metrics.

Rates and increases are between the two scrapes, of a new series from 0 on. What is not known here raises.
"""

import math
import re
from collections import defaultdict

from prometheus_client.parser import text_string_to_metric_families

TOKEN = re.compile(r'\s*(\d+\.?\d*|[a-zA-Z_:][\w:]*|"[^"]*"|[-+*/(){}\[\],=])')


def scraped(text):
    """A text of /metrics as {name: {labels: value}}."""
    found = defaultdict(dict)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name][frozenset(sample.labels.items())] = sample.value
    return found


class Query:
    """A query's value: a number, or {labels: number}."""

    def __init__(self, text, before, after, seconds):
        self.tokens = TOKEN.findall(text)
        assert "".join(self.tokens) == re.sub(r"\s", "", text), text
        self.before, self.after, self.seconds = before, after, seconds
        self.value = self._sum()
        assert not self.tokens, f"{text}: {self.tokens} are left"

    def _take(self, wanted=None):
        token = self.tokens.pop(0)
        assert wanted in (None, token), f"{wanted} was expected, got {token}"
        return token

    def _next(self, *any_of):
        return bool(self.tokens) and self.tokens[0] in any_of

    def _sum(self):
        value = self._part()
        while self._next("/"):
            self._take()
            (above,), (below,) = value.values(), self._part().values()
            value = {frozenset(): above / below if below else math.nan}
        return value

    def _part(self):
        token = self._take()
        if token == "sum":
            return self._aggregate()
        if token in ("rate", "increase"):
            self._take("(")
            name, labels = self._take(), self._labels()
            self._take("[")
            span = self._take() + self._take()
            self._take("]")
            self._take(")")
            assert re.fullmatch(r"\d+[mh]", span), span
            new, old = self._select(name, labels, self.after), self.before.get(name, {})
            per = self.seconds if token == "rate" else 1.0
            return {key: (value - old.get(key, 0.0)) / per for key, value in new.items()}
        if token == "histogram_quantile":
            self._take("(")
            share = float(self._take())
            self._take(",")
            buckets = self._sum()
            self._take(")")
            return _quantile(share, buckets)
        return self._select(token, self._labels(), self.after)

    def _aggregate(self):
        by = []
        if self._next("by"):
            self._take()
            self._take("(")
            by = [self._take()]
            self._take(")")
        self._take("(")
        value, summed = self._sum(), defaultdict(float)
        self._take(")")
        for labels, one in value.items():
            kept = dict(labels)
            assert set(by) <= set(kept), f"no label {by} in {kept}"
            summed[frozenset((name, kept[name]) for name in by)] += one
        return dict(summed)

    def _labels(self):
        labels = set()
        while self._next("{", ","):
            self._take()
            name = self._take()
            self._take("=")
            labels.add((name, self._take().strip('"')))
        if self._next("}"):
            self._take()
        return labels

    @staticmethod
    def _select(name, labels, scrape):
        assert name in scrape, f"/metrics has no {name}"
        found = {key: value for key, value in scrape[name].items() if labels <= key}
        assert found, f"{name} has no {labels}"
        return found


def _quantile(share, buckets):
    """Prometheus' rule: linear within the bucket in which the quantile lies."""
    counts = sorted((float(dict(labels)["le"]), value) for labels, value in buckets.items())
    assert math.isinf(counts[-1][0])
    rank, below, start = share * counts[-1][1], 0.0, 0.0
    for end, count in counts:
        if count >= rank:
            break
        below, start = count, end
    if not counts[-1][1]:
        return {frozenset(): math.nan}
    if math.isinf(end):
        return {frozenset(): start}
    return {frozenset(): start + (end - start) * (rank - below) / (count - below)}
