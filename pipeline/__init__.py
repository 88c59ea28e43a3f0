"""Backfeed: pretraining transformers that feed their own state back into the next token."""

__version__ = "0.1.0"
