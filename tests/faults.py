"""What a fault must look like."""

import pytest

from tachyscope.core.errors import TachyscopeError


def refused(call, *words):
    """The error is one line with these words in it; it is returned."""
    with pytest.raises(TachyscopeError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message
    return message
