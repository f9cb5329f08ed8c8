"""Options that have names: the schemes of other systems, spelled as an option prints itself, on a device DEV.

What may live here: those spellings. What may not: who compresses which tensor.
"""

from __future__ import annotations

from functools import lru_cache

from gcserver.planner.options import Constraints, Device, Option, options

#: HiTopKComm: each GPU's shard is encoded once.
HITOPKCOMM = "intra-reduce-scatter > comp[DEV] > inter-allgather* > intra-allgather* > decomp[DEV]"
#: Compression for the inter link alone, indivisible.
INTER_ALLGATHER = "intra-reduce-scatter > comp[DEV] > inter-allgather* > decomp[DEV] > intra-allgather"
#: HiPress and BytePS-Compress: every node aggregates a share of the payloads and encodes it again.
INTER_ALLTOALL = (
    "intra-reduce-scatter > comp[DEV] > inter-alltoall* > decomp[DEV] > comp[DEV] > inter-allgather* > decomp[DEV] > "
    "intra-allgather"
)
_BOTH = (
    "comp[DEV] > intra-alltoall* > decomp[DEV] > comp[DEV] > inter-alltoall* > decomp[DEV] > comp[DEV] > "
    "inter-allgather* > "
)
#: Compression for both links, the last all-gather uncompressed or compressed.
ALLTOALL_ALLTOALL = (_BOTH + "decomp[DEV] > intra-allgather", _BOTH + "intra-allgather* > decomp[DEV]")


@lru_cache(maxsize=64)
def scheme(text: str, device: Device) -> Option:
    """The option that ``text`` spells, with DEV for ``device``; KeyError if the tree has none such."""
    one = Constraints(gpu=device is Device.GPU, cpu=device is Device.CPU)
    return {str(o): o for o in options(one)}[text.replace("DEV", device.name)]
