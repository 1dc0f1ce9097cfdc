"""One hypothesis profile for the suite: the same examples on every machine, and no deadline on a busy one."""

from hypothesis import settings

settings.register_profile("ci", deadline=None, derandomize=True, max_examples=50, print_blob=True)
settings.load_profile("ci")
