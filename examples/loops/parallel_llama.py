"""A Llama whose layers are tensor and sequence parallel; its logits stay in parts for the loss.

parallel.py trains it. It can be planned without the ranks:

    python -m fsdp_mlir.capture --model parallel_llama:llama --meta --mesh data=4,tensor=2 \\
        --loss parallel_llama:loss_fn --loss-parallel \\
        --inputs 'tokens=int64[4,32]<128' 'labels=int64[4,32]<128' -o model.pt
"""

from models import Llama
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

VOCABULARY, LENGTH = 128, 32

# Between layers each rank of the tensor axis has a part of the sequence.
ROOT = {
    "embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    # The loss takes logits of which each rank has a part of the vocabulary.
    "output": ColwiseParallel(
        input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
    ),
}
COLUMNS = ColwiseParallel(input_layouts=Shard(1))
ROWS = RowwiseParallel(output_layouts=Shard(1))
LAYER = {
    "norm1": SequenceParallel(),
    **dict.fromkeys(("q", "k", "v", "gate", "up"), COLUMNS),
    **dict.fromkeys(("out", "down"), ROWS),
    "norm2": SequenceParallel(),
}


def llama(mesh: DeviceMesh) -> nn.Module:
    model = Llama(VOCABULARY, LENGTH)
    model.init_weights()
    parallelize_module(model, mesh["tensor"], ROOT)
    for layer in model.layers.values():
        parallelize_module(layer, mesh["tensor"], LAYER)
    return model


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))
