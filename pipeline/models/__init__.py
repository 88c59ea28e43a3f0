"""Architectures: what is fed back, and where it enters. One file an architecture, all under one contract."""

from pipeline.models.base import ARCHITECTURES, Architecture, ArchitectureConfig, build
from pipeline.models.rlt import RLT
from pipeline.models.transformer import Transformer

__all__ = ["ARCHITECTURES", "RLT", "Architecture", "ArchitectureConfig", "Transformer", "build"]
