"""What a checkpoint holds: its keys and texts, what is refused of one, residuals cut for other blocks.

What may live here: tests of `gcclient/saved.py`. What may not: the daemon's part (`test_checkpoint.py`).
"""

from __future__ import annotations

import io
import json
import weakref
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from gcclient import saved
from gcclient.errors import StateMismatch
from gcclient.saved import F32, Piece, Saved, SavedBlock, SavedDomain
from gcproto.agreed import Resumed, Rule
from gcproto.dtypes import DType
from gcproto.manifest import AddressSpace, Section, TensorSpec

DOMAIN = SavedDomain(
    (0, 1, 2), ((0, 1), (2,)), True, "", (TensorSpec("a", (6,), 0), TensorSpec("b", (2, 2), 0)), "ab" * 16, 7,
    (2**64 - 1, 5), (Rule("*", "topk(ratio=0.01)", "all", (3, 4)),), "dc2-da2", (Rule("*", "fp16"),),
    True,
)  # fmt: skip
A: Piece = ("a", 0, 6)
B: Piece = ("b", 0, 4)


def floats(*values: float) -> F32:
    return np.array(values, np.float32)


def state(*blocks: tuple[SavedBlock, F32]) -> dict[str, Any]:
    return {"format": 1, **saved.write_domain("ddp.0", DOMAIN), **saved.write_part(0, "ddp.0", list(blocks))}


def one(*blocks: tuple[SavedBlock, F32]) -> Saved:
    return saved.read(state(*blocks), 0)["ddp.0"]


def found(s: Saved, *pieces: Piece, mine: bool = True) -> list[tuple[bool, int, bool, list[float], str]]:
    return [(x.owner, x.tag, x.held, x.values.tolist(), lost) for x, lost in s.states(pieces, mine)]


BOTH = SavedBlock(0, (A, B), 12, 9, True), np.arange(12, dtype=np.float32)
OWNED = SavedBlock(1, (A, B), 10, 4, True), np.arange(10, 20, dtype=np.float32)


def test_what_was_written_is_read_back_after_torch_has_saved_it() -> None:
    file = io.BytesIO()
    torch.save(state(BOTH, OWNED), file)
    file.seek(0)
    s = saved.read(torch.load(file, weights_only=True), 0)["ddp.0"]
    assert s.domain == DOMAIN and s.whole
    assert found(s, A, B) == [(False, 9, True, list(range(12)), ""), (True, 4, True, list(range(10, 20)), "")]
    assert s.used == {0, 1}


def test_keys_are_names_and_what_is_behind_a_residual_has_one_of_its_own() -> None:
    assert sorted(k for k, v in state(BOTH).items() if isinstance(v, torch.Tensor)) == [
        "rank 0/ddp.0/contribution/a[0:6]", "rank 0/ddp.0/contribution/a[0:6]+", "rank 0/ddp.0/contribution/b[0:4]",
    ]  # fmt: skip
    assert [saved.is_for(key, 1) for key in ("format", "domain/x", "rank 1/x", "rank 1/x/owner/a", "rank 10/x")] == [
        True, True, True, True, False,
    ]  # fmt: skip


def test_what_is_saved_is_in_memory_once_and_not_twice() -> None:
    alive: list[weakref.ref[F32]] = []

    def blocks() -> Iterator[tuple[SavedBlock, F32]]:
        for i in range(4):
            assert all(block() is None for block in alive[:-1]), "asked for one after the other"
            values = np.full(6, i, np.float32)
            alive.append(weakref.ref(values))
            yield SavedBlock(0, (("a", 6 * i, 6 * i + 6),), 6, 9, True), values

    found = saved.write_part(0, "ddp.0", blocks())
    assert [found[f"rank 0/ddp.0/contribution/a[{6 * i}:{6 * i + 6}]"].tolist() for i in range(4)] == [
        [i] * 6 for i in range(4)
    ]  # fmt: skip


