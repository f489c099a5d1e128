"""How keys and a mouse become the one action that a model takes for a chunk."""

from __future__ import annotations

from dataclasses import dataclass, field

from tachyscope.core.errors import TachyscopeError
from tachyscope.models.base import VideoModel

STILL = 4  # pixels that a mouse may move and turn nothing
MOUSE = ("jlik", "qe")  # letters that look left, right, up and down, of worlds and of Atrium


@dataclass(frozen=True)
class KeyMap:
    """A model's actions: some stand for two keys that are down together."""

    actions: str = ""
    chords: dict[str, str] = field(default_factory=dict)  # an action by its two keys

    @classmethod
    def of(cls, model: VideoModel) -> KeyMap:
        return cls(model.actions, {keys: action for action, keys in model.chords.items()})

    @property
    def looks(self) -> str:
        """Letters that look left, right, and up and down where there are such."""
        return next((one for one in MOUSE if set(one) <= set(self.actions)), "")

    def action(self, keys: str) -> str:
        """The action of the keys that are down; raises where the model has none."""
        if not self.actions and keys:
            raise TachyscopeError("this model takes no actions: leave them empty")
        if len(keys) <= 1 and set(keys) <= set(self.actions):
            return keys
        if found := self.chords.get(keys) or self.chords.get(keys[::-1]):
            return found
        both = "".join(f", {one}" for one in self.chords)
        raise TachyscopeError(
            f"an action is one of {' '.join(self.actions)}{both}, or empty, got {keys!r}"
        )

    def turned(self, action: str, dx: int, dy: int) -> str:
        """An action while the mouse moves: both where the model has both, else the look."""
        looks = self.looks
        look = ""
        if looks and max(abs(dx), abs(dy)) > STILL:
            if abs(dx) >= abs(dy):
                look = looks[dx > 0]
            elif len(looks) > 2:
                look = looks[2 + (dy > 0)]
        if not look:
            return action
        return self.chords.get(action + look) or self.chords.get(look + action) or look
