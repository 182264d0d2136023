"""Modules as plain dictionaries of arrays.

A module is split once into its graph definition and a flat dictionary `{"blocks.0.output.kernel": array}`. `jax.jit`,
optimizers, checkpoints, sharding rules and weight conversion see the dictionary. A compiled function binds it to the
definition again. With flat names, a rule over parameters is one regular expression, and checkpoints are readable.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from flax import nnx
from jaxtyping import PRNGKeyArray

Build = Callable[..., nnx.Module]  # makes a module, given rngs=
Params = dict[str, Any]  # of jax.Array, numpy.ndarray or jax.ShapeDtypeStruct


class Network(NamedTuple):
    """A network of a run: how to build it, and what it starts from."""

    build: Build  # builds the module, given dtype= and rngs=
    params: Params | None = None  # its first parameters; None: initialised by `build`
    frozen: bool = False


def definition(build: Build) -> nnx.GraphDef:
    """Return the graph definition of the module that `build` makes. No arrays are allocated."""
    return nnx.split(_abstract(build), nnx.Param)[0]


def shapes(build: Build) -> Params:
    """Return the parameters of the module that `build` makes, as `jax.ShapeDtypeStruct`."""
    return _flat(_abstract(build))


def initial(build: Build, key: PRNGKeyArray) -> Params:
    """Return the initial parameters of the module that `build` makes."""
    return _flat(build(rngs=nnx.Rngs(key)))


def bind(graphdef: nnx.GraphDef, params: Mapping) -> Any:
    """Return the module of `graphdef` with these parameters."""
    paths = {tuple(int(part) if part.isdigit() else part for part in name.split(".")): params[name] for name in params}
    return nnx.merge(graphdef, nnx.from_flat_state(paths))


def subset(params: Mapping, prefix: str) -> Params:
    """Return the entries below `prefix.`, without the prefix."""
    return {name[len(prefix) + 1 :]: value for name, value in params.items() if name.startswith(prefix + ".")}


def prefixed(params: Mapping, prefix: str) -> Params:
    """Return the entries with `prefix.` before each name. The inverse of `subset`."""
    return {f"{prefix}.{name}": value for name, value in params.items()}


def _abstract(build: Build) -> nnx.Module:
    return nnx.eval_shape(lambda: build(rngs=nnx.Rngs(0)))


def _flat(module: nnx.Module) -> Params:
    state = nnx.to_flat_state(nnx.state(module, nnx.Param))
    return {".".join(map(str, path)): variable.get_value() for path, variable in state}
