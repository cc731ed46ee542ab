"""The error hierarchy (design decision D17).

Every error of this package is a :class:`UCPError` and also the matching built-in (``ValueError``, ``KeyError``, ``OSError``,
...), so callers may catch either. Every error pickles: DCP sends exceptions between ranks, and an exception that cannot be
pickled would replace the cause by a pickling error. The constructor therefore takes one ready message and nothing else.
"""

from __future__ import annotations

__all__ = [
    "CheckpointExistsError",
    "CheckpointNotFoundError",
    "CorruptCheckpointError",
    "CoverageError",
    "DtypeMismatchError",
    "ForeignSaveError",
    "FormatError",
    "LayoutError",
    "MissingKeysError",
    "PlanError",
    "ReplicaMismatchError",
    "ShapeMismatchError",
    "SpecError",
    "StoreChangedError",
    "StoreError",
    "StoreExistsError",
    "StoreNotFoundError",
    "UCPError",
    "UnsafePickleError",
    "UnsupportedError",
]


class UCPError(Exception):
    """Base of all errors of ``ucp_dcp``. ``str(e)`` names the tensor or file, what was found, what was expected, what to do."""

    def __init__(self, message: str = "") -> None:
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        # KeyError would show repr(message); an error message is for people.
        return self.message


class SpecError(UCPError, ValueError):
    """A layout spec is wrong: file, rule and key are named."""


class LayoutError(UCPError, ValueError):
    """A layout does not fit the tensors it is applied to."""


class PlanError(UCPError, ValueError):
    """A save or load cannot be planned (one name with two contents, wrong kind of value, ...)."""


class CoverageError(PlanError):
    """The fragments of a tensor leave holes or overlap."""


class ReplicaMismatchError(PlanError):
    """Replicas of one tensor or object disagree in shape, dtype or content."""


class ShapeMismatchError(PlanError):
    """A tensor is wanted in a shape other than the stored one."""


class DtypeMismatchError(PlanError, TypeError):
    """A tensor is wanted in a dtype that the stored one must not be cast to."""


class MissingKeysError(UCPError, KeyError):
    """A wanted tensor or object is not in the checkpoint."""


class FormatError(UCPError, ValueError):
    """A file is not of the format it should be, or claims something impossible."""


class CorruptCheckpointError(FormatError):
    """A checkpoint is truncated, inconsistent or damaged."""


class UnsafePickleError(FormatError):
    """A pickle asks for a class or function outside the allow-list; nothing of it was run."""


class UnsupportedError(UCPError, NotImplementedError):
    """A valid input that this version cannot handle; the message says which part."""


class ForeignSaveError(UCPError, RuntimeError):
    """Something else than this package wrote into a checkpoint folder of ours (decision D4)."""


class StoreError(UCPError, OSError):
    """Reading or writing a store failed."""


class StoreNotFoundError(StoreError, FileNotFoundError):
    """A path does not exist in a store."""


class StoreChangedError(StoreError):
    """A file of a store was replaced while it was being read."""


class StoreExistsError(StoreError, FileExistsError):
    """A path exists where it must not."""


class CheckpointNotFoundError(UCPError, FileNotFoundError):
    """There is no checkpoint at this URL."""


class CheckpointExistsError(UCPError, FileExistsError):
    """There is a checkpoint already and overwriting was not allowed."""
