"""Gradients of attention heads: undoes RoPE and joins the heads."""