def test_a_resumption_says_what_was_drawn_and_planned() -> None:
    assert one().resumed(True, True) == Resumed(
        b"\xab" * 16, 7, (2**64 - 1, 5), DOMAIN.rules, "dc2-da2", (Rule("*", "fp16"),), True
    )  # fmt: skip
    assert one().resumed(False, False) == Resumed(b"\xab" * 16, 7)


def test_a_checkpoint_that_does_not_say_who_made_its_plan_is_read_as_somebodys() -> None:
    old = json.loads(saved.write_domain("ddp.0", DOMAIN)["domain/ddp.0"])
    del old["planned"]
    (found,) = saved.read({**state(), "domain/ddp.0": json.dumps(old)}, 0).values()
    assert found.domain == msgspec.structs.replace(DOMAIN, planned=False)


def test_residuals_are_cut_anew_and_what_belongs_to_the_old_blocks_is_said_to_be_lost() -> None:
    (states,) = found(one(BOTH), ("a", 4, 6), ("b", 0, 2))
    assert states[:4] == (False, 0, True, [4.0, 5.0, 6.0, 7.0]) and "keeps of 'a' beside its residual" in states[4]
    halves = (SavedBlock(0, (("a", 0, 3),), 3, 9, False), floats(1, 2, 3)), (
        SavedBlock(0, (("a", 3, 6),), 3, 9, True), floats(4, 5, 6),
    )  # fmt: skip
    assert found(one(*halves), A) == [(False, 0, True, [1, 2, 3, 4, 5, 6], "")]
    assert found(one(*halves), A, B) == [(False, 0, True, [1, 2, 3, 4, 5, 6, 0, 0, 0, 0], "")]
    assert found(one(*halves), B) == []


def test_sums_of_a_block_that_another_node_owns_now_go_to_the_contribution() -> None:
    s = one((SavedBlock(0, (A,), 8, 9, False), floats(1, 1, 1, 1, 1, 1, 7, 8)), OWNED)
    assert found(s, A, mine=False) == [(False, 9, True, [11, 12, 13, 14, 15, 16, 7, 8], "")]
    assert found(one(OWNED), ("b", 1, 3), mine=False) == [(False, 0, True, [17, 18], "")]


@pytest.mark.parametrize("pieces", [(A, B), (("a", 4, 6), ("b", 0, 2))], ids=["whole", "cut"])
def test_what_an_owner_kept_beside_its_sums_is_said_to_be_lost_where_another_node_owns_the_block(pieces: Any) -> None:
    owned = SavedBlock(1, (A, B), 12, 9, True), np.arange(12, dtype=np.float32)
    (states,) = found(one(owned), *pieces, mine=False)
    assert "keeps of 'a' beside its residual" in states[4]
    owned[1][10:] = 0.0
    (states,) = found(one(owned), *pieces, mine=False)
    assert states[4] == "", "zeros are what a codec begins with"


