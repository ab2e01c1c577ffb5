"""What the kernels compute, in jnp: their meaning, and what runs in their place."""
