"""No deadlines for property tests: machines that are shared make time a poor witness."""

from hypothesis import settings

settings.register_profile("data", deadline=None)
settings.load_profile("data")
