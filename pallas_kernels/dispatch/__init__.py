"""Operations, and the choice between their kernels and their references in jnp.

An operation names the axes of its arrays (`operations`, `axes`). It runs as a kernel if
the target is a Hopper GPU (`devices`). If arrays are sharded over a mesh, each device
runs the kernel on its own part (`array_types`, `placement`, `parts`, `exchange`). A
kernel is lowered once in a process (`lowering`, `custom_calls`), without reshapes
between kernels (`views`). Programs that are only traced have stand-ins for kernels
(`stand_ins`).
"""
