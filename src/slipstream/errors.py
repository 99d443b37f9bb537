"""Errors a user can act on. Each message is one line: what was wrong, where, and what to do next."""

from __future__ import annotations


class SlipstreamError(Exception):
    """Base of every error this package raises on purpose; the CLI prints it and exits with code 2."""


class CheckpointError(SlipstreamError):
    """A model file is missing, damaged or of a kind that cannot be loaded."""


class RequestError(SlipstreamError, ValueError):
    """A request asks for something that makes no sense or does not fit the model."""


class BackendError(SlipstreamError):
    """No backend can run this model on this machine."""
