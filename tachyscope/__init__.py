"""Fast autoregressive video generation without retraining."""

from tachyscope.errors import TachyscopeError as TachyscopeError
from tachyscope.models import load as load
from tachyscope.plan import Plan as Plan
from tachyscope.rollout import open_session as open_session
from tachyscope.rollout import refill as refill
from tachyscope.rollout import rollout as rollout
from tachyscope.session import Session as Session

__version__ = "0.1.0"
