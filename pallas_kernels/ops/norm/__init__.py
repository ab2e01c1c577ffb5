"""RMSNorm and LayerNorm, forward and backward."""
