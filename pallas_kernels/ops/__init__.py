"""The operations, one folder each: api, reference in jnp, kernel."""
