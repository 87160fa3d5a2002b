"""Errors a user can act on: each message says what was given, what is needed, and what to do."""


class KvMapError(Exception):
    """Base of every error this package raises on purpose. The CLI prints it as one sentence, exit
    status 2.
    """


def reason(error: Exception) -> str:
    """``error`` in words: of one of the system what it says, without its number and path."""
    said = error.strerror if isinstance(error, OSError) else None
    return said or str(error)


class InputError(KvMapError):
    """A value, text or file given by the user cannot be used."""


class FormatError(KvMapError):
    """A moments or kvmap file is truncated, edited, of another version, or not one of ours."""


class MismatchError(KvMapError):
    """Two things that must fit do not: a map and a model, a pool and a layout, a source and a
    target.
    """


class UnprovenError(KvMapError):
    """A map that no evidence proves, or a run whose controls failed, was asked to serve."""


class NumericsError(KvMapError):
    """A fit or a cache contains values no answer can be trusted from (NaN, infinity, singular
    system).
    """


class UnavailableError(KvMapError):
    """A part that this machine does not have was asked for."""
