"""The one exception a user is meant to meet. Launchers print its message without a traceback and exit non-zero."""


class ShardlmError(Exception):
    """A problem that the user can solve: the message says what, the values, the requirement and the remedy."""
