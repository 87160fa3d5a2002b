"""The one door through which models and tokenizers are loaded, and what is read off them."""

from trtllm_kvmap.models.config import rope_from_config, spec_from_config
from trtllm_kvmap.models.digest import fingerprint_of
from trtllm_kvmap.models.load import (
    ModelDescription,
    describe_model,
    describe_pair,
    load_model,
    quiet_loading,
    read_spec,
    require_described,
)
from trtllm_kvmap.models.loaded import KnownModel, LoadedModel, RemoteModel, require_same_tokens
from trtllm_kvmap.models.stored import read_fingerprint
from trtllm_kvmap.models.tokenizer import load_tokenizer, tokenise, tokenise_chat, tokenizer_digest

__all__ = [
    "KnownModel",
    "LoadedModel",
    "ModelDescription",
    "RemoteModel",
    "describe_model",
    "describe_pair",
    "fingerprint_of",
    "load_model",
    "load_tokenizer",
    "quiet_loading",
    "read_fingerprint",
    "read_spec",
    "require_described",
    "require_same_tokens",
    "rope_from_config",
    "spec_from_config",
    "tokenise",
    "tokenise_chat",
    "tokenizer_digest",
]
