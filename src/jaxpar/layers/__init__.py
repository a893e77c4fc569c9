"""Layers as functions of local blocks: data, FSDP, tensor and context parallelism."""

from jaxpar.layers._fsdp import fsdp_gather, fsdp_linear
from jaxpar.layers._fsdp_scan import fsdp_scan

__all__ = ["fsdp_gather", "fsdp_linear", "fsdp_scan"]
