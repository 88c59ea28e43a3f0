"""The one exception for mistakes that a user can mend: it is printed as one clear line, never as a traceback."""


class UserError(Exception):
    """A user's mistake or a fault of their machine: what is wrong, where, and what would be right.

    The command line prints the message alone and exits with ``exit_code``.
    """

    exit_code = 2


class RunWarning(UserWarning):
    """Something is not as it should be, and the run goes on all the same. The command line prints it as one line."""


class ConfigError(UserError):
    """A configuration names an unknown key, a wrong type or value, or settings that contradict each other."""


class DataError(UserError):
    """Source text, a tokenizer, a manifest or a shard is missing, damaged or does not fit the rest."""


class RunError(UserError):
    """A run folder or a checkpoint is missing, damaged, in use, or belongs to another configuration."""


class TrainingError(UserError):
    """Training cannot go on: the loss is not finite, say. What was saved is safe."""

    exit_code = 1
