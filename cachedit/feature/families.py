"""Which block lists of a model form its stack, and how its blocks take and return their streams.

Almost everything is read off the model: the lists have well-known names, the first parameter of a block is its main
stream, and the names in its return statement give the order. A row below says only what structure does not tell.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from cachedit.errors import UnsupportedModelError

STACK_NAMES = (
    "blocks",
    "transformer_blocks",
    "joint_transformer_blocks",
    "double_stream_blocks",
    "double_blocks",
    "single_transformer_blocks",
    "single_stream_blocks",
    "single_blocks",
    "layers",
    "visual_transformer_blocks",
    "temporal_transformer_blocks",
)
"""Names that the field gives to the block lists of a stack. Refiners, text and control lists are not in it."""


@dataclass(frozen=True)
class Family:
    """What a model's structure does not tell.

    Attributes:
        ascending: the model is called with 1 - sigma, so its timestep rises along a run.
        returns: list name -> names of what its blocks return, where the return statement does not say.
        sealed: what the model adds between blocks is computed from the blocks' own output, so it must be cached with
            the residual instead of being taken fresh.
        in_place: the model adds control inputs into the tensor that a block returned.
        interleaved: the model runs one block of each of its lists in turn.
        long_skips: the first half of the blocks hand their output to the second half, the last to the first.
        refused: why the family cannot be cached yet.
    """

    ascending: bool = False
    returns: tuple[tuple[str, tuple[str, ...]], ...] = ()
    sealed: bool = False
    in_place: bool = False
    interleaved: bool = False
    long_skips: bool = False
    refused: str = ""


_PACKED = "its blocks take packed arguments, so their main stream cannot be told"
FAMILIES: dict[str, Family] = {
    "Lumina2Transformer2DModel": Family(ascending=True),
    "LuminaNextDiT2DModel": Family(ascending=True),
    "ZImageTransformer2DModel": Family(ascending=True),
    "Ideogram4Transformer2DModel": Family(ascending=True),
    "OmniGenTransformer2DModel": Family(ascending=True),
    "MochiTransformer3DModel": Family(ascending=True),
    "HunyuanDiT2DModel": Family(long_skips=True),
    "LatteTransformer3DModel": Family(interleaved=True),
    "ChromaTransformer2DModel": Family(in_place=True),
    "ConsisIDTransformer3DModel": Family(sealed=True),
    "WanAnimateTransformer3DModel": Family(sealed=True),
    "HiDreamImageTransformer2DModel": Family(
        returns=(
            ("double_stream_blocks", ("hidden_states", "encoder_hidden_states")),
            ("single_stream_blocks", ("hidden_states",)),
        )
    ),
    "Cosmos3OmniTransformer": Family(refused="its two token streams are unbatched and returned as expressions"),
    "Kandinsky6Transformer3DModel": Family(refused=_PACKED),
    "SanaWMTransformer3DModel": Family(refused=_PACKED),
}


@dataclass(frozen=True)
class Stream:
    """One token stream that a block list carries and the cache replaces.

    Attributes:
        name: parameter of the block's forward.
        position: its place among the positional arguments.
        index: its place in the returned tuple; None if the block returns the bare tensor.
    """

    name: str
    position: int
    index: int | None


@dataclass(frozen=True)
class Layout:
    """How the blocks of one list take and return their streams.

    Attributes:
        streams: the streams that are cached; the first is the main one.
        texts: further streams, which only blocks read.
        returns: for blocks that return a tuple, (parameter name, position) of every element; None for a bare tensor.
    """

    streams: tuple[Stream, ...]
    texts: tuple[Stream, ...]
    returns: tuple[tuple[str, int], ...] | None


def family(denoiser: nn.Module) -> Family:
    """The row of the model's class, or an empty one.

    Raises:
        UnsupportedModelError: the class is known not to be cacheable.
    """
    row = FAMILIES.get(type(denoiser).__name__, Family())
    if row.refused:
        raise UnsupportedModelError(f"{type(denoiser).__name__} cannot be cached: {row.refused}.")
    return row


def is_unet(denoiser: nn.Module) -> bool:
    """True if the blocks are joined by skip connections between a way down and a way up."""
    return hasattr(denoiser, "down_blocks") and hasattr(denoiser, "up_blocks")


def block_lists(denoiser: nn.Module, blocks: Sequence[str] | None = None) -> tuple[str, ...]:
    """Names of the lists that hold the blocks of a transformer or of a UNet."""
    if is_unet(denoiser) and blocks is None:
        return ("down_blocks", "up_blocks")
    return find_stack(denoiser, blocks)


def find_stack(denoiser: nn.Module, blocks: Sequence[str] | None = None) -> tuple[str, ...]:
    """Names of the block lists of the stack, in execution order.

    Args:
        denoiser: the model.
        blocks: the lists, if the caller knows them.

    Raises:
        UnsupportedModelError: no list is found, or a named one is not a list of blocks.
    """
    lists = {name: child for name, child in denoiser.named_modules() if isinstance(child, nn.ModuleList) and len(child)}
    if blocks is not None:
        wrong = [name for name in blocks if name not in lists]
        if wrong or not blocks:
            raise UnsupportedModelError(
                f"blocks={list(blocks)!r}: {wrong or 'nothing'} is not a non-empty ModuleList of "
                f"{type(denoiser).__name__}. Its lists: {', '.join(lists) or 'none'}."
            )
        return tuple(blocks)
    found = tuple(name for name in lists if name in STACK_NAMES)
    if found:
        return found
    direct = [name for name in lists if "." not in name]
    raise UnsupportedModelError(
        f"no block list of {type(denoiser).__name__} has a known name ({', '.join(STACK_NAMES)}). "
        f"Its lists: {', '.join(direct) or 'none'}. Name them in execution order: wrap(..., blocks=[...])."
    )


def read_layout(denoiser: nn.Module, name: str) -> Layout:
    """Read how the blocks of the list ``name`` take and return their streams.

    Raises:
        UnsupportedModelError: it cannot be told.
    """
    block = denoiser.get_submodule(name)[0]  # type: ignore[index]
    forward = inspect.unwrap(type(block).forward)
    parameters = [p.name for p in inspect.signature(forward).parameters.values() if p.kind is not p.VAR_KEYWORD][1:]
    row = dict(family(denoiser).returns).get(name)
    returned = row if row is not None else _returned_names(forward)
    if parameters and returned is not None and len(returned) == 1:
        return Layout((Stream(parameters[0], 0, None),), (), None)
    if not parameters or returned is None or not set(returned) <= set(parameters):
        raise UnsupportedModelError(
            f"{type(block).__name__} ({name} of {type(denoiser).__name__}): cannot tell how it takes and returns its "
            f"hidden states (parameters {parameters}, returns {returned}). Allowed: the hidden states come first, and "
            "a tuple is returned as the parameters' own names."
        )
    places = tuple((parameter, parameters.index(parameter)) for parameter in returned)
    streams = [Stream(parameter, place, i) for i, (parameter, place) in enumerate(places)]
    cached = [stream for stream in streams if not _is_text(stream.name)]
    texts = tuple([stream for stream in streams if _is_text(stream.name)])
    return Layout(tuple(sorted(cached, key=lambda stream: stream.position)), texts, places)


def _is_text(name: str) -> bool:
    """Text streams are read by the blocks only, so a reused step passes them through."""
    return name.startswith("encoder") or "text" in name or "context" in name


@functools.lru_cache
def _returned_names(forward: object) -> tuple[str, ...] | None:
    """Names in the return statement: one entry for a bare tensor, several for a tuple, None if it does not tell.

    A block that returns a bare tensor in one case and a tuple in another (Flux2, Cosmos) does the former in the stack.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))  # type: ignore[arg-type]
    except (OSError, TypeError, SyntaxError):
        return None
    values = [node.value for node in ast.walk(tree) if isinstance(node, ast.Return) and node.value is not None]
    tuples = [value for value in values if isinstance(value, ast.Tuple)]
    if len(values) > len(tuples):
        return ("tensor",)
    if not tuples or not all(isinstance(element, ast.Name) for element in tuples[-1].elts):
        return None
    return tuple(element.id for element in tuples[-1].elts if isinstance(element, ast.Name))
