"""Triton's interpreter as the tests need it: it rounds as a GPU does, and prepares its language and types once."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from triton import language
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def prepare_interpreter() -> None:
    _round_as_a_gpu_does()
    _patch_the_language_once()
    _look_types_up_once()
    _describe_shapes_once()
    _compare_types_at_once()
    _make_constants_once()
    _broadcast_only_what_differs()
    _promote_types_once()
    _let_padding_be_nan()
    options = interpreter.interpreter_builder.options
    # Numbers of tests are small: no sum overflows.
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)


def _round_as_a_gpu_does() -> None:
    """Round to e4m3 through torch: the interpreter's own rounding takes halves up and loses carries.

    What is below bf16's smallest normal number is 0 in its float32, too, unless it is told how to convert.
    """
    convert = interpreter._convert_float

    def rounded(numbers: Any, kind: Any, to: Any, mode: Any) -> Any:
        if (kind, to) == (language.bfloat16, language.float32):
            return numbers.view(np.uint16).astype(np.uint32) << 16
        if to != language.float8e4nv or kind != language.float32:
            return convert(numbers, kind, to, mode)
        exact = torch.from_numpy(numbers.view(np.float32)).to(torch.float8_e4m3fn)
        return exact.view(torch.uint8).numpy()

    interpreter._convert_float = rounded


def _patch_the_language_once() -> None:
    """Leave the language as the first kernel of a module has it patched.

    The interpreter looks through all of `triton.language` at every launch and at every call of a device function,
    which takes longer than the function.
    """
    patch = interpreter._patch_lang
    modules: set[str] = set()

    def patched(function: Any) -> Any:
        if function.__module__ not in modules:
            modules.add(function.__module__)
            patch(function)
        return SimpleNamespace(restore=lambda: None)

    def patched_member(package: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        call = getattr(
            member, "__wrapped__", member
        )  # its wrapper looks for the semantics that are given here

        def new_member(*args: Any, **options: Any) -> Any:
            options["_semantic"] = interpreter.interpreter_semantic
            return call(*args, **options)

        scope.set_attr(package, name, new_member)

    interpreter._patch_lang = patched
    interpreter._patch_attr = patched_member


def _look_types_up_once() -> None:
    """Keep NumPy's types by name: the interpreter makes a table of all types whenever it needs one."""
    find = interpreter._get_np_dtype
    found: dict[str, Any] = {}

    def known(kind: Any) -> Any:
        if kind.name not in found:
            found[kind.name] = find(kind)
        return found[kind.name]

    interpreter._get_np_dtype = known


def _describe_shapes_once() -> None:
    """Share what a shape says among all types and tensors that have it: every operation makes some."""
    describe = core.block_type.__init__
    names: dict[tuple[str, tuple[int, ...]], str] = {}
    shapes: dict[tuple[int, ...], tuple[Any, ...]] = {}
    blocks: dict[tuple[Any, str], Any] = {}
    of_scalars = core.tuple([]), core.constexpr(1)

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([size.value if type(size) is core.constexpr else size for size in shape])
        if (element_ty.name, sizes) not in names:
            describe(self, element_ty, shape)
            names[element_ty.name, sizes] = self.name
            of_tensors = core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(self.numel)
            shapes.setdefault(sizes, (self.shape, self.numel, of_tensors))
        self.element_ty, self.name = element_ty, names[element_ty.name, sizes]
        self.shape, self.numel, self.of_tensors = shapes[sizes]

    def tensor(self: Any, handle: Any, type: Any) -> None:  # noqa: A002 - as Triton calls it
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.of_tensors if type.is_block() else of_scalars

    def block_of(self: Any, scalar_type: Any) -> Any:
        key = self.shape, scalar_type.name
        if key not in blocks:
            blocks[key] = core.block_type(scalar_type, self.shape)
        return blocks[key]

    core.block_type.__init__ = block_type
    core.block_type.with_element_ty = block_of
    core.block_type.to_ir = lambda self, builder: self  # the interpreter's builder would make its equal
    core.tensor.__init__ = tensor


def _compare_types_at_once() -> None:
    """Compare a type with itself, and take tensors and types as they are, before all else that they could be."""
    equals, unwrap = core.dtype.__eq__, core._unwrap_if_constexpr
    as_it_is = {core.tensor, core.dtype, core.pointer_type, core.block_type, int, float, bool}

    core.dtype.__eq__ = lambda self, other: self is other or equals(self, other)
    core._unwrap_if_constexpr = lambda value: value if type(value) in as_it_is else unwrap(value)
    interpreter.TensorHandle.__post_init__ = lambda self: None  # it checks what the interpreter has just made


def _make_constants_once() -> None:
    """Keep integers as tensors: nothing changes a tensor. (Zeros of floats are equal and differ in their sign.)"""
    make = TritonSemantic.scalar_constant
    known: dict[tuple[int, str], Any] = {}

    def constant(self: Any, value: Any, dtype: Any) -> Any:
        if type(value) is not int:
            return make(self, value, dtype)
        key = value, dtype.name
        if key not in known:
            known[key] = make(self, value, dtype)
        return known[key]

    TritonSemantic.scalar_constant = constant


def _broadcast_only_what_differs() -> None:
    broadcast = TritonSemantic.broadcast_impl_value

    def broadcast_what_differs(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.shape is rhs.shape:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    TritonSemantic.broadcast_impl_value = broadcast_what_differs


def _promote_types_once() -> None:
    """Keep the type that an operation on two types is computed in."""
    promote = TritonSemantic.computation_type_impl
    known: dict[Any, Any] = {}

    def promoted(self: Any, one: Any, one_is_scalar: bool, other: Any, *rest: bool) -> Any:
        key = one.name, one_is_scalar, other.name, *rest
        if key not in known:
            known[key] = promote(self, one, one_is_scalar, other, *rest)
        return known[key]

    TritonSemantic.computation_type_impl = promoted


def _let_padding_be_nan() -> None:
    """Return some place of rows that hold NaN alone, as a GPU does: padding rows have what was in memory before."""
    reduce = interpreter.ReduceOps.min_max
    places = {np.nanargmax: (np.argmax, -np.inf), np.nanargmin: (np.argmin, np.inf)}

    def reduced(self: Any, tensor: Any, val_reduce_op: Any, idx_reduce_op: Any = None) -> Any:
        def place(numbers: Any, **how: Any) -> Any:
            find, last = places[idx_reduce_op]
            is_nan = np.isnan(numbers) if np.issubdtype(numbers.dtype, np.floating) else False
            return find(np.where(is_nan, last, numbers) if np.any(is_nan) else numbers, **how)

        return reduce(self, tensor, val_reduce_op, idx_reduce_op and place)

    interpreter.ReduceOps.min_max = reduced