def test_blocks_are_cut_as_the_address_space_cuts_them() -> None:
    section = Section(
        0, (TensorSpec("x", (100_000,), 0), TensorSpec("e", (0,), 0), TensorSpec("y", (40_000,), 0)), (2,)
    )
    blocks = AddressSpace(2, 2, 256 << 10).append(section)
    cut = saved.cut(section, blocks)
    assert cut == [(("x", 0, 65536),), (("x", 65536, 100_000),), (("y", 0, 40_000),)]
    section = Section(0, (TensorSpec("x", (3,), 0), TensorSpec("y", (2, 2), 0)))
    assert saved.cut(section, AddressSpace(2, 1, 4096).append(section)) == [(("x", 0, 3), ("y", 0, 4))]


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda s: s.pop("format"), "there is no 'format'"),
        (lambda s: s.update(format=2), "expected a checkpoint of format 1, got 2"),
        (lambda s: s.update({"domain/ddp.0": "{}"}), "expected the JSON text of a SavedDomain"),
        (lambda s: s.update({"domain/ddp.0": 3}), "expected the JSON text of a SavedDomain"),
        (lambda s: s.update({"domain/ddp.0": s["domain/ddp.0"].replace("ab" * 16, "xy")}), "non-hexadecimal"),
        (
            lambda s: s.update({"domain/ddp.0": s["domain/ddp.0"].replace("ab" * 16, "ab" * 17)}),
            "1 to 16 bytes, got 17",
        ),
        (lambda s: s.update({"domain/ddp.0": s["domain/ddp.0"].replace("ab" * 16, "")}), "1 to 16 bytes, got 0"),
        (lambda s: s.update({"domain/ddp.0": s["domain/ddp.0"].replace(str(2**64 - 1), str(2**64))}), "64 bits"),
        (lambda s: s.update({"rank 0/ddp.0": s["rank 0/ddp.0"].replace(",9,", f",{2**64},")}), "64 bits"),
        (lambda s: s.update({"domain/ddp.0": s["domain/ddp.0"].replace("[6]", "[-6]")}), "a dimension is negative"),
        (lambda s: s.update({"domain/ddp.0": s["domain/ddp.0"].replace("[6],0", "[6],99")}), "unknown dtype code 99"),
        (lambda s: s.update({"domain/ddp.0": s["domain/ddp.0"].replace('"steps":7', '"steps":-1')}), "SavedDomain"),
        (lambda s: s.update({"rank 0/ddp.0": "["}), "expected the JSON text of a SavedPart"),
        (lambda s: s.pop("rank 0/ddp.0/contribution/b[0:4]"), "b[0:4]: expected a tensor, got NoneType"),
        (
            lambda s: s.update({"rank 0/ddp.0/contribution/a[0:6]": torch.zeros(5)}),
            "of shape [6], got torch.float32 of",
        ),
        (lambda s: s.update({"rank 0/ddp.0/contribution/a[0:6]": torch.zeros(6).half()}), "got torch.float16"),
        (lambda s: s.update({"rank 0/ddp.0/contribution/a[0:6]": torch.full((6,), float("nan"))}), "'a' is not finite"),
    ],
)
def test_what_is_no_checkpoint_is_refused_by_name(change: Any, part: str) -> None:
    wrong = state(BOTH)
    change(wrong)
    with pytest.raises(StateMismatch) as error:
        saved.read(wrong, 0)
    assert part in str(error.value) and "What to do" in str(error.value)


@pytest.mark.parametrize(
    "block", [SavedBlock(0, (), 4, 0, True), SavedBlock(0, (("a", 3, 3),), 4, 0, True), SavedBlock(1, (A,), 5, 0, True),
              SavedBlock(0, (("a", -2, 4),), 6, 0, True)],
)  # fmt: skip
def test_a_block_that_cannot_be_is_refused(block: SavedBlock) -> None:
    wrong = state()
    wrong["rank 0/ddp.0"] = msgspec.json.encode(saved.SavedPart((block,))).decode()
    with pytest.raises(StateMismatch, match="no block is cut"):
        saved.read(wrong, 0)
    with pytest.raises(StateMismatch, match="there is no 'format'"):
        saved.read([], 0)  # type: ignore[arg-type]


def test_a_rank_whose_part_is_not_there_is_told_of() -> None:
    assert not saved.read(state(BOTH), 2)["ddp.0"].whole
    assert saved.read({"format": 1}, 0) == {}


def test_which_tensors_fit() -> None:
    s = one()
    specs = s.specs()
    assert saved.check_tensor(s, TensorSpec("b", (2, 2), 0), specs) == ""
    assert "'b' shape [4] dtype F32 has shape [2, 2]" in saved.check_tensor(s, TensorSpec("b", (4,), 0), specs)
    assert saved.check_tensor(s, TensorSpec("b", (2, 2), int(DType.BF16)), specs) == ""
    assert "is never compressed, and is F32" in saved.check_tensor(s, TensorSpec("b", (2, 2), int(DType.F64)), specs)
    assert "is not in the checkpoint" in saved.check_tensor(s, TensorSpec("c", (4,), 0), specs)
    s.domain = msgspec.structs.replace(s.domain, scoped=False)
    assert saved.check_tensor(s, TensorSpec("c", (4,), 0), specs) == "", "single tensors come as they come"
