import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

torch.set_num_threads(1)
sys.path.append(str(Path(__file__).parents[1] / "parity"))  # ranks


@pytest.fixture(scope="module", autouse=True)
def no_process_group() -> Iterator[None]:
    """That of a rank alone, which fully_shard makes, ends with a file's tests."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
