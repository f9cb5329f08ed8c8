"""Element types that cross a process boundary: their wire codes, sizes and names.

Only the enumeration and facts about it live here (no numpy, no torch), so that client, core and
server agree without importing each other. Codes are part of the wire contract: append, never renumber.
"""

from __future__ import annotations

from enum import IntEnum


class DType(IntEnum):
    """Element type of a tensor, as carried in slot and frame headers (uint8)."""

    F32 = 0
    F16 = 1
    BF16 = 2
    F64 = 3
    I8 = 4
    I16 = 5
    I32 = 6
    I64 = 7
    U8 = 8
    BOOL = 9

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _ITEMSIZE[self]

    @property
    def label(self) -> str:
        """The name users know it by, as torch spells it: ``float32``, ``bfloat16``, ``bool``."""
        return _LABEL[self]

    @property
    def is_float(self) -> bool:
        """Whether values can be non-finite."""
        return self in (DType.F32, DType.F16, DType.BF16, DType.F64)

    @classmethod
    def from_label(cls, label: str) -> DType:
        """The type torch calls ``label`` (``torch.`` prefix allowed); KeyError when not supported."""
        return _BY_LABEL[label.removeprefix("torch.")]


_ITEMSIZE = {
    DType.F32: 4,
    DType.F16: 2,
    DType.BF16: 2,
    DType.F64: 8,
    DType.I8: 1,
    DType.I16: 2,
    DType.I32: 4,
    DType.I64: 8,
    DType.U8: 1,
    DType.BOOL: 1,
}
_LABEL = {
    DType.F32: "float32",
    DType.F16: "float16",
    DType.BF16: "bfloat16",
    DType.F64: "float64",
    DType.I8: "int8",
    DType.I16: "int16",
    DType.I32: "int32",
    DType.I64: "int64",
    DType.U8: "uint8",
    DType.BOOL: "bool",
}
_BY_LABEL = {label: dtype for dtype, label in _LABEL.items()}
