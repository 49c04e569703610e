"""With a driver that does not tell registered memory from pageable: where the mirrors lie instead."""

from __future__ import annotations

import json

import swapckpt
from integration import npu
from integration.npu.training import Training, differences
from swapckpt.optimizer import swap_of

if __name__ == "__main__":
    npu.load()
    before = npu.pinned_nbytes()
    plain = Training({"fused": True})
    training = Training({"fused": True}, swapckpt.SwapConfig(swap_times=3, min_numel=0))
    plain.step(3)
    training.step(3)
    swap = swap_of(training.optimizer)
    moved = [tensor for batch in swap.table.batches for tensor in batch.tensors]
    result = {
        "host_nbytes": swap.device.ledger.host_nbytes,
        "pinned_nbytes": npu.pinned_nbytes() - before,
        # What copies use. The mirrors themselves, which alias parts of it, this driver does not recognise.
        "all pinned": all(tensor.segment.bytes(tensor.region).is_pinned() for tensor in moved),
        "differences": differences(training.values(), plain.values()),
    }
    print(json.dumps(result), flush=True)
