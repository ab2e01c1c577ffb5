"""A stand-in for the former module that pickled states of version 0 import."""

from typing import NoReturn

_LAST_READER = "688c8db"


def __getattr__(name: str) -> NoReturn:
    if name.startswith("__"):
        raise AttributeError(name)
    raise ValueError(
        f"{name} belongs to an optimizer state of version 0, which coat_jax reads up "
        f"to its commit {_LAST_READER}. Convert the state there, with "
        "coat.from_optax_state(coat.to_optax_state(state), tx.init(params)), and save "
        "it again"
    )
