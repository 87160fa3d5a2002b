"""What the engine's configuration names: this module and a pair of its classes.

A target: KvMapScheduler and KvMapWorker. A source: KvExportScheduler and KvExportWorker.

    llm = LLM(model, kv_connector_config=KvCacheConnectorConfig(
        connector_module="trtllm_kvmap.inject.trtllm.connector",
        connector_scheduler_class="KvMapScheduler",
        connector_worker_class="KvMapWorker",
    ))

with the environment variable TRTLLM_KVMAP_CONNECTOR naming the settings (ConnectorConfig, as JSON).
"""

from trtllm_kvmap.inject.trtllm.export import KvExportScheduler, KvExportWorker
from trtllm_kvmap.inject.trtllm.scheduler import KvMapScheduler
from trtllm_kvmap.inject.trtllm.worker import KvMapWorker

__all__ = ["KvExportScheduler", "KvExportWorker", "KvMapScheduler", "KvMapWorker"]
