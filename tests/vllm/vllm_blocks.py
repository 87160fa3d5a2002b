"""The objects that the connector's settings name: vLLM imports them into its own process, which is
the tests'.
"""

from connector_world import Breakable

from trtllm_kvmap.inject.connector.export import Exports

BLOCKS, EXPORTS = Breakable(), Exports()
