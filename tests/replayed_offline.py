"""Script: `chains_offline.py` with each step's loads started as vLLM's Model Runner V2 starts those of a step that it replays
as one CUDA graph: by its own class, outside a forward context, the attention metadata as a keyword.

python replayed_offline.py HOME MODEL_DIR '[[["a", "b"], [5]], ...]'
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import chains_offline


@contextmanager
def as_v2_does(scheduler_output: Any, defer_finalize: bool = False) -> Iterator[Any]:
    from vllm.distributed.kv_transfer import get_kv_transfer_group
    from vllm.forward_context import get_forward_context, override_forward_context
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector

    class Worker(ActiveKVConnector):
        def __init__(self) -> None:
            self.kv_connector = get_kv_transfer_group()
            self.vllm_config = self.kv_connector._vllm_config
            self._pending_load_kwargs, self._disabled = None, False

    worker, output = Worker(), KVConnectorOutput()
    attn_metadata = get_forward_context().attn_metadata
    with override_forward_context(None):
        worker.pre_forward(scheduler_output, SimpleNamespace(idx_mapping=[], req_ids=[], num_tokens=1), attn_metadata)
    yield output
    with override_forward_context(None):
        vars(output).update(vars(worker.post_forward(scheduler_output.finished_req_ids)))


if __name__ == "__main__":
    from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

    KVConnectorModelRunnerMixin._get_kv_connector_output = staticmethod(as_v2_does)
    chains_offline.run()
