"""The operations, one folder each: public functions, reference in jnp, kernel."""
