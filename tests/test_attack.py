"""Nearly right inputs of eight unfriendly clients, beside which an honest session plays exactly."""

import pytest
from attack import attack


@pytest.mark.slow
def test_no_input_ends_others_sessions_or_writes_a_traceback():
    found = attack(range(100), seed=0)
    assert found["findings"] == []
    assert found["count"] == 100 and len(found["kinds"]) == 7 and found["opened"] > 10
