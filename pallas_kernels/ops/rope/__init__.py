"""RoPE of attention heads, and the gradient of the columns that become heads."""
