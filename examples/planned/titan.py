"""torchtitan's Llama 3 on a mesh that is only planned: a factory for `fsdp_mlir.capture --mesh`.

    python -m fsdp_mlir.capture --model titan:llama3 --kwargs '{"flavor": "8B"}' --meta \\
        --mesh data=128,tensor=8 --loss-parallel --loss titan:loss --config fsdp.yaml \\
        --inputs 'tokens=int64[1,8192]<128256' 'labels=int64[1,8192]<128256' -o tensor8.pt
    fsdp-opt tensor8.pt --config fsdp.yaml --world-size 128 --emit stats --device h100
"""

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from torchtitan.models.llama3 import Transformer, llama3_args
from torchtitan.models.llama3.infra.parallelize import apply_tp


def llama3(mesh: DeviceMesh, flavor: str, length: int = 8192) -> nn.Module:
    arguments = llama3_args[flavor]
    arguments.max_seq_len = length
    model = Transformer(arguments)
    if mesh["tensor"].size() > 1:
        apply_tp(model, mesh["tensor"], loss_parallel=True, enable_float8_tensorwise_tp=False)
    return model


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))
