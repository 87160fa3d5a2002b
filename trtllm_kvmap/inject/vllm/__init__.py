"""The connector core in vLLM: mapped KV in its paged pool, for requests that ask for it.

    config = KVTransferConfig(
        kv_connector="KvMapConnector",
        kv_connector_module_path="trtllm_kvmap.inject.vllm.connector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"kvmap": "p.kvmap.safetensors", "blocks": "my_module:BLOCKS"},
    )
    engine = LLM(model, kv_transfer_config=config)

A request that carries the ``cache_salt`` of a hand-over is given its mapped blocks, and
``kv_transfer_params["kvmap"]`` of its output says what became of it. Read with vLLM 0.32.0, whose
CPU backend it runs on.
"""
