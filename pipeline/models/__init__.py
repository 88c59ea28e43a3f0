"""Architectures: what is fed back, and where it enters. One file an architecture, all under one contract."""

from pipeline.models.base import ARCHITECTURES, Architecture, ArchitectureConfig, build
from pipeline.models.crt import CRT
from pipeline.models.fbt import FBT
from pipeline.models.feedback import Feedback
from pipeline.models.lrt import LRT
from pipeline.models.rlt import RLT
from pipeline.models.transformer import Transformer

__all__ = [
    "ARCHITECTURES",
    "CRT",
    "FBT",
    "LRT",
    "RLT",
    "Architecture",
    "ArchitectureConfig",
    "Feedback",
    "Transformer",
    "build",
]
